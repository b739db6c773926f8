"""Compute the numbers of a norm from its module and its input."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.arguments.axes import canonical_axes, other_axes
from jaxnorm.arguments.dtypes import compute_dtype
from jaxnorm.core.statistics import Moments, moments
from jaxnorm.engine.groups import inverse_root
from jaxnorm.flax_common.arguments import group_axes, group_count, inexact, instance_axes
from jaxnorm.flax_common.health import Health

# over which elements the norms of each class have statistics
BATCH, POSITIONS, FEATURES, GROUPS = "batch", "positions", "features", "groups"
KINDS = {
    "BatchNorm": BATCH,
    "KerasBatchRenorm": BATCH,
    "ConditionalBatchNorm": BATCH,
    "SwitchableNorm": BATCH,
    "EvoNormB0": BATCH,
    "EvoNormS0": GROUPS,
    "GroupNorm": GROUPS,
    "GatedRMSNorm": FEATURES,
    "PositionalNorm": FEATURES,
    "LayerNorm": FEATURES,
    "RMSNorm": FEATURES,
    "ScaleNorm": FEATURES,
    "UnitNorm": FEATURES,
    "AdaLayerNorm": FEATURES,
    "AdaLayerNormZero": FEATURES,
    "InstanceNorm": POSITIONS,
    "AdaInstanceNorm": POSITIONS,
    "FilterResponseNorm": POSITIONS,
    "GlobalResponseNorm": POSITIONS,
    "GraphNorm": POSITIONS,
    "PairNorm": POSITIONS,
    "ReversibleInstanceNorm": POSITIONS,
    "SPADE": POSITIONS,
}
# norms that do not subtract the mean
UNCENTERED = (
    "FilterResponseNorm",
    "GatedRMSNorm",
    "GlobalResponseNorm",
    "RMSNorm",
    "ScaleNorm",
    "UnitNorm",
)


def kind_of(module: Any) -> str | None:
    """Return over which elements a module of Flax or of ours has statistics, or None."""
    names = [each.__name__ for each in type(module).__mro__]
    found = next((KINDS[name] for name in names if name in KINDS), None)
    if "SPADE" in names and module.norm == "batch":
        return BATCH
    return found


def given(module: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return x, the mask and the segments with which a norm is called."""
    x, *rest = args if args else (kwargs["x"],)
    if (residual := kwargs.get("residual")) is not None:
        x = x + residual
    gate = rest[0] if rest else kwargs.get("gate")
    if getattr(module, "gate_first", False) and gate is not None:
        x = x * jax.nn.silu(gate)
    mask = kwargs.get("mask", kwargs.get("where"))
    names = {each.__name__ for each in type(module).__mro__}
    if mask is None and rest and "RMSNorm" in names and "GatedRMSNorm" not in names:
        mask = rest[0]  # which nnx takes by position
    segments = kwargs.get("segments", kwargs.get("segment_ids"))
    options = {"segments": segments, "num_segments": kwargs.get("num_segments")}
    return x, mask, options if segments is not None else {}


@dataclass(frozen=True)
class Groups:
    """Which elements of an input share statistics, as a static argument.

    Attributes:
      features: the axes of the channels.
      reduced: the axes that are reduced; None in norms over the batch, whose groups are channels.
      split: into how many groups the last axis is split first, or None.
      centered: whether the norm subtracts the mean.
      num_segments: the number of segments, or None.
    """

    features: tuple[int, ...]
    reduced: tuple[int, ...] | None
    split: int | None
    centered: bool
    num_segments: int | None


def health(
    module: Any,
    x: Any,
    mask: Any,
    segments: dict[str, Any],
    *,
    scale: jax.Array | None,
    mean: jax.Array | None,
    var: jax.Array | None,
) -> Health:
    """Return the numbers of a norm that is called on x.

    Args:
      module: the module.
      x: its input.
      mask: its mask, or None.
      segments: ``segments`` and ``num_segments``, or nothing.
      scale: its gain, without an offset.
      mean: its running mean.
      var: its running variance.
    """
    x = jnp.asarray(x)
    x = jax.lax.stop_gradient(inexact(x, jnp.float32))
    groups = _groups(module, x, segments.get("num_segments"))
    if scale is not None:
        scale = scale + getattr(module, "scale_offset", 0)
    epsilon = getattr(module, "epsilon", 0)
    return _numbers(groups, x, mask, segments.get("segments"), epsilon, scale, mean, var)


