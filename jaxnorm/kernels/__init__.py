"""Other ways to compute :func:`jaxnorm.standardize` than plain JAX, and the rule by which one is chosen.

    python -m jaxnorm.kernels

builds the kernels for this CPU, if there is a C++ compiler. Nothing depends on them; where they are built, "native" is
chosen on a CPU that is the only device, for float32 and bfloat16 without a mask. The variable JAXNORM_IMPLEMENTATION
names what is chosen instead, wherever that can be.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import jax

from jaxnorm.application import Rule
from jaxnorm.frame import Sets
from jaxnorm.kernels.build import library

IMPLEMENTATIONS = ("xla", "full_range", "native")
VARIABLE = "JAXNORM_IMPLEMENTATION"


@lru_cache
def built() -> bool:
    """Whether there are CPU kernels; if so, makes them known to JAX."""
    if not library().exists():
        return False
    from jaxnorm.kernels import native  # not before: what it needs of JAX takes long to import

    native.load(library())
    return True


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


def choose(requested: str | None, sets: Sets, rule: Rule, x: jax.Array, where, scale, bias) -> str:
    """The implementation for these arguments.

    Raises:
      ValueError: an unknown name, or one that cannot take these arguments.
    """
    if requested not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None, 'xla', 'full_range' or 'native': got {requested!r}.")
    name = os.environ.get(VARIABLE) if requested is None else requested
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(IMPLEMENTATIONS)}: got {name!r}.")
    if name in ("xla", "full_range") or (name is None and not _alone_on_cpu()):
        return name or "xla"
    obstacle = _obstacle(sets, rule, x, where, scale, bias)
    if obstacle and requested == "native":
        raise ValueError(f"implementation='native' {obstacle}. Leave implementation out.")
    return "xla" if obstacle else "native"


def _alone_on_cpu() -> bool:
    """Over several devices, arrays may be sharded, and would be gathered."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _obstacle(*arguments) -> str | None:
    if not built():
        return "must be built first: python -m jaxnorm.kernels"
    from jaxnorm.kernels import native

    return native.obstacle(*arguments)
