"""The dtypes of statistics."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of statistics: that of the data, and at least float32."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def real(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of an absolute value."""
    return jnp.finfo(dtype).dtype


def needs_power(dtype: DTypeLike) -> bool:
    """Whether squares of elements of this dtype overflow in the dtype of the statistics: bfloat16."""
    return jnp.finfo(dtype).bits < 32 and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
