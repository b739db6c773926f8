"""Which of a model's norms keep running as Flax's when the others are adopted."""

from collections.abc import Callable, Iterable
from typing import Any

Choice = type | str | Callable[[str, Any], bool]
Without = Choice | Iterable[Choice] | None


def choices(without: Without) -> tuple[Choice, ...]:
    """Return the choices in ``without``: classes, paths, and functions of path and module.

    Raises:
      TypeError: it holds something else.

    >>> choices(None), choices("encoder"), choices(["encoder", "head/norm"])
    ((), ('encoder',), ('encoder', 'head/norm'))
    """
    if without is None:
        return ()
    if isinstance(without, str) or callable(without):
        return (without,)
    found = tuple(without) if isinstance(without, Iterable) else (without,)
    for choice in found:
        if not (isinstance(choice, str) or callable(choice)):
            raise TypeError(
                "without must be a class, a path, a function of path and module, or several of "
                f"these: got {choice!r}."
            )
    return found


def is_left_out(chosen: tuple[Choice, ...], path: str, module: Any, ours: type) -> bool:
    """Return whether a norm stays Flax's.

    Args:
      chosen: the result of :func:`choices`.
      path: the names from the top to the norm, with slashes. A path that is chosen includes all
        norms below it.
      module: the norm.
      ours: the class that it would get.

    >>> [is_left_out(("encoder",), path, None, int) for path in ("encoder/norm", "encoder2/norm")]
    [True, False]
    """
    return any(_matches(choice, path, module, ours) for choice in chosen)


def _matches(choice: Choice, path: str, module: Any, ours: type) -> bool:
    if isinstance(choice, type):
        # ours is a subclass of Flax's class, so that either names the norm
        return issubclass(ours, choice)
    if isinstance(choice, str):
        # with the slash "norm" names norm and norm/inner, but not norm2
        return f"{path}/".startswith(f"{choice.strip('/')}/")
    return bool(choice(path, module))
