"""The arrays of a leaf in a file of statistics: checked, in float64 and of one shape."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats.contents import FIELDS, FormatError, Statistics
from jaxnorm.data.given import check
from jaxnorm.data.leaves import label, naming_leaf


def numbers(path: Path | str, name: str, value: Any, *, nulls: bool = False) -> np.ndarray:
    """Return numbers from a file as a float64 array, without leading axes of size 1.

    Args:
      path: the file or object, for errors.
      name: where in the file, for errors.
      value: a number, nested lists of numbers, or an array.
      nulls: whether None is read as NaN.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise _no_numbers(path, name, "lists of different lengths") from None
    if nulls and array.dtype.kind == "O" and all(_is_number_or_none(v) for v in array.flat):
        try:
            array = array.astype(np.float64)
        except OverflowError:
            raise _no_numbers(path, name, "an integer beyond those of float64") from None
    # extremes of booleans are booleans in LeRobot, and its mean of them is a share
    if array.dtype.kind not in "fiub" or not array.size:
        raise _no_numbers(path, name, _shortened(value))
    array = array.astype(np.float64)
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    return array


def scalar(path: Path | str, name: str, value: Any) -> float:
    """Return one finite number that is not negative."""
    array = np.asarray(value) if isinstance(value, int | float | np.generic) else value
    # a backend's array of no axes is a number too
    array = np.asarray(array) if getattr(array, "shape", None) == () else None
    if array is None or array.dtype.kind not in "fiu" or not 0 <= float(array) < np.inf:
        raise FormatError(f"{path} must have a number >= 0 as {name}: got {_shortened(value)}.")
    return float(array)


def booleans(path: Path | str, name: str, value: Any) -> np.ndarray:
    """Return booleans from a file as an array."""
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind != "b":
        held = _shortened(value)
        raise FormatError(f"{path} must hold true or false in {name}: it holds {held}.")
    return array


@np.errstate(over="ignore")
def assembled(
    path: Path | str,
    leaf: str,
    arrays: Mapping[str, np.ndarray | None],
    quantiles: Mapping[float, np.ndarray] | None = None,
    mask: np.ndarray | None = None,
) -> Statistics:
    """Return the Statistics of a leaf from its arrays, named as in Statistics or ``"std"``."""
    found = {name: array for name, array in arrays.items() if array is not None}
    ranks = {f"the quantile {rank:g}": array for rank, array in (quantiles or {}).items()}
    marks = {} if mask is None else {"mask": mask}
    if not found | ranks:
        raise FormatError(f"{path} must hold statistics of {leaf!r}: it holds none.")
    own = {name: array for name, array in (found | ranks | marks).items() if name != "count"}
    first, shape = next(((name, array.shape) for name, array in own.items()), ("count", ()))
    for name, array in own.items():
        if array.shape != shape:
            raise FormatError(
                f"{path} must hold arrays of one shape for {leaf!r}: {first} has {shape}, {name} "
                f"has {array.shape}."
            )
    try:
        check(found, quantiles or {})
    except ValueError as error:
        raise FormatError(f"{path}: {naming_leaf(leaf, error)}") from None
    if "std" in found:
        found["var"] = found.pop("std") ** 2
    if "count" in found:
        found["count"] = _per_feature(path, leaf, found["count"], shape)
    return Statistics(**found, quantiles=dict(quantiles) if quantiles else None, mask=mask)


def not_finite(leaves: Mapping[str, Statistics]) -> tuple[str, ...]:
    """Return a sentence for each leaf whose mean or variance is not finite."""
    notes = []
    for leaf, statistics in leaves.items():
        for name in ("mean", "var"):
            array = getattr(statistics, name)
            if array is not None and not np.all(np.isfinite(array)):
                notes.append(f"The {name} of {leaf!r} is not finite: {_broken(array)}.")
    return tuple(notes)


