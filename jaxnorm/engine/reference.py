"""The specification of every norm, in plain JAX, which each implementation must equal.

Elements that share statistics form a group. In every group::

    u      = x / 2**power - pivot        power: scale exponent, so that no square leaves the range
                                         pivot: shift, the mean as one number
    offset = mean(u)                     correction of the mean: the low part, lost in rounding the
                                         pivot, so that a large mean costs no digits
    var    = mean(u**2) - offset**2
    y      = (u - offset) * rstd * scale + bias,      rstd = 1 / sqrt(var + epsilon)

The mask weights the means and the last two terms of dx. Masked elements are already 0 in x and in
dy here. Power and pivot are constants under differentiation, since no result depends on them. Let n
be the count of a group, and dy, doffset and dvar the gradients of a loss by the results::

    dbias  = sum(dy)                     dscale = sum(dy * (u - offset)) * rstd
    doffset -= sum(dy * scale) * rstd
    dvar   -= sum(dy * scale * (u - offset)) * rstd**3 / 2
    dx     = (dy * scale * rstd + doffset / n + 2 * dvar / n * (u - offset)) / 2**power
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.arguments.dtypes import complex_beside, compute_dtype
from jaxnorm.engine.groups import (
    Frame,
    elements,
    find_frame,
    hide,
    hide_split,
    in_segments,
    inverse_power,
    mean,
    rstd,
    scaled,
    split,
    spread_stats,
    total_weight,
    weigh,
)
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.segments import Places


class Stats(NamedTuple):
    """The statistics of each group: its mean and variance, by shift and scale exponent.

    Attributes:
      frame: shift and scale exponent.
      offset: correction of the mean.
      var: variance.

    Among residuals None stands for a statistic that is recomputed.
    """

    frame: Frame
    offset: Any
    var: Any


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
    places: Places | None = None,
    epsilon: jax.Array | None = None,
) -> Stats:
    """Return the statistics of each group, differentiable.

    Shift and scale exponent suit a traced epsilon, too.
    """
    frame = find_frame(loops, x, where, places, epsilon)
    return Stats(frame, *estimate(loops, x, frame))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(loops: PlainLoops, x: jax.Array, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Return the correction of the mean and the variance of each group."""
    if not loops.spec.centered:
        square = mean(loops, abs_squared(elements(loops, x, frame)), frame)
        return jnp.zeros_like(square, compute_dtype(x.dtype)), square
    offset = find_offset(loops, x, frame)
    (own_x,), (own_offset,) = loops.own(x), loops.own(offset)
    square = mean(loops, abs_squared(elements_that_count(loops, own_x, frame)), frame, frame.pivot)
    # rounding must not make a variance negative
    less = lambda square, offset: jnp.maximum(square - abs_squared(offset), 0)
    return offset, loops.per_group(less)(square, own_offset)


def find_offset(loops: PlainLoops, x: jax.Array, frame: Frame) -> jax.Array:
    """Return the correction of the mean of each group: the mean of u."""
    return mean(loops, elements_that_count(loops, x, frame), frame, frame.pivot)


def elements_that_count(loops: PlainLoops, x: jax.Array, frame: Frame) -> jax.Array:
    """Return u, with 0 where x is masked out."""
    u = elements(loops, x, frame)
    return u if frame.where is None else weigh(loops, u, frame.where.astype(bool))


def abs_squared(values: jax.Array) -> jax.Array:
    return jnp.real(values * jnp.conj(values))


@estimate.defjvp
def _estimate_jvp(loops, primals, tangents):
    # The frame gets no tangent. A change of the pivot moves u and offset alike, and leaves
    # u - offset, var and the mean, pivot + offset, as they are. Power only sets their units. The
    # tangent by x is derived in estimate_tangent. It recomputes the deviations u - offset, which
    # are as large as x.
    x, frame = primals
    offset, var = estimate(loops, x, frame)
    tangent = jax.checkpoint(partial(estimate_tangent, loops))
    return (offset, var), tangent(x, frame, offset, tangents[0])


