"""EvoNorm, norm and activation in one: the layers S0 and B0."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.flax_common.arguments import across, group_count
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.flax_common.running import as_moments
from jaxnorm.linen.batch import evaluates, update
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.evonorm import evonorm_b0, evonorm_s0

__all__ = ["EvoNormB0", "EvoNormS0"]


# Flax has no EvoNorm. Its InstanceNorm has the fields that all norms share.
class EvoNormS0(nn.InstanceNorm):
    """EvoNorm-S0 (Liu et al. 2020, arXiv 2004.02967): swish over the deviation of a group.

    ``y = x * sigmoid(v * x) / sqrt(var + epsilon) * scale + bias``, with the variance of group
    norm. The parameters v, scale and bias have the shape of ``feature_axes``. No activation follows
    the layer. See also :func:`jaxnorm.evonorm_s0`.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axis of the channels; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      num_groups: number of groups of neighbouring channels; 32 by default. With None,
        ``group_size`` says how many.
      group_size: number of channels of each group, in place of ``num_groups``; None by default.
      v_init: initializer of v; ones by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.EvoNormS0(num_groups=2), jnp.array([[10.0, 30.0, 100.0, 300.0]])
    >>> y, variables = norm.init_with_output(jax.random.key(0), x)
    >>> y.round().tolist(), sorted(variables["params"])
    ([[1.0, 3.0, 1.0, 3.0]], ['bias', 'scale', 'v'])
    """

    epsilon: float = 1e-5
    num_groups: int | None = 32
    group_size: int | None = None
    v_init: Initializer = initializers.ones

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize and activate ``x``.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The output, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        num_groups = group_count(self.num_groups, self.group_size, x.shape[features[0]])
        sizes = tuple(x.shape[axis] for axis in features)
        x, options = inputs(self, x, features, mask)
        v = self.param("v", self.v_init, sizes, self.param_dtype)
        return apply_norm(
            evonorm_s0,
            x,
            v,
            num_groups,
            feature_axes=features,
            axis_name=across(self),
            **options,
        )


class EvoNormB0(nn.InstanceNorm):
    """EvoNorm-B0 (Liu et al. 2020, arXiv 2004.02967): over the deviation of batch or instance.

    ``y = x / maximum(sqrt(batch_var + epsilon), v * x + sqrt(var + epsilon)) * scale + bias``. The
    variance ``var`` is that of each channel of each example. The parameters v, scale and bias have
    the shape of ``feature_axes``. No activation follows the layer. See also
    :func:`jaxnorm.evonorm_b0`.

    In training (``use_running_average=False``) ``batch_var`` is the variance of the batch. It is
    blended into the running variance, the variable ``var`` of the collection ``batch_stats``, which
    must be mutable. In evaluation ``batch_var`` is the running variance.

    Attributes:
      epsilon: added to both variances, inside the roots; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes of the features; the last axis by default.
      axis_name: name, or names, of device axes over which the batch extends; None by
        default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      use_running_average: whether the running variance (evaluation) or that of the batch (training)
        is used. None, the default, leaves the choice to the call.
      momentum: weight of the old value in the running variance; 0.99 by default, which is 0.01 in
        PyTorch.
      v_init: initializer of v; ones by default.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch Image
        Models do; False by default.
      skip_constant: whether to keep the running variance of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[[2.0], [6.0]]])
    >>> norm = nn.EvoNormB0(use_running_average=False, momentum=0.5, epsilon=0.0)
    >>> variables = norm.init(jax.random.key(0), x)
    >>> y, state = norm.apply(variables, x, mutable=["batch_stats"])  # 2 / (2 + 2), 6 / (6 + 2)
    >>> y[..., 0].tolist(), state["batch_stats"]["var"].tolist()
    ([[0.5, 0.75]], [2.5])
    """

    epsilon: float = 1e-5
    use_running_average: bool | None = None
    momentum: float = 0.99
    v_init: Initializer = initializers.ones
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
        """Normalize and activate ``x``, and update the running variance in training.

        Args:
          x: the array ``(batch, ..., features)`` to normalize, with an axis between batch and
            features; integers and booleans become floats.
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The output, of the shape of ``x``.
        """
        evaluating = evaluates(self, use_running_average)
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        sizes = tuple(x.shape[axis] for axis in features)
        var = self.variable("batch_stats", "var", jnp.ones, sizes, jnp.float32)
        x, options = inputs(self, x, features, mask)
        v = self.param("v", self.v_init, sizes, self.param_dtype)
        known = as_moments(jnp.zeros_like(var.value), var.value) if evaluating else None
        y, batch = apply_norm(
            evonorm_b0,
            x,
            v,
            running=known,
            feature_axes=features,
            axis_name=None if evaluating else across(self),
            **options,
        )
        if not evaluating:
            update(self, None, var, batch)
        return y
