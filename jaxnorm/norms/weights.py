"""Norms of learned matrices: weight norm, weight standardization and spectral norm."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes, integer, other_axes, unsplit
from jaxnorm.arguments.dtypes import compute_dtype
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import EpsilonIn, Param
from jaxnorm.core.call import prepare, run
from jaxnorm.engine.exponents import scale_down, scale_exponent
from jaxnorm.engine.reference import times
from jaxnorm.engine.sharding import sharded_by_compiler, unsharded


@known_keywords
def weight_norm(
    kernel: ArrayLike,
    /,
    scale: Param = None,
    *,
    feature_axes: int | Sequence[int] | None = -1,
    centered: bool = False,
    epsilon: ArrayLike = 1e-12,
    epsilon_in: EpsilonIn = "var",
    dtype: DTypeLike | None = None,
    full_range: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Normalize the weights of each feature to a length (Salimans & Kingma 2016, arXiv 1602.07868).

    ``kernel / sqrt(sum(kernel**2) + epsilon) * scale``. The sum runs over all axes except the
    feature axes. Centered weight norm (Huang et al. 2017, ICCV) first subtracts the
    mean over these axes. With ``centered=True, epsilon=1e-2, epsilon_in="max"`` it is the scaled
    weight standardization of NFNets (Brock et al. 2021, arXiv 2102.06171), whose gain is ``scale``.

    Args:
      kernel: floating array, for example ``(..., in, out)``. In float32 its elements must be
        below 1e17 unless ``full_range`` is True: squares of larger elements, and their
        gradients, leave the range of the dtype.
      scale: length of each feature's weights, of the shape of the feature axes and of any
        floating dtype. It is cast to the dtype of the sums, which is float32 at least.
      feature_axes: the axes that are not reduced; None or () reduces all.
      centered: whether the mean of each feature's weights is subtracted first.
      epsilon: added to the sum of squares.
      epsilon_in: ``"std"`` adds ``epsilon`` to the root of the sum; with ``"max"`` it is the least
        root that divides.
      dtype: dtype of the result; by default the dtype of ``kernel``.
      full_range: as in every norm, see :class:`NormOptions`.
      implementation: as in every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``kernel``.

    Raises:
      TypeError: integer ``kernel``.
      ValueError: axes or scale that do not fit; an implementation that cannot take these arguments.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.weight_norm(jnp.array([[3.0], [4.0]]), jnp.array([5.0])).round(5).tolist()
    [[3.0], [4.0]]
    """
    kernel = validation.floating(kernel, "kernel")
    features = kernel_features(feature_axes, kernel.ndim)
    reduction = unsplit(kernel.shape, other_axes(features, kernel.ndim))
    # An empty kernel has groups of no elements.
    size = max(reduction.group_size, 1)
    (factor,) = aligned(kernel.shape, features, scale=scale)
    # Weight norm is RMS norm with another gain and epsilon, because
    # sum(k**2) + e = size * (mean(k**2) + e / size), and of roots likewise by sqrt(size).
    # A traced epsilon may be half precision, in which e / size would be rounded.
    epsilon = validation.number_or_traced("epsilon", epsilon)
    epsilon = (
        epsilon.astype(compute_dtype(epsilon.dtype)) if isinstance(epsilon, jax.Array) else epsilon
    ) / (size if epsilon_in == "var" else math.sqrt(size))
    call = prepare(
        kernel,
        reduction,
        scale=times(_root(kernel, size), factor),
        epsilon=epsilon,
        epsilon_in=epsilon_in,
        centered=centered,
        dtype=dtype,
        full_range=full_range,
        implementation=implementation,
    )
    return run(call)


