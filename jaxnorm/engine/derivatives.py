"""Output and statistics of every group, with a derivative that stores x in its own dtype and little else.

Reverse mode runs the closed form of reference.py as the transpose of a linear primitive. Every other derivative, of any order,
JAX makes of the tangent.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp

from jaxnorm.dtypes import compute_dtype, needs_power
from jaxnorm.engine import reference
from jaxnorm.engine.groups import Frame, find_frame, scale_down, split
from jaxnorm.engine.numbers import Numbers, assemble
from jaxnorm.engine.reference import (
    Inputs,
    Residuals,
    Stats,
    apply,
    backward,
    estimate,
    like,
    nothing_saved,
    statistics,
    tangent,
)
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import separate

__all__ = ["forward", "forward_segments", "statistics"]  # what plan.py calls of an implementation


def forward(spec: Spec, x, where, scale, bias, *, moments: bool) -> tuple[jax.Array, Numbers | None]:
    """The output and, if asked for, the statistics."""
    frame = find_frame(spec, x, where)
    y, offset, var = normalized(spec, x, where, frame, scale, bias)
    return y, assemble(spec, Stats(frame, offset, var), where) if moments else None


def forward_segments(spec: Spec, x, where, scale, bias, ids: jax.Array, epsilon) -> jax.Array:
    """The output, normalized by the statistics of each segment; a traced epsilon is added to their variance."""
    places = spec.places(ids)

    def run(spec: Spec, x, scale, bias, epsilon):
        stats = statistics(spec, x, where, places)
        stats = stats if epsilon is None else with_epsilon(stats, epsilon)
        return nothing_saved(partial(apply, spec))(x, where, stats, scale, bias)

    return cast_once(run, spec, x, scale, bias, epsilon)


def with_epsilon(stats: Stats, epsilon: jax.Array) -> Stats:
    """Statistics whose variance is larger by a traced epsilon, in the units of their frame."""
    return stats._replace(var=stats.var + scale_down(scale_down(epsilon.astype(stats.var.dtype), stats.frame.power), stats.frame.power))


def cast_once(run: Callable, spec: Spec, x: jax.Array, *more) -> jax.Array:
    """``run(spec, x, *more)``, which reads x in several places.

    Half precision is cast before, so that the gradients of all places are summed and rounded once, and recomputed, so that no copy
    of x in another dtype is among the residuals.
    """
    dtype = compute_dtype(x.dtype)
    if x.dtype == dtype:
        return run(spec, x, *more)
    spec = replace(spec, dtype=x.dtype if spec.dtype is None else spec.dtype, full_range=spec.full_range or needs_power(x.dtype))
    return nothing_saved(lambda x, *more: run(spec, x.astype(dtype), *more))(x, *more)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalized(spec: Spec, x, where, frame: Frame, scale, bias):
    """Output, offset and variance of every group."""
    offset, var = estimate(spec, x, where, frame)
    return apply(spec, x, where, Stats(frame, offset, var), scale, bias), offset, var


@normalized.defjvp
def _normalized_jvp(spec, primals, tangents):
    x, where, frame, scale, bias = primals
    y, offset, var = normalized(spec, *primals)
    stats = None if spec.recompute else Stats(frame, offset if spec.keep_offset else None, var)
    if scale is not None and bias is not None and (scale.shape, scale.dtype) == (bias.shape, bias.dtype):
        bias = scale  # one array instead of two
    residuals, inputs = Residuals(x, where, stats, scale, bias), Inputs(tangents[0], *tangents[3:])
    if spec.axis_name is not None or jnp.issubdtype(y.dtype, jnp.complexfloating):
        return (y, offset, var), nothing_saved(partial(tangent, spec))(residuals, inputs)
    return (y, offset, var), _linear(spec.recompute)(spec, residuals, inputs)


@cache
def _linear(in_rows: bool) -> Callable:
    """The tangent as a primitive, whose transpose is the closed form: made where first asked for, since values do without."""
    from jaxnorm.kernels.primitives import linear

    arguments_like = lambda r: Inputs(r.x, r.scale, r.bias)  # noqa: E731
    make = partial(linear, function=tangent, like=arguments_like, batched=Spec.batched, results=3, results_like=reference.tangent_like)
    if in_rows:
        return make("jaxnorm_normalize_rows", transpose=backward_of_rows, elsewhere=backward)
    return make("jaxnorm_normalize", transpose=backward)


def backward_of_rows(spec: Spec, residuals: Residuals, gradients: tuple) -> Inputs:
    """:func:`backward` where each group is a row, for XLA's CPU back-end: a fused loop for each result, which recomputes the statistics."""
    (x, _, _, scale, bias), (dy, *dstats) = residuals, gradients
    dtype = compute_dtype(x.dtype)
    own_x, own_dy, own_scale = separate(x, dy, scale)
    own_dy = split(spec, own_dy, dtype) if scale is None else split(spec, own_dy, dtype) * own_scale.astype(dtype)
    dx = backward(spec, Residuals(own_x, None, None, None, None), (own_dy, *dstats)).x
    dscale = dbias = None
    if scale is not None:
        own_x, own_dy = separate(x, dy)
        normalized, _ = reference.forward(replace(spec, dtype=dtype), own_x, None, None, None)
        dscale = like(scale, split(spec, own_dy, dtype) * split(spec, normalized, dtype))
    if bias is not None:
        dbias = like(bias, split(spec, separate(dy)[0], dtype))
    return Inputs(dx, dscale, dbias)
