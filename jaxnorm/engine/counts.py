"""The number of elements of each group, or their total weight, without a loop over the data."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.engine.collectives import across, number_of_devices
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.parts import low_parts, parts_of_count, sum_parts
from jaxnorm.engine.segments import ScatterIndices


def group_weight(
    loops: PlainLoops, where: jax.Array | None, scatter_indices: ScatterIndices | None, dtype
) -> jax.Array:
    """Return the number of elements of each group, or their total weight, over all devices."""
    if where is None or where.dtype == jnp.bool_:
        weight = count_elements(loops, where, scatter_indices).astype(dtype)
    else:
        weight = over_mask(loops, where.astype(dtype), scatter_indices)
    return across(lax.psum, weight, loops.spec.axis_name)


def count_elements(
    loops: PlainLoops, where: jax.Array | None, scatter_indices: ScatterIndices | None
) -> jax.Array:
    """Count the elements of each group on this device, without the masked ones."""
    if where is None:
        ones = jnp.ones((1,) * len(loops.spec.reduction.split_shape), jnp.int32)
        return over_mask(loops, ones, scatter_indices)
    return over_mask(loops, where.astype(jnp.int32), scatter_indices)


def over_mask(
    loops: PlainLoops, where: jax.Array, scatter_indices: ScatterIndices | None
) -> jax.Array:
    """Sum a mask or weights over each group, in their dtype, without a loop over x."""
    spec = loops.spec
    # an axis of size one is broadcast: multiply by its length instead of a loop over it
    repeated = [
        spec.reduction.split_shape[axis] for axis in spec.whole_axes if where.shape[axis] == 1
    ]
    by = partial(jnp.sum, dtype=where.dtype)
    sums = loops.reduce_axes(where, spec.whole_axes, by)
    sums = (
        sums
        if scatter_indices is None
        else spec.segments.reduce(sums, scatter_indices, jax.ops.segment_sum)
    )
    return sums * jnp.asarray(math.prod(repeated), where.dtype)


def low_parts_of_count(
    loops: PlainLoops,
    where: jax.Array | None,
    scatter_indices: ScatterIndices | None,
    count: jax.Array,
) -> tuple:
    """Return the rounding error of a count, in two parts.

    They are 0 for weights, whose sum is rounded anyway.
    """
    spec = loops.spec
    if where is not None and where.dtype != jnp.bool_:
        return (np.zeros((), count.dtype),) * 2
    if where is None and scatter_indices is None:
        size = spec.reduction.group_size * number_of_devices(spec.axis_name)
        rest = size - int(np.asarray(size, count.dtype)) if isinstance(size, int) else 0
        return np.asarray(rest, count.dtype), np.zeros((), count.dtype)
    elements = count_elements(loops, where, scatter_indices)
    exact = sum_parts(parts_of_count(elements, (), count.dtype), (), spec.axis_name)
    return low_parts(exact, count)
