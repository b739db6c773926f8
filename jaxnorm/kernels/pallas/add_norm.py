"""Norms of x + residual by the Pallas kernels, for what the kernels of norm.py take."""

import jax

from jaxnorm.kernels import add_norm
from jaxnorm.kernels.add_norm import AddNormKernels
from jaxnorm.kernels.norm import Static
from jaxnorm.kernels.pallas import tpu_rows
from jaxnorm.kernels.pallas.norm import by_platform


def _forward(static: Static, arguments, *, interpret: bool) -> list[jax.Array]:
    """Return the output and the sum."""
    x, residual, *params = arguments
    return tpu_rows.forward_of_sum(static, x, residual, *params, interpret=interpret)


def _plain(static: Static, arguments) -> tuple[jax.Array, ...]:
    x, residual, *params = arguments
    return add_norm.plain(static, (*(a.reshape(static.shape) for a in (x, residual)), *params))


def _backward(static: Static, stored, cotangents, *, interpret: bool):
    """Return the gradients with respect to the sum, scale and bias."""
    return tpu_rows.backward(static, *stored, *cotangents, interpret=interpret)


def _plain_backward(static: Static, stored, cotangents):
    total, scale = stored
    given = [a if a is None else a.reshape(static.shape) for a in (total, *cotangents)]
    return add_norm.plain_backward(static, (given[0], scale), given[1:])


KERNELS = AddNormKernels(
    "jaxnorm_pallas_add",
    forward=by_platform(_forward, _plain),
    backward=by_platform(_backward, _plain_backward),
)
forward = KERNELS.forward
