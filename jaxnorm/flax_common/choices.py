"""Which norms of a model an argument means: by class, by path, or by a function."""

from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import signature
from typing import Any, TypeVar

from jaxnorm.flax_common.inputs import RefusedError

Choice = type | str | Callable[[str, Any], bool]
# a class, a path, a function of path and module, or several of these
Chosen = Choice | Iterable[Choice] | None
Module = TypeVar("Module")


def choices(
    name: str, given: Chosen, kinds: Collection[type] = (object,)
) -> tuple[Choice, ...] | None:
    """Return the choices in an argument, or None if it is None.

    Args:
      name: the name of the argument, for errors.
      given: the argument.
      kinds: the classes that norms may have. Base classes and subclasses of these are choices.

    Raises:
      TypeError: it holds something else.
      ValueError: it holds a class of which no norm can be.

    >>> choices("only", None), choices("only", "encoder"), choices("only", ["encoder", "head/norm"])
    (None, ('encoder',), ('encoder', 'head/norm'))
    """
    if given is None:
        return None
    many = isinstance(given, Iterable) and not isinstance(given, str | type)
    found: tuple[Any, ...] = tuple(given) if many else (given,)  # type: ignore[arg-type]
    for choice in found:
        if not (isinstance(choice, str) or callable(choice)):
            raise TypeError(
                f"{name} must be a class, a path, a function of path and module, or several of "
                f"these: got {choice!r}."
            )
        if not isinstance(choice, str | type) and not _takes_two(choice):
            raise TypeError(
                f"a function of {name} must take path and module: got {choice!r}, which does not "
                "take two arguments."
            )
        if isinstance(choice, type) and not any(_related(choice, kind) for kind in kinds):
            got = f"{choice.__module__}.{choice.__qualname__}"
            raise ValueError(f"{name} must name classes of norms: got {got}.")
    return found


def _related(a: type, b: type) -> bool:
    return issubclass(a, b) or issubclass(b, a)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        own = signature(function)
    except (TypeError, ValueError):  # not every callable tells
        return True
    try:
        own.bind("", None)
    except TypeError:
        return False
    return True


def is_chosen(
    chosen: tuple[Choice, ...] | None, path: str, module: Any, kind: type | None = None
) -> bool:
    """Return whether a norm is among the choices; None chooses all.

    Args:
      chosen: the result of :func:`choices`.
      path: the names from the top to the norm, with slashes. A path that is chosen includes all
        norms below it.
      module: the norm.
      kind: the class that classes are compared with; by default that of the module.

    >>> [is_chosen(("encoder",), path, None) for path in ("encoder/norm", "encoder2/norm")]
    [True, False]
    """
    kind = kind or type(module)
    return chosen is None or any(_matches(choice, path, module, kind) for choice in chosen)


def _matches(choice: Choice, path: str, module: Any, kind: type) -> bool:
    if isinstance(choice, type):
        return issubclass(kind, choice)
    if isinstance(choice, str):
        # with the slash "norm" names norm and norm/inner, but not norm2
        return f"{path}/".startswith(f"{choice.strip('/')}/")
    try:
        return bool(choice(path, module))
    except Exception as error:  # whatever a user's function raises
        raise RefusedError(
            f"a function that chooses norms must return whether it takes {path!r}: it raises "
            f"{type(error).__name__}: {error}"
        ) from error


def check_named(
    name: str, chosen: tuple[Choice, ...] | None, paths: Iterable[str], what: str = "norms"
) -> None:
    """Raise ValueError unless each path that is chosen names a norm.

    Args:
      name: the name of the argument, for the error.
      chosen: the result of :func:`choices`.
      paths: the paths of all norms that may be chosen.
      what: what these norms are called.
    """
    paths = list(paths)
    for choice in unnamed(chosen, paths):
        raise ValueError(
            f"{name} must name {what} by their paths from the top: got {choice!r}; there are "
            f"{', '.join(map(repr, paths)) or 'none'}."
        )


def frozen_among(only: Chosen, frozen: Mapping[str, Module]) -> dict[str, Module]:
    """Return the frozen norms that ``only`` names, by their paths; None names all.

    Raises:
      TypeError: ``only`` is no choice.
      ValueError: it names no frozen norm.
    """
    chosen = choices("only", only)
    check_named("only", chosen, frozen, "frozen norms")
    found = {path: norm for path, norm in frozen.items() if is_chosen(chosen, path, norm)}
    if chosen is not None and not found:
        raise ValueError(
            "the model must have a frozen norm that only names: frozen are "
            f"{', '.join(frozen) or 'none'}."
        )
    return found


def unnamed(chosen: tuple[Choice, ...] | None, paths: Collection[str]) -> list[str]:
    """Return the paths among the choices that name none of the norms at ``paths``.

    >>> unnamed(("encoder", "head/norm", int), ["encoder/norm"])
    ['head/norm']
    """
    return [
        choice
        for choice in chosen or ()
        if isinstance(choice, str)
        and not any(_matches(choice, path, None, object) for path in paths)
    ]
