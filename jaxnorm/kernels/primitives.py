"""JAX primitives: functions with a given derivative, and linear functions with a given transpose.

JAX can derive the transpose from the function, but stores for it what the function computes; a
transpose written down, in JAX or as a kernel, may need less. Everything else that JAX may ask for,
derivatives of any order included, it derives from the function.

A kernel has no derivative but the given one, and retains it only as a primitive: before 0.12 JAX
drops that of a custom_jvp where it takes apart a loop, and then cannot differentiate a second time.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxnorm.engine.collectives import vary, varying_axes


def linear(
    name: str,
    function: Callable,
    transpose: Callable,
    like: Callable,
    batched: Callable,
    *,
    results: int,
    results_like: Callable | None = None,
    elsewhere: Callable | None = None,
) -> Callable:
    """A callable ``(facts, residuals, arguments) -> results``, linear in the arguments.

    Args:
      name: of the primitive.
      function: what is called; facts are hashable, the others tuples of arrays or None.
      transpose: ``(facts, residuals, cotangents of the results) -> cotangents of the arguments``,
        whatever computes them. Of all results but the first a cotangent may be None, for 0.
      like: ``residuals -> arguments``, arrays of their shapes and dtypes.
      batched: ``(facts, size) -> facts`` for arrays all of which have one more axis, of this size,
        in front.
      results: how many there are.
      results_like: as ``function``, with results of the same shapes and dtypes, for less to trace:
        reverse mode, which needs nothing else of the function, then takes less time to compile.
      elsewhere: as ``transpose``, for platforms other than CPUs and for export; ``transpose`` then
        runs on CPUs only.
    """

    transposed = transposed_by_jax(function, like)
    forward, backward = Primitive(name), Primitive(f"{name}_transpose")
    both = (
        (forward, function, function, None, results_like),
        (backward, transposed, transpose, elsewhere, None),
    )
    for primitive, plain, run, there, typed in both:
        _define(primitive, run, there, batched, typed)
        ad.primitive_jvps[primitive] = partial(_jvp, primitive, partial(_flat, plain))
    ad.primitive_transposes[forward] = partial(_transpose, backward, 1)
    ad.primitive_transposes[backward] = partial(_transpose, forward, math.inf)

    def call(facts, residuals, arguments):
        stored, given = jax.tree.flatten(residuals)
        leaves, taken = jax.tree.flatten(arguments)
        varying = frozenset().union(*map(varying_axes, (*stored, *leaves)))
        static = {
            "facts": facts,
            "given": given,
            "taken": taken,
            "made": jax.tree.structure((0,) * results),
        }
        return tuple(forward.bind(*stored, *(vary(a, varying) for a in leaves), **static))

    return call


def transposed_by_jax(function: Callable, like: Callable) -> Callable:
    """``(facts, residuals, cotangents of the results) -> cotangents of the arguments``, of what
    :func:`linear` takes.
    """

    def transposed(facts, residuals, cotangents):
        def shown(arguments):
            return [
                result
                for result, of in zip(
                    function(facts, residuals, arguments), cotangents, strict=True
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
    batched: Callable,
    *,
    results: int,
    elsewhere=None,
) -> Callable:
    """A callable ``(facts, arguments) -> results`` that has this derivative.

    Args:
      name: of the primitive.
      function: what is called; facts are hashable, the arguments a tuple of arrays or None, the
        results a tuple of arrays.
      tangent: ``(facts, arguments, tangents of the arguments) -> (results, tangents of the
        results)``.
      batched: as for :func:`linear`.
      results: how many there are.
      elsewhere: as ``function``, for platforms other than CPUs and for export; ``function`` then
        runs on CPUs only.
    """
    primitive = Primitive(name)
    adapted = lambda f: f and (lambda facts, _, arguments: f(facts, arguments))
    _define(primitive, adapted(function), adapted(elsewhere), batched)

    def jvp(primals, tangents, *, facts, taken, **trees):
        filled = [
            _zero(p) if isinstance(t, ad.Zero) else t
            for p, t in zip(primals, tangents, strict=True)
        ]
        return tuple(
            map(jax.tree.leaves, tangent(facts, taken.unflatten(primals), taken.unflatten(filled)))
        )

    ad.primitive_jvps[primitive] = jvp

    def call(facts, arguments):
        leaves, taken = jax.tree.flatten(arguments)
        none = jax.tree.structure(())
        return tuple(
            primitive.bind(
                *leaves,
                facts=facts,
                given=none,
                taken=taken,
                made=jax.tree.structure((0,) * results),
            )
        )

    return call


# beside the facts, the trees of residuals, arguments and results
STATIC = ("facts", "given", "taken", "made")


def _define(primitive, function, elsewhere, batched, typed=None):
    run = jax.jit(partial(_flat, function), static_argnames=STATIC)
    other = jax.jit(partial(_flat, elsewhere), static_argnames=STATIC) if elsewhere else run
    primitive.multiple_results = True
    # its steps are no steps of the caller's, to be looked at one by one for NaN
    primitive.def_impl(jax.disable_jit(False)(run))
    primitive.def_abstract_eval(
        partial(_types, jax.jit(partial(_flat, typed), static_argnames=STATIC) if typed else run)
    )
    here, there = (mlir.lower_fun(f, multiple_results=True) for f in (run, other))
    mlir.register_lowering(primitive, there)
    if elsewhere:
        mlir.register_lowering(primitive, partial(_unless_exported, here, there), platform="cpu")
    batching.primitive_batchers[primitive] = partial(_batch, primitive, batched)


def _unless_exported(here, there, context, *arrays, **static):
    """What is exported may run where there are no kernels, and JAX exports no calls of any."""
    exported = context.module_context.lowering_parameters.for_export
    return (there if exported else here)(context, *arrays, **static)


def _flat(function, *leaves, facts, given, taken, made):
    residuals, arguments = (
        given.unflatten(leaves[: given.num_leaves]),
        taken.unflatten(leaves[given.num_leaves :]),
    )
    results, places = function(facts, residuals, arguments), made.unflatten(range(made.num_leaves))
    shown = jax.tree.map(
        lambda place, result: None if place is None else result,
        places,
        results,
        is_leaf=lambda a: a is None,
    )
    return jax.tree.leaves(shown)


def _types(flat, *types, **static):
    return jax.make_jaxpr(partial(flat, **static))(*types).out_avals


def _zero(a):
    return (
        jnp.zeros_like(a)
        if jnp.issubdtype(a.dtype, jnp.inexact)
        else np.zeros(a.shape, jax.dtypes.float0)
    )


def _jvp(primitive, plain, primals, tangents, **static):
    count = static["given"].num_leaves
    results = primitive.bind(*primals, **static)
    filled = [
        _zero(p) if isinstance(t, ad.Zero) else t for p, t in zip(primals, tangents, strict=True)
    ]
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        return results, primitive.bind(*primals[:count], *filled[count:], **static)
    return results, jax.jvp(partial(plain, **static), primals, tuple(filled))[1]


def _transpose(other, needed, cotangents, *leaves, facts, given, taken, made):
    """Runs the other primitive. Cotangents that are zero are passed as None, but for the first
    ``needed`` ones, which must be arrays.
    """
    filled = [
        (None if place >= needed else jnp.zeros(c.aval.shape, c.aval.dtype))
        if isinstance(c, ad.Zero)
        else c
        for place, c in enumerate(cotangents)
    ]
    residuals, (shown, made) = leaves[: given.num_leaves], jax.tree.flatten(made.unflatten(filled))
    varying = frozenset().union(*map(varying_axes, (*residuals, *shown)))
    shown = [vary(c, varying) for c in shown]
    return [None] * given.num_leaves + list(
        other.bind(*residuals, *shown, facts=facts, given=given, taken=made, made=taken)
    )


def _batch(primitive, batched, leaves, axes, *, facts, **trees):
    size = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
    whole = [
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(leaves, axes, strict=True)
    ]
    results = primitive.bind(*whole, facts=batched(facts, size), **trees)
    return results, [0] * len(results)
