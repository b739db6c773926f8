"""Statistics as numbers: the mean rounded, and what it and the count are short of by rounding in further words."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.engine.collectives import devices
from jaxnorm.engine.groups import Frame, count_elements, scale_down, total_weight
from jaxnorm.engine.reference import Stats
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.words import beyond, of_integers, total, two_sum


class Numbers(NamedTuple):
    """Count, mean and variance of each group in the shape of the statistics; of the count two further words, of the mean one."""

    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
    mean: jax.Array
    var: jax.Array
    low_count: tuple[jax.Array, jax.Array]
    low_mean: jax.Array


def assemble(spec: Spec, stats: Stats, where: jax.Array | None = None) -> Numbers:
    """The mean as two words, powers of two put back."""
    frame, offset, var = stats
    count = jnp.full_like(var, total_weight(spec, frame))
    further = _further_words(spec, frame, where, count)
    mean, low_mean = (offset, jnp.zeros_like(offset)) if frame.pivot is None else two_sum(frame.pivot, offset)
    up = None if frame.power is None else -frame.power
    first, second, third = (jnp.broadcast_to(word, var.shape) for word in (count, *further))
    low_mean = scale_down(lax.stop_gradient(low_mean), up)
    found = Numbers(first, scale_down(mean, up), scale_down(scale_down(var, up), up), (second, third), low_mean)
    return jax.tree.map(lambda leaf: leaf.reshape(spec.stats_shape), found)


def _further_words(spec: Spec, frame: Frame, where: jax.Array | None, count: jax.Array) -> tuple:
    """What a count of elements is short of in one word: 0 of weights, whose sum is rounded anyway."""
    if where is not None and where.dtype != jnp.bool_:
        return (np.zeros((), count.dtype),) * 2
    if where is None and frame.places is None:
        size = spec.reduction.group_size * devices(spec.axis_name)
        rest = size - int(np.asarray(size, count.dtype)) if isinstance(size, int) else 0
        return np.asarray(rest, count.dtype), np.zeros((), count.dtype)
    return beyond(total(of_integers(count_elements(spec, where, frame.places), count.dtype), (), spec.axis_name), count)
