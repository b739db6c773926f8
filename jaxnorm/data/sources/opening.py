"""Readers of files: which one a file needs, kept open, and errors as one sentence each."""

import os
import re
import textwrap
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import PurePath
from typing import Any

from jaxnorm.data.sources.addresses import (
    SourceError,
    exists,
    inside,
    is_empty,
    is_folder,
    is_web,
    names_in,
    version,
)
from jaxnorm.data.sources.readers import PARQUET_SUFFIXES, ZARR_METADATA, Reader

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

LEROBOT = "lerobot.LeRobot"


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
    module, name = READERS.get(suffix := _suffix(path), suffix).split(".")
    return getattr(import_module(f"{__package__}.{module}"), name)(path)


def _suffix(path: str) -> str:
    """Return the suffix that names a file's format; a folder has the suffix of its contents.

    LeRobot's folders have none, and get the name of their reader.
    """
    # a signed address has a query after the name of the file
    suffix = PurePath(path.partition("?")[0] if is_web(path) else path).suffix.lower()
    if is_web(path) and suffix not in READERS:
        said = f"{path} must be one of {', '.join(READERS)}, by its suffix"
        raise SourceError(f"{said}: folders cannot be listed over the web. Name the files in it.")
    if is_web(path) and suffix == ".zarr":
        # some servers know the files in it alone
        return suffix
    folder = is_folder(path)
    if suffix in (".npy", ".npz") and folder:
        raise SourceError(f"{path} must be a file: it is a folder.")
    if is_empty(path):
        raise SourceError(f"{path} must hold data: it is empty.")
    if suffix in READERS:
        return suffix
    if folder and exists(inside(path, "meta/info.json")):
        return LEROBOT
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


def reader(path: str) -> Reader:
    try:
        changed = version(path)
    except FileNotFoundError:
        raise SourceError(_missing(path)) from None
    return _readers.opened(path, changed, os.getpid())


def guarded(path: str, read: Callable[[Reader], Any]) -> Any:
    """Read from a file; turn any error into a SourceError of one sentence that names the file."""
    try:
        return read(reader(path))
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
        elif isinstance(error, FileNotFoundError):
            # over HTTP the cause is any answer other than the file, or none
            cause = error.__cause__
            if cause is None or getattr(cause, "status", 0) == 404:
                raise SourceError(_missing(path)) from error
            said = _one_line(cause)
        else:
            # pyarrow raises an OSError without a number for damaged bytes
            raise _damaged(path, error) from error
        raise SourceError(f"{path} cannot be read: {said}.") from error
    except Exception as error:
        if said := _refused(error):
            raise SourceError(f"{path} cannot be read: {said}.") from error
        # parsers raise errors of any type at damaged bytes
        raise _damaged(path, error) from error


def _missing(path: str) -> str:
    return f"{path} must exist: there is no such file."


def _refused(error: Exception) -> str:
    """Return why a server of the web gives no part of a file, or "" for other errors."""
    # fsspec has no type for these errors; these are the words of fsspec 2026.9
    if "range requests" in str(error) or "Cannot seek streaming HTTP" in str(error):
        return "its server gives no parts of files. simplecache:: before the address copies it"
    # aiohttp's errors of answers have a status
    return _one_line(error) if isinstance(getattr(error, "status", None), int) else ""


def _damaged(path: str, error: Exception) -> SourceError:
    suffix = PurePath(path).suffix.lower()
    other = f" or no {suffix} file" if suffix in READERS and not is_folder(path) else ""
    said = f"{type(error).__name__}, {_one_line(error)}"
    return SourceError(f"{path} cannot be read, it may be damaged{other}: {said}.")


def _one_line(error: BaseException) -> str:
    """Shorten a library's message to one line, without the bytes of the file that it quotes."""
    quoted = r"""\bb('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    # NumPy compares the first bytes of a file, which say nothing in words
    text = re.sub(rf"[;,:]? expected {quoted},? (but )?got {quoted}", "", str(error))
    text = re.sub(quoted, "other bytes", text)
    text = re.sub(r"\\x[0-9a-f]{2}|[^\w\s!-~]", "?", text)
    return textwrap.shorten(text, 160, placeholder=" …").rstrip(".")
