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

from jaxnorm.dtypes import complex_beside, compute_dtype
from jaxnorm.engine.groups import (
    Frame,
    elements,
    find_frame,
    for_own_loop,
    hide,
    hide_split,
    in_segments,
    inverse_power,
    mean,
    reduce_groups,
    rstd,
    scaled,
    split,
    spread,
    spread_stats,
    total_weight,
    weigh,
)
from jaxnorm.engine.segments import Places
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import divide, reduce_axes, without_last_bits, without_trailing_ones


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


def forward(spec: Spec, x, where, scale, bias) -> tuple[jax.Array, Stats]:
    """Output and statistics."""
    stats = statistics(spec, x, where)
    return apply(spec, x, stats, scale, bias), stats


def statistics(
    spec: Spec,
    x: jax.Array,
    where: jax.Array | None,
    places: Places | None = None,
    epsilon: jax.Array | None = None,
) -> Stats:
    """The statistics of each group, differentiable, in a frame for a traced epsilon."""
    frame = find_frame(spec, x, where, places, epsilon)
    return Stats(frame, *estimate(spec, x, frame))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def estimate(spec: Spec, x: jax.Array, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """Offset and variance of each group, in its frame."""
    if not spec.centered:
        square = mean(spec, abs_squared(elements(spec, x, frame)), frame)
        return jnp.zeros_like(square, compute_dtype(x.dtype)), square
    offset = find_offset(spec, x, frame)
    (own_x,), (own_offset,) = for_own_loop(spec, x), for_own_loop(spec, offset)
    square = mean(spec, abs_squared(elements_that_count(spec, own_x, frame)), frame, frame.pivot)
    return offset, without_trailing_ones(
        lambda square, offset: jnp.maximum(square - abs_squared(offset), 0)
    )(square, own_offset)


def find_offset(spec: Spec, x: jax.Array, frame: Frame) -> jax.Array:
    """The mean of each group, in its frame."""
    return without_last_bits(mean(spec, elements_that_count(spec, x, frame), frame, frame.pivot))


def elements_that_count(spec: Spec, x: jax.Array, frame: Frame) -> jax.Array:
    """x less the pivot, and 0 where x is masked out."""
    u = elements(spec, x, frame)
    return u if frame.where is None else weigh(spec, u, frame.where.astype(bool))


def abs_squared(values: jax.Array) -> jax.Array:
    return jnp.real(values * jnp.conj(values))


@estimate.defjvp
def _estimate_jvp(spec, primals, tangents):
    x, frame = primals
    offset, var = estimate(spec, x, frame)
    return (offset, var), jax.checkpoint(partial(estimate_tangent, spec))(
        x, frame, offset, tangents[0]
    )


def estimate_tangent(spec: Spec, x, frame: Frame, offset, dx) -> tuple[jax.Array, jax.Array]:
    """d offset = mean(du), d var = 2 mean((u - offset) du)."""
    if frame.places is not None:
        frame = frame._replace(where=in_segments(spec, frame.where, frame.places))
        dx = hide_split(spec, dx, frame.where)  # what is in no segment has no tangent
    scale = inverse_power(spec, frame.power, compute_dtype(x.dtype))
    du = scaled(spec, dx, spread_stats(spec, scale, frame.places))
    deviation = elements(spec, x, frame, offset)
    # the gradient of a mean that is NaN is finite
    nonconstant = jnp.where(jnp.isnan(offset), 0, offset)
    dvar = 2 * mean(spec, jnp.real(jnp.conj(deviation) * du), frame, nonconstant)
    return mean(spec, du, frame, nonconstant) if spec.centered else jnp.zeros_like(offset), dvar


def apply(spec: Spec, x, stats: Stats, scale, bias, known: jax.Array | None = None) -> jax.Array:
    """The output: normalized, scaled and shifted; the bias where statistics that were given are not
    known.
    """
    frame, offset, var = stats
    r = rstd(spec, frame, var)
    r = r if known is None else jnp.where(known, r, 0)
    y = elements(spec, x, frame, offset)
    y = y * spread_stats(spec, r, frame.places).astype(y.dtype)
    # the NaN of no segment, before it meets scale
    y = y if frame.places is None else hide(y, frame.where)
    y = plus(times(y, spread(spec, scale)), spread(spec, bias))
    return y.astype(spec.dtype).reshape(x.shape)


def with_param(operation: Callable, values: jax.Array, param: jax.Array | None) -> jax.Array:
    """``operation(values, param)`` in the dtype of the values, made complex where param is; without
    param the values.
    """
    if param is None:
        return values
    dtype = complex_beside(values.dtype, param)
    return operation(values.astype(dtype), param.astype(dtype))


times, plus = partial(with_param, operator.mul), partial(with_param, operator.add)


def stats_of(spec: Spec, residuals: Residuals) -> Stats:
    """The statistics, recomputed where they are not among the residuals."""
    x, (frame, offset, var), *_ = residuals
    if var is None:
        return statistics(spec, x, frame.where)
    return Stats(frame, find_offset(spec, x, frame) if offset is None else offset, var)


def recentered(stats: Stats) -> Stats:
    """The same statistics about the mean itself, so that the elements of a constant are 0."""
    frame, offset, _ = stats
    if frame.pivot is None:
        return stats
    pivot, offset = without_trailing_ones(_moved)(frame.pivot, offset)
    return stats._replace(frame=frame._replace(pivot=pivot), offset=offset)


def _moved(pivot: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    # with the rest below exact where the offset is the smaller of the two (Dekker 1971)
    mean = pivot + offset
    return mean, offset - (mean - pivot)


def tangent(
    spec: Spec, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tangents of output, offset and variance.

    x is read in several places. Cast once to the dtype of the statistics, its gradient is summed
    there and rounded once.
    """
    dtype = compute_dtype(residuals.x.dtype)
    frame, offset, var = stats_of(spec, residuals)
    x, dx = (a.astype(dtype) for a in (residuals.x, tangents.x))
    doffset, dvar = estimate_tangent(spec, x, frame, offset, dx)
    line = lambda x, offset, var, scale, bias: apply(
        spec, x, Stats(frame, offset, var), scale, bias
    )
    primals, steps = (
        (x, offset, var, residuals.scale, residuals.bias),
        (dx, doffset, dvar, tangents.scale, tangents.bias),
    )
    return jax.jvp(line, primals, steps)[1], doffset, dvar


def tangent_like(
    spec: Spec, residuals: Residuals, tangents: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arrays of the shapes and dtypes that :func:`tangent` returns."""
    stats = reduce_groups(
        spec, split(spec, tangents.x, compute_dtype(residuals.x.dtype)), spec.axes
    )
    return tangents.x.astype(spec.dtype), stats, stats


def backward(spec: Spec, residuals: Residuals, gradients: tuple) -> Inputs:
    """The transpose of :func:`tangent`: gradients by x, scale and bias from those by output, offset
    and variance, None for 0.
    """
    (x, _, scale, bias), (dy, doffset, dvar) = residuals, gradients
    frame, offset, var = recentered(stats_of(spec, residuals))
    r, rstd_vjp = jax.vjp(partial(rstd, spec, frame), var)
    gain = 1 if scale is None else scale.astype(r.dtype)
    shared = spec.shared_axes(scale, bias)
    rest = tuple(axis for axis in spec.axes if axis not in shared)
    as_values = partial(split, spec, dtype=r.dtype)
    own_x, own_dy = for_own_loop(spec, x, dy)
    sum_dy = reduce_groups(spec, as_values(*for_own_loop(spec, dy)), shared)
    sum_dy_u = reduce_groups(spec, as_values(own_dy) * elements(spec, own_x, frame), shared)
    # of sums: from most elements an offset takes less than their last digit
    sum_dy_u = sum_dy_u - offset * sum_dy
    (dvar_of_y,) = rstd_vjp(reduce_axes(gain * sum_dy_u, rest))
    slope = 2 * divide(
        dvar_of_y if dvar is None else dvar_of_y + dvar, total_weight(spec, frame), r
    )
    own_x, slope = for_own_loop(spec, x, spread(spec, slope))
    dx_of_stats = slope * elements(spec, own_x, frame, offset)
    if spec.centered:
        shift = -r * reduce_axes(gain * sum_dy, rest)
        dx_of_stats = dx_of_stats + spread(
            spec,
            divide(shift if doffset is None else shift + doffset, total_weight(spec, frame), r),
        )
    dx = as_values(dy) * spread(spec, gain * r) + weigh(spec, dx_of_stats, frame.where)
    dx = (
        times(dx, spread(spec, inverse_power(spec, frame.power, r.dtype)))
        .astype(x.dtype)
        .reshape(x.shape)
    )
    return Inputs(
        dx,
        *(
            None if a is None else summed_like(a, values)
            for a, values in ((scale, sum_dy_u * r), (bias, sum_dy))
        ),
    )


def summed_like(param: jax.Array, values: jax.Array) -> jax.Array:
    """Summed over the axes along which the parameter does not differ."""
    axes = tuple(
        axis for axis, size in enumerate(param.shape) if size == 1 and values.shape[axis] != 1
    )
    return jnp.broadcast_to(reduce_axes(values, axes), param.shape).astype(param.dtype)
