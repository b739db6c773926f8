"""Norms of each graph over its nodes: graph and pair norm."""

import jax
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.flax_common.arguments import across
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.graphs import graph_norm, pair_norm

__all__ = ["GraphNorm", "PairNorm"]


# Flax has no norms of graphs. Its InstanceNorm has the fields that all norms share.
class GraphNorm(nn.InstanceNorm):
    """Graph normalization (Cai et al. 2020, arXiv 2009.03294) of the nodes of each graph.

    ``d = x - mean_scale * mean``, ``y = d / sqrt(mean(d**2) + epsilon) * scale + bias``. Scale,
    bias and ``mean_scale`` have the shape of ``feature_axes``. See also :func:`jaxnorm.graph_norm`.

    Attributes:
      epsilon: added to the mean square, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes of the channels; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      mean_scale_init: initializer of ``mean_scale``, the learned part of the mean that is
        subtracted; ones by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> nodes, ids = jnp.array([[1.0], [3.0], [10.0], [30.0]]), jnp.array([0, 0, 1, 1])
    >>> y, variables = nn.GraphNorm().init_with_output(
    ...     jax.random.key(0), nodes, segments=ids, num_segments=2
    ... )
    >>> y[:, 0].round(3).tolist(), sorted(variables["params"])
    ([-1.0, 1.0, -1.0, 1.0], ['bias', 'mean_scale', 'scale'])
    """

    epsilon: float = 1e-5
    mean_scale_init: Initializer = initializers.ones

    @known_keywords
    @nn.compact
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
        sizes = tuple(x.shape[axis] for axis in features)
        # Initializers draw random numbers in the order in which parameters are created.
        mean_scale = self.param("mean_scale", self.mean_scale_init, sizes, self.param_dtype)
        x, options = inputs(self, x, features, mask)
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


class PairNorm(nn.InstanceNorm):
    """Pair normalization (Zhao & Akoglu 2019, arXiv 1909.12223) of the nodes of each graph.

    ``d = x - mean``, ``y = length * d / sqrt(mean(|d|**2) + epsilon)``, then times scale with
    ``use_scale`` and plus bias with ``use_bias``. See also :func:`jaxnorm.pair_norm`.

    Attributes:
      epsilon: added to the mean squared length of the nodes, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; False by default.
      use_scale: whether to multiply by a learned scale; False by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes of the channels; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      length: root mean square length of the nodes in the output, the paper's s; 1 by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> nn.PairNorm(length=2.0).apply({}, jnp.array([[3.0, 0.0], [-3.0, 0.0]])).round(3).tolist()
    [[2.0, 0.0], [-2.0, 0.0]]
    """

    epsilon: float = 1e-5
    use_bias: bool = False
    use_scale: bool = False
    length: float = 1.0

    @known_keywords
    @nn.compact
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
        x, options = inputs(self, x, features, mask)
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
