"""How formulas go through the elements of each group: the plain way, which any compiler takes.

The formulas of engine/reference.py and engine/groups.py say what is summed and what is combined
with what. Loops say how: in which shape, in which order, in how many passes. Where a compiler needs
it otherwise, it has loops of its own, as those of engine/xla.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxnorm.arguments.dtypes import real_dtype
from jaxnorm.engine.spec import Spec


@dataclass(frozen=True)
class PlainLoops:
    """Loops over the elements that a spec describes, in plain jnp.

    Attributes:
      spec: which elements share statistics, and what is done with those.
      recompute: whether backward recomputes the statistics instead of keeping them.
      keep_offset: whether the correction of the mean is a residual, if statistics are.
    """

    spec: Spec
    recompute: bool = False
    keep_offset: bool = True

    def of(self, spec: Spec) -> Self:
        """The same loops over the elements of another spec."""
        return replace(self, spec=spec)

    def batched(self, size: int) -> Self:
        """The loops over an array with one more axis in front."""
        return self.of(self.spec.batched(size))

    def own(self, *arrays: jax.Array | None) -> tuple:
        """The arrays, for a loop of their own, which shares nothing with the next."""
        return arrays

    def alone(self, *arrays: jax.Array | None) -> tuple:
        """As :meth:`own`, whatever the other loops share."""
        return arrays

    def split(self, values: jax.Array) -> jax.Array:
        """Values of the shape of x in the shape of loops: split into the axes of the reduction."""
        return values.reshape(self.spec.reduction.split_shape)

    def spread(self, values: Any) -> Any:
        """Statistics or parameters as they broadcast against :meth:`split` values."""
        return values

    def reduce(self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum) -> jax.Array:
        """The sum along split axes, or another reduction, of :meth:`split` values."""
        return self.reduce_axes(values, axes, by)

    def reduce_axes(
        self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum
    ) -> jax.Array:
        """The sum along axes of any array, or another reduction; they keep size one."""
        return by(values, axes, keepdims=True)

    def divide(
        self, total: jax.Array, count: Any, nonconstant: jax.Array | None = None
    ) -> jax.Array:
        """``total / count``; 0 for an empty group. ``nonconstant`` is any array with one element
        for each group, for loops that need one.
        """
        return total / divisor(total, count)

    def per_group(self, function: Callable) -> Callable:
        """``function`` of numbers and arrays with one element for each group."""
        return function

    def before(self, values: jax.Array) -> jax.Array:
        """The same values, with one element for each group, for loops that come after."""
        return values

    def before_own(self, values: jax.Array) -> jax.Array:
        """As :meth:`before`, where loops have arrays of their own."""
        return values

    def as_factor(self, where: jax.Array) -> jax.Array:
        """A mask or weights, to be multiplied with :meth:`split` values."""
        return where


def divisor(total: jax.Array, count: Any) -> jax.Array:
    """The count in the dtype of the total, and 1 where it is 0."""
    if isinstance(count, float):
        return jnp.asarray(count if count > 0 else 1, total.dtype)
    count = jnp.asarray(count, real_dtype(total.dtype))
    return jnp.where(count > 0, count, 1).astype(total.dtype)
