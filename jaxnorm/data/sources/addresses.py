"""Where files lie: paths of this machine, and addresses that fsspec knows (``gs://``)."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class SourceError(Exception):
    """A file that is missing, damaged, or does not fit the others: one sentence."""


class PatternError(SourceError):
    """Axes or sizes that do not fit the file."""


def is_address(path: str) -> bool:
    """Whether a path names its file system: ``memory://a.npy``.

    >>> is_address("s3://bucket/a.npy"), is_address("file:///tmp/a.npy"), is_address("data/a.npy")
    (True, True, False)
    """
    return "://" in path


def local(path: str) -> Path | None:
    """Return the path on this machine; None for a file elsewhere."""
    if is_address(path):
        scheme, _, rest = path.partition("://")
        return Path(rest) if scheme in ("file", "local") else None
    return Path(path)


def remote(path: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises:
      SourceError: fsspec does not know it, or needs a library for it.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)
    except ValueError as error:
        raise SourceError(f"{path} must be an address that fsspec knows: {error}.") from None
    except ImportError as error:
        raise SourceError(f"{path} needs another library: {error}.") from None


def opened_file(path: str) -> Any:
    """Open a file for reading, here or elsewhere."""
    if (found := local(path)) is not None:
        return open(found, "rb")
    system, inside = remote(path)
    return system.open(inside, "rb")


def version(path: str) -> Any:
    """Return what a file's own entry says of its last change, without looking into a folder.

    Raises:
      FileNotFoundError: there is none.
    """
    if (found := local(path)) is not None:
        return found.stat().st_mtime_ns
    system, inside = remote(path)
    return system.ukey(inside)


def is_empty(path: str) -> bool:
    """Whether it is a file without data."""
    if (found := local(path)) is not None:
        return found.is_file() and found.stat().st_size == 0
    system, inside = remote(path)
    facts = system.info(inside)
    return facts["type"] == "file" and facts["size"] == 0


def is_folder(path: str) -> bool:
    if (found := local(path)) is not None:
        return found.is_dir()
    system, inside = remote(path)
    return system.info(inside)["type"] == "directory"  # isdir would fetch a file by HTTP


def names_in(folder: str) -> list[str]:
    """Return the names of all files in a folder, at any depth, within the folder, in order."""
    if (found := local(folder)) is not None:
        names = (os.path.relpath(file, found) for file in _files(found))
        return sorted(name.replace(os.sep, "/") for name in names)
    system, inside = remote(folder)
    start = len(inside.rstrip("/")) + 1
    return sorted(name[start:] for name in system.find(inside))


def expanded(paths: Sequence[str]) -> list[str]:
    """Return the paths with the files in place of each address with ``*``, as a shell does here.

    >>> expanded(["data/*.npy"])
    ['data/*.npy']
    """
    found: list[str] = []
    for path in map(os.fspath, paths):
        if local(path) is not None or not _is_pattern(path):
            found.append(path)
            continue
        system, inside = remote(path)
        names = sorted(system.glob(inside))
        if not names:
            raise SourceError(f"{path} must name files: there are none.")
        found += map(system.unstrip_protocol, names)
    return found


def _is_pattern(path: str) -> bool:
    return "*" in path and "::" not in path


def fingerprint(path: str | os.PathLike) -> list:
    """Return what changes whenever a file does, for JSON, by names, sizes and times alone.

    A file has its size and its time of modification in nanoseconds. A folder (Zarr, Parquet in
    parts) has the number of its files, the newest time, and a hash of all names, sizes and times.
    A file of another machine has what its file system says of it: size, time or ETag.

    Raises:
      SourceError: there is no such file.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     before = fingerprint(file.name)
    ...     os.utime(file.name, ns=(1, 1))
    ...     fingerprint(file.name) == before, fingerprint(file.name)
    (False, [0, 1])
    """
    path = os.fspath(path)
    try:
        found = local(path)
        if found is None:
            return _remote_fingerprint(path)
        if not found.is_dir():
            facts = found.stat()
            return [facts.st_size, facts.st_mtime_ns]
        files = sorted(_inside(found))
    except FileNotFoundError:
        raise SourceError(f"{path} must exist: there is no such file.") from None
    return [len(files), max((time for *_, time in files), default=0), _hash(files)]


def _inside(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file in a folder, at any depth."""
    facts = [(file, os.stat(file)) for file in _files(folder)]
    return [(os.path.relpath(file, folder), fact.st_size, fact.st_mtime_ns) for file, fact in facts]


def _files(folder: str | Path) -> Iterator[str]:
    return (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _remote_fingerprint(path: str) -> list:
    system, inside = remote(path)
    system.invalidate_cache()
    if _is_pattern(path):
        facts = system.glob(inside, detail=True)
    elif (facts := system.info(inside))["type"] == "directory":
        facts = system.find(inside, detail=True)
    return [_hash(sorted((str(key), str(value)) for key, value in facts.items()))]


def _hash(facts: list) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
