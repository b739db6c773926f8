"""Formulas over a block that is too large for the registers, in several passes over its pieces.

A block holds (P, N, C): positions, images, channels. Groups span all positions of an image, and d
neighbouring channels. The statistics of a group lie in (1, N, C), at each of its channels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxnorm.arguments.axes import Reduction
from jaxnorm.engine.exponents import LARGE, of_largest
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import divide_exactly


@dataclass(frozen=True)
class InLanes(Reduction):
    """The reduction of (P, N, C) over positions, and over groups of d neighbouring channels.

    The second of two reduction axes is the last one, of which a group is a part.
    """

    d: int = 1

    @property
    def group_size(self) -> int:
        """The number of elements of each group."""
        return self.shape[0] * self.d


class _UnknownSumError(Exception):
    """Ends a formula that has asked for all sums of a pass."""


@dataclass(frozen=True, eq=False)
class Passes(PlainLoops):
    """Loops over the pieces of a block, which take as many passes as a formula needs.

    A formula ``formula(loops, at)`` says what is done with the piece at a slice of positions, as if
    it were all. It is traced once for each pass. A sum over positions is known when a pass is over.
    In each pass the formula is told the sums of the passes before, and asks for the next ones. What
    it makes of sums, for each group, it makes between two passes, since a compiler may round it
    otherwise in each loop.

    Attributes:
      piece: positions of a piece.
      known: what is known of groups, by its turn among all that the formula asks for.
      wanted: how many sums are found in this pass.
      asked: the summands of this piece, and the axes to sum, by turn.
      turns: counts what the formula asks for.
    """

    piece: int = 1
    known: dict[int, jax.Array] = field(default_factory=dict)
    wanted: int = 0
    asked: dict[int, tuple[jax.Array, tuple[int, ...]]] = field(default_factory=dict)
    turns: Iterator[int] = field(default_factory=count)

    @property
    def d(self) -> int:
        """The number of channels of a group."""
        reduction = self.spec.reduction
        assert isinstance(reduction, InLanes)
        return reduction.d

    def split(self, values: jax.Array) -> jax.Array:
        """Return the values, which lie as the loops need them."""
        return values

    def reduce(self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum) -> jax.Array:
        """Return the sum over all pieces, if it is known, or else ask for it."""
        turn = next(self.turns)
        if turn in self.known:
            return self.known[turn]
        self.asked[turn] = (values, axes)
        if len(self.asked) >= self.wanted:
            raise _UnknownSumError
        # nothing that depends on it may be asked for in the same pass
        return jnp.full((1, *values.shape[1:]), jnp.nan, values.dtype)

    def reduce_axes(
        self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum
    ) -> jax.Array:
        """Return the sum over the channels of each group, if the axes have them."""
        return self._once(lambda: self._over_channels(values, axes))

    def divide(
        self, total: jax.Array, count: Any, nonconstant: jax.Array | None = None
    ) -> jax.Array:
        """Return ``total / count``, rounded once: XLA on a CPU would divide again in each loop."""
        return self._once(lambda: divide_exactly(total, count, total))

    def after(self, formula: Callable, passes: Sequence[int]) -> "Passes":
        """Return the loops that know the sums of passes which find so many each."""
        loops = self
        for wanted in passes:
            loops = loops._after_pass(formula, wanted)
        return loops

    def run(self, formula: Callable, at) -> Any:
        """Return what the formula makes of a piece, when all sums are known."""
        return formula(self._again(), at)

    def over_pieces(self, function: Callable, by: Callable = jnp.add) -> list[jax.Array]:
        """Add up, or reduce otherwise, the arrays ``function(at)`` of each piece."""
        whole, rest = self._pieces
        join = lambda totals, found: [by(a, b) for a, b in zip(totals, found, strict=True)]
        step = lambda i, totals: join(totals, function(self._at(i)))
        first = function(rest) if rest else function(self._at(0))
        return lax.fori_loop(0 if rest else 1, whole, step, first)

    def each_piece(self, function: Callable) -> None:
        """Call ``function(at)`` for each piece."""
        whole, rest = self._pieces
        pl.loop(0, whole)(lambda i: function(self._at(i)))
        if rest:
            function(rest)

    @property
    def _pieces(self) -> tuple[int, Any]:
        """How many pieces are whole, and the slice of the rest, or None."""
        whole, rest = divmod(self.spec.reduction.shape[0], self.piece)
        return whole, pl.ds(whole * self.piece, rest) if rest else None

    def _at(self, i):
        return pl.ds(i * self.piece, self.piece)

    def _after_pass(self, formula: Callable, wanted: int) -> "Passes":
        axes: dict[int, tuple[int, ...]] = {}

        def summands(at):
            asking = self._again(wanted)
            with suppress(_UnknownSumError):
                formula(asking, at)
            axes.update((turn, each) for turn, (_, each) in asking.asked.items())
            return [values.sum(0, keepdims=True) for values, _ in asking.asked.values()]

        sums = self.over_pieces(summands)
        loops = self._again()
        for (turn, each), total in zip(axes.items(), sums, strict=True):
            loops.known[turn] = self._over_channels(total, each)
        with suppress(_UnknownSumError):  # results of sums do not depend on the piece
            formula(loops, pl.ds(0, 1))
        return loops

    def _again(self, wanted: int = 0) -> "Passes":
        return replace(self, known=dict(self.known), wanted=wanted, asked={}, turns=count())

    def _once(self, make: Callable[[], jax.Array]) -> jax.Array:
        turn = next(self.turns)
        if turn not in self.known:
            self.known[turn] = make()
        return self.known[turn]

    def _over_channels(self, values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        return sum_of_groups(values, self.d) if 2 in axes else values


def passes_over(spec: Spec, shape: tuple[int, int, int], d: int, piece: int) -> Passes:
    """Return the loops over a block of this shape, in float32."""
    axes = (0,) if d == 1 else (0, 2)
    reduction = InLanes(shape, tuple((size,) for size in shape), axes, d)
    return Passes(replace(spec, reduction=reduction, dtype=jnp.dtype(jnp.float32)), piece=piece)


def by_unit(loops: Passes, x, run: Callable) -> None:
    """Call ``run(unit)`` for a block of x.

    ``unit`` has the power of two that each group must be multiplied with, as in tpu_rows.py. It is
    None where no group of the block needs one.
    """
    if x.dtype == jnp.float32:
        run(None)
        return
    size = lambda at: [jnp.abs(x[at].astype(jnp.float32)).max(0, keepdims=True)]
    (largest,) = loops.over_pieces(size, jnp.maximum)
    usual = jnp.max(largest) < 2.0**LARGE
    pl.when(usual)(lambda: run(None))
    pl.when(jnp.logical_not(usual))(
        lambda: run(of_largest(largest_of_groups(largest, loops.d), lambda e: 2.0**-e))
    )


def sum_of_groups(values: jax.Array, d: int) -> jax.Array:
    """Return for each channel of (1, N, C) the sum of its group of d channels.

    It is NaN for a group with anything that is not finite.
    """
    width = values.shape[-1]
    if d == 1:
        return values
    if d == width:
        return jnp.broadcast_to(values.sum(-1, keepdims=True), values.shape)
    # The matrix unit adds up the lanes of a group. It takes bfloat16 and adds in float32. Three
    # bfloat16 numbers make up any float32.
    same = jnp.where(group_of((width, 1), 0, d) == group_of((1, width), 1, d), 1.0, 0.0)
    by_group = lambda a: jnp.dot(
        a.astype(jnp.bfloat16), same.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )
    # Inf and NaN times the 0 of another group would be NaN
    finite = jnp.abs(values[0].astype(jnp.bfloat16).astype(jnp.float32)) < jnp.inf
    left, parts = jnp.where(finite, values[0], 0.0), []
    for _ in range(3):
        parts.append(by_group(left))
        left = left - left.astype(jnp.bfloat16).astype(jnp.float32)
    total = (parts[2] + parts[1]) + parts[0]
    return jnp.where(by_group(jnp.where(finite, 0.0, 1.0)) > 0, jnp.nan, total)[None]


def largest_of_groups(values: jax.Array, d: int) -> jax.Array:
    """Return for each channel of (1, N, C) the largest element of its group of d channels."""
    if d == 1:
        return values
    group = group_of(values.shape, 2, d)

    def step(i, found):
        own = jnp.where(group == i, values, 0).max(-1, keepdims=True)
        return jnp.where(group == i, own, found)

    return lax.fori_loop(jnp.int32(0), jnp.int32(values.shape[-1] // d), step, values)


def group_of(shape: tuple[int, ...], axis: int, d: int) -> jax.Array:
    """Return the number of the group of each element, where d elements of an axis are one."""
    # `//` would ask for the device, which is unknown ahead of time
    return lax.div(lax.broadcasted_iota(jnp.int32, shape, axis), jnp.int32(d))
