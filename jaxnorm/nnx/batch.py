"""Norms with running statistics: batch norm and switchable norm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.core.running import follow
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import NO_FLAGS, across, flag
from jaxnorm.flax_common.calls import apply_norm, by_running, over_batch
from jaxnorm.flax_common.running import as_moments, collect
from jaxnorm.nnx.calls import check_features, inputs
from jaxnorm.nnx.flax_versions import get_value, set_value
from jaxnorm.norms.switchable import switchable_norm

Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


class BatchMoments(nnx.Variable):
    """The Moments of the microbatches so far; only :func:`accumulate` makes this variable."""


def is_frozen(module: Any) -> bool:
    """Return whether :func:`jaxnorm.nnx.freeze` has frozen a norm."""
    return getattr(module, "frozen", False)


def is_evaluating(module: Any, at_call: bool | None) -> bool:
    """Return whether running statistics normalize, as the module or its call says."""
    if is_frozen(module):
        return True
    # The call overrides the attribute, as in Flax's nnx. In linen only one of them may
    # be given.
    for choice in (at_call, module.use_running_average):
        if choice is not None:
            return flag("use_running_average", choice, NO_FLAGS)
    raise ValueError(
        f"use_running_average must be given to the constructor of {type(module).__name__} or to "
        "the call: got None for both. "
        "model.train() and model.eval() set it too."
    )


def collected(module: Any, batch: Moments) -> tuple[jax.Array, jax.Array, Moments]:
    """Return the running statistics to start from, and the Moments to blend into them.

    They are the module's and the batch's, unless the batch is a microbatch. Then the old running
    statistics are blended once, with all microbatches so far. A mean that the module does not keep
    is 0.
    """
    var = module.var[...]
    mean = module.mean[...] if hasattr(module, "mean") else jnp.zeros_like(var)
    if (variable := getattr(module, "batch_moments", None)) is None:
        return mean, var, batch
    batch = jax.tree.map(lambda leaf: leaf.reshape(-1), batch)
    seen = collect(get_value(variable), mean, var, batch)
    set_value(variable, seen)
    return seen.mean, seen.var, seen.moments


def seen_by(module: Any) -> Any:
    """Return what :func:`accumulate` collects of a module's batch; None unless it does."""
    variable = getattr(module, "batch_moments", None)
    return None if variable is None else get_value(variable)


def update(module: Any, batch: Moments) -> None:
    """Move a module's running statistics towards the statistics of a batch."""
    mean, var, batch = collected(module, batch)
    new = follow(
        mean,
        var,
        batch,
        momentum=module.momentum,
        unbiased=module.unbiased,
        skip_constant=module.skip_constant,
    )
    # Running statistics are state, so no gradient flows into them.
    assign(module, *jax.lax.stop_gradient(new))


def assign(module: Any, mean: jax.Array, var: jax.Array) -> None:
    """Store new running statistics; a module may keep no mean.

    The mean of complex numbers is complex, so a variable may change its dtype.
    """
    kept = [(module.mean, mean)] if hasattr(module, "mean") else []
    for variable, value in (*kept, (module.var, var)):
        # Assignment by index casts to the dtype of the variable, and drops an imaginary
        # part.
        if value.dtype == variable[...].dtype:
            variable[...] = value
        else:
            set_value(variable, value)


