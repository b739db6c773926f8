"""Statistics of Makani and Earth-2: a folder of .npy files, with a number for each channel.

``data_process/get_stats.py`` of https://github.com/NVIDIA/makani writes them in float32, of shape
(1, channels, 1, 1): ``global_means.npy``, ``global_stds.npy``, ``mins.npy``, ``maxs.npy``, and of
differences between steps ``time_diff_means_dt1.npy`` and ``time_diff_stds_dt1.npy``.
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
# (x - mean) / std
FORMULA = Formula()
NOTES = (
    "Makani's 'minmax' maps to [0, 1], mode 'min_max' to [-1, 1].",
    "Makani weights grid points by their area. The deviation of the two components of a wind is "
    "that of its speed.",
    "The files have no count, so they cannot be merged.",
)


def recognizes(path: Path) -> bool:
    """Return whether a path is a folder of global statistics, or one of the files."""
    path = Path(path)
    if path.is_dir():
        return all((path / name).is_file() for name in GLOBAL.values())
    known = {*GLOBAL.values(), *EXTREMES.values()}
    return path.is_file() and (path.name in known or bool(DIFFERENCES.fullmatch(path.name)))


def read(path: Path) -> Contents:
    """Read the global statistics in a folder, or those of differences, whose file is named."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    names = GLOBAL | {key: name for key, name in EXTREMES.items() if (folder / name).is_file()}
    if found := DIFFERENCES.fullmatch(path.name):
        names = {key: f"time_diff_{key}s{found[1]}.npy" for key in ("mean", "std")}
    for name in names.values():
        if not (folder / name).is_file():
            raise FormatError(f"{folder} must hold {' and '.join(names.values())}: no {name}.")
    arrays = {key: _array(folder / name) for key, name in names.items()}
    # the folder holds one array of all channels, which has no name
    leaves = {"": assembled(folder, "", arrays)}
    return Contents(leaves, FORMULA, NOTES + not_finite(leaves))


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write global statistics of one leaf into a folder, in float32 as Makani does."""
    folder = Path(path)
    ((leaf, statistics), *others) = writable(leaves, "Makani's files", ("mean", "var")).items()
    if others:
        raise FormatError(
            f"Makani's files must be of one leaf, all channels: got {', '.join(map(repr, leaves))}."
        )
    arrays = {"mean": statistics.mean, "std": np.sqrt(statistics.var)}
    names = dict(GLOBAL)
    for key, name in EXTREMES.items():
        if (array := getattr(statistics, key)) is not None:
            arrays[key], names[key] = array, name
        elif (folder / name).exists():
            raise FormatError(
                f"{folder} must not keep the old {name}: {leaf!r} has no {key} to replace it. "
                "Remove it, or name another folder."
            )
    files.make_folder(folder)
    files.placeable(folder / GLOBAL["mean"])
    files.replace({folder / names[key]: _dumped(leaf, array) for key, array in arrays.items()})


def _array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, MemoryError):
        raise
    except Exception:
        # NumPy raises errors of any type at damaged bytes
        raise FormatError(
            f"{path} must hold an array of numbers: it is damaged, or none."
        ) from None
    if sum(size > 1 for size in array.shape) > 1:
        raise FormatError(
            f"{path} must hold one number for each channel, of shape (1, channels, 1, 1): it has "
            f"{array.shape}."
        )
    return numbers(path, "its array", array)


@np.errstate(over="ignore")
def _dumped(leaf: str, array: np.ndarray) -> bytes:
    if array.ndim == 1:
        array = array[:, None, None]
    if array.ndim != 3 or array.shape[1:] != (1, 1):
        raise FormatError(
            f"Makani's files must have one number for each channel: {leaf!r} has shape "
            f"{array.shape}. Fit it over all other axes."
        )
    single = array[None].astype(np.float32)
    if not np.all(np.isfinite(single)):
        raise FormatError("Makani's files must hold numbers that float32 can: they are too large.")
    file = io.BytesIO()
    np.save(file, single)
    return file.getvalue()
