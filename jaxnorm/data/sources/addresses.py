"""Locations of files: local paths, and addresses that fsspec knows (``gs://``)."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxnorm.data.sources.readers import ZARR_METADATA


class SourceError(ValueError):
    """An error, in one sentence, of a file that is missing, damaged or unlike the others."""


class PatternError(SourceError):
    """An error of axes or sizes that do not fit a file."""


def is_address(path: str) -> bool:
    """Return whether a path names its file system: ``memory://a.npy``.

    >>> is_address("s3://bucket/a.npy"), is_address("file:///tmp/a.npy"), is_address("data/a.npy")
    (True, True, False)
    """
    return "://" in path


def is_web(path: str) -> bool:
    """Return whether a path is an address of the web, where folders cannot be listed."""
    return path.startswith(("http://", "https://"))


def local(path: str) -> Path | None:
    """Return the path of a local file, or None for a file elsewhere."""
    if is_address(path):
        scheme, _, rest = path.partition("://")
        return Path(rest) if scheme in ("file", "local") else None
    return Path(path)


def remote(path: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in that file system.

    Raises:
      SourceError: fsspec does not know the address, or needs a library for it.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)
    except ValueError as error:
        raise SourceError(f"{path} must be an address that fsspec knows: {error}.") from None
    except ImportError as error:
        raise SourceError(f"{path} needs another library: {error}.") from None


def opened_file(path: str) -> Any:
    """Open a local or remote file for reading."""
    if (found := local(path)) is not None:
        return open(found, "rb")
    system, inside = remote(path)
    return system.open(inside, "rb")


def version(path: str) -> Any:
    """Return the time or tag of a file's last change, by its own entry alone.

    A folder is not searched: a change deep inside one does not show.

    Raises:
      FileNotFoundError: the file does not exist.
    """
    if (found := local(path)) is not None:
        return found.stat().st_mtime_ns
    system, inside = remote(path)
    return system.ukey(inside)


def is_empty(path: str) -> bool:
    """Return whether a path is a file of 0 bytes."""
    if (found := local(path)) is not None:
        return found.is_file() and found.stat().st_size == 0
    system, inside = remote(path)
    info = system.info(inside)
    return info["type"] == "file" and info["size"] == 0


def is_folder(path: str) -> bool:
    if (found := local(path)) is not None:
        return found.is_dir()
    system, inside = remote(path)
    # isdir would fetch the whole file over HTTP
    return system.info(inside)["type"] == "directory"


def exists(path: str) -> bool:
    if (found := local(path)) is not None:
        return found.exists()
    system, inner = remote(path)
    return system.exists(inner)


def inside(folder: str, name: str) -> str:
    """Return the path of a name in a folder.

    >>> inside("s3://bucket/a/", "meta/info.json")
    's3://bucket/a/meta/info.json'
    """
    return f"{folder.rstrip('/')}/{name}"


def names_in(folder: str) -> list[str]:
    """Return the sorted names of all files in a folder, at any depth, relative to the folder."""
    if (found := local(folder)) is not None:
        names = (os.path.relpath(file, found) for file in _files(found))
        # addresses separate folders by / on every system
        return sorted(name.replace(os.sep, "/") for name in names)
    system, inside = remote(folder)
    start = len(inside.rstrip("/")) + 1
    return sorted(name[start:] for name in system.find(inside))


def expanded(paths: Sequence[str]) -> list[str]:
    """Replace each address with ``*`` by the files that it matches, as a shell does local paths.

    >>> expanded(["data/*.npy"])
    ['data/*.npy']
    """
    found: list[str] = []
    for path in map(os.fspath, paths):
        if local(path) is not None or not _is_pattern(path):
            found.append(path)
            continue
        system, inside = remote(path)
        try:
            names = sorted(system.glob(inside))
        except Exception as error:
            # file systems raise errors of many types
            raise SourceError(f"{path} cannot be listed: {error}.") from error
        if not names:
            raise SourceError(f"{path} must name files: there are none.")
        found += map(system.unstrip_protocol, names)
    return found


def check_once(paths: Sequence[str]) -> None:
    """Refuse a file that is named twice, whose elements would count twice."""
    # links are not followed: two names may stand for equal contents, as in the caches of hubs
    keys = [path if is_address(path) else os.path.abspath(path) for path in paths]
    if len(set(keys)) < len(keys):
        path = next(path for path, count in Counter(keys).items() if count > 1)
        named = paths[keys.index(path)]
        raise SourceError(
            f"each file must be named once: {named} is named {keys.count(path)} times."
        )


def _is_pattern(path: str) -> bool:
    return "*" in path and "::" not in path


def fingerprint(path: str | os.PathLike) -> list:
    """Return a list, for JSON, that changes when a file does; contents are not read.

    For a file it holds the size and the time of modification in nanoseconds. For a folder (Zarr,
    Parquet in parts) it holds the number of files, the newest time, and a hash of all names, sizes
    and times. For a remote file it depends on what its file system knows: size, time or ETag.

    Raises:
      SourceError: the file does not exist.

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
            status = found.stat()
            return [status.st_size, status.st_mtime_ns]
        files = sorted(_inside(found))
    except FileNotFoundError:
        raise SourceError(f"{path} must exist: there is no such file.") from None
    return [len(files), max((time for *_, time in files), default=0), _hash(files)]


def _inside(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file in a folder, at any depth."""
    found = [(file, os.stat(file)) for file in _files(folder)]
    return [
        (os.path.relpath(file, folder), status.st_size, status.st_mtime_ns)
        for file, status in found
    ]


def _files(folder: str | Path) -> Iterator[str]:
    return (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _remote_fingerprint(path: str) -> list:
    system, inside = remote(path)
    # fsspec would answer from a listing that it made before the file changed
    system.invalidate_cache()
    if is_web(path) and path.endswith(".zarr"):
        # of a folder that cannot be listed: its metadata
        files = [f"{inside}/{name}" for name in ZARR_METADATA]
        info = {file: system.info(file) for file in files if system.exists(file)}
    elif _is_pattern(path):
        info = system.glob(inside, detail=True)
    elif (info := system.info(inside))["type"] == "directory":
        info = system.find(inside, detail=True)
    return [_hash(sorted((str(key), str(value)) for key, value in info.items()))]


def _hash(values: list) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
