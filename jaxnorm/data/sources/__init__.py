"""Data sets in files of many formats, local or at an address, read piece by piece."""

import os
import re
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import PurePath
from typing import Any, NamedTuple

from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.data.sources.addresses import (
    PatternError,
    SourceError,
    expanded,
    fingerprint,
    is_empty,
    is_folder,
    names_in,
    version,
)
from jaxnorm.data.sources.readers import (
    PARQUET_SUFFIXES,
    ZARR_METADATA,
    Batch,
    Cut,
    Leaf,
    Masked,
    Reader,
)
from jaxnorm.data.trees import prefix_of, sizes_in

__all__ = [
    "PIECE",
    "Batch",
    "Leaf",
    "PatternError",
    "Piece",
    "SourceError",
    "fingerprint",
    "left_out",
    "masks",
    "pieces",
]

COORDINATE = "a coordinate of the others"
# Approximate bytes of a piece.
PIECE = 64 << 20
READERS = {
    ".npy": "numpy_files.npy",
    ".npz": "numpy_files.npz",
    ".parquet": "parquet.Parquet",
    ".pq": "parquet.Parquet",
    ".zarr": "zarr_stores.Zarr",
    ".h5": "hdf5.Hdf5",
    ".hdf5": "hdf5.Hdf5",
    ".nc": "netcdf.NetCdf",
    ".nc4": "netcdf.NetCdf",
}


class Piece(NamedTuple):
    """A part of a file, named by a path and a cut, so that it can be sent to another process.

    ``along`` says which axis of each leaf is cut.
    """

    path: str
    along: tuple[tuple[str, int], ...]
    cut: Cut

    def read(self) -> Any:
        """Return the batch: an array, or a dict of arrays.

        Raises:
          SourceError: the file cannot be read.
        """
        batch = _guarded(self.path, lambda reader: reader.read(dict(self.along), self.cut))
        if list(batch) != [""]:
            return batch
        return Masked.of(batch[""], batch.masks) if batch.masks else batch[""]


def masks(batch) -> dict[str, Any] | None:
    """Return the masks of a batch, as :meth:`Normalizer.update` takes them for ``where``."""
    return getattr(batch, "masks", None)


def left_out(path: str, axes: Mapping[str, Axes]) -> dict[str, str]:
    """Return the leaves of a file that :func:`pieces` leaves out, with their contents in words.

    Such a leaf holds no array of numbers, or it is a coordinate of other leaves. The axes name the
    tree that holds the leaf, but not the leaf itself.

    Raises:
      SourceError: the file is missing or damaged.
    """
    found = {}
    for one in expanded([path])[:1]:
        leaves = _guarded(one, lambda reader: reader.leaves)
        found = {
            name: leaf.unsupported or COORDINATE
            for name, leaf in leaves.items()
            if name not in axes and prefix_of(axes, name) is not None and not leaf.part_of
            if leaf.unsupported or leaf.is_coordinate
        }
    return found


def pieces(paths: Sequence[str], axes: Mapping[str, Axes], sizes: Mapping[str, int]) -> list[Piece]:
    """Return the pieces of all files, which must have the same leaves.

    Args:
      paths: local files and folders, and addresses that fsspec knows, also with ``*``.
      axes: the reduction axes by leaf, or by a tree of leaves.
      sizes: sizes of split axes in patterns.

    Raises:
      SourceError: files that are missing, damaged, without elements, or whose leaves are not those
        of the first file; leaves that are named and hold no numbers.
    """
    result, first = [], None
    for path in expanded(paths):
        named = _named(path, axes)
        own = {leaf: axes[str(prefix_of(axes, leaf))] for leaf in named}
        shapes = {name: leaf.shape for name, leaf in named.items()}
        reductions = {leaf: _reduction(path, leaf, shapes[leaf], own[leaf], sizes) for leaf in own}
        unreduced = {leaf: reduction.stats_shape for leaf, reduction in reductions.items()}
        first = first or (path, unreduced)
        _check_same(*first, path, unreduced)
        whole = {leaf: _whole(path, reductions[leaf], own[leaf]) for leaf in named}
        result += _guarded(path, partial(_cut, path, whole))
    if not result:
        held = "holds" if len(paths) == 1 else "hold"
        raise SourceError(f"the files must hold elements: {', '.join(paths)} {held} none.")
    return result


