"""Norms of each graph over its nodes: graph and pair norm."""

import jax
from flax import nnx
from jax.nn import initializers

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.arguments.options import Param
from jaxnorm.flax_common.arguments import across
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.nnx import flax_versions
from jaxnorm.nnx.calls import check_features, inputs
from jaxnorm.norms.graphs import graph_norm, pair_norm

__all__ = ["GraphNorm", "PairNorm"]


# Flax has no norms of graphs. The constructor of its InstanceNorm makes scale and bias.
class GraphNorm(flax_versions.InstanceNorm):
    """Graph normalization (Cai et al. 2020, arXiv 2009.03294) of the nodes of each graph.

    ``d = x - mean_scale * mean``, ``y = d / sqrt(mean(d**2) + epsilon) * scale + bias``. Scale,
    bias and ``mean_scale`` have the shape ``(num_features,)`` and apply along ``feature_axes``. See
    also :func:`jaxnorm.graph_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the mean square, inside the root; 1e-5 by default.
      mean_scale_init: initializer of ``mean_scale``, the learned part of the mean that is
        subtracted; ones by default.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``scale_init``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nodes, ids = jnp.array([[1.0], [3.0], [10.0], [30.0]]), jnp.array([0, 0, 1, 1])
    >>> nnx.GraphNorm(1, rngs=Rngs(0))(nodes, segments=ids, num_segments=2)[:, 0].round(3).tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        mean_scale_init=initializers.ones,
        **options,
    ):
        super().__init__(num_features, epsilon=epsilon, **options)
        # Drawn last, so that scale and bias equal InstanceNorm's for the same rngs.
        self.mean_scale = nnx.Param(
            mean_scale_init(options["rngs"].params(), (num_features,), self.param_dtype)
        )

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segments: Param = None,
        num_segments: int | None = None,
    ) -> jax.Array:
        """Normalize the nodes of each graph.

        Args:
          x: the nodes ``(nodes, channels)`` of all graphs, or a batch ``(batch, nodes, channels)``
            of such arrays; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.
          segments: integer ids from 0 to ``num_segments - 1``, in any order: which graph each node
            belongs to. Without ids, all nodes of ``x``, or of each example of a batch, are one
            graph.
          num_segments: the number of segments, a static integer; required with ``segments``.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options, _ = inputs(self, x, features, mask)
        sizes, mean_scale = tuple(x.shape[axis] for axis in features), self.mean_scale[...]
        check_features(self, x, sizes, mean_scale)
        mean_scale = mean_scale.reshape(sizes)
        return apply_norm(
            graph_norm,
            x,
            mean_scale,
            feature_axes=features,
            axis_name=across(self),
            segments=segments,
            num_segments=num_segments,
            **options,
        )


class PairNorm(flax_versions.InstanceNorm):
    """Pair normalization (Zhao & Akoglu 2019, arXiv 1909.12223) of the nodes of each graph.

    ``d = x - mean``, ``y = length * d / sqrt(mean(|d|**2) + epsilon)``, then times scale with
    ``use_scale`` and plus bias with ``use_bias``. See also :func:`jaxnorm.pair_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the mean squared length of the nodes, inside the root; 1e-5 by default.
      use_bias: whether to add a learned bias; False by default.
      use_scale: whether to multiply by a learned scale; False by default.
      length: root mean square length of the nodes in the output, the paper's s; 1 by default.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``bias_init``,
    ``scale_init``, ``feature_axes``, ``axis_name``, ``axis_index_groups``,
    ``use_fast_variance``, ``promote_dtype``, ``bias_metadata``, ``scale_metadata``
    and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.PairNorm(2, length=2.0, rngs=Rngs(0))
    >>> norm(jnp.array([[3.0, 0.0], [-3.0, 0.0]])).round(3).tolist()
    [[2.0, 0.0], [-2.0, 0.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        use_bias: bool = False,
        use_scale: bool = False,
        length: float = 1.0,
        **options,
    ):
        super().__init__(
            num_features, epsilon=epsilon, use_bias=use_bias, use_scale=use_scale, **options
        )
        self.length = length

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segments: Param = None,
        num_segments: int | None = None,
    ) -> jax.Array:
        """Normalize the nodes of each graph.

        Args:
          x: the nodes ``(nodes, channels)`` of all graphs, or a batch ``(batch, nodes, channels)``
            of such arrays; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.
          segments: integer ids from 0 to ``num_segments - 1``, in any order: which graph each node
            belongs to. Without ids, all nodes of ``x``, or of each example of a batch, are one
            graph.
          num_segments: the number of segments, a static integer; required with ``segments``.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options, _ = inputs(self, x, features, mask)
        return apply_norm(
            pair_norm,
            x,
            self.length,
            feature_axes=features,
            axis_name=across(self),
            segments=segments,
            num_segments=num_segments,
            **options,
        )
