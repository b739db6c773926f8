"""Norms by the size of each channel's response: filter and global response norm."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.flax_common.arguments import across
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.response import filter_response_norm, global_response_norm

__all__ = ["FilterResponseNorm", "GlobalResponseNorm"]


# Flax has neither norm. Its InstanceNorm has the fields that all norms share.
class FilterResponseNorm(nn.InstanceNorm):
    """Filter response normalization (Singh & Krishnan 2019, arXiv 1911.09737), with its threshold.

    ``y = maximum(x / sqrt(mean(x**2) + epsilon) * scale + bias, threshold)``. The mean is taken
    over the positions of each channel of each example. Scale, bias and threshold have the shape of
    ``feature_axes``. No activation follows the layer. See also
    :func:`jaxnorm.filter_response_norm`.

    Attributes:
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes that, besides the batch, are not reduced; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      use_threshold: whether the output has a learned least value; True by default.
      threshold_init: initializer of the threshold; zeros by default, which is ReLU.
      learn_epsilon: whether to add the size of one learned number, ``learned_epsilon``, to
        ``epsilon``; False by default. The paper does so for feature maps of one position.
      learned_epsilon_init: initializer of that number; 1e-4 by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[[3.0], [-3.0]], [[-20.0], [20.0]]])
    >>> y, variables = nn.FilterResponseNorm().init_with_output(jax.random.key(0), x)
    >>> y[..., 0].round(3).tolist(), sorted(variables["params"])
    ([[1.0, 0.0], [0.0, 1.0]], ['bias', 'scale', 'threshold'])
    """

    use_threshold: bool = True
    threshold_init: Initializer = initializers.zeros
    learn_epsilon: bool = False
    learned_epsilon_init: Initializer = initializers.constant(1e-4)

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize ``x``, and raise it to the threshold.

        Args:
          x: the array ``(batch, ..., features)`` to normalize, with an axis between batch and
            features; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        sizes = tuple(x.shape[axis] for axis in features)
        x, options = inputs(self, x, features, mask)
        threshold = None
        if self.use_threshold:
            threshold = self.param("threshold", self.threshold_init, sizes, self.param_dtype)
        if self.learn_epsilon:
            learned = self.param("learned_epsilon", self.learned_epsilon_init, (), self.param_dtype)
            options["epsilon"] = self.epsilon + jnp.abs(learned)
        return apply_norm(
            filter_response_norm,
            x,
            threshold=threshold,
            feature_axes=features,
            axis_name=across(self),
            **options,
        )


class GlobalResponseNorm(nn.InstanceNorm):
    """Global response normalization (Woo et al. 2023, arXiv 2301.00808) of ConvNeXt V2.

    ``y = scale * x * g / (mean(g) + epsilon) + bias + x``, with the length ``g = sqrt(sum(x**2))``
    of each channel of each example over its positions. The mean of g is taken over the channels.
    Scale and bias have the shape of ``feature_axes`` and start at 0: the layer is the identity
    then. See also :func:`jaxnorm.global_response_norm`.

    Attributes:
      epsilon: added to the mean of g; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; zeros by default.
      feature_axes: the axes of the channels; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[[3.0, 0.0], [4.0, 15.0]]])
    >>> y, variables = nn.GlobalResponseNorm().init_with_output(jax.random.key(0), x)
    >>> y.tolist(), sorted(variables["params"])
    ([[[3.0, 0.0], [4.0, 15.0]]], ['bias', 'scale'])
    """

    scale_init: Initializer = initializers.zeros

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Multiply each channel by its share in the response, and add ``x``.

        Args:
          x: the array ``(batch, ..., features)``, images or tokens, with an axis between batch and
            features; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The result, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options = inputs(self, x, features, mask)
        return apply_norm(
            global_response_norm,
            x,
            feature_axes=features,
            axis_name=across(self),
            **options,
        )
