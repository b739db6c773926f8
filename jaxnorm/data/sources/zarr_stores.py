"""Reader of Zarr arrays and groups, decoded by xarray; each chunk is unpacked once if possible."""

import base64
import math
import struct
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxnorm.data.sources.addresses import SourceError, is_folder, local, remote
from jaxnorm.data.sources.readers import (
    ZARR_METADATA,
    Batch,
    Cut,
    Leaf,
    cuts_of,
    leaf_of,
    nbytes,
    part,
    rows_of,
)

# Attributes of the Climate and Forecast (CF) conventions for packed numbers and missing elements.
PACKED = ("scale_factor", "add_offset", "_Unsigned")
MISSING = ("_FillValue", "missing_value")
# Most bytes that are unpacked at a time; a chunk that is larger is unpacked whole.
UNPACKED = 64 << 20


class Zarr:
    def __init__(self, path: str):
        root = _opened(path)
        found = {"": root} if hasattr(root, "chunks") else dict(_members(root))
        self.arrays = {name: Array(array) for name, array in found.items()}
        self.leaves = {
            name: array.leaf._replace(is_coordinate=_dimensions(array.array) == [_last(name)])
            for name, array in self.arrays.items()
        }

    def axis(self, leaf: str, axes: list[int], alone: bool) -> int:
        """Choose the first axis, or for an array alone the axis with the smallest slabs."""
        return min(axes, key=self.arrays[leaf].slab_size) if alone else axes[0]

    def cuts(self, along: Mapping[str, int], size: int) -> list[Cut]:
        """Return cuts between chunks of all leaves or, failing that, of the largest leaf.

        If a chunk is larger than ``size``, a piece is as large as the chunk.
        """
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

    def read(self, along: Mapping[str, int], cut: Cut) -> Batch:
        found = {leaf: self.arrays[leaf].read(axis, cut) for leaf, axis in along.items()}
        return Batch.of(found)


class Array:
    """A Zarr array. If chunks are longer than the parts to read, the last ones stay unpacked."""

    def __init__(self, array: Any):
        self.array = array
        pairs = zip(array.chunks, array.shape, strict=True)
        self.chunks = tuple(max(1, min(pair)) for pair in pairs)
        self.attributes = _attributes(array)
        self.leaf = leaf_of(tuple(array.shape), array.dtype)
        if self.attributes.keys() & set(PACKED):
            self.leaf = Leaf(self.leaf.shape, "float64", self.leaf.is_number)
        self.chunk_size = nbytes(self.chunks, array.dtype) if self.leaf.is_number else 0
        # the slab that was unpacked last: (axis, number) and its array, or None
        self.slab: Any = None

    def slab_size(self, axis: int) -> int:
        """Return the bytes of a slab: all chunks that share an index along the axis."""
        shape = self.array.shape
        return nbytes((*shape[:axis], self.chunks[axis], *shape[axis + 1 :]), self.array.dtype)

    def read(self, axis: int, cut: Cut) -> tuple[np.ndarray, np.ndarray | None]:
        chunk, length = self.chunks[axis], self.array.shape[axis]
        first, last = (min(row, length) for row in cut)
        whole = first % chunk == 0 and (last % chunk == 0 or last == length)
        if whole or chunk <= last - first or not self.array.size:
            return self._decoded(part(self.array, axis, cut))
        slabs = []
        for number in range(first // chunk, -(-last // chunk)):
            start = number * chunk
            inside = (max(first - start, 0), min(last - start, chunk))
            slabs.append(part(self._slab(axis, number), axis, inside))
        return self._decoded(np.concatenate(slabs, axis))

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

    def _decoded(self, raw) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the decoded numbers, and a mask of the elements that are not fill values."""
        raw = np.asarray(raw)
        if not self.attributes:
            return raw, None
        from xarray import Variable
        from xarray.conventions import decode_cf_variable

        packed = Variable([f"axis {axis}" for axis in range(raw.ndim)], raw, self.attributes)
        values = decode_cf_variable("", packed, decode_times=False).values
        missing = np.isnan(values) if self.attributes.keys() & set(MISSING) else np.zeros(1, bool)
        if not self.attributes.keys() & set(PACKED):
            # xarray turns integers with fill values into floats, which lose digits
            values = raw
        return values, ~missing if missing.any() else None


def _dimensions(array) -> list[str]:
    """Return the names of an array's axes, as xarray writes them."""
    format_3 = getattr(array.metadata, "dimension_names", None)
    return list(format_3 or array.attrs.get("_ARRAY_DIMENSIONS", ()))


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _attributes(array) -> dict[str, Any]:
    """Return the attributes that say how numbers are packed and which elements are missing.

    An array's own fill value counts as a number. It means a missing element only if it is NaN, or
    if xarray wrote it instead of ``_FillValue`` (format 2).
    """
    if array.dtype.kind not in "biuf":
        return {}
    given = array.attrs.asdict()
    found = {name: given[name] for name in PACKED + MISSING if given.get(name) is not None}
    # in format 3 xarray writes a float's fill value as base64 of a float64's bytes
    if isinstance(text := found.get("_FillValue"), str) and array.dtype.kind == "f":
        (found["_FillValue"],) = struct.unpack("<d", base64.b64decode(text))
    fill = array.fill_value
    of_xarray = array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in given
    if fill is not None and np.isnan(fill):
        # an attribute may name another fill value, which stays: NaN is masked anyway
        found.setdefault("_FillValue", fill)
    elif fill is not None and of_xarray:
        found["_FillValue"] = fill
    return found


def _opened(path: str) -> Any:
    import zarr

    if not is_folder(path):
        raise SourceError(f"{path} must be a folder, as Zarr writes it: it is a file.")
    if (found := local(path)) is not None:
        store: Any = str(found)
    else:
        from fsspec import FSMap

        system, inside = remote(path)
        store = zarr.storage.FsspecStore.from_mapper(FSMap(inside, system), read_only=True)
    try:
        return zarr.open(store, mode="r")
    except FileNotFoundError:
        raise SourceError(
            f"{path} must be a Zarr: it holds no {', no '.join(ZARR_METADATA)}."
        ) from None


def _members(group, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, array in sorted(group.arrays()):
        yield prefix + name, array
    for name, inner in sorted(group.groups()):
        yield from _members(inner, f"{prefix}{name}/")
