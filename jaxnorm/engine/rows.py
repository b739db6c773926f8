"""The backward pass of groups that are rows, as plain JAX needs it for XLA's CPU back-end; the results are those of reference.py."""

from dataclasses import replace

from jaxnorm.dtypes import compute_dtype
from jaxnorm.engine.reference import Inputs, Residuals, backward, forward, like
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.sums import split
from jaxnorm.engine.xla import separate


def backward_of_rows(spec: Spec, residuals: Residuals, gradients: tuple) -> Inputs:
    """:func:`backward` where each group is a row: each result by a fused loop of its own, which recomputes the statistics."""
    (x, _, _, scale, bias), (dy, *dstats) = residuals, gradients
    dtype = compute_dtype(x.dtype)
    own_x, own_dy, own_scale = separate(x, dy, scale)
    own_dy = split(spec, own_dy, dtype) if scale is None else split(spec, own_dy, dtype) * own_scale.astype(dtype)
    dx = backward(spec, Residuals(own_x, None, None, None, None), (own_dy, *dstats)).x
    dscale = dbias = None
    if scale is not None:
        own_x, own_dy = separate(x, dy)
        normalized, _ = forward(replace(spec, dtype=dtype), own_x, None, None, None)
        dscale = like(scale, split(spec, own_dy, dtype) * split(spec, normalized, dtype))
    if bias is not None:
        dbias = like(bias, split(spec, separate(dy)[0], dtype))
    return Inputs(dx, dscale, dbias)
