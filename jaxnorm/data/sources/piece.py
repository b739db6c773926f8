"""Pieces of files: parts that are read one by one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data.sources.horizons import Horizon
from jaxnorm.data.sources.opening import guarded
from jaxnorm.data.sources.readers import Batch, Cut, Masked, Reader, part


class Piece(NamedTuple):
    """A part of a file, named by a path and a cut, so that it can be sent to another process.

    Attributes:
      path: the file.
      along: which axis of each leaf is cut.
      cut: where it is cut.
      size: its bytes in memory.
      diff: along which axis of each leaf differences are fitted. If that axis is cut, the piece
        has one row more, so that no difference is lost between pieces.
      weights: leaf and axis that are weighted, function and leaf of the weights.
      uncut: masks that are read whole.
      horizons: leaves that are fitted with an axis of steps.
      unfitted: leaves that horizons are relative to, and that are not fitted themselves.
      rows: which rows of the cut belong to the piece, or None for all. The cut is read once for
        all pieces that share it.
    """

    path: str
    along: tuple[tuple[str, int], ...]
    cut: Cut
    size: int
    diff: tuple[tuple[str, int], ...] = ()
    weights: tuple[tuple[str, int, str, str], ...] = ()
    uncut: tuple[str, ...] = ()
    horizons: tuple[Horizon, ...] = ()
    unfitted: tuple[str, ...] = ()
    rows: Cut | None = None

    @property
    def after(self) -> int:
        """The rows that are read after the cut."""
        difference = int(any(pair in self.along for pair in self.diff))
        return max([difference, *(horizon.steps - 1 for horizon in self.horizons)])

    def read(self) -> Any:
        """Return the batch: an array, or a dict of arrays.

        Raises:
          SourceError: the file cannot be read.
        """
        return bare(guarded(self.path, self._read))

    def _read(self, reader: Reader) -> Batch:
        if self.rows is None:
            return self._read_cut(reader)
        key = self.along, self.cut, self.after, self.uncut
        if reader.kept is None or reader.kept[0] != key:
            # frees the memory of the last cut first
            reader.kept = None
            reader.kept = key, self._read_cut(reader)
        batch = reader.kept[1]
        if self.rows[1] >= max(reader.rows(leaf, axis, self.cut) for leaf, axis in self.along):
            reader.kept = None
        return Batch(self._of_rows(batch), self._of_rows(batch.masks))

    def _of_rows(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        first, last = self.rows or (0, 0)
        found, along = dict(arrays), dict(self.along)
        for leaf in arrays.keys() & along.keys():
            # a mask of length one holds for all rows
            if arrays[leaf].shape[along[leaf]] > 1:
                found[leaf] = part(arrays[leaf], along[leaf], (first, last + self.after))
        return found

    def _read_cut(self, reader: Reader) -> Batch:
        batch = reader.read(dict(self.along), self.cut, self.after)
        for name in self.uncut:
            mask = reader.read({name: 0}, (0, reader.leaves[name].shape[0]))
            batch = Batch({**batch, **mask}, batch.masks | mask.masks)
        return batch

    def starts(self, leaf: str) -> np.ndarray | None:
        """Return which rows of a leaf, along its first axis, begin an episode; None for one."""
        cut = self.cut if dict(self.along)[leaf] == 0 else None
        starts = guarded(self.path, lambda reader: reader.starts(leaf, cut, self.after))
        if starts is None or self.rows is None:
            return starts
        return starts[self.rows[0] : self.rows[1] + self.after]

    def count(self, leaf: str) -> int:
        """Return the number of rows of a leaf in the piece, without those after it."""
        axis = dict(self.along)[leaf]
        number = guarded(self.path, lambda reader: reader.rows(leaf, axis, self.cut))
        first, last = self.rows or (0, number)
        return max(0, min(last, number) - first)


def bare(batch: Batch) -> Any:
    """Return a batch as :class:`Normalizer` takes it: an array that has no name stands alone."""
    if list(batch) != [""]:
        return batch
    return Masked.of(batch[""], batch.masks) if batch.masks else batch[""]


def masks(batch) -> dict[str, Any] | None:
    """Return the masks of a batch, as :meth:`Normalizer.update` takes them for ``where``."""
    return getattr(batch, "masks", None)
