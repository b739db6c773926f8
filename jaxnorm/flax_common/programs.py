"""Find the programs that an equation of a traced function calls."""

from typing import Any

# Primitives whose result is the result of the program within, which runs once.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
# the names of the parameter that holds it
_HELD_BY = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def called(eqn: Any) -> Any:
    """Return the program whose results are those of an equation, or None if it calls none.

    >>> import jax
    >>> traced = jax.make_jaxpr(lambda x: jax.jit(lambda x: x + 1)(x))(1.0)
    >>> called(called(traced.eqns[0]).eqns[0]) is None
    True
    """
    if eqn.primitive.name not in _CALLS:
        return None
    return next(eqn.params[name] for name in _HELD_BY if name in eqn.params)
