"""The specification of every norm, in plain JAX, which each implementation must equal.

Elements that share statistics form a group. In every group::

    u        = x / 2**exponent - shift   exponent: no square leaves the range
                                         shift: the mean, as one number
    low_mean = mean(u)                   what rounding the shift loses, so that a large mean
                                         costs no digits
    var      = mean(u**2) - low_mean**2
    y        = (u - low_mean) * rstd * scale + bias,      rstd = 1 / sqrt(var + epsilon)

The mask weights the means and the last two terms of dx. Masked elements are already 0 in x and in
dy here. Exponent and shift are constants under differentiation, since no result depends on them.
Let n be the count of a group, and dy, dlow_mean and dvar the gradients of a loss by the results::

    dbias      = sum(dy)                 dscale = sum(dy * (u - low_mean)) * rstd
    dlow_mean -= sum(dy * scale) * rstd
    dvar      -= sum(dy * scale * (u - low_mean)) * rstd**3 / 2
    dx         = (dy * scale * rstd + dlow_mean / n + 2 * dvar / n * (u - low_mean)) / 2**exponent
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.arguments.dtypes import complex_beside, compute_dtype
from jaxnorm.engine.exponents import inverse_scale, scaled
from jaxnorm.engine.groups import (
    Scaling,
    abs_squared,
    apply_weights,
    broadcast_stats,
    elements,
    elements_that_count,
    in_segments,
    mask_fill,
    mask_fill_split,
    mean,
    rstd,
    split,
    total_weight,
)
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.scaling import find_scaling
from jaxnorm.engine.segments import ScatterIndices


class Stats(NamedTuple):
    """The statistics of each group: its mean and variance, by shift and scale exponent.

    Attributes:
      scaling: shift and scale exponent.
      low_mean: the low part of the mean; its high part is the shift.
      var: variance.

    Among residuals None stands for a statistic that is recomputed.
    """

    scaling: Scaling
    low_mean: Any
    var: Any


class Adjusted(NamedTuple):
    """Statistics that are applied, and what follows them before scale and bias.

    ``y = ((u - low_mean) * rstd * gain + shift) * scale + bias``

    Attributes:
      stats: the statistics.
      gain: one number for each group.
      shift: one number for each group.
    """

    stats: Stats
    gain: jax.Array
    shift: jax.Array


class Residuals(NamedTuple):
    """The arrays that are stored for the derivative.

    x is stored in its own dtype, with the statistics of each group, or with the mask alone.
    """

    x: jax.Array
    stats: Stats
    scale: jax.Array | None
    bias: jax.Array | None  # only its shape and dtype are used


class Inputs(NamedTuple):
    """One value, tangent or gradient for each differentiable input."""

    x: Any
    scale: Any
    bias: Any


def forward(loops: PlainLoops, x, where, scale, bias) -> tuple[jax.Array, Stats]:
    """Return the output and the statistics of each group."""
    stats = statistics(loops, x, where)
    return apply(loops, x, stats, scale, bias), stats


def statistics(
    loops: PlainLoops,
    x: jax.Array,
    where: jax.Array | None,
    scatter_indices: ScatterIndices | None = None,
    epsilon: jax.Array | None = None,
) -> Stats:
    """Return the statistics of each group, differentiable.

    Shift and scale exponent suit a traced epsilon, too.
    """
    scaling = find_scaling(loops, x, where, scatter_indices, epsilon)
    return Stats(scaling._replace(estimates=None), *estimate(loops, x, scaling))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> tuple[jax.Array, jax.Array]:
    """Return the low part of the mean and the variance of each group."""
    if scaling.estimates is not None:
        return scaling.estimates
    if not loops.spec.centered:
        square = mean(loops, abs_squared(elements(loops, x, scaling)), scaling)
        return jnp.zeros_like(square, compute_dtype(x.dtype)), square
    low_mean = find_low_mean(loops, x, scaling)
    (own_x,), (own_low_mean,) = loops.isolate(x), loops.isolate(low_mean)
    square = mean(
        loops, abs_squared(elements_that_count(loops, own_x, scaling)), scaling, scaling.shift
    )
    # rounding must not make a variance negative
    less = lambda square, low_mean: jnp.maximum(square - abs_squared(low_mean), 0)
    return low_mean, loops.per_group(less)(square, own_low_mean)


def find_low_mean(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> jax.Array:
    """Return the low part of the mean of each group: the mean of u."""
    return mean(loops, elements_that_count(loops, x, scaling), scaling, scaling.shift)


@estimate.defjvp
def _estimate_jvp(loops, primals, tangents):
    # The scaling gets no tangent. A change of the shift moves u and low_mean alike, and leaves
    # u - low_mean, var and the mean, shift + low_mean, as they are. The exponent only sets their
    # units. The tangent by x is derived in estimate_tangent. It recomputes the deviations
    # u - low_mean, which are as large as x.
    x, scaling = primals
    low_mean, var = estimate(loops, x, scaling)
    tangent = jax.checkpoint(partial(estimate_tangent, loops))
    return (low_mean, var), tangent(x, scaling, low_mean, tangents[0])


def estimate_tangent(
    loops: PlainLoops, x, scaling: Scaling, low_mean, dx
) -> tuple[jax.Array, jax.Array]:
    """Return the tangents of the low part of the mean and of the variance."""
    # With u = x / 2**exponent - shift, where exponent and shift are constants,
    #     du        = dx / 2**exponent
    #     low_mean  = mean(u)                      dlow_mean = mean(du)
    #     var       = mean(u**2) - low_mean**2     dvar = 2 mean(u du) - 2 low_mean dlow_mean
    #                                                   = 2 mean((u - low_mean) du)
    # The last form has no difference of large numbers. For complex u the square is |u|**2, and the
    # product the real part of conj(u - low_mean) du. Uncentered, low_mean and dlow_mean are 0.
    if scaling.scatter_indices is not None:
        scaling = scaling._replace(
            where=in_segments(loops.spec, scaling.where, scaling.scatter_indices)
        )
        dx = mask_fill_split(loops.spec, dx, scaling.where)  # no tangent outside of segments
    scale = inverse_scale(loops, scaling.exponent, compute_dtype(x.dtype))
    du = scaled(loops, dx, broadcast_stats(loops, scale, scaling.scatter_indices))
    deviation = elements(loops, x, scaling, low_mean)
    # a mean that is NaN has a finite gradient: its NaN must not reach the divisor
    nonconstant = jnp.where(jnp.isnan(low_mean), 0, low_mean)
    dvar = 2 * mean(loops, jnp.real(jnp.conj(deviation) * du), scaling, nonconstant)
    if not loops.spec.centered:
        return jnp.zeros_like(low_mean), dvar
    return mean(loops, du, scaling, nonconstant), dvar


def apply(
    loops: PlainLoops, x, stats: Stats, scale, bias, known: jax.Array | None = None
) -> jax.Array:
    """Normalize, scale and shift the elements.

    Where ``known`` is false the statistics are ignored, and the output is the bias.
    """
    scaling, low_mean, var = stats
    r = rstd(loops, scaling, var)
    r = r if known is None else jnp.where(known, r, 0)
    y = elements(loops, x, scaling, low_mean)
    y = y * broadcast_stats(loops, r, scaling.scatter_indices).astype(y.dtype)
    # positions of no segment have NaN here, which must not meet scale
    y = y if scaling.scatter_indices is None else mask_fill(y, scaling.where)
    y = plus(times(y, loops.broadcast_to_elements(scale)), loops.broadcast_to_elements(bias))
    return y.astype(loops.spec.dtype).reshape(x.shape)


def composed(
    adjusted: Adjusted, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return gain and shift as a scale and a bias that include the given ones."""
    gain, shift = adjusted.gain, adjusted.shift
    # cast once, so that the gradient of a scale of half precision is rounded once
    scale = None if scale is None else scale.astype(gain.dtype)
    return times(gain, scale), plus(times(shift, scale), bias)


