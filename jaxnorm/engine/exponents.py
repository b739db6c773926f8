"""Scale exponents: the power of two that the elements of each group are divided by.

    u = x / 2**exponent

Dividing by a power of two is exact. It keeps squares in the range of their dtype.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec


def scale_exponent(largest: jax.Array, lowest) -> jax.Array:
    """Return the exponent of the largest element, within the limits of its dtype."""
    # up to this limit 2**limit and 2**-limit are both normal numbers
    limit = jnp.finfo(largest.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, jnp.maximum(lowest, -limit), limit).astype(
        jnp.int8 if limit < 128 else jnp.int16
    )


def scaled(loops: PlainLoops, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Multiply x, split for loops, by an :func:`inverse_scale`."""
    u = loops.split(x.astype(compute_dtype(x.dtype)))
    return u if scale is None else u * scale.astype(u.dtype)


def scale_down(u: jax.Array, exponent: jax.Array | None) -> jax.Array:
    """Return ``u / 2**exponent``."""
    return (
        u
        if exponent is None
        else u * power_of_two(-exponent.astype(jnp.int32), u.dtype).astype(u.dtype)
    )


def inverse_scale(loops: PlainLoops, exponent: jax.Array | None, dtype) -> jax.Array | None:
    """Return ``1 / 2**exponent``, for a loop over x."""
    if exponent is None:
        return None
    return loops.compute_first_if_isolated(power_of_two(-exponent.astype(jnp.int32), dtype))


def power_of_two(exponent: jax.Array, dtype) -> jax.Array:
    """Return 2**exponent, where that is a normal number.

    It is made from its bits, so that a loop over x need not compute powers.
    """
    info = jnp.finfo(real_dtype(dtype))
    bits = jnp.int64 if info.bits == 64 else jnp.int32
    return lax.bitcast_convert_type(
        (exponent.astype(bits) + (info.maxexp - 1)) << info.nmant, info.dtype
    )


def scaled_epsilon(spec: Spec, exponent: jax.Array | None, dtype) -> jax.Array:
    """Return epsilon in the units of the scale exponent; it is 0 only if epsilon is 0."""
    info = jnp.finfo(dtype)
    if spec.epsilon == 0 or exponent is None:
        return jnp.asarray(max(spec.epsilon, float(info.tiny)) if spec.epsilon else 0, dtype)
    # x / 2**p has var / 2**(2 p) and std / 2**p
    fraction, own = math.frexp(spec.epsilon)
    exponents = own - spec.power_of_epsilon * exponent.astype(jnp.int32)
    return fraction * power_of_two(jnp.maximum(exponents, info.minexp + 1), dtype)
