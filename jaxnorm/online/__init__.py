"""Pure functions for statistics of more than one batch: observations, returns, microbatches.

A state is a pytree of :class:`jaxnorm.Moments`. Like any pytree, it works with ``jit``, ``scan``,
``vmap``, ``shard_map`` and checkpoints.
"""

from jaxnorm.online import returns
from jaxnorm.online.microbatches import stages
from jaxnorm.online.observations import debiased, denormalize, init, normalize, update

__all__ = ["debiased", "denormalize", "init", "normalize", "returns", "stages", "update"]