def _cut(path: str, whole: Mapping[str, list[int]], reader: Reader) -> list[Piece]:
    # several leaves are cut along their first axis, so that a piece holds the same rows of each
    alone = len(whole) == 1
    along = {leaf: reader.axis(leaf, axes, alone) for leaf, axes in whole.items()}
    return [Piece(path, tuple(along.items()), cut) for cut in reader.cuts(along, PIECE)]


def _named(path: str, axes: Mapping[str, Axes]) -> dict[str, Leaf]:
    """Return the leaves to fit: those that axes name, and the arrays of numbers in named trees."""
    leaves = _guarded(path, lambda reader: reader.leaves)
    if not leaves:
        raise SourceError(f"{path} must hold arrays: it holds none.")
    named = {name: leaf for name, leaf in leaves.items() if prefix_of(axes, name) is not None}
    # a part of a longer leaf is named by itself, or is fitted with the longer one
    named = {
        name: leaf
        for name, leaf in named.items()
        if name in axes or not leaf.part_of or prefix_of(axes, leaf.part_of) is None
    }
    fitted = {
        name: leaf
        for name, leaf in named.items()
        if not leaf.unsupported and (name in axes or not leaf.is_coordinate)
    }
    if missing := [prefix for prefix in axes if prefix and not _names(prefix, named)]:
        if list(leaves) == [""]:
            way = f"give --pattern {axes[missing[0]]!r} without '{missing[0]}='"
            raise PatternError(f"{path} holds one array, which has no name: {way}.")
        wanted = ", ".join(map(repr, missing))
        held = ", ".join(repr(name) for name, leaf in leaves.items() if not leaf.part_of)
        raise PatternError(f"{path} must hold {wanted}: it holds {held}.")
    for prefix in axes:
        if (prefix in named and prefix not in fitted) or not _names(prefix, fitted):
            name = prefix if prefix in named else next(filter(_within(prefix), named))
            raise _no_number(path, name, leaves)
    return fitted


def _within(prefix: str) -> Callable[[str], bool]:
    return lambda name: prefix_of({prefix: 0}, name) is not None


def _names(prefix: str, leaves: Mapping[str, Leaf]) -> bool:
    return any(map(_within(prefix), leaves))


def _no_number(path: str, name: str, leaves: Mapping[str, Leaf]) -> SourceError:
    held = f"{path} must hold numbers{f' in {name!r}' if name else ''}"
    said = f"{held}: it holds {leaves[name].unsupported or COORDINATE}."
    other = next((leaf for leaf in leaves if leaf and not leaves[leaf].unsupported), None)
    if other is None:
        return SourceError(said)
    way = f"Name what is fitted: axes={{{other!r}: 0}}, or --pattern {f'{other}=[n]'!r}"
    return PatternError(f"{said} {way}.")


def _check_same(first: str, expected: dict, path: str, unreduced: dict) -> None:
    if differing := sorted(set(expected) ^ set(unreduced)):
        names = ", ".join(map(repr, differing))
        said = f"all files must hold the same arrays: {path} and {first} differ in {names}"
        raise SourceError(f"{said}.")
    for leaf, shape in unreduced.items():
        if shape != expected[leaf]:
            called = f" of {leaf!r}" if leaf else ""
            found = f"have shape {expected[leaf]} in {first}, {shape} in {path}"
            said = "all files must have the same features: the statistics"
            raise SourceError(f"{said}{called} {found}.")


def _reduction(path: str, leaf: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping) -> Any:
    try:
        return resolve(axes, shape, sizes_in(axes, sizes))
    except (TypeError, ValueError) as error:
        raise PatternError(f"{path}{f', {leaf!r}' if leaf else ''}: {error}") from None


