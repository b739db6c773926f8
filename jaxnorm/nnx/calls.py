"""The arguments that an nnx module passes to its norm: parameters, dtypes, device axes."""

import math
from typing import Any

import jax

from jaxnorm.arguments.axes import Reduction, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call, prepare
from jaxnorm.flax_common.arguments import across, inexact, module_axes
from jaxnorm.flax_common.calls import Options
from jaxnorm.nnx import flax_versions


def inputs(
    module: Any, x: jax.Array, features: tuple[int, ...], mask: Param, *stats: jax.Array
) -> tuple[jax.Array, Options, list[jax.Array]]:
    """Return ``x`` as floats, the options of its norm, and the running statistics.

    A promotion rule of the user's own may have cast any of them.
    """
    # RMSNorm has no bias, and Flax calls its promotion rule with two arrays.
    params = (module.scale, module.bias) if hasattr(module, "bias") else (module.scale,)
    arrays: tuple[Any, ...] = (x, *stats, *(None if p is None else p[...] for p in params))
    # Flax's own rule would round x before its statistics are computed, so it is not
    # called.
    if own_rule := flax_versions.promotion(module):
        arrays = own_rule(arrays, dtype=module.dtype)
    x, *running, scale, bias = arrays if len(params) == 2 else (*arrays, None)
    # Before Flax 0.12.1 the running statistics have no say in the dtype of the output.
    deciding = arrays if flax_versions.RUNNING_PROMOTE else (x, scale, bias)
    dtype, sizes = promoted(module.dtype, *deciding), tuple(x.shape[axis] for axis in features)
    check_features(module, x, sizes, *running, scale, bias)
    # Flax stores parameters flat, (num_features,), also for several feature axes.
    scale, bias = (None if p is None else p.reshape(sizes) for p in (scale, bias))
    options = Options(
        scale=scale,
        bias=bias,
        epsilon=module.epsilon,
        where=mask,
        mask_name="mask",
        dtype=dtype,
    )
    return inexact(x, dtype), options, running


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
    x, options, _ = inputs(module, x, features, mask)
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
