"""Sums and means over groups of elements, on one device or several, which no compiler makes less accurate."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.dtypes import compute_dtype, real
from jaxnorm.engine.collectives import across, devices
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import add_up, divide, separate


def apart(spec: Spec, *arrays: jax.Array | None) -> tuple:
    """The same arrays, for one loop over x that shares nothing with the next."""
    return separate(*arrays) if spec.separate else arrays


def split(spec: Spec, values: jax.Array, dtype) -> jax.Array:
    """Values of the shape of x in the dtype of the statistics, split."""
    return values.astype(dtype).reshape(spec.reduction.split_shape)


def elements_that_count(where: jax.Array) -> jax.Array:
    """Which elements a mask or weights include."""
    return where if where.dtype == jnp.bool_ else where > 0


def hide(values: jax.Array, where: jax.Array | None) -> jax.Array:
    """0, whatever stands there, instead of what is masked out."""
    return values if where is None else jnp.where(elements_that_count(where), values, 0)


def weigh(values: jax.Array, where: jax.Array | None) -> jax.Array:
    """The values times their weights, 0 or 1 by a mask."""
    if where is None:
        return values
    return hide(values, where) if where.dtype == jnp.bool_ else values * where.astype(values.dtype)


def count(spec: Spec, x: jax.Array, where: jax.Array | None) -> jax.Array | float:
    """How many elements, or how much weight, each group has: a number without a mask, else an array."""
    if where is not None:
        weights = jnp.broadcast_to(where, spec.reduction.split_shape).astype(real(compute_dtype(x.dtype)))
        return total(spec, weights, None)
    found = spec.reduction.group_size * devices(spec.axis_name)
    return float(found) if isinstance(found, int) else jnp.asarray(found, float)


def total(spec: Spec, values: jax.Array, where: jax.Array | None) -> jax.Array:
    """The sum over each group, by weight."""
    return across(lax.psum, add_up(weigh(values, where), spec.axes), spec.axis_name)


def mean(spec: Spec, values: jax.Array, where: jax.Array | None, count, veil: jax.Array | None = None) -> jax.Array:
    """The mean over each group, by weight; 0 of an empty one. For the veil see :func:`divide`."""
    return divide(total(spec, values, where), count, veil)
