"""Norms of each example over its positions: instance and group norm."""

import jax
from flax import linen as nn

from jaxnorm.arguments.axes import in_groups, unsplit
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import run
from jaxnorm.flax_common.arguments import group_axes, group_count, instance_axes
from jaxnorm.linen.calls import over

__all__ = ["GroupNorm", "InstanceNorm"]


class InstanceNorm(nn.InstanceNorm):
    """Instance normalization (Ulyanov et al. 2016, arXiv 1607.08022).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over all
    axes except the batch axis 0 and ``feature_axes``. Scale and bias have the shape of
    ``feature_axes``. A subclass of :class:`flax.linen.InstanceNorm`.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-6 by default.
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

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> nn.InstanceNorm().init_with_output(jax.random.key(0), x)[0][..., 0].round(3).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """

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
        """Normalize ``x``, or each of its segments.

        Args:
          x: the array ``(batch, ..., features)`` to normalize; with ``segments`` also
            ``(n, features)``, without a batch. Integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.
          segments: integer ids from 0 to ``num_segments - 1``, in any order. Positions along the
            first reduction axis with the same id form a group, for example the tokens of a
            document. The shape is ``(n,)`` or, if every row has ids of its own, the shape of ``x``
            up to that axis; see :func:`jaxnorm.moments`.
          num_segments: the number of segments, a static integer; required with ``segments``.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features, reduced = instance_axes(self.feature_axes, x.ndim, packed=segments is not None)
        reduction = unsplit(x.shape, reduced)
        call = over(
            self, x, reduction, features, mask, segments=segments, num_segments=num_segments
        )
        return run(call)


class GroupNorm(nn.GroupNorm):
    """Group normalization (Wu & He 2018, arXiv 1803.08494).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. The channels are the last axis.
    Neighbouring channels form groups, and each group has its own mean and variance, computed over
    all axes except the batch axis 0, or over ``reduction_axes``. Scale and bias have the shape
    ``(channels,)``. A subclass of :class:`flax.linen.GroupNorm`.

    Attributes:
      num_groups: the number of groups, which must divide the number of channels; 32 by default.
        Pass None to give ``group_size`` instead.
      group_size: the number of channels in a group; None by default.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce, which must include the last one; by default all except
        axis 0.
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
    >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
    >>> nn.GroupNorm(num_groups=2).init_with_output(jax.random.key(0), x)[0].round(3).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize ``x``.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        reduced = group_axes(self.reduction_axes, x.ndim)
        groups = group_count(self.num_groups, self.group_size, x.shape[-1])
        reduction = in_groups(x.shape, reduced, x.ndim - 1, groups)
        return run(over(self, x, reduction, (x.ndim - 1,), mask))
