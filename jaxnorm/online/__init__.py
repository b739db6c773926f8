"""Pure functions for statistics of more than one batch: streams, returns, ranges, microbatches.

A state is a pytree of :class:`jaxnorm.Moments`, or of ranges. Like any pytree, it works with
``jit``, ``scan``, ``vmap``, ``shard_map`` and checkpoints.
"""

from jaxnorm.online import ranges, returns
from jaxnorm.online.microbatches import stages
from jaxnorm.online.observations import debiased, denormalize, init, normalize, update

__all__ = ["debiased", "denormalize", "init", "normalize", "ranges", "returns", "stages", "update"]
