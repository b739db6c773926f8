"""Plain JAX in the place of a kernel: for derivatives it has not, and where none can be called.

x keeps its shape here: XLA would have to gather it first, to arrange it, where an axis in the
middle is sharded.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.engine import reference
from jaxnorm.engine.counts import group_weight
from jaxnorm.engine.groups import Scaling, mask_fill_split
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.primitives import zeros
from jaxnorm.engine.reference import Inputs, Residuals, Stats
from jaxnorm.kernels.static import Static

# stands for the statistics of all groups among residuals, where they are recomputed
ABSENT = np.zeros((1, 1, 1, 1), np.float32)


def plain(static: Static, arguments):
    """Compute in plain JAX what a forward kernel computes.

    x keeps its shape: XLA would have to gather it first, to arrange it, where an axis in the middle
    is sharded.
    """
    x, *params, where = arguments
    loops, where, shape = static.loops, static.mask_as_given(where), arranged_stats(static, x)
    filled = mask_fill_split(loops.spec, x, where)
    y, (scaling, low_mean, var) = reference.forward(
        loops, filled, where, *map(static.param_as_given, params)
    )
    found = (
        jnp.zeros_like(var) if a is None else a.astype(jnp.float32)
        for a in (scaling.shift, low_mean, var, scaling.exponent)
    )
    return mask_fill_split(loops.spec, y, where), *(a.reshape(shape) for a in found)


def arranged_stats(static: Static, x: jax.Array) -> tuple[int, ...]:
    """Return the shape of arranged statistics of x as it is given."""
    return static.stats_shape(jax.eval_shape(static.arranged, x))


def _plain_residuals(static: Static, residuals) -> tuple[PlainLoops, Residuals]:
    """Return the residuals of plain JAX, made from the residuals of the kernel."""
    x, *stats, scale, where = residuals
    loops, where, scale = static.loops, static.mask_as_given(where), static.param_as_given(scale)
    x = mask_fill_split(loops.spec, x, where)
    if static.recompute(static, x):
        return loops, Residuals(x, reference.statistics(loops, x, where), scale, scale)
    shift, low_mean, var, exponent = (
        static.stats_as_given(a) if informative else None
        for a, informative in zip(stats, static.informative(x), strict=True)
    )
    assert var is not None
    low_mean = low_mean if static.spec.centered else jnp.zeros_like(var)
    count = None if where is None else group_weight(loops, where, None, jnp.float32)
    scaling = Scaling(count, exponent, shift, where)
    return loops, Residuals(x, Stats(scaling, low_mean, var), scale, scale)


def tangent(static: Static, residuals, arguments):
    """Return the tangents of output, low part of the mean and variance, in plain JAX."""
    dx, *params = arguments
    loops, own = _plain_residuals(static, residuals)
    where = own.stats.scaling.where
    inputs = Inputs(mask_fill_split(loops.spec, dx, where), *map(static.param_as_given, params))
    dy, *dstats = reference.tangent(loops, own, inputs)
    shape = arranged_stats(static, dx)
    return mask_fill_split(loops.spec, dy, where), *(a.reshape(shape) for a in dstats)


def tangent_like(static: Static, residuals, arguments):
    """Return arrays of the shapes and dtypes that :func:`tangent` returns."""
    dx, leaves = arguments[0], jax.tree.leaves((residuals, arguments))
    stats = zeros(arranged_stats(static, dx), jnp.float32, *leaves)
    return zeros(dx.shape, static.spec.dtype, *leaves), stats, stats


def plain_backward(static: Static, residuals, cotangents):
    """Compute in plain JAX what a backward kernel computes."""
    dy, *dstats = cotangents
    loops, own = _plain_residuals(static, residuals)
    where, scale = own.stats.scaling.where, residuals[-2]
    dy = mask_fill_split(loops.spec, dy, where)
    of_stats = (None if a is None else static.stats_as_given(a) for a in dstats)
    dx, *params = reference.backward(loops, own, (dy, *of_stats))
    return mask_fill_split(loops.spec, dx, where), *(a.reshape(scale.shape) for a in params)
