"""Other ways to compute norms and :func:`jaxnorm.recurrent.lstm` than plain JAX; engine/plan.py selects one.

    python -m jaxnorm.kernels

builds the kernels for this CPU, if there is a C++ compiler; with --status it says whether they are active. Nothing depends
on them; where they are built, "native" is selected on a CPU, for norms of float32 and bfloat16 without a mask, and for LSTMs in
float32. Over several devices it is selected where nothing need be gathered for it: in shard_map, and in explicit sharding for
norms whose groups are unsharded. The variable JAXNORM_IMPLEMENTATION names what is selected instead, wherever that is possible.
"""

import warnings
from functools import lru_cache

from jaxnorm.kernels import libraries


@lru_cache
def built() -> bool:
    """Whether there are CPU kernels; if so, makes them known to JAX. Warns if they are damaged."""
    path = libraries.library()
    if not path.exists():
        return False
    try:
        libraries.load(path)
    except libraries.DamagedError as error:
        message = f"jaxnorm computes in plain JAX, for {path} {error}; rebuild the kernels: {libraries.BUILD}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
