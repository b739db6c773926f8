"""Differences of neighbours along an axis, such as those of a state from step to step."""

from typing import NamedTuple

import numpy as np

from jaxnorm.data.sources import Batch, Piece


class Differences(NamedTuple):
    """Replace each leaf by its differences ``x[t + 1] - x[t]``, in float64.

    A difference has the smaller one of the two weights; it is masked if one of its elements is, or
    if they are of two episodes.
    """

    def apply(self, piece: Piece, batch: Batch) -> Batch:
        axes, masks = dict(piece.diff), {}
        differences = {}
        for leaf, axis in axes.items():
            x = batch[leaf]
            later, earlier = _of(axis, slice(1, None)), _of(axis, slice(None, -1))
            # inf - inf is NaN, and is fitted as NaN or masked
            with np.errstate(invalid="ignore"):
                differences[leaf] = np.subtract(x[later], x[earlier], dtype=np.float64)
            mask = batch.masks.get(leaf)
            if mask is not None and mask.shape[axis] > 1:
                mask = np.minimum(mask[later], mask[earlier])
            starts = piece.starts(leaf) if axis == 0 else None
            if starts is not None and starts[1:].any():
                within = ~starts[1:].reshape(-1, *(1,) * (x.ndim - 1))
                mask = within if mask is None else mask * within
            if mask is not None:
                masks[leaf] = mask
        return Batch(differences, masks)


def _of(axis: int, region: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (region,)
