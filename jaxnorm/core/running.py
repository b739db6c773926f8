"""Running statistics: Moments that follow those of the batches, by a blend or by a merge."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.core.statistics import Moments, check_moments
from jaxnorm.engine.sharding import sharded_as


def ema(
    running: Moments,
    /,
    batch: Moments,
    *,
    momentum: ArrayLike = 0.99,
    unbiased: bool = False,
    skip_constant: bool = False,
) -> Moments:
    """Return the exponential moving average ``momentum * running + (1 - momentum) * batch``.

    A blend, not a merge: old values fade. Where a group of the batch is empty (count 0) or holds
    anything that is not finite, that group of ``running`` stays as it was. What is finite enters,
    outliers too: after one element of 1e17 the variance is 1e31 and more for a thousand steps. Mask
    such elements out in the norm, ``where=abs(x) <= limit``, or such a batch from the average: a
    batch whose ``count`` is 0 leaves it as it was.

    Args:
      running: the old values; the result has their dtype, so float32 state stays float32.
      batch: the new ones, of shapes that fit.
      momentum: weight of the old value, in [0, 1], as in Flax and Keras. PyTorch's ``momentum`` is
        one minus this.
      unbiased: average ``var * n / (n - 1)``, as PyTorch does; Flax and Keras average the biased
        variance. Of a single element it is unknown, and leaves ``running`` as it was.
      skip_constant: leave ``running`` as it was where the variance of the batch is 0: of one
        element, of one that a mask leaves, and of equal elements. They say nothing about the spread
        of the data, and would wear the running variance down: from 3.75 to 0.16 in 30 updates with
        momentum 0.9. A feature that is constant in all data then keeps its first values.

    Returns:
      Moments of the shapes of ``running``. An update too small for the dtype moves the value by its
      last bit, so that the average reaches what it follows instead of stopping short of it.

    Raises:
      TypeError: arguments that are no Moments.
      ValueError: momentum outside [0, 1], shapes that differ, a count of ``running`` that is
        neither one number nor one for each group.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> old = jn.Moments(count=jnp.array(8.0), mean=jnp.array(0.0), var=jnp.array(1.0))
    >>> new = jn.Moments(count=jnp.array(8.0), mean=jnp.array(4.0), var=jnp.array(3.0))
    >>> float(jn.ema(old, new, momentum=0.75).mean)
    1.0
    >>> accepted = jnp.where(new.var < 2.0, new.count, 0)  # this batch is not
    >>> float(jn.ema(old, jn.Moments(accepted, new.mean, new.var), momentum=0.75).mean)
    0.0
    """
    check_moments("running", running)
    check_moments("batch", batch)
    momentum = validation.momentum(momentum)
    _same_shape(running, batch)
    return _ema(bool(unbiased), bool(skip_constant), running, batch, momentum, 1 - momentum)


def follow(
    mean: jax.Array,
    var: jax.Array,
    batch: Moments,
    *,
    momentum: ArrayLike,
    unbiased: bool,
    skip_constant: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return a running mean and variance, moved towards the batch as :func:`ema` does.

    Arguments but momentum are taken to be right.
    """
    momentum = validation.momentum(momentum)
    return _follow(bool(unbiased), bool(skip_constant), mean, var, batch, momentum, 1 - momentum)


@partial(jax.jit, static_argnums=(0, 1))
def _follow(
    unbiased: bool,
    skip_constant: bool,
    mean: jax.Array,
    var: jax.Array,
    batch: Moments,
    momentum: ArrayLike,
    weight: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    running = Moments(jnp.ones((), jnp.float32), mean, var)
    new = _ema(unbiased, skip_constant, running, batch, momentum, weight)
    return new.mean, new.var


@partial(jax.jit, static_argnums=(0, 1))
def _ema(
    unbiased: bool,
    skip_constant: bool,
    running: Moments,
    batch: Moments,
    momentum: ArrayLike,
    weight: ArrayLike,
) -> Moments:
    count, mean, var = (jnp.asarray(leaf) for leaf in (batch.count, batch.mean, batch.var))
    spread = var > 0 if skip_constant else True
    if unbiased:
        n = count.astype(var.dtype)
        var = jnp.where(n > 1, var * (n / jnp.where(n > 1, n - 1, 1)), jnp.nan)
    known = spread & (count > 0) & jnp.isfinite(mean) & jnp.isfinite(var)
    fresh = (jnp.broadcast_to(count, known.shape), mean, var)
    old = map(jnp.asarray, (running.count, running.mean, running.var))
    count, mean, var = (
        _blend(a, b, momentum, weight, known) for a, b in zip(old, fresh, strict=True)
    )
    return Moments(count, mean, var)


def _same_shape(running: Moments, batch: Moments) -> None:
    sizes = lambda shape: [size for size in shape if size != 1]
    for name in ("mean", "var"):
        old, new = jnp.shape(getattr(running, name)), jnp.shape(getattr(batch, name))
        if sizes(old) != sizes(new):
            raise ValueError(
                f"running and batch must have the same shape, up to axes of size one: {name} has "
                f"{old} and {new}."
            )
    count, mean = jnp.shape(running.count), jnp.shape(running.mean)
    if sizes(count) not in ([], sizes(mean)):
        raise ValueError(
            f"the count of running must be one number or of the shape of its mean, {mean}: got "
            f"{count}."
        )


def _blend(
    old: jax.Array, new: jax.Array, momentum: ArrayLike, weight: ArrayLike, known: jax.Array
) -> jax.Array:
    if old.size == 1 and known.size != 1:  # one count for all groups
        new, known = jnp.max(new, where=known, initial=0), jnp.any(known)
    new, known = (sharded_as(old, a.reshape(old.shape)) for a in (new, known))
    dtype = old.dtype if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    if jnp.iscomplexobj(new):
        dtype = new.dtype
    old, new = old.astype(dtype), jnp.where(known, new, 0).astype(dtype)
    momentum, weight = (jnp.asarray(value, jnp.finfo(dtype).dtype) for value in (momentum, weight))
    step = new - old
    # in this form a value equal to the batch stays what it is
    result = old + weight.astype(dtype) * step
    # -3e38 and 3e38
    result = jnp.where(
        jnp.isfinite(step), result, momentum.astype(dtype) * old + weight.astype(dtype) * new
    )
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        held, aim = lax.stop_gradient((old, new))
        # by the last bit
        result = result + jnp.where(result == old, jnp.nextafter(held, aim) - held, 0)
    result = jnp.where(momentum == 0, new, jnp.where(momentum == 1, old, result))
    return jnp.where(known, result, old)


@jax.jit
def merged_into(old: Moments, parts: Moments) -> Moments:
    """Merge parts, along a further first axis, into ``old``.

    Where the result would not be finite, ``old`` stays.
    """
    stacked = jax.tree.map(
        lambda state, part: jnp.concatenate([state[None], sharded_as(state[None], part)]),
        old,
        parts,
    )
    new = jax.tree.map(lambda leaf: leaf[0], stacked.merge(0))
    known = jnp.isfinite(new.mean) & jnp.isfinite(new.var)
    return jax.tree.map(lambda fresh, state: jnp.where(known, fresh, state), new, old)
