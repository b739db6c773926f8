"""RMS norm with a gate: in front of the norm, as in Mamba 2, or behind it, as in Gated DeltaNet."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, Reduction, in_groups, unsplit, whole
from jaxnorm.arguments.dtypes import compute_dtype, needs_exponent, promoted
from jaxnorm.arguments.features import checked_divisor
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run
from jaxnorm.core.rounding import Rounding
from jaxnorm.engine.groups import mask_fill
from jaxnorm.engine.sharding import alongside

Activation = Literal["silu", "sigmoid"]


@jax.custom_jvp
def silu(x: jax.Array) -> jax.Array:
    """Return ``x * sigmoid(x)``.

    The quotient has the bits of PyTorch's for 99.5 % of the elements in float32, and the product of
    jax.nn.silu for 73 %. Its derivative by automatic differentiation would be NaN below -88.
    """
    return x / (1 + jnp.exp(-x))


@silu.defjvp
def _silu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    s = jax.nn.sigmoid(x)
    return silu(x), dx * (s * (1 + x * (1 - s)))


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": silu,
    "sigmoid": jax.nn.sigmoid,
}


@by_keyword
def gated_rms_norm(
    x: ArrayLike,
    /,
    gate: ArrayLike,
    *,
    gate_first: bool,
    activation: Activation = "silu",
    num_groups: int = 1,
    axes: Axes = -1,
    scale: Param = None,
    scale_offset: float = 0,
    rounding: Rounding = "once",
    bias: Param = None,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Normalize with a gate, as state space models do (Dao & Gu 2024, arXiv 2405.21060).

    Gated RMS normalization. With ``gate_first=True``, as in Mamba 2, ``h = x * silu(gate)`` is
    normalized: ``y = h / sqrt(mean(h**2) + epsilon) * scale + bias``. With ``gate_first=False``, as
    in Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) and Qwen3-Next, the gate comes last:
    ``y = (x / sqrt(mean(x**2) + epsilon) * scale + bias) * silu(gate)``.

    Here ``silu(gate) = gate * sigmoid(gate)``. It and the products with it are computed in float32
    at least.

    Args:
      x: floating array ``(..., C)``.
      gate: real floating array of the shape of ``x``.
      gate_first: whether ``x`` is gated before it is normalized, or after.
      activation: ``"silu"``, or ``"sigmoid"`` as in Kimi Linear.
      num_groups: the number of equal groups of neighbouring channels, each of which has a mean
        square of its own; the axis of the channels is then the only reduction axis.
      axes: the reduction axes, which are the feature axes too.
      scale: gain of the shape of the reduction axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      scale_offset: a number that is added to ``scale`` in the dtype of the statistics.
      rounding: where half precision is rounded. ``"once"`` rounds ``y`` alone, as the kernels of
        Mamba do. ``"twice"`` also rounds the normalized array to the dtype of ``x``, and each
        product and sum with a parameter of half precision, as the classes of transformers do.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the mean square.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they or their gates are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`. For bfloat16 ``x`` that is
        gated first, ``full_range`` is True unless given.

    Returns:
      An array of the shape and dtype of ``x``.

    Raises:
      TypeError: integer ``x`` or ``gate``; ``gate_first`` that is no boolean.
      ValueError: a gate of another shape; an unknown activation; groups that do not divide the
        channels; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x, gate = jnp.array([[3.0, -3.0]]), jnp.array([[0.0, 0.0]])  # sigmoid(0) is 1/2
    >>> options = {"activation": "sigmoid", "epsilon": 0.0}
    >>> jn.gated_rms_norm(x, gate, gate_first=True, **options).tolist()
    [[1.0, -1.0]]
    >>> jn.gated_rms_norm(x, gate, gate_first=False, **options).tolist()
    [[0.5, -0.5]]
    """
    x = validation.floating(x)
    gate = checked_gate(x, gate, gate_first, activation)
    where = validation.mask(where, x.shape, str(dict(options).get("mask_name", "where")))
    reduced = whole(axes, x.shape)
    if gate_first:
        h, factor = gated(x, gate, where, activation), None
        # a model that rounds every operation has no power of two either
        options.setdefault("full_range", needs_exponent(x.dtype) and rounding != "input")
    else:
        h, factor = x, activated(gate, where, activation)
    call = prepare(
        h,
        groups_of(x.shape, reduced, num_groups),
        reduced,
        scale=scale,
        scale_offset=scale_offset,
        rounding=rounding,
        bias=bias,
        epsilon=epsilon,
        where=where,
        centered=False,
        factor=factor,
        x_dtype=x.dtype,
        **options,
    )
    return run(call)


def checked_gate(x: jax.Array, gate: ArrayLike, gate_first: Any, activation: Any) -> jax.Array:
    """Return the gate as an array.

    Raises:
      TypeError: the gate is not real; ``gate_first`` is no boolean.
      ValueError: the gate has another shape than ``x``, or the activation is unknown.
    """
    gate = validation.real(gate, "gate")
    if gate.shape != x.shape:
        raise ValueError(
            f"gate must have the shape of x: got {gate.shape} for x of shape {x.shape}."
        )
    validation.flag("gate_first", gate_first)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or 'sigmoid': got {activation!r}.")
    return gate


def groups_of(shape: tuple[int, ...], reduced: tuple[int, ...], num_groups: int) -> Reduction:
    """Return the reduction of whole axes, or of groups of the channels along one.

    Raises:
      TypeError: a number of groups that is no integer.
      ValueError: several axes, or channels that the groups do not divide.
    """
    if type(num_groups) is int and num_groups == 1:
        return unsplit(shape, reduced)
    if len(reduced) > 1:
        raise ValueError(
            f"axes must be the one axis of the channels where num_groups is {num_groups}: got "
            f"{reduced}."
        )
    groups = checked_divisor("num_groups", num_groups, shape[reduced[0]])
    return in_groups(shape, (), reduced[0], groups)


@partial(jax.jit, static_argnames="activation")
def activated(gate: jax.Array, where: jax.Array | None, activation: str) -> jax.Array:
    """Return the activation of the gate, in float32 at least.

    A masked gate counts as 0: it may be NaN, which a product with 0 would keep.
    """
    (where,) = alongside(unsplit(gate.shape, ()), gate, where)
    gate = mask_fill(gate, where)
    return ACTIVATIONS[activation](gate.astype(compute_dtype(gate.dtype)))


@partial(jax.jit, static_argnames="activation")
def gated(x: jax.Array, gate: jax.Array, where: jax.Array | None, activation: str) -> jax.Array:
    """Return the product of ``x`` and the activation of the gate, in float32 at least."""
    gate, where = alongside(unsplit(x.shape, ()), x, gate, where)
    x, factor = mask_fill(x, where), activated(gate, where, activation)
    wide = promoted(None, compute_dtype(x.dtype), factor.dtype)
    return x.astype(wide) * factor.astype(wide)
