"""Each row with those that follow it in its episode: chunks of actions, for their statistics."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxnorm.arguments.axes import integer
from jaxnorm.data.masking import combined
from jaxnorm.data.sources import Batch, Horizon, PatternError, Piece, part


class Windows(NamedTuple):
    """Add an axis of steps to leaves that have horizons, and drop the rows after the cut.

    Steps in the next episode, or after the last row, are masked. Steps are views of the rows, but
    for those that the rows of another leaf are subtracted from, in float64.
    """

    def apply(self, piece: Piece, batch: Batch) -> Batch:
        horizons = {horizon.leaf: horizon for horizon in piece.horizons}
        along = dict(piece.along)
        values, masks = {}, {}
        for leaf in batch.keys() - set(piece.unfitted):
            x, mask, rows = batch[leaf], batch.masks.get(leaf), piece.count(leaf)
            if horizon := horizons.get(leaf):
                starts = piece.starts(leaf)
                values[leaf], mask = _steps(x, mask, starts, rows, horizon.steps)
                if horizon.by is not None:
                    by = batch[horizon.by], batch.masks.get(horizon.by)
                    values[leaf], mask = _relative(values[leaf], mask, horizon, *by)
            else:
                cut = 0, rows
                values[leaf] = part(x, along[leaf], cut)
                if mask is not None and mask.shape[along[leaf]] > 1:
                    mask = part(mask, along[leaf], cut)
            if mask is not None:
                masks[leaf] = mask
        # in the order of the file
        return Batch({leaf: values[leaf] for leaf in batch if leaf in values}, masks)


def parsed(
    horizon: Mapping[str, int] | None,
    relative: Mapping[str, str] | None,
    absolute: Mapping[str, Sequence[int]] | None,
) -> tuple[Horizon, ...]:
    """Return the horizons of leaves by name.

    >>> parsed({"action": 16}, {"action": "state"}, {"action": [6]})
    (Horizon(leaf='action', steps=16, by='state', absolute=(6,)),)
    """
    steps, by, kept = horizon or {}, relative or {}, absolute or {}
    for name, given, among, lacking in (
        ("relative", by, steps, "with a horizon: {!r} has none"),
        ("absolute", kept, by, "that are relative: {!r} is not"),
    ):
        if unknown := [leaf for leaf in given if leaf not in among]:
            raise PatternError(f"{name} must name leaves {lacking.format(unknown[0])}.")
    found = []
    for leaf, number in steps.items():
        if (count := integer(number, f"horizon must be an integer, for {leaf!r}")) < 1:
            raise PatternError(f"horizon must be at least 1, for {leaf!r}: got {number}.")
        must = f"absolute must be indices of features, for {leaf!r}"
        features = tuple(integer(feature, must) for feature in kept.get(leaf, ()))
        found.append(Horizon(leaf, count, by.get(leaf), features))
    return tuple(found)


def _steps(
    x: np.ndarray, mask: np.ndarray | None, starts: np.ndarray | None, rows: int, steps: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the steps of each row, and their mask, or None if all steps count."""
    # numbers of episodes; those of steps after the last row are 0
    episode = np.ones(len(x), int) if starts is None else 1 + np.cumsum(starts)
    inside = _windows(episode, rows, steps) == episode[:rows, None]
    kept = None if inside.all() else inside.reshape(rows, steps, *(1,) * (x.ndim - 1))
    if mask is not None:
        mask = _windows(np.broadcast_to(mask, (len(x), *mask.shape[1:])), rows, steps)
        kept = mask if kept is None else combined(mask, kept)
    return _windows(x, rows, steps), kept


def _windows(x: np.ndarray, rows: int, steps: int) -> np.ndarray:
    """Return x[t], x[t + 1], ... of each row t along a second axis; zeros after the last row."""
    if not rows:
        return np.empty((0, steps, *x.shape[1:]), x.dtype)
    x = x[: rows + steps - 1]
    if lacking := rows + steps - 1 - len(x):
        x = np.concatenate([x, np.zeros((lacking, *x.shape[1:]), x.dtype)])
    return np.moveaxis(sliding_window_view(x, steps, axis=0), -1, 1)


def _relative(
    x: np.ndarray, mask: Any, horizon: Horizon, by: np.ndarray, by_mask: np.ndarray | None
) -> tuple[np.ndarray, Any]:
    """Subtract the row of another leaf at the first step from all steps."""
    rows, shape = len(x), (len(x), 1, *x.shape[2:])
    size = shape[2] if len(shape) > 2 else 1
    features = horizon.relative(size)
    first = np.zeros((rows, size))
    first[:, features] = by.reshape(len(by), -1)[:rows, features]
    # inf - inf is NaN, and is fitted as NaN or masked
    with np.errstate(invalid="ignore"):
        difference = np.subtract(x, first.reshape(shape), dtype=np.float64)
    if by_mask is not None:
        wide = np.broadcast_to(by_mask, by.shape).reshape(len(by), -1)
        kept = np.ones((rows, size), bool)
        kept[:, features] = wide[:rows, features] != 0
        mask = combined(mask, kept.reshape(shape))
    return difference, mask
