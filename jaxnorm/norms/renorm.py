"""Batch renormalization: batch norm, corrected towards running statistics.

With z the normalized x, mean and std the statistics of the batch, and running ones beside them::

    r = std / running_std                  clipped to [r_min, r_max]
    d = (mean - running_mean) / running_std          clipped to [-d_max, d_max]
    y = (z r + d) scale + bias

Both corrections are constants under differentiation. They are the ``adjust`` of
:class:`jaxnorm.engine.spec.Spec`.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.dtypes import compute_dtype
from jaxnorm.arguments.features import batch_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import EpsilonIn, NormOptions, Param
from jaxnorm.core.call import prepare, run_with_moments
from jaxnorm.core.statistics import Moments, applicable, from_stats, like_batch
from jaxnorm.engine.derivatives import with_epsilon
from jaxnorm.engine.exponents import scale_down
from jaxnorm.engine.groups import inverse_root, rstd
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Adjusted, Stats
from jaxnorm.engine.sharding import sharded_as


class Reference(NamedTuple):
    """The running statistics that a batch is corrected to, and the limits of its correction.

    Attributes:
      mean: the running mean, of the shape of the batch's statistics.
      low_mean: its low part.
      inverse_std: 1 / the running standard deviation, which includes epsilon.
      known: whether there are running statistics; without them r is 1 and d is 0.
      r_min: the least r; None for no limit.
      r_max: the largest r; None for no limit.
      d_max: the largest absolute value of d; None for no limit.
      epsilon: the epsilon of the norm where it is traced, else None.
    """

    mean: jax.Array
    low_mean: jax.Array
    inverse_std: jax.Array
    known: jax.Array
    r_min: ArrayLike | None = None
    r_max: ArrayLike | None = None
    d_max: ArrayLike | None = None
    epsilon: jax.Array | None = None


@by_keyword
def batch_renorm(
    x: ArrayLike,
    /,
    running: Moments,
    *,
    r_max: ArrayLike | None = None,
    d_max: ArrayLike | None = None,
    scale: Param = None,
    bias: Param = None,
    feature_axes: int | tuple[int, ...] = -1,
    epsilon: ArrayLike = 1e-3,
    epsilon_in: EpsilonIn = "var",
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Normalize a batch as its running statistics would (Ioffe 2017, arXiv 1702.03275).

    Batch renormalization: ``y = ((x - mean) / std * r + d) * scale + bias``, where mean and
    ``std = sqrt(var + epsilon)`` are those of the batch, ``r = std / running_std`` is clipped to
    ``[1 / r_max, r_max]``, and ``d = (mean - running_mean) / running_std`` to ``[-d_max, d_max]``.
    No gradient flows through r and d. Unclipped, ``y`` equals the output of evaluation,
    ``normalize(x, running)``, with the gradients of batch norm. With ``r_max=1`` and ``d_max=0`` it
    is batch norm. The paper starts so, and raises both limits while it trains. Blend the returned
    Moments into ``running`` with :func:`ema`, after the call.

    Args:
      x: floating array, for example ``(N, C)`` or ``(N, H, W, C)``.
      running: Moments of the shape of the feature axes, or as this function returns them. Groups of
        count 0 and variance 0 have no statistics yet: their r is 1, and their d is 0.
      r_max: the largest r, 1 or more; ``1 / r_max`` is the least. It may be traced. None for no
        limit.
      d_max: the largest absolute value of d, 0 or more. It may be traced. None for no limit.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      feature_axes: the axes that are not reduced, in any order.
      epsilon: added to the variance of the batch and to the running variance.
      epsilon_in: ``"std"`` adds ``epsilon`` to both standard deviations.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      The output, of the shape of ``x``, and the Moments of the batch, whose reduced axes have size
      one.

    Raises:
      TypeError: integer or complex ``x``; ``running`` that are no Moments, or complex ones.
      ValueError: axes, mask, parameters or running statistics that do not fit; limits out of range.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[1.0], [3.0]])  # mean 2 and variance 1
    >>> running = jn.Moments(count=jnp.ones(1), mean=jnp.zeros(1), var=jnp.full(1, 4.0))
    >>> y, batch = jn.batch_renorm(x, running, epsilon=0.0)  # r = 0.5, d = 1
    >>> y.tolist(), batch.mean.tolist()
    ([[0.5], [1.5]], [[2.0]])
    >>> jn.batch_renorm(x, running, r_max=1.0, d_max=0.5, epsilon=0.0)[0].tolist()
    [[-0.5], [1.5]]
    """
    x = validation.real(x, "x")
    reduced, features = batch_axes(
        x.shape, feature_axes, "batch renorm", across=options.get("axis_name") is not None
    )
    running = like_batch(applicable("running", running, x), x.shape, features)
    # a running variance of float32 has a root of the precision that the statistics have
    wide = np.promote_types(compute_dtype(x.dtype), jnp.asarray(running.var).dtype)
    running = replace(running, var=jnp.asarray(running.var).astype(wide))
    r_max, d_max = limits(r_max, d_max)
    validation.epsilon_in(epsilon_in)
    epsilon = validation.number_or_traced("epsilon", epsilon)
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        epsilon_in=epsilon_in,
        where=where,
        adjust=corrected,
        param=reference_of(running, epsilon, epsilon_in, r_max, d_max),
        **options,
    )
    return run_with_moments(call)


