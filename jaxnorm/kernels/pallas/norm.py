"""Norms by the Pallas kernels."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm.engine.collectives import varying_axes
from jaxnorm.engine.exponents import fits_any_unit
from jaxnorm.engine.primitives import zeros
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels.norm import Found, NormKernels, Static, layout_of, plain, plain_backward
from jaxnorm.kernels.pallas import rows

DTYPES = ("float32", "bfloat16")


def obstacle(x: jax.Array, spec: Spec, operands: Operands) -> str | None:
    """Return why the kernels cannot take these arguments, in words; None if they can."""
    layout = layout_of(x, spec, operands, DTYPES)
    if isinstance(layout, str):
        return layout
    if layout.p > 1 or layout.g > 1:
        return f"takes rows alone: got {spec.axes} of {spec.reduction.split_shape}"
    if layout.d > rows.WIDEST:
        return f"takes rows of {rows.WIDEST} elements or fewer: got {layout.d}"
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


def _runs(static: Static, interpret: bool, *arrays) -> bool:
    """Return whether a kernel runs.

    None computes statistics for their own sake, and the interpreter cannot follow arrays that vary
    over the axes of a mesh.
    """
    return not (static.moments or (interpret and any(map(varying_axes, jax.tree.leaves(arrays)))))


def _forward(static: Static, arguments, *, interpret: bool) -> Found:
    """Return the output and, where they are asked for, the statistics."""
    x, *rest = arguments
    if not _runs(static, interpret, arguments):
        return Found(*plain(static, (x.reshape(static.shape), *rest)))
    zero = zeros(static.stats_shape(x), jnp.float32, *jax.tree.leaves(arguments))
    return Found(rows.forward(static, arguments, interpret=interpret), None, None, zero, None)


def _backward(static: Static, residuals, cotangents, *, interpret: bool):
    """Return the gradients with respect to x, scale and bias."""
    (x, *rest), (dy, *dstats) = residuals, cotangents
    if not _runs(static, interpret, residuals, cotangents):
        given = (a.reshape(static.shape) for a in (x, dy))
        return plain_backward(static, (next(given), *rest), (next(given), *dstats))
    return rows.backward(static, residuals, cotangents, interpret=interpret)


# On a CPU the kernels are interpreted, which is slow.
KERNELS = NormKernels(
    "jaxnorm_pallas",
    forward={name: partial(_forward, interpret=name == "cpu") for name in ("cpu", "tpu")},
    backward={name: partial(_backward, interpret=name == "cpu") for name in ("cpu", "tpu")},
    recompute=_recompute,
)
forward, derivative = KERNELS.forward, KERNELS.derivative