def with_param(operation: Callable, values: jax.Array, param: jax.Array | None) -> jax.Array:
    """Return ``operation(values, param)``, or the values without a param.

    The dtype is the dtype of the values, made complex where param is.
    """
    if param is None:
        return values
    # a real array times a complex scale is complex
    dtype = complex_beside(values.dtype, param)
    return operation(values.astype(dtype), param.astype(dtype))


times, plus = partial(with_param, operator.mul), partial(with_param, operator.add)


def stats_of(loops: PlainLoops, residuals: Residuals) -> Stats:
    """Return the statistics, recomputed where they are not among the residuals."""
    x, (scaling, low_mean, var), *_ = residuals
    if var is None:
        return statistics(loops, x, scaling.where)
    return Stats(scaling, find_low_mean(loops, x, scaling) if low_mean is None else low_mean, var)


def recentered(loops: PlainLoops, stats: Stats) -> Stats:
    """Move the shift to the rounded mean, so that the elements of a constant are 0.

    The mean, shift + low_mean, and the variance stay as they are.
    """
    scaling, low_mean, _ = stats
    # A shift from a sample is exact for a constant already. Its low part is large, so that the
    # sum is a tie more often, which loops that each compute it for themselves may round apart.
    if scaling.shift is None or loops.sample:
        return stats
    shift, low_mean = loops.per_group(_moved)(scaling.shift, low_mean)
    return stats._replace(scaling=scaling._replace(shift=shift), low_mean=low_mean)


