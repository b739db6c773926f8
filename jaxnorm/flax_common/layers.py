"""What folding needs to know of a layer and of a norm, whichever family of Flax it comes from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jaxnorm.arguments.axes import canonical_axes


@dataclass(frozen=True)
class Layer:
    """A layer ``y = x @ kernel + bias`` or a convolution.

    Attributes:
      path: its path in the model.
      inputs: the axes of the kernel that the axes of ``x`` meet, by these axes; all are negative.
      outputs: how many trailing axes of ``y`` are its features.
      transposed: whether the features of the output are the kernel's last axis but one.
      groups: how many groups of features a convolution has.
      complete: whether every output reads all of its window, and no padding.
      unsupported: why nothing can be folded into it, or "".
    """

    path: str
    inputs: Mapping[int, int]
    outputs: int = 1
    transposed: bool = False
    groups: int = 1
    complete: bool = True
    unsupported: str = ""


@dataclass(frozen=True)
class Norm:
    """A norm ``y = normalized * gain + shift``.

    Attributes:
      path: its path in the model.
      kind: the name of its class.
      features: the axes of ``x`` that gain and shift have; all are negative.
      sizes: the sizes of these axes.
      linear: whether it is ``x * gain + shift``, as batch norm is by its running statistics.
      epsilon: what it adds to the variance.
      offset: what it adds to the scale.
      unsupported: why it cannot be folded, or "".
    """

    path: str
    kind: str
    features: tuple[int, ...]
    sizes: tuple[int, ...]
    linear: bool
    epsilon: float = 0.0
    offset: float = 0.0
    unsupported: str = ""


def dense(path: str, module: Any) -> Layer:
    """Describe a Dense, whose kernel is ``(features of x, features of y)``."""
    return Layer(path, {-1: -2}, unsupported=_unsupported(module))


def general(path: str, module: Any, outputs: Any, batched: bool, rank: int) -> Layer:
    """Describe a DenseGeneral: its kernel has the axes that it contracts, then its features.

    Args:
      path: its path.
      module: the layer.
      outputs: the sizes of its features.
      batched: whether it has batch axes.
      rank: the number of axes of ``x``.
    """
    given = module.axis if isinstance(module.axis, Iterable) else (module.axis,)
    axes = sorted(axis % rank - rank for axis in given)  # as Flax sorts them
    number = len(tuple(outputs)) if isinstance(outputs, Iterable) else 1
    inputs = {axis: i - len(axes) - number for i, axis in enumerate(axes)}
    why = "it has batch axes" if batched else _unsupported(module)
    return Layer(path, inputs, number, unsupported=why)


def convolution(path: str, module: Any) -> Layer:
    """Describe a Conv: its kernel is ``(*window, features of x / groups, features of y)``."""
    one = all(size == 1 for size in _numbers(module.kernel_size))
    if isinstance(module.padding, str):
        whole = one or module.padding in ("VALID", "CIRCULAR", "REFLECT")
    else:
        whole = not any(_numbers(module.padding))
    return Layer(
        path,
        {-1: -2},
        groups=module.feature_group_count,
        complete=whole and all(size == 1 for size in _numbers(module.input_dilation or 1)),
        unsupported=_unsupported(module),
    )


def transposed(path: str, module: Any) -> Layer:
    """Describe a ConvTranspose: its kernel is a Conv's, or has its last two axes swapped."""
    swapped = bool(module.transpose_kernel)
    return Layer(
        path,
        {-1: -1 if swapped else -2},
        transposed=swapped,
        complete=False,  # at the edges, and between strides, a window is cut
        unsupported=_unsupported(module),
    )


def _numbers(given: Any) -> list[int]:
    """Return the numbers in an int or in nested sequences."""
    return np.ravel(np.asarray(given)).tolist()


def _unsupported(module: Any) -> str:
    """Say why nothing can be folded into a layer, or return ""."""
    if getattr(module, "mask", None) is not None:
        return "its weights have a mask"
    for name in ("dot_general", "conv_general_dilated"):
        for given in (getattr(module, name, None), getattr(module, f"{name}_cls", None)):
            # nnx stores the function of jax.lax, linen None
            if given is not None and given is not getattr(lax, name):
                return f"it has a {name} of its own"
    return ""


def negative_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Return axes as negative numbers, in order."""
    return tuple(axis - rank for axis in canonical_axes(axes, rank, "feature_axes"))


def on_axes(values: np.ndarray, features: tuple[int, ...], places: Mapping[int, int]) -> Any:
    """Return values of the feature axes as an array that broadcasts where these axes lie.

    Args:
      values: of the shape of the feature axes, or flat.
      features: the feature axes, which are negative.
      places: the axis of the result for each of them, which is negative.

    >>> on_axes(np.arange(3), (-1,), {-1: -2}).shape
    (3, 1)
    """
    order = sorted(range(len(features)), key=lambda i: places[features[i]])
    shape = [1] * -min(places[axis] for axis in features)
    for axis, size in zip(features, values.shape, strict=True):
        shape[places[axis]] = size
    return values.transpose(order).reshape(shape)
