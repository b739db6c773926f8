"""Groups of elements that share statistics: sums and means over each, its frame, and 1 / sqrt(var +
epsilon) there.

    u = x / 2**power - pivot

In it elements are small, so that no statistics lose digits or leave the range. No result depends on
the frame: it is constant under differentiation. A group is what the reduction axes span or, where
there are places, what ids name along the first of them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.axes import rough_product
from jaxnorm.dtypes import compute_dtype, real_dtype
from jaxnorm.engine.collectives import across, number_of_devices
from jaxnorm.engine.segments import Places
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.engine.xla import (
    as_factor,
    before_loops,
    divide,
    reduce_axes,
    separate,
    without_trailing_ones,
)


def for_own_loop(spec: Spec, *arrays: jax.Array | None) -> tuple:
    """The same arrays behind one barrier, where passes are separate: a loop over them shares
    nothing with the next.
    """
    return separate(*arrays) if spec.separate else arrays


def split(spec: Spec, values: jax.Array, dtype) -> jax.Array:
    """Values of the shape of x in the dtype of the statistics, split as loops over x take them."""
    return values.astype(dtype).reshape(spec.loop_shape)


def spread(spec: Spec, values):
    """Statistics or parameters as they broadcast in a loop over x: with one element for each
    channel where the last axis is split.
    """
    if values is None or not spec.joined:
        return values
    front, parts = values.shape[: -len(spec.reduction.parts[-1])], spec.reduction.parts[-1]
    if rough_product(*values.shape[len(front) :]) == 1:
        return values.reshape(*front, 1)
    return jnp.broadcast_to(values, (*front, *parts)).reshape(*front, spec.loop_shape[-1])


def spread_stats(spec: Spec, stats, places: Places | None):
    """Statistics where they are combined with elements; to each position those of its segment, and
    NaN where it is in none.
    """
    return (
        spread(spec, stats)
        if places is None or stats is None
        else spec.segments.spread(stats, places)
    )


def reduce_groups(
    spec: Spec, values: jax.Array, axes: tuple[int, ...], by: Callable = jnp.sum
) -> jax.Array:
    """The sum along split axes, or another reduction, of values in loop shape; a joined last axis
    is split after the others are reduced.
    """
    if spec.joined:
        first, parts = len(spec.loop_shape) - 1, spec.reduction.parts[-1]
        values = reduce_axes(values, tuple(axis for axis in axes if axis < first), by)
        values, axes = (
            values.reshape(*values.shape[:-1], *parts),
            tuple(axis for axis in axes if axis >= first),
        )
    return reduce_axes(values, axes, by)


def over_groups(
    spec: Spec,
    values: jax.Array,
    places: Places | None,
    by: Callable = jnp.sum,
    within: Callable = jax.ops.segment_sum,
) -> jax.Array:
    """Reduces all reduction axes with ``by``, but that of segments with ``within``, in each of
    them.
    """
    if places is None:
        return reduce_groups(spec, values, spec.axes, by)
    return spec.segments.reduce(reduce_axes(values, spec.whole_axes, by), places, within)


def hide(values: jax.Array, where: jax.Array | None) -> jax.Array:
    """0, whatever stands there, instead of what is masked out."""
    if where is None:
        return values
    return jnp.where(where if where.dtype == jnp.bool_ else where > 0, values, 0)


def weigh(spec: Spec, values: jax.Array, where: jax.Array | None) -> jax.Array:
    """The values, in loop shape, times their weights, 0 or 1 by a mask; as they are where it hides
    whole groups, which are 0.
    """
    if where is None or (
        where.dtype == jnp.bool_ and spec.axis_name is None and spec.is_of_groups(where)
    ):
        return values
    where = as_factor(where) if spec.recompute else where
    return values * spread(spec, where).astype(values.dtype)


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


def count_elements(spec: Spec, where: jax.Array | None, places: Places | None) -> jax.Array:
    """How many elements of each group there are on this device, or a boolean mask leaves there."""
    ones = (
        jnp.ones((1,) * len(spec.reduction.split_shape), jnp.int32)
        if where is None
        else where.astype(jnp.int32)
    )
    return over_mask(spec, ones, places)


def over_mask(spec: Spec, where: jax.Array, places: Places | None) -> jax.Array:
    """The sum over each group of a mask or of weights, in their dtype, without a loop over x."""
    repeated = [
        spec.reduction.split_shape[axis] for axis in spec.whole_axes if where.shape[axis] == 1
    ]
    by = partial(jnp.sum, dtype=where.dtype)
    return over_groups(replace(spec, joined=False), where, places, by) * jnp.asarray(
        math.prod(repeated), where.dtype
    )


def total(spec: Spec, values: jax.Array, frame: "Frame") -> jax.Array:
    """The sum over each group, by weight, of values that are 0 in what is masked out."""
    weights = None if frame.where is None or frame.where.dtype == jnp.bool_ else frame.where
    return across(
        lax.psum, over_groups(spec, weigh(spec, values, weights), frame.places), spec.axis_name
    )


def mean(
    spec: Spec, values: jax.Array, frame: "Frame", nonconstant: jax.Array | None = None
) -> jax.Array:
    """The mean over each group, by weight; 0 of an empty one. With ``nonconstant`` it is exact for
    a constant, see :func:`divide`.
    """
    return divide(total(spec, values, frame), total_weight(spec, frame), nonconstant)


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
    spec: Spec,
    x: jax.Array,
    where: jax.Array | None,
    places: Places | None = None,
    epsilon: jax.Array | None = None,
) -> Frame:
    """The constants in which the elements of each group are small, and a traced epsilon does not
    leave the range.
    """
    x, lowest = lax.stop_gradient(x), spec.lowest_power(x.dtype, epsilon)
    frame = Frame(None, None, None, where, places)
    if where is not None or places is not None:
        frame = frame._replace(n=_weight(spec, where, places, real_dtype(compute_dtype(x.dtype))))
    if lowest is not None:
        frame = frame._replace(power=_find_power(spec, x, places, lowest))
    if not spec.centered:
        return frame
    sums = total(spec, elements(spec, x, frame), frame)
    return frame._replace(pivot=divide(sums, total_weight(spec, frame), sums))


def _weight(spec: Spec, where: jax.Array | None, places: Places | None, dtype) -> jax.Array:
    if where is None or where.dtype == jnp.bool_:
        return across(lax.psum, count_elements(spec, where, places).astype(dtype), spec.axis_name)
    return across(lax.psum, over_mask(spec, where.astype(dtype), places), spec.axis_name)


def _find_power(spec: Spec, x: jax.Array, places: Places | None, lowest) -> jax.Array:
    """The exponent of the largest element of each group, so that dividing by 2**power is exact and
    bounds it by 2.
    """
    values = split(spec, separate(x)[0], compute_dtype(x.dtype))
    size = (
        jnp.maximum(jnp.abs(values.real), jnp.abs(values.imag))
        if jnp.iscomplexobj(values)
        else jnp.abs(values)
    )
    largest = over_groups(spec, size, places, partial(jnp.max, initial=0), jax.ops.segment_max)
    largest = (
        jnp.max(largest, spec.power_axes, keepdims=True, initial=0) if spec.power_axes else largest
    )
    return power_of_elements(across(lax.pmax, largest, spec.axis_name), lowest)


def power_of_elements(largest: jax.Array, lowest) -> jax.Array:
    """The exponent of the largest element, within the limits of its dtype."""
    limit = jnp.finfo(largest.dtype).maxexp - 2
    exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.clip(exponent, jnp.maximum(lowest, -limit), limit).astype(
        jnp.int8 if limit < 128 else jnp.int16
    )


def elements(spec: Spec, x: jax.Array, frame: Frame, offset: jax.Array | None = None) -> jax.Array:
    """``u``, or ``u - offset``, split."""
    stats = (inverse_power(spec, frame.power, compute_dtype(x.dtype)), frame.pivot, offset)
    x, scale, pivot, offset = for_own_loop(
        spec, x.reshape(spec.loop_shape), *(spread_stats(spec, a, frame.places) for a in stats)
    )
    u = scaled(spec, x, scale)
    u = u if pivot is None else u - pivot
    return u if offset is None else u - offset


def scaled(spec: Spec, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """x times an :func:`inverse_power`, split."""
    u = split(spec, x, compute_dtype(x.dtype))
    return u if scale is None else u * scale.astype(u.dtype)


def scale_down(u: jax.Array, power: jax.Array | None) -> jax.Array:
    """``u / 2**power``"""
    return (
        u if power is None else u * power_of_two(-power.astype(jnp.int32), u.dtype).astype(u.dtype)
    )


def inverse_power(spec: Spec, power: jax.Array | None, dtype) -> jax.Array | None:
    """``1 / 2**power``, for a loop over x."""
    if power is None:
        return None
    found = power_of_two(-power.astype(jnp.int32), dtype)
    return before_loops(found) if spec.separate else found


def power_of_two(exponent: jax.Array, dtype) -> jax.Array:
    """2**exponent, where that is a normal number, made from its bits, so that a loop over x need
    not compute powers.
    """
    info = jnp.finfo(real_dtype(dtype))
    bits = jnp.int64 if info.bits == 64 else jnp.int32
    return lax.bitcast_convert_type(
        (exponent.astype(bits) + (info.maxexp - 1)) << info.nmant, info.dtype
    )


def rstd(spec: Spec, frame: Frame, var: jax.Array) -> jax.Array:
    """1 / sqrt(var + epsilon), in the units of the frame."""
    return without_trailing_ones(partial(_rstd, spec))(
        var, scaled_epsilon(spec, frame, var.dtype), total_weight(spec, frame)
    )


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
