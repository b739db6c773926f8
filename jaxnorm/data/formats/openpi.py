"""norm_stats.json of openpi: mean, deviation and the quantiles 0.01 and 0.99 of each leaf.

The format is that of ``openpi.shared.normalize``, the formula that of ``openpi.transforms``
(https://github.com/Physical-Intelligence/openpi).
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats import documents
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.values import assembled, not_finite, numbers, writable
from jaxnorm.data.formula import Formula

NAME = "openpi"
FILE = "norm_stats.json"
_KEY = "norm_stats"
QUANTILES = {"q01": 0.01, "q99": 0.99}
# (x - mean) / (std + 1e-6), and (x - q01) / (q99 - q01 + 1e-6) * 2 - 1
FORMULA = Formula(added=1e-6, range_added=1e-6)
NOTES = (
    "openpi takes the first dimensions of its statistics where x has fewer; to undo that it pads "
    "them with mean 0 and deviation 1 where x has more, and leaves those as they are by quantiles.",
)
NULLS = "openpi writes NaN and Inf as null, which is read as NaN."


def recognizes(path: Path) -> bool:
    """Return whether a path is a norm_stats.json, or a folder that holds one."""
    return documents.matches(target(path), _suits)


def read(path: Path) -> Contents:
    """Read a norm_stats.json, or the one in a folder."""
    path = target(path)
    held = documents.load(path)
    if not isinstance(held, dict) or not isinstance(held.get(_KEY), dict) or not held[_KEY]:
        raise FormatError(f"{path} must hold leaves under {_KEY!r}: it holds none.")
    leaves = {leaf: _leaf(path, leaf, entry) for leaf, entry in held[_KEY].items()}
    broken = not_finite(leaves)
    return Contents(leaves, FORMULA, NOTES + ((NULLS,) if broken else ()) + broken)


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write a norm_stats.json, or one into a folder.

    openpi has no place for count, minimum and maximum.
    """
    entries = {}
    ranks = tuple(QUANTILES.values())
    known = writable(leaves, f"openpi's {FILE}", ("mean", "var"), quantiles=ranks)
    for leaf, statistics in known.items():
        found = statistics.quantiles or {}
        arrays = {"mean": statistics.mean, "std": np.sqrt(statistics.var)} | {
            key: found.get(rank) for key, rank in QUANTILES.items()
        }
        entries[leaf] = {
            key: None if array is None else np.atleast_1d(array) for key, array in arrays.items()
        }
    documents.save(target(path), {_KEY: entries}, indent=2)


def target(path: Path) -> Path:
    """Return the file of a path, which may be its folder."""
    path = Path(path)
    return path / FILE if path.is_dir() else path


def _suits(held: Any) -> bool:
    # OpenVLA's config.json has the same key, with data sets in it
    entries = held.get(_KEY) if isinstance(held, dict) else None
    return isinstance(entries, dict) and all(
        isinstance(entry, dict) and "mean" in entry for entry in entries.values()
    )


def _leaf(path: Path, leaf: str, entry) -> Statistics:
    entry = entry if isinstance(entry, dict) else {}
    if missing := [key for key in ("mean", "std") if entry.get(key) is None]:
        raise FormatError(
            f"{path} must hold 'mean' and 'std' of {leaf!r}: {missing[0]!r} is missing."
        )
    arrays = {
        key: numbers(path, f"{key!r} of {leaf!r}", entry[key], nulls=True)
        for key in ("mean", "std", *QUANTILES)
        if entry.get(key) is not None
    }
    quantiles = {rank: arrays.pop(key) for key, rank in QUANTILES.items() if key in arrays}
    return assembled(path, leaf, arrays, quantiles)
