"""Hold what a source of weights says: arrays, and options of the layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
