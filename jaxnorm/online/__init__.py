"""Statistics beyond one batch, as pure functions: of a stream of observations, of returns, of
microbatches.

A state is a pytree of :class:`jaxnorm.Moments`: it goes through ``jit``, ``scan``, ``vmap``,
``shard_map`` and checkpoints as any other.
"""

from jaxnorm.online import returns
from jaxnorm.online.microbatches import stages
from jaxnorm.online.observations import debiased, denormalize, init, normalize, update

__all__ = ["debiased", "denormalize", "init", "normalize", "returns", "stages", "update"]
