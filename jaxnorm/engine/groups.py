"""Groups of elements that share statistics: sums and means over each, its frame, and 1 / sqrt(var +
epsilon) there.

    u = x / 2**power - pivot

In it elements are small, so that no statistics lose digits or leave the range. No result depends on
the frame: it is constant under differentiation. A group is what the reduction axes span or, where
there are places, what ids name along the first of them.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.engine.collectives import across, number_of_devices
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.segments import Places
from jaxnorm.engine.spec import Operands, Spec


def split(loops: PlainLoops, values: jax.Array, dtype) -> jax.Array:
    """Values of the shape of x in the dtype of the statistics, split as loops over x take them."""
    return loops.split(values.astype(dtype))


def spread_stats(loops: PlainLoops, stats, places: Places | None):
    """Statistics where they are combined with elements; to each position those of its segment, and
    NaN where it is in none.
    """
    if places is None or stats is None:
        return loops.spread(stats)
    return loops.spec.segments.spread(stats, places)


def over_groups(
    loops: PlainLoops,
    values: jax.Array,
    places: Places | None,
    by: Callable = jnp.sum,
    within: Callable = jax.ops.segment_sum,
) -> jax.Array:
    """Reduces all reduction axes with ``by``, but that of segments with ``within``, in each of
    them.
    """
    if places is None:
        return loops.reduce(values, loops.spec.axes, by)
    whole = loops.reduce_axes(values, loops.spec.whole_axes, by)
    return loops.spec.segments.reduce(whole, places, within)


def hide(values: jax.Array, where: jax.Array | None) -> jax.Array:
    """0, whatever stands there, instead of what is masked out."""
    if where is None:
        return values
    return jnp.where(where if where.dtype == jnp.bool_ else where > 0, values, 0)


def weigh(loops: PlainLoops, values: jax.Array, where: jax.Array | None) -> jax.Array:
    """The values, in loop shape, times their weights, 0 or 1 by a mask; as they are where it hides
    whole groups, which are 0.
    """
    spec = loops.spec
    if where is None or (
        where.dtype == jnp.bool_ and spec.axis_name is None and spec.is_of_groups(where)
    ):
        return values
    return values * loops.spread(loops.as_factor(where)).astype(values.dtype)


def hide_split(spec: Spec, values: jax.Array, where: jax.Array | None) -> jax.Array:
    """:func:`hide` in an array of the shape of x; its residual is the mask as it is given."""
    if where is None:
        return values
    return jax.checkpoint(hide, prevent_cse=False)(
        values.reshape(spec.reduction.split_shape), where
    ).reshape(values.shape)


def masked(spec: Spec, operands: Operands, norm: Callable) -> tuple:
    """Output and Stats by ``norm``, where both x and output are 0 in what is masked out, and their
    gradients with them.

    So ``norm`` has only to weigh.
    """
    x, where, *_ = operands
    y, stats = norm(operands._replace(x=hide_split(spec, x, where)))
    return hide_split(spec, y, where), stats


def in_segments(spec: Spec, where: jax.Array | None, places: Places | None) -> Any:
    """The mask or weights, and 0 of what is in no segment."""
    if places is None:
        return where
    inside = spec.segments.inside(places, len(spec.reduction.split_shape))
    return inside if where is None else jnp.where(inside, where, jnp.zeros_like(where))


def total_weight(spec: Spec, frame: "Frame") -> jax.Array | float:
    """How many elements, or how much weight, each group has: a number without a mask, else an
    array.
    """
    if frame.n is not None:
        return frame.n
    found = spec.reduction.group_size * number_of_devices(spec.axis_name)
    return float(found) if isinstance(found, int) else jnp.asarray(found, float)


def count_elements(loops: PlainLoops, where: jax.Array | None, places: Places | None) -> jax.Array:
    """How many elements of each group there are on this device, or a boolean mask leaves there."""
    if where is None:
        ones = jnp.ones((1,) * len(loops.spec.reduction.split_shape), jnp.int32)
        return over_mask(loops, ones, places)
    return over_mask(loops, where.astype(jnp.int32), places)


def over_mask(loops: PlainLoops, where: jax.Array, places: Places | None) -> jax.Array:
    """The sum over each group of a mask or of weights, in their dtype, without a loop over x."""
    spec = loops.spec
    repeated = [
        spec.reduction.split_shape[axis] for axis in spec.whole_axes if where.shape[axis] == 1
    ]
    by = partial(jnp.sum, dtype=where.dtype)
    sums = loops.reduce_axes(where, spec.whole_axes, by)
    sums = sums if places is None else spec.segments.reduce(sums, places, jax.ops.segment_sum)
    return sums * jnp.asarray(math.prod(repeated), where.dtype)


def total(loops: PlainLoops, values: jax.Array, frame: "Frame") -> jax.Array:
    """The sum over each group, by weight, of values that are 0 in what is masked out."""
    where = frame.where
    weights = None if where is None or where.dtype == jnp.bool_ else where
    sums = over_groups(loops, weigh(loops, values, weights), frame.places)
    return across(lax.psum, sums, loops.spec.axis_name)


def mean(
    loops: PlainLoops, values: jax.Array, frame: "Frame", nonconstant: jax.Array | None = None
) -> jax.Array:
    """The mean over each group, by weight; 0 of an empty one. With ``nonconstant`` it is exact for
    a constant, see :meth:`XlaCpuLoops.divide`.
    """
    weight = total_weight(loops.spec, frame)
    return loops.divide(total(loops, values, frame), weight, nonconstant)


class Frame(NamedTuple):
    """Constants of each group: its weight, the exponent of the 2**power that x is divided by, a
    number near the mean; and its elements.
    """

    # None where every element counts, and no trace makes an array of their number
    n: jax.Array | float | None
    power: jax.Array | None
    pivot: jax.Array | None
    where: jax.Array | None = None  # mask or weights
    places: Places | None = None  # of segments


def find_frame(
    loops: PlainLoops,
    x: jax.Array,
    where: jax.Array | None,
    places: Places | None = None,
    epsilon: jax.Array | None = None,
) -> Frame:
    """The constants in which the elements of each group are small, and a traced epsilon does not
    leave the range.
    """
    x, lowest = lax.stop_gradient(x), loops.spec.lowest_power(x.dtype, epsilon)
    frame = Frame(None, None, None, where, places)
    if where is not None or places is not None:
        weight = _weight(loops, where, places, real_dtype(compute_dtype(x.dtype)))
        frame = frame._replace(n=weight)
    if lowest is not None:
        frame = frame._replace(power=_find_power(loops, x, places, lowest))
    if not loops.spec.centered:
        return frame
    sums = total(loops, elements(loops, x, frame), frame)
    return frame._replace(pivot=loops.divide(sums, total_weight(loops.spec, frame), sums))


def _weight(loops: PlainLoops, where: jax.Array | None, places: Places | None, dtype) -> jax.Array:
    if where is None or where.dtype == jnp.bool_:
        weight = count_elements(loops, where, places).astype(dtype)
    else:
        weight = over_mask(loops, where.astype(dtype), places)
    return across(lax.psum, weight, loops.spec.axis_name)


def _find_power(loops: PlainLoops, x: jax.Array, places: Places | None, lowest) -> jax.Array:
    """The exponent of the largest element of each group, so that dividing by 2**power is exact and
    bounds it by 2.
    """
    spec = loops.spec
    (own_x,) = loops.alone(x)
    values = split(loops, own_x, compute_dtype(x.dtype))
    size = (
        jnp.maximum(jnp.abs(values.real), jnp.abs(values.imag))
        if jnp.iscomplexobj(values)
        else jnp.abs(values)
    )
    by = partial(jnp.max, initial=0)
    largest = over_groups(loops, size, places, by, jax.ops.segment_max)
    if spec.power_axes:
        largest = jnp.max(largest, spec.power_axes, keepdims=True, initial=0)
    return power_of_elements(across(lax.pmax, largest, spec.axis_name), lowest)


def power_of_elements(largest: jax.Array, lowest) -> jax.Array:
    """The exponent of the largest element, within the limits of its dtype."""
    limit = jnp.finfo(largest.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, jnp.maximum(lowest, -limit), limit).astype(
        jnp.int8 if limit < 128 else jnp.int16
    )


def elements(
    loops: PlainLoops, x: jax.Array, frame: Frame, offset: jax.Array | None = None
) -> jax.Array:
    """``u``, or ``u - offset``, split."""
    power = inverse_power(loops, frame.power, compute_dtype(x.dtype))
    stats = [spread_stats(loops, a, frame.places) for a in (power, frame.pivot, offset)]
    x, scale, pivot, offset = loops.own(loops.split(x), *stats)
    u = scaled(loops, x, scale)
    u = u if pivot is None else u - pivot
    return u if offset is None else u - offset


def scaled(loops: PlainLoops, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """x times an :func:`inverse_power`, split."""
    u = split(loops, x, compute_dtype(x.dtype))
    return u if scale is None else u * scale.astype(u.dtype)


def scale_down(u: jax.Array, power: jax.Array | None) -> jax.Array:
    """``u / 2**power``"""
    return (
        u if power is None else u * power_of_two(-power.astype(jnp.int32), u.dtype).astype(u.dtype)
    )


def inverse_power(loops: PlainLoops, power: jax.Array | None, dtype) -> jax.Array | None:
    """``1 / 2**power``, for a loop over x."""
    if power is None:
        return None
    return loops.before_own(power_of_two(-power.astype(jnp.int32), dtype))


def power_of_two(exponent: jax.Array, dtype) -> jax.Array:
    """2**exponent, where that is a normal number, made from its bits, so that a loop over x need
    not compute powers.
    """
    info = jnp.finfo(real_dtype(dtype))
    bits = jnp.int64 if info.bits == 64 else jnp.int32
    return lax.bitcast_convert_type(
        (exponent.astype(bits) + (info.maxexp - 1)) << info.nmant, info.dtype
    )


def rstd(loops: PlainLoops, frame: Frame, var: jax.Array) -> jax.Array:
    """1 / sqrt(var + epsilon), in the units of the frame."""
    spec = loops.spec
    epsilon = scaled_epsilon(spec, frame, var.dtype)
    return loops.per_group(partial(_rstd, spec))(var, epsilon, total_weight(spec, frame))


def scaled_epsilon(spec: Spec, frame: Frame, dtype) -> jax.Array:
    """epsilon in the units of the frame, and 0 only if it is 0."""
    info = jnp.finfo(dtype)
    if spec.epsilon == 0 or frame.power is None:
        return jnp.asarray(max(spec.epsilon, float(info.tiny)) if spec.epsilon else 0, dtype)
    fraction, exponent = math.frexp(spec.epsilon)
    exponents = exponent - spec.power_of_epsilon * frame.power.astype(jnp.int32)
    return fraction * power_of_two(jnp.maximum(exponents, info.minexp + 1), dtype)


def inverse_root(var: jax.Array, epsilon, *, positive: bool, epsilon_in: str = "var") -> jax.Array:
    """1 / sqrt(var + epsilon) or 1 / (sqrt(var) + epsilon); 0 where that would divide by zero,
    which a positive epsilon rules out.
    """
    in_var = epsilon_in == "var"
    total = (var if in_var else _sqrt(var)) + epsilon
    # no step is infinite: jax_debug_infs asks
    safe = total if positive else jnp.where(total == 0, 1, total)
    root = lax.rsqrt(safe) if in_var else 1 / safe
    return root if positive else jnp.where(total == 0, 0, root)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rstd(spec: Spec, var: jax.Array, epsilon: jax.Array, count) -> jax.Array:
    """:func:`inverse_root` of the variance that the spec asks for."""
    return inverse_root(
        var * _unbias(spec, var, count),
        epsilon,
        positive=spec.epsilon > 0,
        epsilon_in=spec.epsilon_in,
    )


@_rstd.defjvp
def _rstd_jvp(spec, primals, tangents):
    """d r = -1/2 q r r d var, where q is r or, for sqrt(var), 1 / sqrt(var), and 0 where there is
    no spread.
    """
    var, epsilon, count = primals
    r, unbias = _rstd(spec, var, epsilon, count), _unbias(spec, var, count)
    q = r
    if spec.epsilon_in == "std":
        var = var * unbias
        q = jnp.where(var > 0, lax.rsqrt(jnp.where(var > 0, var, 1)), 0)
    # in turn: r**3 underflows for data of size 1e13
    slope = ((-0.5 * tangents[0] * (q * unbias)) * r) * r
    # in the transpose r**2 comes first, and may be Inf
    return r, slope if spec.correction == 0 else jnp.where(unbias == 0, 0, slope)


def _sqrt(var: jax.Array) -> jax.Array:
    """The root, with a finite derivative at 0: JAX before 0.12 loses the rule above in loops."""
    return jnp.where(var == 0, 0, jnp.sqrt(jnp.where(var == 0, 1, var)))


def _unbias(spec: Spec, var, count):
    if spec.correction == 0:
        return 1
    count = jnp.asarray(count, var.dtype)
    return jnp.where(
        count > spec.correction,
        count / jnp.where(count > spec.correction, count - spec.correction, 1),
        0,
    )
