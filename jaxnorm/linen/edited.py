"""A linen model some of whose modules run otherwise than its code says."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any, Protocol, TypeVar, cast

import jax
from flax import linen as nn
from flax.core import FrozenDict, freeze

from jaxnorm.flax_common.inputs import naming_inputs
from jaxnorm.flax_common.watching import MODE

Variables = TypeVar("Variables", bound=Mapping[str, Any])
# arguments of apply that are not the model's
OF_APPLY = ("rngs", "method", "mutable", "capture_intermediates")
# as nn.intercept_methods takes it: call, positional and keyword arguments, context
Interceptor = Callable[[Callable[..., Any], tuple, dict, Any], Any]


class Edit(Protocol):
    """How a module runs instead."""

    def run(self, call: Callable[..., Any], module: nn.Module, given: tuple, named: dict) -> Any:
        """Return what the module returns; ``call(*given, **named)`` is the call as it was."""


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
        object.__setattr__(new, "stands_in", self)
        return new(x, **names)


@dataclass(frozen=True)
class Edited:
    """A linen model some of whose modules run otherwise than its code says.

    It stands for the model in ``apply`` and ``init``, also in :func:`jaxnorm.linen.recalibrate` and
    as ``apply_fn`` of Flax's ``TrainState``, and under JAX's transformations. The edits hold in its
    calls alone; the model itself is unchanged.

    Attributes:
      model: the model.
      edits: how modules run, by their paths.
      key: tells programs within this model from those within others.
    """

    model: Any
    edits: tuple[tuple[str, Edit], ...]
    key: object = field(default_factory=object, init=False, repr=False, compare=False)

    def apply(self, variables: Mapping[str, Any], *inputs: Any, **arguments: Any) -> Any:
        """Apply the model as ``model.apply`` does, with the edits."""
        with self._in_force():
            return self.model.apply(variables, *inputs, **arguments)

    def init(self, rngs: Any, *inputs: Any, **arguments: Any) -> Any:
        """Initialize variables as ``model.init`` does, with the edits."""
        with self._in_force():
            return self.model.init(rngs, *inputs, **arguments)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        with distinct(self.key), intercepting(_by_path(self)):
            yield


def call_arguments(module: Any, given: tuple, named: dict) -> dict[str, Any]:
    """Return the arguments of the call of a module by their names."""
    found = signature(type(module).__call__).bind(module, *given, **named).arguments
    return dict(list(found.items())[1:])


def path_of(module: Any) -> str:
    """Return the names from the top to a bound module, with slashes."""
    return "/".join(module.path)


def check_module(function: str, model: Any, *, edited: bool = True) -> None:
    """Raise TypeError unless this is a linen model.

    Args:
      function: the name of the function that takes it, which nnx has as well.
      model: the model.
      edited: whether the function also takes a model that was edited.
    """
    if isinstance(model, nn.Module) or (edited and isinstance(model, Edited)):
        return
    got = f"{type(model).__name__}. For nnx there is jaxnorm.nnx.{function}."
    if isinstance(model, Edited):
        got = "a model that was edited. Pass its field model."
    elif isinstance(model, type):
        got = f"the class {model.__name__}. Make a module."
    raise TypeError(f"model must be a module of flax.linen: got {got}")


def naming_call(
    function: Callable[..., Any],
    model: Any,
    inputs: tuple,
    arguments: Mapping[str, Any],
) -> AbstractContextManager[None]:
    """Return a context that says what does not fit where ``model.apply`` raises an error.

    Args:
      function: the function that takes model, inputs and arguments.
      model: the model, which may be edited.
      inputs: its inputs by position.
      arguments: the arguments of ``apply`` by keyword, options of Flax's among them.
    """
    while isinstance(model, Edited):
        model = model.model
    keywords = {name: value for name, value in arguments.items() if name not in OF_APPLY}
    options = (*OF_APPLY, *signature(function).parameters)
    return naming_inputs(model, arguments.get("method"), inputs, keywords, options)


def check_variables(variables: Any) -> None:
    """Raise an error unless these may be the variables of a linen model.

    Raises:
      TypeError: they are no dict.
      ValueError: they are parameters alone.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            "variables must be what init returns, a dict of collections: got "
            f"{type(variables).__name__}."
        )
    layers = [value for value in variables.values() if isinstance(value, Mapping)]
    if "params" not in variables and any({"kernel", "scale", "bias"} & {*each} for each in layers):
        raise ValueError(
            f"variables must be a dict of collections: got {', '.join(list(variables)[:4])}. Pass "
            "{'params': params}."
        )


