"""Workarounds in plain JAX for compilers that would cost digits, time or memory; the formulas are
the same without them.
"""

from collections.abc import Callable
from functools import cache, wraps
from itertools import takewhile

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.axes import rough_product
from jaxnorm.dtypes import real_dtype

SHORT = 64  # elements: a loop over fewer costs more than what it does


def separate(*arrays: jax.Array | None) -> tuple:
    """The same arrays behind a barrier, so that XLA's CPU back-end shares nothing computed from
    them with other loops.

    It fuses all operations on a row into one loop only if no other loop uses an intermediate
    result. A shared one, even a cast, it writes to memory, as large as x: without this batch norm
    in bfloat16 takes 1.25 to 2.4 of Flax's time instead of 0.7 to 1.1. Two barriers around the same
    arrays are merged.
    """
    own = iter(
        _identity("separate", lax.optimization_barrier, tuple)(
            *(a for a in arrays if a is not None)
        )
    )
    return tuple(None if a is None else next(own) for a in arrays)


def hidden_from_folding(low: jax.Array) -> jax.Array:
    """The low part of a mean, which no compiler takes for a constant, on any platform.

    Where both parts of a mean are constants of the program, XLA in JAX 0.7 to 0.10 computes ``(x -
    high) - low`` as ``x - (high + low)``, and the low part is lost in that sum: a mean of
    10000000.5 becomes 10000000. The barrier is around one element for each group, so that the loop
    over x stays one.
    """
    return lax.optimization_barrier(low)


def as_factor(where: jax.Array) -> jax.Array:
    """A mask as int8, for a product in a fused loop over rows; weights as they are.

    XLA makes a selection of a product by a mask, and from JAX 0.9 on its CPU back-end has none in
    such a loop: layer norm beside a mask of single elements takes 2.5 times as long with JAX 0.12.
    """
    if where.dtype != jnp.bool_ or jax.__version_info__ < (0, 9):
        return where
    return separate(where.astype(jnp.int8))[0]


def without_last_bits(quotient: jax.Array) -> jax.Array:
    """The quotient, which a GPU's float32 division leaves up to two units in the last place off,
    there without those bits.

    So the mean of equal numbers of few digits is that number, as it is with a division that is
    rounded correctly.
    """
    return _identity("without_last_bits", list, _without_last_bits)(quotient)[0]


def _without_last_bits(arrays) -> list:
    def shortened(a):
        if jnp.iscomplexobj(a):
            return lax.complex(shortened(a.real), shortened(a.imag))
        info = jnp.finfo(a.dtype)
        return lax.reduce_precision(a, info.nexp, info.nmant - 2) if info.bits == 32 else a

    return list(map(shortened, arrays))


@cache
def _identity(name: str, on_cpu: Callable, elsewhere: Callable) -> Callable:
    """A callable of arrays, for derivatives the identity, which is one function of their list on a
    CPU and another elsewhere.

    As :func:`jax.lax.platform_dependent`, which traces every branch each time: 1 ms.
    """
    from jax.extend.core import Primitive  # here, since importing this library does without these
    from jax.interpreters import ad, batching, mlir

    primitive = Primitive(f"jaxnorm_{name}")
    primitive.multiple_results = True
    run = jax.jit(lambda *arrays: primitive.bind(*arrays))

    primitive.def_impl(jax.disable_jit(False)(run))  # or it would call itself under jax.disable_jit
    primitive.def_abstract_eval(lambda *types: list(types))
    for function, platform in ((elsewhere, None), (on_cpu, "cpu")):
        lowering = mlir.lower_fun(
            lambda *arrays, function=function: function(arrays), multiple_results=True
        )
        mlir.register_lowering(primitive, lowering, platform=platform)
    batching.primitive_batchers[primitive] = lambda arrays, axes: (primitive.bind(*arrays), axes)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (
        primitive.bind(*primals),
        list(tangents),
    )
    ad.primitive_transposes[primitive] = lambda cotangents, *_: list(cotangents)
    return primitive.bind


def reduce_axes(values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum) -> jax.Array:
    """The sum along axes, or another reduction: one axis at a time, from the last to the first, but
    a short last axis at the end.

    Of all at once XLA's CPU back-end adds each element to the sum of all before it (JAX 0.8: 6e-5
    off for 8000 equal ones), and from the first axis on it would read memory in leaps, which takes
    10 times as long. So one follows the other, but for neighbours of no more than SHORT elements
    together: 7 x 7 positions at once take 0.75 of the time of batch and instance norm.
    """
    short = values.ndim - 1 if rough_product(*values.shape[-1:]) < SHORT else None
    parts: list[list[int]] = []
    for axis in sorted(axes, key=lambda axis: (axis == short, -axis)):
        if (
            parts
            and axis != short
            and rough_product(*(values.shape[other] for other in (*parts[-1], axis))) <= SHORT
        ):
            parts[-1].append(axis)
        else:
            parts.append([axis])
    for part in parts:
        values = by(values, tuple(part), keepdims=True)
        if len(parts) > 1:  # or XLA merges the sums
            (values,) = separate(values)
    return values


def without_trailing_ones(function: Callable) -> Callable:
    """``function`` of scalars and arrays with one element for every group, computed without the
    last axes where those have size one.

    XLA's CPU back-end takes a loop for every last axis, be it of size one: rms norm of (8, 1024,
    512) takes 1.9 times as long.
    """

    @wraps(function)
    def call(*values):
        shapes = [a.shape for a in values if getattr(a, "ndim", 0)]
        ones = min(
            (len(list(takewhile(lambda size: size == 1, reversed(shape)))) for shape in shapes),
            default=0,
        )
        if not ones or len(set(map(len, shapes))) > 1:
            return function(*values)
        results = function(
            *(a.reshape(a.shape[:-ones]) if getattr(a, "ndim", 0) else a for a in values)
        )
        return jax.tree.map(lambda a: a.reshape(*a.shape, *(1,) * ones), results)

    return call


@without_trailing_ones
def divide(total: jax.Array, count, nonconstant: jax.Array | None = None) -> jax.Array:
    """``total / count``; 0 for an empty group.

    A compiler replaces division by a constant, be it the count of a mask that it knows, with
    multiplication by the rounded reciprocal. A zero that is computed from ``nonconstant``, any
    array with one element for each group, keeps the divisor from being a constant. So the mean of
    equal elements is exact. It is also computed before the loop over x that reads it, see
    :func:`before_loops`.
    """
    zero = (
        0
        if nonconstant is None
        else jnp.minimum(jnp.abs(lax.stop_gradient(nonconstant)), 0).astype(total.dtype)
    )
    if isinstance(count, float):
        divisor = jnp.asarray(count if count > 0 else 1, total.dtype)
    else:
        count = jnp.asarray(count, real_dtype(total.dtype))
        divisor = jnp.where(count > 0, count, 1).astype(total.dtype)
    return total / (divisor + zero)


def before_loops(values: jax.Array) -> jax.Array:
    """The same values, with one element for each group, computed before the loops over x that read
    them.

    XLA's CPU back-end moves what costs less than a division into such a loop, with all that it is
    computed from, and repeats it for each element: without this and :func:`divide` batch norm in
    bfloat16 takes 1.8 times as long, switchable norm 1.5 times.
    """
    return divide(values, 1.0, values)
