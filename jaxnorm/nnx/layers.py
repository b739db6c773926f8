"""Norms without state: layer, RMS, instance and group norm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers

from jaxnorm.axes import canonical_axes, in_groups, unsplit
from jaxnorm.features import group_axes, group_count, inexact, instance_axes, promoted
from jaxnorm.norms import norm_over
from jaxnorm.sets import bound

Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


class Affine(nnx.Module):
    """What all norms hold: scale, bias, and the dtype of the output."""

    scale: nnx.Param | None
    bias: nnx.Param | None
    num_features: int
    epsilon: float
    dtype: Dtype | None
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    feature_axes: Axes
    reduction_axes: Any
    axis_name: Any
    axis_index_groups: Any

    def _create(self, num_features: int, rngs: nnx.Rngs, use: Mapping[str, tuple[bool, Initializer, Metadata]]) -> None:
        for name, (used, init, metadata) in use.items():
            value = nnx.Param(init(rngs.params(), (num_features,), self.param_dtype), **metadata) if used else nnx.data(None)
            setattr(self, name, value)

    def _configure(self, **options) -> None:
        for name, value in options.items():
            setattr(self, name, value)

    def _operands(self, x: jax.Array, features: tuple[int, ...], *stats: jax.Array) -> tuple[list[jax.Array], dict[str, Any]]:
        """``x`` and the running statistics; scale, bias and the dtype, which all of these have a say in, for a function call."""
        arrays: tuple[Any, ...] = (x, *stats, *(None if p is None else p[...] for p in (self.scale, getattr(self, "bias", None))))
        if self.promote_dtype is not dtypes.promote_dtype:  # the user's own rule; Flax's would round x before its statistics
            arrays = self.promote_dtype(arrays, dtype=self.dtype)
        x, *running, scale, bias = arrays
        dtype, sizes = promoted(self.dtype, *arrays), tuple(x.shape[axis] for axis in features)
        scale, bias = (None if p is None else p.reshape(sizes) for p in (scale, bias))
        return [inexact(x, dtype), *running], {"scale": scale, "bias": bias, "dtype": dtype}

    def _across(self):
        return bound(self.axis_name, self.axis_index_groups)

    def _over_axes(self, x: jax.Array, mask, *, centered: bool) -> jax.Array:
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        (x,), params = self._operands(x, features)
        options = {"epsilon": self.epsilon, "where": mask, "centered": centered, **params}
        pooled = canonical_axes(self.reduction_axes, x.ndim, "reduction_axes")
        return norm_over(x, unsplit(x.shape, pooled), features, axis_name=self._across(), **options)


class LayerNorm(Affine):
    """Layer normalization (Ba, Kiros & Hinton 2016), as :class:`flax.nnx.LayerNorm`.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.LayerNorm(2, rngs=Rngs(0))(jnp.array([[1.0, 3.0]])).round(3).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        self._configure(num_features=num_features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype)
        self._configure(use_bias=use_bias, use_scale=use_scale, reduction_axes=reduction_axes, feature_axes=feature_axes)
        self._configure(axis_name=axis_name, axis_index_groups=axis_index_groups)
        self._configure(use_fast_variance=use_fast_variance, promote_dtype=promote_dtype)
        use = {"scale": (use_scale, scale_init, scale_metadata), "bias": (use_bias, bias_init, bias_metadata)}
        self._create(num_features, rngs, use)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        return self._over_axes(x, mask, centered=True)


class RMSNorm(Affine):
    """Root mean square normalization (Zhang & Sennrich 2019), as :class:`flax.nnx.RMSNorm`.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.RMSNorm(2, rngs=Rngs(0))(jnp.array([[3.0, -3.0]])).round(3).tolist()
    [[1.0, -1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        scale_metadata: Metadata = NO_METADATA,
    ):
        self._configure(num_features=num_features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype)
        self._configure(use_scale=use_scale, reduction_axes=reduction_axes, feature_axes=feature_axes)
        self._configure(axis_name=axis_name, axis_index_groups=axis_index_groups)
        self._configure(use_fast_variance=use_fast_variance, promote_dtype=promote_dtype)
        self._create(num_features, rngs, {"scale": (use_scale, scale_init, scale_metadata)})

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        return self._over_axes(x, mask, centered=False)


class InstanceNorm(Affine):
    """Instance normalization (Ulyanov et al. 2016), as :class:`flax.nnx.InstanceNorm`.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> nnx.InstanceNorm(1, rngs=Rngs(0))(x)[..., 0].round(3).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        self._configure(num_features=num_features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype)
        self._configure(use_bias=use_bias, use_scale=use_scale, feature_axes=feature_axes)
        self._configure(axis_name=axis_name, axis_index_groups=axis_index_groups)
        self._configure(use_fast_variance=use_fast_variance, promote_dtype=promote_dtype)
        use = {"scale": (use_scale, scale_init, scale_metadata), "bias": (use_bias, bias_init, bias_metadata)}
        self._create(num_features, rngs, use)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features, pooled = instance_axes(self.feature_axes, x.ndim)
        (x,), params = self._operands(x, features)
        return norm_over(x, unsplit(x.shape, pooled), features, epsilon=self.epsilon, where=mask, axis_name=self._across(), **params)


class GroupNorm(Affine):
    """Group normalization (Wu & He 2018), as :class:`flax.nnx.GroupNorm`.

    Give ``num_groups`` or, with ``num_groups=None``, ``group_size``. The groups are of the last axis; scale and bias stand
    along the axis that the attribute ``feature_axis`` names, the last one too unless it is set to another.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.GroupNorm(4, num_groups=2, rngs=Rngs(0))(jnp.array([[1.0, 3.0, 10.0, 30.0]])).round(3).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        self.feature_axis = -1
        groups = group_count(num_groups, group_size, num_features)
        self.num_groups: int
        self._configure(num_features=num_features, num_groups=groups, group_size=num_features // groups, epsilon=epsilon)
        self._configure(dtype=dtype, param_dtype=param_dtype, use_bias=use_bias, use_scale=use_scale)
        self._configure(reduction_axes=reduction_axes, axis_name=axis_name, axis_index_groups=axis_index_groups)
        self._configure(use_fast_variance=use_fast_variance, promote_dtype=promote_dtype)
        use = {"scale": (use_scale, scale_init, scale_metadata), "bias": (use_bias, bias_init, bias_metadata)}
        self._create(num_features, rngs, use)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features = canonical_axes(self.feature_axis, x.ndim, "feature_axis")
        (x,), params = self._operands(x, features)
        pooling = in_groups(x.shape, group_axes(self.reduction_axes, x.ndim), x.ndim - 1, self.num_groups)
        return norm_over(x, pooling, features, epsilon=self.epsilon, where=mask, axis_name=self._across(), **params)
