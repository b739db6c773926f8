"""Replace the norms of linen models."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import core
from flax import linen as nn
from flax.core import meta

from jaxnorm.flax_common.choices import Chosen, check_named, choices, is_chosen
from jaxnorm.flax_common.inputs import RefusedError
from jaxnorm.flax_common.surgery import Report
from jaxnorm.flax_common.swapping import asking_for_norm, carried, matched, swapped_row, target
from jaxnorm.flax_common.watching import MODE
from jaxnorm.linen.edited import (
    Edited,
    Variables,
    check_module,
    check_variables,
    frozen_like,
    intercepting,
    naming_call,
    path_of,
    subtree,
    with_subtree,
)
from jaxnorm.linen.folding import NORMS
from jaxnorm.norms import table

__all__ = ["swap"]

COLLECTIONS = ("params", "batch_stats")


@dataclass(frozen=True)
class Replaced:
    """Call another module in the place of one, with its variables."""

    module: nn.Module

    def run(self, call: Callable[..., Any], module: nn.Module, given: tuple, named: dict) -> Any:
        """Return what the other module returns. It is not asked for the mode of a batch norm."""
        arguments = call_arguments(module, given, named)
        takes = signature(type(self.module).__call__).parameters
        names = {name: value for name, value in arguments.items() if value is not None}
        x = names.pop(next(iter(arguments)))
        if MODE not in takes or getattr(self.module, MODE, None) is not None:
            names.pop(MODE, None)
        # with the variables of the module, which has not read them
        new = self.module.clone(parent=module.scope.rewound() if module.scope else None)
        object.__setattr__(new, "is_edit", True)
        return new(x, **names)


@asking_for_norm
def swap(
    model: nn.Module | Edited,
    variables: Variables,
    *inputs: Any,
    to: str,
    only: Chosen = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Edited, Variables, Report]:
    """Replace norms by another norm, which keeps what parameters it can.

    Parameters and statistics of the same name and shape keep their values, such as scale and bias
    of a batch norm that becomes a group norm. So do ``dtype``, ``param_dtype``, ``use_scale``,
    ``use_bias``, ``axis_name`` and, where both add it to a variance or mean square, ``epsilon``.
    Variables keep the names of the modules in the code, such as ``BatchNorm_0``. A norm of layers
    that ``nn.scan`` stacks, along the first axes, gets variables for each layer.

    Args:
      model: the model, which stays as it is.
      variables: its variables.
      *inputs: inputs of the model, to find the norms that it calls.
      to: the name of the new norm in :func:`jaxnorm.available_norms`, for example ``"group"``.
      only: the norms to replace: a class, a path such as ``"encoder/BatchNorm_0"``, which includes
        all norms below it, a function of path and module, or several of these. None takes all.
      options: arguments of the new norm's class, such as ``{"num_groups": 8}``.
      **arguments: further arguments of ``model.apply``, such as ``train=False``.

    Returns:
      The new model, whose ``apply`` and ``init`` are called as the model's; its variables; and a
      report of what was kept, dropped and added.

    Raises:
      TypeError: no ``to``; options that the class does not take; ``only`` is something else.
      ValueError: an unknown norm, or one that needs more than ``x``; features that are not the last
        axis; ``only`` names no norm, or the model calls none.
      TypeError or ValueError: variables or inputs do not fit the model, whose error is the cause.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jaxnorm.linen import swap
    >>> norm, x = nn.BatchNorm(use_running_average=True), jnp.array([[1.0, -1.0]])
    >>> swapped, variables, report = swap(norm, norm.init(jax.random.key(0), x), x, to="rms")
    >>> swapped.apply(variables, x).round(3).tolist()
    [[1.0, -1.0]]
    >>> report.rows[0].kept, report.rows[0].dropped
    (('scale', 'epsilon=1e-05'), ('bias', 'mean', 'var'))
    """
    check_module("swap", model)
    row, given = target(to), dict(options or {})
    found = visited(swap, model, variables, inputs, arguments, only, _is_norm)
    new, edits, rows = core.unfreeze(dict(variables)), {}, []
    for path, (module, x, stack) in found.items():
        make = table.maker("linen", sys.modules["jaxnorm.linen"], to)
        own = carried(path, module, row, make) | given
        norm = make(**own)
        fresh = _fresh(path, norm, x, stack)
        shared: dict[str, dict[str, Any]] = {}
        names: tuple[tuple[str, ...], ...] = ((), (), ())
        for collection in COLLECTIONS:
            old = subtree(new, collection, path)
            values, *more = matched(old, fresh.get(collection, {}))
            names = tuple(a + b for a, b in zip(names, more, strict=True))
            shared[collection] = values
        for collection, values in shared.items():
            new = with_subtree(new, collection, path, values)
        edits[path] = Replaced(norm)
        rows.append(swapped_row(path, type(module).__name__, type(norm).__name__, names, own))
    edited = Edited(model, tuple(edits.items()))
    return edited, frozen_like(variables, new), Report(tuple(rows))


class Visited(NamedTuple):
    """A module that a call runs, unbound.

    Attributes:
      module: the module.
      x: the shape and dtype of its first argument, of one layer.
      stack: the axes of layers that its variables are stored with.
    """

    module: nn.Module
    x: jax.ShapeDtypeStruct
    stack: tuple[int, ...]


def _is_norm(module: Any) -> bool:
    return type(module) in NORMS


def call_arguments(module: Any, given: tuple, named: dict) -> dict[str, Any]:
    """Return the arguments of the call of a module by their names."""
    found = signature(type(module).__call__).bind(module, *given, **named).arguments
    return dict(list(found.items())[1:])


def with_mutable(variables: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``apply`` by which norms may update their state, as in training."""
    return {"mutable": [name for name in variables if name != "params"], **arguments}


