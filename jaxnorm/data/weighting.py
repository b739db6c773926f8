"""Weights along one axis, from an array in the file: of latitudes, or levels."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data.sources import Batch, PatternError, Piece, vector
from jaxnorm.data.sources.addresses import version


class Weights(NamedTuple):
    """Multiply the masks of leaves by weights along an axis."""

    def apply(self, piece: Piece, batch: Batch) -> Batch:
        masks = dict(batch.masks)
        along = dict(piece.along)
        for leaf, axis, function, key in piece.weights:
            x = batch[leaf]
            weights = _weights(piece.path, key, function, version(piece.path))
            if along[leaf] == axis:
                weights = weights[piece.cut[0] : piece.cut[0] + x.shape[axis]]
            weights = weights.reshape([-1 if own == axis else 1 for own in range(x.ndim)])
            masks[leaf] = masks[leaf] * weights if leaf in masks else weights
        return Batch(batch, masks)


def parsed(given: str | Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Return pairs of a function's name and the key of its argument.

    >>> parsed(["cos(latitude)", "thickness"])
    (('cos', 'latitude'), ('', 'thickness'))
    """
    result = []
    for text in [given] if isinstance(given, str) else given or []:
        match = re.fullmatch(r"(?:(\w*)\(([^()]+)\)|([^()]+))", text)
        if match is None or match[1] not in (None, "cos"):
            raise PatternError(f"weights must be KEY or cos(KEY): got {text!r}.")
        result.append((match[1] or "", match[2] or match[3]))
    return tuple(result)


# `changed` is a key of the cache
@lru_cache(maxsize=8)
def _weights(path: str, key: str, function: str, changed: Any) -> np.ndarray:
    x = np.asarray(vector(path, key), np.float64)
    if function == "cos":
        if unlike := x[~(np.abs(x) <= 90 + 1e-4)].tolist():
            must = f"{path} must hold degrees from -90 to 90 in {key!r}"
            raise PatternError(f"{must}, for cos({key}): it holds {unlike[0]}.")
        # of 90 degrees in float32 the cosine may come out below 0
        x = np.maximum(np.cos(np.deg2rad(x)), 0)
    if unlike := x[~((x >= 0) & (x < np.inf))].tolist():
        must = f"{path} must hold finite weights >= 0 in {key!r}"
        raise PatternError(f"{must}: it holds {unlike[0]}.")
    return x
