"""Batch renorm, with the running statistics of SBX and CrossQ, and with those of Keras."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.calls import by_running, over_batch
from jaxnorm.flax_common.renorm import (
    check_limits,
    checked_clipping,
    counted,
    follow_stddev,
    follow_var,
    reference,
    reference_of_stddev,
    var_of,
    warmed_up,
)
from jaxnorm.flax_common.running import at_start, has_begun
from jaxnorm.nnx.batch import BatchNorm, assign, collected, is_evaluating, seen_by, update
from jaxnorm.nnx.calls import inputs
from jaxnorm.norms.renorm import corrected, corrected_statistics

__all__ = ["BatchRenorm", "KerasBatchRenorm"]


class BatchRenorm(BatchNorm):
    """Batch renormalization (Ioffe 2017, arXiv 1702.03275), as in SBX and CrossQ.

    In training ``y = (x - m) / sqrt(v + epsilon) * scale + bias``, where
    ``m = mean - d * sqrt(var) / r`` and ``v = var / r**2`` are the statistics of the batch,
    corrected towards the running statistics. ``r = sqrt(var + epsilon) / running_std`` is clipped
    to ``[1 / r_max, r_max]``, ``d = (mean - running_mean) / running_std`` to ``[-d_max, d_max]``,
    with ``running_std = sqrt(running_var + epsilon)``. No gradient flows through r and d. The first
    ``warmup_steps`` calls in training are batch norm. Evaluation is as in :class:`BatchNorm`.

    The state is that of :class:`jaxnorm.linen.BatchRenorm`: ``mean``, ``var``, ``r_max``, ``d_max``
    and ``steps``, the number of calls in training so far. A batch that is empty or not finite
    leaves all of them unchanged. The microbatches of :func:`accumulate` count as one step, and are
    corrected towards the statistics at its start. :func:`recalibrate` replaces ``mean`` and ``var``
    alone.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variances, inside the roots; 1e-3 by default.
      warmup_steps: the number of training steps that are batch norm; 100,000 by default.
      r_max: the initial value of ``r_max`` in the state; 3 by default.
      d_max: the initial value of ``d_max`` in the state; 5 by default.

    It also takes the other arguments of :class:`BatchNorm`, with the meanings and defaults they
    have there: ``use_running_average``, ``axis``, ``momentum``, ``dtype``, ``param_dtype``,
    ``use_bias``, ``use_scale``, ``bias_init``, ``scale_init``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``, ``rngs``, ``bias_metadata``,
    ``scale_metadata``, ``unbiased`` and ``skip_constant``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.BatchRenorm(1, warmup_steps=0, epsilon=0.0, rngs=Rngs(0))
    >>> y = norm(jnp.array([[1.0], [5.0]]))  # mean 3, deviation 2; running statistics 0 and 1
    >>> y[:, 0].tolist(), int(norm.steps[...])  # r = 2, d = 3
    ([1.0, 5.0], 1)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-3,
        warmup_steps: int = 100_000,
        r_max: float = 3.0,
        d_max: float = 5.0,
        **options: Any,
    ) -> None:
        """Take the arguments of :class:`BatchNorm`, and those of the correction."""
        check_limits(r_max, d_max, warmup_steps)
        super().__init__(num_features, epsilon=epsilon, **options)
        self.warmup_steps = warmup_steps
        self.r_max = nnx.BatchStat(jnp.full((), r_max, jnp.float32))
        self.d_max = nnx.BatchStat(jnp.full((), d_max, jnp.float32))
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.int32))

    __init__.__signature__ = with_keywords_of(__init__, BatchNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize ``x``, and update the running statistics in training.

        Args:
          x: the array to normalize; integers and booleans become floats.
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.axis, x.ndim, "axis")
        sizes = tuple(x.shape[axis] for axis in features)
        stats = (self.mean[...], self.var[...])
        x, options, (mean, var) = inputs(self, x, features, mask, *stats)
        validation.real(x, "x")
        if is_evaluating(self, use_running_average):
            return by_running(x, features, options, mean, var)
        seen, steps = seen_by(self), self.steps[...]
        limits = warmed_up(
            steps, has_begun(seen), self.warmup_steps, self.r_max[...], self.d_max[...]
        )
        mean, var = (stat.reshape(sizes) for stat in at_start(seen, mean, var))
        y, batch = over_batch(
            self,
            x,
            features,
            options,
            adjust=corrected_statistics,
            param=reference(mean, var, x.shape, features, self.epsilon, limits),
        )
        self.steps[...] = lax.stop_gradient(counted(steps, has_begun(seen), batch))
        update(self, batch)
        return y


