"""Replace the norms of linen models."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import core
from flax import linen as nn
from flax.core import meta

from jaxnorm.flax_common.choices import Chosen, check_named, choices, is_chosen
from jaxnorm.flax_common.surgery import Report
from jaxnorm.flax_common.swapping import asking_for_norm, carried, matched, swapped_row, target
from jaxnorm.flax_common.watching import MODE
from jaxnorm.linen.edited import (
    Edited,
    Replaced,
    Variables,
    call_arguments,
    check_module,
    check_variables,
    frozen_like,
    intercepting,
    naming_call,
    path_of,
    replacement,
    subtree,
    with_subtree,
)
from jaxnorm.linen.folding import NORMS
from jaxnorm.norms import table

__all__ = ["swap"]

COLLECTIONS = ("params", "batch_stats")


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
    Variables keep the names of the modules in the code, such as ``BatchNorm_0``, and their metadata
    of partitioning. A norm of layers that ``nn.scan`` stacks gets variables for each layer.

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
        axis; ``nn.scan`` does not lift state that a new norm adds; ``only`` names no norm, or the
        model calls none.
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
    options_of, norms = {}, {}
    for path, one in found.items():
        make = table.maker("linen", sys.modules["jaxnorm.linen"], to)
        options_of[path] = carried(path, one.module, row, make) | given
        norms[path] = make(**options_of[path])
    edited = Edited(model, tuple((path, Replaced(norm)) for path, norm in norms.items()))
    new, rows = core.unfreeze(dict(variables)), []
    for path, (fresh, *names) in _fresh(edited, found, norms, new, inputs, arguments).items():
        for collection in COLLECTIONS:
            old = subtree(new, collection, path)
            values = {
                name: old[name] if name in names[0] else value
                for name, value in fresh.get(collection, {}).items()
            }
            new = with_subtree(new, collection, path, values)
        kinds = type(found[path].module).__name__, type(norms[path]).__name__
        rows.append(swapped_row(path, *kinds, names, options_of[path]))
    return edited, frozen_like(variables, new), Report(tuple(rows))


class Visited(NamedTuple):
    """A module that a call runs, unbound.

    Attributes:
      module: the module.
      x: the shape and dtype of its first argument, of one layer.
      own: the shapes of its variables, of one layer, by name.
      lifted: whether a lifted transformation runs it, such as ``nn.scan``.
    """

    module: nn.Module
    x: jax.ShapeDtypeStruct
    own: dict[str, jax.ShapeDtypeStruct]
    lifted: bool


def _is_norm(module: Any) -> bool:
    return type(module) in NORMS


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
    replaced: bool = False,
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
      replaced: whether to return what an edited model calls in the place of its modules.
    """
    check_variables(variables)
    chosen = choices("only", only)
    found: dict[str, Visited] = {}
    called: dict[str, None] = {}  # all that could be chosen
    roots: list[Any] = []  # of scopes; lifted transformations have their own

    def intercept(call: Callable[..., Any], given: tuple, named: dict, context: Any) -> Any:
        module, path = context.module, path_of(context.module)
        roots.append(module.scope.root)
        ours = context.method_name == "__call__" and wanted(module)
        stands_in = replacement(model, path) if replaced else None
        ours = ours and getattr(module, "stands_in", None) is stands_in
        if ours:
            called[path] = None
        if ours and is_chosen(chosen, path, module):
            x = next(iter(call_arguments(module, given, named).values()))
            shape = jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
            lifted = module.scope.root is not roots[0]
            found[path] = Visited(module.clone(parent=None), shape, _own(module.variables), lifted)
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


def _own(variables: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the variables of a norm, by name."""
    return {
        name: jax.eval_shape(lambda value=value: meta.unbox(value))
        for collection in COLLECTIONS
        for name, value in variables.get(collection, {}).items()
    }


def _fresh(
    edited: Edited,
    found: Mapping[str, Visited],
    norms: Mapping[str, nn.Module],
    variables: Mapping[str, Any],
    inputs: tuple,
    arguments: Mapping[str, Any],
) -> dict[str, tuple]:
    """Return the variables of new norms, and the names that are kept, dropped and added."""
    fresh = {}
    for path, norm in norms.items():
        own = _initial(path, norm, found[path].x)
        fresh[path] = own, *matched(found[path].own, _own(own))[1:]
    if lifted := [path for path, (*_, added) in fresh.items() if added and found[path].lifted]:
        as_lifted = _lifted(edited, lifted, variables, inputs, arguments)
        fresh |= {path: (own, *fresh[path][1:]) for path, own in as_lifted.items()}
    return fresh


def _initial(path: str, norm: nn.Module, x: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Return the variables of a new norm alone."""
    named: dict[str, Any] = {MODE: True} if getattr(norm, MODE, True) is None else {}
    try:
        return dict(norm.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype), **named))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path or 'the model'} cannot become this norm. {error}") from error


def _lifted(
    edited: Edited,
    paths: list[str],
    variables: Mapping[str, Any],
    inputs: tuple,
    arguments: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the variables of new norms that lifted transformations run, as these make them.

    ``nn.scan`` and ``nn.vmap`` stack them along axes of their own, and name these in metadata.
    """
    rest = dict(variables)
    for collection in COLLECTIONS:
        for path in paths:
            rest = with_subtree(rest, collection, path, {})
    shapes = jax.eval_shape(lambda: rest)
    rngs = {} if (given := arguments.get("rngs")) is None else given
    rngs = {"params": jax.random.key(0), **rngs} if isinstance(rngs, Mapping) else rngs
    options = {**arguments, "rngs": rngs, "mutable": [*{*rest, *COLLECTIONS}]}

    def run() -> dict[str, dict[str, Any]]:  # nothing but initial values is left to compute
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        _, made = edited.apply(zeros, *inputs, **options)
        return {path: {name: subtree(made, name, path) for name in COLLECTIONS} for path in paths}

    try:
        return jax.jit(run)()
    except Exception as error:
        raise ValueError(
            f"{', '.join(paths)} cannot become this norm within nn.scan or nn.vmap: {error} These "
            "must lift the collections of all its variables. Leave it out by only=."
        ) from error
