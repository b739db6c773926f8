"""The arguments that an nnx module passes to its norm: parameters, mask, dtype."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import jax
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.flax_common import calls
from jaxnorm.flax_common.arguments import inexact
from jaxnorm.nnx import flax_versions


def check_module(twin: str, model: Any) -> None:
    """Raise TypeError unless this is an nnx model; ``twin`` is the function for one of linen."""
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model must be a module of flax.nnx: got {type(model).__name__}. For linen there is "
            f"jaxnorm.linen.{twin}."
        )


class RMSOptions(TypedDict, total=False):
    """The arguments by keyword of Flax's RMSNorm, but for ``rngs``."""

    epsilon: float
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    use_scale: bool
    scale_init: Initializer
    reduction_axes: int | Sequence[int]
    feature_axes: int | Sequence[int]
    axis_name: str | Sequence[str] | None
    axis_index_groups: Any
    use_fast_variance: bool
    promote_dtype: Any
    scale_metadata: Mapping[str, Any]


class LayerOptions(RMSOptions, total=False):
    """The arguments by keyword of Flax's LayerNorm, but for ``rngs``."""

    use_bias: bool
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]


def inputs(
    module: Any, x: jax.Array, features: tuple[int, ...], mask: Param, *stats: jax.Array
) -> tuple[jax.Array, calls.Options, list[jax.Array]]:
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
    options = calls.Options(
        scale=scale,
        bias=bias,
        epsilon=module.epsilon,
        where=mask,
        mask_name="mask",
        dtype=dtype,
    )
    return inexact(x, dtype), options, running


def check_features(
    module: Any, x: jax.Array, sizes: tuple[int, ...], *arrays: Any, name: str = "x"
) -> None:
    """Raise ValueError unless parameters and statistics have as many features as ``x``."""
    for size in {array.size for array in arrays if array is not None} - {math.prod(sizes)}:
        article = "an x" if name == "x" else name
        raise ValueError(
            f"{name} must have the features that {type(module).__name__} was made for, {size}: got "
            f"{sizes} of {article} of shape {x.shape}."
        )


over, over_axes = partial(calls.over, inputs), partial(calls.over_axes, inputs)