def limits(
    r_max: ArrayLike | None, d_max: ArrayLike | None
) -> tuple[ArrayLike | None, ArrayLike | None]:
    """Return the limits of r and d if they are numbers in their ranges; they may be traced."""
    if r_max is not None:
        r_max = validation.number_or_traced("r_max", r_max)
        r_max = validation.check_values(r_max, lambda r: r >= 1, "r_max must be 1 or more")
    return r_max, None if d_max is None else validation.number_or_traced("d_max", d_max)


def reference_of(
    running: Moments,
    epsilon: ArrayLike,
    epsilon_in: EpsilonIn = "var",
    r_max: ArrayLike | None = None,
    d_max: ArrayLike | None = None,
) -> Reference:
    """Return running statistics, of the shape of the batch's, as the reference of its correction.

    All arguments must be right.
    """
    traced = epsilon if isinstance(epsilon, jax.core.Tracer) else None
    return _reference(epsilon_in, running, epsilon, r_max, d_max)._replace(epsilon=traced)


@partial(jax.jit, static_argnums=0)
def _reference(epsilon_in: EpsilonIn, running: Moments, epsilon, r_max, d_max) -> Reference:
    count, var = jnp.asarray(running.count), jnp.asarray(running.var)
    return Reference(
        jnp.asarray(running.mean),
        jnp.asarray(running.low.mean),
        inverse_root(
            var, jnp.asarray(epsilon).astype(var.dtype), positive=False, epsilon_in=epsilon_in
        ),
        (count > 0) | (var > 0),
        None if r_max is None else 1 / r_max,
        r_max,
        d_max,
    )


def corrected(loops: PlainLoops, stats: Stats, reference: Reference) -> Adjusted:
    """Let the normalized x be multiplied by r and shifted by d, before scale and bias."""
    return Adjusted(stats, *corrections(loops, stats, reference))


def corrected_statistics(loops: PlainLoops, stats: Stats, reference: Reference) -> Stats:
    """Change the statistics by r and d: ``mean - d sqrt(var) / r`` and ``var / r**2``.

    The norm adds its epsilon to the changed variance. Where the variance is much larger than
    epsilon, this is :func:`corrected`.
    """
    r, d = corrections(loops, stats, reference)
    scaling, low_mean, var = stats
    # the gradient of the root of 0 is infinite
    std = jnp.where(var > 0, jnp.sqrt(jnp.where(var > 0, var, 1)), 0)
    return Stats(scaling, low_mean - d * std / r, var / (r * r))


def corrections(
    loops: PlainLoops, stats: Stats, reference: Reference
) -> tuple[jax.Array, jax.Array]:
    """Return r and d, constants under differentiation."""
    stats, reference = lax.stop_gradient((stats, reference))
    batch, dtype = from_stats(loops.spec, stats), stats.var.dtype
    mean, low_mean, inverse_std = (
        sharded_as(batch.mean, leaf.astype(dtype))
        for leaf in (reference.mean, reference.low_mean, reference.inverse_std)
    )
    known = sharded_as(batch.mean, reference.known)
    # in the units of the scale exponent, so that a variance beyond the range has a root within it
    inverse = rstd(loops, stats.scaling, with_epsilon(loops.spec, stats, reference.epsilon).var)
    exponent = stats.scaling.exponent
    std = jnp.where(inverse > 0, 1 / jnp.where(inverse > 0, inverse, 1), 0)
    std = scale_down(std, None if exponent is None else -exponent)
    # high parts first: their difference is exact where the means are close
    step = (batch.mean - mean) + (batch.low.mean - low_mean)
    r = jnp.where(known, std * inverse_std, 1)
    d = jnp.where(known, step * inverse_std, 0)
    r_min, r_max, d_max = (
        None if limit is None else jnp.asarray(limit).astype(dtype)
        for limit in (reference.r_min, reference.r_max, reference.d_max)
    )
    return jnp.clip(r, r_min, r_max), d if d_max is None else jnp.clip(d, -d_max, d_max)
