"""What is known about the pooled sets: count, mean, variance. The only place that knows how to pool and merge.

Every set is described in a *frame*, constants in which its numbers are small::

    u = x / 2**power - pivot         power: only where squares could leave the dtype's range; pivot: mean(x), rounded
    offset = mean(u)                 what the rounding of the pivot left over
    var = mean(u**2) - offset**2

The pair (pivot, offset) holds the mean to twice the precision of one number, so nothing is lost to a large mean.
The frame is constant under differentiation: no result depends on its choice.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm import checks
from jaxnorm.axes import Axes, Pooling, resolve

nothing_saved = partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)


@partial(jax.tree_util.register_dataclass, data_fields=("count", "mean", "var"), meta_fields=())
@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of sets of numbers: a value that can be merged.

    Attributes:
      count: how many elements (or how much weight) each set holds; 0 for an empty set.
      mean: their mean, 0 for an empty set.
      var: their biased variance, 0 for an empty set.

    Laws: merging is associative and commutative, an empty Moments is its identity, and the Moments of a whole
    equal the merged Moments of its parts, however it is cut.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.arange(24.0).reshape(2, 3, 4)
    >>> per_instance = jn.moments(x, "n [h] c")
    >>> per_instance.merge(0).mean.tolist() == jn.moments(x, "[n h] c").mean.tolist()
    True
    """

    count: jax.Array
    mean: jax.Array
    var: jax.Array

    def merge(self, axes: Axes, *, axis_name=None, **sizes: int) -> "Moments":
        """Pools further axes: the sets along ``axes`` become one.

        Args:
          axes: ints or a pattern over the shape of ``mean``.
          axis_name: device or vmap axes to pool over as well.
          **sizes: sizes of split axes in a pattern.

        Raises:
          ValueError: the axes do not fit.
        """
        mean = checks.floating(self.mean, "mean")
        count = jnp.broadcast_to(jnp.asarray(self.count, _real(mean.dtype)), mean.shape)
        pooling = resolve(axes, mean.shape, sizes)
        return _merge(Sets(pooling, axis_name), count, mean, self.var)


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

    @property
    def axes(self) -> tuple[int, ...]:
        return self.pooling.axes

    def across(self, collective, value):
        """``collective`` of ``value`` over ``axis_name``."""
        if self.axis_name is None:
            return value
        if isinstance(self.axis_name, AxisGroups):
            groups = [list(group) for group in self.axis_name.groups]
            return collective(value, self.axis_name.axis_name, axis_index_groups=groups)
        return collective(value, self.axis_name)

    def sum(self, values: jax.Array, where: jax.Array | None) -> jax.Array:
        """Weighted sum over each set."""
        if where is not None and where.dtype != jnp.bool_:
            values, where = values * where.astype(values.dtype), None
        return self.across(lax.psum, jnp.sum(values, self.axes, keepdims=True, where=where))

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
        return self.across(lax.psum, values)


class Frame(NamedTuple):
    """Constants of each set: its size (the count), the power of two it is divided by, and a number near its mean."""

    size: jax.Array | float
    power: jax.Array | None
    pivot: jax.Array | None


def moments(x: jax.Array, /, axes: Axes, *, where=None, centered: bool = True, axis_name=None, **sizes: int) -> Moments:
    """Count, mean and variance of ``x`` over ``axes``.

    Args:
      x: floating or complex array of any shape.
      axes: the pooled axes: an int, ints, or a pattern such as ``"n [h w] c"``.
      where: boolean mask or float weights that broadcast against ``x``. What is masked out counts for nothing, even
        NaN, and gets gradient 0. Weights are constants under differentiation.
      centered: False takes the mean as 0, so that ``var`` is the mean square.
      axis_name: name (or names) of a device or vmap axis to pool over, weighted by count.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Moments whose pooled axes have size one (a split axis ``(g [c])`` has size g), of the dtype of ``x`` and at least
      float32. The variance is biased, and computed in two corrected passes: an offset of 1e7 standard deviations
      costs no accuracy. Of complex numbers it is the variance of the absolute value.

    Raises:
      TypeError: integer or boolean ``x``; a mask that is neither boolean nor float.
      ValueError: axes, pattern or mask that do not fit ``x``.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.moments(jnp.array([[1.0, 3.0], [5.0, 9.0]]), "n [c]").var.tolist()
    [[1.0], [4.0]]
    """
    x = checks.floating(x)
    where = checks.mask(where, x.shape)
    pooling = resolve(axes, x.shape, sizes)
    return _moments(Sets(pooling, axis_name, centered), x, where)


def merge(first: Moments, *others: Moments) -> Moments:
    """The Moments of several collections taken together.

    Associative and commutative; an empty Moments (count 0) is the identity.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> parts = [jn.moments(jnp.array(part), 0) for part in ([1.0, 2.0], [6.0])]
    >>> jn.merge(*parts).mean.tolist()
    [3.0]
    """
    parts = (first, *others)
    if not all(isinstance(part, Moments) for part in parts):
        wrong = next(type(part).__name__ for part in parts if not isinstance(part, Moments))
        raise TypeError(f"merge takes Moments: got {wrong}. Make them with jaxnorm.moments.")
    try:
        shape = jnp.broadcast_shapes(*(jnp.shape(part.mean) for part in parts))
    except ValueError:
        shapes = ", ".join(str(jnp.shape(part.mean)) for part in parts)
        raise ValueError(f"merged Moments must have shapes that broadcast: got {shapes}.") from None
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.broadcast_to(leaf, shape) for leaf in leaves]), *parts)
    return jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), stacked.merge(0))


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


