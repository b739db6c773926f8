"""Data sets in files, read piece by piece: .npy and .npz memory-mapped where they can be, Parquet by row groups, Zarr by chunks."""

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxnorm.axes import Axes, resolve
from jaxnorm.data.sources.addresses import SourceError, fingerprint
from jaxnorm.data.trees import of_prefix, sizes_in

__all__ = ["PIECE", "Batch", "Leaf", "Piece", "SourceError", "fingerprint", "masks", "pieces"]

PIECE = 64 << 20  # bytes of a piece, or so
Cut = tuple[int, int]  # first and last


class Batch(dict):
    """Arrays by leaf, and the masks of those in which something is missing."""

    masks: dict[str, np.ndarray]


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


class Reader(Protocol):
    """One file. ``leaves`` is found without reading the data; the only leaf of a bare array has the name ''."""

    leaves: dict[str, Leaf]

    def cuts(self, along: Mapping[str, int]) -> list[Cut]: ...
    def read(self, along: Mapping[str, int], cut: Cut) -> Batch: ...


class Piece(NamedTuple):
    """A part of a file: small, and to be sent to whoever reads it. ``along`` says which axis of each leaf is cut."""

    path: str
    along: tuple[tuple[str, int], ...]
    cut: Cut

    def read(self) -> Any:
        """The batch: an array, or a dict of arrays.

        Raises:
          SourceError: the file cannot be read.
        """
        batch = _guarded(self.path, lambda reader: reader.read(dict(self.along), self.cut))
        return batch[""] if list(batch) == [""] else batch


def masks(batch) -> dict[str, np.ndarray] | None:
    """What :meth:`Normalizer.update` takes as ``where``."""
    return getattr(batch, "masks", None)


def pieces(paths: Sequence[str], axes: Mapping[str, Axes], sizes: Mapping[str, int]) -> list[Piece]:
    """The pieces of all files, which must have the same leaves.

    Raises:
      SourceError: files that are missing, damaged, of other leaves than the first one, or without elements.
    """
    result, first = [], None
    for path in paths:
        leaves = _guarded(path, lambda reader: reader.leaves)
        named = {leaf: facts for leaf, facts in leaves.items() if of_prefix(axes, leaf) is not None}
        if missing := [prefix for prefix in axes if prefix and not any(of_prefix({prefix: 0}, leaf) for leaf in named)]:
            raise SourceError(f"{path} must hold {', '.join(map(repr, missing))}: it holds {', '.join(map(repr, leaves))}.")
        along = {leaf: _cut_axis(path, leaf, facts.shape, axes[str(of_prefix(axes, leaf))], sizes) for leaf, facts in named.items()}
        unreduced = {leaf: _unreduced(facts.shape, axes[str(of_prefix(axes, leaf))], sizes) for leaf, facts in named.items()}
        first = first or (path, unreduced)
        _check_same(*first, path, unreduced)
        cuts = _guarded(path, partial(_cuts, along=along))
        result += [Piece(path, tuple(along.items()), cut) for cut in cuts]
    if not result:
        raise SourceError(f"the files must hold elements: {', '.join(paths)} {'holds' if len(paths) == 1 else 'hold'} none.")
    return result


def _check_same(first: str, expected: dict, path: str, unreduced: dict) -> None:
    if differing := sorted(set(expected) ^ set(unreduced)):
        raise SourceError(f"all files must hold the same arrays: {path} and {first} differ in {', '.join(map(repr, differing))}.")
    for leaf, shape in unreduced.items():
        if shape != expected[leaf]:
            called = f" of {leaf!r}" if leaf else ""
            raise SourceError(
                f"all files must have the same features: the statistics{called} have shape {expected[leaf]} in {first}, {shape} in {path}."
            )


def _unreduced(shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return resolve(axes, shape, sizes_in(axes, sizes)).stats_shape


def _cut_axis(path: str, leaf: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]) -> int:
    """The first axis that is reduced as a whole."""
    try:
        reduction = resolve(axes, shape, sizes_in(axes, sizes))
    except (TypeError, ValueError) as error:
        raise SourceError(f"{path}{f', {leaf!r}' if leaf else ''}: {error}") from None
    starts = [sum(map(len, reduction.parts[:axis])) for axis in range(len(shape))]
    whole = [axis for axis, start in enumerate(starts) if len(reduction.parts[axis]) == 1 and start in reduction.axes]
    if not whole:
        raise SourceError(f"{path}: one axis must be reduced as a whole, to be read in pieces: {axes!r} has none.")
    return whole[0]


