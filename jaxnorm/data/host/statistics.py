"""Count, mean and variance of groups of elements in float64 NumPy, and their merge."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Axes, Reduction, resolve, unsplit
from jaxnorm.arguments.keywords import out_of_sizes
from jaxnorm.data.host.arguments import mask, numbers
from jaxnorm.data.host.parts import two_sum
from jaxnorm.data.host.tiles import QUIET, reduce_tiles


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of groups of elements, in float64: a value that can be merged.

    Attributes:
      count: how many elements (or how much weight) each group holds, exact to 2^53; 0 for an empty
        group.
      mean: the mean of each group, 0 for an empty group.
      var: the biased variance of each group, 0 for an empty group.
      low_mean: the low part of the mean, which ``mean`` loses by rounding; 0 unless given. With it,
        merges keep the variance of integers beyond 2^53.

    >>> import numpy as np
    >>> from jaxnorm import host
    >>> per_instance = host.moments(np.arange(24.0).reshape(2, 3, 4), "n [h] c")
    >>> per_instance.merge(0).mean.tolist()
    [[[10.0, 11.0, 12.0, 13.0]]]
    """

    count: np.ndarray
    mean: np.ndarray
    var: np.ndarray
    low_mean: np.ndarray = None  # type: ignore[assignment]  # zeros unless given

    def __post_init__(self) -> None:
        if self.low_mean is None:
            mean = np.asarray(self.mean)
            zeros = np.zeros(mean.shape, complex if mean.dtype.kind == "c" else float)
            object.__setattr__(self, "low_mean", zeros)

    def merge(self, axes: Axes, **sizes: int) -> "Moments":
        """Merge the groups along ``axes`` into one.

        Args:
          axes: ints or a pattern over the shape of ``mean``.
          **sizes: sizes of split axes in a pattern.

        Raises:
          ValueError: the axes do not fit.
        """
        mean = numbers(self.mean, "mean")
        count, var = np.asarray(self.count, np.float64), np.asarray(self.var, np.float64)
        return _merge(resolve(axes, mean.shape, sizes), count, mean, var, np.asarray(self.low_mean))


class Summary(NamedTuple):
    """Moments, minimum and maximum of groups of elements; inf and -inf for an empty group."""

    moments: Moments
    min: np.ndarray
    max: np.ndarray


def moments(x, /, axes: Axes, *, where=None, centered: bool = True, **sizes: int) -> Moments:
    """Return count, mean and variance of ``x`` over ``axes``, in float64.

    Args:
      x: array of floating, complex or integer dtype and any shape. A memory-mapped array is read
        tile by tile.
      axes: the reduction axes: an int, ints, or a pattern such as ``"n [h w] c"``.
      where: boolean mask or float weights that broadcast against ``x``. Masked elements count for
        nothing, even if they are NaN.
      centered: False takes the mean as 0, so that ``var`` is the mean square.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Moments in float64 (the mean of complex ``x`` is complex128). Reduced axes have size one, a
      split axis ``(g [c])`` has size g. The variance is biased. It is computed by the corrected
      two-pass: from deviations from the mean, corrected for the rounding of that mean.

    Raises:
      TypeError: boolean ``x``, or an array without numbers; a mask that is neither boolean nor
        float.
      ValueError: axes, pattern or mask that do not fit ``x``.

    >>> import numpy as np
    >>> from jaxnorm import host
    >>> host.moments(np.array([[1, 3], [5, 9]], np.uint8), "n [c]").var.tolist()
    [[1.0], [4.0]]
    """
    if sizes:
        (where,) = out_of_sizes(sizes, axes, where=where).values()
    x = numbers(x)
    where = mask(where, x.shape)
    reduction = resolve(axes, x.shape, sizes)
    if not np.iscomplexobj(x):
        return summarize(x, reduction, where, centered=centered, extremes=False).moments
    # |z - mean|^2 is the sum of both parts' squares, so the two variances add up
    real, imag = (
        summarize(part, reduction, where, centered=centered, extremes=False).moments
        for part in (x.real, x.imag)
    )
    mean, low = real.mean + 1j * imag.mean, real.low_mean + 1j * imag.low_mean
    return Moments(real.count, mean, real.var + imag.var, low)


