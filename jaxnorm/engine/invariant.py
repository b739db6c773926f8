"""Loops whose sums have one order, whatever the number of groups.

A compiler chooses the order in which it sums a group: by the vectors of the processor, by what it
fuses, by the number of groups. So the bits of a row depend on how many rows are computed with it.
Here a sum is made of additions of arrays, element by element, and the order of these additions
depends on the size of the reduction axes alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.engine.loops import PlainLoops

# Parts that are added at a time. Each step reads all elements and leaves 1 / BLOCKS of them, so
# few parts cost reads, and many make long programs.
BLOCKS = 32
# Neighbours that lie in one part, so that additions fill the vectors of a processor. On a CPU rows
# of 128 elements then take 0.9 to 1.5 of their usual time, instead of 1.4 to 4.
VECTOR = 16


@dataclass(frozen=True)
class FixedOrderLoops(PlainLoops):
    """Loops by which the bits of a group do not depend on the other groups."""

    def reduce_axes(
        self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum
    ) -> jax.Array:
        """Sum along axes, from the last to the first; a maximum has the same bits in any order."""
        if by is not jnp.sum:
            return super().reduce_axes(values, axes, by)
        for axis in sorted(axes, reverse=True):
            values = sum_in_order(values, axis)
        return values


def sum_in_order(values: jax.Array, axis: int) -> jax.Array:
    """Sum along an axis, which keeps size one, by additions of equal parts of it.

    >>> sum_in_order(jnp.arange(100.0).reshape(1, 100), 1).tolist()
    [[4950.0]]
    """
    if values.shape[axis] == 0:
        return jnp.sum(values, axis, keepdims=True)
    while (size := values.shape[axis]) > 1:
        width = max(-(-size // BLOCKS), VECTOR) if size > 2 * VECTOR else 1
        starts = range(0, size, width)
        parts = [lax.slice_in_dim(values, at, min(at + width, size), axis=axis) for at in starts]
        if (missing := starts[-1] + width - size) > 0:
            pad = [(0, missing if each == axis else 0, 0) for each in range(values.ndim)]
            parts[-1] = lax.pad(parts[-1], jnp.zeros((), values.dtype), pad)
        while len(parts) > 1:  # neighbours, as a tree: its rounding errors grow like log(n)
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [a + b for a, b in pairs] + parts[len(parts) & ~1 :]
        (values,) = parts
    return values