def opened(path: str) -> Reader:
    """The reader of a file; the last few stay open."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(path)
    return _opened(path, file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _opened(path: str, changed: int) -> Reader:
    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        raise SourceError(f"{path} must be one of {', '.join(READERS)}, by its suffix.")
    if Path(path).is_file() and Path(path).stat().st_size == 0:
        raise SourceError(f"{path} must hold data: it is empty.")
    return READERS[suffix](path)


def _cuts(reader: Reader, along: Mapping[str, int]) -> list[Cut]:
    return reader.cuts(along)


def _guarded(path: str, read: Callable[[Reader], Any]) -> Any:
    try:
        return read(opened(path))
    except (SourceError, MemoryError):
        raise
    except FileNotFoundError:
        raise SourceError(f"{path} must exist: there is no such file.") from None
    except ModuleNotFoundError as error:
        raise SourceError(f"{path} needs {error.name}, which is not installed: pip install 'jaxnorm[formats]'.") from None
    except Exception as error:  # whatever a parser makes of damaged bytes
        raise SourceError(f"{path} cannot be read, it may be damaged: {type(error).__name__}, {error}.") from error


def _even_cuts(leaves: Mapping[str, Leaf], along: Mapping[str, int], step: int = 1) -> list[Cut]:
    """Cuts of PIECE bytes or so, each a multiple of ``step`` long; shorter leaves end earlier."""
    length = max((leaves[leaf].shape[axis] for leaf, axis in along.items()), default=0)
    total = sum(math.prod(leaves[leaf].shape) * np.dtype(leaves[leaf].dtype).itemsize for leaf in along)
    if not total:
        return []
    rows = max(step, int(PIECE * length // total) // step * step)
    return [(start, min(start + rows, length)) for start in range(0, length, rows)]


def _part(array, axis: int, cut: Cut) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(*cut),)]


def _batch(arrays: dict[str, np.ndarray], masks: dict[str, np.ndarray] | None = None) -> Batch:
    batch = Batch(arrays)
    batch.masks = masks or {}
    return batch


class _Npy:
    def __init__(self, path: str):
        self.arrays = {"": np.load(path, mmap_mode="r", allow_pickle=False)}
        self.leaves = {name: Leaf(tuple(array.shape), str(array.dtype)) for name, array in self.arrays.items()}

    def cuts(self, along: Mapping[str, int]) -> list[Cut]:
        return _even_cuts(self.leaves, along)

    def read(self, along: Mapping[str, int], cut: Cut) -> Batch:
        return _batch({leaf: _part(self.arrays[leaf], axis, cut) for leaf, axis in along.items()})


class _Npz(_Npy):
    """Members that are stored are memory-mapped; compressed ones are unpacked as a stream, again from the start to go back."""

    def __init__(self, path: str):
        self.path, self.arrays, self.leaves = path, {}, {}
        self.streams: dict[str, tuple[int, Any, tuple]] = {}
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):  # no array
                    continue
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    shape, fortran, dtype = _header(file)
                    offset = file.tell()
                self.leaves[name] = Leaf(shape, str(dtype))
                if member.compress_type == zipfile.ZIP_STORED and math.prod(shape) and not dtype.hasobject:
                    start = _data_start(path, member) + offset
                    self.arrays[name] = np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")

    def read(self, along: Mapping[str, int], cut: Cut) -> Batch:
        return _batch({leaf: self._read(leaf, axis, cut) for leaf, axis in along.items()})

    def _read(self, leaf: str, axis: int, cut: Cut) -> np.ndarray:
        if leaf in self.arrays:
            return _part(self.arrays[leaf], axis, cut)
        if leaf not in self.streams or self.streams[leaf][0] > cut[0]:
            file = zipfile.ZipFile(self.path).open(f"{leaf}.npy")  # noqa: SIM115 it goes on with the next piece
            self.streams[leaf] = (0, file, _header(file))
        at, file, (shape, fortran, dtype) = self.streams[leaf]
        if dtype.hasobject:
            raise SourceError(f"{self.path} must hold numbers in {leaf!r}: it holds Python's objects.")
        if axis or fortran:  # not in one piece of the stream
            return _part(np.load(self.path)[leaf], axis, cut)
        row = math.prod(shape[1:]) * dtype.itemsize
        first, last = (min(row_, shape[0]) for row_ in cut)
        file.seek((first - at) * row, 1)
        data = file.read((last - first) * row)
        self.streams[leaf] = (last, file, (shape, fortran, dtype))
        return np.frombuffer(data, dtype).reshape(last - first, *shape[1:])


def _header(file) -> tuple[Any, bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    return (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)


def _data_start(path: str, member: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind a local header, whose name and extra field have lengths of their own."""
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)
        return member.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist())


