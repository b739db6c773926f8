"""Moments in float64 NumPy: for workers that have no accelerator, or where JAX cannot be imported.

``Moments``, ``moments`` and ``merge`` obey the laws, and raise the messages, of their namesakes in :mod:`jaxnorm`. Two things
differ: everything is computed in float64, whatever the dtype of the data, and integers are accepted, since they are what
data sets hold (images of uint8). There is no ``axis_name``.

Data are read in tiles that stay in the processor's cache, so that the corrected two-pass reads main memory once.
"""

import itertools
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.axes import Axes, Reduction, resolve, unsplit

__all__ = ["Moments", "merge", "moments"]

TILE = 1 << 18  # elements: 2 MiB of float64, which the cache holds; with fewer, what is done once for each tile shows
ROWS = 16  # of a tile at least, where a row is longer than a tile
COLUMNS = 64  # from this many groups side by side NumPy's loops run along them; fewer are transposed
LONG = 2048  # elements of a row from which on what NumPy does once for each is little
QUIET = np.errstate(invalid="ignore", over="ignore")  # what is not finite shows in the result
PARTS = 8  # of large arrays, for threads to share; the same number on every machine, so that the result is the same


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of groups of elements, in float64: a value that can be merged.

    Attributes:
      count: how many elements (or how much weight) each group holds, exact to 2^53; 0 for an empty one.
      mean: the mean of each group, 0 for an empty one.
      var: the biased variance of each group, 0 for an empty one.

    >>> import numpy as np
    >>> from jaxnorm import host
    >>> per_instance = host.moments(np.arange(24.0).reshape(2, 3, 4), "n [h] c")
    >>> per_instance.merge(0).mean.tolist()
    [[[10.0, 11.0, 12.0, 13.0]]]
    """

    count: np.ndarray
    mean: np.ndarray
    var: np.ndarray

    def merge(self, axes: Axes, **sizes: int) -> "Moments":
        """Reduces further axes: the groups along ``axes`` become one.

        Args:
          axes: ints or a pattern over the shape of ``mean``.
          **sizes: sizes of split axes in a pattern.

        Raises:
          ValueError: the axes do not fit.
        """
        mean = numbers(self.mean, "mean")
        return _merge(resolve(axes, mean.shape, sizes), np.asarray(self.count, np.float64), mean, np.asarray(self.var, np.float64))


class Summary(NamedTuple):
    """The Moments of groups of elements, and the smallest and largest element of each (inf and -inf of an empty one)."""

    moments: Moments
    min: np.ndarray
    max: np.ndarray


def moments(x, /, axes: Axes, *, where=None, centered: bool = True, **sizes: int) -> Moments:
    """Count, mean and variance of ``x`` over ``axes``, in float64.

    Args:
      x: array of floating, complex or integer dtype, of any shape; memory-mapped ones are read tile by tile.
      axes: the reduction axes: an int, ints, or a pattern such as ``"n [h w] c"``.
      where: boolean mask or float weights that broadcast against ``x``. What is masked out counts for nothing, even NaN.
      centered: False takes the mean as 0, so that ``var`` is the mean square.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Moments whose reduced axes have size one (a split axis ``(g [c])`` has size g), of float64 (the mean of complex ``x``
      is complex128). The variance is biased, and computed from deviations from the mean, corrected for its rounding.

    Raises:
      TypeError: boolean ``x``, or what holds no numbers; a mask that is neither boolean nor float.
      ValueError: axes, pattern or mask that do not fit ``x``.

    >>> import numpy as np
    >>> from jaxnorm import host
    >>> host.moments(np.array([[1, 3], [5, 9]], np.uint8), "n [c]").var.tolist()
    [[1.0], [4.0]]
    """
    x = numbers(x)
    where = mask(where, x.shape)
    reduction = resolve(axes, x.shape, sizes)
    if not np.iscomplexobj(x):
        return summarize(x, reduction, where, centered=centered, extremes=False).moments
    real, imag = (summarize(part, reduction, where, centered=centered, extremes=False).moments for part in (x.real, x.imag))
    return Moments(real.count, real.mean + 1j * imag.mean, real.var + imag.var)


def merge(first: Moments, *others: Moments) -> Moments:
    """The Moments of several collections taken together.

    Associative and commutative; an empty Moments (count 0) is the identity.

    >>> import numpy as np
    >>> from jaxnorm import host
    >>> parts = [host.moments(np.array(part), 0) for part in ([1.0, 2.0], [6.0])]
    >>> host.merge(*parts).mean.tolist()
    [3.0]
    """
    parts = (first, *others)
    if not all(isinstance(part, Moments) for part in parts):
        wrong = next(type(part).__name__ for part in parts if not isinstance(part, Moments))
        raise TypeError(f"merge takes Moments: got {wrong}. Make them with jaxnorm.host.moments.")
    means = [numbers(part.mean, "mean") for part in parts]
    try:
        shape = np.broadcast_shapes(*(mean.shape for mean in means))
    except ValueError:
        shapes = ", ".join(str(mean.shape) for mean in means)
        raise ValueError(f"merged Moments must have shapes that broadcast: got {shapes}.") from None
    columns = ([part.count for part in parts], means, [part.var for part in parts])
    count, mean, var = (np.stack([np.broadcast_to(leaf, shape) for leaf in leaves]) for leaves in columns)
    whole = _merge(unsplit(mean.shape, (0,)), count.astype(np.float64), mean, var.astype(np.float64))
    return Moments(*(leaf.reshape(shape) for leaf in (whole.count, whole.mean, whole.var)))


def summarize(x: np.ndarray, reduction: Reduction, where=None, *, centered=True, extremes=True, threads: int = 1) -> Summary:
    """The Moments and extremes of real arguments that have been checked. ``threads`` changes no bit."""
    x = x.reshape(reduction.split_shape)
    if where is not None:
        where = np.broadcast_to(where.reshape(reduction.fit(where.shape)), x.shape)
    tiles = list(_tiles(x.shape, reduction.axes))
    stats_shape = reduction.split_stats_shape
    parts = PARTS if len(tiles) >= 2 * PARTS and math.prod(stats_shape) * PARTS * ROWS <= x.size else 1
    bounds = [len(tiles) * part // parts for part in range(parts + 1)]

    @QUIET
    def part(first: int, last: int) -> _Totals:
        totals, arrange = _Totals(stats_shape), _Arrange(reduction.axes, x.shape)
        for tile in tiles[first:last]:
            totals.add(arrange.place(tile), arrange.stats(x, where, tile, centered, extremes))
        return totals

    if threads > 1 and parts > 1:
        with ThreadPoolExecutor(min(threads, parts)) as pool:
            done = list(pool.map(part, bounds[:-1], bounds[1:]))
    else:
        done = list(map(part, bounds[:-1], bounds[1:]))
    whole = done[0]
    for other in done[1:]:
        whole.add(..., other.columns())
    return whole.summary(reduction.stats_shape)


class _Totals:
    """What has been added up of each group; ``squares`` are those of the deviations from the mean."""

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.mean, self.squares = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.min, self.max = np.full(shape, np.inf), np.full(shape, -np.inf)

    def columns(self) -> tuple:
        return self.count, self.mean, self.squares, self.min, self.max

    @QUIET
    def add(self, place: Any, columns: tuple) -> None:
        """Merges in those of the groups at ``place``; what is empty changes no bit."""
        shape = self.count[place].shape
        count, mean, squares, low, high = (column if np.ndim(column) == 0 else column.reshape(shape) for column in columns)
        before = self.count[place]
        whole = before + count
        share = count / np.where(whole > 0, whole, 1)
        step = mean - self.mean[place]
        self.squares[place] += squares + step * step * before * share
        self.mean[place] += step * share
        self.count[place] = whole
        if low is not None:
            self.min[place] = np.minimum(self.min[place], low)
            self.max[place] = np.maximum(self.max[place], high)

    def summary(self, shape: tuple[int, ...]) -> Summary:
        var = self.squares / np.where(self.count > 0, self.count, 1)
        count, mean, var, low, high = (leaf.reshape(shape) for leaf in (self.count, self.mean, var, self.min, self.max))
        return Summary(Moments(count, mean, var), low, high)


class _Arrange:
    """Copies tiles into float64 matrices: elements of a group along one axis, groups along the other."""

    def __init__(self, axes: tuple[int, ...], shape: tuple[int, ...]):
        kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
        self.axes = axes
        self.elements_first = math.prod(shape[max(axes, default=-1) + 1 :]) >= COLUMNS
        self.order = (*axes, *kept) if self.elements_first else (*kept, *axes)
        self.buffers: dict[str, np.ndarray] = {}

    def place(self, tile: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where the statistics of the tile stand."""
        return tuple(slice(0, 1) if axis in self.axes else part for axis, part in enumerate(tile))

    def matrix(self, name: str, x: np.ndarray) -> np.ndarray:
        """A copy of a tile, in a buffer that the next tile overwrites."""
        if self.buffers.get(name, np.empty(0)).size < x.size:
            self.buffers[name] = np.empty(x.size)
        elements = math.prod(x.shape[axis] for axis in self.axes)
        x = x.transpose(self.order)
        copy = self.buffers[name][: x.size].reshape(x.shape)
        np.copyto(copy, x)
        return copy.reshape((elements, -1) if self.elements_first else (-1, elements))

    def stats(self, x: np.ndarray, where: np.ndarray | None, tile: tuple[slice, ...], centered: bool, extremes: bool) -> tuple:
        """Count, mean, sum of squared deviations, minimum and maximum of each group of a tile, by the corrected two-pass."""
        axis = 0 if self.elements_first else 1
        d = self.matrix("x", x[tile])
        along = (lambda a: a) if axis == 0 else (lambda a: a[:, None])
        sums = "ij,ij->j" if axis == 0 else "ij,ij->i"
        if where is None:
            count: Any = float(d.shape[axis])
            low, high = (_reduced(np.minimum, d, axis), _reduced(np.maximum, d, axis)) if extremes else (None, None)
            weigh, n = (lambda a: a), count
        else:
            w = self.matrix("w", where[tile])
            d[w == 0] = 0  # even NaN
            count = w.sum(axis)
            low, high = (_extremes(d, w, axis)) if extremes else (None, None)
            weigh, n = (lambda a: w * a), np.where(count > 0, count, 1)
        if not centered:
            return count, 0.0, np.einsum(sums, weigh(d), d), low, high
        mean = _reduced(np.add, weigh(d), axis) / n
        d -= along(mean)
        weighted = weigh(d)
        rounding = _reduced(np.add, weighted, axis) / n
        squares = np.maximum(np.einsum(sums, weighted, d) - rounding * rounding * n, 0)
        return count, mean + rounding, squares, low, high


