"""Replace the norms of nnx models, and freeze their running statistics."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from jaxnorm.flax_common.choices import Chosen, check_named, choices, frozen_among, is_chosen
from jaxnorm.flax_common.inputs import naming_inputs
from jaxnorm.flax_common.surgery import Report, Row, are_values, changed
from jaxnorm.flax_common.swapping import asking_for_norm, carried, matched, swapped_row, target
from jaxnorm.nnx.batch import is_frozen
from jaxnorm.nnx.calls import check_module
from jaxnorm.nnx.flax_versions import set_value
from jaxnorm.nnx.folding import NORMS, become, holders, modules, values
from jaxnorm.nnx.recalibration import WITH_RUNNING
from jaxnorm.norms import table

__all__ = ["freeze", "swap", "unfreeze"]

Model = TypeVar("Model", bound=nnx.Module)


@asking_for_norm
def swap(
    model: Model,
    *,
    to: str,
    only: Chosen = None,
    options: Mapping[str, Any] | None = None,
    copy: bool = True,
    rngs: nnx.Rngs | None = None,
) -> tuple[Model, Report]:
    """Replace norms by another norm, which keeps what parameters it can.

    Parameters and statistics of the same name and shape keep their values, such as scale and bias
    of a batch norm that becomes a group norm. So do ``dtype``, ``param_dtype``, ``use_scale``,
    ``use_bias``, ``axis_name`` and, where both add it to a variance or mean square, ``epsilon``.
    A model that passes ``use_running_average`` at the call must stop that where the new norm has
    none. A norm of layers that ``nnx.vmap`` stacked gets variables for each layer.

    Args:
      model: the model.
      to: the name of the new norm in :func:`jaxnorm.available_norms`, for example ``"group"``.
      only: the norms to replace: a class, a path such as ``"encoder/norm"``, which includes all
        norms below it, a function of path and module, or several of these. None takes all.
      options: arguments of the new norm's class, such as ``{"num_groups": 8}``.
      copy: whether to leave the model as it is, the default, and change a copy with variables of
        its own. Make optimizers of the new model afterwards.
      rngs: random number generators for parameters that are new; ``nnx.Rngs(0)`` by default.

    Returns:
      The new model, and a report of what was kept, dropped and added.

    Raises:
      TypeError: no ``to``; options that the class does not take; ``only`` is something else.
      ValueError: an unknown norm, or one that needs more than ``x``; features that are not the last
        axis, or layers that are stacked along another than the first axes; ``only`` names no norm,
        or the model has none.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> swapped, report = nnx.swap(nnx.BatchNorm(2, rngs=Rngs(0)), to="rms")
    >>> swapped(jnp.array([[1.0, -1.0]])).round(3).tolist()
    [[1.0, -1.0]]
    >>> report.rows[0].kept, report.rows[0].dropped
    (('scale', 'epsilon=1e-05'), ('bias', 'mean', 'var'))
    """
    row, given = target(to), dict(options or {})
    model = nnx.clone(model) if copy else model
    made, rows = [], []
    for path, old in _found("swap", model, only, NORMS).items():
        make = table.maker("nnx", sys.modules["jaxnorm.nnx"], to)
        own = carried(path, old, row, make) | given
        try:
            new = _made(make, old, rngs or nnx.Rngs(0), own)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path or 'the model'} cannot become this norm. {error}") from error
        kept, *names = matched(values(old), values(new))
        before = holders(old)
        for name, variable in holders(new).items():
            if name in names[0] and type(before[name]) is type(variable):
                setattr(new, name, before[name])  # with its metadata
            else:
                set_value(variable, kept[name])
        made.append((old, new))
        rows.append(swapped_row(path, type(old).__name__, type(new).__name__, names, own))
    for old, new in made:
        become(old, new)
    return model, Report(tuple(rows))


def _made(
    make: Callable[..., Any], old: Any, rngs: nnx.Rngs, options: Mapping[str, Any]
) -> nnx.Module:
    """Return the new norm, with variables for each layer where the old one's are of a stack."""
    # group norms of Flax keep the number of groups alone
    features = getattr(old, "num_features", None) or old.num_groups * old.group_size
    stacks = {value.shape[:-1] for value in values(old).values()} or {()}
    if len(stacks) > 1 or {value.shape[-1] for value in values(old).values()} - {features}:
        shapes = ", ".join(f"{name} {value.shape}" for name, value in values(old).items())
        raise ValueError(
            f"Its layers must be stacked along the first axes of all variables, before "
            f"{features} features: got {shapes}."
        )
    (stack,) = stacks
    norms = [make(features, rngs=rngs, **options) for _ in range(math.prod(stack))]
    if stack:
        layers = [values(norm) for norm in norms]
        for name, variable in holders(norms[0]).items():
            stacked = jnp.stack([layer[name] for layer in layers])
            set_value(variable, stacked.reshape(*stack, *stacked.shape[1:]))
    return norms[0]


