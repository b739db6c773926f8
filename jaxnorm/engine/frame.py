"""The frame of each group: constants in which its elements are small, so that no statistics lose digits or leave the range.

    u = x / 2**power - pivot

No result depends on its choice: it is constant under differentiation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.dtypes import compute_dtype, power_of_two
from jaxnorm.engine.collectives import across
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.sums import apart, count, elements_that_count, hide, mean, split
from jaxnorm.engine.xla import separate


class Frame(NamedTuple):
    """Constants of each group: its count, the power of two that x is divided by, and a number near the mean."""

    n: jax.Array | float
    power: jax.Array | None
    pivot: jax.Array | None


def find_frame(spec: Spec, x: jax.Array, where: jax.Array | None) -> Frame:
    """The constants in which the elements of each group are small."""
    x, lowest = lax.stop_gradient(x), spec.lowest_power(x.dtype)
    frame = Frame(count(spec, x, where), None, None)
    if lowest is not None:
        frame = frame._replace(power=find_power(spec, x, where, lowest))
    return frame._replace(pivot=mean(spec, elements(spec, x, where, frame), where, frame.n)) if spec.centered else frame


def find_power(spec: Spec, x: jax.Array, where: jax.Array | None, lowest: int) -> jax.Array:
    """The exponent of the largest element of each group, so that dividing by 2**power is exact and bounds it by 2."""
    size = jnp.abs(split(spec, x if spec.bare else separate(x)[0], compute_dtype(x.dtype)))
    shown = None if where is None else elements_that_count(where)
    largest = across(lax.pmax, jnp.max(size, spec.axes, keepdims=True, initial=0, where=shown), spec.axis_name)
    limit = jnp.finfo(largest.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, max(lowest, -limit), limit).astype(jnp.int8 if limit < 128 else jnp.int16)


def elements(spec: Spec, x: jax.Array, where: jax.Array | None, frame: Frame, offset: jax.Array | None = None) -> jax.Array:
    """``u``, or ``u - offset``, split."""
    x, power, pivot, offset = apart(spec, x, frame.power, frame.pivot, offset)
    u = scaled(spec, x, where, power)
    u = u if pivot is None else u - pivot
    return u if offset is None else u - offset


def scaled(spec: Spec, x: jax.Array, where: jax.Array | None, power: jax.Array | None) -> jax.Array:
    """``x / 2**power``, split; what is masked out is replaced before it can do harm."""
    return scale_down(hide(split(spec, x, compute_dtype(x.dtype)), where), power)


def scale_down(u: jax.Array, power: jax.Array | None) -> jax.Array:
    """``u / 2**power``"""
    return u if power is None else u * power_of_two(-power.astype(jnp.int32), u.dtype)
