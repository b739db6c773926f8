"""Data sets in files of many formats, local or at an address, read piece by piece."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.data.sources import choosing, dimensions, horizons
from jaxnorm.data.sources.addresses import (
    PatternError,
    SourceError,
    check_once,
    expanded,
    fingerprint,
)
from jaxnorm.data.sources.choosing import AS_IS, Wanted, lacking
from jaxnorm.data.sources.horizons import Horizon
from jaxnorm.data.sources.opening import guarded
from jaxnorm.data.sources.piece import Piece, bare, masks
from jaxnorm.data.sources.readers import COORDINATE, Batch, Leaf, Reader, nbytes, part
from jaxnorm.data.trees import prefix_of, sizes_in

__all__ = [
    "COORDINATE",
    "PIECE",
    "Batch",
    "Horizon",
    "Leaf",
    "PatternError",
    "Piece",
    "SourceError",
    "Wanted",
    "bare",
    "episodes",
    "fingerprint",
    "lacking",
    "left_out",
    "masks",
    "part",
    "pieces",
]

# Approximate bytes of a piece.
PIECE = 64 << 20


def left_out(path: str, axes: Mapping[str, Axes]) -> dict[str, str]:
    """Return the leaves of a file that :func:`pieces` leaves out, with their contents in words.

    Such a leaf holds no array of numbers, or it is a coordinate of other leaves, or it lacks a
    dimension that the pattern names. The axes name the tree that holds the leaf, but not the leaf
    itself.

    Raises:
      SourceError: the file is missing or damaged.
    """
    found = {}
    for one in expanded([path])[:1]:
        leaves = guarded(one, lambda reader: reader.leaves)
        found = {
            name: leaf.unsupported or COORDINATE
            for name, leaf in leaves.items()
            if name not in axes and prefix_of(axes, name) is not None and not leaf.part_of
            if leaf.unsupported or leaf.is_coordinate
        } | choosing.without_dimensions(one, axes)
    return found


def episodes(paths: Sequence[str], leaves: Collection[str]) -> int | None:
    """Return how many episodes these leaves are of, or None if one of the files does not tell.

    Raises:
      SourceError: a file cannot be read.
    """
    total = 0
    for path in expanded(paths):
        count = guarded(path, lambda reader: reader.episodes(leaves))
        if count is None:
            return None
        total += count
    return total


def vector(path: str, name: str) -> np.ndarray:
    """Return all of a leaf that has one axis.

    Raises:
      SourceError: the file cannot be read.
    """

    def read(reader: Reader) -> np.ndarray:
        return reader.read({name: 0}, (0, reader.leaves[name].shape[0]))[name]

    return guarded(path, read)


def pieces(
    paths: Sequence[str],
    axes: Mapping[str, Axes],
    sizes: Mapping[str, int],
    wanted: Wanted = AS_IS,
) -> list[Piece]:
    """Return the pieces of all files, which must have the same leaves.

    Args:
      paths: local files and folders, and addresses that fsspec knows, also with ``*``.
      axes: the reduction axes by leaf, or by a tree of leaves.
      sizes: sizes of split axes in patterns.
      wanted: differences, weights, masks and horizons.

    Raises:
      SourceError: files that are missing, damaged, without elements, or whose leaves are not those
        of the first file; leaves that are named and hold no numbers.
    """
    result: list[Piece] = []
    first: tuple[str, dict] | None = None
    every = expanded(paths)
    check_once(every)
    for path in every:
        unreduced, found = _of_file(path, axes, sizes, wanted)
        first = first or (path, unreduced)
        _check_same(first[0], first[1], path, unreduced)
        result += found
    if not result:
        held = "holds" if len(paths) == 1 else "hold"
        raise SourceError(f"the files must hold elements: {', '.join(paths)} {held} none.")
    return result


def _of_file(
    path: str, axes: Mapping[str, Axes], sizes: Mapping[str, int], wanted: Wanted
) -> tuple[dict[str, tuple[int, ...]], list[Piece]]:
    """Return the shape of the statistics of each leaf, and the pieces."""
    named = choosing.leaves_to_fit(path, axes, wanted.masks)
    own = {leaf: axes[str(prefix_of(axes, leaf))] for leaf in named}
    of_file = choosing.dimensions_of(guarded(path, lambda reader: reader.leaves))
    fitted = horizons.with_steps(named, wanted.horizons)
    for leaf in named:
        hint = horizons.HINT if fitted[leaf] is not named[leaf] else ""
        dimensions.check(path, leaf, fitted[leaf], own[leaf], leaf in axes, of_file, hint)
    diff = {} if wanted.diff is None else choosing.differenced(path, named, own, axes, wanted)
    if diff:
        named = {leaf: named[leaf] for leaf in diff}
    weights = choosing.weighted(path, named, own, wanted) if wanted.weights else ()
    shapes = {leaf: _fitted_shape(fitted[leaf], diff.get(leaf)) for leaf in named}
    reductions = {leaf: _reduction(path, leaf, shapes[leaf], own[leaf], sizes) for leaf in named}
    whole = {leaf: _whole(path, reductions[leaf], own[leaf]) for leaf in named}
    unreduced = {leaf: reduction.stats_shape for leaf, reduction in reductions.items()}
    whole, by = choosing.with_horizons(path, named, whole, wanted)
    whole, like, uncut = choosing.with_masks(path, named, whole, wanted)
    empty = Piece(path, (), (0, 0), 0, tuple(diff.items()), weights, uncut)
    empty = empty._replace(horizons=wanted.horizons, unfitted=tuple(by))
    return unreduced, guarded(path, partial(_cut, empty, whole, like | by))


def _fitted_shape(leaf: Leaf, diff: int | None) -> tuple[int, ...]:
    if diff is None:
        return leaf.shape
    return (*leaf.shape[:diff], max(0, leaf.shape[diff] - 1), *leaf.shape[diff + 1 :])


def _cut(
    piece: Piece, whole: Mapping[str, list[int]], like: Mapping[str, str], reader: Reader
) -> list[Piece]:
    """Return the pieces of a file, like one that lacks a cut.

    ``whole`` holds the axes along which each leaf can be cut; a mask is cut ``like`` a leaf.
    """
    # several leaves are cut along their first axis, so that a piece holds the same rows of each
    alone, diff = len(whole) + len(like) == 1, dict(piece.diff)
    along = {leaf: reader.axis(leaf, axes, alone) for leaf, axes in whole.items()}
    together = all(axis in whole[leaf] for leaf, axis in diff.items())
    if together and not alone and not reader.cuts_rows_only:
        # along the axis of differences if all can be cut there, as each piece has one row more
        along |= diff
    if len({along[leaf] == axis for leaf, axis in diff.items()}) > 1:
        names = ", ".join(map(repr, diff))
        must = "differences must lie along a reduction axis of all arrays, or of none"
        raise PatternError(f"{piece.path}: {must}: {names} differ. Fit them one by one.")
    along |= {by: along[leaf] for by, leaf in like.items()}
    beside = _beside(piece, {leaf: along[leaf] for leaf in whole}, reader)
    row = sum(reader.row(leaf, axis) for leaf, axis in along.items())
    size = max(1, PIECE * row // (row + beside)) if beside else PIECE
    masks = sum(
        nbytes(reader.leaves[name].shape, reader.leaves[name].dtype) for name in piece.uncut
    )
    found = [
        piece._replace(along=tuple(along.items()), cut=cut, size=reader.nbytes(along, cut) + masks)
        for cut in reader.cuts(along, size, within=bool(piece.diff or piece.horizons))
    ]
    # a table's row groups are read whole
    return [part for each in found for part in _in_rows(each, reader, beside)]


def _beside(piece: Piece, along: Mapping[str, int], reader: Reader) -> int:
    """Return the bytes of what is computed of one row in float64: steps, differences, weights."""
    if piece.horizons:
        return sum(horizon.built(reader.leaves[horizon.leaf]) for horizon in piece.horizons)
    row = sum(reader.row(leaf, axis, "float64") for leaf, axis in along.items())
    return row * (bool(piece.diff) + bool(piece.weights))


def _in_rows(piece: Piece, reader: Reader, beside: int) -> list[Piece]:
    """Return a piece of a table in parts, if too much is computed of its row groups."""
    if not beside or not reader.cuts_rows_only:
        return [piece]
    rows = max(reader.rows(leaf, axis, piece.cut) for leaf, axis in piece.along)
    number = min(rows, -(-rows * beside // PIECE))
    if number < 2:
        return [piece]
    bounds = [rows * index // number for index in range(number + 1)]
    cuts = itertools.pairwise(bounds)
    return [piece._replace(rows=cut, size=piece.size // number) for cut in cuts]


def _reduction(path: str, leaf: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping) -> Any:
    try:
        return resolve(axes, shape, sizes_in(axes, sizes))
    except (TypeError, ValueError) as error:
        raise PatternError(f"{path}{f', {leaf!r}' if leaf else ''}: {error}") from None


def _whole(path: str, reduction, axes: Axes) -> list[int]:
    """Return the axes that are reduced as a whole, along which a leaf can be cut."""
    if not (whole := reduction.unsplit_reduced):
        said = "one axis must be reduced as a whole, to be read in pieces"
        raise PatternError(f"{path}: {said}: {axes!r} has none.")
    return whole


def _check_same(first: str, expected: dict, path: str, unreduced: dict) -> None:
    if differing := sorted(set(expected) ^ set(unreduced)):
        names = ", ".join(map(repr, differing))
        said = f"all files must hold the same arrays: {path} and {first} differ in {names}"
        raise SourceError(f"{said}.")
    for leaf, shape in unreduced.items():
        if shape != expected[leaf]:
            called = f" of {leaf!r}" if leaf else ""
            found = f"have shape {expected[leaf]} in {first}, {shape} in {path}"
            said = "all files must have the same features: the statistics"
            raise SourceError(f"{said}{called} {found}.")