def freeze(
    model: Model, *inputs: Any, only: Chosen = None, **arguments: Any
) -> tuple[Model, Report]:
    """Make norms normalize by their running statistics, and keep these, also in training.

    Neither ``model.train()`` nor ``use_running_average=False`` at the call changes that, until
    :func:`unfreeze`. :func:`recalibrate` and :func:`accumulate` leave frozen norms as they are.
    Gradients with respect to scale and bias stay.

    Args:
      model: the model, which is modified.
      *inputs: inputs of the model, for the largest difference of its outputs in the report; none
        leave it out.
      only: the norms to freeze: a class, a path such as ``"encoder/norm"``, which includes all
        norms below it, a function of path and module, or several of these. None takes all.
      **arguments: further arguments of the call of the model.

    Returns:
      The model, and a report.

    Raises:
      TypeError: ``only`` is something else.
      ValueError: ``only`` names no norm with running statistics, the model has none, or some are
        Flax's, which know only the mode that ``train()`` sets.
      TypeError or ValueError: inputs do not fit the model, whose error is the cause.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x = jnp.array([[1.0], [2.0]])
    >>> norm, report = nnx.freeze(nnx.BatchNorm(1, rngs=Rngs(0)), x)
    >>> norm(x).round(3).tolist(), norm.mean[...].tolist(), round(report.difference, 3)
    ([[1.0], [2.0]], [0.0], 2.0)
    """
    found = _found("freeze", model, only, (nnx.BatchNorm,), ours=WITH_RUNNING)
    if flax := [path for path, norm in found.items() if not isinstance(norm, WITH_RUNNING)]:
        raise ValueError(
            f"norms must be of jaxnorm.nnx to be frozen: {', '.join(map(repr, flax))} would "
            "thaw in model.train(). Use jaxnorm.nnx.BatchNorm, for example by jaxnorm.nnx.adopt."
        )
    before = _outputs(model, inputs, arguments)
    for norm in found.values():
        norm.frozen = True
    rows = [Row(path, type(norm).__name__, "frozen") for path, norm in found.items()]
    return model, changed(rows, before, _outputs(model, inputs, arguments))


def unfreeze(
    model: Model, *inputs: Any, only: Chosen = None, **arguments: Any
) -> tuple[Model, Report]:
    """Let norms follow the mode of the model again, which :func:`freeze` had overridden.

    Args:
      model: the model, which is modified.
      *inputs: inputs of the model, for the largest difference of its outputs in the report; none
        leave it out.
      only: the norms, as in :func:`freeze`. None takes all that are frozen.
      **arguments: further arguments of the call of the model.

    Returns:
      The model, and a report of the norms that were frozen.

    Raises:
      TypeError: the model is no nnx module, or ``only`` is something else.
      ValueError: ``only`` names no frozen norm.
      TypeError or ValueError: inputs do not fit the model, whose error is the cause.

    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm, _ = nnx.freeze(nnx.BatchNorm(1, rngs=Rngs(0)))
    >>> norm, report = nnx.unfreeze(norm)
    >>> report.rows[0].outcome
    'unfrozen'
    """
    check_module("unfreeze", model)
    norms = modules(model, (), WITH_RUNNING)
    found = frozen_among(only, {path: norm for path, norm in norms.items() if is_frozen(norm)})
    before = _outputs(model, inputs, arguments)
    for norm in found.values():
        del norm.frozen
    rows = [Row(path, type(norm).__name__, "unfrozen") for path, norm in found.items()]
    return model, changed(rows, before, _outputs(model, inputs, arguments))


def _outputs(model: nnx.Module, inputs: tuple, arguments: Mapping[str, Any]) -> Any:
    """Return what a copy of a model returns, or None if there are no values to run on."""
    given = (*inputs, *arguments.values())
    if not given or not are_values((nnx.state(model), given)):
        return None

    def run(model: Any) -> Any:
        with naming_inputs(model, None, inputs, arguments, freeze.__kwdefaults__):
            return model(*inputs, **arguments)

    return nnx.jit(run)(nnx.clone(model))


def _found(
    function: str, model: nnx.Module, only: Chosen, classes: tuple[type, ...], ours: Any = ()
) -> dict[str, Any]:
    """Return the norms of a model that ``only`` names, by their paths.

    Args:
      function: the name of the function that is called.
      model: the model.
      only: which norms.
      classes: exactly these.
      ours: and these with their subclasses.
    """
    check_module(function, model)
    chosen = choices("only", only)
    norms = modules(model, classes, ours)
    check_named("only", chosen, norms)
    found = {path: norm for path, norm in norms.items() if is_chosen(chosen, path, norm)}
    if not found:
        raise ValueError(
            f"the model must have a norm that only names: it has {', '.join(norms) or 'none'}. "
            "Subclasses of Flax's norms stay as they are."
        )
    return found
