"""JAX primitives: functions with a given derivative, and linear functions with a given transpose.

JAX can derive a transpose from the function, but then stores the intermediate results of the
function. A transpose that is written down, in JAX or as a kernel, may need less. JAX derives
everything else that it may ask for from the function, derivatives of any order included.

A kernel has no derivative but the given one, and keeps it only as a primitive. JAX before 0.12
drops the rule of a custom_jvp where it takes apart a loop, and then cannot differentiate a second
time.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxnorm.engine.collectives import vary, varying_axes

Kernels = Mapping[str, Callable]  # by JAX platform: "cpu", "gpu" or "tpu"
NONE: Kernels = {}  # plain JAX everywhere


def linear(
    name: str,
    function: Callable,
    transpose: Callable | None = None,
    *,
    like: Callable,
    batched: Callable,
    results: int,
    results_like: Callable | None = None,
    kernels: Kernels = NONE,
) -> Callable:
    """Return a callable ``(static, residuals, arguments) -> results``, linear in the arguments.

    Args:
      name: name of the primitive.
      function: the function in plain JAX. Its static arguments are hashable, the others are tuples
        of arrays or None.
      transpose: ``(static, residuals, cotangents of the results) -> cotangents of the arguments``,
        in plain JAX. The cotangent of any result but the first may be None, for 0. Without
        ``transpose`` JAX transposes the function.
      like: ``residuals -> arguments``, arrays of the same shapes and dtypes as the arguments.
      batched: ``(static, size) -> static`` for arrays all of which have one more axis, of this
        size, in front.
      results: number of results.
      results_like: a function like ``function``, with results of the same shapes and dtypes, but
        cheaper to trace. Reverse mode needs nothing else of the function, and then takes less time
        to compile.
      kernels: functions that compute the transpose instead, by platform.
    """
    transposed = transposed_by_jax(function, like)
    forward, backward = Primitive(name), Primitive(f"{name}_transpose")

    # the cotangents of the arguments vary wherever a residual or a cotangent does
    def cotangents_like(static, residuals, cotangents):
        varying = frozenset().union(*map(varying_axes, jax.tree.leaves((residuals, cotangents))))
        return jax.tree.map(lambda a: vary(a, varying), like(residuals))

    # Each primitive is linear. Its transpose is the other, so that both have derivatives of any
    # order. The tangent by residuals comes from the plain function.
    _define(forward, function, batched, results_like)
    _define(backward, transpose or transposed, batched, kernels and cotangents_like, kernels)
    for primitive, plain in ((forward, function), (backward, transposed)):
        ad.primitive_jvps[primitive] = partial(_jvp, primitive, partial(_flat, plain))
    ad.primitive_transposes[forward] = partial(_transpose, backward, 1)
    ad.primitive_transposes[backward] = partial(_transpose, forward, math.inf)

    def call(static, residuals, arguments):
        stored, residual_tree = jax.tree.flatten(residuals)
        leaves, argument_tree = jax.tree.flatten(arguments)
        varying = frozenset().union(*map(varying_axes, (*stored, *leaves)))
        trees = {
            "static": static,
            "residual_tree": residual_tree,
            "argument_tree": argument_tree,
            "result_tree": jax.tree.structure((0,) * results),
        }
        return tuple(forward.bind(*stored, *(vary(a, varying) for a in leaves), **trees))

    return call


def transposed_by_jax(function: Callable, like: Callable) -> Callable:
    """Return the transpose of a function of :func:`linear`, derived by JAX.

    It is ``(static, residuals, cotangents of the results) -> cotangents of the arguments``.
    """

    def transposed(static, residuals, cotangents):
        # the results that have a cotangent
        def shown(arguments):
            return [
                result
                for result, of in zip(
                    function(static, residuals, arguments), cotangents, strict=True
                )
                if of is not None
            ]

        return jax.linear_transpose(shown, like(residuals))(
            [of for of in cotangents if of is not None]
        )[0]

    return transposed


def differentiable(
    name: str,
    function: Callable,
    tangent: Callable,
    *,
    batched: Callable,
    results: int,
    results_like: Callable | None = None,
    kernels: Kernels = NONE,
) -> Callable:
    """Return a callable ``(static, arguments) -> results`` that has this derivative.

    Args:
      name: name of the primitive.
      function: the function in plain JAX. Its static arguments are hashable, the arguments are a
        tuple of arrays or None, the results a tuple of arrays.
      tangent: ``(static, arguments, tangents of the arguments) -> (results, tangents of the
        results)``.
      batched: as for :func:`linear`.
      results: number of results.
      results_like: as for :func:`linear`.
      kernels: functions that compute the results instead, by platform.
    """
    primitive = Primitive(name)
    adapted = lambda f: f and (lambda static, _, arguments: f(static, arguments))
    by_platform = {platform: adapted(kernel) for platform, kernel in kernels.items()}
    _define(primitive, adapted(function), batched, adapted(results_like), by_platform)

    def jvp(primals, tangents, *, static, argument_tree, **trees):
        filled = [
            _zero(p) if isinstance(t, ad.Zero) else t
            for p, t in zip(primals, tangents, strict=True)
        ]
        return tuple(
            map(
                jax.tree.leaves,
                tangent(static, argument_tree.unflatten(primals), argument_tree.unflatten(filled)),
            )
        )

    ad.primitive_jvps[primitive] = jvp

    def call(static, arguments):
        leaves, argument_tree = jax.tree.flatten(arguments)
        none = jax.tree.structure(())
        return tuple(
            primitive.bind(
                *leaves,
                static=static,
                residual_tree=none,
                argument_tree=argument_tree,
                result_tree=jax.tree.structure((0,) * results),
            )
        )

    return call


# the static arguments of a norm, and the trees of residuals, arguments and results
STATIC = ("static", "residual_tree", "argument_tree", "result_tree")


def zeros(shape: tuple[int, ...], dtype, *arrays: jax.Array) -> jax.Array:
    """Return zeros that vary over the mesh axes over which any of the arrays varies."""
    return vary(jnp.zeros(shape, dtype), frozenset().union(*map(varying_axes, arrays)))


def _define(primitive, function, batched, results_like=None, kernels: Kernels = NONE):
    flat = lambda f: jax.jit(partial(_flat, f), static_argnames=STATIC)
    plain, bind = flat(function), jax.jit(primitive.bind, static_argnames=STATIC)
    primitive.multiple_results = True
    # under jax_debug_nans JAX looks at each step of the caller, but not at these
    primitive.def_impl(jax.disable_jit(False)(bind if kernels else plain))
    typed = flat(results_like) if results_like else plain
    primitive.def_abstract_eval(partial(_types, typed))
    plain_lowering = mlir.lower_fun(plain, multiple_results=True)
    mlir.register_lowering(primitive, plain_lowering)
    for platform, kernel in kernels.items():
        kernel_lowering = mlir.lower_fun(flat(kernel), multiple_results=True)
        lowering = partial(_where_it_can_run, kernel_lowering, plain_lowering)
        mlir.register_lowering(primitive, lowering, platform=platform)
    batching.primitive_batchers[primitive] = partial(_batch, primitive, batched)


def _where_it_can_run(kernel, plain, context, *arrays, **trees):
    """Lower to the kernel, or to plain JAX where no kernel can be called.

    JAX cannot export the call of a kernel, and where the program runs there may be none.
    """
    module = context.module_context
    by_kernel = not module.lowering_parameters.for_export and _is_local(module.axis_context)
    return (kernel if by_kernel else plain)(context, *arrays, **trees)


def _is_local(axis_context: Any) -> bool:
    """Return whether each array of a program is what one device has.

    A program for several devices has whole arrays, unless all axes of its mesh are manual, as in
    shard_map. XLA cannot divide the call of a kernel, and would gather its arrays first.
    """
    if hasattr(axis_context, "manual_axes"):
        return set(axis_context.mesh.axis_names) <= axis_context.manual_axes
    return (getattr(axis_context, "num_devices", None) or 1) == 1


def _flat(function, *leaves, static, residual_tree, argument_tree, result_tree):
    residuals, arguments = (
        residual_tree.unflatten(leaves[: residual_tree.num_leaves]),
        argument_tree.unflatten(leaves[residual_tree.num_leaves :]),
    )
    results, indices = (
        function(static, residuals, arguments),
        result_tree.unflatten(range(result_tree.num_leaves)),
    )
    shown = jax.tree.map(
        lambda index, result: None if index is None else result,
        indices,
        results,
        is_leaf=lambda a: a is None,
    )
    return jax.tree.leaves(shown)


def _types(flat, *types, **trees):
    return jax.make_jaxpr(partial(flat, **trees))(*types).out_avals


def _zero(a):
    return (
        jnp.zeros_like(a)
        if jnp.issubdtype(a.dtype, jnp.inexact)
        else np.zeros(a.shape, jax.dtypes.float0)
    )


def _jvp(primitive, plain, primals, tangents, **trees):
    # f(residuals, arguments) is linear in the arguments: without tangents of the residuals its
    # tangent is f(residuals, tangents)
    count = trees["residual_tree"].num_leaves
    results = primitive.bind(*primals, **trees)
    filled = [
        _zero(p) if isinstance(t, ad.Zero) else t for p, t in zip(primals, tangents, strict=True)
    ]
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        return results, primitive.bind(*primals[:count], *filled[count:], **trees)
    return results, jax.jvp(partial(plain, **trees), primals, tuple(filled))[1]


def _transpose(
    other, needed, cotangents, *leaves, static, residual_tree, argument_tree, result_tree
):
    """Run the other primitive on the cotangents.

    A cotangent that is zero is passed as None, except for the first ``needed`` ones, which must be
    arrays.
    """
    filled = [
        (None if index >= needed else jnp.zeros(c.aval.shape, c.aval.dtype))
        if isinstance(c, ad.Zero)
        else c
        for index, c in enumerate(cotangents)
    ]
    residuals, (shown, result_tree) = (
        leaves[: residual_tree.num_leaves],
        jax.tree.flatten(result_tree.unflatten(filled)),
    )
    varying = frozenset().union(*map(varying_axes, (*residuals, *shown)))
    shown = [vary(c, varying) for c in shown]
    return [None] * residual_tree.num_leaves + list(
        other.bind(
            *residuals,
            *shown,
            static=static,
            residual_tree=residual_tree,
            argument_tree=result_tree,
            result_tree=argument_tree,
        )
    )


def _batch(primitive, batched, leaves, axes, *, static, **trees):
    # every array gets the new axis in front, as `batched` expects
    size = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
    whole = [
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(leaves, axes, strict=True)
    ]
    results = primitive.bind(*whole, static=batched(static, size), **trees)
    return results, [0] * len(results)
