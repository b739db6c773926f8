"""Norms that apply a blend of the statistics of several sets, by the CPU kernels of channels.cc: every sum over x."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm import transposed
from jaxnorm.application import Rule, apply
from jaxnorm.dtypes import power_of_two
from jaxnorm.frame import Frame, estimate, with_pivot
from jaxnorm.kernels import native
from jaxnorm.kernels.layout import find
from jaxnorm.kernels.native import flat, like
from jaxnorm.kernels.placement import WHOLE, sharded
from jaxnorm.primitives import differentiable, linear
from jaxnorm.sets import Sets


def obstacle(x: jax.Array, sets: Sets, rule: Rule, where, scale, bias) -> str | None:
    """Why the kernels cannot take these arguments, in words; None if they can."""
    found = WHOLE if sharded(x) else native.obstacle(x, sets, rule, where, scale, bias)
    layout = None if found else find(sets.pooling)
    if layout is not None and (layout.d > 1 or layout.p == 1):
        return f"pools positions, with the channels last: got axes {sets.pooling.axes} of {sets.pooling.split}"
    return found


def moments(sets: Sets, x: jax.Array, power: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pivot, offset and variance of every set, as constants."""
    pivot, offset, var = _moments(sets, jax.lax.stop_gradient((x, power)))
    return pivot, offset, var


def _sums(sets: Sets, arguments):
    x, power = arguments
    kept = sets.pooling.split_kept
    return _call("JaxnormMoments", [(kept, jnp.float32)] * 3, x, _factor(power, kept))


def _plain_sums(sets: Sets, arguments):
    """The same for other platforms."""
    x, power = arguments
    frame = with_pivot(sets, x, None, Frame(float(sets.pooling.size), power, None))
    return _of(frame), *estimate(sets, x, None, frame)


def _no_tangent(sets: Sets, arguments, tangents):
    raise TypeError("These statistics are constants: they have no derivative.")


def _factor(power: jax.Array | None, kept: tuple[int, ...]) -> jax.Array:
    factor = jnp.ones((), jnp.float32) if power is None else power_of_two(-power.astype(jnp.int32), jnp.float32)
    return jnp.broadcast_to(factor, kept)


def _call(name: str, results, *given: jax.Array) -> list[jax.Array]:
    """The kernel of arrays, the last of which has a number for every set."""
    results_like = [like((math.prod(shape),), dtype, *given) for shape, dtype in results]
    channels = np.int64(given[-1].shape[-1])
    found = jax.ffi.ffi_call(name, results_like, vmap_method="broadcast_all")(*(flat(a, 1) for a in given), c=channels)
    return [a.reshape(shape) for a, (shape, _) in zip(found, results, strict=True)]


def _forward(facts: transposed.Facts, arguments):
    sets, rule, applied = facts
    x, power, pivot, offset, var, extra, scale, bias = arguments
    mean, spread = applied(pivot, offset, var, extra)
    frame = Frame(float(sets.pooling.size), power, pivot)
    return apply(sets, rule, None, frame, x, mean, spread, scale, bias), offset, var


def _jvp(facts: transposed.Facts, arguments, tangents):
    x, power, pivot, _, _, extra, scale, bias = arguments
    y, offset, var = standardize(facts, arguments)  # the constants that were given, as functions of x
    kept = None if facts[0].size < native.SMALL_SET else offset
    residuals = x, None, power, pivot, None, kept, var, extra, scale, bias
    return (y, offset, var), _apply_tangent(facts, residuals, (tangents[0], *tangents[-3:]))


def _products(sets: Sets, x, where, frame: Frame, mean, by_y, shared) -> tuple[jax.Array, jax.Array]:
    pivot = _of(frame)  # where is None, and all pooled axes are shared
    found = _call("JaxnormProducts", [(pivot.shape, jnp.float32)] * 2, x, by_y, _factor(frame.power, pivot.shape), pivot, mean)
    return found[0], found[1]


def _back(sets: Sets, x, where, frame: Frame, offset, by_y, slope, spread, shift) -> jax.Array:
    pivot = _of(frame)
    each = [jnp.broadcast_to(a, pivot.shape) for a in (offset, slope, spread, shift)]
    return _call("JaxnormBack", [(x.shape, x.dtype)], x, by_y, _factor(frame.power, pivot.shape), pivot, *each)[0]


def _offset(sets: Sets, x, where, frame: Frame) -> jax.Array:
    return moments(sets, x, frame.power)[1]


def _of(frame: Frame) -> jax.Array:
    assert frame.pivot is not None
    return frame.pivot


_moments = differentiable("jaxnorm_moments", _sums, _no_tangent, Sets.batched, results=3, elsewhere=_plain_sums)
# (facts, (x, power, pivot, offset, var, extra, scale, bias)) -> y, offset, var
standardize = differentiable("jaxnorm_blend", _forward, _jvp, transposed.batched, results=3)
_apply_tangent = linear(
    "jaxnorm_blend_tangent",
    transposed.tangent_of,
    partial(transposed.transpose_of, (_products, _back, _offset)),
    like=transposed.arguments_like,
    batched=transposed.batched,
    results=3,
    elsewhere=transposed.transpose_in_passes,
)
