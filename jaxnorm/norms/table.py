"""The table of all norms by name, which the modules, the command line and the tests read."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from jaxnorm.arguments import validation
from jaxnorm.norms.rows import ROWS, Norm

_ROWS = dict(ROWS)


class Norms(Mapping[str, Norm]):
    """Norms by their names; a read-only mapping that prints itself."""

    def __init__(self, rows: dict[str, Norm]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> Norm:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return "\n".join(map(str, self._rows.values()))


def available_norms() -> Norms:
    """Return the table of all norms, by name.

    It has the norms of jaxnorm, and those that :func:`register_norm` added.

    Returns:
      A read-only mapping from names to rows. It prints itself: for each norm how its module is
      called, its modules and its function, its formula, its axes and its paper.

    >>> import jaxnorm as jn
    >>> "layer" in jn.available_norms()
    True
    >>> jn.available_norms()["rms"]  # doctest: +ELLIPSIS
    Norm(name='rms', linen='RMSNorm', nnx='RMSNorm', function='rms_norm', ...)
    >>> print(jn.available_norms()["rms"])
    rms                   y = norm(x)                     RMSNorm, jn.rms_norm
        x / sqrt(mean(x**2) + epsilon) * scale              n h w [c]
        Zhang & Sennrich 2019, arXiv 1910.07467
    """
    return Norms(_ROWS)


def register_norm(
    name: str,
    /,
    *,
    linen: Callable[..., Any] | None = None,
    nnx: Callable[..., Any] | None = None,
    formula: str = "",
    axes: str = "",
    source: str = "",
    call: str = "y = norm(x)",
    positions: bool = False,
    running: bool = False,
) -> Norm:
    """Add a norm of your own to the table.

    :func:`available_norms` then lists it, ``norm(name)`` of :mod:`jaxnorm.linen` or
    :mod:`jaxnorm.nnx` makes its module, and ``jaxnorm compare --norms name`` trains networks with
    it.

    Args:
      name: a name that no norm has.
      linen: the class of a linen module, or a function of keyword arguments that returns a module.
      nnx: the class of an nnx module, or a function of ``(num_features, *, rngs, **options)``.
      formula: the output, in a line.
      axes: which elements share statistics, as a pattern.
      source: the paper.
      call: how a module is called, and what it returns. Programs that replace one norm by another
        use norms with ``"y = norm(x)"``.
      positions: whether ``x`` must have axes between the batch and the features.
      running: whether modules keep running statistics. They must then take
        ``use_running_average`` and ``momentum``, as Flax's BatchNorm does.

    Returns:
      The new row.

    Raises:
      TypeError: a module that cannot be called, or no module at all.
      ValueError: a name that is taken, or that is no word.

    >>> import flax.linen, jax, jaxnorm as jn
    >>> class Doubled(flax.linen.Module):
    ...     def __call__(self, x):
    ...         return 2 * jn.rms_norm(x)
    >>> print(jn.register_norm("doubled", linen=Doubled, formula="2 x / sqrt(mean(x**2))"))
    doubled               y = norm(x)                     Doubled
        2 x / sqrt(mean(x**2))
    >>> jn.linen.norm("doubled").apply({}, jax.numpy.array([3.0, -3.0])).round(3).tolist()
    [2.0, -2.0]
    >>> jn.unregister_norm("doubled")
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be a word of letters, digits and _: got {name!r}.")
    if name in _ROWS:
        raise ValueError(
            f"name must not be taken: there is a norm {name!r}. Choose another, or remove a norm "
            "of your own by unregister_norm."
        )
    given = {family: module for family, module in (("linen", linen), ("nnx", nnx)) if module}
    if not given or not all(map(_makes, given.values())):
        got = given or "neither"
        raise TypeError(f"linen or nnx must be the class of a module: got {got}.")
    about = {"formula": formula, "axes": axes, "source": source, "call": call}
    for argument, text in about.items():
        if not isinstance(text, str):
            raise TypeError(f"{argument} must be a string: got {text!r}.")
    positions = validation.flag("positions", positions)
    running = validation.flag("running", running)
    _ROWS[name] = row = Norm(name, linen, nnx, **about, positions=positions, running=running)
    return row


def _makes(module: Any) -> bool:
    """Return whether this makes modules, and is no module itself, which can be called too."""
    of_flax = any(each.__module__.startswith("flax.") for each in type(module).__mro__)
    return callable(module) and (isinstance(module, type) or not of_flax)


def unregister_norm(name: str, /) -> None:
    """Remove a norm of your own from the table.

    Args:
      name: the name under which :func:`register_norm` added it.

    Raises:
      ValueError: no such norm, or one of jaxnorm's.

    >>> import jaxnorm as jn
    >>> jn.unregister_norm("layer")
    Traceback (most recent call last):
      ...
    ValueError: name must be of a norm of your own: 'layer' is one of jaxnorm's.
    """
    if isinstance(find(name).linen or find(name).nnx, str):
        raise ValueError(f"name must be of a norm of your own: {name!r} is one of jaxnorm's.")
    del _ROWS[name]


def find(name: str, argument: str = "name") -> Norm:
    """Return the row of a norm.

    Args:
      name: the name of the norm.
      argument: what errors call the name.

    Raises:
      ValueError: there is no norm of this name.
    """
    if isinstance(name, str) and name in _ROWS:
        return _ROWS[name]
    hint = f" Did you mean {close!r}?" if (close := _resembling(str(name))) else ""
    raise ValueError(f"{argument} must be one of {', '.join(_ROWS)}: got {name!r}.{hint}")


def _resembling(name: str) -> str | None:
    """Return the name of the norm that is meant, perhaps by its class or function."""
    names = {}
    for row in _ROWS.values():
        for known in (row.function, row.linen, row.nnx, row.name):
            if isinstance(known, str):
                names[_bare(known)] = row.name
    close = get_close_matches(_bare(name), names, 1)
    return names[close[0]] if close else None


def _bare(name: str) -> str:
    """Return a name without what all names of norms share: layer of LayerNorm and layer_norm."""
    return name.lower().replace("_", "").removesuffix("norm")


def make(family: str, classes: Any, name: str, /, *given: Any, **options: Any) -> Any:
    """Return a new module of a norm.

    Args:
      family: "linen" or "nnx".
      classes: the package of the family.
      name: the norm.
      *given: positional arguments of the constructor.
      **options: keyword arguments of the constructor.

    Raises:
      ValueError: an unknown norm, or one without a module of this family.
    """
    return maker(family, classes, name)(*given, **options)


def maker(family: str, classes: Any, name: str) -> Callable[..., Any]:
    """Return the class of a norm's modules, or the function that makes them.

    The arguments and errors are those of :func:`make`.
    """
    module = getattr(find(name), family)
    if module is None:
        raise ValueError(
            f"name must be of a norm with a module for {family}: {name!r} has none. Register it "
            f"with {family}=."
        )
    return getattr(classes, module) if isinstance(module, str) else module
