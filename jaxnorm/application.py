"""Applying Moments to data, and the tangent of doing both steps at once.

    y = (x - mean) * rstd * scale + bias,    rstd = 1 / sqrt(var + epsilon)

The tangent is written down once: the pooled ones in closed form, the rest as the derivative of that line.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.dtypes import compute_dtype, needs_power, power_of_two
from jaxnorm.frame import Frame, Stats, average, estimate_tangent, local
from jaxnorm.loops import flat, hold
from jaxnorm.sets import Sets, valid


@dataclass(frozen=True)
class Rule:
    """The static facts about the application."""

    epsilon: float
    correction: float = 0.0
    epsilon_in: str = "var"
    dtype: jnp.dtype | None = None
    full_range: bool = False  # whether sets are always divided by a power of two

    def lowest_power(self, dtype) -> int | None:
        """The least power of two that data of this dtype are divided by; None if they need no scaling.

        Scaling is needed where squares overflow, and where they vanish although epsilon is smaller still.
        """
        finfo = jnp.finfo(compute_dtype(dtype))
        needed = self.full_range or needs_power(dtype) or self.epsilon < float(finfo.tiny) / float(finfo.eps)
        if not needed or jnp.issubdtype(dtype, jnp.complexfloating):
            return None
        return -finfo.maxexp if self.epsilon == 0 else (math.frexp(self.epsilon)[1] - 60) // self.degree

    @property
    def degree(self) -> int:
        return 2 if self.epsilon_in == "var" else 1

    def scaled_epsilon(self, frame: Frame, dtype) -> jax.Array:
        """epsilon in the units of the frame, and 0 only if it is 0."""
        info = jnp.finfo(dtype)
        if self.epsilon == 0 or frame.power is None:
            return jnp.asarray(max(self.epsilon, float(info.tiny)) if self.epsilon else 0, dtype)
        fraction, exponent = math.frexp(self.epsilon)
        exponents = exponent - self.degree * frame.power.astype(jnp.int32)
        return hold(fraction * power_of_two(jnp.maximum(exponents, info.minexp + 1), dtype))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def inverse_root(rule: Rule, var: jax.Array, epsilon: jax.Array, count) -> jax.Array:
    """1 / sqrt(var + epsilon) or 1 / (sqrt(var) + epsilon); 0 where that would divide by zero."""
    var = var * _unbias(rule, var, count)
    total = var + epsilon if rule.epsilon_in == "var" else jnp.sqrt(var) + epsilon
    safe = total if rule.epsilon > 0 else jnp.where(total == 0, 1, total)
    root = lax.rsqrt(safe) if rule.epsilon_in == "var" else 1 / safe
    return root if rule.epsilon > 0 else jnp.where(total == 0, 0, root)


@inverse_root.defjvp
def _inverse_root_jvp(rule, primals, tangents):
    var, epsilon, count = primals
    r = inverse_root(rule, var, epsilon, count)
    return r, ((-0.5 * tangents[0] * steepness(rule, var, r, count)) * r) * r  # in turn: r**3 underflows for data of size 1e13


def steepness(rule: Rule, var, r, count) -> jax.Array:
    """q in d r = -1/2 q r r d var, where r is :func:`inverse_root`; 0 for sqrt(var) where there is no spread."""
    unbias = _unbias(rule, var, count)
    if rule.epsilon_in == "var":
        return r * unbias
    var = var * unbias
    return jnp.where(var > 0, lax.rsqrt(jnp.where(var > 0, var, 1)), 0) * unbias


def _unbias(rule: Rule, var, count):
    if rule.correction == 0:
        return 1
    count = jnp.asarray(count, var.dtype)
    return jnp.where(count > rule.correction, count / jnp.where(count > rule.correction, count - rule.correction, 1), 0)


def apply(sets: Sets, rule: Rule, where, frame: Frame, x, offset, var, scale, bias) -> jax.Array:
    """The line that everything here is about, of a variance."""
    rstd = flat(partial(inverse_root, rule))(var, rule.scaled_epsilon(frame, var.dtype), frame.size)
    return apply_root(sets, rule, where, frame, x, offset, rstd, scale, bias)


def apply_root(sets: Sets, rule: Rule, where, frame: Frame, x, offset, rstd, scale, bias) -> jax.Array:
    """That line."""
    y = local(sets, x, where, frame) - offset
    y = y * rstd.astype(y.dtype)
    if scale is not None:
        y = y * scale.astype(_at_least(y.dtype, scale.dtype))
    if bias is not None:
        y = y + bias.astype(_at_least(y.dtype, bias.dtype))
    if where is not None:
        y = jnp.where(valid(where), y, 0)
    return y.astype(x.dtype if rule.dtype is None else rule.dtype).reshape(x.shape)


def _at_least(dtype, other):
    """``dtype``, made complex where ``other`` is."""
    return jnp.promote_types(dtype, jnp.complex64) if jnp.issubdtype(other, jnp.complexfloating) else dtype


def shared_axes(sets: Sets, *params: jax.Array | None) -> tuple[int, ...]:
    """The pooled axes along which none of the parameters differs."""
    return tuple(axis for axis in sets.axes if all(a is None or a.shape[axis] == 1 for a in params))


def own(pivot, offset, var, extra):
    """What most norms apply of the statistics of a set: just those."""
    return offset, var


class Residuals(NamedTuple):
    """What the derivative keeps: x in its own dtype, and a few numbers for each set."""

    x: jax.Array
    where: jax.Array | None
    stats: Stats
    extra: Any  # what is applied of the statistics beside them, see own
    scale: jax.Array | None
    bias: jax.Array | None  # of which only shape and dtype are looked at


class Inputs(NamedTuple):
    """One value, tangent or cotangent for each differentiable input."""

    x: Any
    extra: Any
    scale: Any
    bias: Any


def tangent(sets: Sets, rule: Rule, applied: Callable, residuals: Residuals, tangents: Inputs):
    """The tangents of output, offset and variance.

    x is read in three places. Cast once to the dtype of the statistics, its gradient is summed there and rounded once.
    """
    where, given = residuals.where, residuals.x.dtype
    rule = replace(rule, dtype=given if rule.dtype is None else rule.dtype)
    x, dx = (a.astype(compute_dtype(given)) for a in (residuals.x, tangents.x))
    frame, offset, var = jax.tree.map(sets.each, with_size(sets, residuals.stats))
    if offset is None:
        offset = average(sets, local(sets, x, where, frame), where, frame.size)
    doffset, dvar = estimate_tangent(sets, x, where, frame, offset, dx)
    (mean, spread), (dmean, dspread) = jax.jvp(
        partial(applied, frame.pivot), (offset, var, residuals.extra), (doffset, dvar, tangents.extra)
    )
    line = partial(apply, sets, rule, where, frame)
    _, dy = jax.jvp(line, (x, mean, spread, residuals.scale, residuals.bias), (dx, dmean, dspread, tangents.scale, tangents.bias))
    return dy, doffset, dvar


def with_size(sets: Sets, stats: Stats) -> Stats:
    """The Stats with the size of the sets, which is kept only where there is a mask."""
    size = stats.frame.size
    return stats._replace(frame=stats.frame._replace(size=sets.count(None, None) if size is None else size))
