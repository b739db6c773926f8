"""The interface of readers, one for each format: a file's leaves, its cuts and its parts."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxnorm.data.host.arguments import is_real_number

PARQUET_SUFFIXES = (".parquet", ".pq")
# Files that make a folder a Zarr store.
ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray")
# What a leaf holds that gives the positions of others.
COORDINATE = "a coordinate of the others"
# The first index, and the index after the last.
Cut = tuple[int, int]


class Batch(dict):
    """Arrays by leaf, with masks for the leaves that lack elements."""

    masks: dict[str, np.ndarray]

    def __init__(self, arrays: Mapping, masks: Mapping | None = None):
        super().__init__(arrays)
        self.masks = dict(masks or {})

    @classmethod
    def of(cls, found: Mapping[str, tuple[np.ndarray, np.ndarray | None]]) -> "Batch":
        """Build a batch from pairs: the values of each leaf, and their mask or None."""
        masks = {leaf: mask for leaf, (_, mask) in found.items() if mask is not None}
        return cls({leaf: values for leaf, (values, _) in found.items()}, masks)


class Masked(np.ndarray):
    """A bare array that lacks elements, with its mask."""

    masks: dict[str, np.ndarray]

    @classmethod
    def of(cls, array: np.ndarray, masks: Mapping[str, np.ndarray]) -> "Masked":
        bare = array.view(cls)
        bare.masks = dict(masks)
        return bare


class Leaf(NamedTuple):
    """Shape and dtype of an array or a column.

    Attributes:
      shape: the shape.
      dtype: NumPy's name for a dtype of numbers, or the file format's word for another type:
        "string".
      is_number: whether the dtype is one of numbers.
      is_coordinate: whether the array holds positions of other leaves. It is fitted only if a path
        names it.
      part_of: the longer leaf that this one is a part of, or "". A part is fitted only if a path
        names it or its tree, and not the longer leaf as well.
      obstacle: why numbers cannot be fitted: their arrangement in words, or "".
      dims: the names of the axes; none if the file has no names.
    """

    shape: tuple[int, ...]
    dtype: str
    is_number: bool = True
    is_coordinate: bool = False
    part_of: str = ""
    obstacle: str = ""
    dims: tuple[str, ...] = ()

    @property
    def unsupported(self) -> str:
        """Return why the leaf cannot be fitted: its contents in words, or "" if it can."""
        if self.obstacle or not self.is_number:
            return self.obstacle or self.dtype
        return "" if self.shape else "one number"


def leaf_of(shape: tuple[int, ...], dtype: np.dtype) -> Leaf:
    """Return the Leaf of a NumPy array; booleans count as the numbers 0 and 1."""
    # kind "T" is NumPy's StringDType
    if dtype.kind == "T":
        return Leaf(shape, "strings", is_number=False)
    if dtype.hasobject:
        return Leaf(shape, "Python's objects", is_number=False)
    return Leaf(shape, str(dtype), is_real_number(dtype))


class Reader(Protocol):
    """Reader of one file. It finds ``leaves`` without reading data; a bare array is the leaf ''."""

    leaves: dict[str, Leaf]
    # whether cuts are between rows, the first axis of all leaves
    cuts_rows_only: bool = False
    # a part that was read for several pieces, with what tells it from others, or None
    kept: tuple[Any, Batch] | None = None

    def axis(self, leaf: str, axes: list[int], alone: bool) -> int:
        """Choose the axis to cut a leaf along from ``axes``, which are reduced as a whole."""
        ...

    def cuts(self, along: Mapping[str, int], size: int, within: bool) -> list[Cut]:
        """Return cuts of about ``size`` bytes; ``along`` says which axis of each leaf is cut.

        ``within`` says whether chunks that are larger are cut, too.
        """
        ...

    def read(self, along: Mapping[str, int], cut: Cut, after: int = 0) -> Batch:
        """Return a part of each leaf, with as many rows ``after`` the cut, if there are."""
        ...

    def starts(self, leaf: str, cut: Cut | None, after: int) -> np.ndarray | None:
        """Return which rows of a part begin an episode, or None if there are no episodes.

        ``cut`` is None for all rows.
        """
        return None

    def episodes(self, leaves: Collection[str]) -> int | None:
        """Return how many episodes these leaves are of, or None if the file does not tell."""
        return None

    def nbytes(self, along: Mapping[str, int], cut: Cut) -> int:
        """Return the bytes of a part in memory."""
        return sum(
            self.row(leaf, axis) * self.rows(leaf, axis, cut) for leaf, axis in along.items()
        )

    def row(self, leaf: str, axis: int, dtype: str = "") -> int:
        """Return the bytes of one index along an axis, in the dtype of the leaf or another one."""
        shape = self.leaves[leaf].shape
        return nbytes((*shape[:axis], *shape[axis + 1 :]), dtype or self.leaves[leaf].dtype)

    def rows(self, leaf: str, axis: int, cut: Cut) -> int:
        """Return the rows of a part, which are fewer in a leaf that ends earlier than others."""
        first, last = (min(row, self.leaves[leaf].shape[axis]) for row in cut)
        return last - first


def rows_of(leaves: Mapping[str, Leaf], along: Mapping[str, int], size: int) -> tuple[int, int]:
    """Return the length of the longest leaf, and how many rows of all leaves fit ``size`` bytes."""
    length = max((leaves[leaf].shape[axis] for leaf, axis in along.items()), default=0)
    total = sum(nbytes(leaves[leaf].shape, leaves[leaf].dtype) for leaf in along)
    return (length, max(1, size * length // total)) if total else (0, 1)


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def cuts_of(length: int, rows: int) -> list[Cut]:
    """Return cuts of ``rows`` rows each, for the longest leaf; shorter leaves end earlier."""
    return [(start, min(start + rows, length)) for start in range(0, length, rows)]


def part(array, axis: int, cut: Cut) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(*cut),)]
