"""Statistics of LeRobot data sets, in the files that versions 2.0, 2.1 and 3.0 of its format have.

- 2.0 and 3.0: ``meta/stats.json``, for the whole data set.
- 2.1: ``meta/episodes_stats.jsonl``, a line for each episode.
- 3.0: ``meta/episodes/chunk-*/file-*.parquet``, a row for each episode.

The files are those of ``lerobot.datasets``, the formula that of
``lerobot.processor.normalize_processor`` (https://github.com/huggingface/lerobot).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats import documents, parquet_rows
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.episodes import merged
from jaxnorm.data.formats.values import assembled, doubtful, not_finite, numbers, writable
from jaxnorm.data.formula import Formula

NAME = "lerobot"
STATS, EPISODES, ROWS = "stats.json", "episodes_stats.jsonl", "episodes"
FIELDS = ("mean", "std", "min", "max", "count")
# the quantiles that LeRobot computes
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
# (x - mean) / (std + 1e-8), and 2 * (x - min) / (max - min) - 1, where a width of 0 becomes 1e-8
FORMULA = Formula(added=1e-8, range_zero=1e-8)
NOTES = (
    "LeRobot divides by the deviation + 1e-8, but undoes that by the deviation alone.",
    "LeRobot replaces a width of 0 by 1e-8, as here; older versions add 1e-8 to every width.",
    "LeRobot counts images, not pixels, of those that it sampled.",
)
QUANTILE_NOTE = (
    "Quantiles that were merged from those of episodes, as LeRobot does, are bounds: the smallest "
    "of the episodes up to the median, and the largest above it."
)
NO_COUNT = "The file has no count, as in data format 2.0: its statistics cannot be merged."


def recognizes(path: Path) -> bool:
    """Return whether a path is a LeRobot data set, or a file of its statistics."""
    try:
        path = _found(Path(path))
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                return b'"stats"' in file.readline()
        if path.suffix == ".json":
            return documents.matches(path, _is_stats)
        # by names alone, since pyarrow may be missing
        return bool(_episodes(path))
    except (FormatError, OSError):
        return False


def read(path: Path) -> Contents:
    """Read the statistics of a data set (its folder, or ``meta`` in it), or one of the files."""
    path = _found(Path(path))
    if path.suffix == ".json":
        held = documents.load(path)
        if not isinstance(held, dict) or not held:
            raise FormatError(f"{path} must hold statistics of features: it holds none.")
        leaves = {leaf: leaf_of(path, leaf, entry) for leaf, entry in _features(held).items()}
    else:
        leaves = merged(path, _lines(path) if path.suffix == ".jsonl" else _rows(path))
    bounds = (QUANTILE_NOTE,) if any(leaf.quantiles for leaf in leaves.values()) else ()
    counts = () if all(leaf.count is not None for leaf in leaves.values()) else (NO_COUNT,)
    notes = NOTES + bounds + counts + not_finite(leaves) + doubtful(leaves)
    return Contents(leaves, FORMULA, notes)


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write a stats.json of data format 3.0: the file, or ``meta/stats.json`` of a data set.

    LeRobot takes images channel first, in [0, 1]; their statistics have shape (3, 1, 1).
    """
    entries = {}
    needed = ("mean", "var", "count", "min", "max")
    known = writable(leaves, "LeRobot's stats.json", needed, quantiles=QUANTILES)
    for leaf, statistics in known.items():
        found = {key: getattr(statistics, key) for key in ("min", "max", "mean")}
        found["std"] = np.sqrt(statistics.var)
        for rank in QUANTILES:
            if statistics.quantiles and rank in statistics.quantiles:
                found[f"q{round(100 * rank):02d}"] = statistics.quantiles[rank]
        _check_image(leaf, statistics.max)
        shaped = {key: _shaped(leaf, array) for key, array in found.items()}
        entries[leaf] = shaped | {"count": [_count(leaf, statistics.count)]}
    documents.save(target(path), entries, indent=4)


def target(path: Path) -> Path:
    """Return the file to write for a path, which may be a data set's folder, or its ``meta``."""
    path = Path(path)
    if path.is_dir():
        path = path / STATS if path.name == "meta" else path / "meta" / STATS
    return path


def leaf_of(path: Path, leaf: str, entry: Any) -> Statistics:
    """Return the statistics of a feature from a dict of its arrays."""
    if not isinstance(entry, dict) or not {"mean", "std"} <= set(entry):
        raise FormatError(f"{path} must hold 'mean' and 'std' of {leaf!r}: it lacks them.")
    arrays, quantiles = {}, {}
    for key, value in entry.items():
        rank = _rank(key)
        if key in FIELDS or rank is not None:
            array = numbers(path, f"{key!r} of {leaf!r}", value)
            if rank is None:
                arrays[key] = array
            else:
                quantiles[rank] = array
    return assembled(path, leaf, arrays, quantiles)


