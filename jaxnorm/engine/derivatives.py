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

from jaxnorm.dtypes import compute_dtype, needs_power
from jaxnorm.engine import reference
from jaxnorm.engine.groups import Frame, find_frame, masked, scale_down, split
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
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.engine.xla import separate

__all__ = ["forward", "statistics"]  # what plan.py calls


def forward(spec: Spec, operands: Operands) -> tuple[jax.Array, Stats]:
    """The output and the statistics."""
    return masked(spec, operands, partial(forward_weighted, spec))


def forward_weighted(spec: Spec, operands: Operands) -> tuple[jax.Array, Stats]:
    """:func:`forward` of x that is 0 where it is masked out."""
    x, where, scale, bias, *_ = operands
    if not spec.ordinary or operands.epsilon is not None:
        return forward_in_steps(spec, operands)
    frame = find_frame(spec, x, where)
    y, offset, var = normalized(spec, x, frame, scale, bias)
    return y, Stats(frame, offset, var)


def forward_in_steps(spec: Spec, operands: Operands) -> tuple[jax.Array, Stats]:
    """Statistics, what becomes of them, and the output: derivatives are those of each step, all of
    which read x.

    Half precision is cast before, so that the gradients of all steps are summed and rounded once,
    and recomputed, so that no copy of x in another dtype is among the residuals.
    """
    given = operands.x.dtype
    if given != compute_dtype(given):
        spec = replace(spec, full_range=spec.full_range or needs_power(given))
        return jax.checkpoint(
            lambda own: forward_in_steps(spec, own._replace(x=own.x.astype(compute_dtype(given))))
        )(operands)
    x, where, scale, bias, ids, epsilon, param = operands
    found = statistics(spec, x, where, spec.places(ids), epsilon)
    stats = with_epsilon(found if spec.adjust is None else spec.adjust(spec, found, param), epsilon)
    return jax.checkpoint(partial(apply, spec))(x, stats, scale, bias), found


def with_epsilon(stats: Stats, epsilon: jax.Array | None) -> Stats:
    """Statistics whose variance is larger by a traced epsilon, in the units of their frame."""
    if epsilon is None:
        return stats
    return stats._replace(
        var=stats.var
        + scale_down(
            scale_down(epsilon.astype(stats.var.dtype), stats.frame.power), stats.frame.power
        )
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalized(spec: Spec, x, frame: Frame, scale, bias):
    """Output, offset and variance of every group."""
    offset, var = estimate(spec, x, frame)
    return apply(spec, x, Stats(frame, offset, var), scale, bias), offset, var


@normalized.defjvp
def _normalized_jvp(spec, primals, tangents):
    x, frame, scale, bias = primals
    y, offset, var = normalized(spec, *primals)
    stats = Stats(frame, offset if spec.keep_offset else None, var)
    if spec.recompute:
        stats = Stats(Frame(None, None, None, frame.where), None, None)
    if (
        scale is not None
        and bias is not None
        and (scale.shape, scale.dtype) == (bias.shape, bias.dtype)
    ):
        bias = scale  # one array instead of two
    residuals, inputs = Residuals(x, stats, scale, bias), Inputs(tangents[0], *tangents[2:])
    if spec.axis_name is not None or jnp.issubdtype(y.dtype, jnp.complexfloating):
        return (y, offset, var), jax.checkpoint(partial(tangent, spec))(residuals, inputs)
    return (y, offset, var), _linear(spec.recompute)(spec, residuals, inputs)


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
        batched=Spec.batched,
        results=3,
        results_like=reference.tangent_like,
    )
    if recompute:
        by_platform = {"cpu": backward_of_rows}
        return make("jaxnorm_normalize_rows", transpose=backward, kernels=by_platform)
    return make("jaxnorm_normalize", transpose=backward)


def backward_of_rows(spec: Spec, residuals: Residuals, gradients: tuple) -> Inputs:
    """:func:`backward` where each group is a row, for XLA's CPU back-end: a fused loop for each
    result, which recomputes the statistics.
    """
    (x, stats, scale, bias), (dy, *dstats) = residuals, gradients
    dtype = compute_dtype(x.dtype)
    own_x, own_dy, own_scale = separate(x, dy, scale)
    own_dy = times(split(spec, own_dy, dtype), own_scale)
    dx = backward(spec, Residuals(own_x, stats, None, None), (own_dy, *dstats)).x
    dscale = dbias = None
    if scale is not None:
        own_x, own_dy = separate(x, dy)
        y, _ = reference.forward(replace(spec, dtype=dtype), own_x, stats.frame.where, None, None)
        dscale = summed_like(scale, split(spec, own_dy, dtype) * split(spec, y, dtype))
    if bias is not None:
        dbias = summed_like(bias, split(spec, separate(dy)[0], dtype))
    return Inputs(dx, dscale, dbias)