def merge(first: Moments, *others: Moments) -> Moments:
    """Merge the Moments of several collections of elements into one.

    The merge is associative and commutative. An empty Moments (count 0) is its identity.

    >>> import numpy as np
    >>> from jaxnorm import host
    >>> parts = [host.moments(np.array(part), 0) for part in ([1.0, 2.0], [6.0])]
    >>> host.merge(*parts).mean.tolist()
    [3.0]
    """
    parts = (first, *others)
    # jaxnorm.Moments has the same class name, so an error names its module
    for wrong in (type(part) for part in parts if not isinstance(part, Moments)):
        kind = f"those of {wrong.__module__}" if wrong.__name__ == "Moments" else wrong.__name__
        raise TypeError(
            f"merge takes Moments of jaxnorm.host: got {kind}. Make them with jaxnorm.host.moments."
        )
    means = [numbers(part.mean, "mean") for part in parts]
    try:
        shape = np.broadcast_shapes(*(mean.shape for mean in means))
    except ValueError:
        shapes = ", ".join(str(mean.shape) for mean in means)
        raise ValueError(f"merged Moments must have shapes that broadcast: got {shapes}.") from None
    columns = (
        [part.count for part in parts],
        means,
        *([getattr(part, name) for part in parts] for name in ("var", "low_mean")),
    )
    count, mean, var, low = (
        np.stack([np.broadcast_to(leaf, shape) for leaf in leaves]) for leaves in columns
    )
    whole = _merge(
        unsplit(mean.shape, (0,)), count.astype(np.float64), mean, var.astype(np.float64), low
    )
    return Moments(*(leaf.reshape(shape) for leaf in vars(whole).values()))


def summarize(
    x: np.ndarray,
    reduction: Reduction,
    where=None,
    *,
    centered=True,
    extremes=True,
    threads: int = 1,
) -> Summary:
    """Return Moments and extremes of each group; the arguments are real and checked already.

    ``threads`` changes no bit.
    """
    *moments, low, high = reduce_tiles(
        x, reduction, where, centered=centered, extremes=extremes, threads=threads
    )
    return Summary(Moments(*moments), low, high)


@QUIET
def _merge(
    reduction: Reduction, count: np.ndarray, mean: np.ndarray, var: np.ndarray, low: np.ndarray
) -> Moments:
    """Merge the parts along the reduction axes, each a Moments, into one for each group.

    With weights ``s = count / sum(count)``: ``mean = sum(s * mean_i)``, and ``var`` is the variance
    within parts ``sum(s * var_i)`` plus the variance between them ``sum(s * (mean_i - mean)^2)``.
    """
    # Means are taken relative to the part that holds most: a part alone keeps its bits, and large
    # means lose no digits. The variance between parts is a corrected two-pass.
    kept = tuple(axis for axis in range(len(reduction.split_shape)) if axis not in reduction.axes)
    groups = math.prod(reduction.split_shape[axis] for axis in kept)

    def rows(leaf: np.ndarray) -> np.ndarray:
        split = np.broadcast_to(leaf, reduction.shape).reshape(reduction.split_shape)
        return split.transpose(*kept, *reduction.axes).reshape(groups, reduction.group_size)

    shape = reduction.stats_shape
    # argmax below needs one part at least
    if not mean.size:
        return Moments(np.zeros(shape), np.zeros(shape, mean.dtype), np.zeros(shape))
    count, mean, var, low = rows(count), rows(mean), rows(var), rows(low)
    whole, nonempty = count.sum(1, keepdims=True), count > 0
    share = count / np.where(whole > 0, whole, 1)
    most = count.argmax(1)[:, None]
    shift, low_shift = (
        np.where(whole > 0, np.take_along_axis(part, most, 1), 0) for part in (mean, low)
    )
    d = np.where(nonempty, (mean - shift) + (low - low_shift), 0)
    correction = (share * d).sum(1, keepdims=True)
    d = np.where(nonempty, d - correction, 0)
    # the mean of the deviations is 0 but for rounding, which the two-pass corrects
    rounding = (share * d).sum(1, keepdims=True)
    between = np.maximum((share * np.abs(d) ** 2).sum(1, keepdims=True) - np.abs(rounding) ** 2, 0)
    within = (share * np.where(nonempty, var, 0)).sum(1, keepdims=True)
    # the low parts are added last, and may move the high part by its last digit
    merged, rest = two_sum(shift, correction)
    merged, low = two_sum(merged, rest + (low_shift + rounding))
    return Moments(*(leaf.reshape(shape) for leaf in (whole, merged, between + within, low)))
