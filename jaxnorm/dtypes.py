"""The dtypes of statistics, and what their exponents are."""

import jax
import jax.numpy as jnp
from jax import lax


def compute_dtype(dtype) -> jnp.dtype:
    """The dtype of statistics: that of the data, and at least float32."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def real(dtype) -> jnp.dtype:
    """The dtype of an absolute value."""
    return jnp.finfo(dtype).dtype


def needs_power(dtype) -> bool:
    """Whether squares of elements of this dtype overflow in the dtype of the statistics: bfloat16."""
    return jnp.finfo(dtype).bits < 32 and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp


def power_of_two(exponent: jax.Array, dtype) -> jax.Array:
    """2**exponent, where that is a normal number, made from its bits, so that a loop over x need not compute powers."""
    info = jnp.finfo(real(dtype))
    bits = jnp.int64 if info.bits == 64 else jnp.int32
    return lax.bitcast_convert_type((exponent.astype(bits) + (info.maxexp - 1)) << info.nmant, info.dtype)
