"""JSON files of other libraries: read without surprises, and written in one step."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.formats.contents import FormatError


def load(path: Path) -> Any:
    """Return the contents of a JSON file; NaN and Infinity are read as Python writes them."""
    try:
        return _parsed_once(Path(path).read_bytes())
    except FormatError as error:
        raise FormatError(f"{path} {error}") from None


@lru_cache(maxsize=1)
def _parsed_once(data: bytes) -> Any:
    """Return JSON from bytes, parsed once although each format asks; it must not be changed."""
    return parsed(data)


def parsed(data: bytes) -> Any:
    """Return JSON from bytes; an error is a phrase, without the name of the file."""
    try:
        return json.loads(data, object_pairs_hook=_without_repetition)
    except FormatError:
        raise
    except (ValueError, RecursionError):
        raise FormatError("must hold JSON: it is none, or cut off.") from None


def matches(path: Path, suits: Callable[[Any], bool]) -> bool:
    """Return whether a path is a JSON file whose contents suit; False for whatever goes wrong."""
    path = Path(path)
    try:
        if path.suffix != ".json" or not path.is_file():
            return False
        # ours, which may be long, is not parsed once for each other format
        return not files.is_own(path) and suits(load(path))
    except (OSError, FormatError):
        return False


def save(path: Path, contents: Any, indent: int) -> None:
    """Write JSON in one step; arrays become lists, and every float64 keeps its bits."""
    files.placeable(path)
    try:
        data = json.dumps(contents, indent=indent, allow_nan=False, default=np.ndarray.tolist)
    except ValueError:
        raise FormatError(f"{path} must hold finite numbers: some are NaN or inf.") from None
    files.replace({Path(path): data.encode()})


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two values, so a file put together by hand would lose one
    contents = dict(pairs)
    if len(contents) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"must name everything once: {twice!r} stands twice.")
    return contents
