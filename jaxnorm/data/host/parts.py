"""Double-float numbers: a high and a low part in float64, also for integers beyond 2**53."""

import numpy as np

# float64 holds every integer up to here.
EXACT = 2**53


def two_sum(a, b) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded sum a + b and its rounding error, which is 0 where the sum is not finite.

    The algorithm is TwoSum: Knuth (1997), section 4.2.2.

    >>> high, low = two_sum(np.array(2.0**60), np.array(3.0))
    >>> (int(high) - 2**60, float(low))
    (0, 3.0)
    """
    total = np.add(a, b)
    part = total - a
    return total, np.where(np.isfinite(total), (a - (total - part)) + (b - part), 0)


def beyond_float64(x: np.ndarray) -> bool:
    """Return whether a cast to float64 could round the elements: integers beyond 2**53."""
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or not x.size:
        return False
    return int(x.max()) > EXACT or int(x.min()) < -EXACT


def differences_from_shift(
    x: np.ndarray, w: np.ndarray | None, axis: int, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 64-bit integers minus a shift of each group, and the shift in two parts.

    The differences are written to ``out``. The shift is the first element that the mask ``w``
    leaves. So masked elements cost no digits, whatever their size.
    """
    first = np.zeros(x.shape[1 - axis], np.intp) if w is None else (w > 0).argmax(axis)
    shift = np.take_along_axis(x, np.expand_dims(first, axis), axis)
    # unsigned integers subtract modulo 2**64, so no difference overflows
    wide, base = x.view(np.uint64), shift.view(np.uint64)
    if int(x.max()) - int(x.min()) < 2**63:
        np.copyto(out, (wide - base).view(np.int64))
    else:
        # a distance may need all 64 bits and a sign: first its size, then its sign
        less = x < shift
        np.copyto(out, np.where(less, base - wide, wide - base))
        np.negative(out, out=out, where=less)
    if w is not None:
        out[w == 0] = 0
    shift = shift.squeeze(axis)
    # halves of 32 bits are exact in float64
    digits = shift & shift.dtype.type(2**32 - 1)
    return out, *two_sum((shift >> shift.dtype.type(32)) * 2.0**32, digits.astype(np.float64))