def _whole(path: str, reduction, axes: Axes) -> list[int]:
    """Return the axes that are reduced as a whole, along which a leaf can be cut."""
    if not (whole := reduction.unsplit_reduced):
        said = "one axis must be reduced as a whole, to be read in pieces"
        raise PatternError(f"{path}: {said}: {axes!r} has none.")
    return whole


class _Readers(threading.local):
    """The last few readers of each thread, kept open.

    Threads do not share readers.
    """

    # A stream continues where it was read last, so a shared one would give wrong numbers. A shared
    # reader of Parquet ends the process: 8 threads over a file of 100 row groups ended in a
    # segmentation fault in 3 of 3 runs.

    def __init__(self):
        self.opened = lru_cache(maxsize=4)(_opened)


# `changed` and `process` are keys of the cache: a file that has changed, or that a process opened
# before it forked, is opened again
def _opened(path: str, changed: Any, process: int) -> Reader:
    kind = READERS[_suffix(path)]
    module, name = kind.split(".")
    return getattr(import_module(f"{__name__}.{module}"), name)(path)


def _suffix(path: str) -> str:
    """Return the suffix that names a file's format; a folder has the suffix of its contents."""
    suffix, folder = PurePath(path).suffix.lower(), is_folder(path)
    if suffix in (".npy", ".npz") and folder:
        raise SourceError(f"{path} must be a file: it is a folder.")
    if is_empty(path):
        raise SourceError(f"{path} must hold data: it is empty.")
    if suffix in READERS:
        return suffix
    names = names_in(path) if folder else []
    if any(name in ZARR_METADATA for name in names):
        return ".zarr"
    if any(name.lower().endswith(PARQUET_SUFFIXES) for name in names):
        return ".parquet"
    if folder:
        said = f"{path} is a folder without .parquet files and no Zarr store"
        raise SourceError(f"{said}. For .npy or .npz write {path.rstrip('/')}/*.npz.")
    raise SourceError(f"{path} must be one of {', '.join(READERS)}, by its suffix.")


_readers = _Readers()


def _reader(path: str) -> Reader:
    try:
        changed = version(path)
    except FileNotFoundError:
        raise SourceError(f"{path} must exist: there is no such file.") from None
    return _readers.opened(path, changed, os.getpid())


def _guarded(path: str, read: Callable[[Reader], Any]) -> Any:
    """Read from a file; turn any error into a SourceError of one sentence that names the file."""
    try:
        return read(_reader(path))
    except (SourceError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        # the extra has all libraries but this one, whose work others do for most files
        package = name if name == "netCDF4" else "'jaxnorm[formats]'"
        said = f"{path} needs {name}, which is not installed"
        raise SourceError(f"{said}: pip install {package}.") from None
    except OSError as error:
        if error.errno is not None:
            said = os.strerror(error.errno)
        # errors of fsspec have no number: s3fs raises a PermissionError without one
        elif isinstance(error, (PermissionError, ConnectionError, TimeoutError)):
            said = _one_line(error)
        else:
            # pyarrow raises an OSError without a number for damaged bytes
            raise _damaged(path, error) from error
        raise SourceError(f"{path} cannot be read: {said}.") from error
    except Exception as error:
        # parsers raise errors of any type at damaged bytes
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> SourceError:
    suffix = PurePath(path).suffix.lower()
    other = f" or no {suffix} file" if suffix in READERS and not is_folder(path) else ""
    said = f"{type(error).__name__}, {_one_line(error)}"
    return SourceError(f"{path} cannot be read, it may be damaged{other}: {said}.")


def _one_line(error: Exception) -> str:
    """Shorten a library's message to one line, without the bytes of the file that it quotes."""
    text = re.sub(r"""\bb('[^']*'|"[^"]*")""", "other bytes", str(error))
    text = re.sub(r"\\x[0-9a-f]{2}|[^\w\s!-~]", "?", text)
    return textwrap.shorten(text, 160, placeholder=" …").rstrip(".")
