"""EvoNorm, norm and activation in one: the layers S0 and B0."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.flax_common.arguments import across, group_count
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.flax_common.running import as_moments
from jaxnorm.nnx import flax_versions
from jaxnorm.nnx.batch import is_evaluating, update
from jaxnorm.nnx.calls import check_features, inputs
from jaxnorm.norms.evonorm import evonorm_b0, evonorm_s0

__all__ = ["EvoNormB0", "EvoNormS0"]


# Flax has no EvoNorm. The constructor of its InstanceNorm makes scale and bias.
class EvoNormS0(flax_versions.InstanceNorm):
    """EvoNorm-S0 (Liu et al. 2020, arXiv 2004.02967): swish over the deviation of a group.

    ``y = x * sigmoid(v * x) / sqrt(var + epsilon) * scale + bias``, with the variance of group
    norm. The parameters v, scale and bias have the shape ``(num_features,)`` and apply along
    ``feature_axes``. No activation follows the layer. See also :func:`jaxnorm.evonorm_s0`.

    Args:
      num_features: number of channels.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      num_groups: number of groups of neighbouring channels; 32 by default. With None,
        ``group_size`` says how many.
      group_size: number of channels of each group, in place of ``num_groups``; None by default.
      v_init: initializer of v; ones by default.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``scale_init``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.EvoNormS0(4, num_groups=2, rngs=Rngs(0))
    >>> norm(jnp.array([[10.0, 30.0, 100.0, 300.0]])).round().tolist()
    [[1.0, 3.0, 1.0, 3.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        num_groups: int | None = 32,
        group_size: int | None = None,
        v_init: Initializer = initializers.ones,
        **options,
    ):
        super().__init__(num_features, epsilon=epsilon, **options)
        self.num_groups = group_count(num_groups, group_size, num_features)
        # Drawn last, so that scale and bias equal InstanceNorm's for the same rngs.
        self.v = nnx.Param(v_init(options["rngs"].params(), (num_features,), self.param_dtype))

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize and activate ``x``.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The output, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options, _ = inputs(self, x, features, mask)
        sizes, v = tuple(x.shape[axis] for axis in features), self.v[...]
        check_features(self, x, sizes, v)
        return apply_norm(
            evonorm_s0,
            x,
            v.reshape(sizes),
            self.num_groups,
            feature_axes=features,
            axis_name=across(self),
            **options,
        )


class EvoNormB0(flax_versions.InstanceNorm):
    """EvoNorm-B0 (Liu et al. 2020, arXiv 2004.02967): over the deviation of batch or instance.

    ``y = x / maximum(sqrt(batch_var + epsilon), v * x + sqrt(var + epsilon)) * scale + bias``. The
    variance ``var`` is that of each channel of each example. The parameters v, scale and bias have
    the shape ``(num_features,)`` and apply along ``feature_axes``. No activation follows the layer.
    See also :func:`jaxnorm.evonorm_b0`.

    In training (``.train()``, the default) ``batch_var`` is the variance of the batch. It is
    blended into the running variance ``var``, which takes its place after ``.eval()``.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to both variances, inside the roots; 1e-5 by default.
      use_running_average: whether the running variance (evaluation) or that of the batch (training)
        is used; False by default. ``.train()`` and ``.eval()`` set it.
      momentum: weight of the old value in the running variance; 0.99 by default, which is 0.01 in
        PyTorch.
      v_init: initializer of v; ones by default.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch Image
        Models do; False by default.
      skip_constant: whether to keep the running variance of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``scale_init``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.EvoNormB0(1, momentum=0.5, epsilon=0.0, rngs=Rngs(0))
    >>> y = norm(jnp.array([[[2.0], [6.0]]]))  # 2 / (2 + 2), 6 / (6 + 2)
    >>> y[..., 0].tolist(), norm.var[...].tolist()
    ([[0.5, 0.75]], [2.5])
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        use_running_average: bool | None = False,
        momentum: float = 0.99,
        v_init: Initializer = initializers.ones,
        unbiased: bool = False,
        skip_constant: bool = False,
        **options,
    ):
        super().__init__(num_features, epsilon=epsilon, **options)
        self.use_running_average, self.momentum = use_running_average, momentum
        self.unbiased, self.skip_constant = unbiased, skip_constant
        self.var = nnx.BatchStat(jnp.ones((num_features,), jnp.float32))
        # Drawn last, so that scale and bias equal InstanceNorm's for the same rngs.
        self.v = nnx.Param(v_init(options["rngs"].params(), (num_features,), self.param_dtype))

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize and activate ``x``, and update the running variance in training.

        Args:
          x: the array ``(batch, ..., features)`` to normalize, with an axis between batch and
            features; integers and booleans become floats.
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The output, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options, _ = inputs(self, x, features, mask)
        sizes, v, var = tuple(x.shape[axis] for axis in features), self.v[...], self.var[...]
        check_features(self, x, sizes, v, var)
        evaluating, var = is_evaluating(self, use_running_average), var.reshape(sizes)
        y, batch = apply_norm(
            evonorm_b0,
            x,
            v.reshape(sizes),
            running=as_moments(jnp.zeros_like(var), var) if evaluating else None,
            feature_axes=features,
            axis_name=None if evaluating else across(self),
            **options,
        )
        if not evaluating:
            update(self, batch)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set whether the running variance is used; ``nnx.view`` calls this method."""
        if use_running_average is not None:
            self.use_running_average = use_running_average
