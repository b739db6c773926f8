"""Which sets are pooled over, on one device or several, and sums over them."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.axes import Pooling, unsplit
from jaxnorm.loops import hold

POSITIONS = 16  # of so many or more, numbers for every channel weigh little


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


def valid(where: jax.Array) -> jax.Array:
    """Which elements a mask, or weights, let count."""
    return where if where.dtype == jnp.bool_ else where > 0