class _Parquet:
    """Columns of numbers, or of lists of one length; nulls are masked. Cut between row groups, of which a piece holds one or more."""

    def __init__(self, path: str):
        import pyarrow.parquet

        self.file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        groups = self.file.metadata.num_row_groups
        self.rows = [self.file.metadata.row_group(group).num_rows for group in range(groups)]
        self.bytes = [self.file.metadata.row_group(group).total_byte_size for group in range(groups)]
        first = next(self.file.iter_batches(batch_size=1), None)
        names = self.file.schema_arrow.names
        widths = {name: () if first is None else _widths(first.column(name)) for name in names}
        self.leaves = {name: Leaf((sum(self.rows), *widths[name]), "float64") for name in names}

    def cuts(self, along: Mapping[str, int]) -> list[Cut]:
        cuts, start, size = [], 0, 0
        for group, count in enumerate(self.bytes):
            if size and size + count > PIECE:
                cuts.append((start, group))
                start, size = group, 0
            size += count
        return [*cuts, (start, len(self.bytes))] if size and sum(self.rows) else []

    def read(self, along: Mapping[str, int], cut: Cut) -> Batch:
        table = self.file.read_row_groups(list(range(*cut)), columns=list(along))
        found = {name: _values(table.column(name).combine_chunks()) for name in along}
        return _batch(
            {name: values for name, (values, _) in found.items()}, {name: mask for name, (_, mask) in found.items() if mask is not None}
        )


def _is_list(kind) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _widths(row) -> tuple[int, ...]:
    """The shape of a column's value in one row, whatever it holds: (), or how many numbers are in its lists, none where it is null."""
    if not _is_list(row.type):
        return ()
    while _is_list(row.type):
        row = row.flatten()
    return (len(row),)


def _values(column) -> tuple[np.ndarray, np.ndarray | None]:
    """A column's numbers, and a mask where it has nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if _is_list(column.type):
        lengths = pc.list_value_length(column).unique()
        if column.null_count or len(lengths) > 1:
            raise ValueError(f"lists must have one length and no nulls: lengths are {lengths.to_pylist()[:5]}")
        inner, mask = _values(column.flatten())
        rows = len(column)
        return inner.reshape(rows, -1), mask if mask is None else mask.reshape(rows, -1)
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    return column.fill_null(pa.scalar(0).cast(column.type)).to_numpy(zero_copy_only=False), ~np.asarray(column.is_null())


class _Zarr(_Npy):
    def __init__(self, path: str):
        import zarr

        root = zarr.open(path, mode="r")
        found = {"": root} if isinstance(root, zarr.Array) else dict(_members(root))
        self.arrays = found
        self.leaves = {name: Leaf(tuple(array.shape), str(array.dtype)) for name, array in found.items()}

    def cuts(self, along: Mapping[str, int]) -> list[Cut]:
        """Between chunks, so that none is unpacked twice."""
        return _even_cuts(self.leaves, along, math.lcm(*(self.arrays[leaf].chunks[axis] for leaf, axis in along.items())))


def _members(group, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, array in sorted(group.arrays()):
        yield prefix + name, array
    for name, inner in sorted(group.groups()):
        yield from _members(inner, f"{prefix}{name}/")


READERS: dict[str, Callable[[str], Reader]] = {".npy": _Npy, ".npz": _Npz, ".parquet": _Parquet, ".pq": _Parquet, ".zarr": _Zarr}
