"""Norms that divide each vector by its length: unit norm and scale norm.

    unit     y = x / max(||x||, epsilon) * scale + bias      a gain for each element, or none
    scale    the same, with one number as the gain of all elements

The length of order 2 is ``sqrt(n mean(x**2))`` of n elements, so that the engine of all norms
computes it. Other orders divide by their largest element first, so that no power leaves the range.
"""

import math
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, Reduction, is_static, unsplit, whole
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import AxisName, NormOptions, Param
from jaxnorm.core.call import prepare, run
from jaxnorm.core.plan import select
from jaxnorm.core.statistics import moments
from jaxnorm.engine.collectives import across, hashable
from jaxnorm.engine.exponents import scale_down, scale_exponent
from jaxnorm.engine.groups import mask_fill, total_weight
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Stats, plus, times


@by_keyword
def unit_norm(
    x: ArrayLike,
    /,
    *,
    ord: float = 2,
    axes: Axes = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-12,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Divide each vector by its length, as for cosines (Wang et al. 2017, arXiv 1704.06369).

    Unit normalization, also called L2 normalization:
    ``y = x / max(sqrt(sum(|x|**2)), epsilon) * scale + bias``. With another ``ord`` p the length is
    ``sum(|x|**p)**(1 / p)``, and the largest ``|x|`` for infinity. It is ``normalize`` of
    ``torch.nn.functional``, and with its defaults UnitNormalization of Keras.

    Args:
      x: floating array ``(..., C)``.
      ord: the order p of the length, a number of at least 1 or ``math.inf``.
      axes: the reduction axes, which are the feature axes too.
      scale: gain of the shape of the reduction axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: the least length that divides. The gradient through a shorter length is 0.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0. Weights multiply the
        summands; the largest element has none.
      **options: the options of every norm, see :class:`NormOptions`. ``full_range`` is True by
        default: elements of any size are right. Kernels take order 2 alone, without a mask.

    Returns:
      An array of the shape of ``x``. A vector of zeros stays 0.

    Raises:
      TypeError: integer ``x``.
      ValueError: an order below 1; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[3.0, -3.0, 3.0, -3.0], [0.0, 0.0, 0.0, 0.0]])
    >>> jn.unit_norm(x).tolist()
    [[0.5, -0.5, 0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]
    >>> jn.unit_norm(x[0], ord=1).tolist(), jn.unit_norm(x[0], ord=jnp.inf).tolist()
    ([0.25, -0.25, 0.25, -0.25], [1.0, -1.0, 1.0, -1.0])
    """
    x = validation.floating(x)
    reduced = whole(axes, x.shape)
    return divide_by_length(
        x,
        unsplit(x.shape, reduced),
        reduced,
        ord=ord,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        **options,
    )


@by_keyword
def scale_norm(
    x: ArrayLike,
    /,
    scale: ArrayLike,
    *,
    axes: Axes = -1,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Give each vector one learned length (Nguyen & Salazar 2019, arXiv 1910.05895).

    Scale normalization: ``y = scale * x / max(sqrt(sum(|x|**2)), epsilon) + bias``.

    Args:
      x: floating array ``(..., C)``.
      scale: the length of all vectors, one number of any floating dtype. It is cast to the dtype of
        the statistics, which is float32 at least. The paper starts from ``sqrt(C)``.
      axes: the reduction axes.
      bias: shift of the shape of the reduction axes, of any floating dtype, cast likewise.
      epsilon: the least length that divides. The gradient through a shorter length is 0.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`. ``full_range`` is True by
        default: elements of any size are right.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``.
      ValueError: a scale that is not one number; axes, mask or bias that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.scale_norm(jnp.array([[3.0, -3.0, 3.0, -3.0]]), 10.0).tolist()
    [[5.0, -5.0, 5.0, -5.0]]
    """
    x = validation.floating(x)
    if scale is None:
        raise TypeError("scale must be one number: got None. Use unit_norm for length 1.")
    reduced = whole(axes, x.shape)
    return divide_by_length(
        x,
        unsplit(x.shape, reduced),
        reduced,
        gain=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        **options,
    )


def divide_by_length(
    x: jax.Array,
    reduction: Reduction,
    features: tuple[int, ...],
    *,
    ord: float = 2,
    gain: ArrayLike | None = None,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike,
    **options: Any,
) -> jax.Array:
    """Return the output of unit norm for an x that is checked; ``gain`` is one number.

    Options are ``where``, ``mask_name`` and the options of every norm.
    """
    scale, bias = aligned(x.shape, features, scale=scale, bias=bias)
    if gain is not None:
        scale = _one_number(gain, x.ndim)
    if (ord := _checked(ord)) != 2:
        return _of_order(ord, x, reduction, scale, bias, epsilon, **options)
    own = {"bias": bias, "centered": False, "epsilon_in": "max"}
    options = {"full_range": True, **options, **own}
    count = options.get("where") is None and options.get("axis_name") is None
    if not (count and is_static(x.shape)):
        call = prepare(
            x, reduction, scale=scale, epsilon=epsilon, adjust=_sum_of_squares, **options
        )
        return run(call)
    # The number of elements is known, so that kernels may run: with r the root mean square,
    # max(sqrt(n) r, e) = sqrt(n) max(r, e / sqrt(n)).
    root = math.sqrt(max(reduction.group_size, 1))
    epsilon = validation.number_or_traced("epsilon", epsilon)
    if isinstance(epsilon, jax.Array):  # half precision would round the quotient
        epsilon = epsilon.astype(compute_dtype(epsilon.dtype))
    share = jnp.full((1,) * x.ndim, 1 / root, real_dtype(compute_dtype(x.dtype)))
    return run(prepare(x, reduction, scale=times(share, scale), epsilon=epsilon / root, **options))


def _one_number(gain: ArrayLike, rank: int) -> jax.Array:
    """Return the gain of scale norm, as it broadcasts against x."""
    gain = validation.floating(float(gain) if isinstance(gain, int) else gain, "scale")
    if gain.size != 1:
        raise ValueError(
            f"scale must be one number: got shape {gain.shape}. Use unit_norm for a gain of each "
            "feature."
        )
    return gain.reshape((1,) * rank)


def _checked(ord: float) -> float:
    """Return the order of a length, if it is one."""
    try:
        known = float(ord)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(f"ord must be a static number: got {ord!r}.") from None
    if not known >= 1:
        raise ValueError(f"ord must be at least 1, or infinity: got {known}.")
    return known


def _sum_of_squares(loops: PlainLoops, stats: Stats, _: None) -> Stats:
    """Return the sum of squares as the variance, so that its root is the length."""
    return stats._replace(var=stats.var * total_weight(loops.spec, stats.scaling))


def _of_order(
    ord: float,
    x: jax.Array,
    reduction: Reduction,
    scale: jax.Array | None,
    bias: jax.Array | None,
    epsilon: ArrayLike,
    *,
    where: Param = None,
    mask_name: str = "where",
    axis_name: AxisName = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    full_range: bool = False,
    batch_invariant: bool = False,
) -> jax.Array:
    """Return the output for a length of another order than 2; its range is always full."""
    if batch_invariant:
        raise ValueError(f"batch_invariant=True must have ord=2: got {ord}.")
    select(implementation, None, x)  # refuses kernels, in words
    mask = validation.mask(where, x.shape, mask_name)
    params = {name: a.dtype for name, a in (("scale", scale), ("bias", bias)) if a is not None}
    return _divided(
        x,
        None if mask is None else jnp.broadcast_to(mask, x.shape),
        scale,
        bias,
        validation.number_or_traced("epsilon", epsilon),
        ord=ord,
        axes=reduction.axes,
        axis_name=hashable(axis_name),
        dtype=validation.output_dtype(dtype, x=x.dtype, **params),
    )


@partial(jax.jit, static_argnames=("ord", "axes", "axis_name", "dtype"))
def _divided(x, where, scale, bias, epsilon, *, ord, axes, axis_name, dtype) -> jax.Array:
    """Divide by the length and apply scale and bias, for arguments that are checked."""
    # With s a power of two that is constant under differentiation,
    #     x / max(||x||, e) = (x / s) / max(||x / s||, e / s)
    # It keeps the largest element of x / s between 1/2 and 1, unless e is far larger: e / s then
    # stays in the range.
    u = mask_fill(x.astype(compute_dtype(x.dtype)), where)
    largest = partial(_largest, axes=axes, axis_name=axis_name)
    size = jnp.abs(lax.stop_gradient(u))
    epsilon = jnp.asarray(epsilon, size.dtype)
    least = jnp.where(
        epsilon > 0, jnp.frexp(lax.stop_gradient(epsilon))[1] - 60, -jnp.finfo(size.dtype).maxexp
    )
    exponent = scale_exponent(largest(size), least)
    u, epsilon = scale_down(u, exponent), scale_down(epsilon, exponent)
    # at 0 the absolute value has derivative 0, as in PyTorch, and not that of JAX, 1
    size = jnp.where(u == 0, 0, jnp.abs(jnp.where(u == 0, 1, u)))
    length = _length(size, where, ord, axes, axis_name)
    divisor = jnp.where(length < epsilon, epsilon, length)
    y = u / jnp.where(divisor == 0, 1, divisor).astype(u.dtype)
    return mask_fill(plus(times(y, scale), bias), where).astype(dtype)


def _largest(size: jax.Array, axes: tuple[int, ...], axis_name: AxisName) -> jax.Array:
    """Return the largest element of each vector, 0 for a vector without elements."""
    return across(lax.pmax, size.max(axes, keepdims=True, initial=0), axis_name)


def _length(
    size: jax.Array,
    where: jax.Array | None,
    ord: float,
    axes: tuple[int, ...],
    axis_name: AxisName,
) -> jax.Array:
    """Return the length of each vector, given the absolute values of its elements."""
    largest = _largest(lax.stop_gradient(size), axes, axis_name)
    if ord == math.inf:
        # the mean over the elements that are the largest, so that they share its gradient
        reached = size == largest if where is None else (size == largest) & where.astype(bool)
        mean = moments(size, axes, where=reached, axis_name=axis_name).mean
        return jnp.where(jnp.isnan(largest), largest, mean)
    # with the largest element at 1 no power of it leaves the range, whatever the order
    unit = jnp.where(largest > 0, largest, 1)
    powers = (size / unit) if ord == 1 else (size / unit) ** ord
    found = moments(powers, axes, where=where, axis_name=axis_name)
    total = found.mean * found.count.astype(size.dtype)
    if ord != 1:  # the root has no derivative at 0
        total = jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / ord))
    return unit * total
