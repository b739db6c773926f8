"""Norms without state: layer, RMS, instance, group, graph and pair norm."""

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
    """Return ``x``, scale and bias of a module, created on first use, and its output's dtype."""
    sizes = tuple(x.shape[axis] for axis in features)

    def create(name: str) -> jax.Array | None:
        if not getattr(module, f"use_{name}", False):
            return None
        return module.param(name, getattr(module, f"{name}_init"), sizes, module.param_dtype)

    scale, bias = create("scale"), create("bias")
    dtype = promoted(module.dtype, x, scale, bias)
    return Inputs(inexact(x, dtype), scale, bias, dtype)


def across(module: Any):
    """The device axes that a module shares statistics over; while it is initialized, as in Flax,
    they need not be bound.
    """
    return bound(module.axis_name, module.axis_index_groups, initializing=module.is_initializing())


def over(
    module: Any, x: jax.Array, reduction: Reduction, features: tuple[int, ...], mask: Param
) -> Call:
    """Prepare the normalization of ``x`` by a module."""
    given = inputs(module, x, features)
    return call_of(module, given, reduction, features, mask, across(module))


def over_axes(module: Any, x: jax.Array, mask: Param, *, centered: bool = True) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes."""
    features, reduced = module_axes(module, x.ndim)
    given = inputs(module, x, features)
    reduction = unsplit(x.shape, reduced)
    return call_of(module, given, reduction, features, mask, across(module), centered=centered)


class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450), a
    :class:`flax.linen.LayerNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance over
    ``reduction_axes``, scale and bias of the shape of ``feature_axes``.

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
        """Normalizes ``x``, or its segments (:func:`jaxnorm.moments`); elements where ``mask`` is 0
        count for nothing and become 0.
        """
        features, reduced = module_axes(self, x.ndim)
        call = call_of(
            self,
            inputs(self, x, features),
            unsplit(x.shape, reduced),
            features,
            mask,
            across(self),
            segments=segments,
            num_segments=num_segments,
        )
        return run(call)


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467), a
    :class:`flax.linen.RMSNorm`.

    ``y = x / sqrt(mean(x**2) + epsilon) * scale``; the mean over ``reduction_axes``, scale of the
    shape of ``feature_axes``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> y, _ = nn.RMSNorm().init_with_output(jax.random.key(0), jnp.array([[3.0, -3.0]]))
    >>> y.round(3).tolist()
    [[1.0, -1.0]]
    """

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        return run(over_axes(self, x, mask, centered=False))


class PositionalNorm(nn.LayerNorm):
    """Positional normalization (Li et al. 2019, arXiv 1907.04312): a layer norm that returns its
    Moments, without parameters unless asked.

    ``y = (x - mean) / sqrt(var + epsilon)``, times scale plus bias with ``use_scale`` and
    ``use_bias``; mean and variance of each position over ``reduction_axes``, the channels, and
    scale and bias of the shape of ``feature_axes``. It returns ``(y, Moments)``: ``z *
    jnp.sqrt(moments.var + epsilon) + moments.mean`` gives a later layer's output z the moments of
    ``x`` (moment shortcut).

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
        """The output, and the Moments of each position; elements where ``mask`` is 0 count for
        nothing and become 0.
        """
        return run_with_moments(over_axes(self, x, mask))


class InstanceNorm(nn.InstanceNorm):
    """Instance normalization (Ulyanov et al. 2016, arXiv 1607.08022), a
    :class:`flax.linen.InstanceNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance over all axes but the
    batch's, 0, and ``feature_axes``, of whose shape scale and bias are.

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
        """Normalizes ``x``, or its segments (:func:`jaxnorm.moments`); elements where ``mask`` is 0
        count for nothing and become 0.
        """
        features, reduced = instance_axes(self.feature_axes, x.ndim, packed=segments is not None)
        call = call_of(
            self,
            inputs(self, x, features),
            unsplit(x.shape, reduced),
            features,
            mask,
            across(self),
            segments=segments,
            num_segments=num_segments,
        )
        return run(call)


class GroupNorm(nn.GroupNorm):
    """Group normalization (Wu & He 2018, arXiv 1803.08494), a :class:`flax.linen.GroupNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance of each group of
    neighbouring channels, the last axis, over all axes but the batch's, 0, or over
    ``reduction_axes``; scale and bias ``(channels,)``. Give ``num_groups`` or, with
    ``num_groups=None``, ``group_size``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
    >>> nn.GroupNorm(num_groups=2).init_with_output(jax.random.key(0), x)[0].round(3).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        groups = group_count(self.num_groups, self.group_size, x.shape[-1])
        reduction = in_groups(x.shape, group_axes(self.reduction_axes, x.ndim), x.ndim - 1, groups)
        return run(over(self, x, reduction, (x.ndim - 1,), mask))


class GraphNorm(nn.InstanceNorm):
    """Graph normalization (Cai et al. 2020, arXiv 2009.03294) of the nodes of each segment: see
    :func:`jaxnorm.graph_norm`.

    ``d = x - mean_scale * mean``, ``y = d / sqrt(mean(d**2) + epsilon) * scale + bias``; scale,
    bias and mean_scale of the shape of ``feature_axes``.

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
        """Normalizes the nodes of each segment; elements where ``mask`` is 0 count for nothing and
        become 0.
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
    """Pair normalization (Zhao & Akoglu 2019, arXiv 1909.12223) of the nodes of each segment: see
    :func:`jaxnorm.pair_norm`.

    ``d = x - mean``, ``y = length * d / sqrt(mean(|d|**2) + epsilon)``, times scale plus bias with
    ``use_scale`` and ``use_bias``.

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
        """Normalizes the nodes of each segment; elements where ``mask`` is 0 count for nothing and
        become 0.
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
