"""How the numbers of a set are looked at, and its mean and variance estimated.

Every set is described in a *frame*, constants in which its numbers are small::

    u = x / 2**power - pivot         power: only where squares could leave the dtype's range; pivot: mean(x), rounded
    offset = mean(u)                 what the rounding of the pivot left over
    var = mean(u**2) - offset**2

The pair (pivot, offset) holds the mean to twice the precision of one number, so nothing is lost to a large mean.
The frame is constant under differentiation: no result depends on its choice.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.axes import Pooling, unsplit
from jaxnorm.varying import vary, varying_axes

SMALL = 1 << 15  # elements: of fewer XLA's CPU back-end makes loops as simple as they come
POSITIONS = 16  # of so many or more, numbers for every channel weigh little

nothing_saved = partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)


class AxisGroups(NamedTuple):
    """An ``axis_name`` whose devices are pooled in groups, as ``axis_index_groups`` of :func:`jax.lax.psum`."""

    axis_name: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sets:
    """The static facts about the pooled sets."""

    pooling: Pooling
    axis_name: str | tuple[str, ...] | AxisGroups | None = None
    centered: bool = True
    groups: int | None = None  # of neighbours on the last axis, which are pooled as well: each of them has the numbers of all

    def __post_init__(self):
        if isinstance(self.axis_name, list):  # these facts are hashed
            object.__setattr__(self, "axis_name", tuple(self.axis_name))

    @property
    def axes(self) -> tuple[int, ...]:
        return self.pooling.axes

    @property
    def size(self) -> int:
        """How many elements each set has."""
        return self.pooling.size * (1 if self.groups is None else self.pooling.shape[-1] // self.groups)

    def by_channel(self, dtype) -> "Sets":
        """The same sets of numbers of this dtype, where they pool positions and groups of channels; each channel has its own.

        XLA's CPU back-end sums parts of the last axis in loops that find halves cast in memory, and sums of positions in
        faster ones that cast what they read. Of few positions the numbers for every channel weigh more than that.
        """
        pooling, last = self.pooling, len(self.pooling.split) - 1
        positions = tuple(axis for axis in self.axes if axis < last)
        grouped = len(pooling.parts[-1]) == 2 and last == len(pooling.shape) and last in self.axes and last - 1 not in self.axes
        if jnp.finfo(dtype).bits >= 32 or not grouped or math.prod(pooling.split[axis] for axis in positions) < POSITIONS:
            return self
        return replace(self, pooling=unsplit(pooling.shape, positions), groups=pooling.split[-2])

    def shared(self, values: jax.Array, pooled) -> jax.Array:
        """What is ``pooled`` of the values of each group, for all of its channels."""
        if self.groups is None:
            return values
        split = values.reshape(*values.shape[:-1], self.groups, values.shape[-1] // self.groups)
        return jnp.broadcast_to(pooled(split, axis=-1, keepdims=True), split.shape).reshape(values.shape)

    def once(self, values):
        """The numbers of every group, without those that repeat them."""
        return values if self.groups is None or jnp.ndim(values) == 0 else values[..., :: values.shape[-1] // self.groups]

    def each(self, values):
        """The inverse of :meth:`once`: those of its group for every channel, which a loop over x reads."""
        if self.groups is None or jnp.ndim(values) == 0:
            return values
        repeated = jnp.repeat(values, self.pooling.shape[-1] // self.groups, -1, total_repeat_length=self.pooling.shape[-1])
        return hold(repeated) if jnp.issubdtype(repeated.dtype, jnp.inexact) else repeated

    def gathered(self, values: jax.Array) -> jax.Array:
        """Their sum over each group, which a loop over x reads; not linear to JAX."""
        return values if self.groups is None else hold(self.shared(values, jnp.sum))

    @property
    def rows(self) -> bool:
        """Whether every set is a row, with all of the last axis and nothing of another."""
        split = self.pooling.split
        return [axis for axis in self.axes if split[axis] > 1] == [len(split) - 1]

    def across(self, collective, value):
        """``collective`` of ``value`` over ``axis_name``."""
        if self.axis_name is None:
            return value
        if isinstance(self.axis_name, AxisGroups):
            groups = [list(group) for group in self.axis_name.groups]
            return collective(value, self.axis_name.axis_name, axis_index_groups=groups)
        return collective(value, self.axis_name)

    def count(self, where: jax.Array | None, size) -> jax.Array | float:
        """How many elements, or how much weight, a set has: ``size``, of which JAX forgets that it is static without a mask."""
        return float(self.size * self.across(lax.psum, 1)) if where is None else size

    def sum(self, values: jax.Array, where: jax.Array | None) -> jax.Array:
        """Weighted sum over each set."""
        if where is not None and where.dtype != jnp.bool_:
            values, where = values * where.astype(values.dtype), None
        return self.across(lax.psum, self.shared(jnp.sum(values, self.axes, keepdims=True, where=where), jnp.sum))

    def careful_sum(self, values: jax.Array, where: jax.Array | None) -> jax.Array:
        """The same, one axis after the other, the last axis last; not differentiable in reverse mode.

        XLA's CPU back-end adds several small axes up in one run, each number to all before it: 1e-5 off for 8000 equal
        ones. In turn they are off by 5e-7, and where the last axis is split the sum takes half the time.
        """
        if where is not None:
            values = jnp.where(where, values, 0) if where.dtype == jnp.bool_ else values * where.astype(values.dtype)
        last = values.ndim - 1
        for axis in sorted(self.axes, key=lambda axis: (axis == last, -axis)):
            values = jnp.sum(values, axis, keepdims=True)
            if len(self.axes) > 1:
                values = lax.optimization_barrier(values)  # or the sums are merged again
        return self.across(lax.psum, self.gathered(values))


class Frame(NamedTuple):
    """Constants of each set: its size (the count), the power of two it is divided by, and a number near its mean."""

    size: jax.Array | float
    power: jax.Array | None
    pivot: jax.Array | None


def compute_dtype(dtype) -> jnp.dtype:
    """The dtype of statistics: that of the data, and at least float32."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def bound(axis_name, groups=None):
    """The part of ``axis_name`` that is bound where this is called, None if nothing is; in groups if those are given."""
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    found = tuple(name for name in names if name is not None and _is_bound(name))
    if not found:
        return None
    return found if groups is None else AxisGroups(found, tuple(tuple(group) for group in groups))


