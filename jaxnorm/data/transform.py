"""Normalization of NumPy or JAX arrays, also within jit, by statistics in float64."""

from typing import Any, NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.data.host.arguments import is_extended
from jaxnorm.data.scales import Scale


class Fit(NamedTuple):
    """A scale in a shape that broadcasts against the array, whose divisor has its dtype.

    Attributes:
      center: the high part of what is subtracted, in float64.
      low: the low part, which the center loses by rounding.
      divisor: what is divided by, above 0.
    """

    center: np.ndarray
    low: np.ndarray
    divisor: np.ndarray


def normalize(x, scale: Scale, axes: Axes, sizes: dict[str, int], *, dtype) -> Any:
    """Normalize an array: ``(x - center) / divisor``, clipped to the bound of the scale."""
    xp, x, compute_dtype, output_dtype = _with_dtypes(x, dtype)
    if output_dtype.kind in "iu":
        raise TypeError(f"dtype must be floating point: got {output_dtype}.")
    shape, fitted = _shapes(scale.center.shape, x.shape, axes, sizes)
    fit = _fit(scale, fitted, compute_dtype)
    y = _divided(xp, _centered(xp, x.reshape(shape), fit, compute_dtype), fit.divisor)
    if scale.bound is not None:
        bound = scale.bound.reshape(fitted).astype(compute_dtype)
        y = xp.clip(y, -bound, bound)
    return y.reshape(x.shape).astype(output_dtype)


def denormalize(y, scale: Scale, axes: Axes, sizes: dict[str, int], *, dtype) -> Any:
    """Denormalize an array: ``y * divisor + center``.

    With an integer dtype, return the nearest number that it can hold.
    """
    xp, y, compute_dtype, output_dtype = _with_dtypes(y, dtype)
    shape, fitted = _shapes(scale.center.shape, y.shape, axes, sizes)
    fit = _fit(scale, fitted, compute_dtype)
    scaled = y.astype(compute_dtype).reshape(shape) * fit.divisor
    if output_dtype.kind in "iu":
        return _to_integers(xp, scaled, fit, compute_dtype, output_dtype).reshape(y.shape)
    center, low = _center_parts(fit, compute_dtype)
    # the low part goes first: added to the center itself, it would be lost in rounding
    return ((scaled + _behind_barrier(xp, low)) + center).reshape(y.shape).astype(output_dtype)


def _with_dtypes(x, dtype) -> tuple[Any, Any, np.dtype, np.dtype]:
    """Return the array's namespace, the array, the dtype to compute in, and the result's dtype."""
    if not hasattr(x, "__array_namespace__"):
        x = np.asarray(x)
    xp, given = x.__array_namespace__(), np.dtype(x.dtype)
    # booleans count as 0 and 1, as in fitting
    if given.kind == "b":
        x, given = x.astype(np.uint8), np.dtype(np.uint8)
    if given.kind in "iu":
        # float32 holds integers of up to 16 bits exactly, longer ones not
        compute_dtype = _widest(xp) if given.itemsize > 2 else np.dtype(np.float32)
        output_dtype = np.dtype(np.float32)
    elif given.kind == "f" or is_extended(given):
        compute_dtype = given if given.itemsize >= 4 else np.dtype(np.float32)
        output_dtype = given
    else:
        cast = "Cast it first, for example with .astype(np.float32)"
        raise TypeError(f"x must be floating point, integer or boolean: got {given}. {cast}.")
    output_dtype = output_dtype if dtype is None else np.dtype(dtype)
    if output_dtype.kind not in "iuf" and not is_extended(output_dtype):
        raise TypeError(f"dtype must be floating point or integer: got {output_dtype}.")
    if xp is not np and output_dtype.itemsize > 4:
        # without x64 JAX halves the dtype, and warns
        output_dtype = np.dtype(xp.zeros((), output_dtype).dtype)
    # by way of float32, uint8 came out 1.3e-8 off
    if output_dtype == np.float64:
        compute_dtype = _widest(xp)
    return xp, x, compute_dtype, output_dtype


def _widest(xp) -> np.dtype:
    """Return float64, or float32 for JAX without x64."""
    return np.dtype(np.float64) if xp is np else np.dtype(xp.zeros((), float).dtype)


