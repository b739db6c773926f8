"""The state of batch renorm in linen and nnx: its limits, its warm-up and its averages."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import integer
from jaxnorm.core.running import follow
from jaxnorm.core.statistics import Moments, like_batch
from jaxnorm.flax_common.running import as_moments
from jaxnorm.norms.renorm import Reference, reference_of
from jaxnorm.norms.renorm import limits as checked_limits

KEYS = ("rmax", "rmin", "dmax")


def check_limits(r_max: Any, d_max: Any, warmup_steps: Any) -> None:
    """Raise ValueError or TypeError unless a BatchRenorm can start from these."""
    for name, limit in (("r_max", r_max), ("d_max", d_max)):  # the state has no place for None
        validation.number_or_traced(name, limit)
    checked_limits(r_max, d_max)
    if integer(warmup_steps, "warmup_steps must be an integer of at least 0") < 0:
        raise ValueError(f"warmup_steps must be an integer of at least 0: got {warmup_steps}.")


def warmed_up(
    steps: ArrayLike, begun: ArrayLike, warmup_steps: int, r_max: ArrayLike, d_max: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Return the limits of r and d: 1 and 0, as in batch norm, for the first steps.

    Args:
      steps: the number of steps so far.
      begun: whether the step of this batch is among them already.
      warmup_steps: how many steps are batch norm.
      r_max: the largest r afterwards.
      d_max: the largest absolute value of d afterwards.
    """
    done = jnp.asarray(steps) - jnp.asarray(begun).astype(jnp.asarray(steps).dtype)
    limits = (jnp.asarray(limit).astype(jnp.float32) for limit in (r_max, d_max))
    r_max, d_max = (
        jnp.where(done >= warmup_steps, limit, jnp.full((), start, jnp.float32))
        for limit, start in zip(limits, (1, 0), strict=True)
    )
    return r_max, d_max


def counted(steps: ArrayLike, begun: ArrayLike, batch: Moments) -> jax.Array:
    """Return the number of steps with this batch, unless it is empty or not finite."""
    known = (batch.count > 0) & jnp.isfinite(batch.mean) & jnp.isfinite(batch.var)
    steps = jnp.asarray(steps)
    return steps + (known.any() & ~jnp.asarray(begun)).astype(steps.dtype)


def reference(
    mean: jax.Array,
    var: jax.Array,
    shape: tuple[int, ...],
    features: tuple[int, ...],
    epsilon: ArrayLike,
    limits: tuple[jax.Array, jax.Array],
) -> Reference:
    """Return a running mean and variance as the reference of a batch of this shape."""
    running = like_batch(as_moments(mean, var), shape, features)
    return reference_of(running, epsilon, "var", *limits)


def reference_of_stddev(
    mean: jax.Array,
    stddev: jax.Array,
    shape: tuple[int, ...],
    features: tuple[int, ...],
    epsilon: ArrayLike,
    clipping: Mapping[str, ArrayLike] | None,
) -> Reference:
    """Return a running mean and standard deviation as the reference of a batch of this shape.

    The standard deviation includes epsilon, and is taken as its root at least.
    """
    limits = checked_clipping(clipping)
    running = like_batch(as_moments(mean, stddev), shape, features)
    least = jnp.maximum(running.var, root(jnp.zeros_like(running.var), epsilon))
    return Reference(
        running.mean,
        running.low.mean,
        jnp.where(least > 0, 1 / jnp.where(least > 0, least, 1), 0),
        jnp.ones_like(least, bool),
        limits.get("rmin"),
        limits.get("rmax"),
        limits.get("dmax"),
        epsilon if isinstance(epsilon, jax.core.Tracer) else None,
    )


def checked_clipping(clipping: Mapping[str, ArrayLike] | None) -> dict[str, Any]:
    """Return the limits of a correction, if Keras would take them.

    Raises:
      TypeError: no dictionary; a limit that is no number.
      ValueError: an unknown key; a limit that is negative; an ``rmax`` below ``rmin``.
    """
    if not isinstance(clipping, Mapping | None):
        raise TypeError(
            f"renorm_clipping must be a dictionary of {', '.join(KEYS)}, or None: got {clipping!r}."
        )
    given = dict(clipping or {})
    if unknown := sorted(given.keys() - set(KEYS)):
        raise ValueError(
            f"renorm_clipping must have the keys {', '.join(KEYS)}, or some of them: got "
            f"{', '.join(map(repr, unknown))}."
        )
    limits = {
        key: validation.number_or_traced(f"{key} of renorm_clipping", value)
        for key, value in given.items()
        if value is not None
    }
    least, most = limits.get("rmin", 0.0), limits.get("rmax", jnp.inf)
    if isinstance(least, float) and isinstance(most, float) and most < least:
        raise ValueError(
            f"rmax of renorm_clipping must be rmin or more: got rmax={most} and rmin={least}."
        )
    return limits


def follow_stddev(
    mean: jax.Array, stddev: jax.Array, batch: Moments, *, momentum: ArrayLike, epsilon: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Move a running mean and standard deviation, which includes epsilon, towards the batch."""
    return follow(
        mean,
        stddev,
        Moments(batch.count, batch.mean, root(batch.var, epsilon)),
        momentum=momentum,
        unbiased=False,
        skip_constant=False,
    )


def follow_var(
    mean: jax.Array, var: jax.Array, batch: Moments, *, momentum: ArrayLike, epsilon: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Move a running mean and variance towards the batch, by the average of the deviations.

    The new variance is the square of the averaged ``sqrt(var + epsilon)``, less epsilon.
    """
    before = root(var, epsilon)
    mean, after = follow_stddev(mean, before, batch, momentum=momentum, epsilon=epsilon)
    # an unchanged deviation leaves the bits of the variance
    return mean, jnp.where(after == before, var, var_of(after, epsilon))


def root(var: jax.Array, epsilon: ArrayLike) -> jax.Array:
    """Return the standard deviation, ``sqrt(var + epsilon)``."""
    return jnp.sqrt(var + jnp.asarray(epsilon).astype(var.dtype))


def var_of(stddev: jax.Array, epsilon: ArrayLike) -> jax.Array:
    """Return the variance of a standard deviation, ``stddev**2 - epsilon``, or 0."""
    return jnp.maximum(stddev * stddev - jnp.asarray(epsilon).astype(stddev.dtype), 0)