def _reduced(function: np.ufunc, d: np.ndarray, axis: int) -> np.ndarray:
    """Reduces columns several rows at a time: NumPy starts anew with each row, which takes long if rows are short."""
    rows, columns = d.shape
    fold = LONG // max(columns, 1)
    if axis == 1 or fold < 2 or rows % fold:
        return function.reduce(d, axis)
    return function.reduce(function.reduce(d.reshape(rows // fold, fold * columns), 0).reshape(fold, columns), 0)


def _extremes(d: np.ndarray, w: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    return d.min(axis, where=w > 0, initial=np.inf), d.max(axis, where=w > 0, initial=-np.inf)


def _tiles(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterable[tuple[slice, ...]]:
    """Slices that cut the shape into tiles of TILE elements or so: along the first axes first, in which memory runs slowest."""
    sizes = list(shape)
    for axis, size in enumerate(shape):
        others = math.prod(sizes) // max(size, 1)
        grouped = axis in axes and any(after not in axes for after in range(axis + 1, len(shape)))
        sizes[axis] = min(size, max(ROWS if grouped else 1, TILE // max(others, 1)))
    starts = (range(0, size, max(step, 1)) for size, step in zip(shape, sizes, strict=True))
    for place in itertools.product(*starts):
        yield tuple(slice(start, min(start + step, size)) for start, step, size in zip(place, sizes, shape, strict=True))


@QUIET
def _merge(reduction: Reduction, count: np.ndarray, mean: np.ndarray, var: np.ndarray) -> Moments:
    """Relative to the mean of the part that holds most, so that one part alone keeps its bits."""
    kept = tuple(axis for axis in range(len(reduction.split_shape)) if axis not in reduction.axes)
    groups = math.prod(reduction.split_shape[axis] for axis in kept)

    def rows(leaf: np.ndarray) -> np.ndarray:
        split = np.broadcast_to(leaf, reduction.shape).reshape(reduction.split_shape)
        return split.transpose(*kept, *reduction.axes).reshape(groups, reduction.group_size)

    shape = reduction.stats_shape
    if not mean.size:
        return Moments(np.zeros(shape), np.zeros(shape, mean.dtype), np.zeros(shape))
    count, mean, var = rows(count), rows(mean), rows(var)
    whole, live = count.sum(1, keepdims=True), count > 0
    share = count / np.where(whole > 0, whole, 1)
    pivot = np.where(whole > 0, np.take_along_axis(mean, count.argmax(1)[:, None], 1), 0)
    d = np.where(live, mean - pivot, 0)
    offset = (share * d).sum(1, keepdims=True)
    d = np.where(live, d - offset, 0)
    rounding = (share * d).sum(1, keepdims=True)
    between = np.maximum((share * np.abs(d) ** 2).sum(1, keepdims=True) - np.abs(rounding) ** 2, 0)
    within = (share * np.where(live, var, 0)).sum(1, keepdims=True)
    return Moments(*(leaf.reshape(shape) for leaf in (whole, pivot + (offset + rounding), between + within)))


def numbers(x, name: str = "x") -> np.ndarray:
    """``x`` as an array of a dtype that float64 (or complex128) holds."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: pass {name}.data, and where=~{name}.mask.")
    x = np.asarray(x)
    if x.dtype.kind not in "iufc" and not is_extended(x.dtype):
        raise TypeError(f"{name} must be floating point or integer: got {x.dtype}. Cast it first, for example with .astype(np.float32).")
    return x if x.dtype.kind != "V" else x.astype(np.float32)


def is_extended(dtype: np.dtype) -> bool:
    """Whether it is a number of less than 32 bits that NumPy itself does not know: bfloat16, float8."""
    return dtype.kind == "V" and dtype.names is None and np.can_cast(dtype, np.float64)


def mask(where, shape: tuple[int, ...]) -> np.ndarray | None:
    """A boolean mask or non-negative float weights that broadcast against ``shape``."""
    if where is None:
        return None
    where = np.asarray(where)
    where = where.astype(np.float32) if is_extended(where.dtype) else where
    if where.dtype.kind not in "bf":
        raise TypeError(f"where must be boolean or float weights: got {where.dtype}. Cast it first, for example with .astype(bool).")
    padded = (1,) * (len(shape) - where.ndim) + where.shape
    if where.ndim > len(shape) or any(s not in (1, t) for s, t in zip(padded, shape, strict=True)):
        raise ValueError(f"where must broadcast against x without growing it: where has shape {where.shape}, x has shape {tuple(shape)}.")
    if where.dtype.kind == "f" and not (valid := (where >= 0) & (where < math.inf)).all():
        found = where[~valid].ravel()[0]
        raise ValueError(f"the weights in where {where.shape}, for x {tuple(shape)}, must be finite and >= 0: found {found}.")
    return where