def _real(dtype) -> jnp.dtype:
    return jnp.finfo(dtype).dtype


def _valid(where: jax.Array) -> jax.Array:
    return where if where.dtype == jnp.bool_ else where > 0


def needs_power(dtype) -> bool:
    """Whether squares of numbers of this dtype overflow in the dtype of the statistics: bfloat16."""
    return jnp.finfo(dtype).bits < 32 and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp


def make_frame(sets: Sets, x: jax.Array, where: jax.Array | None, lowest_power: int | None) -> Frame:
    """The frame of each set; ``lowest_power`` None leaves the scale alone."""
    x = lax.stop_gradient(x).reshape(sets.pooling.split)
    count: jax.Array | float
    if where is None:
        count = float(sets.pooling.size * sets.across(lax.psum, 1))
    else:
        weights = jnp.broadcast_to(where, x.shape).astype(_real(compute_dtype(x.dtype)))
        count = sets.sum(lax.stop_gradient(weights), None)
    power = None if lowest_power is None else _power(sets, x, where, lowest_power)
    frame = Frame(count, power, None)
    pivot = _divide(sets.careful_sum(local(sets, x, where, frame), where), count) if sets.centered else None
    return frame._replace(pivot=pivot)


def _power(sets: Sets, x: jax.Array, where: jax.Array | None, lowest: int) -> jax.Array:
    """The exponent of the largest element of each set, so that dividing by 2**power is exact and bounds it by 2."""
    size = jnp.abs(x).astype(_real(compute_dtype(x.dtype)))
    valid = None if where is None else _valid(where)
    largest = sets.across(lax.pmax, jnp.max(size, sets.axes, keepdims=True, initial=0, where=valid))
    limit = jnp.finfo(size.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, max(lowest, -limit), limit).astype(jnp.int8 if limit < 128 else jnp.int16)


def power_of_two(exponent: jax.Array, dtype) -> jax.Array:
    return jnp.ldexp(jnp.ones((), _real(dtype)), exponent.astype(jnp.int32))


def local(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> jax.Array:
    """``x`` split, in the frame of its set; what is masked out is replaced before it can do harm."""
    u = x.astype(compute_dtype(x.dtype)).reshape(sets.pooling.split)
    if where is not None:
        u = jnp.where(_valid(where), u, 0)
    if frame.power is not None:
        u = u * power_of_two(-frame.power.astype(jnp.int32), u.dtype)
    return u if frame.pivot is None else u - frame.pivot


def average(sets: Sets, values: jax.Array, where: jax.Array | None, count) -> jax.Array:
    """Weighted mean over each set, 0 for an empty one."""
    return _divide(sets.sum(values, where), count)


def _divide(total: jax.Array, count) -> jax.Array:
    count = jnp.asarray(count, _real(total.dtype))
    return total / jnp.where(count > 0, count, 1).astype(total.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(sets: Sets, x: jax.Array, where: jax.Array | None, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Offset and variance of each set, in its frame."""
    u = local(sets, x, where, frame)
    count = frame.size
    if frame.pivot is not None:  # A compiler replaces division by a constant with multiplication by its rounded inverse:
        count = jnp.where(jnp.isnan(frame.pivot), jnp.nan, count)  # hidden from it, constant sets give exactly 0.
    square = _divide(sets.careful_sum(jnp.real(u * jnp.conj(u)), where), count)
    if not sets.centered:
        return jnp.zeros_like(square, u.dtype), square
    offset = _divide(sets.careful_sum(u, where), count)
    return offset, jnp.maximum(square - jnp.real(offset * jnp.conj(offset)), 0)


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


def assemble(frame: Frame, offset: jax.Array, var: jax.Array) -> Moments:
    """The public value: the mean rounded to one number, powers of two put back."""
    mean = offset if frame.pivot is None else frame.pivot + offset
    if frame.power is not None:
        factor = power_of_two(frame.power, mean.dtype)
        mean, var = mean * factor, var * factor * factor
    return Moments(jnp.full_like(var, frame.size), mean, var)


def into_frame(moments: Moments, frame: Frame) -> Moments:
    """The inverse of :func:`assemble`."""
    mean, var = moments.mean, moments.var
    if frame.power is not None:
        factor = power_of_two(-frame.power.astype(jnp.int32), var.dtype)
        mean, var = mean * factor, var * factor * factor
    return Moments(moments.count, mean if frame.pivot is None else mean - frame.pivot, var)


@partial(jax.jit, static_argnums=0)
def _moments(sets: Sets, x: jax.Array, where: jax.Array | None) -> Moments:
    where = None if where is None else where.reshape(sets.pooling.fit(where.shape))
    frame = make_frame(sets, x, where, -100 if needs_power(x.dtype) else None)
    result = assemble(frame, *estimate(sets, x, where, frame))
    return jax.tree.map(lambda leaf: leaf.reshape(sets.pooling.kept), result)


@partial(jax.jit, static_argnums=0)
def _merge(sets: Sets, count: jax.Array, mean: jax.Array, var: jax.Array) -> Moments:
    pooling, between = sets.pooling, _moments(sets, mean, count)
    count, var = (leaf.reshape(pooling.fit(leaf.shape)) for leaf in (count, jnp.broadcast_to(var, mean.shape)))
    total = between.count.reshape(sets.sum(count, None).shape)
    share = count / jnp.where(total > 0, total, 1)  # before the product: an empty part changes no bit
    within = sets.sum(jnp.where(count > 0, var, 0) * share, None)
    return Moments(between.count, between.mean, between.var + within.reshape(pooling.kept))
