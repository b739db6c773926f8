"""Groups that ids name along one axis: sums over each, their statistics, and what these give where they are applied.

The formulas are those of :mod:`jaxnorm.engine.reference`. Instead of summing over an axis they add each position to its segment, and
where they combine statistics with elements, every position takes those of its segment::

    offset = mean(u) + mean(u - mean(u)),   var = mean((u - mean(u))**2) - mean(u - mean(u))**2

Elements may be groups themselves, with a weight, a mean and a variance: then they are merged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm import validation
from jaxnorm.axes import Reduction
from jaxnorm.dtypes import compute_dtype, real
from jaxnorm.engine.collectives import across
from jaxnorm.engine.groups import Frame, elements, hide, power_of_elements, rstd, scaled, split, weigh
from jaxnorm.engine.numbers import Numbers, from_stats
from jaxnorm.engine.reference import Stats, abs_squared, apply_rstd, cast_once, nothing_saved, with_epsilon
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.words import Words, beyond, of_integers
from jaxnorm.engine.words import total as words_total
from jaxnorm.engine.xla import divide, reduce_axes

RUN = 64  # how many are added in sequence, with an error of 2e-7 at most, before their sum is
GOLDEN = 2654435769  # 2**32 / golden ratio: multiples of it, whatever the step between them, spread evenly (Knuth 1998, section 6.4)
Places = tuple[jax.Array, ...]  # for each position the place of the sum it is added to, for each of these that of the next


@dataclass(frozen=True)
class Segments:
    """How ids name groups: the static facts.

    Attributes:
      axis: along which segments lie, of the split shape.
      number: how many segments, in each row.
      positions: the shape of the ids: ``(n,)``, or with the axes before it, where each row has segments of its own.
    """

    axis: int
    number: int
    positions: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The axes that ids have beside that of the positions."""
        return self.positions[:-1]

    def stats_shape(self, reduction: Reduction) -> tuple[int, ...]:
        """The shape of the statistics: that of reduced axes, but for the number of segments along theirs."""
        own = reduction.whole_axis(self.axis)
        return tuple(self.number if axis == own else size for axis, size in enumerate(reduction.stats_shape))

    def places(self, ids: jax.Array) -> Places:
        """Where to add each position, so that no sum in sequence is long.

        A scatter adds in sequence, which is 1e-5 off and more for 1e5 elements. So a segment has a partial sum for every RUN of its
        elements, these have partial sums again, and at last there is one. An id out of range has a place beyond all of them.
        """
        rows, size = math.prod(self.rows), self.positions[-1]
        groups, most, places = rows * self.number, size, []
        inside = (ids >= 0) & (ids < self.number)
        first = ids.astype(jnp.int32).reshape(rows, size) + self.number * lax.broadcasted_iota(jnp.int32, (rows, size), 0)
        group = jnp.where(inside.reshape(rows, size), first, groups).reshape(-1)
        while most > RUN:
            partial_sums = (jax.ops.segment_sum(jnp.ones_like(group), group, groups) + (RUN - 1)) // RUN
            ends = jnp.cumsum(partial_sums)
            mixed = (lax.iota(jnp.uint32, len(group)) * jnp.uint32(GOLDEN) >> 8).astype(jnp.int32)
            own, start = (a.at[group].get(mode="fill", fill_value=1) for a in (partial_sums, ends - partial_sums))
            number = (len(group) + (RUN - 1) * min(groups, len(group))) // RUN
            places.append(jnp.where(group < groups, start + mixed % jnp.maximum(own, 1), number))
            group, most = jnp.searchsorted(ends, lax.iota(jnp.int32, number), side="right").astype(jnp.int32), -(-most // RUN)
        return (*places, group)

    def total(self, values: jax.Array, places: Places) -> jax.Array:
        """The sum over each segment."""
        return self._reduce(jax.ops.segment_sum, values, places)

    def largest(self, values: jax.Array, places: Places) -> jax.Array:
        """The largest value of each segment; the least there is of an empty one."""
        return self._reduce(jax.ops.segment_max, values, places)

    def _reduce(self, by: Callable, values: jax.Array, places: Places) -> jax.Array:
        flat = self._flat(values, self.positions[-1])
        for at, number in zip(places, (*map(len, places[1:]), self._groups), strict=True):
            flat = by(flat, at, number)
        return self._in_place(flat, self.number)

    def spread(self, stats: Any, places: Places) -> Any:
        """To each position what its segment has, and NaN where ids are out of range: the transpose of :meth:`total`."""
        return jax.tree.map(partial(self._spread, places), stats)

    def _spread(self, places: Places, stats: jax.Array) -> jax.Array:
        flat = self._flat(stats, self.number)
        for at in reversed(places):
            flat = jnp.take(flat, at, axis=0, mode="fill")
        return self._in_place(flat, self.positions[-1])

    def inside(self, places: Places, ndim: int) -> jax.Array:
        """Which positions belong to a segment."""
        of_one = places[0] < (len(places[1]) if len(places) > 1 else self._groups)
        return self._in_place(of_one.reshape(-1, *(1,) * (ndim - len(self.positions))), self.positions[-1])

    @property
    def _groups(self) -> int:
        return math.prod(self.rows) * self.number

    def _flat(self, values: jax.Array, size: int) -> jax.Array:
        """With the axis of positions, or of segments, in front, together with those of the rows."""
        if not self.rows:
            shape = (*values.shape[: self.axis], size, *values.shape[self.axis + 1 :])
            return jnp.moveaxis(jnp.broadcast_to(values, shape), self.axis, 0)
        rest = values.shape[self.axis + 1 :]
        return jnp.broadcast_to(values, (*self.rows, size, *rest)).reshape(-1, *rest)

    def _in_place(self, flat: jax.Array, size: int) -> jax.Array:
        return flat.reshape(*self.rows, size, *flat.shape[1:]) if self.rows else jnp.moveaxis(flat, 0, self.axis)


Along = tuple[Segments, jax.Array] | None


def along(reduction: Reduction, segments, num_segments) -> Along:
    """The facts and the ids, checked; None where none are given."""
    if segments is None and num_segments is None:
        return None
    own = reduction.whole_axis(reduction.axes[0])
    ids = validation.segments(segments, num_segments, reduction.shape[: own + 1])
    if len(reduction.parts[own]) > 1:
        raise ValueError(
            f"segments must lie along an axis that is not split: axis {own}, the first one with a reduction, is split into "
            f"{reduction.parts[own]}. Reshape x first."
        )
    assert ids is not None
    return Segments(reduction.axes[0], index(num_segments), ids.shape), ids


class Parts(NamedTuple):
    """What is taken together: elements, or groups of them, with a second word of their means and their variances."""

    x: jax.Array
    low: jax.Array | None = None
    var: jax.Array | None = None


def statistics(spec: Spec, at: Segments, parts: Parts, where, places: Places, words: Words | None = None) -> tuple[Stats, Words]:
    """The statistics of each segment, differentiable, and the words of its count."""
    words = count(spec, at, parts.x, where, places) if words is None else words
    frame = find_frame(spec, at, parts, where, places, words[0])
    return Stats(frame, *estimate(spec, at, parts, where, places, frame)), words


def in_words(spec: Spec, at: Segments, stats: Stats, words: Words) -> Numbers:
    """The Numbers of each segment."""
    return from_stats(stats, words[0], beyond(words, words[0]), at.stats_shape(spec.reduction))


def count(spec: Spec, at: Segments, x: jax.Array, where, places: Places) -> Words:
    """How many elements each segment has, exactly, or how much weight."""
    shape, dtype = spec.reduction.split_shape, real(compute_dtype(x.dtype))
    if where is not None and where.dtype != jnp.bool_:
        weights = jnp.broadcast_to(where.astype(dtype), shape)
        first = total(spec, at, weights, None, places)
        return first, jnp.zeros_like(first), jnp.zeros_like(first)
    if where is None:
        shape = tuple(size if axis in spec.axes else 1 for axis, size in enumerate(shape))
    counted = jnp.ones(shape, jnp.int32) if where is None else jnp.broadcast_to(where, shape).astype(jnp.int32)
    sums = at.total(counted.sum(_further(spec, at), keepdims=True), places)
    return words_total(of_integers(sums, dtype), (), spec.axis_name)


def total(spec: Spec, at: Segments, values: jax.Array, where, places: Places) -> jax.Array:
    """The sum over each segment, by weight."""
    return across(lax.psum, at.total(reduce_axes(weigh(values, where), _further(spec, at)), places), spec.axis_name)


def _further(spec: Spec, at: Segments) -> tuple[int, ...]:
    return tuple(axis for axis in spec.axes if axis != at.axis)


def find_frame(spec: Spec, at: Segments, parts: Parts, where, places: Places, n: jax.Array) -> Frame:
    """The constants in which the elements of each segment are small; of equal elements the pivot is each of them."""
    x, low, _ = lax.stop_gradient(parts)
    frame = Frame(n, find_power(spec, at, x, where, places), None)
    if not spec.centered:
        return frame
    u = _elements(spec, at, Parts(x, low), where, places, frame)
    one = _one_of_each(spec, at, u, where, places)
    apart = hide(u - at.spread(one, places), where)
    return frame._replace(pivot=jnp.where(n > 0, one + divide(total(spec, at, apart, where, places), n), 0))


def _one_of_each(spec: Spec, at: Segments, u: jax.Array, where, places: Places) -> jax.Array:
    """An element of each segment: the last one or, where some do not count or are elsewhere, the largest, which takes longer."""
    if where is None and spec.axis_name is None and u.size:
        size, shape = at.positions[-1], [1] * u.ndim
        shape[at.axis] = size
        order = lax.iota(jnp.int32, size).reshape(shape)
        last = at.largest(jnp.broadcast_to(order, [size if axis <= at.axis else 1 for axis, size in enumerate(u.shape)]), places)
        first = lax.slice(u, [0] * u.ndim, [1 if axis in _further(spec, at) else size for axis, size in enumerate(u.shape)])
        return jnp.take_along_axis(first, jnp.maximum(last, 0), axis=at.axis)
    if jnp.iscomplexobj(u):
        return lax.complex(*(_largest(spec, at, part(u), where, places) for part in (jnp.real, jnp.imag)))
    return _largest(spec, at, u, where, places)


def find_power(spec: Spec, at: Segments, x: jax.Array, where, places: Places) -> jax.Array | None:
    """As :func:`jaxnorm.engine.groups.find_power`; None where none is needed."""
    lowest = spec.lowest_power(x.dtype)
    if lowest is None:
        return None
    size = jnp.abs(split(spec, lax.stop_gradient(x), compute_dtype(x.dtype)))
    return power_of_elements(_largest(spec, at, size, where, places), lowest)


def _largest(spec: Spec, at: Segments, values: jax.Array, where, places: Places) -> jax.Array:
    if where is not None:
        values = jnp.where(where if where.dtype == jnp.bool_ else where > 0, values, -jnp.inf)
    rows = reduce_axes(values, _further(spec, at), partial(jnp.max, initial=-jnp.inf))
    return across(lax.pmax, at.largest(rows, places), spec.axis_name)


def _elements(spec: Spec, at: Segments, parts: Parts, where, places, frame: Frame, offset=None) -> jax.Array:
    """``u``, or ``u - offset``, split."""
    power, pivot, offset = at.spread((frame.power, frame.pivot, offset), places)
    u = elements(spec, parts.x, where, Frame(None, power, pivot))
    u = u if parts.low is None else u + hide(parts.low, where)
    return u if offset is None else u - offset


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def estimate(spec: Spec, at: Segments, parts: Parts, where, places: Places, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Offset and variance of each segment, in its frame."""
    mean = lambda values: divide(total(spec, at, values, where, places), frame.n)  # noqa: E731
    inner = 0 if parts.var is None else hide(parts.var, where)
    u = _elements(spec, at, parts, where, places, frame)
    if not spec.centered:
        square = mean(abs_squared(u) + inner)
        return jnp.zeros_like(square, u.dtype), square
    offset = mean(u)
    rest = u - at.spread(offset, places)
    left, square = mean(rest), mean(abs_squared(rest) + inner)
    return offset + left, jnp.maximum(square - abs_squared(left), 0)


@estimate.defjvp
def _estimate_jvp(spec, at, primals, tangents):
    parts, where, places, frame = primals
    offset, var = estimate(spec, at, parts, where, places, frame)
    step = Parts(tangents[0].x, None, tangents[0].var)
    return (offset, var), nothing_saved(partial(_tangent, spec, at))(parts._replace(var=None), where, places, frame, offset, step)


def _tangent(spec: Spec, at: Segments, parts: Parts, where, places, frame: Frame, offset, step: Parts):
    """d offset = mean(du), d var = mean(2 (u - offset) du), and that of the variances which are merged.

    Positions in no segment, whose statistics are NaN, are as if they were masked out.
    """
    inside = at.inside(places, len(spec.reduction.split_shape))
    where = inside if where is None else jnp.where(inside, where, jnp.zeros_like(where))
    mean = lambda values: divide(total(spec, at, values, where, places), frame.n)  # noqa: E731
    du = scaled(spec, step.x, where, at.spread(frame.power, places))
    deviation = hide(_elements(spec, at, parts, where, places, frame, offset), inside)
    slope = 2 * jnp.real(jnp.conj(deviation) * du)
    dvar = mean(slope if step.var is None else slope + hide(step.var, where))
    return mean(du) if spec.centered else jnp.zeros_like(offset), dvar


def forward(spec: Spec, at: Segments, x, where, scale, bias, ids: jax.Array, epsilon) -> jax.Array:
    """The output, normalized by the statistics of each segment; a traced epsilon is added to their variance."""
    places = at.places(ids)

    def run(spec: Spec, x, scale, bias, epsilon):
        stats, _ = statistics(spec, at, Parts(x), where, places)
        stats = stats if epsilon is None else with_epsilon(stats, epsilon)
        return nothing_saved(partial(apply, spec, at))(x, where, places, stats, scale, bias)

    return cast_once(run, spec, x, scale, bias, epsilon)


def apply(spec: Spec, at: Segments, x: jax.Array, where, places: Places, stats: Stats, scale, bias) -> jax.Array:
    """The output: normalized by the statistics of its segment, scaled and shifted."""
    frame, offset, var = stats
    power, pivot, offset, r = at.spread((frame.power, frame.pivot, offset, rstd(spec, frame, var)), places)
    return apply_rstd(spec, x, where, Frame(None, power, pivot), offset, r, scale, bias)
