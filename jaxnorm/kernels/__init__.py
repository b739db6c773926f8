"""Other ways to compute norms and :func:`jaxnorm.recurrent.lstm` than plain JAX, and the rule by which one is chosen.

    python -m jaxnorm.kernels

builds the kernels for this CPU, if there is a C++ compiler; with --status it tells whether they are active. Nothing depends
on them; where they are built, "native" is chosen on a CPU, for float32 and bfloat16 without a mask, and for LSTMs in float32.
Over several devices it is chosen where nothing need be gathered for it: in shard_map, and for norms in explicit sharding whose
sets lie whole on a device. The variable JAXNORM_IMPLEMENTATION names what is chosen instead, wherever that can be.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module

import jax

from jaxnorm.axes import static
from jaxnorm.kernels import libraries
from jaxnorm.kernels.placement import known

IMPLEMENTATIONS = ("xla", "native")
VARIABLE = "JAXNORM_IMPLEMENTATION"


@lru_cache
def built() -> bool:
    """Whether there are CPU kernels; if so, makes them known to JAX. Warns if they are damaged."""
    path = libraries.library()
    if not path.exists():
        return False
    try:
        libraries.load(path)
    except libraries.DamagedError as error:
        message = f"jaxnorm computes in plain JAX, for {path} {error}; build the kernels again: {libraries.BUILD}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True


def _unbuilt() -> str:
    """What must be done before there are kernels, in words."""
    path = libraries.library()
    fault = libraries.fault(path)
    return f"must be built again, for {path} {fault}: {libraries.BUILD}" if fault else f"must be built first: {libraries.BUILD}"


def wish() -> str | None:
    """What the variable names; None where it is not set, or blank.

    Raises:
      ValueError: an unknown name.
    """
    name = os.environ.get(VARIABLE, "").strip() or None
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(IMPLEMENTATIONS)}: got {name!r}.")
    return name


@contextmanager
def wished(implementation: str | None) -> Iterator[None]:
    """Within it, calls that are made, or traced, take this implementation, wherever they can; None chooses as usual."""
    before = os.environ.pop(VARIABLE, None)
    if implementation is not None:
        os.environ[VARIABLE] = implementation
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def chosen(requested: str | None, names: tuple[str, ...], module: str, x: jax.Array, *arguments) -> str:
    """One of the names, of which the first is plain JAX and the last is "native".

    Args:
      requested: by the caller; None for the rule.
      module: imported only if need be, of which ``obstacle(x, *arguments)`` says in words why its kernels cannot take
        these, or None if they can.
      x: of whose placement it is known whether a device has all of it, or what part.

    Raises:
      ValueError: an unknown name, or one that cannot take these arguments.
    """
    if requested not in (None, *names):
        raise ValueError(f"implementation must be None, {', '.join(map(repr, names[:-1]))} or {names[-1]!r}: got {requested!r}.")
    if requested not in (None, "native"):
        return requested
    if requested is None:
        name = wish()
        if name == "xla" or (name is None and not (jax.default_backend() == "cpu" and known(x))):
            return names[0]
    if not static(x.shape):
        found = f"takes no symbolic sizes: got {x.shape}"
    else:
        found = import_module(module).obstacle(x, *arguments) if built() else _unbuilt()
    if found and requested:
        raise ValueError(f"implementation='native' {found}. Leave implementation out.")
    return names[0] if found else "native"