def visited(
    function: Callable[..., Any],
    model: Any,
    variables: Mapping[str, Any],
    inputs: tuple,
    arguments: Mapping[str, Any],
    only: Chosen,
    wanted: Callable[[Any], bool],
) -> dict[str, Visited]:
    """Return the modules that a call runs, by their paths.

    Args:
      function: the function that looks for them.
      model: the model.
      variables: its variables.
      inputs: the positional arguments of the call.
      arguments: further arguments of ``model.apply``.
      only: which modules.
      wanted: whether a module can be among them.
    """
    check_variables(variables)
    chosen = choices("only", only)
    found: dict[str, Visited] = {}
    called: dict[str, None] = {}  # all that could be chosen

    def intercept(call: Callable[..., Any], given: tuple, named: dict, context: Any) -> Any:
        module, path = context.module, path_of(context.module)
        ours = context.method_name == "__call__" and wanted(module)
        ours = ours and not hasattr(module, "is_edit")
        if ours:
            called[path] = None
        if ours and is_chosen(chosen, path, module):
            x = next(iter(call_arguments(module, given, named).values()))
            shape = jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
            stack = _stack(path, module, variables)
            found[path] = Visited(module.clone(parent=None), shape, stack)
        return call(*given, **named)

    def run(variables: Any) -> Any:
        with naming_call(function, model, inputs, arguments), intercepting(intercept):
            return model.apply(variables, *inputs, **with_mutable(variables, arguments))

    jax.eval_shape(run, variables)
    check_named("only", chosen, called)
    if not found:
        raise ValueError(
            f"the model must call a norm {'that only names' if only else 'that can be changed'}: "
            f"it calls {', '.join(called) or 'none'}. Norms without running statistics cannot be "
            "frozen, and subclasses of Flax's norms stay as they are."
        )
    return found


def _stack(path: str, module: nn.Module, variables: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the axes of layers in front of the variables that the model stores at a path.

    ``nn.scan`` and ``nn.vmap`` stack the variables of a module, and give it those of one layer.

    Raises:
      RefusedError: variables are stored in another way than that.
    """
    own = {
        (collection, name): jnp.shape(meta.unbox(value))
        for collection in COLLECTIONS
        for name, value in module.variables.get(collection, {}).items()
    }
    stored = {
        (collection, name): jnp.shape(meta.unbox(subtree(variables, collection, path)).get(name))
        for collection, name in own
    }
    stacks = {stored[key][: len(stored[key]) - len(own[key])] for key in own} or {()}
    stack = next(iter(stacks))
    if len(stacks) > 1 or any(stored[key] != stack + own[key] for key in own):
        shown = ", ".join(f"{key[1]} of {own[key]} is stored as {stored[key]}" for key in own)
        raise RefusedError(
            f"{path} must get its variables as the model stores them, or layer by layer from their "
            f"first axes: {shown}. Leave it out by only=."
        )
    return stack


def _fresh(
    path: str, norm: nn.Module, x: jax.ShapeDtypeStruct, stack: tuple[int, ...]
) -> dict[str, Any]:
    """Return the variables of a new norm, for each layer of a stack."""
    named: dict[str, Any] = {MODE: True} if getattr(norm, MODE, True) is None else {}
    init = lambda key: norm.init(key, jnp.zeros(x.shape, x.dtype), **named)
    for _ in stack:
        init = jax.vmap(init)
    keys = jax.random.split(jax.random.key(0), stack) if stack else jax.random.key(0)
    try:
        return dict(init(keys))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path or 'the model'} cannot become this norm. {error}") from error
