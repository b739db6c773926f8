"""Norms without state: layer, RMS, positional, instance, group, graph and pair norm."""

from typing import Any

import jax
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Reduction, canonical_axes, in_groups, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call, run, run_with_moments
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import (
    Inputs,
    bound,
    group_axes,
    group_count,
    inexact,
    instance_axes,
    module_axes,
)
from jaxnorm.flax_common.calls import call_of
from jaxnorm.norms.graphs import graph_norm, pair_norm

__all__ = [
    "GraphNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "PairNorm",
    "PositionalNorm",
    "RMSNorm",
]


def inputs(module: Any, x: jax.Array, features: tuple[int, ...]) -> Inputs:
    """Return a module's ``x``, scale, bias and output dtype.

    Scale and bias are created on first use.
    """
    sizes = tuple(x.shape[axis] for axis in features)

    def create(name: str) -> jax.Array | None:
        if not getattr(module, f"use_{name}", False):
            return None
        return module.param(name, getattr(module, f"{name}_init"), sizes, module.param_dtype)

    scale, bias = create("scale"), create("bias")
    dtype = promoted(module.dtype, x, scale, bias)
    return Inputs(inexact(x, dtype), scale, bias, dtype)


def across(module: Any):
    """Return the device axes over which a module shares statistics.

    As in Flax, the axes need not be bound while a module is initialized.
    """
    return bound(module.axis_name, module.axis_index_groups, initializing=module.is_initializing())


def over(
    module: Any,
    x: jax.Array,
    reduction: Reduction,
    features: tuple[int, ...],
    mask: Param,
    *,
    centered: bool = True,
    segments: Param = None,
    num_segments: int | None = None,
) -> Call:
    """Prepare the normalization of ``x`` by a module."""
    return call_of(
        module,
        inputs(module, x, features),
        reduction,
        features,
        mask,
        across(module),
        centered=centered,
        segments=segments,
        num_segments=num_segments,
    )


def over_axes(module: Any, x: jax.Array, mask: Param, *, centered: bool = True) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes."""
    features, reduced = module_axes(module, x.ndim)
    return over(module, x, unsplit(x.shape, reduced), features, mask, centered=centered)


class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over
    ``reduction_axes``. Scale and bias have the shape of ``feature_axes``. A subclass of
    :class:`flax.linen.LayerNorm`.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes that give scale and bias their shape; the last axis by default.
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
    >>> y, variables = nn.LayerNorm().init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))
    >>> y.round(3).tolist(), sorted(variables["params"])
    ([[-1.0, 1.0]], ['bias', 'scale'])
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
          x: the array to normalize; integers and booleans become floats.
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
        features, reduced = module_axes(self, x.ndim)
        reduction = unsplit(x.shape, reduced)
        call = over(
            self, x, reduction, features, mask, segments=segments, num_segments=num_segments
        )
        return run(call)


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467).

    ``y = x / sqrt(mean(x**2) + epsilon) * scale``. The mean is taken over ``reduction_axes``. The
    scale has the shape of ``feature_axes``. A subclass of :class:`flax.linen.RMSNorm`.

    Attributes:
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_scale: whether to multiply by a learned scale; True by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes that give the scale its shape; the last axis by default.
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
    >>> y, _ = nn.RMSNorm().init_with_output(jax.random.key(0), jnp.array([[3.0, -3.0]]))
    >>> y.round(3).tolist()
    [[1.0, -1.0]]
    """

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize ``x``.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        return run(over_axes(self, x, mask, centered=False))


class PositionalNorm(nn.LayerNorm):
    """Positional normalization (Li et al. 2019, arXiv 1907.04312), which also returns the Moments.

    ``y = (x - mean) / sqrt(var + epsilon)``, then times scale with ``use_scale`` and plus bias with
    ``use_bias``. The mean and variance of each position are computed over ``reduction_axes``, the
    channels. Scale and bias have the shape of ``feature_axes``; by default there are none.

    A call returns ``(y, moments)``. The formula
    ``z * jnp.sqrt(moments.var + epsilon) + moments.mean`` gives the output z of a later layer the
    moments of ``x``: the paper's moment shortcut.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; False by default.
      use_scale: whether to multiply by a learned scale; False by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes that give scale and bias their shape; the last axis by default.
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
    >>> y, moments = nn.PositionalNorm().apply({}, jnp.array([[1.0, 3.0], [10.0, 30.0]]))
    >>> y.round(3).tolist(), moments.mean.tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]])
    """

    epsilon: float = 1e-5
    use_bias: bool = False
    use_scale: bool = False

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> tuple[jax.Array, Moments]:
        """Normalize ``x`` and return the Moments of each position.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``, and the Moments, whose reduced axes have size
          1.
        """
        return run_with_moments(over_axes(self, x, mask))


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
        groups = group_count(self.num_groups, self.group_size, x.shape[-1])
        reduction = in_groups(x.shape, group_axes(self.reduction_axes, x.ndim), x.ndim - 1, groups)
        return run(over(self, x, reduction, (x.ndim - 1,), mask))


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
        mean_scale = self.param("mean_scale", self.mean_scale_init, sizes, self.param_dtype)
        given = inputs(self, x, features)
        return graph_norm(
            given.x,
            mean_scale,
            feature_axes=features,
            scale=given.scale,
            bias=given.bias,
            epsilon=self.epsilon,
            where=validation.mask(mask, given.x.shape, "mask"),
            segments=segments,
            num_segments=num_segments,
            axis_name=across(self),
            dtype=given.dtype,
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
        given = inputs(self, x, features)
        return pair_norm(
            given.x,
            self.length,
            feature_axes=features,
            scale=given.scale,
            bias=given.bias,
            epsilon=self.epsilon,
            where=validation.mask(mask, given.x.shape, "mask"),
            segments=segments,
            num_segments=num_segments,
            axis_name=across(self),
            dtype=given.dtype,
        )
