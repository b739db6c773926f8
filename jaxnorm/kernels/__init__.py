"""Kernels: programs other than plain JAX that compute norms, statistics or recurrent networks.

    python -m jaxnorm.kernels

builds the kernels for this CPU, if there is a C++ compiler. With --status it says whether they are
active. A wheel for Linux has kernels for each level of processor, which run where none are built.
Nothing depends on kernels.

"pallas" runs where it is named. On a TPU it takes layer and RMS norm of rows, and instance and
group norm of images of 128 channels or more; on a GPU (Hopper and newer) rows of up to 4096
elements; all of float32 and bfloat16. It reads each row or image once. It was compiled for TPUs and
GPUs, and has not run on one.

Where they exist, "native" is selected on a CPU. It takes norms of float32 and bfloat16, also with a
boolean mask that is the same for all channels of a position, and LSTMs in float32. Over several
devices it is selected where nothing need be gathered for it: in shard_map, and in explicit sharding
for norms whose groups are unsharded. The variable JAXNORM_IMPLEMENTATION names the implementation
that is selected instead, wherever that is possible.

This file is the table of all kernels, and core/plan.py selects from it; :func:`register` adds a
row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

PLAIN = ("reference", "xla")  # implementations in plain JAX, without kernels
PLATFORMS = ("cpu", "gpu", "tpu")


def _ready() -> None:
    """Load nothing."""


@dataclass(frozen=True)
class Family:
    """One row of the table: kernels that share a name.

    Attributes:
      platforms: JAX platforms on which the kernels are selected, of "cpu", "gpu" and "tpu".
      modules: maps an operation, of "norm", "add_norm", "moments" and "lstm", to the name of the
        module that computes it. The module is imported when the operation is first asked for.
      load: makes the kernels ready to run, whenever they are considered. It returns None, or why it
        cannot, in words that continue "implementation='name' ...".
      only_by_name: why they run only where they are named, as a clause; empty where they are
        selected by themselves.
    """

    platforms: tuple[str, ...]
    modules: Mapping[str, str]
    load: Callable[[], str | None] = _ready
    only_by_name: str = ""


def _load_for_cpu() -> str | None:
    from jaxnorm.kernels.cpu import loading  # programs for other platforms rarely need it

    return loading.load()


# The kernels are considered in this order.
TABLE: dict[str, Family] = {
    "native": Family(
        ("cpu",),
        {"norm": "jaxnorm.kernels.cpu.norm", "lstm": "jaxnorm.recurrent.native"},
        _load_for_cpu,
    ),
    "pallas": Family(
        ("tpu", "gpu"),
        {"norm": "jaxnorm.kernels.pallas.norm", "add_norm": "jaxnorm.kernels.pallas.add_norm"},
        only_by_name="it has not run on a TPU or GPU yet, and runs only where it is named",
    ),
}


def names() -> tuple[str, ...]:
    """Return the names of all implementations, plain JAX first."""
    return (*PLAIN, *TABLE)


def register(
    name: str,
    *,
    platforms: tuple[str, ...],
    norm: str | None = None,
    add_norm: str | None = None,
    moments: str | None = None,
    lstm: str | None = None,
    load: Callable[[], str | None] = _ready,
    only_by_name: str = "",
) -> None:
    """Add kernels to the table, as the implementation of this name.

    They are considered after the kernels that are already in the table. CONTRIBUTING.md says under
    *A new kernel* what a module has to define, and what makes that short.

    Args:
      name: the name for ``implementation=`` and the variable JAXNORM_IMPLEMENTATION.
      platforms: the platforms on which they are selected: ``("tpu",)``, for example.
      norm: name of the module that normalizes, with ``obstacle`` and ``forward``.
      add_norm: name of the module that normalizes x + residual, with ``forward`` and
        ``platforms``. It takes what the module of ``norm`` takes.
      moments: name of the module that computes statistics alone, with ``obstacle`` and
        ``statistics``.
      lstm: name of the module that runs LSTMs, with ``obstacle`` and ``whole``.
      load: makes them ready, see :class:`Family`.
      only_by_name: a clause that says why they are not selected by themselves, see :class:`Family`.

    Raises:
      TypeError: name, a platform or a module is not a string, or ``load`` is not a function.
      ValueError: the name is taken, a platform is unknown, or no module is given.

    >>> from jaxnorm import kernels
    >>> kernels.register("mine", platforms=("cuda",), norm="my_norms")
    Traceback (most recent call last):
        ...
    ValueError: platforms must be some of 'cpu', 'gpu', 'tpu': got ('cuda',).
    """
    modules = {"norm": norm, "add_norm": add_norm, "moments": moments, "lstm": lstm}
    given = {operation: module for operation, module in modules.items() if module is not None}
    for operation, module in given.items():
        if not isinstance(module, str):
            raise TypeError(f"{operation} must be the name of a module: got {module!r}.")
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f"name must be a word: got {name!r}.")
    if not callable(load):
        raise TypeError(f"load must be a function: got {load!r}.")
    listed = isinstance(platforms, tuple | list)
    if not listed or not all(isinstance(each, str) for each in platforms):
        raise TypeError(f"platforms must be a tuple of names: got {platforms!r}.")
    if not platforms or not set(platforms) <= set(PLATFORMS):
        known = ", ".join(map(repr, PLATFORMS))
        raise ValueError(f"platforms must be some of {known}: got {tuple(platforms)!r}.")
    if not given.keys() - {"add_norm"}:
        raise ValueError("norm, moments or lstm must name a module: got none of them.")
    family = Family(tuple(platforms), given, load, only_by_name)
    if name in PLAIN or TABLE.get(name, family) != family:
        taken = ", ".join(map(repr, names()))
        raise ValueError(f"name must not be taken: {name!r} is. Names are {taken}.")
    TABLE[name] = family
