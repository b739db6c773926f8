"""The transpose of the tangent of standardizing, in closed form: what reverse mode computes.

With u, r and q as in frame.py and application.py, d = u - offset, and cotangents written c(.), over one set of n::

    c(var) -= q r**2 sum(c(y) scale d) / 2,    c(offset) -= r sum(c(y) scale)    (through what is applied of them)
    c(u) = c(y) scale r + c(offset) / n + 2 c(var) d / n
    c(scale) = sum(c(y) d r),    c(bias) = sum(c(y))

All four sums are made from two, of c(y) and of c(y) d, over the axes that scale and bias share. What JAX's own transpose
of the tangent computes is the same, from several arrays as large as x.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.application import Rule, inverse_root, own, shared_axes, steepness, tangent
from jaxnorm.axes import Pooling
from jaxnorm.frame import Frame, Sets, average, local, power_of_two, real, valid
from jaxnorm.primitives import linear

Facts = tuple[Sets, Rule, Any]  # and what is applied of the statistics


def _frame(sets: Sets, power, pivot, size) -> Frame:
    return Frame(float(sets.pooling.size) if size is None else size, power, pivot)


def _tangent(facts: Facts, residuals, arguments):
    (sets, rule, applied), (x, where, power, pivot, size, offset, var, extra, scale, bias) = facts, residuals
    return tangent(sets, rule, applied, x, where, _frame(sets, power, pivot, size), offset, var, extra, scale, bias, *arguments)


def _transposed(facts: Facts, residuals, cotangents):
    (sets, rule, applied), (x, where, power, pivot, size, offset, var, extra, scale, bias) = facts, residuals
    by_y, by_offset, by_var = cotangents
    frame = _frame(sets, power, pivot, size)
    u = local(sets, x, where, frame)
    if offset is None:
        offset = average(sets, u, where, frame.size)
    (mean, spread), pull_back = jax.vjp(applied, offset, var, extra)
    r = inverse_root(rule, spread, rule.scaled_epsilon(frame, var.dtype), frame.size)
    by_y = by_y.astype(u.dtype).reshape(u.shape)
    if where is not None:
        by_y = jnp.where(valid(where), by_y, 0)
    shared = shared_axes(sets, scale, bias)
    rest = tuple(axis for axis in sets.axes if axis not in shared)
    alone = _sum(sets, by_y, shared)
    product = _sum(sets, by_y * u, shared) - mean * alone
    gain = jnp.ones((), u.dtype) if scale is None else scale.astype(u.dtype)
    by_spread = -0.5 * (steepness(rule, spread, r, frame.size) * _sum(sets, gain * product, rest) * r) * r
    *by_own, by_extra = pull_back((-r * _sum(sets, gain * alone, rest), by_spread))
    by_offset, by_var = by_offset + by_own[0], by_var + by_own[1]
    count = jnp.asarray(frame.size, real(u.dtype))
    count = jnp.where(count > 0, count, 1)
    through = 2 * by_var / count * (u - offset)
    if sets.centered:
        through = through + by_offset / count
    if where is not None:
        through = jnp.where(where, through, 0) if where.dtype == jnp.bool_ else through * where.astype(u.dtype)
    by_u = by_y * (r * gain) + through
    if power is not None:
        by_u = by_u * power_of_two(-power.astype(jnp.int32), u.dtype)
    by_params = (None if a is None else _fitted(sets, total, a) for a, total in ((scale, r * product), (bias, alone)))
    return by_u.reshape(x.shape).astype(x.dtype), by_extra, *by_params


def _sum(sets: Sets, values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return Sets(replace(sets.pooling, axes=axes)).careful_sum(values, None) if axes else values


def _fitted(sets: Sets, values: jax.Array, like: jax.Array) -> jax.Array:
    """Summed over the axes along which a parameter does not differ."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1 and values.shape[axis] != 1)
    return jnp.broadcast_to(_sum(sets, values, axes), like.shape).astype(like.dtype)


def _batched(facts: Facts, size: int) -> Facts:
    (sets, rule, applied), pooling = facts, facts[0].pooling
    more = Pooling((size, *pooling.shape), ((size,), *pooling.parts), tuple(axis + 1 for axis in pooling.axes))
    return replace(sets, pooling=more), rule, applied if applied is own else applied.batched()


pooled_tangent = linear(
    "jaxnorm_standardize",
    _tangent,
    _transposed,
    like=lambda residuals: (residuals[0], *residuals[-3:]),
    batched=_batched,
    results=3,
)