def replacement(model: Any, path: str) -> Replaced | None:
    """Return the last edit of a model that calls another module in the place of the one at a path.

    The module that it calls has the edit as its attribute ``stands_in``.
    """
    while isinstance(model, Edited):
        edit = dict(model.edits).get(path)
        if isinstance(edit, Replaced):
            return edit
        model = model.model
    return None


def _by_path(edited: Edited) -> Callable[..., Any]:
    """Return the interceptor that runs the edits of a model.

    It sees a module before what the model inside calls in its place. A replacement takes the place
    of either; other edits are of the latter.
    """
    edits = dict(edited.edits)

    def intercept(call: Callable[..., Any], given: tuple, named: dict, context: Any) -> Any:
        path = path_of(context.module)
        edit = edits.get(path)
        if edit is None or context.method_name != "__call__":
            return call(*given, **named)
        edits_of = None if isinstance(edit, Replaced) else replacement(edited.model, path)
        if getattr(context.module, "stands_in", None) is not edits_of:
            return call(*given, **named)
        return edit.run(call, context.module, given, named)

    return intercept


# of the calls of modules within the innermost adopted()
interceptors: ContextVar[tuple[Interceptor, ...]] = ContextVar("interceptors", default=())


@contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Call modules by an interceptor, as ``nn.intercept_methods`` does, also adopted ones."""
    before = interceptors.set((*interceptors.get(), interceptor))
    try:
        with nn.intercept_methods(interceptor):
            yield
    finally:
        interceptors.reset(before)


def intercepted(call: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """Return a call of a module that all interceptors within :func:`adopted` see."""

    def through(interceptor: Interceptor, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: interceptor(call, given, named, context)

    for interceptor in reversed(interceptors.get()):
        call = through(interceptor, call)
    return call


# the keys of the contexts around a call
_keys: ContextVar[tuple[object, ...]] = ContextVar("_keys", default=())


@contextmanager
def distinct(key: object) -> Iterator[None]:
    """Keep programs that JAX compiles within apart from those compiled elsewhere.

    Equal keys have the same programs, whenever the context is entered.
    """
    outer = _keys.get()
    keys = outer if outer[-1:] == (key,) else (*outer, key)
    before = _keys.set(keys)
    try:
        with _programs()(keys):
            yield
    finally:
        _keys.reset(before)


@cache
def _programs() -> Any:
    """Return the context whose value tells JAX which programs it may use again.

    Making it lets JAX forget what it compiled before, so it is made where it is first needed.
    """
    return jax.make_user_context(None)


def subtree(variables: Mapping[str, Any], collection: str, path: str) -> dict[str, Any]:
    """Return the variables of a module in a collection, by name."""
    tree: Any = variables.get(collection, {})
    for name in filter(None, path.split("/")):
        tree = tree.get(name, {})
    return dict(tree)


def with_subtree(
    variables: Mapping[str, Any], collection: str, path: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return variables in which those of a module are others, without what is empty then.

    >>> with_subtree({"params": {"a": {"b": {"scale": 1}, "c": {"bias": 2}}}}, "params", "a/b", {})
    {'params': {'a': {'c': {'bias': 2}}}}
    """
    first, *rest = collection, *filter(None, path.split("/"))
    below = variables.get(first, {})
    new = with_subtree(below, rest[0], "/".join(rest[1:]), values) if rest else dict(values)
    others = {name: value for name, value in variables.items() if name != first}
    return {**variables, first: new} if new else others


def frozen_like(old: Variables, new: Mapping[str, Any]) -> Variables:
    """Return new variables that are a FrozenDict, or hold one, where the old ones do.

    >>> frozen_like({"params": freeze({"a": 1})}, {"params": {"b": 2}, "batch_stats": {}})
    {'params': FrozenDict({
        b: 2,
    }), 'batch_stats': {}}
    """
    if isinstance(old, FrozenDict):
        return cast(Variables, freeze(dict(new)))
    held = {name for name, value in old.items() if isinstance(value, FrozenDict)}
    found = {name: freeze(value) if name in held else value for name, value in new.items()}
    return cast(Variables, found)
