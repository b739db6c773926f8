"""Masks for leaves in files, from NaN and from other leaves."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.sources import Batch, PatternError, Piece


class Masks(NamedTuple):
    """Mask elements besides those that are missing in the file.

    Attributes:
      where: pairs of a leaf and the leaf that masks it.
      skip_nan: whether NaN is masked.
      dropped: leaves that serve as masks only, and are not fitted.
    """

    where: tuple[tuple[str, str], ...]
    skip_nan: bool
    dropped: tuple[str, ...]

    def apply(self, piece: Piece, batch: Batch) -> Batch:
        masks: dict[str, Any] = dict(batch.masks)
        for leaf, by in self.where:
            mask = _mask(piece, batch, leaf, by)
            masks[leaf] = combined(batch.masks.get(leaf), mask)
        leaves = [leaf for leaf in batch if leaf not in self.dropped]
        if self.skip_nan:
            masks |= {leaf: _without_nan(batch[leaf], masks.get(leaf)) for leaf in leaves}
        masks = {leaf: masks[leaf] for leaf in leaves if masks.get(leaf) is not None}
        return Batch({leaf: batch[leaf] for leaf in leaves}, masks)


def _mask(piece: Piece, batch: Batch, leaf: str, by: str) -> np.ndarray:
    """Return leaf ``by`` as a mask over the leading axes of ``leaf``; a null in it is 0."""
    path, x, region = piece.path, np.asarray(batch[leaf]), _region(piece, leaf, by, batch[by])
    mask = np.asarray(batch[by])[region]
    leading = x.shape[: mask.ndim]
    if mask.ndim > x.ndim or any(
        own not in (1, size) for own, size in zip(mask.shape, leading, strict=True)
    ):
        must = f"{path} must hold a mask of the leading axes of {leaf!r} in {by!r}"
        raise PatternError(
            f"{must}: {leaf!r} has shape {x.shape} in this piece, {by!r} {mask.shape}."
        )
    if mask.dtype.kind in "iu":
        mask = _of_integers(path, mask, by)
    mask = mask if mask.dtype == bool else mask.astype(np.float64)
    # an element whose mask is missing in the file does not count
    if by in batch.masks:
        mask = np.where(batch.masks[by][region], mask, mask.dtype.type(0))
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def _region(piece: Piece, leaf: str, by: str, mask: np.ndarray) -> tuple[slice, ...]:
    """Return which part of a mask belongs to a leaf's part, if the mask was read whole."""
    axis = dict(piece.along)[leaf]
    if by not in piece.uncut or axis >= mask.ndim or mask.shape[axis] == 1:
        return ()
    return (*[slice(None)] * axis, slice(piece.cut[0], piece.cut[1] + piece.after))


def _of_integers(path: str, mask: np.ndarray, by: str) -> np.ndarray:
    """Return booleans for integers 0 and 1; refuse other integers, which may be labels."""
    unlike = mask[(mask != 0) & (mask != 1)]
    if unlike.size:
        must = f"{path} must hold booleans or float weights in {by!r}, as it masks"
        raise PatternError(
            f"{must}: it holds the integer {unlike[0]}. Write it as booleans or floats."
        )
    return mask.astype(bool)


def fitted(first: Piece, axes: Mapping[str, Axes], where: Mapping[str, str]) -> dict[str, Axes]:
    """Return the axes of the leaves to fit; masks are among them only if the axes name them.

    Raises:
      PatternError: ``where`` names other leaves than those of the first piece.
    """
    leaves = [leaf for leaf, _ in first.along if leaf not in first.unfitted]
    if "" in leaves:
        raise PatternError(
            f"where must name an array of the files: {first.path} holds one array, which has no "
            "name."
        )
    # one pattern for all leaves now holds for each leaf that is no mask
    if "" in axes:
        axes = {leaf: axes[""] for leaf in leaves if leaf not in where.values()}
    if unknown := sorted(set(where) - set(leaves)):
        raise PatternError(
            f"where must name what is fitted: got {', '.join(map(repr, unknown))}, fitted are "
            f"{', '.join(map(repr, axes))}."
        )
    return dict(axes)


def _without_nan(x, mask) -> Any:
    """Return the mask with elements that are NaN masked as well."""
    x = np.asarray(x)
    # booleans and integers have no NaN
    if x.dtype.kind in "biu":
        return mask
    return combined(mask, ~np.isnan(x))


def combined(mask, other: np.ndarray) -> np.ndarray:
    """Combine two masks: keep the elements that both keep, with the weights of either."""
    if mask is None:
        return other
    # booleans first: they choose between the other's weights and 0
    masks = sorted((np.asarray(mask), other), key=lambda each: each.dtype != bool)
    return np.where(masks[0], masks[1], masks[1].dtype.type(0))
