"""Update running statistics with the Moments of each batch, by a blend or by a merge."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.dtypes import complex_beside
from jaxnorm.core.statistics import Moments, check_moments
from jaxnorm.engine.collectives import vary, varying_axes
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
    anything that is not finite, that group of ``running`` stays as it was. Finite outliers are
    averaged like all other elements: after one element of 1e17 the variance is 1e31 and more for
    a thousand steps. To leave such elements out, mask them in the norm:
    ``where=abs(x) <= limit``. To leave a whole batch out, set its ``count`` to 0: ``running`` then
    stays as it was.

    Args:
      running: the old values; the result has their dtype, so float32 state stays float32.
      batch: the new ones, of shapes that fit.
      momentum: weight of the old value, in [0, 1], as in Flax and Keras. PyTorch's ``momentum`` is
        one minus this.
      unbiased: average ``var * n / (n - 1)``, as PyTorch does; Flax and Keras average the biased
        variance. A single element has no unbiased variance, and leaves ``running`` as it was.
      skip_constant: leave ``running`` as it was where the variance of the batch is 0. A group has
        variance 0 if all its elements are equal, or if it holds a single element, for example
        because a mask leaves no other. Such groups say nothing about the spread of the data, and
        would wear the running variance down: from 3.75 to 0.16 in 30 updates with momentum 0.9.
        With this option a feature that is constant in all data keeps its first values.

    Returns:
      Moments of the shapes of ``running``. An update that is too small for the dtype moves a value
      to the next number of the dtype. The average therefore reaches the value that it follows,
      instead of stopping short of it.

    Raises:
      TypeError: arguments that are no Moments.
      ValueError: momentum outside [0, 1], shapes that differ, a count of ``running`` that is
        neither one number nor one number for each group.

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
    unbiased = validation.flag("unbiased", unbiased)
    skip_constant = validation.flag("skip_constant", skip_constant)
    momentum = validation.momentum(momentum)
    _same_shape(running, batch)
    return _ema(unbiased, skip_constant, running, batch, momentum, 1 - momentum)


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

    Only momentum is checked; the other arguments must be right.
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
    new_weight: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    running = Moments(jnp.ones((), jnp.float32), mean, var)
    new = _ema(unbiased, skip_constant, running, batch, momentum, new_weight)
    return new.mean, new.var


def follow_each(
    mean: jax.Array,
    var: jax.Array,
    batches: Moments,
    *,
    momentum: ArrayLike,
    unbiased: bool,
    skip_constant: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return a running mean and variance, moved towards one batch after the other.

    The batches are stacked along one more axis in front. Only momentum is checked.
    """
    momentum = validation.momentum(momentum)
    static = bool(unbiased), bool(skip_constant)
    return _follow_each(*static, mean, var, batches, momentum, 1 - momentum)


@partial(jax.jit, static_argnums=(0, 1))
def _follow_each(
    unbiased: bool,
    skip_constant: bool,
    mean: jax.Array,
    var: jax.Array,
    batches: Moments,
    momentum: ArrayLike,
    new_weight: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    own = mean.astype(complex_beside(mean.dtype, batches.mean)), var
    # as a state that has seen a batch: what a loop carries keeps its type
    state = jax.tree.map(lambda a: vary(a, varying_axes(batches.mean)), own)
    parts = jax.tree.map(lambda leaf: sharded_as(mean[None], leaf), lax.stop_gradient(batches))

    def step(state: tuple[jax.Array, jax.Array], batch: Moments) -> tuple:
        return _follow(unbiased, skip_constant, *state, batch, momentum, new_weight), None

    return lax.scan(step, state, parts)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _ema(
    unbiased: bool,
    skip_constant: bool,
    running: Moments,
    batch: Moments,
    momentum: ArrayLike,
    new_weight: ArrayLike,
) -> Moments:
    count, mean, var = (jnp.asarray(leaf) for leaf in (batch.count, batch.mean, batch.var))
    varies = var > 0 if skip_constant else True
    if unbiased:
        n = count.astype(var.dtype)
        var = jnp.where(n > 1, var * (n / jnp.where(n > 1, n - 1, 1)), jnp.nan)
    known = varies & (count > 0) & jnp.isfinite(mean) & jnp.isfinite(var)
    fresh = (jnp.broadcast_to(count, known.shape), mean, var)
    old = map(jnp.asarray, (running.count, running.mean, running.var))
    count, mean, var = (
        _blend(a, b, momentum, new_weight, known) for a, b in zip(old, fresh, strict=True)
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
    old: jax.Array, new: jax.Array, momentum: ArrayLike, new_weight: ArrayLike, known: jax.Array
) -> jax.Array:
    # running statistics of a module have one count for all groups
    if old.size == 1 and known.size != 1:
        new, known = jnp.max(new, where=known, initial=0), jnp.any(known)
    new, known = (sharded_as(old, a.reshape(old.shape)) for a in (new, known))
    dtype = old.dtype if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    if jnp.iscomplexobj(new):
        dtype = new.dtype
    old, new = old.astype(dtype), jnp.where(known, new, 0).astype(dtype)
    momentum, new_weight = (
        jnp.asarray(value, jnp.finfo(dtype).dtype) for value in (momentum, new_weight)
    )
    step = new - old
    # in this form a value equal to the batch stays what it is
    result = old + new_weight.astype(dtype) * step
    # the difference of -3e38 and 3e38 overflows, but their weighted sum does not
    result = jnp.where(
        jnp.isfinite(step), result, momentum.astype(dtype) * old + new_weight.astype(dtype) * new
    )
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        held, aim = lax.stop_gradient((old, new))
        # a step that rounding swallows becomes a step to the next number of the dtype
        result = result + jnp.where(result == old, jnp.nextafter(held, aim) - held, 0)
    result = jnp.where(momentum == 0, new, jnp.where(momentum == 1, old, result))
    return jnp.where(known, result, old)


@jax.jit
def merged_into(old: Moments, parts: Moments) -> Moments:
    """Merge ``parts``, which are stacked along one more axis in front, into ``old``.

    A group of ``old`` whose merged mean or variance is not finite stays as it was.
    """
    stacked = jax.tree.map(
        lambda state, part: jnp.concatenate([state[None], sharded_as(state[None], part)]),
        old,
        parts,
    )
    new = jax.tree.map(lambda leaf: leaf[0], stacked.merge(0))
    known = jnp.isfinite(new.mean) & jnp.isfinite(new.var)
    return jax.tree.map(lambda fresh, state: jnp.where(known, fresh, state), new, old)
