"""Reward normalization by the deviation of discounted returns, for many environments at once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.options import AxisName
from jaxnorm.core.statistics import Moments
from jaxnorm.online import observations

__all__ = ["Returns", "init", "normalize", "update"]


class Returns(NamedTuple):
    """State of a reward normalizer.

    Attributes:
      current: the discounted return of each environment so far, 0 after the end of an episode.
      moments: the Moments of all returns so far.
    """

    current: jax.Array
    moments: Moments


def init(spec: Any) -> Returns:
    """Return the state before any reward.

    Args:
      spec: an array, a number or a :class:`jax.ShapeDtypeStruct`. It has the shape and dtype of the
        rewards of one step, one for each environment.

    Returns:
      The state. All environments share one count, mean and variance.

    Raises:
      TypeError: rewards of integers.

    >>> import jax.numpy as jnp
    >>> from jaxnorm.online import returns
    >>> returns.init(jnp.zeros(4)).current.shape
    (4,)
    """
    moments = observations.init(jax.ShapeDtypeStruct((), jnp.result_type(spec)))
    return Returns(jnp.zeros(jnp.shape(spec), moments.mean.dtype), moments)


def update(
    state: Returns,
    rewards: jax.Array,
    done: jax.Array,
    *,
    weights: ArrayLike | None = None,
    gamma: float = 0.99,
    axis_name: AxisName = None,
) -> Returns:
    """Advance the discounted returns by some steps, and merge each return into the statistics.

    A step computes ``return = gamma * previous + reward``, where ``previous`` is the return of the
    step before, or 0 if the episode ended with it.

    Args:
      state: a state from :func:`init` or :func:`update`.
      rewards: the rewards of one step, or of several steps with time as the first axis.
      done: booleans of the same shape: whether the episode ended with this step.
      weights: booleans or float weights of the same shape. A step of weight 0 is no transition: it
        counts for nothing, even if its reward is NaN, and the return of its environment starts
        again at 0. Gymnasium's vector environments have such a step after each episode. Another
        weight says how much a return counts.
      gamma: the discount, in [0, 1].
      axis_name: name (or names) of a device or vmap axis over which the environments are spread. It
        takes one collective.

    Returns:
      The new state. A return that is not finite counts for nothing, and starts again at 0. The
      returns of other environments and steps count.

    Raises:
      TypeError: integer rewards or weights, ``done`` that is not boolean.
      ValueError: shapes that do not fit, negative weights, gamma outside [0, 1].

    >>> import jax.numpy as jnp
    >>> from jaxnorm.online import returns
    >>> rewards, done = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[False], [True], [False]])
    >>> state = returns.update(returns.init(jnp.zeros(1)), rewards, done, gamma=0.5)
    >>> state.current.tolist(), round(float(state.moments.mean), 4)  # of 1, 0.5 + 2 and 3
    ([3.0], 2.1667)
    >>> no = jnp.array([False])
    >>> state = returns.update(state, jnp.array([100.0]), no, weights=no)
    >>> state.current.tolist(), float(state.moments.count)
    ([0.0], 3.0)
    """
    rewards, done, gamma = (
        validation.floating(rewards, "rewards"),
        jnp.asarray(done),
        validation.number("gamma", gamma, 1),
    )
    shape = state.current.shape
    if rewards.shape[rewards.ndim - len(shape) :] != shape or rewards.ndim - len(shape) not in (
        0,
        1,
    ):
        raise ValueError(
            f"rewards must have the shape of one step, {shape}, or time in front of it: got "
            f"{rewards.shape}."
        )
    if done.dtype != jnp.bool_:
        raise TypeError(f"done must be booleans: got {done.dtype}. Cast it, .astype(bool).")
    if done.shape != rewards.shape:
        raise ValueError(
            f"done must have the shape of the rewards, {rewards.shape}: got {done.shape}."
        )
    weights = jnp.ones(rewards.shape, bool) if weights is None else _weights(weights, rewards.shape)
    dtype = state.current.dtype
    steps = rewards.astype(dtype), done, weights
    # the scan needs a time axis, which a single step lacks
    steps = steps if rewards.ndim > len(shape) else jax.tree.map(lambda a: a[None], steps)

    def follow(current, step):
        reward, ended, weight = step
        current = jnp.asarray(gamma, dtype) * current + jnp.where(weight.astype(bool), reward, 0)
        # NaN or Inf would stay in `current` for good, so it ends the return like `done`
        counts = weight.astype(bool) & jnp.isfinite(current)
        found = jnp.where(counts, current, 0), jnp.where(counts, weight, jnp.zeros_like(weight))
        return jnp.where(ended | ~counts, 0, current), found

    current, (found, counted) = lax.scan(follow, state.current, steps)
    return Returns(
        current, observations.update(state.moments, found, weights=counted, axis_name=axis_name)
    )


def _weights(weights: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    weights = validation.as_array(weights, "weights")
    if weights.shape != shape:
        raise ValueError(
            f"weights must have the shape of the rewards, {shape}: got {weights.shape}."
        )
    return validation.mask(weights, shape, "weights")  # type: ignore[return-value]  # None only of None


def normalize(
    rewards: jax.Array, state: Returns, *, clip: float | None = None, epsilon: float = 1e-5
) -> jax.Array:
    """Scale rewards, and keep their signs: ``reward / sqrt(var(returns) + epsilon)``.

    Args:
      rewards: rewards in any shape.
      state: a state from :func:`update`. Before the first update, rewards are returned unchanged.
      clip: the largest absolute value of the result.
      epsilon: added to the variance.

    Returns:
      An array with the shape and dtype of ``rewards``.

    Raises:
      TypeError: integer rewards.
      ValueError: a negative ``clip`` or ``epsilon``.

    >>> import jax.numpy as jnp
    >>> from jaxnorm.online import returns
    >>> rewards, done = jnp.array([0.0, 8.0]), jnp.array([False, False])
    >>> state = returns.update(returns.init(jnp.zeros(2)), rewards, done)
    >>> returns.normalize(jnp.array([8.0]), state, epsilon=0.0).tolist()
    [2.0]
    """
    # a mean of 0, since subtracting one would change the signs of rewards
    zero = jnp.zeros_like(state.moments.mean)
    scale = Moments(state.moments.count, zero, state.moments.var)
    return observations.normalize(
        validation.floating(rewards, "rewards"), scale, clip=clip, epsilon=epsilon
    )
