"""Norms without state: layer, RMS, instance and group norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Axes, Dtype, Initializer
from jax.nn import initializers

from jaxnorm.axes import canonical_axes, in_groups, unsplit
from jaxnorm.features import group_axes, group_count, inexact, instance_axes, promoted
from jaxnorm.norms import norm_over
from jaxnorm.sets import bound


def operands(module: nn.Module, x: jax.Array, features: tuple[int, ...]) -> tuple[jax.Array, dict[str, Any]]:
    """``x``, and for a function call scale and bias of a module, created on first use, and the dtype of its output."""
    sizes = tuple(x.shape[axis] for axis in features)
    params = {}
    for name in ("scale", "bias"):
        used = getattr(module, f"use_{name}", False)
        params[name] = module.param(name, getattr(module, f"{name}_init"), sizes, module.param_dtype) if used else None
    dtype = promoted(module.dtype, x, *params.values())
    return inexact(x, dtype), {**params, "dtype": dtype}


def across(module: nn.Module):
    """The device axes that a module shares statistics over; while it is initialized, as in Flax, they need not be bound."""
    return bound(module.axis_name, module.axis_index_groups, initializing=module.is_initializing())


class LayerNorm(nn.Module):
    """Layer normalization (Ba, Kiros & Hinton 2016), as :class:`flax.linen.LayerNorm`.

    Statistics over ``reduction_axes``; scale and bias of the shape of ``feature_axes``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> y, variables = nn.LayerNorm().init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))
    >>> y.round(3).tolist(), sorted(variables["params"])
    ([[-1.0, 1.0]], ['bias', 'scale'])
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        return over_axes(self, x, mask, centered=True)


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang & Sennrich 2019), as :class:`flax.linen.RMSNorm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> nn.RMSNorm().init_with_output(jax.random.key(0), jnp.array([[3.0, -3.0]]))[0].round(3).tolist()
    [[1.0, -1.0]]
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        return over_axes(self, x, mask, centered=False)


def over_axes(module: nn.Module, x: jax.Array, mask, *, centered: bool) -> jax.Array:
    features = canonical_axes(module.feature_axes, x.ndim, "feature_axes")
    x, params = operands(module, x, features)
    options = {"epsilon": module.epsilon, "where": mask, "centered": centered, **params}
    pooled = canonical_axes(module.reduction_axes, x.ndim, "reduction_axes")
    return norm_over(x, unsplit(x.shape, pooled), features, axis_name=across(module), **options)


class InstanceNorm(nn.Module):
    """Instance normalization (Ulyanov et al. 2016), as :class:`flax.linen.InstanceNorm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> nn.InstanceNorm().init_with_output(jax.random.key(0), x)[0][..., 0].round(3).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features, pooled = instance_axes(self.feature_axes, x.ndim)
        axis_name = across(self)
        x, params = operands(self, x, features)
        return norm_over(x, unsplit(x.shape, pooled), features, epsilon=self.epsilon, where=mask, axis_name=axis_name, **params)


class GroupNorm(nn.Module):
    """Group normalization (Wu & He 2018), as :class:`flax.linen.GroupNorm`.

    Give ``num_groups`` or, with ``num_groups=None``, ``group_size``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
    >>> nn.GroupNorm(num_groups=2).init_with_output(jax.random.key(0), x)[0].round(3).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    num_groups: int | None = 32
    group_size: int | None = None
    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes | None = None
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        groups = group_count(self.num_groups, self.group_size, x.shape[-1])
        pooling = in_groups(x.shape, group_axes(self.reduction_axes, x.ndim), x.ndim - 1, groups)
        axis_name = across(self)
        x, params = operands(self, x, (x.ndim - 1,))
        return norm_over(x, pooling, (x.ndim - 1,), epsilon=self.epsilon, where=mask, axis_name=axis_name, **params)