def _is_bound(name) -> bool:
    try:
        lax.psum(1, name)
    except NameError:
        return False
    return True


def real(dtype) -> jnp.dtype:
    """The dtype of an absolute value."""
    return jnp.finfo(dtype).dtype


def valid(where: jax.Array) -> jax.Array:
    """Which elements a mask, or weights, let count."""
    return where if where.dtype == jnp.bool_ else where > 0


def needs_power(dtype) -> bool:
    """Whether squares of numbers of this dtype overflow in the dtype of the statistics: bfloat16."""
    return jnp.finfo(dtype).bits < 32 and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp


def apart(*arrays: jax.Array | None) -> tuple:
    """The same arrays, which XLA's CPU back-end takes for others, and for different ones in other company.

    It makes one loop of all that is done with an array and the means of its rows, if no other loop needs any of it: what
    they have in common, be it no more than a cast, it keeps, as large as the array. Of these it shares nothing. Of small
    arrays, which the cache holds, it may.
    """
    given = [a for a in arrays if a is not None]
    if all(a.size < SMALL for a in given):
        return arrays
    varying = frozenset().union(*map(varying_axes, given))
    alike = (None if a is None else vary(a, varying) for a in arrays)  # over the axes of shard_map, as the barrier has it
    return lax.platform_dependent(*alike, cpu=lambda *a: lax.optimization_barrier(a), default=lambda *a: a)


def make_frame(sets: Sets, x: jax.Array, where: jax.Array | None, lowest_power: int | None, alike: Sets | None = None) -> Frame:
    """The frame of each set; ``lowest_power`` None leaves the scale alone, which is the same for sets within one of ``alike``."""
    x = lax.stop_gradient(x).reshape(sets.pooling.split)
    count = None
    if where is not None:
        weights = jnp.broadcast_to(where, x.shape).astype(real(compute_dtype(x.dtype)))
        count = sets.sum(lax.stop_gradient(weights), None)
    power = None if lowest_power is None else largest_power(alike or sets, x, where, lowest_power)
    frame = Frame(sets.count(where, count), power, None)
    return with_pivot(sets, x, where, frame) if sets.centered else frame


