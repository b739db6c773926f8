"""The common part of all kernels of norms: supported arrays, and ties to the plain formulas.

A kernel computes the output and the statistics of each group, or the gradients of both. This file
does the rest once for all families. It splits arrays, lays them out as ``(N, P, G, D)``, and gives
devices their part. Forward mode and derivatives of higher order come from the formulas of
engine/reference.py. These formulas also run where a platform has no kernel, or none may be called.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.engine.counts import count_elements
from jaxnorm.engine.derivatives import CLOSED_FORM
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.primitives import NONE, Kernels, differentiable, linear, zeros
from jaxnorm.engine.reference import Stats
from jaxnorm.engine.sharding import split_sharding
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import placement
from jaxnorm.kernels.layout import Layout, find, find_mapped
from jaxnorm.kernels.placement import fitted, on_device, on_each_device, on_examples
from jaxnorm.kernels.plain import (
    ABSENT,
    plain,
    plain_backward,
    tangent,
    tangent_like,
)
from jaxnorm.kernels.static import Static, arranged_params, batched_static


def layout_of(x: jax.Array, spec: Spec, operands: Operands, dtypes: Sequence[str]) -> Layout | str:
    """Return the layout for a kernel, or in words why no kernel takes the arrays.

    Args:
      x: the data.
      spec: the spec of the norm.
      operands: x and the other arrays.
      dtypes: the names of the dtypes that x and the output may have.
    """
    _, where, scale, bias, *_ = operands
    kinds = tuple(None if a is None else (a.shape, a.dtype) for a in (where, scale, bias))
    return _layout_of(spec, jax.typeof(x), *kinds, operands.epsilon is not None, tuple(dtypes))


@lru_cache(maxsize=4096)
def _layout_of(
    spec: Spec,
    kind: Any,
    where: tuple | None,
    scale: tuple | None,
    bias: tuple | None,
    traced_epsilon: bool,
    dtypes: tuple[str, ...],
) -> Layout | str:
    """Return the :func:`layout_of` an x of this type, with arrays of these shapes and dtypes."""
    if spec.axis_name is not None:
        return "takes no axis_name"
    if 0 in kind.shape:
        return f"takes no empty arrays: got {kind.shape}"
    if where is not None and where[1] != jnp.bool_:
        return f"takes no weights, but a boolean mask: got {where[1]}"
    if traced_epsilon:
        return "takes no traced epsilon"
    given = dict.fromkeys((str(kind.dtype), str(spec.dtype)))
    if not given.keys() <= set(dtypes):
        took = f"got {kind.dtype} and an output of {spec.dtype}"
        return f"takes and gives {' and '.join(dtypes)}: {took}"
    params = [param for param in (scale, bias) if param is not None]
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for _, dtype in params):
        return "takes no complex scale or bias"
    if why := placement.obstacle(kind):
        return why
    reduction, sizes = on_device(spec.reduction, kind), spec.reduction.split_shape
    if reduction is None:
        return (
            f"reduces no axes that are sharded over devices: {spec.axes} of {sizes}, sharded "
            f"{kind.sharding.spec}"
        )
    shapes = [spec.reduction.fit(shape) for shape, _ in params]
    found = find_mapped(reduction, *(fitted(reduction, shape) for shape in shapes))
    if found is None and find(reduction) is not None:
        given_shapes = " and ".join(str(shape) for shape, _ in params)
        return (
            f"takes no scale or bias of shape {given_shapes} where {spec.axes} of {sizes} are "
            "reduced"
        )
    if found is None:
        return f"reduces no such axes: {spec.axes} of {sizes}"
    layout, mapped = found
    if where is not None:
        shape = fitted(reduction, spec.reduction.fit(where[0]))
        if layout.mask(reduction.split_shape[mapped:], shape[mapped:]) is None:
            return (
                f"takes no mask that differs from channel to channel: got shape {where[0]} "
                f"for x of shape {kind.shape}"
            )
    return layout


class Found(NamedTuple):
    """The results of a forward kernel: the output, and the statistics of each group."""

    y: jax.Array
    shift: jax.Array | None  # None stands for zeros
    low_mean: jax.Array | None
    var: jax.Array
    exponent: jax.Array | None


def always_keep(static: Static, x: jax.Array) -> bool:
    """Return False: no backward kernel recomputes the statistics."""
    return False


class NormKernels:
    """The kernels of a family for norms, tied to the plain formulas.

    Args:
      name: name of the primitives, different for each family.
      forward: by platform ``(static, (x, scale, bias, where)) -> Found``, of arranged arrays. x is
        ``(..., N, P, G, D)``, scale and bias are ``(..., N or 1, 1, G, D)`` in float32, where is
        ``(..., N or 1, P, 1, 1)`` or None. Masked elements of x may have any value, and are 0 in y.
        An axis of vmap stands in front of all arrays.
      backward: by platform ``(static, (x, shift, low_mean, var, exponent, scale, where), (dy,
        dlow_mean, dvar)) -> (dx, dscale, dbias)``. Statistics that are not
        :meth:`Static.informative`, or are to be recomputed, have one element. Gradients of
        statistics may be None, for 0. Where a platform has no such kernel, the plain formula runs.
      recompute: whether backward recomputes the statistics, see :class:`Static`.
    """

    def __init__(
        self,
        name: str,
        *,
        forward: Kernels,
        backward: Kernels = NONE,
        recompute: Callable[[Static, jax.Array], bool] = always_keep,
    ):
        self._recompute = recompute
        self._backward = backward
        self._standardize = differentiable(
            name,
            plain,
            self._jvp,
            batched=batched_static,
            results=5,
            results_like=_results_like,
            kernels={platform: partial(_of_kernel, each) for platform, each in forward.items()},
        )
        self._apply_tangent = linear(
            f"{name}_tangent",
            tangent,
            plain_backward,
            like=lambda residuals: (residuals[0], residuals[-2], residuals[-2]),
            batched=batched_static,
            results=3,
            results_like=tangent_like,
            kernels={p: partial(_backward_of_kernel, each) for p, each in backward.items()},
        )

    def forward(self, loops: PlainLoops, operands: Operands, *, moments: bool) -> tuple:
        """Return the output and, if asked for, the Stats.

        :func:`layout_of` must find a layout. Mask, scale and bias are split and sharded as x is.
        """
        x, where, scale, bias, *_ = operands
        reduction, on_each = loops.spec.reduction, partial(self._on_each, moments)
        of_stats = lambda: split_sharding(reduction, x, reduction.split_stats_shape)
        y, found = on_each_device(on_each, loops, (x,), (where, scale, bias), of_stats)
        if found is None or where is None:
            return y, found
        count = count_elements(loops, where, None).astype(jnp.float32)
        return y, found._replace(scaling=found.scaling._replace(n=count, where=where))

    def derivative(self, platform: str) -> str:
        """Say in words how reverse mode computes the gradients on a platform."""
        return "a kernel" if platform in self._backward else CLOSED_FORM

    def _on_each(
        self, moments: bool, loops: PlainLoops, arrays, params
    ) -> tuple[jax.Array, Stats | None]:
        """Return the output and the Stats of the part of x that a device has."""
        ((x,), (where, scale, bias)), spec = (arrays, params), loops.spec
        layout = find(spec.reduction, *(a.shape for a in (scale, bias) if a is not None))
        if layout is None:
            return on_examples(partial(self._on_each, moments), loops, arrays, params)
        scale, bias = arranged_params(layout, scale, bias)
        lowest = spec.lowest_exponent(x.dtype)
        static = Static(layout, x.ndim, loops, lowest, moments, self._recompute)
        if where is not None:
            where = jnp.broadcast_to(where, layout.mask(spec.reduction.split_shape, where.shape))
            where = where.reshape(-1, layout.p, 1, 1)
        y, *found = self._standardize(static, (x, scale, bias, where))
        if not moments:
            return y, None
        shift, low_mean, var, exponent = (
            a.reshape(spec.reduction.split_stats_shape) for a in found
        )
        return y, Stats(static.scaling(spec, shift, exponent, None)._replace(n=None), low_mean, var)

    def _jvp(self, static: Static, arguments, tangents):
        # The kernel computes, in each group and for u = x / 2**exponent - shift,
        #     y = (u - low_mean) r scale + bias,     var = mean(u**2) - low_mean**2,
        #     r = (var + epsilon)**(-1/2),         low_mean = mean(u)
        # Exponent and shift are constants, so that their tangents are 0. The others are
        #     dlow_mean = mean(du),  dvar = 2 mean((u - low_mean) du),  dr = -1/2 r**3 dvar,
        #     dy        = ((du - dlow_mean) r + (u - low_mean) dr) scale
        #                 + (u - low_mean) r dscale + dbias
        # They are linear in dx, dscale and dbias, and need x, statistics, scale and mask alone.
        # tangent computes them, and a backward kernel their transpose.
        x, scale, _, where = arguments
        y, shift, low_mean, var, exponent = self._standardize(static, arguments)
        # a residual without information is one element; so are all if backward recomputes them
        scaling = jax.lax.stop_gradient((shift, exponent.astype(jnp.int8)))
        found = zip((scaling[0], low_mean, var, scaling[1]), static.informative(x), strict=True)
        keeps = not static.recompute(static, x)
        residuals = (
            a if informative and keeps else ABSENT.astype(a.dtype) for a, informative in found
        )
        dy, dlow_mean, dvar = self._apply_tangent(
            static, (x, *residuals, scale, where), tangents[:3]
        )
        return (y, shift, low_mean, var, exponent), (
            dy,
            jnp.zeros_like(shift),
            dlow_mean,
            dvar,
            jnp.zeros_like(exponent),
        )


def _results_like(static: Static, arguments):
    """Return arrays of the shapes and dtypes that :func:`plain` returns."""
    x, leaves = arguments[0], jax.tree.leaves(arguments)
    stats = zeros(static.stats_shape(static.arranged(x)), jnp.float32, *leaves)
    return zeros(x.shape, static.spec.dtype, *leaves), stats, stats, stats, stats


def _of_kernel(kernel: Callable, static: Static, arguments):
    """Run a forward kernel on arguments that are not yet arranged."""
    given, *params = arguments
    x = static.arranged(given)
    y, *found = kernel(static, (x, *params))
    shape = static.stats_shape(x)
    check_result(kernel, "y", y, x.shape, static.spec.dtype)
    for name, a in zip(Found._fields[1:], found, strict=True):
        check_result(kernel, name, a, shape, jnp.float32)
    zero = lambda a: zeros(shape, jnp.float32, *jax.tree.leaves(arguments)) if a is None else a
    return y.reshape(given.shape), *map(zero, found)


def check_result(kernel: Callable, name: str, a: jax.Array | None, shape: tuple, dtype) -> None:
    """Raise a TypeError where a kernel returns an array of a wrong size, rank or dtype.

    The output and the gradient of x may have any shape of the right size.
    """
    if a is None:
        return
    fits = a.size == math.prod(shape) if name in ("y", "dx", "total") else a.shape == shape
    if not fits or a.dtype != dtype:
        where = f"{kernel.__module__}.{getattr(kernel, '__qualname__', kernel)}"
        raise TypeError(
            f"kernel {where} must return {name} of shape {shape} and dtype {jnp.dtype(dtype)}: "
            f"got {a.shape} and {a.dtype}."
        )


def _backward_of_kernel(kernel: Callable, static: Static, residuals, cotangents):
    """Run a backward kernel, as the transpose of :func:`tangent`."""
    (x, *rest), (dy, *dstats) = residuals, cotangents
    arranged = (static.arranged(x), *rest)
    dx, *dparams = kernel(static, arranged, (static.arranged(dy), *dstats))
    check_result(kernel, "dx", dx, x.shape, x.dtype)
    for name, a in zip(("dscale", "dbias"), dparams, strict=True):
        check_result(kernel, name, a, rest[-2].shape, rest[-2].dtype)
    return dx.reshape(x.shape), *dparams
