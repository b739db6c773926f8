"""Compare an nnx model with Flax's norms and with ours."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxnorm.flax_common.choices import Chosen
from jaxnorm.flax_common.comparison import Comparison
from jaxnorm.flax_common.inputs import check_rounds, naming_inputs
from jaxnorm.flax_common.measuring import Loss, Norms, measure
from jaxnorm.nnx.adoption import OURS, adopt
from jaxnorm.nnx.calls import check_module

__all__ = ["compare"]


def compare(
    model: nnx.Module,
    *inputs: Any,
    method: Callable[..., Any] | str = "__call__",
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

    The model stays as it is, and keeps its mode: call ``model.train()`` or ``model.eval()`` first.

    Args:
      model: an nnx module.
      *inputs: arguments of the model by position. Arrays are arguments of the compiled step, and
        anything else is static.
      method: the method to call, by name, or a function of the model and the arguments.
      loss: function of the output that returns a number. By default it is half the squared distance
        of all outputs to fixed targets.
      rounds: how often each step is timed, in turns.
      without: the norms that stay Flax's, as in :func:`adopt`.
      float64: whether to compute in float64 too.
      **keywords: arguments of the model by keyword.

    Returns:
      A :class:`~jaxnorm.flax_common.comparison.Comparison`. It prints itself as tables, and has
      ``agrees()`` and ``to_json()``.

    Raises:
      TypeError: ``model`` is no nnx module; inputs that it does not take; ``without`` is of a
        wrong kind, or ``rounds`` no integer.
      ValueError: ``rounds`` is not positive; ``without`` names no norm.
      TypeError or ValueError: inputs do not fit the model, whose error is the cause.

    >>> import flax.nnx, jax.numpy as jnp
    >>> from jaxnorm import nnx
    >>> norm = flax.nnx.LayerNorm(4, rngs=flax.nnx.Rngs(0))
    >>> found = nnx.compare(norm, jnp.arange(8.0).reshape(2, 4), rounds=2)
    >>> found.agrees(1e-5), found.norms[0].name, found.differences[0].part
    (True, 'LayerNorm', 'outputs')
    """
    check_module("compare", model)
    rounds = check_rounds(rounds)
    ours = adopt(model, without=without, copy=True)
    paths: dict[int, str] = {}
    norms = Norms(lambda module: paths.get(id(module), ""))
    for path, node in nnx.iter_graph(ours):
        if isinstance(node, tuple(OURS)):
            own = isinstance(node, tuple(OURS.values()))
            norms.add("/".join(map(str, path)), type(node).__name__, ours=own)

    def run(graph: Any) -> Callable[..., tuple[Any, Any]]:
        def call(params: Any, rest: Any, given: tuple, named: Mapping) -> tuple[Any, Any]:
            merged = nnx.merge(graph, params, rest)
            paths.clear()
            paths.update(
                (id(node), "/".join(map(str, path))) for path, node in nnx.iter_graph(merged)
            )
            function = method if callable(method) else getattr(type(merged), method)
            with naming_inputs(merged, function, given, named, compare.__kwdefaults__):
                output = function(merged, *given, **named)
            return output, nnx.state(merged, nnx.Not(nnx.Param))

        return call

    split: Any = nnx.split(model, nnx.Param, ...)
    theirs, params, rest = split
    return measure(
        (run(theirs), run(nnx.graphdef(ours))),
        params,
        rest,
        (inputs, keywords),
        norms,
        loss=loss,
        rounds=rounds,
        float64=float64,
    )
