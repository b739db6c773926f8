"""Norms with running statistics: batch norm and switchable norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers

from jaxnorm.axes import canonical_axes, other_axes, unsplit
from jaxnorm.nnx.layers import NO_METADATA, Affine, Metadata
from jaxnorm.norms import norm_over_with_moments, with_running
from jaxnorm.statistics import Moments, ema
from jaxnorm.switchable import switchable_norm


class _Running(Affine):
    """A norm with running statistics ``mean`` and ``var``."""

    momentum: float
    use_running_average: bool | None
    axis: Axes
    mean_logits: nnx.Param
    var_logits: nnx.Param

    def _create_running(self, num_features: int) -> None:
        self.mean = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((num_features,), jnp.float32))

    def _evaluating(self, at_call: bool | None) -> bool:
        for choice in (at_call, self.use_running_average):
            if choice is not None:
                return choice
        raise ValueError(
            f"use_running_average must be given to the constructor of {type(self).__name__} or to the call: got None for both. "
            "model.train() and model.eval() set it too."
        )

    def _update(self, batch: Moments) -> None:
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1), batch)
        new = ema(_moments(self.mean[...], self.var[...]), flat, momentum=self.momentum)
        self.mean[...], self.var[...] = jax.lax.stop_gradient((new.mean, new.var))

    def set_view(self, use_running_average: bool | None = None):
        """Used by ``nnx.view``: whether the running statistics are used."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


def _moments(mean: jax.Array, var: jax.Array, sizes: tuple[int, ...] = (-1,)) -> Moments:
    return Moments(jnp.ones((), jnp.float32), mean.reshape(sizes), var.reshape(sizes))


class BatchNorm(_Running):
    """Batch normalization (Ioffe & Szegedy 2015), as :class:`flax.nnx.BatchNorm`.

    In training (``.train()``, the default) the batch's statistics normalize it and are blended, biased, into ``mean``
    and ``var``; after ``.eval()`` those normalize. ``momentum`` is the weight of the old value: 0.99 here is 0.01 in
    PyTorch, which also averages the unbiased variance. Several feature axes have flat parameters of ``num_features``.
    Without ``dtype`` the output is float32 whatever ``x`` and the parameters are: ``mean`` and ``var`` have a say too.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.BatchNorm(1, momentum=0.5, rngs=Rngs(0))
    >>> y = norm(jnp.array([[1.0], [3.0]]))
    >>> y.round(3).tolist(), norm.mean[...].tolist()
    ([[-1.0], [1.0]], [1.0])
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: Axes = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        self._configure(num_features=num_features, use_running_average=use_running_average, axis=axis)
        self._configure(momentum=momentum, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype)
        self._configure(use_bias=use_bias, use_scale=use_scale, axis_name=axis_name, axis_index_groups=axis_index_groups)
        self._configure(use_fast_variance=use_fast_variance, promote_dtype=promote_dtype)
        self._create_running(num_features)
        use = {"scale": (use_scale, scale_init, scale_metadata), "bias": (use_bias, bias_init, bias_metadata)}
        self._create(num_features, rngs, use)

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features = canonical_axes(self.axis, x.ndim, "axis")
        (x, mean, var), params = self._operands(x, features, self.mean[...], self.var[...])
        if self._evaluating(use_running_average):
            running = _moments(mean, var, tuple(x.shape[axis] for axis in features))
            return with_running(x, running, features, epsilon=self.epsilon, where=mask, **params)
        pooling = unsplit(x.shape, other_axes(features, x.ndim))
        y, batch = norm_over_with_moments(x, pooling, features, epsilon=self.epsilon, where=mask, axis_name=self._across(), **params)
        self._update(batch)
        return y


class SwitchableNorm(_Running):
    """Switchable normalization (Luo et al. 2018): a learned blend of instance, layer and batch statistics.

    Parameters ``mean_logits`` and ``var_logits`` ``(3,)`` in the order instance, layer, batch, all zero at first: equal
    weights. Scale, bias and running statistics as :class:`BatchNorm`.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.SwitchableNorm(3, rngs=Rngs(0))
    >>> norm(jnp.ones((2, 4, 4, 3))).shape, norm.mean_logits[...].tolist()
    ((2, 4, 4, 3), [0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        feature_axes: Axes = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        self._configure(num_features=num_features, use_running_average=use_running_average, feature_axes=feature_axes)
        self._configure(momentum=momentum, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype)
        self._configure(use_bias=use_bias, use_scale=use_scale, promote_dtype=promote_dtype)
        self._configure(axis_name=axis_name, axis_index_groups=axis_index_groups)
        self._create_running(num_features)
        use = {"scale": (use_scale, scale_init, scale_metadata), "bias": (use_bias, bias_init, bias_metadata)}
        self._create(num_features, rngs, use)
        self._create(3, rngs, {name: (True, initializers.zeros, {}) for name in ("mean_logits", "var_logits")})

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        (x,), params = self._operands(x, features)
        logits = self.mean_logits[...], self.var_logits[...]
        options = {"feature_axes": features, "epsilon": self.epsilon, "where": mask, **params}
        if self._evaluating(use_running_average):
            running = _moments(self.mean[...], self.var[...], tuple(x.shape[axis] for axis in features))
            return switchable_norm(x, *logits, running=running, **options)[0]
        y, batch = switchable_norm(x, *logits, axis_name=self._across(), **options)
        self._update(batch)
        return y
