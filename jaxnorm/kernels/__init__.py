"""Other ways to compute norms and :func:`jaxnorm.recurrent.lstm` than plain JAX; engine/plan.py chooses.

    python -m jaxnorm.kernels

builds the kernels for this CPU, if there is a C++ compiler; with --status it tells whether they are active. Nothing depends
on them; where they are built, "native" is chosen on a CPU, for float32 and bfloat16 without a mask, and for LSTMs in float32.
Over several devices it is chosen where nothing need be gathered for it: in shard_map, and for norms in explicit sharding whose
sets lie whole on a device. The variable JAXNORM_IMPLEMENTATION names what is chosen instead, wherever that can be.
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
        message = f"jaxnorm computes in plain JAX, for {path} {error}; build the kernels again: {libraries.BUILD}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
