"""Arrays in chunks, in Zarr, NetCDF and HDF5: each chunk is unpacked once if possible."""

import math
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from jaxnorm.data.sources.readers import Batch, Cut, Leaf, Reader, cuts_of, nbytes, part, rows_of

# Most bytes that are unpacked at a time; a chunk that is larger is unpacked whole.
UNPACKED = 64 << 20
# Chunks of a part that are unpacked once more for the next part, which begins within the last one.
# With fewer, both parts take the chunk from a temporary file: of differences from row to row, at a
# chunk for each part, that takes 0.8 of the time.
DIRECT = 4


class Chunked:
    """An array in chunks. If chunks are longer than the parts to read, the last ones stay unpacked.

    Args:
      array: an array that is sliced like NumPy's, in a file.
      chunks: the shape of its chunks.
    """

    def __init__(self, array: Any, chunks: tuple[int, ...]):
        self.array = array
        pairs = zip(chunks, array.shape, strict=True)
        self.chunks = tuple(max(1, min(pair)) for pair in pairs)
        # the slab that was unpacked last: (axis, number) and its array, or None
        self.slab: Any = None

    @property
    def chunk_size(self) -> int:
        """The bytes of a chunk; 0 for an array without numbers."""
        return 0 if self.array.dtype.hasobject else nbytes(self.chunks, self.array.dtype)

    def slab_size(self, axis: int) -> int:
        """Return the bytes of a slab: all chunks that share an index along the axis."""
        shape = self.array.shape
        return nbytes((*shape[:axis], self.chunks[axis], *shape[axis + 1 :]), self.array.dtype)

    def raw(self, axis: int, cut: Cut) -> np.ndarray:
        """Return a part of the array as it is in the file."""
        chunk, length = self.chunks[axis], self.array.shape[axis]
        first, last = (min(row, length) for row in cut)
        whole = first % chunk == 0 and (last % chunk == 0 or last == length)
        if whole or chunk * DIRECT <= last - first or not math.prod(self.array.shape):
            return np.asarray(part(self.array, axis, cut))
        slabs = []
        for number in range(first // chunk, -(-last // chunk)):
            start = number * chunk
            inside = (max(first - start, 0), min(last - start, chunk))
            slabs.append(part(self._slab(axis, number), axis, inside))
        return np.concatenate(slabs, axis)

    def _slab(self, axis: int, number: int) -> np.ndarray:
        """Return all chunks of one index along the axis, unpacked in a temporary file."""
        if self.slab is None or self.slab[0] != (axis, number):
            start = number * self.chunks[axis]
            stop = min(start + self.chunks[axis], self.array.shape[axis])
            region = [slice(0, size) for size in self.array.shape]
            region[axis] = slice(start, stop)
            shape = tuple(piece.stop - piece.start for piece in region)
            with tempfile.TemporaryFile() as file:
                # the file of the old slab takes disk space, which the new one may need
                self.slab = None
                target = np.memmap(file, self.array.dtype, "w+", 0, shape)
            self._unpack(target, axis, tuple(region))
            self.slab = (axis, number), target
        return self.slab[1]

    def _unpack(self, target: np.ndarray, along: int, region: tuple[slice, ...]) -> None:
        """Fill in a region; halve it between chunks until a part is small enough to unpack."""
        sizes = [piece.stop - piece.start for piece in region]
        chunks = [-(-size // chunk) for size, chunk in zip(sizes, self.chunks, strict=True)]
        axis = int(np.argmax(chunks))
        if chunks[axis] == 1 or math.prod(sizes) * target.itemsize <= UNPACKED:
            target[(*region[:along], slice(None), *region[along + 1 :])] = self.array[region]
            return
        middle = region[axis].start + chunks[axis] // 2 * self.chunks[axis]
        for half in (slice(region[axis].start, middle), slice(middle, region[axis].stop)):
            self._unpack(target, along, (*region[:axis], half, *region[axis + 1 :]))


class ChunkedLeaf(Protocol):
    """An array of a :class:`ChunkedReader`."""

    chunks: tuple[int, ...]

    @property
    def chunk_size(self) -> int: ...

    def slab_size(self, axis: int) -> int: ...

    def read(self, axis: int, cut: Cut) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a part, and the mask of the elements that are not missing, or None."""
        ...


class ChunkedReader(Reader):
    """Reader of arrays in chunks, by name."""

    arrays: Mapping[str, ChunkedLeaf]
    leaves: dict[str, Leaf]

    def axis(self, leaf: str, axes: list[int], alone: bool) -> int:
        """Choose the first axis, or for an array alone the axis with the smallest slabs."""
        return min(axes, key=self.arrays[leaf].slab_size) if alone else axes[0]

    def cuts(self, along: Mapping[str, int], size: int, within: bool) -> list[Cut]:
        """Return cuts between chunks of all leaves or, failing that, of the largest leaf.

        If a chunk is larger than ``size``, a piece is as large as the chunk, unless it is to be
        cut ``within`` chunks.
        """
        if not within:
            size = max([size, *(self.arrays[leaf].chunk_size for leaf in along)])
        length, rows = rows_of(self.leaves, along, size)
        steps = {leaf: self.arrays[leaf].chunks[axis] for leaf, axis in along.items()}
        # a multiple of all chunk lengths cuts no chunk, but may be far longer than a piece
        common = math.lcm(*steps.values())
        # a piece of twice the size is still small enough
        if rows < common <= 2 * rows:
            rows = common
        elif common > rows:
            short = [leaf for leaf in along if steps[leaf] <= rows]
            by_size = {self.arrays[leaf].slab_size(along[leaf]): steps[leaf] for leaf in short}
            common = by_size[max(by_size)] if short else 1
        return cuts_of(length, rows // common * common)

    def read(self, along: Mapping[str, int], cut: Cut, after: int = 0) -> Batch:
        cut = cut[0], cut[1] + after
        found = {leaf: self.arrays[leaf].read(axis, cut) for leaf, axis in along.items()}
        return Batch.of(found)