def _shaped(leaf: str, array: np.ndarray) -> np.ndarray:
    """Return an array of one axis at least, and (channels, 1, 1) for an image, as LeRobot does."""
    if "image" not in leaf:
        return np.atleast_1d(array)
    shape = array.shape if array.ndim == 3 else (array.size, 1, 1)
    if shape not in ((3, 1, 1), (1, 1, 1)) or array.size != shape[0]:
        raise FormatError(
            f"LeRobot must have images' statistics in shape (3, 1, 1) or (1, 1, 1): {leaf!r} has "
            f"{array.shape}. Fit with the channels left: axes={{{leaf!r}: 'n [h w] c'}}."
        )
    return array.reshape(shape)


def _check_image(leaf: str, high: np.ndarray) -> None:
    # depth maps, which have one channel, keep their unit
    if "image" in leaf and high.size == 3 and np.max(high) > 1:
        raise FormatError(
            f"LeRobot must have images in [0, 1]: {leaf!r} has elements up to {np.max(high):g}. "
            "Fit on images divided by 255."
        )


def _count(leaf: str, count: np.ndarray) -> int:
    """Return the count that all features share, as a whole number."""
    low, high = np.min(count), np.max(count)
    if low != high or low != int(low):
        raise FormatError(
            f"LeRobot must have one whole count for all features of {leaf!r}: they have "
            f"{low:g} to {high:g}. Fit it without masks and weights."
        )
    return int(low)


def _found(path: Path) -> Path:
    """Return the file of statistics that a path names, or the folder of episodes."""
    if path.is_dir() and (path / "meta").is_dir():
        path = path / "meta"
    if not path.is_dir():
        return path
    for name in (STATS, EPISODES):
        if (path / name).is_file():
            return path / name
    return path / ROWS if (path / ROWS).is_dir() else path


def _is_stats(held: Any) -> bool:
    """Return whether JSON holds statistics by feature, and nothing else."""
    if not isinstance(held, dict) or not held:
        return False
    known = {"mean", "std", "min", "max"}
    return all(
        isinstance(entry, dict) and (known <= set(entry)) for entry in _features(held).values()
    )


def _features(held: Mapping, path: str = "") -> dict[str, Any]:
    """Return the entries by feature; ``write_stats`` splits names at a slash."""
    found: dict[str, Any] = {}
    for key, value in held.items():
        name = f"{path}/{key}" if path else key
        deeper = (
            isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values())
        )
        found |= _features(value, name) if deeper else {name: value}
    return found


def _rank(key: str) -> float | None:
    """Return the rank of a quantile from its key: q01 is 0.01."""
    return int(key[1:]) / 100 if re.fullmatch(r"q\d\d", key) else None


def _lines(path: Path) -> Iterator[dict[str, Statistics]]:
    """Yield the statistics of each episode from a file of format 2.1."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            held = documents.parsed(line)
        except FormatError as error:
            raise FormatError(f"{path}, line {number}, {error}") from None
        stats = held.get("stats") if isinstance(held, dict) else None
        if not isinstance(stats, dict):
            raise FormatError(f"{path}, line {number}, must hold 'stats': it holds none.")
        yield {leaf: leaf_of(path, leaf, entry) for leaf, entry in _features(stats).items()}


def _episodes(path: Path) -> list[Path]:
    """Return the Parquet files of a folder of episodes, or the one that the path is."""
    if path.is_dir():
        return sorted(path.glob("chunk-*/file-*.parquet"))
    is_one = path.is_file() and path.suffix == ".parquet" and path.parent.parent.name == ROWS
    return [path] if is_one else []


def _rows(path: Path) -> Iterator[dict[str, Statistics]]:
    """Yield the statistics of each episode from the Parquet files of format 3.0."""
    if not (found := _episodes(path)):
        raise FormatError(
            f"{path} must hold LeRobot's statistics, stats.json, episodes_stats.jsonl or "
            "episodes/chunk-*/file-*.parquet: it holds none."
        )
    for one in found:
        for row in parquet_rows.read(one, "stats/"):
            entries: dict[str, dict] = {}
            for name, value in row.items():
                leaf, _, key = name.removeprefix("stats/").rpartition("/")
                # null: an episode without this feature
                if value is not None:
                    entries.setdefault(leaf, {})[key] = value
            yield {leaf: leaf_of(one, leaf, entry) for leaf, entry in entries.items()}
