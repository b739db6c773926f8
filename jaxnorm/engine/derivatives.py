"""Output and statistics of every group, with a derivative that stores x in its own dtype and little else.

Reverse mode runs the closed form of reference.py, or a kernel's, as the transpose of a linear primitive. Every other
derivative, of any order, JAX makes of the tangent.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm.engine.frame import Frame
from jaxnorm.engine.reference import Inputs, Residuals, Stats, apply, estimate, nothing_saved, tangent
from jaxnorm.engine.spec import Spec


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalized(spec: Spec, x, where, frame: Frame, scale, bias):
    """Output, offset and variance of every group."""
    offset, var = estimate(spec, x, where, frame)
    return apply(spec, x, where, Stats(frame, offset, var), scale, bias), offset, var


@normalized.defjvp
def _normalized_jvp(spec, primals, tangents):
    x, where, frame, scale, bias = primals
    y, offset, var = normalized(spec, *primals)
    frame = frame if where is not None else frame._replace(n=None)
    stats = None if spec.recompute else Stats(frame, offset if spec.keep_offset else None, var)
    if scale is not None and bias is not None and (scale.shape, scale.dtype) == (bias.shape, bias.dtype):
        bias = scale  # one array instead of two
    residuals, inputs = Residuals(x, where, stats, scale, bias), Inputs(tangents[0], *tangents[3:])
    if spec.axis_name is not None or jnp.issubdtype(y.dtype, jnp.complexfloating):
        return (y, offset, var), nothing_saved(partial(tangent, spec))(residuals, inputs)
    from jaxnorm.engine import linear  # loads parts of JAX that values alone do without

    run = linear.tangent_of_rows if spec.recompute else linear.tangent
    return (y, offset, var), run(spec, residuals, inputs)
