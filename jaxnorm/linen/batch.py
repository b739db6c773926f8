"""Norms with running statistics: batch norm and switchable norm."""

from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Axes, Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments.axes import canonical_axes, other_axes, unsplit
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.call import run_with_moments
from jaxnorm.core.running import follow
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import flag
from jaxnorm.flax_common.calls import evaluated, switched
from jaxnorm.flax_common.running import collect
from jaxnorm.linen.layers import across, inputs, over

COLLECTION = "batch_moments"  # what has been seen of the present batch: there only if asked for


class _Running:
    """The running statistics of a module: variables ``mean`` and ``var`` of the collection
    ``batch_stats``.
    """

    def __init__(self, module: nn.Module, sizes: tuple[int, ...], dtype: Dtype):
        self.module = module
        self.mean = module.variable("batch_stats", "mean", jnp.zeros, sizes, dtype)
        self.var = module.variable("batch_stats", "var", jnp.ones, sizes, dtype)

    def read(self) -> Moments:
        return Moments(jnp.ones((), jnp.float32), self.mean.value, self.var.value)

    def update(self, batch: Moments) -> None:
        module = self.module
        if module.is_initializing():
            return
        mean, var = self.mean.value, self.var.value
        if module.has_variable(COLLECTION, "seen"):  # a microbatch: see accumulate
            batch = jax.tree.map(lambda leaf: leaf.reshape(mean.shape), batch)
            seen = collect(module.get_variable(COLLECTION, "seen"), mean, var, batch)
            module.put_variable(COLLECTION, "seen", seen)
            mean, var, batch = seen.mean, seen.var, seen.moments
        self.mean.value, self.var.value = follow(
            mean,
            var,
            batch,
            momentum=module.momentum,
            unbiased=module.unbiased,
            skip_constant=module.skip_constant,
        )


class BatchNorm(nn.BatchNorm):
    """Batch normalization (Ioffe & Szegedy 2015, arXiv 1502.03167), a
    :class:`flax.linen.BatchNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance over all axes but
    ``axis``, the feature axis or axes, of whose shape scale, bias and the running statistics are.
    In training (``use_running_average=False``) the batch's statistics normalize it and are blended,
    biased, into the collection ``batch_stats``, which must be mutable. ``momentum`` is the weight
    of the old value: 0.99 here is 0.01 in PyTorch, which also averages the unbiased variance.
    Initialization leaves the running statistics at 0 and 1. ``unbiased`` and ``skip_constant`` are
    those of :func:`jaxnorm.ema`: average the unbiased variance, as PyTorch does; leave a feature's
    running statistics alone where its batch has one element, or equal ones.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.BatchNorm(momentum=0.9), jnp.array([[1.0], [3.0]])
    >>> variables = norm.init(jax.random.key(0), x, use_running_average=False)
    >>> y, state = norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    >>> y.round(3).tolist(), state["batch_stats"]["mean"].round(3).tolist()
    ([[-1.0], [1.0]], [0.20000000298023224])
    """

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
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        evaluating = flag(
            "use_running_average",
            nn.merge_param("use_running_average", self.use_running_average, use_running_average),
        )
        features = canonical_axes(self.axis, x.ndim, "axis")
        state_dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
        running = _Running(self, tuple(x.shape[axis] for axis in features), state_dtype)
        if evaluating:
            given = inputs(self, x, features)
            return evaluated(self, given, running.read(), features, mask)
        reduction = unsplit(x.shape, other_axes(features, x.ndim))
        y, batch = run_with_moments(over(self, x, reduction, features, mask))
        running.update(batch)
        return y


class SwitchableNorm(nn.Module):
    """Switchable normalization (Luo et al. 2018, arXiv 1806.10779): a learned blend of instance,
    layer and batch statistics.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, the mean blended by
    ``softmax(mean_logits)``, var by ``softmax(var_logits)``. Parameters ``scale``, ``bias`` of the
    shape of the feature axes, ``mean_logits`` and ``var_logits`` ``(3,)`` in the order instance,
    layer, batch, all zero at first: equal weights. Running batch statistics as :class:`BatchNorm`.

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
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        evaluating = flag(
            "use_running_average",
            nn.merge_param("use_running_average", self.use_running_average, use_running_average),
        )
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        running = _Running(self, tuple(x.shape[axis] for axis in features), jnp.float32)
        given = inputs(self, x, features)
        logits = [
            self.param(name, initializers.zeros, (3,), self.param_dtype)
            for name in ("mean_logits", "var_logits")
        ]
        y, batch = switched(
            self,
            given,
            logits,
            features,
            mask,
            running=running.read() if evaluating else None,
            axis_name=None if evaluating else across(self),
        )
        if not evaluating:
            running.update(batch)
        return y
