"""Fit a Normalizer to Dask's arrays, data frames and delayed batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask
from dask.array import Array

from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.parts import fit_piece, merge_parts, value_or_raise
from jaxnorm.data.sources import Piece
from jaxnorm.data.trees import prefix_of, sizes_in

# Normalizers that one task merges, in a tree of tasks of logarithmic depth.
MERGED = 8


def fit(
    collection,
    axes: Axes | Mapping = 0,
    *,
    where: Callable | None = None,
    quantiles: Sequence[float] | None = None,
    **sizes: int,
) -> Normalizer:
    """Fit a Normalizer to a collection, with the scheduler that Dask is configured for.

    Args:
      collection: a Dask array, a mapping from names to arrays, a data frame (each column is a
        leaf), or a sequence of delayed batches. The arrays of a mapping must have equal lengths
        along their first reduction axis.
      axes: the reduction axes, as in :class:`jaxnorm.data.Normalizer`.
      where: a function from a batch, as a worker receives it, to its masks.
      quantiles: ranks, as in :class:`jaxnorm.data.Normalizer`.
      **sizes: sizes of split axes in patterns.
    """
    empty = Normalizer(axes, quantiles=quantiles, **sizes)
    # pure=False names tasks without hashing their batches
    fit_one = dask.delayed(_fit_one, pure=False)
    parts = [fit_one(empty, batch, where) for batch in _batches(collection, empty)]
    return _merged(parts, empty).compute()


def fit_pieces(pieces: Sequence[Piece], empty: Normalizer) -> Normalizer:
    """Fit a Normalizer to pieces of files."""
    fit_one = dask.delayed(fit_piece, pure=False)
    return value_or_raise(_merged([fit_one(piece, empty) for piece in pieces], empty).compute())


def _fit_one(empty: Normalizer, batch, where: Callable | None) -> Normalizer:
    # partitions of data frames have columns, whose names are the leaves
    if hasattr(batch, "columns"):
        batch = {str(name): batch[name].to_numpy() for name in batch.columns}
    new = empty.without_data()
    # one thread, since Dask runs many tasks at a time
    return new.update(batch, where=None if where is None else where(batch), threads=1)


def _merged(parts: list, empty: Normalizer) -> Any:
    merge = dask.delayed(merge_parts, pure=False)
    while len(parts) > MERGED:
        parts = [
            merge(parts[start : start + MERGED], empty) for start in range(0, len(parts), MERGED)
        ]
    return merge(parts, empty)


def _batches(collection, empty: Normalizer) -> list:
    if isinstance(collection, Array):
        return _blocks("", collection, empty, None).ravel().tolist()
    if isinstance(collection, Mapping):
        return _aligned(collection, empty)
    return list(collection.to_delayed()) if hasattr(collection, "to_delayed") else list(collection)


def _aligned(arrays: Mapping[str, Array], empty: Normalizer) -> list:
    """Return delayed batches of all arrays, which are cut at the same indices."""
    blocks: dict[str, list] = {}
    chunks = None
    for name, array in arrays.items():
        if prefix_of(empty.axes, name) is None:
            continue
        along = _along(name, array, empty)[0]
        # one chunk along all other axes: a batch then holds one block of each array
        array = array.rechunk({axis: -1 for axis in range(array.ndim) if axis != along})
        chunks = chunks or array.chunks[along]
        if sum(chunks) != array.shape[along]:
            raise ValueError(
                f"arrays must be equally long along the first axis that is reduced: {name!r} has "
                f"{array.shape[along]} of {sum(chunks)}."
            )
        blocks[name] = _blocks(name, array, empty, (along, chunks)).ravel().tolist()
    return [dict(zip(blocks, parts, strict=True)) for parts in zip(*blocks.values(), strict=True)]


def _blocks(name: str, array: Array, empty: Normalizer, cut: tuple | None) -> Any:
    """Return delayed blocks, which are whole along the axes that are kept or split."""
    along = _along(name, array, empty)
    whole = {
        axis: -1 for axis in range(array.ndim) if axis not in along and array.numblocks[axis] > 1
    }
    array = array.rechunk(whole | ({} if cut is None else dict([cut]))) if whole or cut else array
    return array.to_delayed()


def _along(name: str, array: Array, empty: Normalizer) -> list[int]:
    """Return the axes that are reduced as a whole, along which blocks may be cut."""
    axes = empty.axes[str(prefix_of(empty.axes, name))]
    # Dask gives NaN for sizes that it does not know; any size does here
    shape = tuple(1 if math.isnan(size) else size for size in array.shape)
    reduction = resolve(axes, shape, sizes_in(axes, empty.sizes))
    if not (found := reduction.unsplit_reduced):
        raise ValueError(
            f"one axis must be reduced as a whole, to be read in pieces: {axes!r} has none."
        )
    return found