def estimate_tangent(loops: PlainLoops, x, frame: Frame, offset, dx) -> tuple[jax.Array, jax.Array]:
    """Return the tangents of the correction of the mean and of the variance."""
    # With u = x / 2**power - pivot, where power and pivot are constants, du = dx / 2**power and
    #     offset = mean(u)                       doffset = mean(du)
    #     var    = mean(u**2) - offset**2        dvar    = 2 mean(u du) - 2 offset doffset
    #                                                    = 2 mean((u - offset) du)
    # The last form has no difference of large numbers. For complex u the square is |u|**2, and the
    # product the real part of conj(u - offset) du. Uncentered, offset and doffset are 0.
    if frame.places is not None:
        frame = frame._replace(where=in_segments(loops.spec, frame.where, frame.places))
        dx = hide_split(loops.spec, dx, frame.where)  # no tangent outside of segments
    scale = inverse_power(loops, frame.power, compute_dtype(x.dtype))
    du = scaled(loops, dx, spread_stats(loops, scale, frame.places))
    deviation = elements(loops, x, frame, offset)
    # a mean that is NaN has a finite gradient: its NaN must not reach the divisor
    nonconstant = jnp.where(jnp.isnan(offset), 0, offset)
    dvar = 2 * mean(loops, jnp.real(jnp.conj(deviation) * du), frame, nonconstant)
    if not loops.spec.centered:
        return jnp.zeros_like(offset), dvar
    return mean(loops, du, frame, nonconstant), dvar


def apply(
    loops: PlainLoops, x, stats: Stats, scale, bias, known: jax.Array | None = None
) -> jax.Array:
    """Normalize, scale and shift the elements.

    Where ``known`` is false, statistics that were given are not known, and the output is the bias.
    """
    frame, offset, var = stats
    r = rstd(loops, frame, var)
    r = r if known is None else jnp.where(known, r, 0)
    y = elements(loops, x, frame, offset)
    y = y * spread_stats(loops, r, frame.places).astype(y.dtype)
    # positions of no segment have NaN here, which must not meet scale
    y = y if frame.places is None else hide(y, frame.where)
    y = plus(times(y, loops.spread(scale)), loops.spread(bias))
    return y.astype(loops.spec.dtype).reshape(x.shape)


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
    x, (frame, offset, var), *_ = residuals
    if var is None:
        return statistics(loops, x, frame.where)
    return Stats(frame, find_offset(loops, x, frame) if offset is None else offset, var)


def recentered(loops: PlainLoops, stats: Stats) -> Stats:
    """Move the shift to the rounded mean, so that the elements of a constant are 0.

    The mean, pivot + offset, and the variance stay as they are.
    """
    frame, offset, _ = stats
    if frame.pivot is None:
        return stats
    pivot, offset = loops.per_group(_moved)(frame.pivot, offset)
    return stats._replace(frame=frame._replace(pivot=pivot), offset=offset)


