"""dataset_statistics.json of Octo and of other loaders of Open X-Embodiment data.

Octo (https://github.com/octo-models/octo, ``octo.data.utils.data_utils``) writes a file for each
data set, ``{"action": ..., "proprio": ..., "num_transitions": ..., "num_trajectories": ...}``, and
one for a model, which holds that by the name of each data set. The entries have mean, std, min,
max, p01, p99 and, in a model's file, a mask. Octo cannot combine data sets without the number of
trajectories, but computes nothing by it, so null is written where it is unknown. OpenVLA has the
same files with other keys: see :mod:`jaxnorm.data.formats.openvla`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats import documents
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.episodes import counted, counts
from jaxnorm.data.formats.values import assembled, booleans, doubtful, not_finite, numbers, writable
from jaxnorm.data.formula import Formula

NAME = "octo"
QUANTILES = {"p01": 0.01, "p99": 0.99}
LEAVES = ("action", "proprio")
COUNT, EPISODES = "num_transitions", "num_trajectories"
# where the config.json of an OpenVLA model holds them
MODEL = "norm_stats"
# (x - mean) / (std + 1e-8), and clip(2 * (x - p01) / (p99 - p01 + 1e-8) - 1, -1, 1)
FORMULA = Formula(added=1e-8, range_added=1e-8, range_clip=1.0)
NOTES = (
    "Octo takes the quantiles for its 'bounds', never minimum and maximum.",
    "Octo undoes both without the 1e-8 that it adds to deviations and widths.",
    "The leaf 'proprio' is 'observation/proprio' in Octo's trajectories.",
)


def recognizes(path: Path) -> bool:
    """Return whether a path is a JSON file of Octo's statistics."""
    # what Octo combines of several data sets has no quantiles
    counted = lambda held: holds(held, {}) and COUNT in held
    return documents.matches(path, lambda held: holds(held, QUANTILES) or counted(held))


def read(path: Path) -> Contents:
    """Read the statistics of one data set, or of several by their names."""
    return read_keys(path, QUANTILES, FORMULA, NOTES)


def write(path: Path, leaves: dict[str, Statistics], notes: tuple[str, ...] = ()) -> None:
    """Write a file of one data set, ``action`` and ``proprio``, or of several by their names."""
    write_keys(path, leaves, QUANTILES, "Octo", notes)


def holds(held: Any, quantiles: Mapping[str, float]) -> bool:
    """Return whether JSON holds statistics with these keys of quantiles, and no others."""
    entries = [entry for _, _, entry in _entries(held)]
    return bool(entries) and all(
        isinstance(entry, dict)
        and {"mean", "std"} <= set(entry)
        and {key for key in entry if key[:1] in ("p", "q")} == set(quantiles)
        # LeRobot has a leaf 'action' too, with a count
        and "count" not in entry
        for entry in entries
    )


def read_keys(
    path: Path, quantiles: Mapping[str, float], formula: Formula, notes: tuple[str, ...]
) -> Contents:
    """Read a file whose quantiles have these keys."""
    path = Path(path)
    leaves, told = {}, {}
    for name, dataset, entry in _entries(documents.load(path)):
        if not isinstance(entry, dict):
            raise FormatError(f"{path} must hold statistics of {name!r}: it holds {entry!r:.60}.")
        if missing := [key for key in ("mean", "std") if key not in entry]:
            raise FormatError(f"{path} must hold 'mean' and 'std' of {name!r}: it lacks {missing}.")
        arrays: dict[str, Any] = {
            key: numbers(path, f"{key!r} of {name!r}", entry[key])
            for key in ("mean", "std", "min", "max", *quantiles)
            if key in entry
        }
        found = {rank: arrays.pop(key) for key, rank in quantiles.items() if key in entry}
        arrays["count"] = _total(path, COUNT, dataset)
        count = _total(path, EPISODES, dataset)
        if count is not None and 0 <= count.item() < np.inf:
            told[name.rpartition("/")[0]] = counted(int(count.item()), name.rpartition("/")[0])
        mask = booleans(path, f"'mask' of {name!r}", entry["mask"]) if "mask" in entry else None
        leaves[name] = assembled(path, name, arrays, found, mask)
    if not leaves:
        raise FormatError(f"{path} must hold 'action' or 'proprio': it holds neither.")
    notes = (*notes, *told.values(), *not_finite(leaves), *doubtful(leaves))
    return Contents(leaves, formula, notes)


