"""Norms without state: layer, RMS, positional, instance, group, graph and pair norm."""

import math
from functools import wraps
from typing import Any

import jax
from flax import nnx
from jax.nn import initializers

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Reduction, canonical_axes, in_groups, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call, run, run_with_moments
from jaxnorm.core.normalization import takes_arguments_of
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
from jaxnorm.nnx import flax_versions
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


def inputs(
    module: Any, x: jax.Array, features: tuple[int, ...], *stats: jax.Array
) -> tuple[Inputs, list[jax.Array]]:
    """Return the inputs of a module's norm, and the running statistics promoted with them."""
    params = (module.scale, module.bias) if hasattr(module, "bias") else (module.scale,)
    arrays: tuple[Any, ...] = (x, *stats, *(None if p is None else p[...] for p in params))
    if own_rule := flax_versions.promotion(module):  # Flax's own rule would round x too early
        arrays = own_rule(arrays, dtype=module.dtype)
    x, *running, scale, bias = arrays if len(params) == 2 else (*arrays, None)
    deciding = arrays if flax_versions.RUNNING_PROMOTE else (x, scale, bias)
    dtype, sizes = promoted(module.dtype, *deciding), tuple(x.shape[axis] for axis in features)
    check_features(module, x, sizes, *running, scale, bias)
    scale, bias = (None if p is None else p.reshape(sizes) for p in (scale, bias))
    return Inputs(inexact(x, dtype), scale, bias, dtype), running


def check_features(
    module: Any, x: jax.Array, sizes: tuple[int, ...], *arrays: jax.Array | None
) -> None:
    """Raise ValueError unless parameters and statistics have as many features as ``x``."""
    for size in {array.size for array in arrays if array is not None} - {math.prod(sizes)}:
        name = type(module).__name__
        raise ValueError(
            f"x must have the features that {name} was made for, {size}: got {sizes} of an x of "
            f"shape {x.shape}."
        )


def across(module: Any):
    """Return the device axes over which a module shares statistics."""
    return bound(module.axis_name, module.axis_index_groups)


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
        inputs(module, x, features)[0],
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


