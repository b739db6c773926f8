"""Norms with running statistics: batch norm and switchable norm."""

from collections.abc import Callable, Mapping
from inspect import Signature, signature
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers

from jaxnorm.arguments.axes import canonical_axes, other_axes, unsplit
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.call import run_with_moments
from jaxnorm.core.running import follow
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import flag
from jaxnorm.flax_common.calls import call_of, evaluated, switched
from jaxnorm.flax_common.running import collect
from jaxnorm.nnx.flax_versions import get_value, set_value
from jaxnorm.nnx.layers import across, check_features, inputs

Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


class BatchMoments(nnx.Variable):
    """What a norm has seen of the present batch: there only if :func:`accumulate` asked for it."""


def with_keywords_of(function: Callable, other: Callable) -> Signature:
    """The signature of a function that hands on ``**options`` to another: that of the other, and
    the function's own keywords.
    """
    own = [p for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return Signature([*signature(other).parameters.values(), *own])


def _is_evaluating(module: Any, at_call: bool | None) -> bool:
    for choice in (at_call, module.use_running_average):
        if choice is not None:
            return flag("use_running_average", choice)
    raise ValueError(
        f"use_running_average must be given to the constructor of {type(module).__name__} or to "
        "the call: got None for both. "
        "model.train() and model.eval() set it too."
    )


def _moments(mean: jax.Array, var: jax.Array, sizes: tuple[int, ...] = (-1,)) -> Moments:
    return Moments(jnp.ones((), jnp.float32), mean.reshape(sizes), var.reshape(sizes))


def _update(module: Any, batch: Moments) -> None:
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1), batch)
    mean, var = module.mean[...], module.var[...]
    # a microbatch: see accumulate
    if (variable := getattr(module, "batch_moments", None)) is not None:
        seen = collect(get_value(variable), mean, var, flat)
        set_value(variable, seen)
        mean, var, flat = seen.mean, seen.var, seen.moments
    new = follow(
        mean,
        var,
        flat,
        momentum=module.momentum,
        unbiased=module.unbiased,
        skip_constant=module.skip_constant,
    )
    assign(module, *jax.lax.stop_gradient(new))


def assign(module: Any, mean: jax.Array, var: jax.Array) -> None:
    """New running statistics: the mean of complex numbers has a dtype of its own."""
    for variable, value in ((module.mean, mean), (module.var, var)):
        if value.dtype == variable[...].dtype:
            variable[...] = value
        else:
            set_value(variable, value)


class BatchNorm(nnx.BatchNorm):
    """Batch normalization (Ioffe & Szegedy 2015, arXiv 1502.03167), a :class:`flax.nnx.BatchNorm`.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; mean and variance over all axes but
    ``axis``, the feature axis or axes, along which parameters and running statistics
    ``(num_features,)`` stand, flat if there are several. In training (``.train()``, the default)
    the batch's statistics normalize it and are blended, biased, into ``mean`` and ``var``; after
    ``.eval()`` those normalize. ``momentum`` is the weight of the old value: 0.99 here is 0.01 in
    PyTorch, which also averages the unbiased variance. Without ``dtype`` the output is float32
    whatever ``x`` and the parameters are, since ``mean`` and ``var`` take part in the promotion
    (not before Flax 0.12.1). ``unbiased`` and ``skip_constant`` are those of :func:`jaxnorm.ema`:
    average the unbiased variance, as PyTorch does; leave a feature's running statistics alone where
    its batch has one element, or equal ones.

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
        unbiased: bool = False,
        skip_constant: bool = False,
        **options: Any,
    ) -> None:
        """Takes the arguments of :class:`flax.nnx.BatchNorm`, and two of its own."""
        super().__init__(num_features, **options)
        self.unbiased, self.skip_constant = unbiased, skip_constant

    unbiased = skip_constant = False  # of what was pickled before these were there

    __init__.__signature__ = with_keywords_of(__init__, nnx.BatchNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features = canonical_axes(self.axis, x.ndim, "axis")
        given, (mean, var) = inputs(self, x, features, self.mean[...], self.var[...])
        sizes = tuple(x.shape[axis] for axis in features)
        if _is_evaluating(self, use_running_average):
            return evaluated(self, given, _moments(mean, var, sizes), features, mask)
        reduction = unsplit(given.x.shape, other_axes(features, x.ndim))
        call = call_of(self, given, reduction, features, mask, across(self))
        y, batch = run_with_moments(call)
        _update(self, batch)
        return y


class SwitchableNorm(nnx.Module):
    """Switchable normalization (Luo et al. 2018, arXiv 1806.10779): a learned blend of instance,
    layer and batch statistics.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, the mean blended by
    ``softmax(mean_logits)``, var by ``softmax(var_logits)``. Parameters ``mean_logits`` and
    ``var_logits`` ``(3,)`` in the order instance, layer, batch, all zero at first: equal weights.
    Scale, bias and running statistics as :class:`BatchNorm`.

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
        unbiased: bool = False,
        skip_constant: bool = False,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.num_features, self.use_running_average, self.feature_axes = (
            num_features,
            use_running_average,
            feature_axes,
        )
        self.momentum, self.epsilon, self.dtype, self.param_dtype = (
            momentum,
            epsilon,
            dtype,
            param_dtype,
        )
        self.use_bias, self.use_scale, self.promote_dtype = use_bias, use_scale, promote_dtype
        self.axis_name, self.axis_index_groups = axis_name, axis_index_groups
        self.unbiased, self.skip_constant = unbiased, skip_constant
        self.mean = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((num_features,), jnp.float32))

        def create(init: Initializer, size: int, metadata: Metadata = NO_METADATA) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (size,), param_dtype), **metadata)

        self.scale = (
            create(scale_init, num_features, scale_metadata) if use_scale else nnx.data(None)
        )
        self.bias = create(bias_init, num_features, bias_metadata) if use_bias else nnx.data(None)
        self.mean_logits, self.var_logits = (
            create(initializers.zeros, 3),
            create(initializers.zeros, 3),
        )

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalizes ``x``; elements where ``mask`` is 0 count for nothing and become 0."""
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        given, _ = inputs(self, x, features)
        sizes = tuple(x.shape[axis] for axis in features)
        check_features(self, given.x, sizes, self.mean[...])
        evaluating = _is_evaluating(self, use_running_average)
        y, batch = switched(
            self,
            given,
            (self.mean_logits[...], self.var_logits[...]),
            features,
            mask,
            running=_moments(self.mean[...], self.var[...], sizes) if evaluating else None,
            axis_name=None if evaluating else across(self),
        )
        if not evaluating:
            _update(self, batch)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Used by ``nnx.view``: whether the running statistics are used."""
        if use_running_average is not None:
            self.use_running_average = use_running_average