def with_pivot(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> Frame:
    """The frame, with the mean of each set, as far as sums give it, as the pivot."""
    total = sets.careful_sum(local(sets, *in_a_pass(sets, x, where, frame)), where)
    return frame._replace(pivot=divide(total, sets.count(where, frame.size)))


def largest_power(sets: Sets, x: jax.Array, where: jax.Array | None, lowest: int) -> jax.Array:
    """The exponent of the largest element of each set, so that dividing by 2**power is exact and bounds it by 2."""
    size = jnp.abs(apart(x)[0] if where is None else x).astype(real(compute_dtype(x.dtype)))
    shown = None if where is None else valid(where)
    largest = sets.shared(jnp.max(size, sets.axes, keepdims=True, initial=0, where=shown), jnp.max)
    largest = sets.across(lax.pmax, largest)
    limit = jnp.finfo(size.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, max(lowest, -limit), limit).astype(jnp.int8 if limit < 128 else jnp.int16)


def power_of_two(exponent: jax.Array, dtype) -> jax.Array:
    """2**exponent, where that is a normal number, from its bits: a loop over x then computes no powers on its way."""
    info = jnp.finfo(real(dtype))
    bits = jnp.int64 if info.bits == 64 else jnp.int32
    return lax.bitcast_convert_type((exponent.astype(bits) + (info.maxexp - 1)) << info.nmant, info.dtype)


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
    """The arguments, as one pass over x sees them: of halves without a mask, whose casts are not kept, each pass its own.

    Rows have but one pass, and where the last axis is split the loops are the faster for what they share.
    """
    if where is not None or sets.rows or len(sets.pooling.parts[-1]) > 1 or jnp.finfo(x.dtype).bits >= 32:
        return x, where, frame, *others
    x, power, pivot, *rest = apart(x, frame.power, frame.pivot, *others)
    return x, where, frame._replace(power=power, pivot=pivot), *rest


def average(sets: Sets, values: jax.Array, where: jax.Array | None, count) -> jax.Array:
    """Weighted mean over each set, 0 for an empty one."""
    total = sets.sum(values, where)
    return total / divisor(count, total)


def divide(total: jax.Array, count, shade: jax.Array | None = None) -> jax.Array:
    """The same number wherever it is used, and exactly the constant for sums of a constant.

    A compiler replaces division by a constant with multiplication by its rounded inverse, and fuses that, unrounded, into
    what is done with it. So the count is hidden from it behind a zero, made of the shade, that it cannot know to be one.
    Without a shade it is made of the total: XLA's CPU back-end then ends its loop there if that is its last sum.
    """
    zero = jnp.minimum(jnp.abs(lax.stop_gradient(total if shade is None else shade)), 0)
    return total / (divisor(count, total) + zero.astype(total.dtype))


def hold(values: jax.Array) -> jax.Array:
    """The same, as the result of a division: XLA's CPU back-end lets a loop over x read those, and compute others each time."""
    return divide(values, 1.0)


def divisor(count, total: jax.Array) -> jax.Array:
    """The count, 1 for an empty set, of the dtype of the total."""
    if isinstance(count, float):
        return jnp.asarray(count if count > 0 else 1, total.dtype)
    count = jnp.asarray(count, real(total.dtype))
    return jnp.where(count > 0, count, 1).astype(total.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Offset and variance of each set, in its frame."""
    count, offset = sets.count(where, frame.size), None
    shade = frame.pivot if where is None else None
    if sets.centered:
        offset = divide(sets.careful_sum(local(sets, *in_a_pass(sets, x, where, frame)), where), count, shade)
    u = local(sets, *in_a_pass(sets, x, where, frame, *([] if offset is None else [offset]))[:3])
    square = sets.careful_sum(jnp.real(u * jnp.conj(u)), where)
    if offset is None:
        return jnp.zeros_like(square, u.dtype), mean_square(square, count)
    return offset, jnp.maximum(divide(square, count, shade) - jnp.real(offset * jnp.conj(offset)), 0)


def mean_square(square: jax.Array, count) -> jax.Array:
    """Their mean, rounded by itself (see divide): a bound that it keeps anyway stands between it and what is done with it."""
    inverse = 1 / divisor(count, square)
    return jnp.maximum(square * lax.optimization_barrier(jnp.broadcast_to(inverse, square.shape)), 0)


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