@np.errstate(all="ignore")
def doubtful(leaves: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each leaf whose deviation its minimum, maximum and mean rule out.

    A variance is at most ``(max - mean) * (mean - min)`` (Bhatia and Davis, 2000), and 0 only for
    a constant. LeRobot 0.4.4 saves 0 for every image, since it squares uint8 within uint8.
    """
    notes = []
    for leaf, found in leaves.items():
        if any(getattr(found, name) is None for name in ("mean", "var", "min", "max")):
            continue
        width = found.max - found.min
        most = (found.max - found.mean) * (found.mean - found.min)
        # files in float32 miss the bound by their rounding
        above = found.var > 1.01 * most + 1e-6 * width**2
        if np.any(wrong := above | ((found.var == 0) & (width > 0))):
            notes.append(
                f"The deviation of {leaf!r} cannot be right beside its minimum and maximum: it is "
                f"{_broken(np.sqrt(found.var), ~wrong)}. Fit the data again."
            )
    return tuple(notes)


def writable(
    leaves: Mapping[str, Statistics],
    title: str,
    needed: Iterable[str],
    *,
    masks: bool = False,
    quantiles: Iterable[float] = (),
) -> dict[str, Any]:
    """Return leaves to write, which have what is needed; refuse those that a format cannot say.

    Args:
      leaves: the leaves to write.
      title: the format, for errors.
      needed: the attributes of Statistics that every leaf must have.
      masks: whether the format has masks.
      quantiles: the ranks of the quantiles that the format has.
    """
    if not leaves:
        raise FormatError(f"{title} must hold one leaf at least: there is none. Fit one first.")
    for leaf, statistics in leaves.items():
        called = repr(leaf) if leaf else "the array"
        if missing := [name for name in needed if getattr(statistics, name) is None]:
            said = f"{title} needs {_listed(missing)}: {called} has no {_listed(missing, 'or')}"
            raise FormatError(f"{said}. Fit a Normalizer on the data.")
        if not np.all(has_data := _has_data(statistics)):
            raise FormatError(
                f"{title} must hold features with data: the count of {called} is "
                f"{_broken(np.asarray(statistics.count), has_data)}. Fit on more data."
            )
        for name in FIELDS:
            array = getattr(statistics, name)
            if name in (*needed, "mean", "var") and array is not None:
                _check_finite(title, called, name, array)
        for rank, array in (statistics.quantiles or {}).items():
            if rank in quantiles:
                _check_finite(title, called, f"quantile {rank:g}", array)
        if not masks and statistics.mask is not None and not np.all(statistics.mask):
            raise FormatError(
                f"{title} must take every feature: the mask of {called} is "
                f"{_broken(statistics.mask, statistics.mask)}. Take the mask off first."
            )
    return dict(leaves)


def _has_data(statistics: Any) -> np.ndarray:
    """Return whether each feature has data, or needs none as it is masked out."""
    if statistics.count is None:
        return np.array(True)
    masked = False if statistics.mask is None else ~statistics.mask
    return (statistics.count > 0) | masked


def _check_finite(title: str, called: str, name: str, array: np.ndarray) -> None:
    if not np.all(np.isfinite(array)):
        raise FormatError(
            f"{title} must hold finite numbers: the {name} of {called} is {_broken(array)}. "
            "Fit on data without them, or mask them."
        )


def _per_feature(
    path: Path | str, leaf: str, count: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Broadcast a count, which most files hold once for all features."""
    if count.shape != shape and count.size != 1:
        raise FormatError(
            f"{path} must hold one count of {leaf!r}, or one for each feature: it has shape "
            f"{count.shape}, the features {shape}."
        )
    return count.reshape(shape) if count.shape == shape else np.full(shape, count.item())


def _broken(array: np.ndarray, fine: np.ndarray | None = None) -> str:
    """Name the first features of an array that are not fine."""
    flat, fine = np.ravel(array), np.ravel(np.isfinite(array) if fine is None else fine)
    where = np.flatnonzero(~fine)
    value = str(flat[where[0]])
    if flat.size == 1:
        return value
    named = ", ".join(label(array.shape, int(i)) for i in where[:3])
    return f"{value} in feature {named}" + (f" and {len(where) - 3} more" if where.size > 3 else "")


def _listed(names: list[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _no_numbers(path: Path | str, name: str, held: str) -> FormatError:
    return FormatError(f"{path} must hold numbers in {name}: it holds {held}.")
