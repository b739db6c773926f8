"""Calls of norms by linen and nnx modules, with the attributes of the module and a mask."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Reduction
from jaxnorm.arguments.options import AxisName, Param
from jaxnorm.core.call import Call, prepare
from jaxnorm.core.normalization import with_running
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import Inputs
from jaxnorm.norms.switchable import switchable_norm


def call_of(
    module: Any,
    inputs: Inputs,
    reduction: Reduction,
    features: tuple[int, ...],
    mask: Param,
    axis_name: AxisName,
    *,
    centered: bool = True,
    segments: Param = None,
    num_segments: int | None = None,
) -> Call:
    """Prepare the normalization of a module's inputs by their own statistics."""
    return prepare(
        inputs.x,
        reduction,
        features,
        scale=inputs.scale,
        bias=inputs.bias,
        epsilon=module.epsilon,
        where=mask,
        mask_name="mask",
        centered=centered,
        axis_name=axis_name,
        dtype=inputs.dtype,
        segments=segments,
        num_segments=num_segments,
    )


def evaluated(
    module: Any, inputs: Inputs, running: Moments, features: tuple[int, ...], mask: Param
) -> jax.Array:
    """Normalize a module's inputs by running statistics."""
    return with_running(
        inputs.x,
        running,
        features,
        scale=inputs.scale,
        bias=inputs.bias,
        epsilon=module.epsilon,
        where=mask,
        mask_name="mask",
        dtype=inputs.dtype,
    )


def switched(
    module: Any,
    inputs: Inputs,
    logits: Sequence[jax.Array],
    features: tuple[int, ...],
    mask: Param,
    *,
    running: Moments | None,
    axis_name: AxisName,
) -> tuple[jax.Array, Moments]:
    """Normalize a module's inputs by the blend of statistics that its logits define."""
    return switchable_norm(
        inputs.x,
        *logits,
        running=running,
        feature_axes=features,
        scale=inputs.scale,
        bias=inputs.bias,
        epsilon=module.epsilon,
        where=validation.mask(mask, inputs.x.shape, "mask"),
        axis_name=axis_name,
        dtype=inputs.dtype,
    )
