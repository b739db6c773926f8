"""Sums over segments: the positions along one axis that ids name."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.axes import is_static, rough_product

# elements that are added in sequence, with an error of 2e-7 at most, before their sums are added
RUN = 64
# 2**32 / golden ratio: multiples of it, whatever the step between them, spread evenly (Knuth 1998,
# section 6.4)
GOLDEN = 2654435769
# scatter indices: of the partial sum that each position is added to, then of the sum that each of
# these is added to, and so on
ScatterIndices = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Segments:
    """The static arguments of segments: how ids name groups.

    Attributes:
      axis: the axis of the split shape along which segments lie.
      number: number of segments in each row.
      positions: shape of the ids: ``(n,)``, or with the axes before it, where each row has segments
        of its own.
    """

    axis: int
    number: int
    positions: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes of the axes of the ids, without the axis of the positions."""
        return self.positions[:-1]

    def scatter_indices(self, ids: jax.Array) -> ScatterIndices:
        """Return the scatter indices of each position, by which no sequential sum is long.

        A scatter adds in sequence, with an error of 1e-5 and more for 1e5 elements. So a segment
        has a partial sum for every RUN of its elements. These have partial sums again, until one is
        left. An id out of range has an index beyond all of them.
        """
        rows, size = math.prod(self.rows), self.positions[-1]
        most, scatter_indices, length = rough_product(size), [], rows * size
        groups, end = self._groups, jnp.asarray(self._groups, jnp.int32)
        inside = (ids >= 0) & (ids < self.number)
        first = ids.astype(jnp.int32).reshape(rows, size) + self.number * lax.broadcasted_iota(
            jnp.int32, (rows, size), 0
        )
        group = jnp.where(inside.reshape(rows, size), first, end).reshape(-1)
        while most > RUN:
            # a segment of m elements gets ceil(m / RUN) partial sums, and they end at `ends`
            partial_sums = (
                jax.ops.segment_sum(jnp.ones_like(group), group, groups) + (RUN - 1)
            ) // RUN
            ends = jnp.cumsum(partial_sums)
            # a multiplicative hash: neighbours go to different partial sums of their segment
            mixed = (lax.iota(jnp.uint32, length) * jnp.uint32(GOLDEN) >> 8).astype(jnp.int32)
            own, start = (
                a.at[group].get(mode="fill", fill_value=1)
                for a in (partial_sums, ends - partial_sums)
            )
            # static bound on the number of partial sums: each segment rounds up once
            length = (
                length
                + (RUN - 1) * (min(groups, length) if is_static((groups, length)) else groups)
            ) // RUN
            scatter_indices.append(
                jnp.where(
                    group < end, start + mixed % jnp.maximum(own, 1), jnp.asarray(length, jnp.int32)
                )
            )
            # how many segments end before each partial sum
            ended = jnp.zeros(length, jnp.int32).at[ends].add(1, mode="drop")
            # where k segments have ended, the partial sum belongs to segment k
            group, most = jnp.cumsum(ended), -(-most // RUN)
        return (*scatter_indices, group)

    def reduce(
        self, values: jax.Array, scatter_indices: ScatterIndices, by: Callable = jax.ops.segment_sum
    ) -> jax.Array:
        """Sum over each segment, or reduce it otherwise."""
        flat = self._flat(values, self.positions[-1])
        for at, length in zip(
            scatter_indices, (*(a.shape[0] for a in scatter_indices[1:]), self._groups), strict=True
        ):
            flat = by(flat, at, length)
        return self._in_place(flat, self.number)

    def broadcast_to_positions(
        self, stats: jax.Array, scatter_indices: ScatterIndices
    ) -> jax.Array:
        """Broadcast the statistics of segments to their positions.

        A position whose id is out of range receives NaN. This is the transpose of a sum by
        :meth:`reduce`.
        """
        flat = self._flat(stats, self.number)
        for at in reversed(scatter_indices):
            flat = jnp.take(flat, at, axis=0, mode="fill")
        return self._in_place(flat, self.positions[-1])

    def inside(self, scatter_indices: ScatterIndices, ndim: int) -> jax.Array:
        """Return which positions belong to a segment."""
        of_one = scatter_indices[0] < jnp.asarray(
            scatter_indices[1].shape[0] if len(scatter_indices) > 1 else self._groups, jnp.int32
        )
        return self._in_place(
            of_one.reshape(-1, *(1,) * (ndim - len(self.positions))), self.positions[-1]
        )

    @property
    def _groups(self) -> int:
        return math.prod(self.rows) * self.number

    def _flat(self, values: jax.Array, size: int) -> jax.Array:
        """Move the axis of positions or segments to the front, merged with the rows."""
        if not self.rows:
            shape = (*values.shape[: self.axis], size, *values.shape[self.axis + 1 :])
            return jnp.moveaxis(jnp.broadcast_to(values, shape), self.axis, 0)
        rest = values.shape[self.axis + 1 :]
        return jnp.broadcast_to(values, (*self.rows, size, *rest)).reshape(-1, *rest)

    def _in_place(self, flat: jax.Array, size: int) -> jax.Array:
        return (
            flat.reshape(*self.rows, size, *flat.shape[1:])
            if self.rows
            else jnp.moveaxis(flat, 0, self.axis)
        )
