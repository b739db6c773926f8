"""Output and statistics of each group, with a derivative that stores little besides x.

x is stored in its own dtype. Reverse mode runs the closed form of engine/reference.py as the
transpose of a linear primitive. JAX derives every other derivative, of any order, from the tangent.
JAX also derives reverse mode where x is complex, where groups extend over devices, where epsilon is
traced, where statistics belong to segments or are changed before they are applied, and where the
output has a formula of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal

from jaxnorm.arguments.dtypes import compute_dtype, needs_exponent
from jaxnorm.engine import reference
from jaxnorm.engine.exponents import scale_down
from jaxnorm.engine.groups import Scaling, masked, split
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import (
    Adjusted,
    Inputs,
    Residuals,
    Stats,
    apply,
    backward,
    composed,
    estimate,
    statistics,
    summed_like,
    tangent,
    times,
)
from jaxnorm.engine.scaling import find_scaling
from jaxnorm.engine.spec import Operands, Spec

__all__ = ["describe", "forward", "statistics"]  # the entry points of core/plan.py

CLOSED_FORM = "a formula in plain JAX"


def forward(loops: PlainLoops, operands: Operands) -> tuple[jax.Array, Stats]:
    """Return the output and the statistics of each group."""
    return masked(loops.spec, operands, partial(forward_weighted, loops))


def forward_weighted(loops: PlainLoops, operands: Operands) -> tuple[jax.Array, Stats]:
    """Run :func:`forward` for x that is already 0 where it is masked out."""
    x, where, scale, bias, *_ = operands
    if why_in_steps(loops.spec, operands) is not None:
        return forward_in_steps(loops, operands)
    y, scaling, low_mean, var = normalized(loops, x, where, scale, bias)
    return y, Stats(scaling._replace(where=where), low_mean, var)


def why_in_steps(spec: Spec, operands: Operands) -> str | None:
    """Say why statistics and output are steps with a derivative each; None if they are one."""
    if spec.segments is not None:
        return "groups are segments"
    if spec.adjust is not None:
        return "statistics are changed before they are applied"
    if spec.formula is not None:
        return "the output has a formula of its own"
    return None if operands.epsilon is None else "epsilon is traced"


def why_transposed_by_jax(spec: Spec) -> str | None:
    """Say why JAX transposes the tangent; None if the closed form is its transpose."""
    if spec.axis_name is not None:
        return "groups extend over devices"
    if spec.dtype is not None and jnp.issubdtype(spec.dtype, jnp.complexfloating):
        return "the output is complex"
    return None


def describe(loops: PlainLoops, operands: Operands) -> str:
    """Say in words how reverse mode computes the gradients."""
    if reason := why_in_steps(loops.spec, operands) or why_transposed_by_jax(loops.spec):
        return f"JAX's transpose of the formulas, since {reason}"
    return CLOSED_FORM + (", which recomputes the statistics" if loops.recompute else "")


def forward_in_steps(loops: PlainLoops, operands: Operands) -> tuple[jax.Array, Stats]:
    """Compute the statistics, adjust them and apply them, one step after the other.

    Each step has its own derivative, and each reads x. Half precision is cast before the first
    step, so that the gradients of all steps are summed and rounded once. The cast is recomputed in
    backward, so that no copy of x in another dtype is among the residuals.
    """
    spec, given = loops.spec, operands.x.dtype
    # jax.checkpoint stores its arguments alone: x as it was given
    if given != compute_dtype(given):
        full_range = spec.full_range or needs_exponent(given)
        wide = loops.of(replace(spec, full_range=full_range))
        cast = lambda own: own._replace(x=own.x.astype(compute_dtype(given)))
        return jax.checkpoint(lambda own: forward_in_steps(wide, cast(own)))(operands)
    x, where, scale, bias, ids, epsilon, param = operands
    found = statistics(loops, x, where, spec.scatter_indices(ids), epsilon)
    adjusted = found if spec.adjust is None else spec.adjust(loops, found, param)
    if isinstance(adjusted, Adjusted):
        scale, bias = composed(adjusted, scale, bias)
        adjusted = adjusted.stats
    stats = with_epsilon(spec, adjusted, epsilon)
    if spec.formula is None:
        return jax.checkpoint(partial(apply, loops))(x, stats, scale, bias), found

    def own_formula(x, *given):
        return spec.formula(loops, x, *given).astype(spec.dtype).reshape(x.shape)

    return jax.checkpoint(own_formula)(x, stats, scale, bias, param), found


def with_epsilon(spec: Spec, stats: Stats, epsilon: jax.Array | None) -> Stats:
    """Apply a traced epsilon to the variance, in the units of the scale exponent.

    It is added, or its square is the least variance.
    """
    if epsilon is None:
        return stats
    epsilon, exponent = epsilon.astype(stats.var.dtype), stats.scaling.exponent
    epsilon = scale_down(epsilon, exponent)
    if spec.epsilon_in == "max":
        least = epsilon * epsilon
        return stats._replace(var=jnp.where(stats.var < least, least, stats.var))
    return stats._replace(var=stats.var + scale_down(epsilon, exponent))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalized(loops: PlainLoops, x, where, scale, bias):
    """Return the output, and of each group scaling, low part of the mean and variance.

    The scaling is without the mask.
    """
    scaling = find_scaling(loops, x, where)
    low_mean, var = estimate(loops, x, scaling)
    y = apply(loops, x, Stats(scaling, low_mean, var), scale, bias)
    return y, scaling._replace(where=None, estimates=None), low_mean, var


@normalized.defjvp
def _normalized_jvp(loops, primals, tangents):
    # With u = x / 2**exponent - shift, where exponent and shift are constants:
    #     y  = (u - low_mean) r scale + bias,        r = (var + epsilon)**(-1/2)
    #     dy = ((du - dlow_mean) r + (u - low_mean) dr) scale + (u - low_mean) r dscale + dbias
    #     dlow_mean = mean(du),  dvar = 2 mean((u - low_mean) du),  dr = -1/2 r**3 dvar
    # This is linear in dx, dscale and dbias. So reference.tangent becomes a linear primitive, and
    # reference.backward is its transpose.
    # Exponent and shift have no tangent, and neither has the weight of a group.
    x, where, scale, bias = primals
    loops = loops.for_derivatives(where)
    y, scaling, low_mean, var = normalized(loops, *primals)
    kept = low_mean if loops.keep_low_mean else None
    stats = Stats(scaling._replace(where=where), kept, var)
    if loops.recompute:  # only the mask is stored
        stats = Stats(Scaling(None, None, None, where), None, None)
    kinds = [None if a is None else (a.shape, a.dtype) for a in (scale, bias)]
    if kinds[0] == kinds[1]:
        bias = scale  # only its shape and dtype are read: store one array
    residuals, inputs = Residuals(x, stats, scale, bias), Inputs(tangents[0], *tangents[2:])
    if why_transposed_by_jax(loops.spec) is not None:
        linear = jax.checkpoint(partial(tangent, loops))
    else:
        linear = partial(_linear(loops.recompute), loops)
    dy, dlow_mean, dvar = linear(residuals, inputs)
    no_tangents = jax.tree.map(zero_from_primal, scaling)
    return (y, scaling, low_mean, var), (dy, no_tangents, dlow_mean, dvar)


@cache
def _linear(recompute: bool) -> Callable:
    """Return the tangent as a primitive whose transpose is the closed form.

    It is made on first use, since values alone do not need it.
    """
    from jaxnorm.engine.primitives import linear

    arguments_like = lambda r: Inputs(r.x, r.scale, r.bias)
    make = partial(
        linear,
        function=tangent,
        like=arguments_like,
        batched=lambda loops, size: loops.batched(size),
        results=3,
        results_like=reference.tangent_like,
    )
    if recompute:
        by_platform = {"cpu": backward_of_rows}
        return make("jaxnorm_normalize_rows", transpose=backward, kernels=by_platform)
    return make("jaxnorm_normalize", transpose=backward)


def backward_of_rows(loops: PlainLoops, residuals: Residuals, gradients: tuple) -> Inputs:
    """Compute :func:`backward` for groups that are rows, in one fused loop per result.

    It is for XLA's CPU back-end. Each of the loops recomputes the statistics.
    """
    # With z = (u - low_mean) r, y = z scale + bias, and z depends on x alone:
    #     dx     = backward of z for the gradient dy scale
    #     dscale = sum(dy z),     dbias = sum(dy)
    # z is forward without scale and bias. Each sum has arrays of its own behind an optimization
    # barrier, or XLA would write shared values to memory.
    (x, stats, scale, bias), (dy, *dstats) = residuals, gradients
    dtype = compute_dtype(x.dtype)
    own_x, own_dy, own_scale = loops.always_isolate(x, dy, scale)
    own_dy = times(split(loops, own_dy, dtype), own_scale)
    dx = backward(loops, Residuals(own_x, stats, None, None), (own_dy, *dstats)).x
    dscale = dbias = None
    if scale is not None:
        own_x, own_dy = loops.always_isolate(x, dy)
        wide = loops.of(replace(loops.spec, dtype=dtype))
        y, _ = reference.forward(wide, own_x, stats.scaling.where, None, None)
        values = split(loops, own_dy, dtype) * split(loops, y, dtype)
        dscale = summed_like(loops, scale, values)
    if bias is not None:
        (own_dy,) = loops.always_isolate(dy)
        dbias = summed_like(loops, bias, split(loops, own_dy, dtype))
    return Inputs(dx, dscale, dbias)
