"""Loops of the formulas over the elements of each group, in the plain way that any compiler takes.

The formulas of engine/reference.py and engine/groups.py define the sums and products. Loops say
how they are computed: in which shape, in which order, in how many passes. A compiler with other
needs has loops of its own, such as the ones in engine/xla.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxnorm.arguments.dtypes import real_dtype
from jaxnorm.engine.spec import Spec


@dataclass(frozen=True)
class PlainLoops:
    """Loops over the elements that a spec describes, in plain jnp.

    Attributes:
      spec: the groups that share statistics, and the use of the statistics.
      recompute: whether backward recomputes the statistics instead of keeping them.
      keep_low_mean: whether the low part of the mean is a residual, if statistics are.
      coarse: what chooses the power of two that a group is divided by among a few constants: its
        largest element, or its squares; "" where it may be any, see engine/exponents.py.
      sample: the shift of a group is the mean of one in so many of its elements, see
        engine/scaling.py; 0 for the mean of all.
      near_zero: whether the shift is 0 where all groups have a mean near it.
      derivatives: loops that take over where statistics are kept for a derivative; None for these.
    """

    spec: Spec
    recompute: bool = False
    keep_low_mean: bool = True
    coarse: Literal["", "largest", "squares"] = ""
    sample: int = 0
    near_zero: bool = False
    derivatives: "PlainLoops | None" = None

    def for_derivatives(self, where: jax.Array | None) -> "PlainLoops":
        """Return the loops where statistics are kept for a derivative.

        With a mask these stay: a sample that it may hide needs a branch, and a GPU waits for it.
        """
        if self.derivatives is None or where is not None:
            return self
        return self.derivatives.of(self.spec)

    def of(self, spec: Spec) -> Self:
        """Return loops of this kind over the elements of another spec."""
        return replace(self, spec=spec)

    def batched(self, size: int) -> Self:
        """Return the loops over an array with one more axis in front."""
        return self.of(self.spec.batched(size))

    def isolate(self, *arrays: jax.Array | None) -> tuple:
        """Return the arrays so that the compiler shares nothing made of them with other loops."""
        return arrays

    def always_isolate(self, *arrays: jax.Array | None) -> tuple:
        """Return the arrays as :meth:`isolate` does, also where loops are fused."""
        return arrays

    def split(self, values: jax.Array) -> jax.Array:
        """Reshape values of the shape of x to the shape of loops, split as the reduction."""
        return values.reshape(self.spec.reduction.split_shape)

    def broadcast_to_elements(self, values: Any) -> Any:
        """Broadcast statistics or parameters to elements, to meet :meth:`split` values."""
        return values

    def reduce(self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum) -> jax.Array:
        """Sum :meth:`split` values along split axes, or reduce them otherwise."""
        return self.reduce_axes(values, axes, by)

    def reduce_axes(
        self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum
    ) -> jax.Array:
        """Sum any array along axes, or reduce it otherwise; the axes keep size one."""
        return by(values, axes, keepdims=True)

    def round_sum(self, total: jax.Array, dtype) -> jax.Array:
        """Return a sum in the dtype of a parameter."""
        return total.astype(dtype)

    def divide(
        self, total: jax.Array, count: Any, nonconstant: jax.Array | None = None
    ) -> jax.Array:
        """Return ``total / count``; it is 0 for an empty group.

        ``nonconstant`` is any array with one element for each group, for loops that need one.
        """
        return total / divisor(total, count)

    def per_group(self, function: Callable) -> Callable:
        """Return ``function`` of numbers and arrays with one element for each group."""
        return function

    def compute_first(self, values: jax.Array) -> jax.Array:
        """Return one value for each group, so that no loop over elements computes it again."""
        return values

    def compute_first_if_isolated(self, values: jax.Array) -> jax.Array:
        """Return the values as :meth:`compute_first` does, where :meth:`isolate` isolates."""
        return values

    def as_factor(self, where: jax.Array) -> jax.Array:
        """Return a mask or weights as a factor for :meth:`split` values."""
        return where


def divisor(total: jax.Array, count: Any) -> jax.Array:
    """Return the count in the dtype of the total, with 1 for 0."""
    # an empty group has total 0, and 0 / 1 is its mean
    if isinstance(count, float):
        return jnp.asarray(count if count > 0 else 1, total.dtype)
    count = jnp.asarray(count, real_dtype(total.dtype))
    return jnp.where(count > 0, count, 1).astype(total.dtype)