class LayerNorm(nnx.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over
    ``reduction_axes``. Scale and bias have the shape ``(num_features,)`` and apply along
    ``feature_axes``. A subclass of :class:`flax.nnx.LayerNorm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes along which scale and bias apply; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with
        ``(x, scale, bias)`` and ``dtype``. Flax's rule, the default, is not called: it would round
        ``x`` before its statistics are computed.
      rngs: random number generators for the initializers.
      bias_metadata: metadata of the ``nnx.Param`` that holds the bias; none by default.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.LayerNorm(2, rngs=Rngs(0))(jnp.array([[1.0, 3.0]])).round(3).tolist()
    [[-1.0, 1.0]]
    """

    @known_keywords
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


class RMSNorm(nnx.RMSNorm):
    """Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467).

    ``y = x / sqrt(mean(x**2) + epsilon) * scale``. The mean is taken over ``reduction_axes``. The
    scale has the shape ``(num_features,)`` and applies along ``feature_axes``. A subclass of
    :class:`flax.nnx.RMSNorm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_scale: whether to multiply by a learned scale; True by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes along which the scale applies; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with ``(x, scale)`` and
        ``dtype``. Flax's rule, the default, is not called: it would round ``x`` before its
        statistics are computed.
      rngs: random number generators for the initializers.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.RMSNorm(2, rngs=Rngs(0))(jnp.array([[3.0, -3.0]])).round(3).tolist()
    [[1.0, -1.0]]
    """

    @known_keywords
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalize ``x``.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        return run(over_axes(self, x, mask, centered=False))


class PositionalNorm(nnx.LayerNorm):
    """Positional normalization (Li et al. 2019, arXiv 1907.04312), which also returns the Moments.

    ``y = (x - mean) / sqrt(var + epsilon)``, then times scale with ``use_scale`` and plus bias with
    ``use_bias``. The mean and variance of each position are computed over ``reduction_axes``, the
    channels. Scale and bias apply along ``feature_axes``; by default there are none.

    A call returns ``(y, moments)``. The formula
    ``z * jnp.sqrt(moments.var + epsilon) + moments.mean`` gives the output z of a later layer the
    moments of ``x``: the paper's moment shortcut.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      use_bias: whether to add a learned bias; False by default.
      use_scale: whether to multiply by a learned scale; False by default.
      **options: the other arguments of :class:`LayerNorm`, with the meanings and defaults they have
        there: ``dtype``, ``param_dtype``, ``bias_init``, ``scale_init``, ``reduction_axes``,
        ``feature_axes``, ``axis_name``, ``axis_index_groups``, ``use_fast_variance``,
        ``promote_dtype``, ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> y, moments = nnx.PositionalNorm(2, rngs=Rngs(0))(jnp.array([[1.0, 3.0], [10.0, 30.0]]))
    >>> y.round(3).tolist(), moments.mean.tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]])
    """

    @takes_arguments_of(nnx.LayerNorm.__init__)
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        use_bias: bool = False,
        use_scale: bool = False,
        **options,
    ) -> None:
        super().__init__(
            num_features, epsilon=epsilon, use_bias=use_bias, use_scale=use_scale, **options
        )

    @known_keywords
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


class InstanceNorm(flax_versions.InstanceNorm):
    """Instance normalization (Ulyanov et al. 2016, arXiv 1607.08022).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over all
    axes except the batch axis 0 and ``feature_axes``. Scale and bias have the shape
    ``(num_features,)`` and apply along ``feature_axes``. A subclass of
    :class:`flax.nnx.InstanceNorm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
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
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with
        ``(x, scale, bias)`` and ``dtype``. Flax's rule, the default, is not called: it would round
        ``x`` before its statistics are computed.
      rngs: random number generators for the initializers.
      bias_metadata: metadata of the ``nnx.Param`` that holds the bias; none by default.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> nnx.InstanceNorm(1, rngs=Rngs(0))(x)[..., 0].round(3).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """

    @known_keywords
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


class GroupNorm(nnx.GroupNorm):
    """Group normalization (Wu & He 2018, arXiv 1803.08494).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. The channels are the last axis.
    Neighbouring channels form groups, and each group has its own mean and variance, computed over
    all axes except the batch axis 0, or over ``reduction_axes``. Scale and bias have the shape
    ``(num_features,)``. They apply along the axis in the attribute ``feature_axis``, which is the
    last one unless you set another. A subclass of :class:`flax.nnx.GroupNorm`.

    Args:
      num_features: number of channels.
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
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with
        ``(x, scale, bias)`` and ``dtype``. Flax's rule, the default, is not called: it would round
        ``x`` before its statistics are computed.
      rngs: random number generators for the initializers.
      bias_metadata: metadata of the ``nnx.Param`` that holds the bias; none by default.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.GroupNorm(4, num_groups=2, rngs=Rngs(0))
    >>> norm(jnp.array([[1.0, 3.0, 10.0, 30.0]])).round(3).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    @takes_arguments_of(nnx.GroupNorm.__init__)
    @wraps(nnx.GroupNorm.__init__)
    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        **options,
    ) -> None:
        super().__init__(num_features, group_count(num_groups, group_size, num_features), **options)

    @known_keywords
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize ``x``.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axis, x.ndim, "feature_axis")
        reduction = in_groups(
            x.shape, group_axes(self.reduction_axes, x.ndim), x.ndim - 1, self.num_groups
        )
        return run(over(self, x, reduction, features, mask))


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
      **options: the other arguments of :class:`InstanceNorm`, with the meanings and defaults they
        have there: ``dtype``, ``param_dtype``, ``use_bias``, ``use_scale``, ``bias_init``,
        ``scale_init``, ``feature_axes``, ``axis_name``, ``axis_index_groups``,
        ``use_fast_variance``, ``promote_dtype``, ``bias_metadata``, ``scale_metadata`` and
        ``rngs``.

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
        self.mean_scale = nnx.Param(
            mean_scale_init(options["rngs"].params(), (num_features,), self.param_dtype)
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
        given, _ = inputs(self, x, features)
        sizes, mean_scale = tuple(x.shape[axis] for axis in features), self.mean_scale[...]
        check_features(self, given.x, sizes, mean_scale)
        mean_scale = mean_scale.reshape(sizes)
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
      **options: the other arguments of :class:`InstanceNorm`, with the meanings and defaults they
        have there: ``dtype``, ``param_dtype``, ``bias_init``, ``scale_init``, ``feature_axes``,
        ``axis_name``, ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
        ``bias_metadata``, ``scale_metadata`` and ``rngs``.

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
        given, _ = inputs(self, x, features)
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
