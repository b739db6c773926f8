"""The corrected two-pass in NumPy, over tiles that fit the cache, so that memory is read once."""

import itertools
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Reduction
from jaxnorm.data.host.parts import beyond_float64, differences_from_shift, two_sum

# Elements of a tile: 2 MiB of float64, which the cache holds. With smaller tiles the fixed cost of
# each one shows: float32 of shape (65536, 256) takes 2.6 ns of CPU time an element, and took 3.9
# with tiles of 1 << 16 elements and with rows reduced one at a time (see LONG).
TILE = 1 << 18
# Least rows of a tile, even where a row is longer than a tile: they share its fixed cost.
ROWS = 16
# With this many groups side by side NumPy's loops run along the groups; fewer are transposed.
COLUMNS = 64
# Elements of a row that make NumPy's fixed cost for each row small.
LONG = 2048
# The result shows NaN and Inf, so a warning would add nothing.
QUIET = np.errstate(invalid="ignore", over="ignore")
# Parts of a large array, which threads share. The order of sums depends on it, so it is the same on
# every machine, and so are the bits of the result.
PARTS = 8


def reduce_tiles(
    x: np.ndarray,
    reduction: Reduction,
    where: np.ndarray | None,
    *,
    centered: bool,
    extremes: bool,
    threads: int,
) -> tuple:
    """Return count, mean, variance, low part of the mean, minimum and maximum of each group.

    ``threads`` changes no bit.
    """
    x = x.reshape(reduction.split_shape)
    if where is not None:
        where = np.broadcast_to(where.reshape(reduction.fit(where.shape)), x.shape)
    tiles = list(_tiles(x.shape, reduction.axes))
    stats_shape = reduction.split_stats_shape
    # each part has totals of its own, which must be few compared with its elements
    parts = (
        PARTS if len(tiles) >= 2 * PARTS and math.prod(stats_shape) * PARTS * ROWS <= x.size else 1
    )
    bounds = [len(tiles) * part // parts for part in range(parts + 1)]

    @QUIET
    def part(first: int, last: int) -> _Totals:
        totals, matrices = _Totals(stats_shape), _Matrices(reduction.axes, x.shape)
        for tile in tiles[first:last]:
            totals.add(matrices.groups_of(tile), matrices.stats(x, where, tile, centered, extremes))
        return totals

    if threads > 1 and parts > 1:
        with ThreadPoolExecutor(min(threads, parts)) as pool:
            done = list(pool.map(part, bounds[:-1], bounds[1:]))
    else:
        done = list(map(part, bounds[:-1], bounds[1:]))
    whole = done[0]
    for other in done[1:]:
        whole.add(..., other.columns())
    return whole.results(reduction.stats_shape)


class _Totals:
    """Running totals of each group: count, mean in two parts, squared deviations, extremes."""

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.mean, self.low, self.squares = (np.zeros(shape) for _ in range(4))
        self.min, self.max = np.full(shape, np.inf), np.full(shape, -np.inf)

    def columns(self) -> tuple:
        return self.count, self.mean, self.low, self.squares, self.min, self.max

    @QUIET
    def add(self, groups: Any, columns: tuple) -> None:
        """Merge a tile's statistics into the totals of its groups; an empty tile changes no bit.

        With ``d`` the new mean minus the old one: ``mean += d * n_new / n``, and ``squares``, the
        sum of squared deviations, grows by the new squares and ``d^2 * n_old * n_new / n``.
        """
        shape = self.count[groups].shape
        columns = tuple(c if np.ndim(c) == 0 else c.reshape(shape) for c in columns)
        count, mean, low_mean, squares, low, high = columns
        old_count, old_mean, old_low = self.count[groups], self.mean[groups], self.low[groups]
        whole = old_count + count
        share = count / np.where(whole > 0, whole, 1)
        # the first data of a group set both parts of its mean, without rounding
        first = (old_count == 0) & (count > 0)
        step = np.where(first, 0, (mean - old_mean) + (low_mean - old_low))
        self.squares[groups] += squares + step * step * old_count * share
        moved = two_sum(old_mean, old_low + step * share)
        self.mean[groups] = np.where(first, mean, moved[0])
        self.low[groups] = np.where(first, low_mean, moved[1])
        self.count[groups] = whole
        if low is not None:
            self.min[groups] = np.minimum(self.min[groups], low)
            self.max[groups] = np.maximum(self.max[groups], high)

    def results(self, shape: tuple[int, ...]) -> tuple:
        var = self.squares / np.where(self.count > 0, self.count, 1)
        columns = (self.count, self.mean, var, self.low, self.min, self.max)
        return tuple(leaf.reshape(shape) for leaf in columns)


class _Matrices:
    """Copies of tiles as matrices: elements of a group along one axis, groups along the other."""

    def __init__(self, axes: tuple[int, ...], shape: tuple[int, ...]):
        kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
        self.axes = axes
        self.elements_first = math.prod(shape[max(axes, default=-1) + 1 :]) >= COLUMNS
        self.order = (*axes, *kept) if self.elements_first else (*kept, *axes)
        self.buffers: dict[tuple[str, type], np.ndarray] = {}

    def groups_of(self, tile: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the slices of the totals that belong to a tile's groups."""
        return tuple(slice(0, 1) if axis in self.axes else part for axis, part in enumerate(tile))

    def matrix(self, name: str, x: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """Copy a tile into a matrix, in a buffer that the next tile overwrites."""
        key = name, dtype
        if self.buffers.get(key, np.empty(0)).size < x.size:
            self.buffers[key] = np.empty(x.size, dtype)
        elements = math.prod(x.shape[axis] for axis in self.axes)
        x = x.transpose(self.order)
        copy = self.buffers[key][: x.size].reshape(x.shape)
        np.copyto(copy, x)
        return copy.reshape((elements, -1) if self.elements_first else (-1, elements))

    def stats(
        self,
        x: np.ndarray,
        where: np.ndarray | None,
        tile: tuple[slice, ...],
        centered: bool,
        extremes: bool,
    ) -> tuple:
        """Return each group's count, mean in two parts, squared deviations, minimum, maximum."""
        axis = 0 if self.elements_first else 1
        w = None if where is None else self.matrix("w", where[tile])
        # integers that float64 rounds: {2**60 + 1, 2**60 + 3} would have variance 0 instead of 1
        exact = centered and beyond_float64(x[tile])
        values = self.matrix("x", x[tile], x.dtype.type if exact else np.float64)
        if w is not None and not exact:
            # weight 0 times NaN would be NaN
            values[w == 0] = 0
        low, high = _extremes(values, w, axis) if extremes else (None, None)
        if not exact:
            return _two_pass(values, w, axis, centered, (low, high))
        d, shift, low_shift = differences_from_shift(values, w, axis, self.matrix("d", x[tile]))
        count, mean, low_mean, squares, *_ = _two_pass(d, w, axis, True, (low, high))
        mean, rest = two_sum(shift, mean)
        mean, low_mean = two_sum(mean, rest + (low_shift + low_mean))
        return count, mean, low_mean, squares, low, high


def _two_pass(
    d: np.ndarray, w: np.ndarray | None, axis: int, centered: bool, extremes: tuple
) -> tuple:
    """Return the columns for :meth:`_Totals.add` by the corrected two-pass; overwrite ``d``.

    With ``e`` the mean of ``d = x - mean(x)``, the squares are ``sum(d^2) - n * e^2`` and the mean
    is ``mean(x) + e``: ``e`` is the rounding error of the first mean.
    """
    along = (lambda a: a) if axis == 0 else (lambda a: a[:, None])
    sums = "ij,ij->j" if axis == 0 else "ij,ij->i"
    if w is None:
        count: Any = float(d.shape[axis])
        apply_weights, n = (lambda a: a), count
    else:
        count = w.sum(axis)
        apply_weights, n = (lambda a: w * a), np.where(count > 0, count, 1)
    if not centered:
        return count, 0.0, 0.0, np.einsum(sums, apply_weights(d), d), *extremes
    mean = _reduced(np.add, apply_weights(d), axis) / n
    d -= along(mean)
    weighted = apply_weights(d)
    rounding = _reduced(np.add, weighted, axis) / n
    # rounding must not make the squares negative
    squares = np.maximum(np.einsum(sums, weighted, d) - rounding * rounding * n, 0)
    return count, *two_sum(mean, rounding), squares, *extremes


def _reduced(function: np.ufunc, d: np.ndarray, axis: int) -> np.ndarray:
    """Reduce a matrix along an axis; along the first, several short rows at a time.

    NumPy has a fixed cost for each row, which is more than the work on a short row.
    """
    rows, columns = d.shape
    fold = LONG // max(columns, 1)
    if axis == 1 or fold < 2 or rows % fold:
        return function.reduce(d, axis)
    return function.reduce(
        function.reduce(d.reshape(rows // fold, fold * columns), 0).reshape(fold, columns), 0
    )


def _extremes(d: np.ndarray, w: np.ndarray | None, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return minimum and maximum of each group; inf and -inf where the mask leaves no element."""
    if w is None:
        return _reduced(np.minimum, d, axis), _reduced(np.maximum, d, axis)
    unmasked = w > 0
    # a matrix of integers needs bounds that are integers
    ends = (
        (np.inf, -np.inf) if d.dtype.kind == "f" else (np.iinfo(d.dtype).max, np.iinfo(d.dtype).min)
    )
    low = d.min(axis, where=unmasked, initial=ends[0])
    high = d.max(axis, where=unmasked, initial=ends[1])
    found = unmasked.any(axis)
    return np.where(found, low, np.inf), np.where(found, high, -np.inf)


def _tiles(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterable[tuple[slice, ...]]:
    """Yield slices that cut a shape into tiles of about TILE elements.

    They cut the first axes first, since steps along these are the largest in memory.
    """
    sizes = list(shape)
    for axis, size in enumerate(shape):
        others = math.prod(sizes) // max(size, 1)
        # one row along a reduced axis before kept ones has few elements of each group
        grouped = axis in axes and any(after not in axes for after in range(axis + 1, len(shape)))
        sizes[axis] = min(size, max(ROWS if grouped else 1, TILE // max(others, 1)))
    starts = (range(0, size, max(step, 1)) for size, step in zip(shape, sizes, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(corner, sizes, shape, strict=True)
        )