@known_keywords
def weight_standardization(
    kernel: ArrayLike,
    /,
    scale: Param = None,
    *,
    feature_axes: int | Sequence[int] | None = -1,
    by_fan_in: bool = False,
    epsilon: ArrayLike = 1e-6,
    epsilon_in: EpsilonIn = "var",
    correction: float = 0,
    dtype: DTypeLike | None = None,
    full_range: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Standardize the weights of each feature (Qiao et al. 2019, arXiv 1903.10520).

    ``(kernel - mean) / sqrt(var + epsilon) * scale``. Mean and variance are taken over all axes
    except the feature axes. Scaled weight standardization (Brock et al. 2021, arXiv 2101.08692)
    also divides by the root of the number of weights of a feature, the fan-in. These arguments
    give the weights of other programs:

    | program | arguments |
    |---|---|
    | ``StdConv2d`` of timm | none |
    | BiT | ``epsilon=1e-10`` |
    | the authors' ``Conv2d`` | ``epsilon=1e-5, epsilon_in="std", correction=1`` |
    | ``ScaledStdConv2d`` of timm | ``by_fan_in=True``, scale: ``gain * gamma`` |
    | NFNets by DeepMind | :func:`weight_norm` with ``centered=True``, see there |

    Args:
      kernel: floating array, for example ``(..., in, out)``. In float32 its elements must be
        below 1e17 unless ``full_range`` is True, as in :func:`weight_norm`.
      scale: gain of each feature, of the shape of the feature axes and of any floating dtype. It is
        cast to the dtype of the statistics, which is float32 at least.
      feature_axes: the axes that are not reduced; None or () reduces all.
      by_fan_in: whether to divide by the root of the number of weights of a feature, too.
      epsilon: added to the variance.
      epsilon_in: ``"std"`` adds ``epsilon`` to the standard deviation; with ``"max"`` it is the
        least standard deviation that divides.
      correction: 1 divides by n - 1 in the variance.
      dtype: dtype of the result; by default the dtype of ``kernel``.
      full_range: as in every norm, see :class:`NormOptions`.
      implementation: as in every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``kernel``. Equal weights of a feature give 0.

    Raises:
      TypeError: integer ``kernel``.
      ValueError: axes or scale that do not fit; an implementation that cannot take these arguments.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> kernel = jnp.array([[1.0], [3.0], [1.0], [3.0]])
    >>> jn.weight_standardization(kernel, epsilon=0.0)[:, 0].tolist()
    [-1.0, 1.0, -1.0, 1.0]
    >>> jn.weight_standardization(kernel, epsilon=0.0, by_fan_in=True)[:, 0].tolist()
    [-0.5, 0.5, -0.5, 0.5]
    """
    kernel = validation.floating(kernel, "kernel")
    features = kernel_features(feature_axes, kernel.ndim)
    reduction = unsplit(kernel.shape, other_axes(features, kernel.ndim))
    (factor,) = aligned(kernel.shape, features, scale=scale)
    if validation.flag("by_fan_in", by_fan_in):
        factor = times(_root(kernel, max(reduction.group_size, 1)), factor)
    call = prepare(
        kernel,
        reduction,
        scale=factor,
        epsilon=epsilon,
        epsilon_in=epsilon_in,
        correction=correction,
        dtype=dtype,
        full_range=full_range,
        implementation=implementation,
    )
    return run(call)


def _root(kernel: jax.Array, size: int) -> jax.Array:
    """Return 1 / sqrt(size), as it broadcasts against the kernel."""
    return jnp.full((1,) * kernel.ndim, 1 / math.sqrt(size), compute_dtype(kernel.dtype))


def kernel_features(feature_axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the feature axes of a kernel, none of them for None and for ()."""
    return (
        ()
        if feature_axes is None or np.size(feature_axes) == 0
        else canonical_axes(feature_axes, rank, "feature_axes")
    )


@known_keywords
def spectral_norm(
    kernel: ArrayLike, /, u: ArrayLike, *, n_steps: int = 1, epsilon: float = 1e-12
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divide weights by their largest singular value (Miyato et al. 2018, arXiv 1802.05957).

    ``kernel / sigma``. Sigma is the largest singular value, estimated by power iteration.

    Args:
      kernel: real floating array of rank 2 or more. The last axis is the output; the other
        axes are flattened. Elements may have any size, but subnormal ones count as 0 on a CPU.
      u: ``(1, out)``, the left vector of the last call, or random.
      n_steps: the number of power iterations in this call, at least 1.
      epsilon: added to sums of squares, after the kernel was divided by a power of two so that
        its largest element is between 1/2 and 1.

    Returns:
      The kernel divided by sigma (by 1 where sigma is 0), the new ``u``, and ``sigma``, the last
      two in float32 at least. The vectors are constants under differentiation, sigma is not. A
      kernel that is 0 or not finite leaves ``u`` as it was.

    Raises:
      TypeError: integer or complex ``kernel``, complex ``u``.
      ValueError: a kernel of rank below 2, a ``u`` that does not fit, ``n_steps`` below 1.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> kernel, u = jnp.diag(jnp.array([3.0, 1.0])), jnp.array([[1.0, 0.0]])
    >>> kernel, u, sigma = jn.spectral_norm(kernel, u)
    >>> round(float(sigma), 5)
    3.0
    """
    kernel = validation.real(kernel, "kernel")
    if kernel.ndim < 2:
        raise ValueError(f"kernel must have rank 2 or more: got shape {kernel.shape}.")
    if integer(n_steps, "n_steps must be an integer of at least 1") < 1:
        raise ValueError(f"n_steps must be an integer of at least 1: got {n_steps!r}.")
    if jnp.shape(u) != (1, kernel.shape[-1]):
        raise ValueError(
            f"u must have shape {(1, kernel.shape[-1])} for a kernel of shape {kernel.shape}: got "
            f"{jnp.shape(u)}."
        )
    if jnp.iscomplexobj(u):
        raise TypeError(f"u must be real: got {jnp.result_type(u)}.")
    u = jnp.asarray(u, compute_dtype(kernel.dtype))
    run = partial(_by_largest_singular_value, n_steps, epsilon)
    # The vector and sigma belong to the whole kernel, so they are not sharded.
    whole = unsharded(kernel)
    return sharded_by_compiler(run, (jax.typeof(kernel).sharding, whole, whole))(kernel, u)


def _by_largest_singular_value(
    n_steps: int, epsilon: float, kernel: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the results of :func:`spectral_norm`, for arguments that have been checked."""
    matrix = kernel.reshape(math.prod(kernel.shape[:-1]), kernel.shape[-1]).astype(u.dtype)
    exponent = scale_exponent(
        jnp.abs(lax.stop_gradient(matrix)).max(initial=0), jnp.finfo(matrix.dtype).minexp
    )
    # With the largest element between 1/2 and 1 no sum of squares leaves the range.
    matrix = scale_down(matrix, exponent)
    # A zero vector stays zero in every step of the iteration, so start elsewhere.
    u = jnp.where((u != 0).any(), u, 1)
    # At convergence the derivative of sigma = v A u' by A is v' u, so the singular
    # vectors may be constants.
    constant, new = lax.stop_gradient((matrix, u))
    for _ in range(n_steps):
        v = weight_norm(new @ constant.T, feature_axes=0, epsilon=epsilon)
        new = weight_norm(v @ constant, feature_axes=0, epsilon=epsilon)
    sigma = (v @ matrix @ new.T)[0, 0]
    # Division by this one undoes the power of two, where sigma is 0.
    one = scale_down(jnp.ones((), matrix.dtype), exponent)
    normalized = (
        (matrix / jnp.where(sigma != 0, sigma, one)).astype(kernel.dtype).reshape(kernel.shape)
    )
    return (
        normalized,
        jnp.where((new != 0).any() & jnp.isfinite(new).all(), new, u),
        scale_down(sigma, -exponent),
    )
