"""Where half precision is rounded between a norm and its scale and bias.

With R the rounding to half precision and z the normalized x, ``rounding="once"`` gives
``R(z * scale + bias)``, as the engine computes it. ``"twice"`` gives ``R(R(R(z) * scale) + bias)``:
the arithmetic of a model that casts z back to the dtype of x before it applies its parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.dtypes import compute_dtype, promoted, real_dtype

Rounding = Literal["once", "twice"]


def with_offset(
    scale: jax.Array | None, offset: float, dtype: DTypeLike, rounding: Rounding
) -> jax.Array | None:
    """Return the gain, ``offset + scale``.

    It is added up in the dtype of the statistics of ``dtype``, since half precision would round it
    to 8 or 11 bits; with ``rounding="twice"`` it is rounded so.
    """
    offset = validation.number("scale_offset", offset)
    if not offset:
        return scale
    if scale is None:
        raise ValueError(f"scale_offset must have a scale to be added to: got {offset}, no scale.")
    wide = promoted(None, real_dtype(compute_dtype(dtype)), compute_dtype(scale.dtype))
    gain = offset + scale.astype(wide)
    return gain if rounding == "once" else rounded(gain, scale.dtype).astype(scale.dtype)


def after_norm(
    rounding: Any,
    x: jax.Array,
    where: jax.Array | None,
    segments: Any,
    *,
    dtype: DTypeLike | None,
    **params: jax.Array | None,
) -> Callable[[jax.Array], jax.Array]:
    """Return the function of the normalized x that gives the output of ``rounding="twice"``.

    Raises:
      TypeError: the output cannot have this dtype.
      ValueError: the norm cannot be rounded so.
    """
    if rounding != "twice":
        raise ValueError(f"rounding must be 'once' or 'twice': got {rounding!r}.")
    if segments is not None:
        raise ValueError("rounding='twice' must have no segments: normalize without a scale first.")
    dtypes = {name: param.dtype for name, param in params.items() if param is not None}
    output = validation.output_dtype(dtype, x=x.dtype, **dtypes)
    return partial(scale_and_shift, **params, where=where, dtype=output)


@partial(jax.jit, static_argnames="dtype")
def scale_and_shift(
    z: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    where: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """Return ``z * scale + bias``, with z and each result rounded to the dtype it has in jnp.

    Elements that the mask hides are 0.
    """
    held, y = z.dtype, rounded(z, z.dtype)
    for operation, param in ((jnp.multiply, scale), (jnp.add, bias)):
        if param is not None:
            held = promoted(None, held, param.dtype)
            wide = promoted(None, y.dtype, held)
            y = rounded(operation(y.astype(wide), param.astype(wide)), held)
    if where is not None:
        y = jnp.where(where.astype(bool), y, 0)
    return y.astype(dtype)


def rounded(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round values to a dtype, and return them in float32 at least.

    XLA may leave out a cast to half precision that another cast follows; it keeps a reduction of
    precision. The exponent stays that of float32, since a reduced one would make numbers below the
    smallest normal one 0.
    """
    wide = promoted(None, values.dtype, jnp.float32)
    if jnp.finfo(dtype).bits >= 32:
        return values.astype(wide)
    kind = jnp.finfo(wide)
    cast = values.astype(dtype).astype(wide)
    return lax.reduce_precision(cast, kind.nexp, jnp.finfo(dtype).nmant)