def _moved(shift: jax.Array, low_mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    # the low part below is exact where the low part is the smaller of the two (Dekker 1971)
    mean = shift + low_mean
    return mean, low_mean - (mean - shift)


def tangent(
    loops: PlainLoops, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the tangents of output, low part of the mean and variance.

    x is read several times. It is cast once to the dtype of the statistics, so that its gradient is
    summed in this dtype and rounded once.
    """
    dtype = compute_dtype(residuals.x.dtype)
    scaling, low_mean, var = stats_of(loops, residuals)
    x, dx = (a.astype(dtype) for a in (residuals.x, tangents.x))
    dlow_mean, dvar = estimate_tangent(loops, x, scaling, low_mean, dx)
    # y depends on x directly and through the statistics: jvp adds up both
    line = lambda x, low_mean, var, *params: apply(loops, x, Stats(scaling, low_mean, var), *params)
    primals = (x, low_mean, var, residuals.scale, residuals.bias)
    steps = (dx, dlow_mean, dvar, tangents.scale, tangents.bias)
    return jax.jvp(line, primals, steps)[1], dlow_mean, dvar


def tangent_like(
    loops: PlainLoops, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return arrays of the shapes and dtypes that :func:`tangent` returns."""
    dx = split(loops, tangents.x, compute_dtype(residuals.x.dtype))
    stats = loops.reduce(dx, loops.spec.axes)
    return tangents.x.astype(loops.spec.dtype), stats, stats


def backward(loops: PlainLoops, residuals: Residuals, gradients: tuple) -> Inputs:
    """Return the gradients with respect to x, scale and bias: the transpose of :func:`tangent`.

    The gradients with respect to output, low part of the mean and variance are given. The last
    two may be None, for 0.
    """
    # Let u = x / 2**exponent - shift, and n the total weight of a group. From
    #     y = (u - low_mean) r scale + bias,     var = mean(u**2) - low_mean**2,
    #     r = (var + epsilon)**(-1/2),           low_mean = mean(u)
    # the partial derivatives by the statistics and by an element of weight w are
    #     dy/dlow_mean = -r scale,    dy/dvar = (u - low_mean) scale dr/dvar,    dr/dvar = -1/2 r**3
    #     dlow_mean/du = w / n,       dvar/du = 2 w (u - low_mean) / n,          dy/du = r scale
    # The chain rule sums the gradients of the statistics over a group. As the code computes them,
    # with dr/dvar from _rstd_jvp:
    #     sum_dy    = sum(dy)
    #     sum_dy_u  = sum(dy u) - low_mean sum(dy) = sum(dy (u - low_mean))
    #     dvar_of_y = sum(scale sum_dy_u) dr/dvar
    #     slope     = 2 (dvar_of_y + dvar) / n
    #     intercept = (-r sum(scale sum_dy) + dlow_mean) / n
    #     dx        = (dy scale r + w (slope (u - low_mean) + intercept)) / 2**exponent
    #     dscale    = sum(sum_dy_u r),     dbias = sum(sum_dy)
    # The first two sums leave out the axes along which scale or bias differs. So they serve dscale,
    # dbias and dx alike. Uncentered, low_mean is 0 and no intercept is added.
    (x, _, scale, bias), (dy, dlow_mean, dvar) = residuals, gradients
    spec = loops.spec
    scaling, low_mean, var = recentered(loops, stats_of(loops, residuals))
    weight = total_weight(spec, scaling)
    r, rstd_vjp = jax.vjp(partial(rstd, loops, scaling), var)
    gain = 1 if scale is None else scale.astype(r.dtype)
    shared = spec.shared_axes(scale, bias)
    rest = tuple(axis for axis in spec.axes if axis not in shared)
    as_values = partial(split, loops, dtype=r.dtype)
    own_x, own_dy = loops.isolate(x, dy)
    sum_dy = loops.reduce(as_values(*loops.isolate(dy)), shared)
    sum_dy_u = loops.reduce(as_values(own_dy) * elements(loops, own_x, scaling), shared)
    # from the sums: most elements would lose a low_mean smaller than their last digit
    sum_dy_u = sum_dy_u - low_mean * sum_dy
    (dvar_of_y,) = rstd_vjp(loops.reduce_axes(gain * sum_dy_u, rest))
    slope = 2 * loops.divide(dvar_of_y if dvar is None else dvar_of_y + dvar, weight, r)
    own_x, slope = loops.isolate(x, loops.broadcast_to_elements(slope))
    dx_of_stats = slope * elements(loops, own_x, scaling, low_mean)
    if spec.centered:
        intercept = -r * loops.reduce_axes(gain * sum_dy, rest)
        intercept = loops.divide(
            intercept if dlow_mean is None else intercept + dlow_mean, weight, r
        )
        dx_of_stats = dx_of_stats + loops.broadcast_to_elements(intercept)
    dx = as_values(dy) * loops.broadcast_to_elements(gain * r) + apply_weights(
        loops, dx_of_stats, scaling.where
    )
    dx = times(dx, loops.broadcast_to_elements(inverse_scale(loops, scaling.exponent, r.dtype)))
    dscale, dbias = (
        None if param is None else summed_like(loops, param, values)
        for param, values in ((scale, sum_dy_u * r), (bias, sum_dy))
    )
    return Inputs(dx.astype(x.dtype).reshape(x.shape), dscale, dbias)


def summed_like(loops: PlainLoops, param: jax.Array, values: jax.Array) -> jax.Array:
    """Sum over the axes along which the parameter has one element."""
    axes = tuple(
        axis for axis, size in enumerate(param.shape) if size == 1 and values.shape[axis] != 1
    )
    total = jnp.broadcast_to(loops.reduce_axes(values, axes), param.shape)
    return loops.round_sum(total, param.dtype)
