"""Sums over data in NumPy, read in tiles that stay in the processor's cache, so that the corrected two-pass reads main memory once."""

import itertools
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxnorm.axes import Reduction

TILE = 1 << 18  # elements: 2 MiB of float64, which the cache holds; with fewer, what is done once for each tile shows
ROWS = 16  # of a tile at least, where a row is longer than a tile
COLUMNS = 64  # from this many groups side by side NumPy's loops run along them; fewer are transposed
LONG = 2048  # elements of a row from which on what NumPy does once for each is little
QUIET = np.errstate(invalid="ignore", over="ignore")  # what is not finite shows in the result
PARTS = 8  # of large arrays, for threads to share; the same number on every machine, so that the result is the same


def reduce_tiles(x: np.ndarray, reduction: Reduction, where: np.ndarray | None, *, centered: bool, extremes: bool, threads: int) -> tuple:
    """Count, mean, variance, minimum and maximum of each group. ``threads`` changes no bit."""
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
    return whole.results(reduction.stats_shape)


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

    def results(self, shape: tuple[int, ...]) -> tuple:
        var = self.squares / np.where(self.count > 0, self.count, 1)
        return tuple(leaf.reshape(shape) for leaf in (self.count, self.mean, var, self.min, self.max))


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
