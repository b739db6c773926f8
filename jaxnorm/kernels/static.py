"""The static arguments of a kernel of norms, and how arrays are arranged for it.

A kernel takes arrays that are laid out as ``(N, P, G, D)``, and statistics, scale, bias and mask to
fit. The formulas take x as it is given, and the others so that they broadcast against it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.arguments.axes import unsplit
from jaxnorm.engine.groups import Scaling
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec
from jaxnorm.kernels.layout import Layout


@dataclass(frozen=True)
class Static:
    """The static arguments of a kernel.

    Attributes:
      layout: the four axes ``(N, P, G, D)``; groups are reduced over P and D.
      rank: rank of x, without axes that it is mapped over.
      loops: the loops of plain JAX over the elements of x as it is given. Their spec has epsilon,
        correction and other options.
      lowest_exponent: the least scale exponent; None where x needs no scaling.
      moments: whether the statistics are asked for.
      recompute: ``recompute(static, x)`` says whether backward recomputes the statistics.
    """

    layout: Layout
    rank: int
    loops: PlainLoops
    lowest_exponent: int | None
    moments: bool
    recompute: Callable

    def arranged(self, x: jax.Array) -> jax.Array:
        """Return x as ``(..., N, P, G, D)``.

        Only the primitives arrange it: a copy outside of them would show jax_debug_nans the NaN
        behind a mask.
        """
        return x.reshape(*x.shape[: x.ndim - self.rank], *self.layout[:4])

    def param_as_given(self, a: jax.Array) -> jax.Array:
        """Return an arranged scale or bias, as it broadcasts against x in its split shape."""
        return a.reshape(*a.shape[:-4], *self.layout.params)

    def mask_as_given(self, where: jax.Array | None) -> jax.Array | None:
        """Return an arranged mask, as it broadcasts against x in its split shape."""
        if where is None:
            return None
        mapped, (n, p, _, _) = where.shape[:-4], self.layout.axes
        full = {*p, *(n if where.shape[-4] != 1 else ())}
        sizes = self.spec.reduction.split_shape[len(mapped) :]
        own = (size if axis in full else 1 for axis, size in enumerate(sizes))
        return where.reshape(*mapped, *own)

    def stats_as_given(self, a: jax.Array) -> jax.Array:
        """Return arranged statistics, as they broadcast against x in its split shape."""
        return a.reshape(self.spec.reduction.split_stats_shape)

    def stats_shape(self, x: jax.Array) -> tuple[int, ...]:
        """Return the shape of the statistics of arranged x: one element for each group."""
        return (*x.shape[:-3], 1, self.layout.g, 1)

    @property
    def spec(self) -> Spec:
        """The spec of the loops."""
        return self.loops.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x as it is given."""
        return self.spec.reduction.shape

    def loops_over(self, shape: tuple[int, ...], *axes: int) -> PlainLoops:
        """Return the loops over an array whose groups span these axes.

        By default these are P and D, the third from the end and the last.
        """
        axes = axes or (len(shape) - 3, len(shape) - 1)
        return self.loops.of(replace(self.spec, reduction=unsplit(shape, axes)))

    def scaling(
        self, spec: Spec, shift: jax.Array, exponent: jax.Array, where: jax.Array | None
    ) -> Scaling:
        """Return shift and scale exponent, for the spec of :meth:`loops_over`."""
        count: Any = float(self.layout.p * self.layout.d)
        if where is not None:
            count = where.sum(spec.axes[0], keepdims=True, dtype=jnp.int32).astype(jnp.float32)
            count = count * self.layout.d
        return Scaling(
            count,
            None if self.lowest_exponent is None else exponent,
            shift if self.spec.centered else None,
            where,
        )

    def informative(self, x: jax.Array) -> tuple[bool, bool, bool, bool]:
        """Return whether shift, low mean, variance and exponent hold information.

        In bfloat16 the low part of the mean is smaller than the precision of x.
        """
        centered = self.spec.centered
        return (
            centered,
            centered and x.dtype != jnp.bfloat16,
            True,
            self.lowest_exponent is not None,
        )


def batched_static(static: Static, size: int) -> Static:
    """Return the static arguments for arrays with one more axis in front."""
    # any axes may stand before the axes of arranged arrays
    return replace(static, loops=static.loops.batched(size))


def arranged_params(layout: Layout, scale, bias) -> tuple[jax.Array, ...]:
    """Return scale and bias in float32, as ``(N or 1, 1, G, D)``: 1 and 0 where None is given."""
    full = (
        jnp.broadcast_to(jnp.asarray(value if a is None else a, jnp.float32), layout.params)
        for a, value in ((scale, 1), (bias, 0))
    )
    return tuple(a.reshape(layout.scales, 1, layout.g, layout.d) for a in full)
