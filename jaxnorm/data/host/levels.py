"""Sorted samples of rows of numbers, which hold their quantiles: the KLL sketch, in NumPy.

Level h holds elements that stand for 2**h elements each. If there are too many, a full level is
sorted, and of every two neighbours one moves up, the first or the second in all of the row. That
changes a rank by 2**h at most, and these errors cancel, since the choice is as good as random. It
is a hash of the row's elements: the same data give the same choices, and parts that are merged have
choices of their own.

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
    """The elements of rows that have as many elements each in every level; none is NaN.

    Attributes:
      blocks: for each level, matrices of (rows, elements).
    """

    blocks: tuple[tuple[np.ndarray, ...], ...]

    @classmethod
    def empty(cls, rows: int) -> "Levels":
        """Return rows without elements."""
        return cls(((np.empty((rows, 0), np.float32),),))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The elements of a row in each level."""
        return tuple(sum(block.shape[1] for block in blocks) for blocks in self.blocks)

    @property
    def dtype(self) -> np.dtype:
        """The widest dtype of the elements."""
        return np.result_type(*(block for level in self.blocks for block in level))

    def rows(self, some: np.ndarray | slice) -> "Levels":
        """Return some of the rows, by a mask, a slice or their indices."""
        return Levels(tuple(tuple(block[some] for block in blocks) for blocks in self.blocks))

    def level(self, number: int) -> np.ndarray:
        """Return the elements of a level in one matrix."""
        blocks = self.blocks[number]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)

    def extended(self, new: np.ndarray) -> "Levels":
        """Return the levels with new elements, a matrix of (rows, elements), which may be sorted.

        The levels keep copies of some, so the matrix may be used again.
        """
        blocks, most, level = [list(level) for level in self.blocks], LARGE * top(new.dtype), 0
        if new.shape[1] > most:
            new.sort(axis=1)
        while new.shape[1] > most:
            rest, new = _halved(new, level)
            _append(blocks, level, rest)
            level += 1
        _append(blocks, level, new.copy())
        return Levels(tuple(map(tuple, blocks))).compressed()

    def merged(self, other: "Levels") -> "Levels":
        """Return the levels of the elements of both."""
        blocks = [list(level) for level in self.blocks]
        for number, level in enumerate(other.blocks):
            for block in level:
                _append(blocks, number, block)
        return Levels(tuple(map(tuple, blocks))).compressed()

    def compressed(self) -> "Levels":
        """Return the levels with so many halved that the rest is small enough."""
        lengths, largest = list(self.lengths), top(self.dtype)
        if sum(lengths) <= sum(capacities(len(lengths), largest)):
            return self
        blocks = [list(level) for level in self.blocks]
        while sum(lengths) > sum(most := capacities(len(lengths), largest)):
            full = next(level for level, length in enumerate(lengths) if length > most[level])
            rest, half = _halved(np.sort(np.concatenate(blocks[full], axis=1), axis=1), full)
            blocks[full] = [rest]
            _append(blocks, full + 1, half)
            lengths = [sum(block.shape[1] for block in level) for level in blocks]
        return Levels(tuple(map(tuple, blocks)))

    def weighted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all elements of each row, and how many elements each of them stands for."""
        parts = [self.level(number) for number in range(len(self.blocks))]
        weights = [np.full(part.shape[1], 2**number) for number, part in enumerate(parts)]
        return np.concatenate(parts, axis=1), np.concatenate(weights)


def top(dtype: np.dtype) -> int:
    """Return the most elements of the top level."""
    return TOP // dtype.itemsize


def capacities(levels: int, most: int) -> list[int]:
    """Return the most elements of each level, from the lowest to the top one.

    >>> capacities(3, 900)
    [400, 600, 900]
    """
    return [max(LEAST, round(most * SHRINK**above)) for above in reversed(range(levels))]


def _append(blocks: list, level: int, block: np.ndarray) -> None:
    while len(blocks) <= level:
        # no view, which would keep all of the block in memory
        blocks.append([np.empty((len(block), 0), block.dtype)])
    if block.shape[1]:
        blocks[level] = [kept for kept in blocks[level] if kept.shape[1]] + [block]


def _halved(values: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last element if their number is odd, and one of every two of the others."""
    even = values.shape[1] // 2 * 2
    pairs, second = values[:, :even], _second(values, level)
    # a copy, since a view would keep all of the elements in memory
    half = pairs[:, ::2].copy()
    half[second] = pairs[second, 1::2]
    return values[:, even:].copy(), half


def _second(values: np.ndarray, level: int) -> np.ndarray:
    """Return whether the second of two neighbours is taken: for each row as good as random.

    A row alone decides, so that it does not matter which rows are computed with it. The mixing of
    bits: SplitMix64, Steele, Lea and Flood (2014).
    """
    words = values.view(f"u{values.itemsize}")
    bits = np.bitwise_xor.reduce(words, axis=1).astype(np.uint64)
    bits += np.uint64(((values.shape[1] << 8) + level + 1) * 0x9E3779B97F4A7C15 % 2**64)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(63)).astype(bool)
