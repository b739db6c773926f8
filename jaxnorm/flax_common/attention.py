"""Which norms the queries and keys of attention get, for both families."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxnorm.arguments import validation
from jaxnorm.arguments.options import Param

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


def checked_mask(name: str, x: jax.Array, mask: Param, k_mask: Param) -> jax.Array | None:
    """Return the mask of the queries, whose name is q, or of the keys, whose name is k.

    Raises:
      TypeError: the mask is neither boolean nor of floats.
      ValueError: the array has no axis of heads or none of features; the mask does not fit.
    """
    if x.ndim < 2:
        raise ValueError(
            f"{name} must have the axes (..., heads, head_dim): got shape {tuple(x.shape)}."
        )
    if name == "k" and k_mask is not None:
        return validation.mask(k_mask, x.shape, "k_mask", "k")
    return validation.mask(mask, x.shape, "mask", name)


def over_heads(call: Callable[..., jax.Array], x: jax.Array, mask: Param) -> jax.Array:
    """Return the norm of all heads of each position together.

    The axes of heads and features are merged, as they are before a model splits them.
    """
    merged = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
    if mask is not None:
        mask = jnp.broadcast_to(mask, x.shape).reshape(merged)
    return call(x.reshape(merged), mask=mask).reshape(x.shape)
