"""Kernels: programs other than plain JAX that compute norms, statistics or recurrent networks.

    python -m jaxnorm.kernels

builds those for this CPU, if there is a C++ compiler; with --status it says whether they are
active. A wheel for Linux has them for each level of processor, which run where these are not built.
Nothing depends on them; where there are any, "native" is selected on a CPU, for norms of float32
and bfloat16, with a boolean mask too if it is the same for all channels of a position, and for
LSTMs in float32. Over several devices it is selected where nothing need be gathered for it: in
shard_map, and in explicit sharding for norms whose groups are unsharded. The variable
JAXNORM_IMPLEMENTATION names what is selected instead, wherever that is possible.

This file is the table of all kernels, which core/plan.py selects from; :func:`register` adds a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

PLAIN = ("reference", "xla")  # the implementations that are no kernels, but plain JAX
OPERATIONS = ("norm", "moments", "lstm")
PLATFORMS = ("cpu", "gpu", "tpu")


def _ready() -> None:
    """Load nothing."""


@dataclass(frozen=True)
class Family:
    """One row of the table: kernels that share a name.

    Attributes:
      platforms: those of JAX on which the kernels are selected, of "cpu", "gpu" and "tpu".
      modules: maps an operation, of "norm", "moments" and "lstm", to the name of the module that
        computes it, which is imported when the operation is first asked for.
      load: makes the kernels ready to run, whenever they are considered. It returns None, or why it
        cannot, as words that continue "implementation='name' ...".
      only_by_name: why they run only where they are named, as a clause; empty where they are
        selected by themselves.
    """

    platforms: tuple[str, ...]
    modules: Mapping[str, str]
    load: Callable[[], str | None] = _ready
    only_by_name: str = ""


def _load_for_cpu() -> str | None:
    from jaxnorm.kernels.cpu import loading  # most programs for other platforms do without

    return loading.load()


# They are considered in this order.
TABLE: dict[str, Family] = {
    "native": Family(
        ("cpu",),
        {"norm": "jaxnorm.kernels.cpu.norm", "lstm": "jaxnorm.recurrent.native"},
        _load_for_cpu,
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all implementations, plain JAX first."""
    return (*PLAIN, *TABLE)


def register(
    name: str,
    *,
    platforms: tuple[str, ...],
    norm: str | None = None,
    moments: str | None = None,
    lstm: str | None = None,
    load: Callable[[], str | None] = _ready,
    only_by_name: str = "",
) -> None:
    """Add kernels to the table, as the implementation of this name.

    They are considered after those that are in the table already. What a module has to define, and
    what makes that short, is in CONTRIBUTING.md under *A new kernel*.

    Args:
      name: what ``implementation=`` and the variable JAXNORM_IMPLEMENTATION call them.
      platforms: the platforms on which they are selected: ``("tpu",)``, for example.
      norm: name of the module that normalizes, with ``obstacle`` and ``forward``.
      moments: name of the module that computes statistics alone, with ``obstacle`` and
        ``statistics``.
      lstm: name of the module that runs LSTMs, with ``obstacle`` and ``whole``.
      load: makes them ready, see :class:`Family`.
      only_by_name: a clause that says why they are not selected by themselves, see
        :class:`Family`.

    Raises:
      TypeError: platforms that are no tuple of names, modules that are no names.
      ValueError: a name that is taken by something else, an unknown platform, no module at all.

    >>> from jaxnorm import kernels
    >>> kernels.register("native", platforms=("gpu",), norm="mine")
    Traceback (most recent call last):
        ...
    ValueError: name must not be taken: 'native' is. Names are 'reference', 'xla', 'native'.
    """
    modules = {"norm": norm, "moments": moments, "lstm": lstm}
    given = {operation: module for operation, module in modules.items() if module is not None}
    for operation, module in given.items():
        if not isinstance(module, str):
            raise TypeError(f"{operation} must be the name of a module: got {module!r}.")
    if isinstance(platforms, str) or not all(isinstance(each, str) for each in platforms):
        raise TypeError(f"platforms must be a tuple of names: got {platforms!r}.")
    if not platforms or not set(platforms) <= set(PLATFORMS):
        known = ", ".join(map(repr, PLATFORMS))
        raise ValueError(f"platforms must be some of {known}: got {tuple(platforms)!r}.")
    if not given:
        raise ValueError("norm, moments or lstm must name a module: got none of them.")
    family = Family(tuple(platforms), given, load, only_by_name)
    if name in PLAIN or TABLE.get(name, family) != family:
        taken = ", ".join(map(repr, names()))
        raise ValueError(f"name must not be taken: {name!r} is. Names are {taken}.")
    TABLE[name] = family
