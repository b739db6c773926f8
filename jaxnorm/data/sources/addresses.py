"""Where files lie: paths of this machine, and addresses that fsspec knows (``gs://``, ``hf://``)."""

import hashlib
import os
from pathlib import Path
from typing import Any


class SourceError(Exception):
    """A file that is missing, damaged, or does not fit the others: one sentence."""


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
    """Return the file system of an address, and the path in it."""
    import fsspec

    return fsspec.core.url_to_fs(path)


def fingerprint(path: str | os.PathLike) -> list:
    """Return what changes whenever a file does, for JSON: nothing is read but names, sizes and times.

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
        files = sorted(_inside(str(found)))
    except FileNotFoundError:
        raise SourceError(f"{path} must exist: there is no such file.") from None
    return [len(files), max((time for *_, time in files), default=0), _hash(files)]


def _inside(folder: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file in a folder, at any depth."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(parent, name)
            facts = os.stat(file)
            found.append((os.path.relpath(file, folder), facts.st_size, facts.st_mtime_ns))
    return found


def _remote_fingerprint(path: str) -> list:
    system, inside = remote(path)
    system.invalidate_cache(inside)
    facts = system.info(inside)
    if facts["type"] == "directory":
        facts = system.find(inside, detail=True)
    return [_hash(sorted((str(key), str(value)) for key, value in facts.items()))]


def _hash(facts: list) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
