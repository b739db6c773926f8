"""How the numbers of a set are looked at, and its mean and variance estimated.

Every set is described in a *frame*, constants in which its numbers are small::

    u = x / 2**power - pivot         power: only where squares could leave the dtype's range; pivot: near mean(x)
    offset = mean(u)                 what the pivot left over
    var = mean(u**2) - offset**2

The pair (pivot, offset) holds the mean to more digits than one number, so nothing is lost to a large mean.
The frame is constant under differentiation: no result depends on its choice.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.axes import number
from jaxnorm.dtypes import compute_dtype, power_of_two, real
from jaxnorm.loops import apart, as_product, divide, divisor, flat, hold, near, second_on_cpu
from jaxnorm.sets import Sets, valid

HALF_STEP = 45  # powers of two: squares of float32 of 2**-45 to 2**45, and sums of them, are in its range

nothing_saved = partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)


class Frame(NamedTuple):
    """Constants of each set: its size (the count), the power of two it is divided by, and a number near its mean."""

    size: jax.Array | float
    power: jax.Array | None
    pivot: jax.Array | None


class Stats(NamedTuple):
    """What is known of each set: its frame, and in it the mean and the variance.

    Where a derivative keeps them, the size of the frame is None if there is no mask, and an offset of None is estimated again.
    """

    frame: Frame
    offset: jax.Array | None
    var: jax.Array


def make_frame(sets: Sets, x: jax.Array, where: jax.Array | None, lowest_power: int | None, alike: Sets | None = None) -> Frame:
    """The frame of each set; ``lowest_power`` None leaves the scale alone, which is the same for sets within one of ``alike``."""
    x = lax.stop_gradient(x).reshape(sets.pooling.split)
    count = None
    if where is not None:
        weights = jnp.broadcast_to(where, x.shape).astype(real(compute_dtype(x.dtype)))
        count = sets.sum(lax.stop_gradient(weights), None)
    frame = Frame(sets.count(where, count), None, None)
    if lowest_power is None and not sets.centered:
        return frame

    def in_turn(x):
        scaled = frame if lowest_power is None else frame._replace(power=largest_power(alike or sets, x, where, lowest_power))
        return with_pivot(sets, x, where, scaled)[1:] if sets.centered else scaled[1:]

    together = partial(_together, sets, lowest_power, alike)
    power, pivot = in_turn(x) if where is not None else lax.platform_dependent(x, cpu=in_turn, default=together)
    return frame._replace(power=power, pivot=pivot)


def with_pivot(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> Frame:
    """The frame, with the mean of each set, as far as sums give it, as the pivot."""
    return frame._replace(pivot=estimate_offset(sets, x, where, frame))


def _together(sets: Sets, lowest: int | None, alike: Sets | None, x: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """Power and pivot without a mask, neither of which waits for the other: where sums over x can be one pass, they are.

    Without a power the pivot is the mean of some of the numbers, a share s of them, at most sqrt(1/s - 1) standard deviations from
    that of all. Else the sum is of numbers so small that it stays in range. Of those below 1e-38 times their count it may make 0:
    the pivot lacks them.
    """
    if lowest is None:
        sets, x = sets.some(x)
        total, count = sets.careful_sum(as_product(x.astype(compute_dtype(x.dtype))), None), sets.count(None, None)
        exact = jnp.issubdtype(total.dtype, jnp.complexfloating)
        return None, divide(total, count) if exact else near(total, count, float(jnp.finfo(total.dtype).min))
    u = as_product(x.astype(compute_dtype(x.dtype)))
    largest = sets.shared(jnp.max(jnp.abs(u), sets.axes, keepdims=True, initial=0), jnp.max)
    power = _exponent(alike or sets, largest if alike is None else jnp.max(largest, alike.axes, keepdims=True), lowest)
    if not sets.centered:
        return power, None
    count = sets.count(None, None)
    room = 2.0 ** math.frexp(number(sets.size * sets.most_devices()))[1]
    return power, scaled_down(sets, Frame(count, power, None), divide(sets.careful_sum(u / room, None), count)) * room


def largest_power(sets: Sets, x: jax.Array, where: jax.Array | None, lowest: int) -> jax.Array:
    """The exponent of the largest element of each set, so that dividing by 2**power is exact and bounds it by 2."""
    size = jnp.abs(apart(x)[0] if where is None else x).astype(real(compute_dtype(x.dtype)))
    shown = None if where is None else valid(where)
    return _exponent(sets, sets.shared(jnp.max(size, sets.axes, keepdims=True, initial=0, where=shown), jnp.max), lowest)


def _exponent(sets: Sets, largest: jax.Array, lowest: int) -> jax.Array:
    largest = sets.across(lax.pmax, largest)
    limit = jnp.finfo(largest.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, max(lowest, -limit), limit).astype(jnp.int8 if limit < 128 else jnp.int16)


def local(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> jax.Array:
    """``x`` split, in the frame of its set; what is masked out is replaced before it can do harm."""
    u = x.astype(compute_dtype(x.dtype)).reshape(sets.pooling.split)
    if where is not None:
        u = jnp.where(valid(where), u, 0)
    u = scaled_down(sets, frame, u)
    return u if frame.pivot is None else u - frame.pivot


def scaled_down(sets: Sets, frame: Frame, u: jax.Array) -> jax.Array:
    """``u / 2**power``"""
    if frame.power is None:
        return u
    factor = power_of_two(-frame.power.astype(jnp.int32), u.dtype)
    return u * (factor if sets.rows else hold(factor))


def in_a_pass(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame, *others: jax.Array) -> tuple:
    """The arguments, as one pass over x sees them: without a mask each pass its own, so that nothing is kept for the next.

    Where the last axis is split the loops are the faster for what they share.
    """
    if where is not None or (len(sets.pooling.parts[-1]) > 1 and not sets.rows):
        return x, where, frame, *others
    x, power, pivot, *rest = apart(x, frame.power, frame.pivot, *others)
    return x, where, frame._replace(power=power, pivot=pivot), *rest


def at_once(sets: Sets, *arguments) -> tuple:
    """The same for passes that are to be one loop, if there can be one."""
    return arguments if sets.in_one_loop else in_a_pass(sets, *arguments)


def average(sets: Sets, values: jax.Array, where: jax.Array | None, count) -> jax.Array:
    """Weighted mean over each set, 0 for an empty one."""
    total = sets.sum(values, where)
    return total / divisor(count, total)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Offset and variance of each set, in its frame."""
    count = sets.count(where, frame.size)
    if not sets.centered:
        square = _square(sets, x, where, frame)
        return jnp.zeros_like(square, compute_dtype(x.dtype)), near(square, count, 0.0)
    offset = estimate_offset(sets, x, where, frame)
    *seen, own = at_once(sets, x, where, frame, offset)  # another array for XLA only if all that is given is used
    u = local(sets, *seen)
    square = sets.careful_sum(jnp.real(u * jnp.conj(u)), where)
    return offset, flat(_variance)(divide(square, count, _shade(sets, square, where, frame)), own)


