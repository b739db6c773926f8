"""The arguments that a linen module passes to its norm: parameters, mask, dtype."""

from functools import partial
from typing import Any

import jax

from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.flax_common import calls
from jaxnorm.flax_common.arguments import inexact, initial_scale


def inputs(
    module: Any, x: jax.Array, features: tuple[int, ...], mask: Param
) -> tuple[jax.Array, calls.Options]:
    """Return ``x`` as floats, and the options of its norm.

    Scale and bias are created on first use.
    """
    sizes = tuple(x.shape[axis] for axis in features)
    # RMSNorm has no bias.
    start = {
        "scale": initial_scale(module.scale_init, getattr(module, "scale_offset", 0)),
        "bias": getattr(module, "bias_init", None),
    }
    params = {
        name: module.param(name, initializer, sizes, module.param_dtype)
        for name, initializer in start.items()
        if getattr(module, f"use_{name}", False)
    }
    scale, bias = params.get("scale"), params.get("bias")
    # Only the output gets this dtype. Casting x before its statistics are computed
    # would round it.
    dtype = promoted(module.dtype, x, scale, bias)
    return inexact(x, dtype), calls.Options(
        scale=scale,
        bias=bias,
        epsilon=module.epsilon,
        where=mask,
        mask_name="mask",
        dtype=dtype,
    )


over, over_axes = partial(calls.over, inputs), partial(calls.over_axes, inputs)
