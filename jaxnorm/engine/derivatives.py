"""Output and statistics of every set, with a derivative that keeps little."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm.application import Inputs, Residuals, Rule, apply, tangent
from jaxnorm.axes import number
from jaxnorm.frame import Frame, Stats, estimate, nothing_saved
from jaxnorm.loops import SMALL
from jaxnorm.sets import Sets

SMALL_SET = 256  # below it, a number kept per set weighs more than recomputing it
WIDE = 256  # from it on, the arithmetic on the statistics of a row does not show beside that on its elements
LARGE = 1 << 22  # elements


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def own_statistics(sets: Sets, rule: Rule, applied, x, where, frame: Frame, extra, scale, bias):
    """Output, offset and variance of every set; applied are ``applied(pivot, offset, var, extra)``.

    Reverse mode keeps ``x`` in its own dtype and a few numbers per set instead of every intermediate: the transpose is
    written down, or the tangent rematerialized.
    """
    offset, var = estimate(sets, x, where, frame)
    mean, spread = applied(frame.pivot, offset, var, extra)
    return apply(sets, rule, where, frame, x, mean, spread, scale, bias), offset, var


@own_statistics.defjvp
def _own_statistics_jvp(sets, rule, applied, primals, tangents):
    x, where, frame, extra, scale, bias = primals
    y, offset, var = own_statistics(replace(sets, differentiated=True), rule, applied, *primals)
    kept = Stats(frame._replace(size=None if where is None else frame.size), None if _recompute_offset(sets, where) else offset, var)
    dx, _, _, *others = tangents
    residuals, inputs = Residuals(x, where, jax.tree.map(sets.once, kept), extra, scale, bias), Inputs(dx, *others)
    if transpose := _closed_transpose(sets, y.dtype, applied, where, scale, bias):
        from jaxnorm import transposed  # loads parts of JAX that values alone do without

        if scale is not None and bias is not None and (scale.shape, scale.dtype) == (bias.shape, bias.dtype):
            residuals = residuals._replace(bias=scale)  # one array instead of two
        return (y, offset, var), getattr(transposed, transpose)((sets, rule, applied), residuals, inputs)
    return (y, offset, var), nothing_saved(partial(tangent, sets, rule, applied))(residuals, inputs)


def _closed_transpose(sets: Sets, dtype, applied, where, scale, bias) -> str | None:
    """That of transposed.py which is a gain: for sets over axes that scale and bias share, or for rows and the like.

    Of the latter it computes statistics again, which weighs where they are narrow, unless the memory for what is kept instead
    weighs more: from 16 MiB on glibc returns it to the system after every use.
    """
    if any(getattr(a, "axis_name", None) is not None for a in (sets, applied)) or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    large = number(*sets.pooling.shape) >= (SMALL if number(sets.size) >= WIDE else LARGE)
    if where is None and large and (sets.rows if scale is bias is None else sets.alone and (sets.rows or sets.in_one_loop)):
        return "row_tangent"
    return None if sets.alone else "pooled_tangent"


def _recompute_offset(sets: Sets, where) -> bool:
    return sets.centered and sets.axis_name is None and where is None and number(sets.size) < SMALL_SET
