"""Norms of x + residual by the Pallas kernels for TPUs, of rows that norm.py takes."""

import jax

from jaxnorm.kernels import add_norm
from jaxnorm.kernels.add_norm import AddNormKernels
from jaxnorm.kernels.pallas import tpu_rows
from jaxnorm.kernels.pallas.norm import by_platform, of_rows
from jaxnorm.kernels.static import Static


def _forward(static: Static, arguments, *, platform: str, interpret: bool):
    """Return the output and the sum."""
    if not of_rows(static.layout):
        return _plain(static, arguments)
    return tpu_rows.forward_of_sum(static, *arguments, interpret=interpret)


def _plain(static: Static, arguments) -> tuple[jax.Array, ...]:
    x, residual, *params = arguments
    return add_norm.plain(static, (*(a.reshape(static.shape) for a in (x, residual)), *params))


def _backward(static: Static, stored, cotangents, *, platform: str, interpret: bool):
    """Return the gradients with respect to the sum, scale and bias."""
    if not of_rows(static.layout):
        return _plain_backward(static, stored, cotangents)
    return tpu_rows.backward(static, *stored, *cotangents, interpret=interpret)


def _plain_backward(static: Static, stored, cotangents):
    total, scale = stored
    given = [a if a is None else a.reshape(static.shape) for a in (total, *cotangents)]
    return add_norm.plain_backward(static, (given[0], scale), given[1:])


PLATFORMS = ("cpu", "tpu")
KERNELS = AddNormKernels(
    "jaxnorm_pallas_add",
    forward=by_platform(_forward, _plain, PLATFORMS),
    backward=by_platform(_backward, _plain_backward, PLATFORMS),
)
forward, platforms = KERNELS.forward, KERNELS.platforms
