"""Batch renorm, with the running statistics of SBX and CrossQ, and with those of Keras."""

from collections.abc import Mapping
from dataclasses import field

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.calls import by_running, over_batch
from jaxnorm.flax_common.renorm import (
    check_limits,
    counted,
    follow_stddev,
    follow_var,
    reference,
    reference_of_stddev,
    var_of,
    warmed_up,
)
from jaxnorm.flax_common.running import Collected, at_start, has_begun
from jaxnorm.linen.batch import COLLECTION, BatchNorm, collected, evaluates, running, update
from jaxnorm.linen.calls import inputs
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

    Parameters and state are those of the class ``BatchRenorm`` of SBX: its checkpoints fit. The
    collection ``batch_stats`` has ``mean``, ``var``, ``r_max``, ``d_max`` and ``steps``, the number
    of calls in training so far. A batch that is empty or not finite leaves all of them unchanged.
    The microbatches of :func:`accumulate` count as one step, and are corrected towards the
    statistics at its start. :func:`recalibrate` replaces ``mean`` and ``var`` alone.

    SBX computes the variance as ``mean(x**2) - mean(x)**2``, which loses digits where the mean is
    large: at a mean of 1e4 deviations nothing of it is left. Its gradient is NaN where a feature is
    constant in a batch. The statistics here are accurate, and the gradient is finite.

    Attributes:
      warmup_steps: the number of training steps that are batch norm; 100,000 by default.
      r_max: the initial value of ``r_max`` in the state; 3 by default.
      d_max: the initial value of ``d_max`` in the state; 5 by default.
      use_running_average: as in :class:`BatchNorm`, and so are all others.
      axis: the feature axis, or axes, which are not reduced; the last axis by default.
      momentum: weight of the old value in the running statistics; 0.99 by default.
      epsilon: added to the variances, inside the roots; 1e-3 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default.
      axis_index_groups: groups of indices along ``axis_name``, as in :class:`BatchNorm`.
      use_fast_variance: has no effect; accepted because SBX has it.
      force_float32_reductions: whether the running statistics are stored in float32, as in
        :class:`BatchNorm`.
      unbiased: whether to average the unbiased variance; False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0;
        False by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.BatchRenorm(use_running_average=False, warmup_steps=0, epsilon=0.0)
    >>> x = jnp.array([[1.0], [5.0]])  # mean 3, deviation 2; running statistics 0 and 1
    >>> y, state = norm.apply(norm.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    >>> y[:, 0].tolist(), int(state["batch_stats"]["steps"])  # r = 2, d = 3
    ([1.0, 5.0], 1)
    """

    epsilon: float = 1e-3
    warmup_steps: int = field(default=100_000, kw_only=True)
    r_max: float = field(default=3.0, kw_only=True)
    d_max: float = field(default=5.0, kw_only=True)

    @known_keywords
    @nn.compact
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
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        check_limits(self.r_max, self.d_max, self.warmup_steps)
        evaluating = evaluates(self, use_running_average)
        features = canonical_axes(self.axis, x.ndim, "axis")
        mean, var = running(self, x, features)
        r_max, d_max = (
            self.variable("batch_stats", name, jnp.full, (), initial, jnp.float32)
            for name, initial in (("r_max", self.r_max), ("d_max", self.d_max))
        )
        steps = self.variable("batch_stats", "steps", jnp.zeros, (), jnp.int32)
        x, options = inputs(self, x, features, mask)
        validation.real(x, "x")
        if evaluating:
            return by_running(x, features, options, mean.value, var.value)
        seen: Collected | None = self.get_variable(COLLECTION, "seen")
        # As in SBX, init() is batch norm.
        warmup_steps = self.warmup_steps + self.is_initializing()
        limits = warmed_up(steps.value, has_begun(seen), warmup_steps, r_max.value, d_max.value)
        start = at_start(seen, mean.value, var.value)
        y, batch = over_batch(
            self,
            x,
            features,
            options,
            adjust=corrected_statistics,
            param=reference(*start, x.shape, features, self.epsilon, limits),
        )
        if not self.is_initializing():
            steps.value = counted(steps.value, has_begun(seen), batch)
        update(self, mean, var, batch)
        return y


class KerasBatchRenorm(nn.BatchNorm):
    """Batch renormalization (Ioffe 2017, arXiv 1702.03275), as Keras computes it.

    It is ``keras.layers.BatchNormalization(renorm=True)``, with its averages and defaults. In
    training ``y = ((x - mean) / std * r + d) * scale + bias``, where mean and
    ``std = sqrt(var + epsilon)`` are those of the batch, ``r = std / renorm_stddev`` and
    ``d = (mean - renorm_mean) / renorm_stddev``, clipped as ``renorm_clipping`` says. No gradient
    flows through r and d. A ``renorm_stddev`` below ``sqrt(epsilon)`` counts as ``sqrt(epsilon)``.
    Evaluation is as in :class:`BatchNorm`. See also :func:`jaxnorm.batch_renorm`.

    The collection ``batch_stats`` has two averages of the statistics. ``renorm_mean`` and
    ``renorm_stddev`` move with ``renorm_momentum``, and training uses them. ``mean`` and ``var``
    move with ``momentum``, and evaluation uses them. They are Keras's ``moving_mean`` and
    ``moving_variance``. Both averages are of ``sqrt(var + epsilon)``, whose square less epsilon is
    ``var``. Keras stores this average too, as ``moving_stddev``, and starts it from 1. Here ``var``
    starts from ``1 - epsilon`` instead, which makes it 1. A batch that is empty or not finite
    leaves the state unchanged. After :func:`accumulate`, ``mean`` and ``var`` are blended once, but
    the other two move with each microbatch. :func:`recalibrate` replaces ``mean`` and ``var``.

    Keras computes the output as ``x * a + (offset - mean * a)`` with a the inverse deviation, which
    loses the digits of a mean that is much larger than the deviation. Nothing is lost here.

    Attributes:
      renorm_clipping: a dict with some of the keys ``"rmin"``, ``"rmax"`` and ``"dmax"``: the
        limits of r, and of the absolute value of d. By default there are none.
      renorm_momentum: weight of the old value in ``renorm_mean`` and ``renorm_stddev``; 0.99 by
        default.
      use_running_average: as in :class:`BatchNorm`, and so are all others.
      axis: the feature axis, or axes, which are not reduced; the last axis by default.
      momentum: weight of the old value in ``mean`` and ``var``; 0.99 by default.
      epsilon: added to the variance, inside the root; 1e-3 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default.
      axis_index_groups: groups of indices along ``axis_name``, as in :class:`BatchNorm`.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: whether the running statistics are stored in float32, as in
        :class:`BatchNorm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.KerasBatchRenorm(use_running_average=False, epsilon=0.0, renorm_momentum=0.5)
    >>> x = jnp.array([[1.0], [5.0]])  # mean 3, deviation 2; averages 0 and 1
    >>> y, state = norm.apply(norm.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    >>> y[:, 0].tolist(), state["batch_stats"]["renorm_stddev"].tolist()  # r = 2, d = 3
    ([1.0, 5.0], [1.5])
    """

    epsilon: float = 1e-3
    renorm_clipping: Mapping[str, float] | None = field(default=None, kw_only=True)
    renorm_momentum: float = field(default=0.99, kw_only=True)

    @known_keywords
    @nn.compact
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
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        validation.number_or_traced("renorm_momentum", self.renorm_momentum, 1)
        evaluating = evaluates(self, use_running_average)
        features = canonical_axes(self.axis, x.ndim, "axis")
        mean, var = running(self, x, features, lambda *args: var_of(jnp.ones(*args), self.epsilon))
        renorm = [
            self.variable("batch_stats", name, make, mean.value.shape, mean.value.dtype)
            for name, make in (("renorm_mean", jnp.zeros), ("renorm_stddev", jnp.ones))
        ]
        x, options = inputs(self, x, features, mask)
        validation.real(x, "x")
        if evaluating:
            return by_running(x, features, options, mean.value, var.value)
        renorm_mean, renorm_stddev = (average.value for average in renorm)
        y, batch = over_batch(
            self,
            x,
            features,
            options,
            adjust=corrected,
            param=reference_of_stddev(
                renorm_mean, renorm_stddev, x.shape, features, self.epsilon, self.renorm_clipping
            ),
        )
        self._update(batch, mean, var, *renorm)
        return y

    def _update(self, batch: Moments, mean, var, renorm_mean, renorm_stddev) -> None:
        """Move both averages towards the statistics of a batch."""
        if self.is_initializing():
            return
        renorm_mean.value, renorm_stddev.value = follow_stddev(
            renorm_mean.value,
            renorm_stddev.value,
            batch,
            momentum=self.renorm_momentum,
            epsilon=self.epsilon,
        )
        mean.value, var.value = follow_var(
            *collected(self, mean.value, var.value, batch),
            momentum=self.momentum,
            epsilon=self.epsilon,
        )
