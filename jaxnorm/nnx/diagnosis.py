"""Diagnose the norms of an nnx model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from flax import errors, nnx

from jaxnorm.flax_common.diagnosis import Diagnosis, assert_healthy, plot_diagnoses
from jaxnorm.flax_common.diagnosis_numbers import given, health, kind_of
from jaxnorm.flax_common.health import Health
from jaxnorm.flax_common.inputs import RefusedError, naming_inputs
from jaxnorm.nnx.calls import check_module
from jaxnorm.nnx.flax_versions import get_value

__all__ = ["assert_healthy", "diagnose", "plot_diagnoses"]
PATH, CALL = "_path_in_diagnosis", "_numbers_of_call_"  # attributes of a norm


class Place:
    """The path of a norm in one diagnosis.

    No other object equals it. So a model whose calls are compiled is traced again, and its norms
    are recorded: what was traced for another diagnosis does not fit.
    """

    def __init__(self, path: str):
        self.path = path


class Numbers(nnx.Variable):
    """The health of a norm at a call, which transformations of Flax carry out of themselves."""


def diagnose(model: nnx.Module, /, *inputs: Any, **arguments: Any) -> Diagnosis:
    """Return the health of each norm of a model, Flax's or ours, in one forward pass.

    For each norm: mean and deviation of its input, ``|mean| / deviation``, the share of groups
    whose variance is below epsilon, the distance of running statistics from those of the batch,
    dead and exploding channels, and the range of its gain; see the fields of
    ``jaxnorm.flax_common.health.Health``. A mask of the norm's call counts. The model runs in
    its present mode, as a copy, and stays as it is.

    Layers in ``nnx.scan`` and ``nnx.vmap`` are a stack, with a row for each. Norms in a
    transformation of JAX, which does not know modules, are listed as missing.

    Args:
      model: the model.
      *inputs: the positional arguments of the model.
      **arguments: its other arguments.

    Returns:
      A pytree that prints itself as a table; ``nnx.jit`` can return it.

    Raises:
      TypeError: a model that is no module of nnx.
      ValueError: the model has no norm, or calls none.
      TypeError or ValueError: inputs do not fit the model, whose error is the cause.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> found = nnx.diagnose(nnx.BatchNorm(1, rngs=Rngs(0)), jnp.array([[1.0], [3.0]]))
    >>> found.norms[0].mean.tolist(), found.norms[0].mean_distance.round(2).tolist()
    (2.0, 2.0)
    """
    check_module("diagnose", model)
    try:
        return _diagnosis(model, inputs, arguments, everywhere=True)
    except Exception:  # tell below whether it is the model's own
        pass
    with naming_inputs(model, None, inputs, arguments):
        return _diagnosis(model, inputs, arguments, everywhere=False)


def _diagnosis(model: nnx.Module, inputs: Any, arguments: Any, everywhere: bool) -> Diagnosis:
    """Run a model, and return the numbers of its norms.

    ``everywhere`` includes norms within transformations of Flax. It fails where one of these cannot
    carry numbers out, such as ``nnx.vmap`` of a norm that all share.
    """
    graph, state = nnx.split(model)
    # new variables, which belong to this trace and may change in it
    copy = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    norms = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(copy) if kind_of(node)}
    for path, norm in norms.items():
        setattr(norm, PATH, Place(path))
    order: dict[str, None] = {}  # as they are called

    def record(norm: nnx.Module, args: Any, kwargs: Any) -> None:
        place = getattr(norm, PATH, None)
        if place is None or not (args or "x" in kwargs):
            return
        path = place.path
        order[path] = None
        if everywhere or norm is norms[path]:
            with suppress(errors.TraceContextError):  # of a transformation of JAX, not of Flax
                setattr(norm, f"{CALL}{_calls(norm)}", Numbers(_health(norm, args, kwargs)))

    with _recorded({type(norm) for norm in norms.values()}, record):
        copy(*inputs, **arguments)
    if not order:
        name = type(model).__name__
        raise RefusedError(f"the model must call a norm: {name} calls none of Flax or jaxnorm.")
    found = {
        f"{path}:{call}" if call else path: (get_value(getattr(norms[path], f"{CALL}{call}")), path)
        for path in order
        for call in range(_calls(norms[path]))
    }
    names = (type(norms[path]).__name__ for _, path in found.values())
    numbers = (health for health, _ in found.values())
    missing = tuple(path for path in norms if path not in found)
    return Diagnosis(tuple(numbers), tuple(found), tuple(names), missing)


def _calls(norm: nnx.Module) -> int:
    """Return how many calls of a norm have left numbers."""
    return sum(name.startswith(CALL) for name in vars(norm))


def _health(module: Any, args: Any, kwargs: Any) -> Health:
    x, mask, segments = given(module, args, kwargs)
    variables = {name: getattr(module, name, None) for name in ("scale", "mean", "var")}
    # a scale may be a method of another module, and no variable of this one
    values = {
        name: get_value(variable) if isinstance(variable, nnx.Variable) else None
        for name, variable in variables.items()
    }
    return health(module, x, mask, segments, **values)


@contextmanager
def _recorded(classes: set[type], record: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call ``record`` before each call of these classes; Python looks up calls in the class.

    A class that calls its base class, which may be among them, is recorded once.
    """
    before = {each: each.__dict__.get("__call__") for each in classes}

    def recording(each: type, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self) is each:
                record(self, args, kwargs)
            return call(self, *args, **kwargs)

        return wrapped

    # looked up before any is replaced, so that no class records through its base class too
    calls = {each: each.__call__ for each in classes}
    try:
        for each, call in calls.items():
            each.__call__ = recording(each, call)  # type: ignore[method-assign]
        yield
    finally:
        for each, own in before.items():
            if own is None:
                del each.__call__
            else:
                each.__call__ = own  # type: ignore[method-assign]