def _groups(module: Any, x: jax.Array, num_segments: int | None) -> Groups:
    """Return which elements share statistics in a module."""
    kind, rank = kind_of(module), x.ndim
    axes = getattr(module, "feature_axes", getattr(module, "axis", -1))
    features = canonical_axes(axes, rank, "feature_axes")
    names = {each.__name__ for each in type(module).__mro__}
    centered = not names & set(UNCENTERED) and getattr(module, "norm", "") != "rms"
    reduced, split = None, None
    if kind == POSITIONS:
        reduced = instance_axes(features, rank, packed=num_segments is not None)[1]
    if kind == FEATURES:
        reduced = canonical_axes(getattr(module, "reduction_axes", features), rank, "axes")
    if kind == GROUPS:
        sizes = getattr(module, "num_groups", None), getattr(module, "group_size", None)
        # nnx keeps both numbers, of which one follows from the other
        split = sizes[0] or group_count(*sizes, x.shape[-1])
        reduced = (*group_axes(getattr(module, "reduction_axes", None), rank), rank)
    return Groups(features, reduced, split, centered, num_segments)


@partial(jax.jit, static_argnums=0)
def _numbers(
    groups: Groups,
    x: jax.Array,
    mask: Any,
    segments: Any,
    epsilon: Any,
    gain: jax.Array | None,
    mean: jax.Array | None,
    var: jax.Array | None,
) -> Health:
    x = x.astype(compute_dtype(x.dtype))
    finite = jnp.isfinite(x)
    where = finite if mask is None else _both(finite, jnp.asarray(mask))
    # one example alone has no axis beside its features
    axes = other_axes(groups.features, x.ndim)
    channels = moments(x, axes, where=where) if axes else moments(x[None], 0, where=where[None])
    found = channels if groups.reduced is None else _moments_of(groups, x, where, segments)
    known = found.count > 0
    level = found.var if groups.centered else found.var + jnp.square(jnp.abs(found.mean))
    share = lambda flags, of: jnp.sum(flags & of) / jnp.maximum(jnp.sum(of), 1)
    groups_known = jnp.maximum(known.sum(), 1).astype(found.var.dtype)
    variance = jnp.sum(jnp.where(known, found.var, 0)) / groups_known
    offset = jnp.abs(found.mean) * inverse_root(found.var, 0.0, positive=False)
    exploding = _over_median(jnp.sqrt(channels.var + jnp.square(jnp.abs(channels.mean))).ravel())
    distance, ratio = _running(channels, mean, var, epsilon)
    mean_of_all = moments(x, tuple(range(x.ndim)), where=where).mean.reshape(())
    numbers = Health(
        mean=jnp.abs(mean_of_all) if jnp.iscomplexobj(x) else mean_of_all,
        deviation=jnp.sqrt(variance),
        offset=jnp.max(offset, initial=0) if groups.centered else None,
        collapsed=share(level < epsilon, known),
        mean_distance=distance,
        var_ratio=ratio,
        dead=share(channels.var == 0, channels.count > 1),  # one number alone has no variance
        exploding=jnp.max(exploding),
        channel=jnp.argmax(exploding),
        gain_min=None if gain is None else jnp.min(gain),
        gain_max=None if gain is None else jnp.max(gain),
        not_finite=jnp.sum(~finite) / max(x.size, 1),
    )
    return jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), numbers)


def _moments_of(groups: Groups, x: jax.Array, where: jax.Array, segments: Any) -> Moments:
    """Return the Moments of the groups of a norm."""
    assert groups.reduced is not None
    if groups.split:
        x, where = (
            a.reshape(*a.shape[:-1], groups.split, a.shape[-1] // groups.split) for a in (x, where)
        )
    by = {} if segments is None else {"segments": segments, "num_segments": groups.num_segments}
    return moments(x, groups.reduced, where=where, **by)


def _over_median(sizes: jax.Array) -> jax.Array:
    median = jnp.median(sizes)
    return sizes / jnp.where(median > 0, median, 1)


def _both(finite: jax.Array, mask: jax.Array) -> jax.Array:
    """Return a mask, or weights, that leaves out what is not finite."""
    mask = jnp.broadcast_to(mask, finite.shape)
    return finite & mask if mask.dtype == bool else jnp.where(finite, mask, jnp.zeros_like(mask))


def _running(
    batch: Moments, mean: jax.Array | None, var: jax.Array | None, epsilon: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return how far running statistics are from those of a batch."""
    if var is None:
        return None, None
    found = jax.tree.map(jnp.ravel, batch)
    known, running = found.count > 0, jnp.ravel(var).astype(jnp.float32)
    ratio = jnp.where(known, (found.var + epsilon) / (running + epsilon), 1)
    farthest = ratio[jnp.argmax(jnp.abs(jnp.log(ratio)))]
    if mean is None:
        return None, farthest
    apart = jnp.abs(found.mean - jnp.ravel(mean))
    apart = apart * inverse_root(running, epsilon, positive=False)
    return jnp.max(jnp.where(known, apart, 0)), farthest
