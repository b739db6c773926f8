"""Norms by the size of each channel's response: filter and global response norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.flax_common.arguments import across
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.nnx import flax_versions
from jaxnorm.nnx.calls import check_features, inputs
from jaxnorm.norms.response import filter_response_norm, global_response_norm

__all__ = ["FilterResponseNorm", "GlobalResponseNorm"]

LEARNED_EPSILON = initializers.constant(1e-4)


# Flax has neither norm. The constructor of its InstanceNorm makes scale and bias.
class FilterResponseNorm(flax_versions.InstanceNorm):
    """Filter response normalization (Singh & Krishnan 2019, arXiv 1911.09737), with its threshold.

    ``y = maximum(x / sqrt(mean(x**2) + epsilon) * scale + bias, threshold)``. The mean is taken
    over the positions of each channel of each example. Scale, bias and threshold have the shape
    ``(num_features,)`` and apply along ``feature_axes``. No activation follows the layer. See also
    :func:`jaxnorm.filter_response_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      use_threshold: whether the output has a learned least value; True by default.
      threshold_init: initializer of the threshold; zeros by default, which is ReLU.
      learn_epsilon: whether to add the size of one learned number, ``learned_epsilon``, to
        ``epsilon``; False by default. The paper does so for feature maps of one position.
      learned_epsilon_init: initializer of that number; 1e-4 by default.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``scale_init``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x = jnp.array([[[3.0], [-3.0]], [[-20.0], [20.0]]])
    >>> nnx.FilterResponseNorm(1, rngs=Rngs(0))(x)[..., 0].round(3).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_threshold: bool = True,
        threshold_init: Initializer = initializers.zeros,
        learn_epsilon: bool = False,
        learned_epsilon_init: Initializer = LEARNED_EPSILON,
        **options,
    ):
        super().__init__(num_features, **options)
        create = lambda init, *sizes: nnx.Param(
            init(options["rngs"].params(), sizes, self.param_dtype)
        )
        # Drawn last, so that scale and bias equal InstanceNorm's for the same rngs.
        self.threshold = create(threshold_init, num_features) if use_threshold else nnx.data(None)
        self.learned_epsilon = create(learned_epsilon_init) if learn_epsilon else nnx.data(None)

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
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
        x, options, _ = inputs(self, x, features, mask)
        threshold = None
        if self.threshold is not None:
            sizes, threshold = tuple(x.shape[axis] for axis in features), self.threshold[...]
            check_features(self, x, sizes, threshold)
            threshold = threshold.reshape(sizes)
        if self.learned_epsilon is not None:
            options["epsilon"] = self.epsilon + jnp.abs(self.learned_epsilon[...])
        return apply_norm(
            filter_response_norm,
            x,
            threshold=threshold,
            feature_axes=features,
            axis_name=across(self),
            **options,
        )


class GlobalResponseNorm(flax_versions.InstanceNorm):
    """Global response normalization (Woo et al. 2023, arXiv 2301.00808) of ConvNeXt V2.

    ``y = scale * x * g / (mean(g) + epsilon) + bias + x``, with the length ``g = sqrt(sum(x**2))``
    of each channel of each example over its positions. The mean of g is taken over the channels.
    Scale and bias have the shape ``(num_features,)``, apply along ``feature_axes`` and start at 0:
    the layer is the identity then. See also :func:`jaxnorm.global_response_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the mean of g; 1e-6 by default.
      scale_init: initializer of the scale; zeros by default.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm, x = nnx.GlobalResponseNorm(2, rngs=Rngs(0)), jnp.array([[[3.0, 0.0], [4.0, 15.0]]])
    >>> norm.scale[...] = jnp.array([2.0, 2.0])
    >>> norm(x).round().tolist()
    [[[6.0, 0.0], [8.0, 60.0]]]
    """

    def __init__(
        self, num_features: int, *, scale_init: Initializer = initializers.zeros, **options
    ):
        super().__init__(num_features, scale_init=scale_init, **options)

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
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
        x, options, _ = inputs(self, x, features, mask)
        return apply_norm(
            global_response_norm,
            x,
            feature_axes=features,
            axis_name=across(self),
            **options,
        )
