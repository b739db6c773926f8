"""Kernels that normalize a sum, x + residual, and return the sum as well.

This file ties them to the plain formulas, as norm.py does for norms of x alone. What is stored for
the derivative is the sum, which is a result, and the scale.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.primitives import Kernels, differentiable, linear, zeros
from jaxnorm.engine.spec import Operands
from jaxnorm.kernels import plain as formulas
from jaxnorm.kernels.layout import find
from jaxnorm.kernels.norm import check_result
from jaxnorm.kernels.placement import on_each_device, on_examples
from jaxnorm.kernels.static import Static, arranged_params, batched_static


def always_recompute(static: Static, x: jax.Array) -> bool:
    """Return True: backward recomputes the statistics."""
    return True


class AddNormKernels:
    """The kernels of a family for norms of a sum, tied to the plain formulas.

    Args:
      name: name of the primitives, different for each family.
      forward: by platform ``(static, (x, residual, scale, bias)) -> (y, total)``, of arrays that
        are arranged as for :class:`~jaxnorm.kernels.norm.NormKernels`.
      backward: by platform ``(static, (total, scale), (dy, dtotal)) -> (dx, dscale, dbias)``. The
        gradients with respect to x and to the residual are the same. ``dtotal`` may be None, for 0.
    """

    def __init__(self, name: str, *, forward: Kernels, backward: Kernels):
        self.platforms = tuple(forward)
        self._standardize = differentiable(
            name,
            plain,
            self._jvp,
            batched=batched_static,
            results=2,
            results_like=_results_like,
            kernels={platform: partial(_of_kernel, each) for platform, each in forward.items()},
        )
        self._apply_tangent = linear(
            f"{name}_tangent",
            _tangent,
            plain_backward,
            like=lambda residuals: (residuals[0], residuals[1], residuals[1]),
            batched=batched_static,
            results=2,
            results_like=_tangent_like,
            kernels={p: partial(_backward_of_kernel, each) for p, each in backward.items()},
        )

    def forward(
        self, loops: PlainLoops, operands: Operands, residual: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output and the sum. There is no mask."""
        x, _, *params = operands[:4]
        second = lambda: jax.typeof(x).sharding
        return on_each_device(self._on_each, loops, (x, residual), tuple(params), second)

    def _on_each(self, loops: PlainLoops, arrays, params) -> tuple[jax.Array, jax.Array]:
        spec = loops.spec
        layout = find(spec.reduction, *(a.shape for a in params if a is not None))
        if layout is None:
            return on_examples(self._on_each, loops, arrays, params)
        lowest = spec.lowest_exponent(arrays[0].dtype)
        static = Static(layout, arrays[0].ndim, loops, lowest, False, always_recompute)
        return self._standardize(static, (*arrays, *arranged_params(layout, *params)))

    def _jvp(self, static: Static, arguments, tangents):
        # With t = x + residual, y is a function of t, scale and bias: dt = dx + dresidual, and dy
        # is derived in NormKernels. The tangent of t passes through the same linear primitive, so
        # that its transpose adds dtotal to the gradient where this is still next to the cores.
        (_, _, scale, _), (dx, dresidual, *dparams) = arguments, tangents
        y, total = self._standardize(static, arguments)
        dtotal = dx + dresidual
        return (y, total), self._apply_tangent(static, (total, scale), (dtotal, *dparams))


def _residuals(stored) -> tuple:
    """Return the residuals of a norm of the sum, which recomputes its statistics."""
    total, scale = stored
    return total, *[formulas.ABSENT] * 4, scale, None


def plain(static: Static, arguments):
    """Compute in plain JAX what a forward kernel computes."""
    x, residual, *params = arguments
    total = x + residual
    return formulas.plain(static, (total, *params, None))[0], total


def _results_like(static: Static, arguments):
    """Return arrays of the shapes and dtypes that :func:`plain` returns."""
    x, leaves = arguments[0], jax.tree.leaves(arguments)
    return tuple(zeros(x.shape, dtype, *leaves) for dtype in (static.spec.dtype, x.dtype))


def _of_kernel(kernel: Callable, static: Static, arguments):
    """Run a forward kernel on arguments that are not yet arranged."""
    x, residual, *params = arguments
    arranged = static.arranged(x)
    y, total = kernel(static, (arranged, static.arranged(residual), *params))
    check_result(kernel, "y", y, arranged.shape, static.spec.dtype)
    check_result(kernel, "total", total, arranged.shape, x.dtype)
    return y.reshape(x.shape), total.reshape(x.shape)


def _tangent(static: Static, stored, arguments):
    """Return the tangents of the output and of the sum, in plain JAX."""
    return formulas.tangent(static, _residuals(stored), arguments)[0], arguments[0]


def _tangent_like(static: Static, stored, arguments):
    """Return arrays of the shapes and dtypes that :func:`_tangent` returns."""
    leaves = jax.tree.leaves((stored, arguments))
    return zeros(arguments[0].shape, static.spec.dtype, *leaves), arguments[0]


def _backward_of_kernel(kernel: Callable, static: Static, stored, cotangents):
    """Run a backward kernel, as the transpose of :func:`_tangent`."""
    (total, scale), arranged = stored, [a if a is None else static.arranged(a) for a in cotangents]
    dx, *dparams = kernel(static, (static.arranged(total), scale), arranged)
    check_result(kernel, "dx", dx, total.shape, total.dtype)
    for name, a in zip(("dscale", "dbias"), dparams, strict=True):
        check_result(kernel, name, a, scale.shape, scale.dtype)
    return dx.reshape(total.shape), *dparams


def plain_backward(static: Static, stored, cotangents):
    """Compute in plain JAX what a backward kernel computes."""
    dy, dtotal = cotangents
    dx, *dparams = formulas.plain_backward(static, _residuals(stored), (dy, None, None))
    if dtotal is not None:
        wide = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
        dx = (wide(dx) + wide(dtotal)).astype(dx.dtype)
    return dx, *dparams
