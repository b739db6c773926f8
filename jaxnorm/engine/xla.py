"""Loops for plain JAX on a CPU, so that XLA costs no digits, time or memory.

The formulas are the same without them. A workaround stays as long as its removal costs more than 15
% of a step of a whole model, or makes a norm that no kernel takes 1.5 times as slow.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import takewhile
from typing import Self

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

from jaxnorm.arguments.axes import rough_product
from jaxnorm.engine.loops import PlainLoops, divisor

SHORT = 64  # elements: a loop over fewer costs more than its work, see reduce_axes


def barrier_on_cpu(*arrays: jax.Array | None) -> tuple:
    """Put the arrays behind an optimization barrier on a CPU.

    XLA's CPU back-end then shares nothing computed from them with other loops. It fuses all
    operations on a row into one loop only if no other loop uses an intermediate result. It writes a
    shared one, even a cast, to memory, as large as x. Without the barrier batch norm in bfloat16
    takes 1.25 to 2.4 of Flax's time instead of 0.7 to 1.1. Two barriers around the same arrays are
    merged.
    """
    given = [a for a in arrays if a is not None]
    own = iter(_cpu_barrier()(*given))
    return tuple(None if a is None else next(own) for a in arrays)


def prevent_folding(low: jax.Array) -> jax.Array:
    """Return the low part of a mean, which no compiler takes for a constant.

    This holds on any platform. Where both parts of a mean are constants of the program, XLA in JAX
    0.7 to 0.10 computes ``(x - high) - low`` as ``x - (high + low)``, and that sum loses the low
    part: a mean of 10000000.5 becomes 10000000. The barrier is around one element for each group,
    so that the loop over x stays one.
    """
    return lax.optimization_barrier(low)


def end_of_sum(total: jax.Array, under_vmap: bool = False) -> jax.Array:
    """Return a sum so that XLA's CPU back-end adds up the right products under ``vmap``.

    In jaxlib 0.10.2, and in no release before or after it, a fused loop of the sum of ``x * t`` and
    of what reads the sum gives wrong numbers where x is broadcast along the first of three or more
    axes, as ``vmap`` does with what all examples share. Rounding to the precision that a number has
    changes no number, but ends the loop; without ``vmap`` layer norm would take 1.4 to 3.5 times as
    long. ``under_vmap`` says that the examples are an axis of the arrays already.
    """
    if jaxlib.__version__ != "0.10.2" or not jnp.issubdtype(total.dtype, jnp.floating):
        return total
    return _ends_of_sums()[under_vmap](total)[0]


def unknown_ones(shape: tuple[int, ...], dtype) -> jax.Array:
    """Return ones that XLA takes for any numbers, so that it multiplies by them."""
    return lax.optimization_barrier(jnp.ones(shape, dtype))


@cache
def _cpu_barrier() -> Callable:
    """Return a function of arrays that is the identity, and on a CPU a barrier.

    :func:`jax.lax.platform_dependent` would do, but it traces every branch each time: 1 ms.
    """
    from jax.interpreters import batching  # here: importing this library needs none of it

    primitive = _identity("jaxnorm_optimization_barrier", lax.optimization_barrier)
    batching.primitive_batchers[primitive] = lambda arrays, axes: (primitive.bind(*arrays), axes)
    return primitive.bind


@cache
def _ends_of_sums() -> tuple[Callable, Callable]:
    """Return two functions of arrays, the identity, and one that rounds on a CPU.

    The identity becomes the other one under ``vmap``.
    """
    from jax.interpreters import batching

    def rounded(arrays):
        kinds = [jnp.finfo(a.dtype) for a in arrays]
        pairs = zip(arrays, kinds, strict=True)
        return tuple(lax.reduce_precision(a, kind.nexp, kind.nmant) for a, kind in pairs)

    outside = _identity("jaxnorm_end_of_sum", tuple, in_derivatives=True)
    inside = _identity("jaxnorm_end_of_batched_sum", rounded, in_derivatives=True)
    for primitive in (outside, inside):
        batching.primitive_batchers[primitive] = lambda arrays, axes: (inside.bind(*arrays), axes)
    return outside.bind, inside.bind


def _identity(name: str, on_cpu: Callable, in_derivatives: bool = False):
    """Return the identity of arrays as a primitive, which on a CPU is another function.

    Derivatives pass through it, or through the primitive as well if ``in_derivatives``.
    """
    from jax.extend.core import Primitive
    from jax.interpreters import ad, mlir

    primitive = Primitive(name)
    primitive.multiple_results = True
    run = jax.jit(lambda *arrays: primitive.bind(*arrays))

    def derivative(arrays):
        if not in_derivatives:
            return list(arrays)
        return [a if isinstance(a, ad.Zero) else primitive.bind(a)[0] for a in arrays]

    # without this it would call itself under jax.disable_jit
    primitive.def_impl(jax.disable_jit(False)(run))
    primitive.def_abstract_eval(lambda *types: list(types))
    for function, platform in ((tuple, None), (on_cpu, "cpu")):
        lowering = mlir.lower_fun(
            lambda *arrays, function=function: function(arrays), multiple_results=True
        )
        mlir.register_lowering(primitive, lowering, platform=platform)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (
        primitive.bind(*primals),
        derivative(tangents),
    )
    ad.primitive_transposes[primitive] = lambda cotangents, *_: derivative(cotangents)
    return primitive


def without_trailing_ones(function: Callable) -> Callable:
    """Return ``function``, computed without trailing axes of size one.

    Its arguments are scalars and arrays with one element for every group. XLA's CPU back-end takes
    a loop for every trailing axis, even of size one: rms norm of (8, 1024, 512) takes 1.9 times as
    long.
    """

    @wraps(function)
    def call(*values):
        shapes = [a.shape for a in values if getattr(a, "ndim", 0)]
        trailing = lambda shape: len(list(takewhile(lambda size: size == 1, reversed(shape))))
        # only axes of size one that all arrays share are cut
        ones = min(map(trailing, shapes), default=0)
        if not ones or len(set(map(len, shapes))) > 1:
            return function(*values)
        cut = lambda a: a.reshape(a.shape[:-ones]) if getattr(a, "ndim", 0) else a
        results = function(*map(cut, values))
        return jax.tree.map(lambda a: a.reshape(*a.shape, *(1,) * ones), results)

    return call


def reduce_axes(
    values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum, under_vmap: bool = False
) -> jax.Array:
    """Sum along axes, or reduce them otherwise, one axis after the other.

    The order is from the last axis to the first, with a short last axis at the end. For all axes at
    once, XLA's CPU back-end adds each element to the sum of all before it (JAX 0.8: 6e-5 off for
    8000 equal ones). From the first axis on it would read memory in leaps, which takes 10 times as
    long.

    Neighbouring axes of no more than SHORT elements together are reduced at once: 7 x 7 positions
    at once take 0.75 of the time of batch and instance norm.
    """
    short = values.ndim - 1 if rough_product(*values.shape[-1:]) < SHORT else None
    parts: list[list[int]] = []
    for axis in sorted(axes, key=lambda axis: (axis == short, -axis)):
        together = (*parts[-1], axis) if parts and axis != short else ()
        if together and rough_product(*(values.shape[other] for other in together)) <= SHORT:
            parts[-1].append(axis)
        else:
            parts.append([axis])
    for part in parts:
        values = end_of_sum(by(values, tuple(part), keepdims=True), under_vmap)
        if len(parts) > 1:  # otherwise XLA merges the sums
            (values,) = barrier_on_cpu(values)
    return values


@dataclass(frozen=True)
class XlaTpuLoops(PlainLoops):
    """Loops as XLA's TPU back-end needs them."""

    def round_sum(self, total: jax.Array, dtype) -> jax.Array:
        """Return a sum in the dtype of a parameter.

        XLA moves the cast of a sum to its elements. Of elements that are bfloat16, and were cast
        before they were summed, it makes a sum in bfloat16, in a loop that reads all of them again.
        """
        return (lax.optimization_barrier(total) if total.dtype != dtype else total).astype(dtype)


