"""Statistics of Makani and Earth-2: a folder of .npy files, with a number for each channel.

``data_process/get_stats.py`` of https://github.com/NVIDIA/makani writes them in float32, of shape
(1, channels, 1, 1): ``global_means.npy``, ``global_stds.npy``, ``mins.npy``, ``maxs.npy``, and of
differences between steps ``time_diff_means_dt1.npy`` and ``time_diff_stds_dt1.npy``. The file
``time_means.npy`` has the mean over time at each grid point, (1, channels, latitudes, longitudes).
"""

import io
import re
from pathlib import Path

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.values import assembled, not_finite, numbers, writable
from jaxnorm.data.formula import Formula

NAME = "makani"
GLOBAL = {"mean": "global_means.npy", "std": "global_stds.npy"}
EXTREMES = {"min": "mins.npy", "max": "maxs.npy"}
DIFFERENCES = re.compile(r"time_diff_(?:means|stds)(|_dt\d+)\.npy")
CLIMATOLOGY = "time_means.npy"
# The files that are written in place of a folder of fields, by their own name.
ALONE = re.compile(f"{re.escape(CLIMATOLOGY)}|{DIFFERENCES.pattern}")
# (x - mean) / std
FORMULA = Formula()
NOTES = (
    "Makani's 'minmax' maps to [0, 1], mode 'min_max' to [-1, 1].",
    "Makani weights grid points by their area. The deviation of the two components of a wind is "
    "that of its speed.",
    "The files have no count, so they cannot be merged.",
)
ANOMALIES = (
    "(x - time_means) / global_stds are the anomalies that Makani correlates with those of the "
    "true fields."
)
NO_STD = f"There is no {GLOBAL['std']} in the folder of {CLIMATOLOGY}, so deviations are unknown."


def recognizes(path: Path) -> bool:
    """Return whether a path is a folder of global statistics, or one of the files."""
    path = Path(path)
    if path.is_dir():
        return all((path / name).is_file() for name in GLOBAL.values())
    known = {*GLOBAL.values(), *EXTREMES.values()}
    return path.is_file() and (path.name in known or bool(ALONE.fullmatch(path.name)))


def read(path: Path) -> Contents:
    """Read the global statistics in a folder.

    The climatology, and statistics of differences, are read if the path names their file.
    """
    path = Path(path)
    if path.name == CLIMATOLOGY:
        return _climatology(path)
    folder = path if path.is_dir() else path.parent
    names = GLOBAL | {key: name for key, name in EXTREMES.items() if (folder / name).is_file()}
    names = _of_differences(path) or names
    for name in names.values():
        if not (folder / name).is_file():
            raise FormatError(f"{folder} must hold {' and '.join(names.values())}: no {name}.")
    arrays = {key: _array(folder / name) for key, name in names.items()}
    # the folder holds one array of all channels, which has no name
    leaves = {"": assembled(folder, "", arrays)}
    return Contents(leaves, FORMULA, NOTES + not_finite(leaves))


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write global statistics of one leaf into a folder, in float32 as Makani does.

    A path named ``time_means.npy`` is that file, of the means at each grid point alone. A path
    named ``time_diff_stds_dt1.npy`` stands for the two files of differences, without extremes.
    """
    path = folder = Path(path)
    of_climatology = path.name == CLIMATOLOGY and not path.is_dir()
    needed = ("mean",) if of_climatology else ("mean", "var")
    ((leaf, statistics), *others) = writable(leaves, "Makani's files", needed).items()
    if others:
        raise FormatError(
            f"Makani's files must be of one leaf, all channels: got {', '.join(map(repr, leaves))}."
        )
    if of_climatology:
        files.placeable(path)
        files.replace({path: _dumped(_maps(leaf, statistics.mean))})
        return
    arrays = {"mean": statistics.mean, "std": np.sqrt(statistics.var)}
    names, extremes = dict(GLOBAL), EXTREMES
    if (own := _of_differences(path)) and not path.is_dir():
        folder, names, extremes = path.parent, own, {}
    for key, name in extremes.items():
        if (array := getattr(statistics, key)) is not None:
            arrays[key], names[key] = array, name
        elif (folder / name).exists():
            raise FormatError(
                f"{folder} must not keep the old {name}: {leaf!r} has no {key} to replace it. "
                "Remove it, or name another folder."
            )
    files.make_folder(folder)
    files.placeable(folder / names["mean"])
    files.replace(
        {folder / names[key]: _dumped(_columns(leaf, array)) for key, array in arrays.items()}
    )


def _of_differences(path: Path) -> dict[str, str]:
    """Return the names of the files of differences that a path names; none if it names no such."""
    found = DIFFERENCES.fullmatch(path.name)
    return {key: f"time_diff_{key}s{found[1]}.npy" for key in ("mean", "std")} if found else {}


def _climatology(path: Path) -> Contents:
    """Return means at each grid point, with the global deviations where they are known."""
    array = _loaded(path)
    if array.ndim != 4 or array.shape[0] != 1:
        raise FormatError(
            f"{path} must hold a mean at each grid point, of shape (1, channels, latitudes, "
            f"longitudes): it has {array.shape}."
        )
    shape, stds = array.shape[1:], path.with_name(GLOBAL["std"])
    arrays, notes = {"mean": numbers(path, "its array", array).reshape(shape)}, (NO_STD,)
    if stds.is_file():
        deviations = _array(stds).reshape(-1, 1, 1)
        if len(deviations) != shape[0]:
            raise FormatError(
                f"{path} must have the channels of {stds}: it has {shape[0]}, of shape "
                f"{array.shape}, not {len(deviations)}."
            )
        arrays["std"], notes = np.broadcast_to(deviations, shape), (ANOMALIES,)
    leaves = {"": assembled(path, "", arrays)}
    return Contents(leaves, FORMULA, notes + NOTES + not_finite(leaves))


def _array(path: Path) -> np.ndarray:
    array = _loaded(path)
    if sum(size > 1 for size in array.shape) > 1:
        raise FormatError(
            f"{path} must hold one number for each channel, of shape (1, channels, 1, 1): it has "
            f"{array.shape}."
        )
    return numbers(path, "its array", array)


def _loaded(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, MemoryError):
        raise
    except Exception:
        # NumPy raises errors of any type at damaged bytes
        raise FormatError(
            f"{path} must hold an array of numbers: it is damaged, or none."
        ) from None


def _columns(leaf: str, array: np.ndarray) -> np.ndarray:
    """Return one number for each channel, of shape (channels, 1, 1)."""
    if array.ndim == 1:
        array = array[:, None, None]
    if array.ndim != 3 or array.shape[1:] != (1, 1):
        raise FormatError(
            f"Makani's files must have one number for each channel: {leaf!r} has shape "
            f"{array.shape}. Fit it over all other axes."
        )
    return array


def _maps(leaf: str, array: np.ndarray) -> np.ndarray:
    """Return a map for each channel, of shape (channels, latitudes, longitudes)."""
    # a single channel lost its axis, as the leading axes of size 1
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[1:] == (1, 1):
        raise FormatError(
            f"Makani's {CLIMATOLOGY} must have a mean for each channel at each grid point: "
            f"{repr(leaf) if leaf else 'the array'} has shape {array.shape}. Fit it over time "
            "alone: '[time] c lat lon'."
        )
    return array


@np.errstate(over="ignore")
def _dumped(array: np.ndarray) -> bytes:
    single = array[None].astype(np.float32)
    if not np.all(np.isfinite(single)):
        raise FormatError("Makani's files must hold numbers that float32 can: they are too large.")
    file = io.BytesIO()
    np.save(file, single)
    return file.getvalue()