def _center_parts(fit: Fit, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the center in two parts: a float32 alone holds 1e6 + 0.3 only to 0.03."""
    high = fit.center.astype(dtype)
    left = fit.center - np.where(np.isfinite(high), high, 0).astype(np.float64)
    return high, (left + fit.low).astype(dtype)


def _behind_barrier(xp, constant: np.ndarray) -> Any:
    """Return a constant, such as the low part of a center; for JAX, behind a barrier.

    Without the barrier, XLA in JAX 0.7 to 0.10 adds up both parts where they are constants, and the
    low part is lost: 1e7 and 1e7 + 1 in float32 gave 0 and 2 instead of -1 and 1.
    """
    if xp is np:
        return constant
    # imported late: statistics of NumPy arrays need no JAX
    from jaxnorm.engine.xla import prevent_folding

    return prevent_folding(xp.asarray(constant))


def _divided(xp, x, divisor: np.ndarray) -> Any:
    """Return ``x / divisor``, also by a divisor whose reciprocal is subnormal.

    XLA multiplies by the reciprocal of a divisor that is broadcast, and takes subnormal numbers for
    0. In float32 that concerns divisors above 8.5e37, which are scaled together with x.
    """
    # the reciprocal of the smallest normal number is exact
    if xp is np or not (is_large := divisor > 1 / np.finfo(divisor.dtype).tiny).any():
        return x / divisor
    scale = np.where(is_large, 0.125, 1).astype(divisor.dtype)
    # without the barrier, XLA multiplies by both constants at once again
    return x * _behind_barrier(xp, scale) / (divisor * scale)


# An infinite center gives NaN, as it should.
@np.errstate(invalid="ignore")
def _centered(xp, x, fit: Fit, compute_dtype: np.dtype) -> Any:
    """Return ``x - center``, without rounding long integers before the difference."""
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 4:
        high, low = _center_parts(fit, compute_dtype)
        return (x.astype(compute_dtype) - high) - _behind_barrier(xp, low)
    # Integers may have more digits than a float. So x and the whole part of the center are split
    # into halves, x = above * 2**bits + below, whose differences a float holds.
    bits = 4 * x.dtype.itemsize
    whole, low_whole = np.floor(fit.center), np.rint(fit.low)
    high = np.floor(whole / 2**bits)
    low = (whole - high * 2**bits) + low_whole
    digits = [(x >> x.dtype.type(bits), high), (x & x.dtype.type(2**bits - 1), low)]
    above, below = (part.astype(compute_dtype) - of.astype(compute_dtype) for part, of in digits)
    rest = ((fit.center - whole) + (fit.low - low_whole)).astype(compute_dtype)
    return (above * compute_dtype.type(2**bits) + below) - _behind_barrier(xp, rest)


@np.errstate(over="ignore")
def _to_integers(xp, scaled, fit: Fit, compute_dtype: np.dtype, output_dtype: np.dtype) -> Any:
    """Return ``scaled + center`` rounded to integers and clipped to the range of the dtype."""
    # the whole part of the center is added as an integer, since a float may not hold its digits
    info = np.iinfo(output_dtype)
    nearest, low_nearest = np.nan_to_num(np.rint(fit.center)), np.rint(fit.low)
    wholes = [
        int(value) + int(low)
        for value, low in zip(nearest.ravel(), low_nearest.ravel(), strict=True)
    ]
    exact = np.array(wholes, object).reshape(nearest.shape)
    base = np.array([min(max(value, info.min), info.max) for value in wholes], object).reshape(
        nearest.shape
    )
    rest = ((fit.center - nearest) + (fit.low - low_nearest)) + (exact - base).astype(np.float64)
    low, high = (_rounded_to_zero(bound - base, compute_dtype) for bound in (info.min, info.max))
    steps = xp.clip(xp.round(scaled + rest.astype(compute_dtype)), low, high)
    # unsigned sums are modulo 2**bits: they are right even where a step does not fit the dtype
    modular = np.dtype(f"uint{8 * output_dtype.itemsize}")
    size = abs(steps).astype(modular)
    start = (base % 2 ** (8 * output_dtype.itemsize)).astype(modular)
    return xp.where(steps < 0, start - size, start + size).astype(output_dtype)


def _rounded_to_zero(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert integers to floats, rounded towards 0."""
    # rounded away from 0, a bound would let results leave the range of the integer dtype
    rounded = exact.astype(np.float64).astype(dtype)
    return np.where(
        (abs(rounded.astype(object)) > abs(exact)).astype(bool),
        np.nextafter(rounded, dtype.type(0)),
        rounded,
    )


def _fit(scale: Scale, shape: tuple[int, ...], dtype: np.dtype) -> Fit:
    # the cast may round a small floor to 0
    divisor = np.maximum(scale.divisor.astype(dtype), np.finfo(dtype).tiny)
    return Fit(*(leaf.reshape(shape) for leaf in (scale.center, scale.low, divisor)))


def _shapes(
    stats: tuple[int, ...], shape: tuple[int, ...], axes: Axes, sizes: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes to give an array and statistics, so that they broadcast."""
    missing = len(stats) - len(shape)
    if isinstance(axes, str) and "(" in axes:
        # a single example lacks the leading reduction axes
        if missing > 0 and set(stats[:missing]) == {1}:
            shape = (1,) * missing + shape
        reduction = resolve(axes, shape, sizes)
        if reduction.stats_shape != stats:
            raise _misfit(stats, shape)
        return reduction.split_shape, reduction.split_stats_shape
    # a single example lacks the leading reduction axes, which have size 1 here
    fitted = stats
    while len(fitted) > len(shape) and fitted[0] == 1:
        fitted = fitted[1:]
    fitted = (1,) * (len(shape) - len(fitted)) + fitted
    if len(fitted) != len(shape) or any(
        own not in (1, size) for own, size in zip(fitted, shape, strict=True)
    ):
        raise _misfit(stats, shape)
    return shape, fitted


def _misfit(fitted: tuple[int, ...], shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"the statistics must broadcast against x without growing it: they have shape {fitted}, x "
        f"has shape {tuple(shape)}."
    )
