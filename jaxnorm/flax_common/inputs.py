"""Say which arguments do not fit the call of a user's model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import Signature, ismethod, signature
from typing import Any

from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.keywords import did_you_mean


class InputsError(TypeError):
    """Raised for arguments that the call of a model does not take."""


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
    """Raise InputsError in place of a TypeError within, if the method does not take the arguments.

    The call itself comes first, since a decorator may take others than its signature says.

    Args:
      model: the module.
      method: the method that is called, by itself or by name; None for ``__call__``.
      inputs: the arguments by position.
      keywords: the arguments by keyword.
      options: the names of other arguments that may have been meant.
    """
    try:
        yield
    except TypeError as error:
        function = method
        if method is None or isinstance(method, str):
            function = getattr(type(model), method or "__call__", None)
        said = _misfit(model, function, inputs, keywords, options or ())
        if not said or isinstance(error, InputsError):
            raise
        raise InputsError(said) from None


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