@dataclass(frozen=True)
class XlaCpuLoops(PlainLoops):
    """Loops as XLA's CPU back-end needs them.

    By default they cost no digits. The further attributes, which core/plan.py sets, make them fast.

    Attributes:
      barriers: whether passes over x are compiled apart by optimization barriers, and results with
        one element for each group are computed before.
      merge_last_axis: whether loops take a split last axis as one merged axis.
      under_vmap: whether the first axis of the arrays is one of ``vmap``.
    """

    barriers: bool = False
    merge_last_axis: bool = False
    under_vmap: bool = False

    def batched(self, size: int) -> Self:
        return replace(super().batched(size), under_vmap=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of loops over x: split, except for a merged last axis."""
        reduction = self.spec.reduction
        if not self.merge_last_axis:
            return reduction.split_shape
        return (*reduction.split_shape[: -len(reduction.parts[-1])], reduction.shape[-1])

    def isolate(self, *arrays: jax.Array | None) -> tuple:
        return barrier_on_cpu(*arrays) if self.barriers else arrays

    def always_isolate(self, *arrays: jax.Array | None) -> tuple:
        return barrier_on_cpu(*arrays)

    def split(self, values: jax.Array) -> jax.Array:
        return values.reshape(self.shape)

    def broadcast_to_elements(self, values):
        """Broadcast to elements, with one element for each channel of a merged axis."""
        if values is None or not self.merge_last_axis:
            return values
        parts = self.spec.reduction.parts[-1]
        front = values.shape[: -len(parts)]
        if rough_product(*values.shape[len(front) :]) == 1:
            return values.reshape(*front, 1)
        return jnp.broadcast_to(values, (*front, *parts)).reshape(*front, self.shape[-1])

    def reduce(self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum) -> jax.Array:
        """Reduce the other axes first, then split a merged last axis and reduce it."""
        if self.merge_last_axis:
            first, parts = len(self.shape) - 1, self.spec.reduction.parts[-1]
            values = self.reduce_axes(values, tuple(axis for axis in axes if axis < first), by)
            values = values.reshape(*values.shape[:-1], *parts)
            axes = tuple(axis for axis in axes if axis >= first)
        return self.reduce_axes(values, axes, by)

    def reduce_axes(
        self, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum
    ) -> jax.Array:
        return reduce_axes(values, axes, by, self.under_vmap)

    def divide(self, total: jax.Array, count, nonconstant: jax.Array | None = None) -> jax.Array:
        """Divide so that the mean of equal elements is exact.

        A compiler replaces division by a constant with multiplication by the rounded reciprocal.
        The count of a mask that it knows is such a constant. A zero that is computed from
        ``nonconstant`` keeps the divisor from being one. The mean is also computed before the loop
        over x that reads it, see :meth:`compute_first`.
        """
        return divide_exactly(total, count, nonconstant)

    def per_group(self, function: Callable) -> Callable:
        return without_trailing_ones(function)

    def compute_first(self, values: jax.Array) -> jax.Array:
        """Compute values before the loop over x that reads them.

        XLA's CPU back-end moves an operation that costs less than a division into a loop that reads
        it, together with its operands, and repeats it for each element. Without this and
        :meth:`divide` batch norm in bfloat16 takes 1.8 times as long, switchable norm 1.5 times.
        """
        return divide_exactly(values, 1.0, values)

    def compute_first_if_isolated(self, values: jax.Array) -> jax.Array:
        return self.compute_first(values) if self.barriers else values

    def as_factor(self, where: jax.Array) -> jax.Array:
        """Return a mask as int8 in a fused loop over rows; weights stay as they are.

        XLA makes a selection of a product by a mask. From JAX 0.9 on its CPU back-end has no
        selection in such a loop: layer norm with a mask of single elements takes 2.5 times as long
        with JAX 0.12.
        """
        if not self.recompute or where.dtype != jnp.bool_ or jax.__version_info__ < (0, 9):
            return where
        return barrier_on_cpu(where.astype(jnp.int8))[0]


@without_trailing_ones
def divide_exactly(total: jax.Array, count, nonconstant: jax.Array | None) -> jax.Array:
    """Return ``total / count``, see :meth:`XlaCpuLoops.divide`."""
    if nonconstant is None:
        return total / (divisor(total, count) + 0)
    # |a| is never negative, so this is 0 for any number, and no compiler folds it
    zero = jnp.minimum(jnp.abs(lax.stop_gradient(nonconstant)), 0).astype(total.dtype)
    return total / (divisor(total, count) + zero)
