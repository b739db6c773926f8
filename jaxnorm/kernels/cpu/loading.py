"""Registration of the library of CPU kernels with JAX, once."""

import warnings
from functools import lru_cache

from jaxnorm.kernels.cpu import libraries


def load() -> str | None:
    """Load the CPU kernels.

    Returns:
      None, or in words that follow a name why no kernels can be loaded.
    """
    if built():
        return None
    path = libraries.library()
    fault = libraries.fault(path)
    if fault:
        return f"must be rebuilt, for {path} {fault}: {libraries.BUILD}"
    return f"must be built first: {libraries.BUILD}"


@lru_cache
def built() -> bool:
    """Return whether CPU kernels exist, and register them with JAX.

    A library that is damaged is skipped with a warning, and the next is tried.
    """
    faults, taken = [], None
    for path in libraries.candidates():
        try:
            libraries.load(path)
        except libraries.DamagedError as error:
            faults.append(f"{path} {error}")
        else:
            taken = path
            break
    if faults:
        instead = f"uses {taken}" if taken else "computes in plain JAX"
        warnings.warn(
            f"jaxnorm {instead}, for {' and '.join(faults)}; rebuild the kernels: "
            f"{libraries.BUILD}",
            RuntimeWarning,
            stacklevel=2,
        )
    return taken is not None
