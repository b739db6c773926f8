"""Norms without state: layer, RMS, instance, group, graph and pair norm."""

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
    """Return what is normalized, and the running statistics, promoted with it."""
    params = (module.scale, module.bias) if hasattr(module, "bias") else (module.scale,)
    arrays: tuple[Any, ...] = (x, *stats, *(None if p is None else p[...] for p in params))
    if own_rule := flax_versions.promotion(module):  # Flax's would round x before its statistics
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
    """Raises unless parameters and statistics are of as many features as x has."""
    for size in {array.size for array in arrays if array is not None} - {math.prod(sizes)}:
        name = type(module).__name__
        raise ValueError(
            f"x must have the features that {name} was made for, {size}: got {sizes} of an x of "
            f"shape {x.shape}."
        )


def across(module: Any):
    """The device axes that a module shares statistics over."""
    return bound(module.axis_name, module.axis_index_groups)


def over(
    module: Any, x: jax.Array, reduction: Reduction, features: tuple[int, ...], mask: Param
) -> Call:
    """Prepare the normalization of ``x`` by a module."""
    given = inputs(module, x, features)[0]
    return call_of(module, given, reduction, features, mask, across(module))


def over_axes(module: Any, x: jax.Array, mask: Param, *, centered: bool = True) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes."""
    features, reduced = module_axes(module, x.ndim)
    given = inputs(module, x, features)[0]
    reduction = unsplit(x.shape, reduced)
    return call_of(module, given, reduction, features, mask, across(module), centered=centered)


class LayerNorm(nnx.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450), a
    :class:`flax.nnx.LayerNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance over
    ``reduction_axes``, scale and bias ``(num_features,)`` along ``feature_axes``.

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
        """Normalizes ``x``, or its segments (:func:`jaxnorm.moments`); elements where ``mask`` is 0
        count for nothing and become 0.
        """
        features, reduced = module_axes(self, x.ndim)
        call = call_of(
            self,
            inputs(self, x, features)[0],
            unsplit(x.shape, reduced),
            features,
            mask,
            across(self),
            segments=segments,
            num_segments=num_segments,
        )
        return run(call)


class RMSNorm(nnx.RMSNorm):
    """Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467), a
    :class:`flax.nnx.RMSNorm`.

    ``y = x / sqrt(mean(x**2) + epsilon) * scale``; the mean over ``reduction_axes``, scale
    ``(num_features,)`` along ``feature_axes``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.RMSNorm(2, rngs=Rngs(0))(jnp.array([[3.0, -3.0]])).round(3).tolist()
    [[1.0, -1.0]]
    """

    @known_keywords
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        return run(over_axes(self, x, mask, centered=False))


class PositionalNorm(nnx.LayerNorm):
    """Positional normalization (Li et al. 2019, arXiv 1907.04312): a layer norm that returns its
    Moments, without parameters unless asked.

    ``y = (x - mean) / sqrt(var + epsilon)``, times scale plus bias with ``use_scale`` and
    ``use_bias``; mean and variance of each position over ``reduction_axes``, the channels, and
    scale and bias along ``feature_axes``. It returns ``(y, Moments)``: ``z * jnp.sqrt(moments.var +
    epsilon) + moments.mean`` gives a later layer's output z the moments of ``x`` (moment shortcut).

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
        """The output, and the Moments of each position; elements where ``mask`` is 0 count for
        nothing and become 0.
        """
        return run_with_moments(over_axes(self, x, mask))


class InstanceNorm(flax_versions.InstanceNorm):
    """Instance normalization (Ulyanov et al. 2016, arXiv 1607.08022), a
    :class:`flax.nnx.InstanceNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance over all axes but the
    batch's, 0, and ``feature_axes``, along which scale and bias ``(num_features,)`` stand.

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
        """Normalizes ``x``, or its segments (:func:`jaxnorm.moments`); elements where ``mask`` is 0
        count for nothing and become 0.
        """
        features, reduced = instance_axes(self.feature_axes, x.ndim, packed=segments is not None)
        call = call_of(
            self,
            inputs(self, x, features)[0],
            unsplit(x.shape, reduced),
            features,
            mask,
            across(self),
            segments=segments,
            num_segments=num_segments,
        )
        return run(call)


class GroupNorm(nnx.GroupNorm):
    """Group normalization (Wu & He 2018, arXiv 1803.08494), a :class:`flax.nnx.GroupNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance of each group of
    neighbouring channels, the last axis, over all axes but the batch's, 0, or over
    ``reduction_axes``. Give ``num_groups`` or, with ``num_groups=None``, ``group_size``. Scale and
    bias ``(num_features,)`` stand along the axis that the attribute ``feature_axis`` names, the
    last one too unless it is set to another.

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
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features = canonical_axes(self.feature_axis, x.ndim, "feature_axis")
        reduction = in_groups(
            x.shape, group_axes(self.reduction_axes, x.ndim), x.ndim - 1, self.num_groups
        )
        return run(over(self, x, reduction, features, mask))


class GraphNorm(flax_versions.InstanceNorm):
    """Graph normalization (Cai et al. 2020, arXiv 2009.03294) of the nodes of each segment: see
    :func:`jaxnorm.graph_norm`.

    ``d = x - mean_scale * mean``, ``y = d / sqrt(mean(d**2) + epsilon) * scale + bias``; scale,
    bias and mean_scale ``(num_features,)`` along ``feature_axes``.

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
        """Normalizes the nodes of each segment; elements where ``mask`` is 0 count for nothing and
        become 0.
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
    """Pair normalization (Zhao & Akoglu 2019, arXiv 1909.12223) of the nodes of each segment: see
    :func:`jaxnorm.pair_norm`.

    ``d = x - mean``, ``y = length * d / sqrt(mean(|d|**2) + epsilon)``, times scale plus bias with
    ``use_scale`` and ``use_bias``.

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
        """Normalizes the nodes of each segment; elements where ``mask`` is 0 count for nothing and
        become 0.
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
