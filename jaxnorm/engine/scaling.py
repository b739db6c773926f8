"""The shift and scale exponent of each group, from all of its elements or from a sample.

A group's mean and variance are made of the sums of u = x - shift and of u**2, which a compiler
finds in one read of x, if the shift is known before. The shift may be any number near the mean.
Taken from all elements it costs a read of its own; taken from a sample, a part of one.

How near is near enough? Let k of the n elements be the sample, s its mean, r the mean of the other
elements, m and var the mean and variance of all. Each part varies around its own mean, so that

    n var >= k (s - m)**2 + (n - k) (r - m)**2,         where (n - k) (r - m) = -k (s - m):
    n var >= (s - m)**2 (k + k**2 / (n - k)) = (s - m)**2 k n / (n - k)

    (s - m)**2 <= (n / k - 1) var

for any data and any sample. Then mean(u**2) = var + (s - m)**2 <= n / k var: var is rounded as a
number n / k times as large. The worst data have a sample whose elements are alike, and all others
alike elsewhere. With weights, n and k are sums of weights.

A shift of 0 is as near where m**2 <= (n / k - 1) var. Sums around it need no read of x at all where
XLA makes x: at the end of a convolution, for example. So loops that may branch sum around 0 first,
look at m and var, and take a sample only if some group has a mean too far from 0.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.axes import Reduction, is_static, unsplit
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.engine.collectives import across
from jaxnorm.engine.counts import group_weight
from jaxnorm.engine.exponents import COARSE, LARGE, coarse_exponent, is_coarse, scale_exponent
from jaxnorm.engine.groups import (
    Scaling,
    abs_squared,
    elements,
    elements_that_count,
    mean,
    over_groups,
    split,
    total,
    total_weight,
)
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.segments import ScatterIndices
from jaxnorm.engine.sharding import is_explicit

LEAST = 1 / 64  # of the weight of a group: a sample of less is not taken
MARGIN = 8  # binary digits
LANES = 128  # elements of the last axis that a TPU reads at a time


def find_scaling(
    loops: PlainLoops,
    x: jax.Array,
    where: jax.Array | None,
    scatter_indices: ScatterIndices | None = None,
    epsilon: jax.Array | None = None,
) -> Scaling:
    """Return the shift and scale exponent that make the elements of each group small.

    In their units a traced epsilon stays in the range, too.
    """
    x, lowest = lax.stop_gradient(x), loops.spec.lowest_exponent(x.dtype, epsilon)
    scaling = Scaling(None, None, None, where, scatter_indices)
    if where is not None or scatter_indices is not None:
        weight = group_weight(loops, where, scatter_indices, real_dtype(compute_dtype(x.dtype)))
        scaling = scaling._replace(n=weight)
    by_squares = loops.coarse == "squares" and scatter_indices is None
    by_squares = lowest is not None and is_coarse(loops) and by_squares
    if lowest is not None and not by_squares:
        scaling = scaling._replace(exponent=_find_exponent(loops, x, scatter_indices, lowest))
    if by_squares:  # no difference of two elements overflows in these units
        scaling = scaling._replace(exponent=MARGIN)
    in_one_read = _by_squares if by_squares else _by_sums
    if _may_be_near_zero(loops, x, scaling):
        return _near_zero(loops, x, scaling, in_one_read)
    if loops.spec.centered:
        scaling = scaling._replace(shift=_find_shift(loops, x, scaling))
    return in_one_read(loops, x, scaling) if by_squares else scaling


def _may_be_near_zero(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> bool:
    """Return whether sums around 0 come first."""
    spec = loops.spec
    if not loops.near_zero or not spec.centered or spec.segments is not None:
        return False
    in_range = scaling.exponent is None or isinstance(scaling.exponent, int)
    return in_range and not jnp.iscomplexobj(x) and not is_explicit(x)


def _near_zero(loops: PlainLoops, x: jax.Array, scaling: Scaling, in_one_read: Callable) -> Scaling:
    """Return the scaling around 0, or around a sample if some mean is far from 0.

    Sums around 0 depend on nothing but x: XLA makes them where x itself is made, at the end of a
    convolution, and reads nothing for them.
    """

    def around(shift: jax.Array) -> Scaling:
        return in_one_read(loops, x, scaling._replace(shift=shift))

    found = around(jnp.zeros(loops.spec.reduction.split_stats_shape, compute_dtype(x.dtype)))
    assert found.estimates is not None
    mean, var = found.estimates
    # A mean m costs no more digits than a sample if m**2 is at most (sample - 1) var, see above.
    far = any_of(abs_squared(mean) > (loops.sample - 1) * var)
    changed = lambda a: (a.shift, a.exponent, a.estimates)
    shift, exponent, estimates = lax.cond(
        far, lambda: changed(around(_find_shift(loops, x, scaling))), lambda: changed(found)
    )
    return found._replace(shift=shift, exponent=exponent, estimates=estimates)


@jax.custom_batching.custom_vmap
def any_of(far: jax.Array) -> jax.Array:
    """Return whether any element is True, also of arrays that are mapped over.

    A branch on a mapped value would run both ways.
    """
    return far.any()


@any_of.def_vmap
def _any_of_all(_, in_batched, far):
    return any_of(far), False


def _by_sums(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> Scaling:
    """Return the scaling, and low part of the mean and variance, in one read."""
    u = elements_that_count(loops, x, scaling)
    low_mean, square = (mean(loops, values, scaling) for values in (u, abs_squared(u)))
    var = jnp.maximum(square - abs_squared(low_mean), 0)
    return scaling._replace(estimates=(low_mean, var))


def _by_squares(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> Scaling:
    """Return the scaling of bfloat16, and low part of the mean and variance, in one read.

    The squares are summed twice, by two scale exponents, of which one suits each group.
    """
    spec, (small, large) = loops.spec, (COARSE[0], COARSE[-1])
    u = elements_that_count(loops, x, scaling)
    squares = [
        mean(loops, abs_squared(u * 2.0 ** (MARGIN - exponent)), scaling)
        for exponent in (small, large)
    ]
    is_large = squares[0] >= 2.0 ** (2 * LARGE)
    if spec.exponent_axes:
        is_large = is_large.any(spec.exponent_axes, keepdims=True)
    choose = lambda of_large, of_small: jnp.where(is_large, of_large, of_small)
    unit = choose(2.0 ** (MARGIN - large), 2.0 ** (MARGIN - small)).astype(u.dtype)
    scaling = scaling._replace(exponent=choose(large, small).astype(jnp.int8))
    square = choose(squares[1], squares[0])
    if not spec.centered:
        return scaling._replace(estimates=(jnp.zeros_like(square), square))
    low_mean = mean(loops, u, scaling) * unit
    var = jnp.maximum(square - abs_squared(low_mean), 0)
    assert scaling.shift is not None
    return scaling._replace(shift=scaling.shift * unit, estimates=(low_mean, var))


def _find_shift(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> jax.Array:
    """Return the mean of each group as one number, or of a sample of it."""
    at = sample_of(loops, x)
    if at is None:
        return _mean_of_all(loops, x, scaling)
    shift, share = _mean_of_sample(loops, x, scaling, at)
    if share is None:
        return shift
    # a sample with too few elements that count says too little about some group: take all then
    return lax.cond((share < LEAST).any(), lambda: _mean_of_all(loops, x, scaling), lambda: shift)


def _mean_of_all(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> jax.Array:
    # without a shift yet, the elements are x / 2**exponent
    sums = total(loops, elements(loops, x, scaling), scaling)
    return loops.divide(sums, total_weight(loops.spec, scaling), sums)


def sample_of(loops: PlainLoops, x: jax.Array) -> tuple[int, int] | None:
    """Return the axis of the split shape that a sample is a part of, and the size of the part.

    It is None where loops take no sample, and where one costs as much as it saves.
    """
    spec, shape = loops.spec, loops.spec.reduction.split_shape
    if not loops.sample or spec.segments is not None or jnp.iscomplexobj(x):
        return None
    if not is_static(shape) or is_explicit(x):
        return None
    # The first axis is often spread over devices, and a part of it lies on some of them alone.
    axes = sorted(spec.axes, key=lambda axis: (axis == 0, -shape[axis]))
    axis = next((axis for axis in axes if shape[axis] > 1), None)
    if axis is None:
        return None
    size = -(-shape[axis] // loops.sample)
    if axis == len(shape) - 1:
        size = -(-size // LANES) * LANES
    return (axis, size) if 2 * size <= shape[axis] else None


def _mean_of_sample(
    loops: PlainLoops, x: jax.Array, scaling: Scaling, at: tuple[int, int]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the mean of the sample, and its share of the weight of the group.

    The share is None where all elements count. The mean of equal elements is exact.
    """
    (axis, size), spec, where = at, loops.spec, scaling.where
    part, reduction = _first(x, spec.reduction, axis, size)
    if where is not None and where.shape[axis] != 1:
        where = lax.slice_in_dim(where, 0, size, axis=axis)
    own = loops.of(replace(spec, reduction=reduction))
    weight = None
    if where is not None:
        weight = group_weight(own, where, None, real_dtype(compute_dtype(x.dtype)))
    own_scaling = scaling._replace(n=weight, where=where)
    u = elements(own, part, own_scaling)
    found = own.divide(total(own, u, own_scaling), total_weight(own.spec, own_scaling))
    # Rounded, the mean of equal elements may lie beside them. Both limits are maxima, since a
    # compiler makes one reduction over devices of reductions of a kind.
    counts = True if where is None else where.astype(bool)
    limit = lambda values: across(
        lax.pmax,
        jnp.max(values, spec.axes, keepdims=True, initial=-jnp.inf, where=counts),
        spec.axis_name,
    )
    found = jnp.clip(found, -limit(-u), limit(u))
    if weight is None:
        return found, None
    of_group = total_weight(spec, scaling)
    share = weight / jnp.where(of_group > 0, of_group, 1)
    return jnp.where(weight > 0, found, 0), jnp.where(of_group > 0, share, 1)


