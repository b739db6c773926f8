"""Scales of leaves: what is subtracted and divided by, in each mode."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.arguments.numbers import is_number
from jaxnorm.data.fitted import Fitted
from jaxnorm.data.formula import Formula
from jaxnorm.data.host.parts import two_sum
from jaxnorm.data.host.sketch import ranks as checked_ranks
from jaxnorm.data.trees import flatten, prefix_of

MODES = ("standard", "min_max", "quantile")


class Scale(NamedTuple):
    """What normalizes one leaf: ``y = clip((x - center - low) / divisor)``.

    Attributes:
      center: the high part of what is subtracted, in float64.
      low: the low part, which the center loses by rounding.
      divisor: what is divided by, above 0.
      bound: the largest absolute value of the result, or None; inf for features without a bound.
    """

    center: np.ndarray
    low: np.ndarray
    divisor: np.ndarray
    bound: np.ndarray | None


class Choice(NamedTuple):
    """What a caller says of one leaf; None for what the formula says.

    Attributes:
      mode: one of :data:`MODES`.
      clip: the largest absolute value of the result.
      floor: the smallest deviation or width to divide by.
      floor_relative: the smallest deviation in units of the mean's absolute value.
      mask: False for features that stay as they are.
      ranks: the two ranks that mode "quantile" maps to -1 and 1.
    """

    mode: str = "standard"
    clip: float | None = None
    floor: float | None = None
    floor_relative: float | None = None
    mask: Any = None
    ranks: tuple[float, float] | None = None


def scale(fitted: Fitted, formula: Formula, choice: Choice) -> Scale:
    """Return the scale of a leaf."""
    if choice.floor is not None:
        formula = formula._replace(least=choice.floor, range_least=choice.floor, range_zero=None)
    if choice.floor_relative is not None:
        formula = formula._replace(relative=choice.floor_relative)
    if choice.mode == "standard":
        (center, low, divisor), bound = _standard(fitted, formula), formula.clip
    else:
        (center, low, divisor), bound = _ranged(fitted, formula, choice), formula.range_clip
    # a feature without any element stays as it is, but for clipping
    empty = fitted.summary.moments.count == 0
    if empty.any():
        center, low, divisor = _where(~empty, center, low, divisor)
    bound = bound if choice.clip is None else choice.clip
    mask = _mask(fitted, choice.mask)
    bounds = np.full(fitted.shape, bound) if np.isfinite(bound) else None
    if mask is not None:
        center, low, divisor = _where(mask, center, low, divisor)
        bounds = None if bounds is None else np.where(mask, bounds, np.inf)
    return Scale(center, low, divisor, bounds)


def _where(
    mask: np.ndarray, center: np.ndarray, low: np.ndarray, divisor: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return center 0 and divisor 1, which change no bit, where the mask is False."""
    return np.where(mask, center, 0.0), np.where(mask, low, 0.0), np.where(mask, divisor, 1.0)


def _standard(fitted: Fitted, formula: Formula) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    _need(fitted, "standard", "mean", "var")
    moments = fitted.summary.moments
    divisor = formula.standard(moments.count, moments.mean, moments.var)
    return moments.mean, moments.low_mean, divisor


def _ranged(
    fitted: Fitted, formula: Formula, choice: Choice
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if choice.mode == "min_max":
        _need(fitted, "min_max", "min", "max")
        ends = fitted.summary.min, fitted.summary.max
    else:
        if choice.ranks is None:
            raise ValueError(
                "mode 'quantile' needs two quantiles: fewer are known. Fit with "
                "quantiles=(0.01, 0.99), or pass ranks=."
            )
        ends = fitted.quantile(choice.ranks[0]), fitted.quantile(choice.ranks[1])
    low, half, divisor = formula.ranged(*ends)
    center, rest = two_sum(low, half)
    return center, rest, divisor


def _need(fitted: Fitted, mode: str, *names: str) -> None:
    if unknown := [name for name in names if name in fitted.unknown]:
        raise ValueError(
            f"mode {mode!r} needs {' and '.join(names)}: these statistics came without "
            f"{' and '.join(unknown)}."
        )


def _mask(fitted: Fitted, given) -> np.ndarray | None:
    """Return the mask of the file and the caller together."""
    mask = fitted.mask
    if given is not None:
        given = np.asarray(given)
        if given.dtype != bool:
            raise ValueError(
                f"mask must hold booleans, False for features that stay as they are: got "
                f"{given.dtype}."
            )
        try:
            given = np.broadcast_to(given, fitted.shape)
        except ValueError:
            raise ValueError(
                f"mask must broadcast to the statistics: it has shape {given.shape}, they have "
                f"{fitted.shape}."
            ) from None
        mask = given if mask is None else mask & given
    return mask


def choices(
    paths: Iterable[str], mode, clip, floor, floor_relative, mask, ranks
) -> dict[str, Choice]:
    """Return the choice for each leaf, from one for all or mappings from paths of leaves or trees.

    >>> choices(["state", "image"], "min_max", None, {"state": 0.1}, None, None, None)["state"]
    Choice(mode='min_max', clip=None, floor=0.1, floor_relative=None, mask=None, ranks=None)
    """
    paths = list(paths)
    columns = {
        "mode": _by_path("mode", mode, paths, _mode),
        "clip": _by_path("clip", clip, paths, positive),
        "floor": _by_path("floor", floor, paths, positive),
        "floor_relative": _by_path("floor_relative", floor_relative, paths, nonnegative),
        "mask": _by_path("mask", _masks(mask, paths), paths, lambda name, value: value),
    }
    pair = None if ranks is None else _pair(ranks)
    return {
        path: Choice(
            **{name: values[path] for name, values in columns.items() if path in values},
            ranks=pair,
        )
        for path in paths
    }


def _by_path(name: str, given, paths: list[str], check) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(paths, check(name, given))
    values = {
        prefix: check(f"{name} of {prefix!r}", value) for prefix, value in flatten(given).items()
    }
    used = {path: prefix for path in paths if (prefix := prefix_of(values, path)) is not None}
    if unknown := sorted(set(values) - set(used.values())):
        raise ValueError(
            f"{name} must name leaves that are fitted: got {unknown}, fitted are {sorted(paths)}."
        )
    return {path: values[prefix] for path, prefix in used.items()}


def _masks(given: Any, paths: list[str], path: str = "") -> Any:
    """Return masks whose lists for a leaf are arrays, as lists elsewhere are trees of leaves."""
    if isinstance(given, Mapping):
        members = {key: f"{path}/{key}" if path else str(key) for key in given}
        return {key: _masks(given[key], paths, name) for key, name in members.items()}
    return np.asarray(given) if path in paths and isinstance(given, list | tuple) else given


def _mode(name: str, value) -> str:
    if value not in MODES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, MODES))}: got {value!r}.")
    return value


def _pair(given) -> tuple[float, float]:
    pair = checked_ranks(given)
    if len(pair) != 2 or not pair[0] < pair[1]:
        raise ValueError(f"ranks must be two, the lower one first: got {given!r}.")
    return pair[0], pair[1]


def positive(name: str, value) -> float:
    """Return a number after checking that it is finite and above 0."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number > 0: got {value!r}.")
    return float(value)


def nonnegative(name: str, value) -> float:
    """Return a number after checking that it is finite and not negative."""
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number >= 0: got {value!r}.")
    return float(value)


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) < np.inf
