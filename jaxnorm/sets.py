"""Which sets are pooled over, on one device or several, and sums over them."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.axes import Pooling, number, unsplit
from jaxnorm.loops import MANY, add_in_turn, hold

STEPS = (8, 7, 9, 6, 10, 5, 4)  # of one in so many numbers the mean is near enough to that of all
LONG = 64  # from it on, sums along the last axis come first
POSITIONS, POSITIONS_OF_HALVES = 256, 16  # of so many or more, numbers for every channel weigh little


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
    alone: bool = False  # whether no two numbers of a set have the same parameters
    whole: bool = False  # whether a CPU is known to have all of x
    differentiated: bool = False  # whether gradients take the statistics as well
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

    def by_channel(self, dtype, *params: jax.Array | None) -> "Sets":
        """The same sets of numbers of this dtype, where they pool positions and groups of channels; each channel has its own.

        XLA's CPU back-end sums parts of the last axis in loops that find halves cast in memory and look up what channels
        share, and sums of positions in faster ones. Of few positions the numbers for every channel weigh more than that. All
        channels are one group if they are pooled as they are, and have parameters of their own.
        """
        pooling, last = self.pooling, len(self.pooling.shape) - 1
        positions = tuple(axis for axis in self.axes if axis < last)
        *others, channels = pooling.parts
        if any(len(part) > 1 for part in others) or [axis for axis in self.axes if axis >= last] != [last + len(channels) - 1]:
            return self
        if number(*(pooling.shape[axis] for axis in positions)) < (POSITIONS_OF_HALVES if jnp.finfo(dtype).bits < 32 else POSITIONS):
            return self
        if len(channels) == 1:
            shapes = [pooling.fit(a.shape) for a in params if a is not None]
            if not any(shape[last] > 1 for shape in shapes) or any(shape[axis] > 1 for shape in shapes for axis in positions):
                return self
        return replace(self, pooling=unsplit(pooling.shape, positions), groups=math.prod(channels[:-1]))

    def in_line(self, x: jax.Array, *params: jax.Array | None) -> tuple["Sets", list[jax.Array | None]]:
        """The same, and x and split parameters, with the pooled axes as one where they are the last ones and several.

        XLA's CPU back-end takes a loop for every axis: 1.1 to 2.8 times as long for layer norm of images, the longer the
        fewer channels they have.
        """
        split = self.pooling.split
        first = min((axis for axis in self.axes if number(split[axis]) > 1), default=len(split))
        tails = [a.shape[first:] for a in params if a is not None]
        several = 0 not in split and self.rows and number(*split[first:]) > max(map(number, split[first:]))
        if not several or any(tail != split[first:] and math.prod(tail) > 1 for tail in tails):
            return self, [x, *params]
        line = replace(self, pooling=unsplit((*split[:first], math.prod(split[first:])), (first,)))
        joined = [None if a is None else a.reshape(*a.shape[:first], math.prod(a.shape[first:])) for a in params]
        return line, [x.reshape(line.pooling.shape), *joined]

    def some(self, x: jax.Array) -> tuple["Sets", jax.Array]:
        """Sets of every so many-th number, evenly spread, and those of x: some of all sets, or all where no axis can be divided so.

        Every device that may have a part of an axis has as large a part of those, or they would be gathered. The last axis is
        left whole, for memory is read in pieces, and so are rows.
        """
        split, devices = self.pooling.split, jax.device_count()
        for axis in sorted((axis for axis in self.axes if axis < len(split) - 1 and not self.rows), key=lambda axis: axis == 0):
            steps = (step for step in STEPS if isinstance(split[axis], int) and split[axis] and split[axis] % (step * devices) == 0)
            if step := next(steps, None):
                few = (*split[:axis], split[axis] // step, *split[axis + 1 :])
                every = x.reshape(*few[: axis + 1], step, *few[axis + 1 :])
                return replace(self, pooling=unsplit(few, self.axes)), lax.index_in_dim(every, 0, axis + 1, keepdims=False)
        return self, x

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
        repeats = self.pooling.shape[-1] // self.groups
        repeated = jnp.broadcast_to(values[..., None], (*values.shape, repeats)).reshape(*values.shape[:-1], self.groups * repeats)
        return hold(repeated) if jnp.issubdtype(repeated.dtype, jnp.inexact) else repeated

    def gathered(self, values: jax.Array) -> jax.Array:
        """Their sum over each group, which a loop over x reads; not linear to JAX."""
        return values if self.groups is None else hold(self.shared(values, jnp.sum))

    def batched(self, size: int) -> "Sets":
        """Those of an array with one more axis in front."""
        pooling = self.pooling
        more = Pooling((size, *pooling.shape), ((size,), *pooling.parts), tuple(axis + 1 for axis in pooling.axes))
        return replace(self, pooling=more)

    @property
    def rows(self) -> bool:
        """Whether every set is a row: all of the last axes, and nothing of another."""
        longer = [axis for axis, size in enumerate(self.pooling.split) if number(size) > 1]
        pooled = [axis for axis in longer if axis in self.axes]
        return bool(pooled) and longer[-len(pooled) :] == pooled

    @property
    def in_one_loop(self) -> bool:
        """Whether XLA's CPU back-end makes one loop of all that is done with a set, as it can if they are many."""
        return (self.rows or self.alone) and number(*self.pooling.split_kept) >= MANY

    def across(self, collective, value):
        """``collective`` of ``value`` over ``axis_name``."""
        if self.axis_name is None:
            return value
        if not isinstance(self.axis_name, AxisGroups):
            return collective(value, self.axis_name)
        groups = [list(group) for group in self.axis_name.groups]
        try:
            return collective(value, self.axis_name.axis_name, axis_index_groups=groups)
        except NotImplementedError as error:  # of JAX, without a word
            raise NotImplementedError(
                f"groups of devices must not be used in shard_map with check_vma=True: got {self.axis_name}. Pass check_vma=False."
            ) from error

    def most_devices(self) -> int:
        """How many devices share statistics at most."""
        if isinstance(self.axis_name, AxisGroups):
            return max(map(len, self.axis_name.groups))
        return self.across(lax.psum, 1)

    def devices(self) -> int | jax.Array:
        """How many devices share statistics with this one: a traced number where groups differ in size."""
        if not isinstance(self.axis_name, AxisGroups) or len(set(map(len, self.axis_name.groups))) == 1:
            return self.most_devices()
        sizes = {device: len(group) for group in self.axis_name.groups for device in group}
        return jnp.asarray([sizes[device] for device in sorted(sizes)])[lax.axis_index(self.axis_name.axis_name)]

    def count(self, where: jax.Array | None, size) -> jax.Array | float:
        """How many elements, or how much weight, a set has: ``size``, of which JAX forgets that it is static without a mask."""
        if where is not None:
            return size
        count = self.size * self.devices()
        return float(count) if isinstance(count, int) else jnp.asarray(count, float)

    def sum(self, values: jax.Array, where: jax.Array | None) -> jax.Array:
        """Weighted sum over each set."""
        if where is not None and where.dtype != jnp.bool_:
            values, where = values * where.astype(values.dtype), None
        return self.across(lax.psum, self.shared(jnp.sum(values, self.axes, keepdims=True, where=where), jnp.sum))

    def careful_sum(self, values: jax.Array, where: jax.Array | None) -> jax.Array:
        """The same, of rows at once, else one axis after the other; not differentiable in reverse mode.

        Where the last axis is split the sum takes half the time on a CPU if it comes last.
        """
        if where is not None:
            values = jnp.where(where, values, 0) if where.dtype == jnp.bool_ else values * where.astype(values.dtype)
        if self.rows:
            return self.across(lax.psum, jnp.sum(values, self.axes, keepdims=True))
        late = values.ndim - 1 if number(values.shape[-1]) < LONG else None
        axes = sorted(self.axes, key=lambda axis: (axis == late, -axis))
        return self.across(lax.psum, self.gathered(add_in_turn(values, axes, self.whole)))


def bound(axis_name, groups=None, *, initializing: bool = False):
    """``axis_name`` where it is bound, in groups if those are given; None where no axis is, as under sharded ``jit``.

    Raises:
      ValueError: other axes are bound and one of these names is not, unless a module is initializing its parameters.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,) if axis_name is not None else ()
    if not names:
        return None
    try:  # here, since it takes long to import, for what most never need
        from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as bound_names
    except ImportError:  # JAX 0.8
        from jax.core import unsafe_get_axis_names_DO_NOT_USE as bound_names
    found = [name for name in bound_names() if not str(name).startswith(("_internal", "<axis"))]  # those of a pmap without a name
    missing = [name for name in names if name not in found]
    if missing and found and not initializing:
        raise ValueError(
            f"axis_name must be among the axes that are bound here, {', '.join(map(repr, found))}: got {axis_name!r}. "
            "Name one of those, or None to leave other devices aside."
        )
    names = tuple(name for name in names if name in found)
    if not names:
        return None
    return names if groups is None else AxisGroups(names, tuple(tuple(group) for group in groups))


def valid(where: jax.Array) -> jax.Array:
    """Which elements a mask, or weights, let count."""
    return where if where.dtype == jnp.bool_ else where > 0
