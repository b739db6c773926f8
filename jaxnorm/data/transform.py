"""Normalizing an array by statistics in float64: NumPy in, NumPy out; JAX in, JAX out, within jit too."""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.axes import Axes, resolve
from jaxnorm.host import Summary


class Fit(NamedTuple):
    """The statistics of one leaf, in a shape that broadcasts against it; the mean is ``mean + rest``."""

    mean: np.ndarray
    rest: np.ndarray  # what rounding left of it: float32 holds 1e6 + 0.3 to no more than 0.03
    deviation: np.ndarray


def normalize(x, summary: Summary, axes: Axes, sizes: dict[str, int], *, clip: float | None, floor: float, dtype) -> Any:
    """``(x - mean) / max(deviation, floor)``."""
    xp, x, wide, own = _opened(x, dtype)
    if own.kind in "iub":
        raise TypeError(f"dtype must be floating point: got {own}.")
    fit, shape = _fit(summary, x.shape, axes, sizes, floor, wide)
    y = ((x.astype(wide).reshape(shape) - fit.mean) - fit.rest) / fit.deviation
    if clip is not None:
        y = xp.clip(y, -clip, clip)
    return y.reshape(x.shape).astype(own)


def denormalize(y, summary: Summary, axes: Axes, sizes: dict[str, int], *, floor: float, dtype) -> Any:
    """``y * max(deviation, floor) + mean``, rounded where integers are asked for."""
    xp, y, wide, own = _opened(y, dtype)
    fit, shape = _fit(summary, y.shape, axes, sizes, floor, wide)
    x = (y.astype(wide).reshape(shape) * fit.deviation + fit.rest) + fit.mean
    return (xp.round(x) if own.kind in "iu" else x).reshape(y.shape).astype(own)


def _opened(x, dtype) -> tuple[Any, Any, np.dtype, np.dtype]:
    """The array's namespace, the array, the dtype to compute in, and that of the result."""
    if not hasattr(x, "__array_namespace__"):
        x = np.asarray(x)
    xp, given = x.__array_namespace__(), np.dtype(x.dtype)
    if given.kind in "iu":
        wide = np.dtype(np.float32) if given.itemsize <= 2 or xp is not np else np.dtype(np.float64)
        own = np.dtype(np.float32)
    elif given.kind == "f" or (given.kind == "V" and given.names is None):  # V: bfloat16
        wide, own = (given if given.itemsize >= 4 else np.dtype(np.float32)), given
    else:
        raise TypeError(f"x must be floating point or integer: got {given}. Cast it first, for example with .astype(np.float32).")
    return xp, x, wide, own if dtype is None else np.dtype(dtype)


def _fit(summary: Summary, shape: tuple[int, ...], axes: Axes, sizes: dict[str, int], floor: float, dtype: np.dtype) -> tuple[Fit, tuple]:
    """The statistics for an array of this shape, and the shape it takes to fit them."""
    count, mean, var = summary.moments.count, summary.moments.mean, summary.moments.var
    deviation = np.where(count > 0, np.maximum(np.sqrt(var), floor), 1)  # a feature without data stays as it is
    if isinstance(axes, str) and "(" in axes:
        reduction = resolve(axes, shape, sizes)
        if reduction.stats_shape != mean.shape:
            raise _misfit(mean.shape, shape)
        shape, fitted = reduction.split_shape, reduction.split_stats_shape
    else:
        fitted = mean.shape
        while len(fitted) > len(shape) and fitted[0] == 1:  # one example, without the axis of the batch
            fitted = fitted[1:]
        fitted = (1,) * (len(shape) - len(fitted)) + fitted
        if len(fitted) != len(shape) or any(own not in (1, size) for own, size in zip(fitted, shape, strict=True)):
            raise _misfit(mean.shape, shape)
    high = mean.astype(dtype)
    rest = (mean - np.where(np.isfinite(high), high, 0).astype(np.float64)).astype(dtype)
    return Fit(*(leaf.reshape(fitted) for leaf in (high, rest, deviation.astype(dtype)))), shape


def _misfit(fitted: tuple[int, ...], shape: tuple[int, ...]) -> ValueError:
    return ValueError(f"the statistics must broadcast against x without growing it: they have shape {fitted}, x has shape {tuple(shape)}.")


def positive(name: str, value) -> float:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0: got {value!r}.")
    return float(value)
