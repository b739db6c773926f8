"""The specification of every norm, in plain JAX: what each implementation must equal.

Elements that share statistics form a group. In every group::

    u      = x / 2**power - pivot        power: for what would leave the range of squares;
                                         pivot: the mean, as one number
    offset = mean(u)                     what the rounding of the pivot left over:
                                         nothing is lost to a large mean
    var    = mean(u**2) - offset**2
    y      = (u - offset) * rstd * scale + bias,      rstd = 1 / sqrt(var + epsilon)

The mask weighs the means and the last two terms of dx; what it hides is 0 in x and in dy before
they come here. Power and pivot are constants under differentiation, since no result depends on
them. With n the count of a group, and dy, doffset and dvar the gradients of a loss by the results::

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
    """The statistics of each group: in its frame the mean and the variance. Among residuals None
    stands for what is recomputed.
    """

    frame: Frame
    offset: Any
    var: Any


class Residuals(NamedTuple):
    """What is stored for the derivative: x in its own dtype, and the statistics of each group, or
    the mask alone.
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
    """Output and statistics."""
    stats = statistics(loops, x, where)
    return apply(loops, x, stats, scale, bias), stats


def statistics(
    loops: PlainLoops,
    x: jax.Array,
    where: jax.Array | None,
    places: Places | None = None,
    epsilon: jax.Array | None = None,
) -> Stats:
    """The statistics of each group, differentiable, in a frame for a traced epsilon."""
    frame = find_frame(loops, x, where, places, epsilon)
    return Stats(frame, *estimate(loops, x, frame))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(loops: PlainLoops, x: jax.Array, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Offset and variance of each group, in its frame."""
    if not loops.spec.centered:
        square = mean(loops, abs_squared(elements(loops, x, frame)), frame)
        return jnp.zeros_like(square, compute_dtype(x.dtype)), square
    offset = find_offset(loops, x, frame)
    (own_x,), (own_offset,) = loops.own(x), loops.own(offset)
    square = mean(loops, abs_squared(elements_that_count(loops, own_x, frame)), frame, frame.pivot)
    less = lambda square, offset: jnp.maximum(square - abs_squared(offset), 0)
    return offset, loops.per_group(less)(square, own_offset)


def find_offset(loops: PlainLoops, x: jax.Array, frame: Frame) -> jax.Array:
    """The mean of each group, in its frame."""
    return mean(loops, elements_that_count(loops, x, frame), frame, frame.pivot)


def elements_that_count(loops: PlainLoops, x: jax.Array, frame: Frame) -> jax.Array:
    """x less the pivot, and 0 where x is masked out."""
    u = elements(loops, x, frame)
    return u if frame.where is None else weigh(loops, u, frame.where.astype(bool))


def abs_squared(values: jax.Array) -> jax.Array:
    return jnp.real(values * jnp.conj(values))


@estimate.defjvp
def _estimate_jvp(loops, primals, tangents):
    x, frame = primals
    offset, var = estimate(loops, x, frame)
    tangent = jax.checkpoint(partial(estimate_tangent, loops))
    return (offset, var), tangent(x, frame, offset, tangents[0])


def estimate_tangent(loops: PlainLoops, x, frame: Frame, offset, dx) -> tuple[jax.Array, jax.Array]:
    """d offset = mean(du), d var = 2 mean((u - offset) du)."""
    if frame.places is not None:
        frame = frame._replace(where=in_segments(loops.spec, frame.where, frame.places))
        dx = hide_split(loops.spec, dx, frame.where)  # what is in no segment has no tangent
    scale = inverse_power(loops, frame.power, compute_dtype(x.dtype))
    du = scaled(loops, dx, spread_stats(loops, scale, frame.places))
    deviation = elements(loops, x, frame, offset)
    # the gradient of a mean that is NaN is finite
    nonconstant = jnp.where(jnp.isnan(offset), 0, offset)
    dvar = 2 * mean(loops, jnp.real(jnp.conj(deviation) * du), frame, nonconstant)
    if not loops.spec.centered:
        return jnp.zeros_like(offset), dvar
    return mean(loops, du, frame, nonconstant), dvar


def apply(
    loops: PlainLoops, x, stats: Stats, scale, bias, known: jax.Array | None = None
) -> jax.Array:
    """The output: normalized, scaled and shifted; the bias where statistics that were given are not
    known.
    """
    frame, offset, var = stats
    r = rstd(loops, frame, var)
    r = r if known is None else jnp.where(known, r, 0)
    y = elements(loops, x, frame, offset)
    y = y * spread_stats(loops, r, frame.places).astype(y.dtype)
    # the NaN of no segment, before it meets scale
    y = y if frame.places is None else hide(y, frame.where)
    y = plus(times(y, loops.spread(scale)), loops.spread(bias))
    return y.astype(loops.spec.dtype).reshape(x.shape)


def with_param(operation: Callable, values: jax.Array, param: jax.Array | None) -> jax.Array:
    """``operation(values, param)`` in the dtype of the values, made complex where param is; without
    param the values.
    """
    if param is None:
        return values
    dtype = complex_beside(values.dtype, param)
    return operation(values.astype(dtype), param.astype(dtype))


times, plus = partial(with_param, operator.mul), partial(with_param, operator.add)


def stats_of(loops: PlainLoops, residuals: Residuals) -> Stats:
    """The statistics, recomputed where they are not among the residuals."""
    x, (frame, offset, var), *_ = residuals
    if var is None:
        return statistics(loops, x, frame.where)
    return Stats(frame, find_offset(loops, x, frame) if offset is None else offset, var)


def recentered(loops: PlainLoops, stats: Stats) -> Stats:
    """The same statistics about the mean itself, so that the elements of a constant are 0."""
    frame, offset, _ = stats
    if frame.pivot is None:
        return stats
    pivot, offset = loops.per_group(_moved)(frame.pivot, offset)
    return stats._replace(frame=frame._replace(pivot=pivot), offset=offset)


def _moved(pivot: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    # with the rest below exact where the offset is the smaller of the two (Dekker 1971)
    mean = pivot + offset
    return mean, offset - (mean - pivot)


def tangent(
    loops: PlainLoops, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tangents of output, offset and variance.

    x is read in several places. Cast once to the dtype of the statistics, its gradient is summed
    there and rounded once.
    """
    dtype = compute_dtype(residuals.x.dtype)
    frame, offset, var = stats_of(loops, residuals)
    x, dx = (a.astype(dtype) for a in (residuals.x, tangents.x))
    doffset, dvar = estimate_tangent(loops, x, frame, offset, dx)
    line = lambda x, offset, var, *params: apply(loops, x, Stats(frame, offset, var), *params)
    primals = (x, offset, var, residuals.scale, residuals.bias)
    steps = (dx, doffset, dvar, tangents.scale, tangents.bias)
    return jax.jvp(line, primals, steps)[1], doffset, dvar


def tangent_like(
    loops: PlainLoops, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arrays of the shapes and dtypes that :func:`tangent` returns."""
    dx = split(loops, tangents.x, compute_dtype(residuals.x.dtype))
    stats = loops.reduce(dx, loops.spec.axes)
    return tangents.x.astype(loops.spec.dtype), stats, stats


def backward(loops: PlainLoops, residuals: Residuals, gradients: tuple) -> Inputs:
    """The transpose of :func:`tangent`: gradients by x, scale and bias from those by output, offset
    and variance, None for 0.
    """
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
    # of sums: from most elements an offset takes less than their last digit
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
    """Summed over the axes along which the parameter does not differ."""
    axes = tuple(
        axis for axis, size in enumerate(param.shape) if size == 1 and values.shape[axis] != 1
    )
    return jnp.broadcast_to(loops.reduce_axes(values, axes), param.shape).astype(param.dtype)