def write_keys(
    path: Path,
    leaves: dict[str, Statistics],
    quantiles: Mapping[str, float],
    title: str,
    notes: tuple[str, ...],
) -> None:
    """Write a file whose quantiles have these keys."""
    named = f"{title}'s dataset_statistics.json"
    needed = ("mean", "var", "count", "min", "max")
    contents: dict[str, Any] = {}
    ranks = tuple(quantiles.values())
    known = writable(leaves, named, needed, masks=True, quantiles=ranks)
    episodes = counts(notes)
    # what was fitted has no name of a data set, but its leaves may be renamed
    alone = episodes.get("") if len({leaf.rpartition("/")[0] for leaf in leaves}) == 1 else None
    for leaf, statistics in known.items():
        dataset, _, name = leaf.rpartition("/")
        if name not in LEAVES or "/" in dataset or bool(dataset) != _in_datasets(leaves):
            raise FormatError(
                f"{named} must hold 'action' and 'proprio', or those of data sets, as in "
                f"'bridge/action': got {leaf!r}. Rename it by --rename or Normalizer.rename."
            )
        own = contents.setdefault(dataset, {}) if dataset else contents
        own[name] = _entry(named, leaf, statistics, quantiles)
        count = _whole_count(named, leaf, statistics)
        if own.setdefault(COUNT, count) != count:
            raise FormatError(
                f"{named} must have one count for action and proprio: they have {own[COUNT]} and "
                f"{count}. Fit them on the same steps."
            )
        own[EPISODES] = episodes.get(dataset, alone)
    documents.save(Path(path), contents, indent=2)


def _entry(
    named: str, leaf: str, statistics: Any, quantiles: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Return the arrays of a leaf by their keys in the file."""
    if missing := [rank for rank in quantiles.values() if not _has(statistics, rank)]:
        raise FormatError(
            f"{named} needs the quantiles 0.01 and 0.99: {leaf!r} has no {missing[0]}. "
            "Fit with quantiles=(0.01, 0.99)."
        )
    entry = {"mean": statistics.mean, "std": np.sqrt(statistics.var)}
    entry |= {"max": statistics.max, "min": statistics.min}
    entry |= {key: statistics.quantiles[rank] for key, rank in quantiles.items()}
    if statistics.mask is not None:
        entry["mask"] = statistics.mask
    return {key: np.atleast_1d(array) for key, array in entry.items()}


def _entries(held: Any) -> Iterator[tuple[str, Mapping, Any]]:
    """Yield each leaf's name, the data set that it is of, and its entry."""
    if not isinstance(held, dict):
        return
    held = held[MODEL] if isinstance(held.get(MODEL), dict) else held
    if any(leaf in held for leaf in LEAVES):
        yield from ((leaf, held, held[leaf]) for leaf in LEAVES if leaf in held)
        return
    for name, dataset in held.items():
        for leaf in LEAVES if isinstance(dataset, dict) else ():
            if leaf in dataset:
                yield f"{name}/{leaf}", dataset, dataset[leaf]


def _total(path: Path, key: str, dataset: Mapping) -> np.ndarray | None:
    """Return the number of steps or episodes; files of models of several versions may lack it."""
    count = dataset.get(key)
    # several data sets that Octo combined have a list of counts, with null for unknown ones
    if count is None or (isinstance(count, list) and None in count):
        return None
    with np.errstate(over="ignore"):
        return np.sum(numbers(path, repr(key), count), keepdims=True)


def _has(statistics: Any, rank: float) -> bool:
    return statistics.quantiles is not None and rank in statistics.quantiles


def _in_datasets(leaves: Mapping[str, Any]) -> bool:
    return any("/" in leaf for leaf in leaves)


def _whole_count(named: str, leaf: str, statistics: Any) -> int:
    used = statistics.count if statistics.mask is None else statistics.count[statistics.mask]
    low, high = np.min(used, initial=np.inf), np.max(used, initial=-np.inf)
    if low != high or low != int(low):
        raise FormatError(
            f"{named} must have one whole count for all features of {leaf!r}: they have {low:g} to "
            f"{high:g}. Fit it without masks and weights."
        )
    return int(low)
