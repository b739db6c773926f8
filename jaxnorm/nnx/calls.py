"""The arguments that an nnx module passes to its norm: parameters, dtypes, device axes."""

import math
from typing import Any

import jax

from jaxnorm.arguments.axes import Reduction, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call
from jaxnorm.flax_common.arguments import Inputs, bound, inexact, module_axes
from jaxnorm.flax_common.calls import call_of
from jaxnorm.nnx import flax_versions


def inputs(
    module: Any, x: jax.Array, features: tuple[int, ...], *stats: jax.Array
) -> tuple[Inputs, list[jax.Array]]:
    """Return the inputs of a module's norm, and the running statistics promoted with them."""
    params = (module.scale, module.bias) if hasattr(module, "bias") else (module.scale,)
    arrays: tuple[Any, ...] = (x, *stats, *(None if p is None else p[...] for p in params))
    if own_rule := flax_versions.promotion(module):  # Flax's own rule would round x too early
        arrays = own_rule(arrays, dtype=module.dtype)
    x, *running, scale, bias = arrays if len(params) == 2 else (*arrays, None)
    deciding = arrays if flax_versions.RUNNING_PROMOTE else (x, scale, bias)
    dtype, sizes = promoted(module.dtype, *deciding), tuple(x.shape[axis] for axis in features)
    check_features(module, x, sizes, *running, scale, bias)
    scale, bias = (None if p is None else p.reshape(sizes) for p in (scale, bias))
    return Inputs(inexact(x, dtype), scale, bias, dtype), running


def check_features(
    module: Any, x: jax.Array, sizes: tuple[int, ...], *arrays: jax.Array | None
) -> None:
    """Raise ValueError unless parameters and statistics have as many features as ``x``."""
    for size in {array.size for array in arrays if array is not None} - {math.prod(sizes)}:
        name = type(module).__name__
        raise ValueError(
            f"x must have the features that {name} was made for, {size}: got {sizes} of an x of "
            f"shape {x.shape}."
        )


def across(module: Any):
    """Return the device axes over which a module shares statistics."""
    return bound(module.axis_name, module.axis_index_groups)


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
    return call_of(
        module,
        inputs(module, x, features)[0],
        reduction,
        features,
        mask,
        across(module),
        centered=centered,
        segments=segments,
        num_segments=num_segments,
    )


def over_axes(module: Any, x: jax.Array, mask: Param, *, centered: bool = True) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes."""
    features, reduced = module_axes(module, x.ndim)
    return over(module, x, unsplit(x.shape, reduced), features, mask, centered=centered)
