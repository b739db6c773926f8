"""Pieces of files: parts that are read one by one."""

from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data.sources.opening import guarded
from jaxnorm.data.sources.readers import Batch, Cut, Masked, Reader


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
    """

    path: str
    along: tuple[tuple[str, int], ...]
    cut: Cut
    size: int
    diff: tuple[tuple[str, int], ...] = ()
    weights: tuple[tuple[str, int, str, str], ...] = ()
    uncut: tuple[str, ...] = ()

    @property
    def after(self) -> int:
        """The rows that are read after the cut."""
        return int(any(pair in self.along for pair in self.diff))

    def read(self) -> Any:
        """Return the batch: an array, or a dict of arrays.

        Raises:
          SourceError: the file cannot be read.
        """
        return bare(guarded(self.path, self._read))

    def _read(self, reader: Reader) -> Batch:
        batch = reader.read(dict(self.along), self.cut, self.after)
        for name in self.uncut:
            mask = reader.read({name: 0}, (0, reader.leaves[name].shape[0]))
            batch = Batch({**batch, **mask}, batch.masks | mask.masks)
        return batch

    def starts(self, leaf: str) -> np.ndarray | None:
        """Return which rows of a leaf, along its first axis, begin an episode; None for one."""
        cut = self.cut if dict(self.along)[leaf] == 0 else None
        return guarded(self.path, lambda reader: reader.starts(leaf, cut, self.after))


def bare(batch: Batch) -> Any:
    """Return a batch as :class:`Normalizer` takes it: an array that has no name stands alone."""
    if list(batch) != [""]:
        return batch
    return Masked.of(batch[""], batch.masks) if batch.masks else batch[""]


def masks(batch) -> dict[str, Any] | None:
    """Return the masks of a batch, as :meth:`Normalizer.update` takes them for ``where``."""
    return getattr(batch, "masks", None)
