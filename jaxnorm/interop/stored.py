"""Check that a source of weights is a file, and hold what it says: arrays, options of layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Stored:
    """What was read.

    Attributes:
      arrays: all arrays by their keys.
      notes: what was taken off or left out, and options that change the outputs.
      options: of layers, by their paths, as far as the source says them.
    """

    arrays: dict[str, np.ndarray]
    notes: list[str]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.arrays, self.notes))


def check_file(path: Path) -> None:
    """Check that a path is that of a file with something in it.

    Raises:
      FileNotFoundError: nothing has this path.
      IsADirectoryError: a folder.
      ValueError: an empty file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} must exist: there is no such file. Name another one.")
    if path.is_dir():
        raise IsADirectoryError(
            f"a source of weights must be a file: {path} is a folder. Name a file in it."
        )
    if path.stat().st_size == 0:
        raise ValueError(
            f"{path} must hold arrays: it is an empty file. Download or save it again."
        )


def options_said(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return notes on options, one for each set of values.

    >>> norm = {"class": "LayerNorm", "epsilon": 0.001}
    >>> options_said({"a": norm, "b": norm, "c": {"class": "Dense"}})
    ['a, b: epsilon=0.001']
    """
    found: dict[str, list[str]] = {}
    for path, given in options.items():
        said = ", ".join(f"{name}={value}" for name, value in given.items() if name != "class")
        if said:
            found.setdefault(said, []).append(path or "the layer")
    return [
        f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}: {said}"
        for said, paths in found.items()
    ]
