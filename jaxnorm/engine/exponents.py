"""Scale exponents: the power of two that the elements of each group are divided by.

    u = x / 2**exponent

Dividing by a power of two is exact. It keeps squares in the range of their dtype.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.axes import rough_product
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec

# Coarse loops choose one of these for bfloat16. The largest element of a group is below 2**50, or
# the exponent leaves it between 2**24 and 2**50. A sum of 2**26 squares then stays in the range.
COARSE = (0, 26, 52, 78)
LARGE = 50


def is_coarse(loops: PlainLoops) -> bool:
    """Return whether groups are divided by powers of COARSE, where they are divided at all.

    A GPU fuses reductions of rows into one kernel, with all that comes after, where each reduction
    takes what the last one left. Integers made of a result, such as an exponent, end the kernel; a
    choice among constants does not.
    """
    spec = loops.spec
    # statistics alone have no epsilon that hides what squares lose
    hidden = spec.dtype is not None and spec.epsilon_hides_squares(jnp.float32)
    return bool(loops.coarse) and not spec.full_range and hidden


def coarse_exponent(largest: jax.Array) -> jax.Array:
    """Return the exponent of COARSE for the largest element of each group."""
    return of_largest(largest, float).astype(jnp.int8)


def of_largest(largest: jax.Array, value: Callable[[int], float]) -> jax.Array:
    """Return ``value(exponent)`` for the :func:`coarse_exponent` of the largest element."""
    # NaN and Inf stay what they are, by any exponent
    found = jnp.full_like(largest, value(COARSE[-1]))
    for each in reversed(COARSE[:-1]):
        smaller = largest < 2.0 ** (LARGE + each)
        found = jnp.where(smaller, jnp.asarray(value(each), found.dtype), found)
    return found


def of_coarse(exponent: jax.Array, value: Callable[[int], float], dtype) -> jax.Array:
    """Return ``value(exponent)`` by a choice among its values for COARSE."""
    found = jnp.asarray(value(COARSE[-1]), dtype)
    for each in reversed(COARSE[:-1]):
        found = jnp.where(exponent == each, jnp.asarray(value(each), dtype), found)
    return found


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


def inverse_scale(loops: PlainLoops, exponent: Any, dtype) -> jax.Array | None:
    """Return ``1 / 2**exponent``, for a loop over x."""
    if exponent is None:
        return None
    if isinstance(exponent, int):
        return jnp.asarray(2.0**-exponent, real_dtype(dtype))
    if is_coarse(loops):
        return of_coarse(exponent, lambda each: 2.0**-each, real_dtype(dtype))
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


def scaled_epsilon(
    loops: PlainLoops, exponent: jax.Array | None, where: jax.Array | None, dtype
) -> jax.Array:
    """Return epsilon in the units of the scale exponent; it is 0 only if epsilon is 0."""
    spec, info = loops.spec, jnp.finfo(dtype)
    if spec.epsilon == 0 or exponent is None:
        return jnp.asarray(max(spec.epsilon, float(info.tiny)) if spec.epsilon else 0, dtype)
    if is_coarse(loops):
        return _coarse_epsilon(loops, exponent, where, dtype)
    # x / 2**p has var / 2**(2 p) and std / 2**p
    fraction, own = math.frexp(spec.epsilon)
    exponents = own - spec.power_of_epsilon * exponent.astype(jnp.int32)
    return fraction * power_of_two(jnp.maximum(exponents, info.minexp + 1), dtype)


def _coarse_epsilon(
    loops: PlainLoops, exponent: jax.Array, where: jax.Array | None, dtype
) -> jax.Array:
    """Return epsilon in the units of an exponent of COARSE."""
    # Where it is the same in all of them, it does not depend on the largest element, which leaves
    # a GPU's kernel whole. Weights may make a deviation count for less.
    spec = loops.spec
    weighted = where is not None and where.dtype != jnp.bool_
    if loops.coarse == "largest" and fits_any_unit(spec) and not weighted:
        return jnp.asarray(spec.epsilon, dtype)
    tiny = float(jnp.finfo(dtype).tiny)
    in_units = lambda each: max(spec.epsilon * 2.0 ** (-spec.power_of_epsilon * each), tiny)
    return of_coarse(exponent, in_units, dtype)


def fits_any_unit(spec: Spec) -> bool:
    """Return whether epsilon may be added as it is to the variance in units of COARSE."""
    # Where the exponent is not 0, the largest element is 2**24 or more in its units. If it is not
    # alone in size, another differs from it by its last bit, 2**15 at least, so that the variance
    # of n elements is 2**29 / n at least. An epsilon of 2**5 / n is then less than half a bit of
    # float32 of it.
    n = rough_product(*(spec.reduction.split_shape[axis] for axis in spec.axes))
    return spec.epsilon * n <= 2**5 and spec.epsilon_in == "var"
