"""Evaluate a traced function in float64, whatever dtypes it names."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxnorm.flax_common.programs import called


def in_float64(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr, computed in float64.

    Every float is float64, and every complex number complex128: arguments, constants, and what the
    function casts to another dtype. Integers and random bits are those of the function itself, so
    that it drops the same elements as in its own dtypes.

    Raises:
      NotImplementedError: a primitive that cannot be evaluated in float64.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x: x.astype("bfloat16") + 2.0**-30)(jnp.float32(1))
    >>> (in_float64(jaxpr, [jnp.float32(1)])[0] - 1) * 2**30
    np.float64(1.0)
    """
    # it was in jax.experimental before JAX 0.8
    home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    with home.enable_x64(True):
        results = jax.jit(partial(_call, jaxpr))([_widened(value) for value in arguments])
        # keys of random numbers, for one, are no arrays of NumPy
        floats = [jnp.issubdtype(value.dtype, jnp.inexact) for value in results]
        return [
            np.asarray(value) if is_float else value
            for value, is_float in zip(results, floats, strict=True)
        ]


def coarsest(jaxpr: Any) -> np.dtype:
    """Return the floating dtype with the fewest digits that a closed jaxpr computes with."""
    found = set(_dtypes(jaxpr.jaxpr)) or {np.dtype(np.float32)}
    return max(found, key=lambda dtype: float(jnp.finfo(dtype).eps))


def _dtypes(jaxpr: Any) -> Iterator[np.dtype]:
    for variable in [*jaxpr.invars, *(out for eqn in jaxpr.eqns for out in eqn.outvars)]:
        dtype = getattr(variable.aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            yield np.dtype(dtype)
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _dtypes(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _widened(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return value
    return jnp.asarray(value).astype(_wide(dtype))


def _call(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a jaxpr, whose arguments are wide already."""
    constants = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values = dict(zip(jaxpr.constvars, map(_widened, constants), strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return jnp.asarray(np.asarray(atom.val).astype(_wide(aval.dtype)))
        return values[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        values |= dict(zip(eqn.outvars, _applied(eqn, given), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _applied(eqn: Any, given: list[Any]) -> Sequence[Any]:
    """Return the results of one equation."""
    name = eqn.primitive.name
    if (inner := called(eqn)) is not None:
        return _call(inner, given)
    if name in RULES:
        return RULES[name](eqn, given)
    if any(map(_is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr))):
        raise NotImplementedError(f"{name} has no rule for float64")
    params = {key: _wide_param(key, value) for key, value in eqn.params.items()}
    found = eqn.primitive.bind(*given, **params)
    return found if eqn.primitive.multiple_results else [found]


def _wide_param(name: str, value: Any) -> Any:
    if name == "precision":  # it may name a dtype
        return None
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and name.endswith("dtype"))
    return _wide(value) if is_dtype else value


def _bitcast(eqn: Any, given: list[Any]) -> list[Any]:
    """Take the bits in the dtype of the function, such as random ones."""
    narrow = given[0].astype(eqn.invars[0].aval.dtype)
    return [_widened(eqn.primitive.bind(narrow, **eqn.params))]


def _scan(eqn: Any, given: list[Any]) -> list[Any]:
    params = eqn.params
    if "ft_in" in params:  # since JAX 0.12
        constants, carried, _ = map(len, params["ft_in"].unpack())
    else:
        constants, carried = params["num_consts"], params["num_carry"]
    fixed, carry = given[:constants], given[constants : constants + carried]
    xs = given[constants + carried :]

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        found = _call(params["jaxpr"], [*fixed, *carry, *x])
        return found[: len(carry)], found[len(carry) :]

    carry, ys = lax.scan(body, carry, xs, length=params["length"], reverse=params["reverse"])
    return [*carry, *ys]


def _while(eqn: Any, given: list[Any]) -> list[Any]:
    params = eqn.params
    ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body, carry = given[: ends[0]], given[ends[0] : ends[1]], given[ends[1] :]
    return lax.while_loop(
        lambda carry: _call(params["cond_jaxpr"], [*of_test, *carry])[0],
        lambda carry: _call(params["body_jaxpr"], [*of_body, *carry]),
        carry,
    )


def _cond(eqn: Any, given: list[Any]) -> list[Any]:
    index, *operands = given
    branches = [partial(_call_with, inner) for inner in eqn.params["branches"]]
    return lax.switch(index, branches, *operands)


def _scatter(by: Callable[..., Any], eqn: Any, given: list[Any]) -> list[Any]:
    """Scatter, as in the gradient of an embedding; the equation holds its sum as a program."""
    kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return [by(*given, **{name: eqn.params[name] for name in kept})]


def _call_with(jaxpr: Any, *arguments: Any) -> list[Any]:
    return _call(jaxpr, arguments)


RULES: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "bitcast_convert_type": _bitcast,
    "reduce_precision": lambda eqn, given: given,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "scatter": partial(_scatter, lax.scatter),
    "scatter-add": partial(_scatter, lax.scatter_add),
    "scatter_add": partial(_scatter, lax.scatter_add),  # its name in later versions
}
