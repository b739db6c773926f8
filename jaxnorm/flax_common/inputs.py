"""Say which arguments do not fit the call of a user's model."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import Signature, ismethod, signature
from typing import Any

import jax
from flax import errors

from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.keywords import did_you_mean


class InputsError(TypeError):
    """Raised for arguments that the call of a model does not take."""


class RefusedError(ValueError):
    """Raised within the call of a model for what this package refuses, in its own words."""


# what errors of Flax say about the arguments of apply; of any other error the inputs may be a cause
BLAMED = {
    errors.ScopeParamNotFoundError: "variables must be those of the model",
    errors.ScopeCollectionNotFound: "variables must be those of the model",
    errors.ScopeVariableNotFoundError: "variables must be those of the model",
    errors.ScopeParamShapeError: "variables and inputs must fit each other",
    errors.ModifyScopeVariableError: "mutable must name what the call updates",
}


def check_rounds(rounds: Any) -> int:
    """Return a positive integer.

    Raises:
      TypeError: no integer.
      ValueError: none that is positive.
    """
    must = "rounds must be a positive integer"
    if (count := integer(rounds, must)) < 1:
        raise ValueError(f"{must}: got {rounds!r}.")
    return count


@contextmanager
def naming_inputs(
    model: Any,
    method: Callable[..., Any] | str | None,
    inputs: tuple,
    keywords: Mapping[str, Any],
    options: Collection[str] | None = None,
) -> Iterator[None]:
    """Say what does not fit, in place of an error of the call of a model, which is its cause.

    The call itself comes first, since a decorator may take others than its signature says.

    Args:
      model: the module.
      method: the method that is called, by itself or by name; None for ``__call__``.
      inputs: the arguments by position.
      keywords: the arguments by keyword.
      options: the names of other arguments that may have been meant.

    Raises:
      InputsError: the method does not take the arguments.
      TypeError: the call raises a TypeError.
      ValueError: the call raises anything else.
    """
    try:
        yield
    except (InputsError, RefusedError):
        raise
    except Exception as error:  # whatever a user's model raises
        function = method
        if method is None or isinstance(method, str):
            function = getattr(type(model), method or "__call__", None)
        is_type = isinstance(error, TypeError)
        if is_type and (said := _misfit(model, function, inputs, keywords, options or ())):
            raise InputsError(said) from error
        kind = TypeError if is_type else ValueError
        raise kind(_failure(model, inputs, error)) from error


def _failure(model: Any, inputs: tuple, error: Exception) -> str:
    """Return what must hold so that the call of a model does not raise an error."""
    blamed = (said for kind, said in BLAMED.items() if isinstance(error, kind))
    must = next(blamed, "inputs and model must fit each other")
    leaves = [leaf for leaf in jax.tree.leaves(inputs) if hasattr(leaf, "shape")]
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:4])
    shown = f" for {shown}{', ...' if leaves[4:] else ''}" if leaves else ""
    # without the address of a page
    first = re.sub(r" \(https?://\S+\)", "", str(error).partition("\n")[0]).rstrip(". ")
    return f"{must}: {type(model).__name__} raises {type(error).__name__}{shown}: {first}."


def _misfit(
    model: Any,
    function: Any,
    inputs: tuple,
    keywords: Mapping[str, Any],
    options: Collection[str],
) -> str:
    """Say why a method does not take these arguments, or return "" if it may."""
    try:
        own = signature(function.__func__ if ismethod(function) else function)
    except (TypeError, ValueError):  # not every callable tells
        return ""
    try:
        own.bind(model, *inputs, **keywords)
    except TypeError as error:
        unknown = keywords.keys() - own.parameters.keys()
        hint = did_you_mean(unknown, [*own.parameters, *options]) if unknown else ""
        name = getattr(function, "__qualname__", type(function).__name__)
        by_name = f" and {', '.join(keywords)} by keyword" if keywords else ""
        why = str(error).removeprefix("got ")
        return (
            f"inputs must fit {name}{_shown(own)}: got {len(inputs)} by position{by_name}, {why}."
            f"{hint}"
        )
    return ""


def _shown(own: Signature) -> str:
    """Return a signature without the model and without types."""
    return str(
        Signature([p.replace(annotation=p.empty) for p in list(own.parameters.values())[1:]])
    )