class BatchNorm(nnx.BatchNorm):
    """Batch normalization (Ioffe & Szegedy 2015, arXiv 1502.03167).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over all
    axes except ``axis``. Parameters and running statistics have the shape ``(num_features,)``:
    several feature axes are flattened. A subclass of :class:`flax.nnx.BatchNorm`.

    In training (``.train()``, the default) a batch is normalized by its own statistics. These are
    also blended into the running statistics ``mean`` and ``var``, which normalize after
    ``.eval()``. By default the biased variance is averaged; PyTorch averages the unbiased one.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      use_running_average: whether the running statistics normalize ``x`` (evaluation) or the
        statistics of the batch do (training); False by default. ``.train()`` and ``.eval()`` set
        it.
      axis: the feature axis, or axes, which are not reduced; the last axis by default.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output. By default it is float32, whatever the dtypes of ``x`` and the
        parameters are, because ``mean`` and ``var`` take part in the promotion. Before Flax 0.12.1
        they do not.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with
        ``(x, mean, var, scale, bias)`` and ``dtype``. Flax's rule, the default, is not called: it
        would round ``x`` before its statistics are computed.
      rngs: random number generators for the initializers.
      bias_metadata: metadata of the ``nnx.Param`` that holds the bias; none by default.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

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
        """Take the arguments of :class:`flax.nnx.BatchNorm`, ``unbiased`` and ``skip_constant``."""
        super().__init__(num_features, **options)
        self.unbiased, self.skip_constant = unbiased, skip_constant

    # for modules that were pickled before these attributes existed
    unbiased = skip_constant = False

    # The installed Flax decides which other arguments the constructor takes.
    __init__.__signature__ = with_keywords_of(__init__, nnx.BatchNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize ``x``, and update the running statistics in training.

        Args:
          x: the array to normalize; integers and booleans become floats.
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.axis, x.ndim, "axis")
        # A promotion rule of the user's own sees the running statistics in training
        # too.
        stats = (self.mean[...], self.var[...])
        x, options, (mean, var) = inputs(self, x, features, mask, *stats)
        if is_evaluating(self, use_running_average):
            return by_running(x, features, options, mean, var)
        y, batch = over_batch(self, x, features, options)
        update(self, batch)
        return y


class SwitchableNorm(nnx.Module):
    """Switchable normalization (Luo et al. 2018, arXiv 1806.10779).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. The mean is a learned blend of
    instance, layer and batch mean with the weights ``softmax(mean_logits)``. The variance is
    blended with ``softmax(var_logits)``.

    The parameters ``mean_logits`` and ``var_logits`` have the shape ``(3,)``, in the order
    instance, layer, batch. They start at zero, which means equal weights. Scale, bias and the
    running statistics of the batch are as in :class:`BatchNorm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      use_running_average: whether the running statistics (evaluation) or the statistics of the
        batch (training) enter the blend; False by default. ``.train()`` and ``.eval()`` set it.
      feature_axes: the axes of the features, which batch and instance statistics do not reduce; the
        last axis by default.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of the device axes over which the batch extends; None by default.
        It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.
      promote_dtype: your own promotion rule, called with ``(x, scale, bias)`` and ``dtype``. Flax's
        rule, the default, is not called: it would round ``x`` before its statistics are computed.
      rngs: random number generators for the initializers.
      bias_metadata: metadata of the ``nnx.Param`` that holds the bias; none by default.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.

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

        # Flax's norms too hold the None of an absent parameter as data.
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
        """Normalize ``x``, and update the running statistics in training.

        Args:
          x: the array ``(batch, ..., features)`` to normalize, with an axis between batch and
            features; integers and booleans become floats.
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options, _ = inputs(self, x, features, mask)
        mean, var = self.mean[...], self.var[...]
        sizes = tuple(x.shape[axis] for axis in features)
        check_features(self, x, sizes, mean)
        evaluating = is_evaluating(self, use_running_average)
        y, batch = apply_norm(
            switchable_norm,
            x,
            self.mean_logits[...],
            self.var_logits[...],
            running=as_moments(mean.reshape(sizes), var.reshape(sizes)) if evaluating else None,
            feature_axes=features,
            # Instance and layer statistics stay on their device, and running ones need
            # no axis.
            axis_name=None if evaluating else across(self),
            **options,
        )
        if not evaluating:
            update(self, batch)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set whether the running statistics are used; ``nnx.view`` calls this method."""
        if use_running_average is not None:
            self.use_running_average = use_running_average
