"""Make the rows of the tables: transforms of arrays in both directions."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxnorm.interop.layers import Arrays, Row, Shape, UnfitError

OfOne = Callable[[np.ndarray], np.ndarray]
# As many steps that nothing is left of the start of a running average: then it is what is stored.
SETTLED = 2**30


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


def permuted(common: str, stored: str, order: Sequence[int] = ()) -> Row:
    """Return the row of gates along the last axis, ours being theirs at ``order``."""
    if not order:
        return same(common, stored)
    return single(common, stored, *reordering(order, -1), "gates reordered")


def reordering(order: Sequence[int], axis: int) -> tuple[OfOne, OfOne]:
    """Return functions that reorder gates along an axis, ours being theirs at ``order``, and back.

    >>> there, back = reordering((1, 2, 0), 0)
    >>> there(np.arange(3)).tolist(), back(there(np.arange(3))).tolist()
    ([1, 2, 0], [0, 1, 2])
    """

    def by(array: np.ndarray, order: Sequence[int]) -> np.ndarray:
        parts = np.split(array, len(order), axis)
        return np.concatenate([parts[i] for i in order], axis)

    inverse = [order.index(i) for i in range(len(order))]
    return lambda array: by(array, order), lambda array: by(array, inverse)


def no_bias(common: Arrays) -> np.ndarray:
    """Return the bias of a recurrent layer that has none."""
    kernel = common["recurrent_kernel"]
    return np.zeros(kernel.shape[1], kernel.dtype)


def no_recurrent_bias(common: Arrays) -> np.ndarray:
    """Return the second bias of n of a GRU that has none."""
    kernel = common["recurrent_kernel"]
    return np.zeros(kernel.shape[1] // 3, kernel.dtype)


def biases_of_gru(inward: np.ndarray, across: np.ndarray) -> list[np.ndarray]:
    """Return the bias and n's recurrent one, which the reset gate scales, of two for r, z, n."""
    gates = 2 * len(inward) // 3
    return [np.concatenate([inward[:gates] + across[:gates], inward[gates:]]), across[gates:]]


def two_biases(bias: np.ndarray, across: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two biases for r, z, n that :func:`biases_of_gru` turns into these."""
    return bias, np.concatenate([np.zeros(2 * len(across), across.dtype), across])


def window_first(weight: np.ndarray) -> np.ndarray:
    """Turn (out, in, *window) into (*window, in, out)."""
    return weight.transpose(*range(2, weight.ndim), 1, 0)


def channels_first(kernel: np.ndarray) -> np.ndarray:
    """Turn (*window, in, out) into (out, in, *window)."""
    return kernel.transpose(-1, -2, *range(kernel.ndim - 2))


def swapped(kernel: np.ndarray) -> np.ndarray:
    """Turn a kernel of ConvTranspose(transpose_kernel=True) into one of the default, or back."""
    return np.flip(np.swapaxes(kernel, -1, -2), tuple(range(kernel.ndim - 2)))


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