class KerasBatchRenorm(nnx.BatchNorm):
    """Batch renormalization (Ioffe 2017, arXiv 1702.03275), as Keras computes it.

    It is ``keras.layers.BatchNormalization(renorm=True)``, with its averages and defaults. In
    training ``y = ((x - mean) / std * r + d) * scale + bias``, where mean and
    ``std = sqrt(var + epsilon)`` are those of the batch, ``r = std / renorm_stddev`` and
    ``d = (mean - renorm_mean) / renorm_stddev``, clipped as ``renorm_clipping`` says. No gradient
    flows through r and d. A ``renorm_stddev`` below ``sqrt(epsilon)`` counts as ``sqrt(epsilon)``.
    Evaluation is as in :class:`BatchNorm`. See also :func:`jaxnorm.batch_renorm`.

    The state is that of :class:`jaxnorm.linen.KerasBatchRenorm`, which says how it follows
    batches: ``renorm_mean`` and ``renorm_stddev`` for training, and ``mean`` and ``var`` for
    evaluation.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variance, inside the root; 1e-3 by default.
      renorm_clipping: a dict with some of the keys ``"rmin"``, ``"rmax"`` and ``"dmax"``: the
        limits of r, and of the absolute value of d. By default there are none.
      renorm_momentum: weight of the old value in ``renorm_mean`` and ``renorm_stddev``; 0.99 by
        default.

    It also takes the other arguments of Flax's BatchNorm, with the meanings and defaults they
    have in :class:`BatchNorm`: ``use_running_average``, ``axis``, ``momentum``, ``dtype``,
    ``param_dtype``, ``use_bias``, ``use_scale``, ``bias_init``, ``scale_init``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``, ``rngs``, ``bias_metadata`` and
    ``scale_metadata``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.KerasBatchRenorm(1, epsilon=0.0, renorm_momentum=0.5, rngs=Rngs(0))
    >>> y = norm(jnp.array([[1.0], [5.0]]))  # mean 3, deviation 2; averages 0 and 1
    >>> y[:, 0].tolist(), norm.renorm_stddev[...].tolist()  # r = 2, d = 3
    ([1.0, 5.0], [1.5])
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-3,
        renorm_clipping: Mapping[str, float] | None = None,
        renorm_momentum: float = 0.99,
        **options: Any,
    ) -> None:
        """Take the arguments of :class:`flax.nnx.BatchNorm`, and those of the correction."""
        checked_clipping(renorm_clipping)
        validation.number_or_traced("renorm_momentum", renorm_momentum, 1)
        super().__init__(num_features, epsilon=epsilon, **options)
        # hashable: attributes of nnx modules are static arguments of compiled programs
        self.renorm_clipping = tuple(sorted((renorm_clipping or {}).items()))
        self.renorm_momentum = renorm_momentum
        ones = jnp.ones((num_features,), jnp.float32)
        self.var[...] = var_of(ones, epsilon)
        self.renorm_mean = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.renorm_stddev = nnx.BatchStat(ones)

    __init__.__signature__ = with_keywords_of(__init__, nnx.BatchNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize ``x``, and update the running statistics in training.

        Args:
          x: the array to normalize; integers and booleans become floats.
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.axis, x.ndim, "axis")
        sizes = tuple(x.shape[axis] for axis in features)
        stats = (self.mean[...], self.var[...])
        x, options, (mean, var) = inputs(self, x, features, mask, *stats)
        validation.real(x, "x")
        if is_evaluating(self, use_running_average):
            return by_running(x, features, options, mean, var)
        averages = (self.renorm_mean[...].reshape(sizes), self.renorm_stddev[...].reshape(sizes))
        y, batch = over_batch(
            self,
            x,
            features,
            options,
            adjust=corrected,
            param=reference_of_stddev(
                *averages, x.shape, features, self.epsilon, dict(self.renorm_clipping)
            ),
        )
        self._update(batch)
        return y

    def _update(self, batch: Moments) -> None:
        """Move both averages towards the statistics of a batch."""
        averages = self.renorm_mean[...], self.renorm_stddev[...]
        new = follow_stddev(*averages, batch, momentum=self.renorm_momentum, epsilon=self.epsilon)
        self.renorm_mean[...], self.renorm_stddev[...] = lax.stop_gradient(new)
        new = follow_var(*collected(self, batch), momentum=self.momentum, epsilon=self.epsilon)
        # Running statistics are state, so no gradient flows into them.
        assign(self, *lax.stop_gradient(new))
