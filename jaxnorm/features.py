"""Where the features stand: parameters aligned with them, groups counted, spatial axes named."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import validation
from jaxnorm.axes import canonical_axes, other_axes
from jaxnorm.dtypes import compute_dtype, real
from jaxnorm.statistics import Moments


def aligned(shape: tuple[int, ...], features: tuple[int, ...], **params) -> list[jax.Array | None]:
    """Parameters of the shape of the feature axes, reshaped to broadcast against ``shape``."""
    return [None if value is None else _align(name, validation.floating(value, name), shape, features) for name, value in params.items()]


def _align(name: str, value: jax.Array, shape: tuple[int, ...], features: tuple[int, ...]) -> jax.Array:
    sizes = tuple(shape[axis] for axis in features)
    lead = value.ndim - len(features)
    before = other_axes(features, len(shape))[: max(lead, 0)]
    fits = lead == len(before) and value.shape[lead:] == sizes
    if not fits or any(size not in (1, shape[axis]) for size, axis in zip(value.shape, before, strict=False)):
        raise ValueError(
            f"{name} must have the shape of the feature axes, {sizes}, or leading batch axes before it: "
            f"got {name} of shape {value.shape} for x of shape {shape}."
        )
    positions = before + features
    value = value.transpose(sorted(range(value.ndim), key=positions.__getitem__))
    return value.reshape([value.shape[sorted(positions).index(axis)] if axis in positions else 1 for axis in range(len(shape))])


def check_groups(num_groups: int, channels: int) -> None:
    """Raises unless the channels form that many equal groups."""
    if isinstance(num_groups, bool) or not isinstance(num_groups, int):
        raise TypeError(f"num_groups must be an integer: got {num_groups!r} ({type(num_groups).__name__}).")
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups must be positive and divide the channels: got {num_groups} groups for {channels} channels.")


def group_count(num_groups: int | None, group_size: int | None, channels: int) -> int:
    """The number of groups, from exactly one of the two ways to say it."""
    if num_groups is not None and group_size is None:
        check_groups(num_groups, channels)
        return num_groups
    if group_size is None or num_groups is not None:
        raise ValueError(
            f"exactly one of num_groups and group_size must be given: got {num_groups} and {group_size}. "
            "Pass num_groups=None with group_size."
        )
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size must be an integer: got {group_size!r} ({type(group_size).__name__}).")
    if group_size < 1 or channels % group_size:
        raise ValueError(f"group_size must be positive and divide the channels: got {group_size} for {channels} channels.")
    return channels // group_size


def group_axes(reduction_axes, rank: int) -> tuple[int, ...]:
    """The reduction axes of group norm but the last, the channels, which a module's ``reduction_axes``, if given, include."""
    if reduction_axes is None:
        return other_axes((0, rank - 1), rank)
    reduced = canonical_axes(reduction_axes, rank, "reduction_axes")
    if rank - 1 not in reduced:
        raise ValueError(f"reduction_axes must include the last axis, that of the channels: got {reduction_axes} for rank {rank}.")
    return reduced[:-1]


def module_axes(module: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The feature axes and the reduction axes of a Flax LayerNorm or RMSNorm."""
    return canonical_axes(module.feature_axes, rank, "feature_axes"), canonical_axes(module.reduction_axes, rank, "reduction_axes")


def instance_axes(feature_axes, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The feature axes and the reduction axes, which may be none, of a Flax InstanceNorm."""
    features = canonical_axes(feature_axes, rank, "feature_axes")
    if 0 in features:  # Flax's own tests look for its words
        raise ValueError(
            "The channel axes cannot include the leading dimension as this is assumed to be the batch axis. "
            f"Got feature_axes={feature_axes} for rank {rank}."
        )
    return features, other_axes((0, *features), rank)


def promoted(dtype, *arrays) -> jnp.dtype:
    """``dtype``, or what the arrays promote to and at least a floating one: the dtype of a Flax module's output."""
    if dtype is not None:
        return jnp.dtype(dtype)
    with jax.numpy_dtype_promotion("standard"):  # bfloat16 input and float32 parameters are no accident here
        found = reduce(jnp.promote_types, (jnp.result_type(array) for array in arrays if array is not None))
        return found if jnp.issubdtype(found, jnp.inexact) else jnp.promote_types(found, jnp.float32)


def inexact(x, dtype) -> jax.Array:
    """``x`` for an output of that dtype; integers and booleans, which Flax's modules take and the functions do not, made floats."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(real(compute_dtype(dtype)))


def spatial_axes(shape: tuple[int, ...], feature_axes, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The feature axes, and those between them and the batch."""
    features = canonical_axes(feature_axes, len(shape), "feature_axes")
    if 0 in features:
        raise ValueError(f"{name} must leave axis 0 to the batch: got feature_axes={feature_axes} for shape {shape}.")
    reduced = other_axes((0, *features), len(shape))
    if not reduced:
        raise ValueError(
            f"{name} must have an axis to reduce beside batch and features: x has shape {shape}. Use layer_norm for plain features."
        )
    return features, reduced


def like_batch(running: Moments, shape: tuple[int, ...], features: tuple[int, ...]) -> Moments:
    """Running Moments of the shape of the features or of the batch's, as the batch's."""
    target = tuple(size if axis in features else 1 for axis, size in enumerate(shape))
    sizes = tuple(shape[axis] for axis in features)
    for name in ("mean", "var"):
        given = jnp.shape(getattr(running, name))
        if given not in (target, sizes):
            raise ValueError(f"running must have the shape of the features, {sizes} or {target}: its {name} has {given}.")
    count = jnp.broadcast_to(jnp.asarray(running.count), jnp.shape(running.mean))
    return Moments(*(jnp.reshape(leaf, target) for leaf in (count, running.mean, running.var)))
