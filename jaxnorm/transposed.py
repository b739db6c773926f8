"""The transpose of the tangent of standardizing, in closed form: what reverse mode computes.

With u, r and q as in frame.py and application.py, d = u - offset, and cotangents written c(.), over one set of n::

    c(var) -= q r**2 sum(c(y) scale d) / 2,    c(offset) -= r sum(c(y) scale)    (through what is applied of them)
    c(u) = c(y) scale r + c(offset) / n + 2 c(var) d / n
    c(scale) = sum(c(y) d r),    c(bias) = sum(c(y))

All four sums are made from two, of c(y) and of c(y) d, over the axes that scale and bias share. What JAX's own transpose
of the tangent computes is the same, from several arrays as large as x.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.application import Inputs, Residuals, Rule, apply, inverse_root, own, shared_axes, steepness, tangent, with_size
from jaxnorm.frame import Frame, Stats, at_once, estimate, estimate_offset, in_a_pass, local, scaled_down, with_pivot
from jaxnorm.loops import apart, divisor, flat
from jaxnorm.primitives import linear
from jaxnorm.sets import Sets, valid

Facts = tuple[Sets, Rule, Any]  # and what is applied of the statistics


def tangent_of(facts: Facts, residuals: Residuals, tangents: Inputs):
    return tangent(*facts, residuals, tangents)


def transpose_of_rows(facts: Facts, residuals: Residuals, cotangents) -> Inputs:
    """The same for rows and the like without a mask, each result by a loop of its own (see apart)."""
    (sets, rule, applied), (x, _, stats, extra, scale, bias), (by_y, *rest) = facts, residuals, cotangents
    dtype = stats.var.dtype
    own_x, own_y, own_power, own_scale = apart(x, by_y, stats.frame.power, scale)
    by_output = _shown(sets, own_y, None, dtype)
    by_output = by_output if scale is None else by_output * own_scale.astype(dtype)
    seen = Residuals(own_x, None, _again(sets, own_x, own_power, stats), extra, None, None)
    by_x, by_extra, *_ = transpose_in_passes(facts, seen, (by_output, *rest), at_once)
    by_scale = by_bias = None
    if scale is not None:
        own_x, own_y, own_power = apart(x, by_y, stats.frame.power)
        frame, *found = _again(sets, own_x, own_power, stats)
        mean, spread = applied(frame.pivot, *found, extra)
        output = apply(sets, replace(rule, dtype=dtype), None, frame, own_x, mean, spread, None, None)
        by_scale = _fitted(sets, _shown(sets, own_y, None, dtype) * output.reshape(sets.pooling.split), scale)
    if bias is not None:
        by_bias = _fitted(sets, _shown(sets, apart(by_y)[0], None, dtype), bias)
    return Inputs(by_x, by_extra, by_scale, by_bias)


def _again(sets: Sets, x, power, stats: Stats) -> Stats:
    """The Stats: on a CPU computed once more, in the loop that needs them, instead of those that were kept."""
    stats = with_size(sets, stats._replace(frame=stats.frame._replace(power=power)))

    def computed(x, *_):
        alone = stats.frame._replace(pivot=None)
        found = with_pivot(sets, x, None, alone) if sets.centered else alone
        return found.pivot, *estimate(sets, x, None, found)

    def kept(x, pivot, offset, var):
        return pivot, estimate_offset(sets, x, None, stats.frame) if offset is None else offset, var

    pivot, offset, var = lax.platform_dependent(x, stats.frame.pivot, stats.offset, stats.var, cpu=computed, default=kept)
    return Stats(stats.frame._replace(pivot=pivot), offset, var)


def transpose_in_passes(facts: Facts, residuals: Residuals, cotangents, seen: Callable = in_a_pass) -> Inputs:
    """Its transpose; ``seen`` is how a pass over x gets what it reads."""
    (sets, rule, applied), (x, where, stats, extra, scale, bias) = facts, residuals
    by_y, by_offset, by_var = cotangents
    frame, offset, var = jax.tree.map(sets.each, with_size(sets, stats))
    offset = estimate_offset(sets, x, where, frame) if offset is None else offset
    (mean, spread), pull_back = jax.vjp(partial(applied, frame.pivot), offset, var, extra)
    r = flat(partial(inverse_root, rule))(spread, rule.scaled_epsilon(frame, var.dtype), frame.size)
    shared = shared_axes(sets, scale, bias)
    rest = tuple(axis for axis in sets.axes if axis not in shared)
    alone, product = _products(sets, x, where, frame, mean, by_y, shared, seen)
    gain = jnp.ones((), r.dtype) if scale is None else scale.astype(mean.dtype)
    totals = _sum(sets, gain * alone, rest), _sum(sets, gain * product, rest)
    *by_own, by_extra = pull_back(flat(partial(_by_applied, rule))(spread, r, *totals, frame.size))
    by_each = [0.0 if a is None else a for a in (by_offset, by_var)]
    shift, by_u = map(sets.gathered, flat(_by_element)(*by_each, *by_own, divisor(frame.size, r)))
    shift = shift if sets.centered else jnp.zeros_like(shift)
    by_x = _back(sets, x, where, frame, offset, by_y, r * gain, by_u, shift, seen)
    by_params = (None if a is None else _fitted(sets, total, a) for a, total in ((scale, r * product), (bias, alone)))
    return Inputs(by_x.reshape(x.shape), by_extra, *by_params)


def _by_applied(rule: Rule, spread, r, alone, product, size) -> tuple[jax.Array, jax.Array]:
    """The cotangents of the mean and the variance that are applied."""
    return -r * alone, -0.5 * (steepness(rule, spread, r, size) * product * r) * r


def _by_element(by_offset, by_var, own_offset, own_var, count) -> tuple[jax.Array, jax.Array]:
    """What those of offset and variance add to c(u): alone, and times d."""
    return (by_offset + own_offset) / count, 2 * (by_var + own_var) / count


def _products(sets: Sets, x, where, frame: Frame, mean, by_y, shared, seen: Callable) -> tuple[jax.Array, jax.Array]:
    """The sums of c(y) and of c(y) (u - mean)."""
    own_x, _, own_frame, own_y = seen(sets, x, where, frame, by_y)
    u = local(sets, own_x, where, own_frame)
    shown = _shown(sets, own_y, where, u.dtype)
    product = _sum(sets, shown * u, shared)
    alone = _sum(sets, shown if own_y is by_y else _shown(sets, seen(sets, by_y, where, frame)[0], where, u.dtype), shared)
    return alone, flat(lambda product, mean, alone: product - mean * alone)(product, mean, alone) if sets.centered else product


def _back(sets: Sets, x, where, frame: Frame, offset, by_y, slope, spread, shift, seen: Callable) -> jax.Array:
    """c(x) = c(y) slope + (u - offset) spread + shift"""
    own_x, _, own_frame, spread = seen(sets, x, where, frame, spread)
    u = local(sets, own_x, where, own_frame)
    through = spread * (u - offset) + shift
    if where is not None:
        through = jnp.where(where, through, 0) if where.dtype == jnp.bool_ else through * where.astype(u.dtype)
    return scaled_down(sets, frame, _shown(sets, by_y, where, u.dtype) * slope + through).astype(x.dtype)


def _shown(sets: Sets, by_y: jax.Array, where, dtype) -> jax.Array:
    by_y = by_y.astype(dtype).reshape(sets.pooling.split)
    return by_y if where is None else jnp.where(valid(where), by_y, 0)


def _sum(sets: Sets, values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return Sets(replace(sets.pooling, axes=axes), whole=sets.whole).careful_sum(values, None) if axes else values


def _fitted(sets: Sets, values: jax.Array, like: jax.Array) -> jax.Array:
    """Summed over the axes along which a parameter does not differ."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1 and values.shape[axis] != 1)
    total = _sum(sets, values, axes)
    if total.dtype != like.dtype:
        total = lax.optimization_barrier(total)  # or a TPU adds halves up, in a pass of its own
    return jnp.broadcast_to(total, like.shape).astype(like.dtype)


def batched(facts: Facts, size: int) -> Facts:
    sets, rule, applied = facts
    return sets.batched(size), rule, applied if applied is own else applied.batched()


def inputs_like(residuals: Residuals) -> Inputs:
    return Inputs(residuals.x, residuals.extra, residuals.scale, residuals.bias)


pooled_tangent = linear(
    "jaxnorm_standardize",
    tangent_of,
    transpose_in_passes,
    like=inputs_like,
    batched=batched,
    results=3,
)
row_tangent = linear("jaxnorm_standardize_rows", tangent_of, transpose_of_rows, like=inputs_like, batched=batched, results=3)
