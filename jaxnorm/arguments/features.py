"""Feature axes: align parameters with them, count their groups, name the spatial axes."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes, integer, other_axes


def aligned(
    shape: tuple[int, ...], features: tuple[int, ...], **params: ArrayLike | None
) -> list[jax.Array | None]:
    """Reshape parameters of the shape of the feature axes to broadcast against ``shape``."""
    return [
        None if value is None else _align(name, validation.floating(value, name), shape, features)
        for name, value in params.items()
    ]


def _align(
    name: str, value: jax.Array, shape: tuple[int, ...], features: tuple[int, ...]
) -> jax.Array:
    """Give the parameter the rank of ``shape``.

    Its own rank alone says how it is meant, so that no size changes the meaning.
    """
    sizes = tuple(shape[axis] for axis in features)
    if value.shape == sizes:
        return value.reshape([size if axis in features else 1 for axis, size in enumerate(shape)])
    pairs = enumerate(zip(value.shape, shape, strict=False))
    fits = all(
        given == size or (given == 1 and axis not in features) for axis, (given, size) in pairs
    )
    if value.ndim != len(shape) or not fits:
        of_examples = tuple(
            size if axis in (0, *features) else 1 for axis, size in enumerate(shape)
        )
        raise ValueError(
            f"{name} must have the shape of the feature axes, {sizes}, or one size for each axis "
            f"of x, such as {of_examples} "
            f"for one {name} for each example: got {name} of shape {value.shape} for x of shape "
            f"{shape}."
        )
    return value


def checked_divisor(name: str, number: Any, channels: int) -> int:
    """Return the number of equal groups, or of channels in each, if it divides the channels."""
    number = integer(number, f"{name} must be an integer")
    if number < 1 or channels % number:
        raise ValueError(
            f"{name} must be positive and divide the channels: got {number} for {channels} "
            "channels."
        )
    return number


def batch_axes(
    shape: tuple[int, ...], feature_axes: int | Iterable[int], name: str, *, across: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the reduction axes of a batch norm, all but the feature axes, and the feature axes.

    Across devices there may be no axis to reduce: the batch may lie on the devices alone.
    """
    features = canonical_axes(feature_axes, len(shape), "feature_axes")
    reduced = other_axes(features, len(shape))
    if not reduced and not across:
        raise ValueError(
            f"{name} must have an axis to reduce besides the features: x has shape {shape}, "
            f"feature_axes={feature_axes}."
        )
    return reduced, features


def spatial_axes(
    shape: tuple[int, ...], feature_axes: int | Iterable[int], name: str, *, packed: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the feature axes, and the axes between them and the batch.

    Packed ``x`` need not have a batch.
    """
    features = canonical_axes(feature_axes, len(shape), "feature_axes")
    if packed and other_axes(features, len(shape)) == (0,):
        return features, (0,)
    if 0 in features:
        first = "the nodes or the batch" if packed else "the batch"
        raise ValueError(
            f"{name} must leave axis 0 to {first}: got feature_axes={feature_axes} for shape "
            f"{shape}."
        )
    reduced = other_axes((0, *features), len(shape))
    if not reduced:
        raise ValueError(
            f"{name} must have an axis to reduce besides batch and features: x has shape {shape}. "
            "Use layer_norm for plain features."
        )
    return features, reduced
