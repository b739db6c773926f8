"""Linear functions whose transpose is given, as JAX primitives: what a kernel for a gradient needs.

Only the transpose need be a kernel; everything else that JAX may ask for, derivatives of any order among it, it gets
from the function in plain JAX.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def linear(name: str, function: Callable, transpose: Callable, arguments: Callable, *, residuals: int) -> Callable:
    """``function(facts, *residuals, *arguments)``, linear in the arguments, transposed by ``transpose``.

    Both take hashable facts and arrays, return a tuple or list, and carry leading axes of all arrays along: a batch is
    one more of them. ``transpose(facts, *residuals, *cotangents)`` may be anything that JAX can compile.
    ``arguments(facts, *residuals)`` gives arrays of the shapes and dtypes of the arguments.
    """

    def transposed(facts, *arrays):
        given, cotangents = arrays[:residuals], arrays[residuals:]
        return jax.linear_transpose(partial(function, facts, *given), *arguments(facts, *given))(tuple(cotangents))

    forward, backward = Primitive(name), Primitive(f"{name}_transpose")
    for primitive, plain, run in ((forward, function, function), (backward, transposed, transpose)):
        primitive.multiple_results = True
        primitive.def_impl(partial(_run, jax.jit(run, static_argnums=0)))
        primitive.def_abstract_eval(partial(_types, run))
        mlir.register_lowering(primitive, mlir.lower_fun(partial(_run, run), multiple_results=True))
        ad.primitive_jvps[primitive] = partial(_jvp, primitive, plain, residuals)
        batching.primitive_batchers[primitive] = partial(_batch, primitive)
    ad.primitive_transposes[forward] = partial(_transpose, backward, residuals)
    ad.primitive_transposes[backward] = partial(_transpose, forward, residuals)
    return lambda facts, *arrays: forward.bind(*arrays, facts=facts)


def _run(function, *arrays, facts):
    return list(function(facts, *arrays))


def _types(function, *types, facts):
    return jax.make_jaxpr(partial(function, facts))(*types).out_avals


def _jvp(primitive, plain, residuals, primals, tangents, *, facts):
    results = primitive.bind(*primals, facts=facts)
    filled = [jnp.zeros_like(p) if isinstance(t, ad.Zero) else t for p, t in zip(primals, tangents, strict=True)]
    if all(isinstance(t, ad.Zero) for t in tangents[:residuals]):
        return results, primitive.bind(*primals[:residuals], *filled[residuals:], facts=facts)
    return results, list(jax.jvp(partial(plain, facts), primals, tuple(filled))[1])


def _transpose(other, residuals, cotangents, *arrays, facts):
    filled = [jnp.zeros(c.aval.shape, c.aval.dtype) if isinstance(c, ad.Zero) else c for c in cotangents]
    return [None] * residuals + list(other.bind(*arrays[:residuals], *filled, facts=facts))


def _batch(primitive, arrays, axes, *, facts):
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    whole = [
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)
    ]
    results = primitive.bind(*whole, facts=facts)
    return results, [0] * len(results)