def _moved(pivot: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    # the low part below is exact where the offset is the smaller of the two (Dekker 1971)
    mean = pivot + offset
    return mean, offset - (mean - pivot)


def tangent(
    loops: PlainLoops, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the tangents of output, correction of the mean and variance.

    x is read several times. It is cast once to the dtype of the statistics, so that its gradient is
    summed in this dtype and rounded once.
    """
    dtype = compute_dtype(residuals.x.dtype)
    frame, offset, var = stats_of(loops, residuals)
    x, dx = (a.astype(dtype) for a in (residuals.x, tangents.x))
    doffset, dvar = estimate_tangent(loops, x, frame, offset, dx)
    # y depends on x directly and through the statistics: jvp adds up both
    line = lambda x, offset, var, *params: apply(loops, x, Stats(frame, offset, var), *params)
    primals = (x, offset, var, residuals.scale, residuals.bias)
    steps = (dx, doffset, dvar, tangents.scale, tangents.bias)
    return jax.jvp(line, primals, steps)[1], doffset, dvar


def tangent_like(
    loops: PlainLoops, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return arrays of the shapes and dtypes that :func:`tangent` returns."""
    dx = split(loops, tangents.x, compute_dtype(residuals.x.dtype))
    stats = loops.reduce(dx, loops.spec.axes)
    return tangents.x.astype(loops.spec.dtype), stats, stats


def backward(loops: PlainLoops, residuals: Residuals, gradients: tuple) -> Inputs:
    """Return the gradients by x, scale and bias: the transpose of :func:`tangent`.

    The gradients by output, correction of the mean and variance are given. The last two may be
    None, for 0.
    """
    # Let u = x / 2**power - pivot, and n the total weight of a group. From
    #     y = (u - offset) r scale + bias,     var = mean(u**2) - offset**2,     offset = mean(u),
    #     r = (var + epsilon)**(-1/2)
    # the partial derivatives by the statistics and by an element of weight w are
    #     dy/doffset = -r scale,    dy/dvar = (u - offset) scale dr/dvar,    dr/dvar = -1/2 r**3
    #     doffset/du = w / n,       dvar/du = 2 w (u - offset) / n,          dy/du = r scale
    # The chain rule sums the gradients of the statistics over a group. As the code computes them,
    # with dr/dvar from _rstd_jvp:
    #     sum_dy    = sum(dy)
    #     sum_dy_u  = sum(dy u) - offset sum(dy) = sum(dy (u - offset))
    #     dvar_of_y = sum(scale sum_dy_u) dr/dvar
    #     slope     = 2 (dvar_of_y + dvar) / n
    #     shift     = (-r sum(scale sum_dy) + doffset) / n
    #     dx        = (dy scale r + w (slope (u - offset) + shift)) / 2**power
    #     dscale    = sum(sum_dy_u r),     dbias = sum(sum_dy)
    # The first two sums leave out the axes along which scale or bias differs. So they serve dscale,
    # dbias and dx alike. Uncentered, offset is 0 and no shift is added.
    (x, _, scale, bias), (dy, doffset, dvar) = residuals, gradients
    spec = loops.spec
    frame, offset, var = recentered(loops, stats_of(loops, residuals))
    weight = total_weight(spec, frame)
    r, rstd_vjp = jax.vjp(partial(rstd, loops, frame), var)
    gain = 1 if scale is None else scale.astype(r.dtype)
    shared = spec.shared_axes(scale, bias)
    rest = tuple(axis for axis in spec.axes if axis not in shared)
    as_values = partial(split, loops, dtype=r.dtype)
    own_x, own_dy = loops.own(x, dy)
    sum_dy = loops.reduce(as_values(*loops.own(dy)), shared)
    sum_dy_u = loops.reduce(as_values(own_dy) * elements(loops, own_x, frame), shared)
    # from the sums: most elements would lose an offset smaller than their last digit
    sum_dy_u = sum_dy_u - offset * sum_dy
    (dvar_of_y,) = rstd_vjp(loops.reduce_axes(gain * sum_dy_u, rest))
    slope = 2 * loops.divide(dvar_of_y if dvar is None else dvar_of_y + dvar, weight, r)
    own_x, slope = loops.own(x, loops.spread(slope))
    dx_of_stats = slope * elements(loops, own_x, frame, offset)
    if spec.centered:
        shift = -r * loops.reduce_axes(gain * sum_dy, rest)
        shift = loops.divide(shift if doffset is None else shift + doffset, weight, r)
        dx_of_stats = dx_of_stats + loops.spread(shift)
    dx = as_values(dy) * loops.spread(gain * r) + weigh(loops, dx_of_stats, frame.where)
    dx = times(dx, loops.spread(inverse_power(loops, frame.power, r.dtype)))
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
    return jnp.broadcast_to(loops.reduce_axes(values, axes), param.shape).astype(param.dtype)
