"""Compare a linen model with Flax's norms and with ours."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from flax import linen as nn

from jaxnorm.flax_common.choices import Chosen, check_named, choices, is_chosen
from jaxnorm.flax_common.comparison import Comparison
from jaxnorm.flax_common.inputs import check_rounds, naming_inputs
from jaxnorm.flax_common.measuring import Loss, Norms, measure
from jaxnorm.linen.adoption import KINDS, OURS, adopted
from jaxnorm.linen.edited import check_module, check_variables, path_of

__all__ = ["compare"]


def compare(
    model: nn.Module,
    variables: Mapping[str, Any] | None,
    *inputs: Any,
    method: Callable[..., Any] | str | None = None,
    rngs: Any = None,
    mutable: Sequence[str] | None = None,
    loss: Loss | None = None,
    rounds: int = 20,
    without: Chosen = None,
    float64: bool = True,
    **keywords: Any,
) -> Comparison:
    """Run a model with Flax's norms and with ours, and return how they compare.

    It compares outputs, new state, and the gradients of a loss with respect to parameters and
    floating inputs. The step of Flax's norms is also computed in float64: the same operations, with
    the same random bits, whatever dtypes the model names. Besides the errors, the comparison has
    the bytes that reverse mode keeps, the time to compile, the time of a step, and for each norm
    which implementation ran and why.

    Args:
      model: a linen module.
      variables: its variables; None initializes them.
      *inputs: arguments of the model by position. Arrays are arguments of the compiled step, and
        anything else is static.
      method: the method to call, by itself or by name; ``__call__`` by default.
      rngs: keys of random numbers, as ``apply`` takes them.
      mutable: names of the collections that may change; by default all but ``"params"``.
      loss: function of the output that returns a number. By default it is half the squared distance
        of all outputs to fixed targets.
      rounds: how often each step is timed, in turns.
      without: the norms that stay Flax's, as in :func:`adopted`.
      float64: whether to compute in float64 too.
      **keywords: arguments of the model by keyword, for example ``train=True``.

    Returns:
      A :class:`~jaxnorm.flax_common.comparison.Comparison`. It prints itself as tables, and has
      ``agrees()`` and ``to_json()``.

    Raises:
      TypeError: ``model`` is no linen module, and ``variables`` none of its; inputs that it does
        not take; ``without`` is of a wrong kind, or ``rounds`` no integer.
      ValueError: ``rounds`` is not positive; variables that are parameters alone; ``without``
        names no norm of Flax's that the model calls.
      TypeError or ValueError: variables or inputs do not fit the model, whose error is the cause.

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> from jaxnorm import linen
    >>> found = linen.compare(flax.linen.LayerNorm(), None, jnp.arange(8.0).reshape(2, 4), rounds=2)
    >>> found.agrees(1e-5), found.norms[0].name, found.differences[0].part
    (True, 'LayerNorm', 'outputs')
    """
    check_module("compare", model, edited=False)
    if variables is not None:
        check_variables(variables)
    chosen, rounds = choices("without", without, KINDS) or (), check_rounds(rounds)
    norms, theirs = Norms(path_of), dict[str, None]()
    naming = partial(naming_inputs, model, method, inputs, keywords, compare.__kwdefaults__)
    if variables is None:
        with naming():
            variables = _initial(model, rngs, method, inputs, keywords)
    state = {name: value for name, value in variables.items() if name != "params"}
    names = list(state) if mutable is None else list(mutable)

    def listen(run: Callable[..., Any], given: tuple, named: dict, context: Any) -> Any:
        module = context.module
        if context.method_name == "__call__" and isinstance(module, tuple(OURS)):
            theirs.update({path_of(module): None} if type(module) in OURS else {})
            norms.add(path_of(module), type(module).__name__, ours=_is_ours(module, chosen))
        return run(*given, **named)

    def run(context: Callable[[], Any]) -> Callable[..., tuple[Any, Any]]:
        def call(params: Any, rest: Any, given: tuple, named: Mapping) -> tuple[Any, Any]:
            collections = {**rest["state"], "params": params}
            # the innermost interceptor decides, so the others come first
            with naming(), nn.intercept_methods(listen), context():
                found = model.apply(
                    collections, *given, rngs=rest["rngs"], method=method, mutable=names, **named
                )
            check_named("without", chosen, theirs, "norms of Flax's")
            return found

        return call

    return measure(
        (run(nullcontext), run(lambda: adopted(without=without))),
        variables.get("params", {}),
        {"state": state, "rngs": rngs},
        (inputs, keywords),
        norms,
        loss=loss,
        rounds=rounds,
        float64=float64,
    )


def _is_ours(module: Any, chosen: tuple) -> bool:
    """Return whether a norm of Flax's classes, or of ours, runs as ours."""
    ours = OURS.get(type(module))
    if ours is None:
        return isinstance(module, tuple(OURS.values()))
    return not is_chosen(chosen, path_of(module), module, ours)


def _initial(
    model: nn.Module, rngs: Any, method: Any, inputs: tuple, keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the variables that the model starts from."""
    if rngs is None:
        rngs = jax.random.key(0)
    elif isinstance(rngs, Mapping):
        rngs = {"params": jax.random.key(0), **rngs}
    options = {} if method is None else {"method": method}
    return jax.jit(lambda rngs: model.init(rngs, *inputs, **options, **keywords))(rngs)
