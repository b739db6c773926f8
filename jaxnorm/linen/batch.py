"""Norms with running statistics: batch norm and switchable norm."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Axes, Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.running import follow
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import NO_FLAGS, across, flag
from jaxnorm.flax_common.calls import apply_norm, by_running, over_batch
from jaxnorm.flax_common.running import as_moments, collect
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.switchable import switchable_norm

# Holds the Moments of the microbatches so far. It exists only after accumulate().
COLLECTION = "batch_moments"


def collected(
    module: nn.Module, mean: jax.Array, var: jax.Array, batch: Moments
) -> tuple[jax.Array, jax.Array, Moments]:
    """Return the running statistics to start from, and the Moments to blend into them.

    They are those of the arguments, unless the batch is a microbatch. Then the old running
    statistics are blended once, with all microbatches so far.
    """
    if not module.has_variable(COLLECTION, "seen"):
        return mean, var, batch
    batch = jax.tree.map(lambda leaf: leaf.reshape(mean.shape), batch)
    seen = collect(module.get_variable(COLLECTION, "seen"), mean, var, batch)
    module.put_variable(COLLECTION, "seen", seen)
    return seen.mean, seen.var, seen.moments


def evaluates(module: nn.Module, at_call: bool | None) -> bool:
    """Return whether running statistics normalize, as the module or its call says."""
    given = module.use_running_average
    choice = nn.merge_param("use_running_average", given, at_call)
    return flag("use_running_average", choice, NO_FLAGS)


def running(
    module: nn.BatchNorm,
    x: jax.Array,
    features: tuple[int, ...],
    initial_var: Callable[..., jax.Array] = jnp.ones,
) -> tuple[nn.Variable[jax.Array], nn.Variable[jax.Array]]:
    """Return the running mean and variance, which are created on first use."""
    sizes = tuple(x.shape[axis] for axis in features)
    dtype = jnp.float32 if module.force_float32_reductions else module.param_dtype
    mean = module.variable("batch_stats", "mean", jnp.zeros, sizes, dtype)
    return mean, module.variable("batch_stats", "var", initial_var, sizes, dtype)


def update(
    module: nn.Module,
    running_mean: nn.Variable[jax.Array] | None,
    running_var: nn.Variable[jax.Array],
    batch: Moments,
) -> None:
    """Move a module's running statistics towards the statistics of a batch.

    ``running_mean`` is None for a module that keeps no mean.
    """
    # As in Flax, init() leaves the state at 0 and 1.
    if module.is_initializing():
        return
    var = running_var.value
    mean = jnp.zeros_like(var) if running_mean is None else running_mean.value
    mean, var, batch = collected(module, mean, var, batch)
    new_mean, running_var.value = follow(
        mean,
        var,
        batch,
        momentum=module.momentum,
        unbiased=module.unbiased,
        skip_constant=module.skip_constant,
    )
    if running_mean is not None:
        running_mean.value = new_mean


class BatchNorm(nn.BatchNorm):
    """Batch normalization (Ioffe & Szegedy 2015, arXiv 1502.03167).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over all
    axes except ``axis``. Scale, bias and the running statistics have the shape of the feature axes.
    A subclass of :class:`flax.linen.BatchNorm`.

    In training (``use_running_average=False``) a batch is normalized by its own statistics. These
    are also blended into the running statistics. The collection ``batch_stats`` holds them and must
    be mutable. Initialization leaves the running mean at 0 and the running variance at 1. By
    default the biased variance is averaged; PyTorch averages the unbiased one.

    Attributes:
      use_running_average: whether the running statistics normalize ``x`` (evaluation) or the
        statistics of the batch do (training). None, the default, leaves the choice to the call.
      axis: the feature axis, or axes, which are not reduced; the last axis by default.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: whether the running statistics are stored in float32 (True, the
        default) or in ``param_dtype``. Statistics are always computed in float32 at least.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.BatchNorm(momentum=0.9), jnp.array([[1.0], [3.0]])
    >>> variables = norm.init(jax.random.key(0), x, use_running_average=False)
    >>> y, state = norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    >>> y.round(3).tolist(), state["batch_stats"]["mean"].round(3).tolist()
    ([[-1.0], [1.0]], [0.20000000298023224])
    """

    # Only by keyword, so that the positional fields are Flax's.
    unbiased: bool = field(default=False, kw_only=True)
    skip_constant: bool = field(default=False, kw_only=True)

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
        evaluating = evaluates(self, use_running_average)
        features = canonical_axes(self.axis, x.ndim, "axis")
        mean, var = running(self, x, features)
        x, options = inputs(self, x, features, mask)
        if evaluating:
            return by_running(x, features, options, mean.value, var.value)
        y, batch = over_batch(self, x, features, options)
        update(self, mean, var, batch)
        return y


class SwitchableNorm(nn.Module):
    """Switchable normalization (Luo et al. 2018, arXiv 1806.10779).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. The mean is a learned blend of
    instance, layer and batch mean with the weights ``softmax(mean_logits)``. The variance is
    blended with ``softmax(var_logits)``.

    The parameters ``mean_logits`` and ``var_logits`` have the shape ``(3,)``, in the order
    instance, layer, batch. They start at zero, which means equal weights. Scale and bias have the
    shape of ``feature_axes``. The batch statistics have running statistics as in
    :class:`BatchNorm`.

    Attributes:
      use_running_average: whether the running statistics (evaluation) or the statistics of the
        batch (training) enter the blend. None, the default, leaves the choice to the call.
      feature_axes: the axes of the features, which batch and instance statistics do not reduce; the
        last axis by default.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of the device axes over which the batch extends; None by default.
        It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.SwitchableNorm(use_running_average=False)
    >>> variables = norm.init(jax.random.key(0), jnp.ones((2, 4, 4, 3)))
    >>> sorted(variables["params"])
    ['bias', 'mean_logits', 'scale', 'var_logits']
    """

    use_running_average: bool | None = None
    feature_axes: Axes = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    axis_name: str | None = None
    axis_index_groups: Any = None
    unbiased: bool = False
    skip_constant: bool = False

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
          x: the array ``(batch, ..., features)`` to normalize, with an axis between batch and
            features; integers and booleans become floats.
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        evaluating = evaluates(self, use_running_average)
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        sizes = tuple(x.shape[axis] for axis in features)
        mean = self.variable("batch_stats", "mean", jnp.zeros, sizes, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, sizes, jnp.float32)
        x, options = inputs(self, x, features, mask)
        logits = [
            self.param(name, initializers.zeros, (3,), self.param_dtype)
            for name in ("mean_logits", "var_logits")
        ]
        y, batch = apply_norm(
            switchable_norm,
            x,
            *logits,
            running=as_moments(mean.value, var.value) if evaluating else None,
            feature_axes=features,
            # Instance and layer statistics stay on their device, and running ones need
            # no axis.
            axis_name=None if evaluating else across(self),
            **options,
        )
        if not evaluating:
            update(self, mean, var, batch)
        return y
