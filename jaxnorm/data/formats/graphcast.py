"""Statistics of GraphCast and GenCast: NetCDF files of variables, some of them by level.

The files are ``mean_by_level.nc`` and ``stddev_by_level.nc``, and for differences between steps
``diffs_stddev_by_level.nc``. GenCast adds ``min_by_level.nc``. The formula is that of
``weathernext.utils.normalization`` (https://github.com/google-deepmind/graphcast).
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.formats import netcdf
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.values import assembled, not_finite, numbers, writable
from jaxnorm.data.formula import Formula

NAME = "graphcast"
check = netcdf.check
MEAN, STD, MIN = "mean_by_level.nc", "stddev_by_level.nc", "min_by_level.nc"
DIFFERENCES = "diffs_stddev_by_level.nc"
# The file that is written in place of a folder of fields, by its own name.
ALONE = re.compile(re.escape(DIFFERENCES))
LEVEL = "level"
# (x - mean) / stddev
FORMULA = Formula(missing="warn")
NOTES: tuple[str, ...] = (
    "A variable that has no statistics is left unchanged, with a warning, and statistics whose "
    "variable is not there are not used, as in GraphCast.",
    "GraphCast adds nothing to deviations: a deviation of 0 gives NaN or inf.",
)
NO_MEAN = "GraphCast subtracts no mean from differences: it is 0 here."


def recognizes(path: Path) -> bool:
    """Return whether a path is one of the files, or a folder that holds mean and deviation."""
    path = Path(path)
    if path.is_dir():
        return (path / MEAN).is_file() and (path / STD).is_file()
    return path.name in (MEAN, STD, DIFFERENCES) and path.is_file()


def read(path: Path) -> Contents:
    """Read mean and deviation in a folder; ``diffs_stddev_by_level.nc`` is read by its own name."""
    path = Path(path)
    if path.name == DIFFERENCES:
        scales = netcdf.load(path)
        leaves = {
            name: assembled(path, name, {"std": array, "mean": 0 * array})
            for name, array in _arrays(path, scales).items()
        }
        return Contents(leaves, FORMULA, (NO_MEAN, *NOTES, *_levels(scales), *not_finite(leaves)))
    folder = path if path.is_dir() else path.parent
    for name in (MEAN, STD):
        if not (folder / name).is_file():
            raise FormatError(f"{folder} must hold {MEAN} and {STD}: it has no {name}.")
    held = {key: netcdf.load(folder / name) for key, name in (("mean", MEAN), ("std", STD))}
    if (folder / MIN).is_file():
        held["min"] = netcdf.load(folder / MIN)
    _check_levels(folder, held)
    arrays = {key: _arrays(folder, dataset) for key, dataset in held.items()}
    leaves, notes = {}, NOTES
    for name in arrays["mean"] | arrays["std"]:
        own = {key: arrays[key][name] for key in arrays if name in arrays[key]}
        leaves[name] = assembled(folder, name, own)
        if missing := [key for key in ("mean", "std") if key not in own]:
            known = {"mean": "divides by its deviation", "std": "subtracts its mean"}[missing[0]]
            notes = (*notes, f"{name!r} has no {missing[0]}: GraphCast only {known}.")
    return Contents(leaves, FORMULA, (*notes, *_levels(held["mean"]), *not_finite(leaves)))


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write mean and deviation into a folder, without the levels' own values.

    A path named ``diffs_stddev_by_level.nc`` is that file, of deviations alone. Statistics of shape
    (levels,) or (levels, 1, 1) become variables by level, and those of one feature variables
    without.
    """
    path = folder = Path(path)
    of_differences = path.name == DIFFERENCES and not path.is_dir()
    needed = ("var",) if of_differences else ("mean", "var")
    means, deviations = {}, {}
    for leaf, statistics in writable(leaves, "GraphCast's files", needed).items():
        if not leaf or "/" in leaf:
            raise FormatError(
                f"GraphCast's files must have variables with names, without '/': got {leaf!r}. "
                "Give leaves such names."
            )
        if not of_differences:
            means[leaf] = _variable(leaf, statistics.mean)
        deviations[leaf] = _variable(leaf, np.sqrt(statistics.var))
    sizes = {array.size for dims, array in deviations.values() if dims}
    if len(sizes) > 1:
        raise FormatError(
            "GraphCast's files must have one number of levels for all variables: got "
            f"{', '.join(map(str, sorted(sizes)))}."
        )
    if of_differences:
        files.placeable(path)
        files.replace({path: netcdf.dumped(path, deviations)})
        return
    files.make_folder(folder)
    files.placeable(folder / MEAN)
    files.replace(
        {
            folder / MEAN: netcdf.dumped(folder, means),
            folder / STD: netcdf.dumped(folder, deviations),
        }
    )


def _arrays(path: Path, dataset: Any) -> dict[str, np.ndarray]:
    found = {}
    for name, variable in dataset.data_vars.items():
        values = numbers(path, repr(name), variable.values)
        # fields have the axes (..., level, latitude, longitude)
        found[str(name)] = values.reshape(-1, 1, 1) if variable.dims == (LEVEL,) else values
    if not found:
        raise FormatError(f"{path} must hold variables: it holds none.")
    return found


def _check_levels(folder: Path, held: dict[str, Any]) -> None:
    """Refuse files whose levels are not the same, which GraphCast would match by their values."""
    levels = {key: _values(dataset) for key, dataset in held.items()}
    if any(not np.array_equal(one, levels["mean"]) for one in levels.values()):
        said = ", ".join(f"{key} has {len(one)}" for key, one in levels.items())
        raise FormatError(f"{folder} must have the same levels in all files: {said}, not the same.")


def _values(dataset: Any) -> np.ndarray:
    if LEVEL in dataset.coords:
        return np.asarray(dataset[LEVEL].values)
    return np.arange(dataset.sizes.get(LEVEL, 0))


def _levels(dataset: Any) -> tuple[str, ...]:
    """Return a sentence on the axis of levels."""
    if LEVEL not in dataset.sizes:
        return ()
    values = [f"{value:g}" for value in _values(dataset)]
    shown = values if len(values) <= 6 else [*values[:3], "…", *values[-2:]]
    own = f" {', '.join(shown)}" if LEVEL in dataset.coords else ""
    return (
        f"Statistics by level are those of the {len(values)} levels{own}, and x has the "
        "axes (..., level, latitude, longitude).",
    )


def _variable(leaf: str, array: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the dimensions of a variable, and its values."""
    if array.size == 1:
        return (), array.reshape(())
    if any(size > 1 for size in array.shape[1:]):
        raise FormatError(
            f"GraphCast's files must have statistics by level, or one for all: {leaf!r} has shape "
            f"{array.shape}. Fit it over all other axes."
        )
    return (LEVEL,), array.reshape(-1)