def _first(x: jax.Array, reduction: Reduction, axis: int, size: int) -> tuple[jax.Array, Reduction]:
    """Return the first elements of x along an axis of its split shape, and their reduction."""
    whole = reduction.whole_axis(axis)
    if len(reduction.parts[whole]) > 1:
        part = lax.slice_in_dim(x.reshape(reduction.split_shape), 0, size, axis=axis)
        return part, unsplit(part.shape, reduction.axes)
    # XLA would copy all of x to split another axis first
    part, parts = lax.slice_in_dim(x, 0, size, axis=whole), list(reduction.parts)
    parts[whole] = (size,)
    return part, Reduction(part.shape, tuple(parts), reduction.axes)


def _find_exponent(
    loops: PlainLoops, x: jax.Array, scatter_indices: ScatterIndices | None, lowest
) -> jax.Array:
    """Return the exponent of the largest element of each group.

    Dividing by 2**exponent is exact, and leaves the elements below 4.
    """
    spec = loops.spec
    (own_x,) = loops.always_isolate(x)
    values = split(loops, own_x, compute_dtype(x.dtype))
    size = (
        jnp.maximum(jnp.abs(values.real), jnp.abs(values.imag))
        if jnp.iscomplexobj(values)
        else jnp.abs(values)
    )
    by = partial(jnp.max, initial=0)
    largest = over_groups(loops, size, scatter_indices, by, jax.ops.segment_max)
    if spec.exponent_axes:
        largest = jnp.max(largest, spec.exponent_axes, keepdims=True, initial=0)
    largest = across(lax.pmax, largest, spec.axis_name)
    return coarse_exponent(largest) if is_coarse(loops) else scale_exponent(largest, lowest)
