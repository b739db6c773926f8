"""Output and statistics of every group, with a derivative that stores x in its own dtype and little
else.

Reverse mode runs the closed form of reference.py as the transpose of a linear primitive. Every
other derivative, of any order, JAX derives from the tangent. It derives reverse mode, too, where x
is complex, where groups extend over devices, and where statistics are of segments, changed before
they are applied, or have a traced epsilon.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp

from jaxnorm.arguments.dtypes import compute_dtype, needs_power
from jaxnorm.engine import reference
from jaxnorm.engine.groups import Frame, find_frame, masked, scale_down, split
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import (
    Inputs,
    Residuals,
    Stats,
    apply,
    backward,
    estimate,
    statistics,
    summed_like,
    tangent,
    times,
)
from jaxnorm.engine.spec import Operands

__all__ = ["forward", "statistics"]  # what plan.py calls


def forward(loops: PlainLoops, operands: Operands) -> tuple[jax.Array, Stats]:
    """The output and the statistics."""
    return masked(loops.spec, operands, partial(forward_weighted, loops))


def forward_weighted(loops: PlainLoops, operands: Operands) -> tuple[jax.Array, Stats]:
    """:func:`forward` of x that is 0 where it is masked out."""
    x, where, scale, bias, *_ = operands
    if not loops.spec.ordinary or operands.epsilon is not None:
        return forward_in_steps(loops, operands)
    frame = find_frame(loops, x, where)
    y, offset, var = normalized(loops, x, frame, scale, bias)
    return y, Stats(frame, offset, var)


def forward_in_steps(loops: PlainLoops, operands: Operands) -> tuple[jax.Array, Stats]:
    """Statistics, what becomes of them, and the output: derivatives are those of each step, all of
    which read x.

    Half precision is cast before, so that the gradients of all steps are summed and rounded once,
    and recomputed, so that no copy of x in another dtype is among the residuals.
    """
    spec, given = loops.spec, operands.x.dtype
    if given != compute_dtype(given):
        full_range = spec.full_range or needs_power(given)
        wide = loops.of(replace(spec, full_range=full_range))
        cast = lambda own: own._replace(x=own.x.astype(compute_dtype(given)))
        return jax.checkpoint(lambda own: forward_in_steps(wide, cast(own)))(operands)
    x, where, scale, bias, ids, epsilon, param = operands
    found = statistics(loops, x, where, spec.places(ids), epsilon)
    adjusted = found if spec.adjust is None else spec.adjust(loops, found, param)
    stats = with_epsilon(adjusted, epsilon)
    return jax.checkpoint(partial(apply, loops))(x, stats, scale, bias), found


def with_epsilon(stats: Stats, epsilon: jax.Array | None) -> Stats:
    """Statistics whose variance is larger by a traced epsilon, in the units of their frame."""
    if epsilon is None:
        return stats
    epsilon, power = epsilon.astype(stats.var.dtype), stats.frame.power
    return stats._replace(var=stats.var + scale_down(scale_down(epsilon, power), power))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalized(loops: PlainLoops, x, frame: Frame, scale, bias):
    """Output, offset and variance of every group."""
    offset, var = estimate(loops, x, frame)
    return apply(loops, x, Stats(frame, offset, var), scale, bias), offset, var


@normalized.defjvp
def _normalized_jvp(loops, primals, tangents):
    x, frame, scale, bias = primals
    y, offset, var = normalized(loops, *primals)
    stats = Stats(frame, offset if loops.keep_offset else None, var)
    if loops.recompute:
        stats = Stats(Frame(None, None, None, frame.where), None, None)
    kinds = [None if a is None else (a.shape, a.dtype) for a in (scale, bias)]
    if kinds[0] == kinds[1]:
        bias = scale  # one array instead of two
    residuals, inputs = Residuals(x, stats, scale, bias), Inputs(tangents[0], *tangents[2:])
    if loops.spec.axis_name is not None or jnp.issubdtype(y.dtype, jnp.complexfloating):
        return (y, offset, var), jax.checkpoint(partial(tangent, loops))(residuals, inputs)
    return (y, offset, var), _linear(loops.recompute)(loops, residuals, inputs)


@cache
def _linear(recompute: bool) -> Callable:
    """The tangent as a primitive, whose transpose is the closed form: made on first use, since
    values alone do not need it.
    """
    from jaxnorm.engine.primitives import linear

    arguments_like = lambda r: Inputs(r.x, r.scale, r.bias)
    make = partial(
        linear,
        function=tangent,
        like=arguments_like,
        batched=PlainLoops.batched,
        results=3,
        results_like=reference.tangent_like,
    )
    if recompute:
        by_platform = {"cpu": backward_of_rows}
        return make("jaxnorm_normalize_rows", transpose=backward, kernels=by_platform)
    return make("jaxnorm_normalize", transpose=backward)


def backward_of_rows(loops: PlainLoops, residuals: Residuals, gradients: tuple) -> Inputs:
    """:func:`backward` where each group is a row, for XLA's CPU back-end: a fused loop for each
    result, which recomputes the statistics.
    """
    (x, stats, scale, bias), (dy, *dstats) = residuals, gradients
    dtype = compute_dtype(x.dtype)
    own_x, own_dy, own_scale = loops.alone(x, dy, scale)
    own_dy = times(split(loops, own_dy, dtype), own_scale)
    dx = backward(loops, Residuals(own_x, stats, None, None), (own_dy, *dstats)).x
    dscale = dbias = None
    if scale is not None:
        own_x, own_dy = loops.alone(x, dy)
        wide = loops.of(replace(loops.spec, dtype=dtype))
        y, _ = reference.forward(wide, own_x, stats.frame.where, None, None)
        values = split(loops, own_dy, dtype) * split(loops, y, dtype)
        dscale = summed_like(loops, scale, values)
    if bias is not None:
        (own_dy,) = loops.alone(dy)
        dbias = summed_like(loops, bias, split(loops, own_dy, dtype))
    return Inputs(dx, dscale, dbias)
