"""The dtypes of statistics and of outputs."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


def checked_dtype(name: str, dtype: DTypeLike | None) -> jnp.dtype:
    """Return a dtype.

    Raises:
      TypeError: something else, such as None, which NumPy takes for float64.
    """
    try:
        if dtype is not None:
            return jnp.dtype(dtype)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} must be a dtype: got {dtype!r}. Take one such as jnp.float32.")


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of statistics: the dtype of the data, and at least float32."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def real_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of an absolute value."""
    return jnp.finfo(dtype).dtype


def complex_beside(dtype: DTypeLike, array: ArrayLike) -> jnp.dtype:
    """Return the dtype, made complex where the array is complex."""
    return jnp.dtype(np.promote_types(dtype, np.complex64) if jnp.iscomplexobj(array) else dtype)


def needs_exponent(dtype: DTypeLike) -> bool:
    """Return whether squares of this dtype overflow in the dtype of statistics.

    This holds for bfloat16.
    """
    # bfloat16 has the exponents of float32; squares of float16 are at most 4.3e9
    return jnp.finfo(dtype).bits < 32 and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp


def promoted(dtype: DTypeLike | None, *arrays: ArrayLike | DTypeLike | None) -> jnp.dtype:
    """Return the dtype of a Flax module's output.

    It is ``dtype`` if given, else the dtype that the arrays promote to, and at least a floating
    one.
    """
    if dtype is not None:
        return checked_dtype("dtype", dtype)
    # bfloat16 input with float32 parameters is intended, even under strict promotion
    with jax.numpy_dtype_promotion("standard"):
        found = reduce(
            jnp.promote_types, (jnp.result_type(array) for array in arrays if array is not None)
        )
        return (
            found if jnp.issubdtype(found, jnp.inexact) else jnp.promote_types(found, jnp.float32)
        )
