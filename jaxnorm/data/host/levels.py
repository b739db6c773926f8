"""Sorted samples of rows of numbers, which hold their quantiles: the KLL sketch, in NumPy.

Level h holds elements that stand for 2**h elements each. If there are too many, a full level is
sorted, and every second element moves up. Whether the even or the odd ones move changes a rank by
2**h at most, and these errors cancel, since the choice is as good as random.

The sketch: Karnin, Lang and Liberty (2016), arXiv:1603.05346. Libraries of it were no choice. In
Apache DataSketches 5.2.0 for Python the choice is random without a seed, so that neither the same
data nor a resumed fit give the same numbers, and an update holds Python's lock, so that threads
do not help. Its t-digest gives the same numbers each time, and takes three times as long.
Rows share their levels here: one call of NumPy sorts all of them.
"""

from typing import NamedTuple

import numpy as np

# Bytes of the top level of a row. Levels below are smaller by SHRINK each, and a row takes up to
# three times this: 38 KiB.
TOP = 12800
SHRINK = 2 / 3
# Least elements of a level.
LEAST = 8
# Elements beyond which new ones are sorted and thinned before they enter a level, in top levels.
LARGE = 2


class Levels(NamedTuple):
    """The elements of rows that have as many elements each; none is NaN.

    Attributes:
      blocks: for each level, matrices of (rows, elements).
      halvings: for each level, how often it was halved so far.
    """

    blocks: tuple[tuple[np.ndarray, ...], ...]
    halvings: tuple[int, ...]

    @classmethod
    def empty(cls, rows: int) -> "Levels":
        """Return rows without elements."""
        return cls(((np.empty((rows, 0), np.float32),),), (0,))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The elements of a row in each level."""
        return tuple(sum(block.shape[1] for block in blocks) for blocks in self.blocks)

    def rows(self, some: np.ndarray | slice) -> "Levels":
        """Return some of the rows, by a mask, a slice or their indices."""
        return Levels(
            tuple(tuple(block[some] for block in blocks) for blocks in self.blocks), self.halvings
        )

    def level(self, number: int) -> np.ndarray:
        """Return the elements of a level in one matrix."""
        blocks = self.blocks[number]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)

    def extended(self, new: np.ndarray) -> "Levels":
        """Return the levels with new elements, a matrix of (rows, elements), which may be sorted.

        The levels keep copies of some, so the matrix may be used again.
        """
        blocks, halvings = [list(level) for level in self.blocks], list(self.halvings)
        most, level = LARGE * top(new.dtype), 0
        if new.shape[1] > most:
            new.sort(axis=1)
        while new.shape[1] > most:
            _append(blocks, halvings, level, new[:, :0])
            rest, new = _halved(new, level, halvings)
            _append(blocks, halvings, level, rest)
            level += 1
        _append(blocks, halvings, level, new.copy())
        return Levels(tuple(map(tuple, blocks)), tuple(halvings)).compressed()

    def merged(self, other: "Levels") -> "Levels":
        """Return the levels of the elements of both."""
        blocks, halvings = [list(level) for level in self.blocks], list(self.halvings)
        for number, level in enumerate(other.blocks):
            for block in level:
                _append(blocks, halvings, number, block)
            halvings[number] += other.halvings[number]
        return Levels(tuple(map(tuple, blocks)), tuple(halvings)).compressed()

    def compressed(self) -> "Levels":
        """Return the levels with so many halved that the rest is small enough."""
        lengths = list(self.lengths)
        if sum(lengths) <= sum(capacities(len(lengths), self._top())):
            return self
        blocks, halvings = [list(level) for level in self.blocks], list(self.halvings)
        while sum(lengths) > sum(most := capacities(len(lengths), self._top())):
            full = next(level for level, length in enumerate(lengths) if length > most[level])
            values = np.sort(np.concatenate(blocks[full], axis=1), axis=1)
            rest, half = _halved(values, full, halvings)
            blocks[full] = [rest]
            _append(blocks, halvings, full + 1, half.copy())
            lengths = [sum(block.shape[1] for block in level) for level in blocks]
        return Levels(tuple(map(tuple, blocks)), tuple(halvings))

    def weighted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all elements of each row, and how many elements each of them stands for."""
        parts = [self.level(number) for number in range(len(self.blocks))]
        weights = [np.full(part.shape[1], 2**number) for number, part in enumerate(parts)]
        return np.concatenate(parts, axis=1), np.concatenate(weights)

    def _top(self) -> int:
        return top(np.result_type(*(block for level in self.blocks for block in level)))


def top(dtype: np.dtype) -> int:
    """Return the most elements of the top level."""
    return TOP // dtype.itemsize


def capacities(levels: int, most: int) -> list[int]:
    """Return the most elements of each level, from the lowest to the top one.

    >>> capacities(3, 900)
    [400, 600, 900]
    """
    return [max(LEAST, round(most * SHRINK**above)) for above in reversed(range(levels))]


def _append(blocks: list, halvings: list[int], level: int, block: np.ndarray) -> None:
    while len(blocks) <= level:
        # no view, which would keep all of the block in memory
        blocks.append([np.empty((len(block), 0), block.dtype)])
        halvings.append(0)
    if block.shape[1]:
        blocks[level] = [kept for kept in blocks[level] if kept.shape[1]] + [block]


def _halved(values: np.ndarray, level: int, halvings: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the last element if their number is odd, and every second one of the others."""
    even = values.shape[1] // 2 * 2
    first = _choice(level, halvings[level])
    halvings[level] += 1
    return values[:, even:].copy(), values[:, first:even:2]


def _choice(level: int, number: int) -> int:
    """Return 0 or 1, as good as random, but the same in every run: one bit for two halvings.

    The second takes the other elements than the first, so that the errors of both cancel in part.
    The mixing of bits: SplitMix64, Steele, Lea and Flood (2014).
    """
    bits = ((level << 40) + number // 2 + 1) * 0x9E3779B97F4A7C15 % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return (bits >> 63) ^ (number & 1)
