"""The arguments that a linen module passes to its norm: parameters, dtypes, device axes."""

from typing import Any

import jax

from jaxnorm.arguments.axes import Reduction, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call, prepare
from jaxnorm.flax_common.arguments import across, inexact, module_axes
from jaxnorm.flax_common.calls import Options


def inputs(
    module: Any, x: jax.Array, features: tuple[int, ...], mask: Param
) -> tuple[jax.Array, Options]:
    """Return ``x`` as floats, and the options of its norm.

    Scale and bias are created on first use.
    """
    sizes = tuple(x.shape[axis] for axis in features)
    # RMSNorm has no use_bias.
    params = {
        name: module.param(name, getattr(module, f"{name}_init"), sizes, module.param_dtype)
        for name in ("scale", "bias")
        if getattr(module, f"use_{name}", False)
    }
    scale, bias = params.get("scale"), params.get("bias")
    # Only the output gets this dtype. Casting x before its statistics are computed
    # would round it.
    dtype = promoted(module.dtype, x, scale, bias)
    return inexact(x, dtype), Options(
        scale=scale,
        bias=bias,
        epsilon=module.epsilon,
        where=mask,
        mask_name="mask",
        dtype=dtype,
    )


def over(
    module: Any,
    x: jax.Array,
    reduction: Reduction,
    features: tuple[int, ...],
    mask: Param,
    *,
    centered: bool = True,
    segments: Param = None,
    num_segments: int | None = None,
) -> Call:
    """Prepare the normalization of ``x`` by a module."""
    x, options = inputs(module, x, features, mask)
    return prepare(
        x,
        reduction,
        features,
        centered=centered,
        axis_name=across(module),
        segments=segments,
        num_segments=num_segments,
        **options,
    )


def over_axes(module: Any, x: jax.Array, mask: Param, *, centered: bool = True) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes."""
    features, reduced = module_axes(module, x.ndim)
    return over(module, x, unsplit(x.shape, reduced), features, mask, centered=centered)