def estimate_offset(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> jax.Array:
    """The mean of each set in its frame: what the pivot left over, or, without one, the pivot."""
    total = sets.careful_sum(local(sets, *at_once(sets, x, where, frame)), where)
    return divide(total, sets.count(where, frame.size), _shade(sets, total, where, frame))


def _shade(sets: Sets, total: jax.Array, where: jax.Array | None, frame: Frame) -> jax.Array | None:
    """What the count is hidden behind (see divide): the pivot, with which XLA's CPU back-end goes on with its loop.

    A GPU's makes one kernel of a row, if nothing takes the pivot but what is subtracted from x: a gain where no gradient takes the
    statistics as well.
    """
    if where is not None or frame.pivot is None:
        return None
    one_kernel = not sets.differentiated and total.dtype == frame.pivot.dtype
    return second_on_cpu(total, frame.pivot) if one_kernel else frame.pivot


def _square(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> jax.Array:
    """The sum of the squares of the numbers of a set, in its frame."""

    def scaled(x, power):
        u = local(sets, *at_once(sets, x, where, frame._replace(power=power)))
        return sets.careful_sum(jnp.real(u * jnp.conj(u)), where)

    def at_three_scales(x, power):
        """Each is in range for some powers: these sums and the largest, which the power waits for, are one pass."""
        u, power = local(sets, x, None, frame._replace(power=None)), power.astype(jnp.int32)
        steps = jnp.where(power > HALF_STEP, 1, jnp.where(power < -HALF_STEP, -1, 0))
        low, middle, high = (sets.careful_sum(jnp.square(u * 2.0**-scale), None) for scale in (-2 * HALF_STEP, 0, 2 * HALF_STEP))
        square = jnp.where(steps == 0, middle, jnp.where(steps < 0, low, high))
        return square * jnp.square(power_of_two(2 * HALF_STEP * steps - power, u.dtype))

    if where is not None or frame.power is None or compute_dtype(x.dtype) != jnp.float32:
        return scaled(x, frame.power)
    return lax.platform_dependent(x, frame.power, cpu=scaled, default=at_three_scales)


def _variance(square: jax.Array, offset: jax.Array) -> jax.Array:
    return jnp.maximum(square - jnp.real(offset * jnp.conj(offset)), 0)


@estimate.defjvp
def _estimate_jvp(sets, primals, tangents):
    x, where, frame = primals
    offset, var = estimate(sets, x, where, frame)
    tangent = nothing_saved(partial(estimate_tangent, sets))(x, where, frame, offset, tangents[0])
    return (offset, var), tangent


def estimate_tangent(sets: Sets, x, where, frame: Frame, offset, dx) -> tuple[jax.Array, jax.Array]:
    """d offset = mean(du), d var = 2 mean((u - offset) du)."""
    du = local(sets, dx, where, frame._replace(pivot=None))
    deviation = local(sets, x, where, frame) - offset
    doffset = average(sets, du, where, frame.size)
    dvar = 2 * average(sets, jnp.real(jnp.conj(deviation) * du), where, frame.size)
    return (doffset if sets.centered else jnp.zeros_like(doffset)), dvar
