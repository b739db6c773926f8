"""Make the rows of the tables: transforms of arrays in both directions."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxnorm.interop.layers import Row, Shape, UnfitError

OfOne = Callable[[np.ndarray], np.ndarray]


def same(common: str, stored: str | None = None) -> Row:
    """Return the row of an array that is stored as it is."""
    as_it_is = lambda arrays, shapes: arrays
    return Row((common,), (common if stored is None else stored,), as_it_is, as_it_is)


def single(common: str, stored: str, read: OfOne, write: OfOne, said: str) -> Row:
    """Return the row of one array that is transformed."""
    return Row(
        (common,),
        (stored,),
        lambda arrays, shapes: [read(arrays[0])],
        lambda arrays, shapes: [write(arrays[0])],
        said,
    )


def transposed(common: str, stored: str) -> Row:
    """Return the row of a matrix (out, in)."""
    return single(common, stored, np.transpose, np.transpose, "transposed")


def joined(common: str, stored: Sequence[str], axis: int = -1, said: str = "joined") -> Row:
    """Return the row of an array that is stored in equal parts."""
    return Row(
        (common,),
        tuple(stored),
        lambda arrays, shapes: [np.concatenate(arrays, axis)],
        lambda arrays, shapes: np.split(arrays[0], len(stored), axis),
        said,
    )


def split(
    common: Sequence[str], stored: str, read: OfOne, write: OfOne, said: str = "split"
) -> Row:
    """Return the row of equal parts that are stored in one array, along axis 0."""
    return Row(
        tuple(common),
        (stored,),
        lambda arrays, shapes: [read(part) for part in np.split(arrays[0], len(common))],
        lambda arrays, shapes: [np.concatenate([write(part) for part in arrays])],
        said,
    )


def reshaped(common: str, stored: str, flat: Callable[[Shape], Shape]) -> Row:
    """Return the row of an array that is stored with more axes.

    ``flat`` gives the common shape where it is not known.
    """

    def read(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        return [arrays[0].reshape(shapes[0] if shapes else flat(arrays[0].shape))]

    def write(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        (array,) = arrays
        return [array if shapes is None else unflattened(array, shapes[0])]

    return Row((common,), (stored,), read, write)


def unflattened(array: np.ndarray, shape: Shape) -> np.ndarray:
    """Split the axes of an array, each into one or more, to a shape.

    Other shapes raise UnfitError, even of as many elements.
    """
    rest = list(shape)
    for size in array.shape:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            raise UnfitError(f"shape {array.shape} does not split into {shape}")
    if math.prod(rest) != 1:
        raise UnfitError(f"shape {array.shape} does not split into {shape}")
    return array.reshape(shape)
