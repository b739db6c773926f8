"""Numbers in two words of float64, and integers that one word cannot hold."""

import numpy as np

EXACT = 2**53  # float64 holds every integer up to here


def two_sum(a, b) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded a + b, and its rounding error, 0 where it is not finite.

    Knuth (1997), section 4.2.2.

    >>> high, low = two_sum(np.array(2.0**60), np.array(3.0))
    >>> (int(high) - 2**60, float(low))
    (0, 3.0)
    """
    total = np.add(a, b)
    part = total - a
    return total, np.where(np.isfinite(total), (a - (total - part)) + (b - part), 0)


def beyond_float64(x: np.ndarray) -> bool:
    """Whether these are integers that a cast to float64 would round."""
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or not x.size:
        return False
    return int(x.max()) > EXACT or int(x.min()) < -EXACT


def from_pivots(
    x: np.ndarray, w: np.ndarray | None, axis: int, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 64-bit integers as differences from one element of each group, and it in two words.

    The differences are written to ``out``. The element is the first that the mask ``w`` leaves, so
    that what is masked out, of any size, costs no digit.
    """
    first = np.zeros(x.shape[1 - axis], np.intp) if w is None else (w > 0).argmax(axis)
    pivot = np.take_along_axis(x, np.expand_dims(first, axis), axis)
    wide, base = x.view(np.uint64), pivot.view(np.uint64)  # modulo 2**64, whatever the distance
    if int(x.max()) - int(x.min()) < 2**63:
        np.copyto(out, (wide - base).view(np.int64))
    else:
        less = x < pivot
        np.copyto(out, np.where(less, base - wide, wide - base))
        np.negative(out, out=out, where=less)
    if w is not None:
        out[w == 0] = 0
    pivot = pivot.squeeze(axis)
    digits = pivot & pivot.dtype.type(2**32 - 1)
    return out, *two_sum((pivot >> pivot.dtype.type(32)) * 2.0**32, digits.astype(np.float64))
