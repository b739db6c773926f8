"""The weights of a layer that takes over a norm, and what they cost in digits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.arguments.numbers import is_number
from jaxnorm.flax_common.layers import Layer, Norm, on_axes
from jaxnorm.flax_common.surgery import double

# of a module, by its number and name
Variables = Mapping[tuple[int, str], np.ndarray]


@dataclass(frozen=True)
class Weights:
    """Kernel and bias of a layer, in double precision."""

    kernel: np.ndarray
    bias: np.ndarray | None

    @property
    def finite(self) -> bool:
        """Whether all of them are finite."""
        return all(np.isfinite(part).all() for part in (self.kernel, self.bias) if part is not None)


def affine(norm: Norm, number: int, variables: Variables) -> tuple[np.ndarray, np.ndarray]:
    """Return gain and shift of a norm, of the shape of its feature axes."""
    get = lambda name: double(variables[number, name]).reshape(norm.sizes)
    has = lambda name: (number, name) in variables
    gain = get("scale") + norm.offset if has("scale") else np.ones(norm.sizes)
    shift = get("bias") if has("bias") else np.zeros(norm.sizes)
    if norm.linear:
        with np.errstate(divide="ignore", invalid="ignore"):  # such weights are refused
            gain = gain / np.sqrt(get("var") + norm.epsilon)
            shift = shift - get("mean") * gain
    return gain, shift


def into(
    layer: Layer, weights: Weights, norm: Norm, gain: np.ndarray, shift: np.ndarray, before: bool
) -> Weights | str:
    """Return the weights of a layer that takes over a norm, or why it cannot.

    Args:
      layer: the layer.
      weights: its weights.
      norm: the norm.
      gain: its gain, of the shape of its features.
      shift: its shift, likewise.
      before: whether the layer comes before the norm: ``(x @ W + b) * gain + shift``, or after it:
        ``(x * gain + shift) @ W + b``.
    """
    kernel, features = weights.kernel, norm.features
    own = [-2] if layer.transposed else list(range(-layer.outputs, 0))  # of the output
    bias = np.zeros([kernel.shape[axis] for axis in own])
    bias = bias if weights.bias is None else weights.bias
    if before:
        place = {axis: own[axis] for axis in features}
        same = {axis: axis for axis in features}
        bias = bias * on_axes(gain, features, same) + on_axes(shift, features, same)
        return Weights(kernel * on_axes(gain, features, place), bias)
    if not layer.complete and shift.any():
        return f"its bias does not reach the padding of {layer.path}"
    place = {axis: layer.inputs[axis] for axis in features}
    by = lambda values: on_axes(_grouped(values, layer, kernel), *_axes(features, place, layer))
    summed = tuple(axis for axis in range(-kernel.ndim, 0) if axis not in own)
    added = (kernel * by(shift)).sum(summed)
    keep = weights.bias is None and not shift.any()
    return Weights(kernel * by(gain), None if keep else bias + added)


def _grouped(values: np.ndarray, layer: Layer, kernel: np.ndarray) -> np.ndarray:
    """Return the value that each weight of a grouped convolution meets, ``(inputs, outputs)``."""
    if layer.groups == 1:
        return values
    each = kernel.shape[-1] // layer.groups
    return np.repeat(values.reshape(layer.groups, -1), each, axis=0).T


def _axes(features: tuple[int, ...], place: dict[int, int], layer: Layer) -> tuple[Any, Any]:
    return (features, place) if layer.groups == 1 else ((-2, -1), {-2: -2, -1: -1})


def condition(y: np.ndarray, bias: np.ndarray | None) -> float:
    """Return the condition number of adding a bias, the largest of all features.

    ``mean(|y - bias| + |bias|) / mean(|y|)`` for each feature: how many times larger the numbers
    are that are added than their sum. It multiplies rounding errors.

    >>> condition(np.array([[1.0], [-1.0]]), np.array([100.0]))
    200.0
    """
    if bias is None:
        return 1.0
    y = double(y)
    axes = tuple(range(y.ndim - bias.ndim))
    size = np.abs(y).mean(axes)
    parts = (np.abs(y - bias) + np.abs(bias)).mean(axes)
    ratio = np.divide(parts, size, out=np.full(size.shape, np.inf), where=size > 0)
    return float(np.where(parts == 0, 1, ratio).max())


def stored(new: np.ndarray, old: Any) -> jax.Array:
    """Return new weights in the dtype of the old ones, and with their sharding if they fit."""
    array = jnp.asarray(new.astype(old.dtype))
    same = new.shape == old.shape and isinstance(old, jax.Array)
    return jax.device_put(array, old.sharding) if same else array


def checked_bound(bound: Any) -> float | None:
    """Return a bound that is None or a number of at least 1, or raise."""
    if bound is None:
        return None
    if not is_number(bound):
        raise TypeError(f"bound must be a number or None: got {bound!r}.")
    if not bound >= 1:
        raise ValueError(
            f"bound must be 1, the least condition number, or more: got {bound}. Take math.inf to "
            "fold whatever it is."
        )
    return float(bound)


def default_bound(dtype: Any) -> float:
    """Return the condition number that costs half of a dtype's digits.

    >>> default_bound(np.float32).__round__()
    2896
    """
    return 1 / math.sqrt(jnp.finfo(dtype).eps)
