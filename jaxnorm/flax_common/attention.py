"""Which norms the queries and keys of attention get, for both families."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxnorm.arguments.options import Param
from jaxnorm.arguments.validation import as_array, check_fits

Kind = Literal["rms", "layer"]
Over = Literal["head", "heads"]


def check_kinds(module: Any) -> None:
    """Raise ValueError unless there is a norm with the options of a QKNorm."""
    if module.norm not in ("rms", "layer"):
        raise ValueError(f"norm must be 'rms' or 'layer': got {module.norm!r}.")
    if module.over not in ("head", "heads"):
        raise ValueError(f"over must be 'head' or 'heads': got {module.over!r}.")
    if module.use_bias and module.norm == "rms":
        raise ValueError("use_bias must be False with norm='rms', which has no bias: got True.")
    if module.per_head_scale and module.over == "heads":
        raise ValueError(
            "per_head_scale must be False with over='heads', whose scale has an element for each "
            "feature of each head already: got True."
        )


def check_rank(name: str, x: Any) -> None:
    """Raise ValueError unless an array has an axis of heads and one of features."""
    if x.ndim < 2:
        raise ValueError(
            f"{name} must have the axes (..., heads, head_dim): got shape {tuple(x.shape)}."
        )


def over_heads(call: Callable[..., jax.Array], x: jax.Array, mask: Param) -> jax.Array:
    """Return the norm of all heads of each position together.

    The axes of heads and features are merged, as they are before a model splits them.
    """
    merged = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
    if mask is not None:
        mask = as_array(mask, "mask")
        check_fits("mask", mask.shape, x.shape)
        mask = jnp.broadcast_to(mask, x.shape).reshape(merged)
    return call(x.reshape(merged), mask=mask).reshape(x.shape)
