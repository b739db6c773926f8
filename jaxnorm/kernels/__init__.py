"""Other ways to compute norms and :func:`jaxnorm.recurrent.lstm` than plain JAX; engine/plan.py
selects one.

    python -m jaxnorm.kernels

builds the kernels for this CPU, if there is a C++ compiler; with --status it says whether they are
active. A wheel for Linux has them for each level of processor, which run where these are not built.
Nothing depends on them; where there are any, "native" is selected on a CPU, for norms of float32
and bfloat16, with a boolean mask too if it is the same for all channels of a position, and for
LSTMs in float32. Over several devices it is selected where nothing need be gathered for it: in
shard_map, and in explicit sharding for norms whose groups are unsharded. The variable
JAXNORM_IMPLEMENTATION names what is selected instead, wherever that is possible.
"""

import warnings
from functools import lru_cache

from jaxnorm.kernels import libraries


@lru_cache
def built() -> bool:
    """Whether there are CPU kernels; if so, makes them known to JAX. Warns of libraries that are
    damaged, and tries the next.
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
