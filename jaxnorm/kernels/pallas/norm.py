"""Norms by the Pallas kernels."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm.engine.collectives import varying_axes
from jaxnorm.engine.exponents import fits_any_unit
from jaxnorm.engine.primitives import Kernels, zeros
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import norm
from jaxnorm.kernels.norm import Found, NormKernels, Static, layout_of
from jaxnorm.kernels.pallas import tpu_rows

DTYPES = ("float32", "bfloat16")


def obstacle(x: jax.Array, spec: Spec, operands: Operands) -> str | None:
    """Return why the kernels cannot take these arguments, in words; None if they can."""
    layout = layout_of(x, spec, operands, DTYPES)
    if isinstance(layout, str):
        return layout
    if layout.p > 1 or layout.g > 1:
        return f"takes rows alone: got {spec.axes} of {spec.reduction.split_shape}"
    if layout.d > tpu_rows.WIDEST:
        return f"takes rows of {tpu_rows.WIDEST} elements or fewer: got {layout.d}"
    if operands.where is not None:
        return "takes no mask"
    if spec.full_range or not spec.epsilon_hides_squares(jnp.float32):
        return f"takes neither full_range nor an epsilon below 1e-31: got epsilon={spec.epsilon}"
    if x.dtype == jnp.bfloat16 and not fits_any_unit(spec):
        return (
            "takes no bfloat16 with epsilon_in='std', or with an epsilon above 32 for all elements "
            f"of a row: got {spec.epsilon} for each of {layout.d}"
        )
    return None


def _recompute(static: Static, x: jax.Array) -> bool:
    """Return whether backward recomputes the statistics.

    It reads x anyway. Stored, the statistics of a row would take 128 elements of float32 each.
    """
    return not static.moments


def by_platform(kernel: Callable, plain: Callable) -> Kernels:
    """Return a kernel for TPUs, which is interpreted on a CPU.

    Plain JAX, of arranged arrays too, stands in for the interpreter where arrays vary over the axes
    of a mesh, which it cannot follow.
    """

    def interpreted(static: Static, *arguments):
        if any(map(varying_axes, jax.tree.leaves(arguments))):
            return plain(static, *arguments)
        return kernel(static, *arguments, interpret=True)

    return {"tpu": partial(kernel, interpret=False), "cpu": interpreted}


def _forward(static: Static, arguments, *, interpret: bool) -> Found:
    """Return the output and, where they are asked for, the statistics."""
    if static.moments:  # no kernel computes them for their own sake
        return _plain(static, arguments)
    zero = zeros(static.stats_shape(arguments[0]), jnp.float32, *jax.tree.leaves(arguments))
    return Found(tpu_rows.forward(static, arguments, interpret=interpret), None, None, zero, None)


def _plain(static: Static, arguments) -> Found:
    x, *rest = arguments
    return Found(*norm.plain(static, (x.reshape(static.shape), *rest)))


def _backward(static: Static, residuals, cotangents, *, interpret: bool):
    """Return the gradients with respect to x, scale and bias."""
    if static.moments:
        return _plain_backward(static, residuals, cotangents)
    x, scale, dy = residuals[0], residuals[-2], cotangents[0]
    return tpu_rows.backward(static, x, scale, dy, interpret=interpret)


def _plain_backward(static: Static, residuals, cotangents):
    (x, *rest), (dy, *dstats) = residuals, cotangents
    x, dy = (a.reshape(static.shape) for a in (x, dy))
    return norm.plain_backward(static, (x, *rest), (dy, *dstats))


KERNELS = NormKernels(
    "jaxnorm_pallas",
    forward=by_platform(_forward, _plain),
    backward=by_platform(_backward, _plain_backward),
    recompute=_recompute,
)
forward, derivative = KERNELS.forward, KERNELS.derivative
