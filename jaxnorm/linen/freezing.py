"""Freeze the running statistics of linen models."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import linen as nn

from jaxnorm.flax_common.choices import Chosen, frozen_among
from jaxnorm.flax_common.surgery import Report, Row, are_values, changed
from jaxnorm.flax_common.watching import MODE
from jaxnorm.linen.edited import (
    Edited,
    call_arguments,
    check_module,
    check_variables,
    naming_call,
)
from jaxnorm.linen.surgery import visited, with_mutable

__all__ = ["freeze", "unfreeze"]


@dataclass(frozen=True)
class Frozen:
    """Call a norm so that it normalizes by its running statistics.

    Attributes:
      norm: the norm, unbound.
    """

    norm: nn.Module = field(compare=False, repr=False)

    def run(self, call: Callable[..., Any], module: nn.Module, given: tuple, named: dict) -> Any:
        """Return what the norm returns in evaluation."""
        arguments = call_arguments(module, given, named)
        arguments.pop(MODE, None)
        x = arguments.pop(next(iter(arguments)))
        before = getattr(module, MODE)
        object.__setattr__(module, MODE, True)  # the model's own copy, to which linen refuses it
        try:
            return call(x, **arguments)
        finally:
            object.__setattr__(module, MODE, before)


def freeze(
    model: nn.Module | Edited,
    variables: Mapping[str, Any],
    *inputs: Any,
    only: Chosen = None,
    **arguments: Any,
) -> tuple[Edited, Report]:
    """Make norms normalize by their running statistics, and keep these, also in training.

    :func:`recalibrate` and :func:`accumulate` leave the statistics of frozen norms as they are.
    Gradients with respect to scale and bias stay.

    Args:
      model: the model, which stays as it is.
      variables: its variables.
      *inputs: inputs of the model, to find the norms that it calls, and for the difference in the
        report.
      only: the norms to freeze: a class, a path such as ``"encoder/BatchNorm_0"``, which includes
        all norms below it, a function of path and module, or several of these. None takes all.
      **arguments: further arguments of ``model.apply``, such as ``train=False``. Unless ``mutable``
        is among them, all collections but parameters may be updated, and the updates are dropped.

    Returns:
      The new model, whose ``apply`` is called as the model's, and a report, with the largest
      difference of the outputs unless it is called with abstract variables or in ``jax.jit``.
      :func:`unfreeze` returns the model.

    Raises:
      TypeError: ``only`` is something else.
      ValueError: ``only`` names no norm with running statistics, or the model calls none.
      TypeError or ValueError: variables or inputs do not fit the model, whose error is the cause.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.BatchNorm(use_running_average=False), jnp.array([[1.0], [2.0]])
    >>> variables = norm.init(jax.random.key(0), x)
    >>> frozen, report = nn.freeze(norm, variables, x)
    >>> frozen.apply(variables, x).round(3).tolist(), report.rows[0].outcome
    ([[1.0], [2.0]], 'frozen')
    >>> round(report.difference, 3)
    2.0
    """
    check_module("freeze", model)
    found = visited(freeze, model, variables, inputs, arguments, only, _runs, replaced=True)
    edits = tuple((path, Frozen(one.module)) for path, one in found.items())
    rows = [Row(path, type(one.module).__name__, "frozen") for path, one in found.items()]
    frozen, given = Edited(model, edits), (variables, inputs, arguments)
    return frozen, changed(rows, _outputs(model, *given), _outputs(frozen, *given))


def unfreeze(
    model: nn.Module | Edited,
    variables: Mapping[str, Any] | None = None,
    *inputs: Any,
    only: Chosen = None,
    **arguments: Any,
) -> tuple[nn.Module | Edited, Report]:
    """Return a model without what :func:`freeze` did to it.

    Args:
      model: the model, which stays as it is.
      variables: its variables; None, the default, leaves out the difference in the report.
      *inputs: inputs of the model, for the largest difference of its outputs in the report.
      only: the norms, as in :func:`freeze`. None takes all that are frozen.
      **arguments: further arguments of ``model.apply``, as in :func:`freeze`.

    Returns:
      The model, and a report of the norms that were frozen.

    Raises:
      TypeError: the model is no linen module, or ``only`` is something else.
      ValueError: ``only`` names no frozen norm.
      TypeError or ValueError: variables or inputs do not fit the model, whose error is the cause.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.BatchNorm(use_running_average=False), jnp.array([[1.0], [2.0]])
    >>> frozen, _ = nn.freeze(norm, norm.init(jax.random.key(0), x), x)
    >>> thawed, report = nn.unfreeze(frozen)
    >>> thawed is norm, report.rows[0].outcome
    (True, 'unfrozen')
    """
    check_module("unfreeze", model)
    if variables is not None:
        check_variables(variables)
    found = frozen_among(only, dict(_frozen(model)))
    rows = [Row(path, type(norm).__name__, "unfrozen") for path, norm in found.items()]
    thawed, given = _thawed(model, found), (variables, inputs, arguments)
    return thawed, changed(rows, _outputs(model, *given), _outputs(thawed, *given))


def _outputs(
    model: nn.Module | Edited,
    variables: Mapping[str, Any] | None,
    inputs: tuple,
    arguments: Mapping[str, Any],
) -> Any:
    """Return what a model returns without its state, or None if there are no values to run on."""
    if variables is None or not are_values((variables, inputs, arguments)):
        return None
    arguments = with_mutable(variables, arguments)
    state = arguments["mutable"] is not False or arguments.get("capture_intermediates")

    def run(variables: Mapping[str, Any]) -> Any:
        with naming_call(unfreeze, model, inputs, arguments):
            found = model.apply(variables, *inputs, **arguments)
        return found[0] if state else found

    return jax.jit(run)(variables)


def _frozen(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the frozen norms of a model, with their paths."""
    if isinstance(model, Edited):
        yield from _frozen(model.model)
        yield from ((path, edit.norm) for path, edit in model.edits if isinstance(edit, Frozen))


def _thawed(model: Any, paths: Collection[str]) -> Any:
    """Return a model in which the norms at these paths are not frozen."""
    if not isinstance(model, Edited):
        return model
    inner = _thawed(model.model, paths)
    edits = tuple(
        (path, edit)
        for path, edit in model.edits
        if not (isinstance(edit, Frozen) and path in paths)
    )
    return replace(model, model=inner, edits=edits) if edits else inner


def _runs(module: Any) -> bool:
    return hasattr(module, MODE)
