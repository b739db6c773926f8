"""Groups of elements that share statistics: sums, means and 1 / sqrt(var + epsilon) of each.

    u = x / 2**exponent - shift

Each group has a scale exponent and a shift. They make its elements small, so that no statistics
lose digits or leave the range. No result depends on them: they are constants under
differentiation. The reduction axes span a group. With scatter indices, ids name the groups
along the first of these axes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.dtypes import compute_dtype
from jaxnorm.engine.collectives import across, number_of_devices
from jaxnorm.engine.exponents import (
    inverse_scale,
    scaled,
    scaled_epsilon,
)
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.segments import ScatterIndices
from jaxnorm.engine.spec import Operands, Spec


def split(loops: PlainLoops, values: jax.Array, dtype) -> jax.Array:
    """Cast values of the shape of x to the dtype of the statistics and split them for loops."""
    return loops.split(values.astype(dtype))


def broadcast_stats(loops: PlainLoops, stats, scatter_indices: ScatterIndices | None):
    """Broadcast statistics to the elements that they are combined with.

    With segments each position receives the statistics of its segment, and NaN if it is in none.
    """
    if scatter_indices is None or stats is None:
        return loops.broadcast_to_elements(stats)
    return loops.spec.segments.broadcast_to_positions(stats, scatter_indices)


def over_groups(
    loops: PlainLoops,
    values: jax.Array,
    scatter_indices: ScatterIndices | None,
    by: Callable = jnp.sum,
    within: Callable = jax.ops.segment_sum,
) -> jax.Array:
    """Reduce each group along all reduction axes with ``by``.

    Along the axis of segments, ``within`` reduces the positions of each segment.
    """
    if scatter_indices is None:
        return loops.reduce(values, loops.spec.axes, by)
    whole = loops.reduce_axes(values, loops.spec.whole_axes, by)
    return loops.spec.segments.reduce(whole, scatter_indices, within)


def mask_fill(values: jax.Array, where: jax.Array | None) -> jax.Array:
    """Replace masked elements with 0, whatever their value is."""
    if where is None:
        return values
    return jnp.where(where if where.dtype == jnp.bool_ else where > 0, values, 0)


def apply_weights(loops: PlainLoops, values: jax.Array, where: jax.Array | None) -> jax.Array:
    """Multiply the values, split for loops, by their weights, or by 0 and 1 for a mask.

    The values stay as they are where a mask covers whole groups: these are 0 already.
    """
    spec = loops.spec
    if where is None or (
        where.dtype == jnp.bool_ and spec.axis_name is None and spec.treats_groups_alike(where)
    ):
        return values
    return values * loops.broadcast_to_elements(loops.as_factor(where)).astype(values.dtype)


def mask_fill_split(spec: Spec, values: jax.Array, where: jax.Array | None) -> jax.Array:
    """Apply :func:`mask_fill` to an array of the shape of x.

    The backward pass stores the mask as it was given, and not as large as x.
    """
    if where is None:
        return values
    return jax.checkpoint(mask_fill, prevent_cse=False)(
        values.reshape(spec.reduction.split_shape), where
    ).reshape(values.shape)


def masked(spec: Spec, operands: Operands, norm: Callable) -> tuple:
    """Run ``norm`` with masked elements of x at 0, and set these elements of the output to 0.

    Their gradients are then 0 too. So ``norm`` only has to apply weights.
    """
    x, where, *_ = operands
    y, stats = norm(operands._replace(x=mask_fill_split(spec, x, where)))
    return mask_fill_split(spec, y, where), stats


def in_segments(spec: Spec, where: jax.Array | None, scatter_indices: ScatterIndices | None) -> Any:
    """Return the mask or weights, with 0 for positions that are in no segment."""
    if scatter_indices is None:
        return where
    inside = spec.segments.inside(scatter_indices, len(spec.reduction.split_shape))
    return inside if where is None else jnp.where(inside, where, jnp.zeros_like(where))


def total_weight(spec: Spec, scaling: "Scaling") -> jax.Array | float:
    """Return the number of elements of each group, or their total weight.

    It is a number without a mask, else an array.
    """
    if scaling.n is not None:
        return scaling.n
    found = spec.reduction.group_size * number_of_devices(spec.axis_name)
    return float(found) if isinstance(found, int) else jnp.asarray(found, float)


def total(loops: PlainLoops, values: jax.Array, scaling: "Scaling") -> jax.Array:
    """Sum values over each group, by weight; masked values must be 0 already."""
    where = scaling.where
    # a mask needs no product: the values are 0 already
    weights = None if where is None or where.dtype == jnp.bool_ else where
    sums = over_groups(loops, apply_weights(loops, values, weights), scaling.scatter_indices)
    return across(lax.psum, sums, loops.spec.axis_name)


def mean(
    loops: PlainLoops, values: jax.Array, scaling: "Scaling", nonconstant: jax.Array | None = None
) -> jax.Array:
    """Return the mean over each group, by weight; it is 0 for an empty group.

    ``nonconstant`` keeps the compiler from rounding the division, see
    :meth:`~jaxnorm.engine.xla.XlaCpuLoops.divide`.
    """
    weight = total_weight(loops.spec, scaling)
    return loops.divide(total(loops, values, scaling), weight, nonconstant)


class Scaling(NamedTuple):
    """The shift and scale exponent of each group, with its weight and its elements.

    Attributes:
      n: total weight; None where every element counts, and no trace makes an array of their number.
      exponent: the scale exponent; x is divided by 2**exponent. It is an int where all groups have
        one that does not depend on x.
      shift: a number near the mean, which is subtracted.
      where: mask or weights.
      scatter_indices: where the positions of segments are added up, see
        :class:`~jaxnorm.engine.segments.Segments`.
      estimates: low part of the mean and variance, where they were found with the exponent.
    """

    n: jax.Array | float | None
    exponent: Any
    shift: jax.Array | None
    where: jax.Array | None = None
    scatter_indices: ScatterIndices | None = None
    estimates: tuple[jax.Array, jax.Array] | None = None


def elements(
    loops: PlainLoops, x: jax.Array, scaling: Scaling, low_mean: jax.Array | None = None
) -> jax.Array:
    """Return ``u``, or ``u - low_mean``, split for loops."""
    exponent = inverse_scale(loops, scaling.exponent, compute_dtype(x.dtype))
    stats = [
        broadcast_stats(loops, a, scaling.scatter_indices)
        for a in (exponent, scaling.shift, low_mean)
    ]
    x, scale, shift, low_mean = loops.isolate(loops.split(x), *stats)
    u = scaled(loops, x, scale)
    u = u if shift is None else u - shift
    return u if low_mean is None else u - low_mean


def elements_that_count(loops: PlainLoops, x: jax.Array, scaling: Scaling) -> jax.Array:
    """Return u, with 0 where x is masked out."""
    u = elements(loops, x, scaling)
    return u if scaling.where is None else apply_weights(loops, u, scaling.where.astype(bool))


def abs_squared(values: jax.Array) -> jax.Array:
    """Return the squares of absolute values."""
    return jnp.real(values * jnp.conj(values))


def rstd(loops: PlainLoops, scaling: Scaling, var: jax.Array) -> jax.Array:
    """Return 1 / sqrt(var + epsilon), in the units of the scale exponent."""
    spec = loops.spec
    epsilon = scaled_epsilon(loops, scaling.exponent, scaling.where, var.dtype)
    return loops.per_group(partial(_rstd, spec))(var, epsilon, total_weight(spec, scaling))


def inverse_root(var: jax.Array, epsilon, *, positive: bool, epsilon_in: str = "var") -> jax.Array:
    """Return 1 / sqrt(var + epsilon), 1 / (sqrt(var) + epsilon) or 1 / max(sqrt(var), epsilon).

    The result is 0 where that would divide by zero, which a positive epsilon rules out.
    """
    in_var = epsilon_in == "var"
    if epsilon_in == "max":
        total = safe_root(var)
        # not jnp.maximum: where both are equal the gradient goes to the variance, as in PyTorch
        total = jnp.where(total < epsilon, epsilon, total)
    else:
        total = (var if in_var else safe_root(var)) + epsilon
    # no step may be infinite, or jax_debug_infs would report it
    safe = total if positive else jnp.where(total == 0, 1, total)
    root = lax.rsqrt(safe) if in_var else 1 / safe
    return root if positive else jnp.where(total == 0, 0, root)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rstd(spec: Spec, var: jax.Array, epsilon: jax.Array, count) -> jax.Array:
    """Return :func:`inverse_root` of the variance that the spec asks for."""
    return inverse_root(
        var * _unbias(spec, var, count),
        epsilon,
        positive=spec.epsilon > 0,
        epsilon_in=spec.epsilon_in,
    )


@_rstd.defjvp
def _rstd_jvp(spec, primals, tangents):
    """Return the root and its tangent, derived below."""
    # With v = unbias var, where epsilon and unbias are constants:
    #     r = (v + epsilon)**(-1/2)       dr = -1/2 (v + epsilon)**(-3/2) dv = -1/2 r r r dv
    #     r = 1 / (sqrt(v) + epsilon)     dr = -r r d sqrt(v) = -1/2 v**(-1/2) r r dv
    #     r = 1 / max(sqrt(v), epsilon)   dr = -1/2 v**(-3/2) dv = -1/2 r r r dv, but 0 where
    #                                     sqrt(v) < epsilon
    # So dr = -1/2 q r r unbias dvar: q is r in the first case, and v**(-1/2) in the second. Without
    # any deviation, v = 0, that q is taken as 0. In the third case q is r, or 0. Where epsilon and
    # sqrt(v) are equal it is r, as torch.clamp has it; jnp.maximum would take half of it.
    var, epsilon, count = primals
    r, unbias = _rstd(spec, var, epsilon, count), _unbias(spec, var, count)
    q = r
    if spec.epsilon_in == "std":
        var = var * unbias
        q = jnp.where(var > 0, lax.rsqrt(jnp.where(var > 0, var, 1)), 0)
    elif spec.epsilon_in == "max":
        q = jnp.where(safe_root(var * unbias) < epsilon, 0, r)
    # multiply in turn: r**3 underflows for data of size 1e13
    slope = ((-0.5 * tangents[0] * (q * unbias)) * r) * r
    # the transpose multiplies r**2 first, which may be Inf, and Inf * 0 would be NaN
    return r, slope if spec.correction == 0 else jnp.where(unbias == 0, 0, slope)


def safe_root(var: jax.Array) -> jax.Array:
    """Return the root, with a finite derivative at 0.

    JAX before 0.12 loses the rule of :func:`_rstd` in loops, and differentiates this instead.
    """
    return jnp.where(var == 0, 0, jnp.sqrt(jnp.where(var == 0, 1, var)))


def _unbias(spec: Spec, var, count):
    # n / (n - correction) turns the mean of squares into the corrected variance
    if spec.correction == 0:
        return 1
    count = jnp.asarray(count, var.dtype)
    return jnp.where(
        count > spec.correction,
        count / jnp.where(count > spec.correction, count - spec.correction, 1),
        0,
    )
