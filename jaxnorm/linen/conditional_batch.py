"""Norms with running statistics whose scale and bias are computed from a condition at the call."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.flax_common import conditional
from jaxnorm.flax_common.calls import Options
from jaxnorm.flax_common.conditional import ImageKind
from jaxnorm.linen.batch import evaluates, update
from jaxnorm.linen.conditional import modulation

__all__ = ["SPADE", "ConditionalBatchNorm"]


def _over_batch(
    module: Any, x: jax.Array, options: Options, use_running_average: bool | None
) -> jax.Array:
    """Normalize over the batch or by the running statistics, which training updates."""
    evaluating = evaluates(module, use_running_average)
    sizes = x.shape[-1:]
    mean = module.variable("batch_stats", "mean", jnp.zeros, sizes, jnp.float32)
    var = module.variable("batch_stats", "var", jnp.ones, sizes, jnp.float32)
    y, batch = conditional.batch(
        module, x, options, (mean.value, var.value), evaluating=bool(evaluating)
    )
    if batch is not None:
        update(module, mean, var, batch)
    return y


class ConditionalBatchNorm(nn.Module):
    """Conditional batch normalization (de Vries et al. 2017, arXiv 1707.00683).

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where scale and bias are the two
    halves, in this order, of ``modulation(condition)``. The layer ``modulation`` is a dense layer
    for vectors. With ``num_classes`` it is a table of embeddings, for labels (Dumoulin et al.
    2016, arXiv 1610.07629; Miyato & Koyama 2018, arXiv 1802.05637). It starts as zeros, so that the
    module starts as a batch norm without parameters. Subtract 1 from the tables of other
    libraries, which hold the gain itself.

    Mean, variance and running statistics are as in :class:`BatchNorm`: of each channel, the last
    axis, over all examples, whatever their conditions are.

    Attributes:
      use_running_average: whether the running statistics normalize ``x`` (evaluation) or the
        statistics of the batch do (training). None, the default, leaves the choice to the call.
      num_classes: the number of classes, where the condition is labels; None, the default, where it
        is vectors.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the dense layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the dense layer; zeros by default.
      bias_init: initializer of the bias of the dense layer; zeros by default.
      embedding_init: initializer of the table; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.ConditionalBatchNorm(use_running_average=False, num_classes=2, epsilon=0.0)
    >>> params = {"modulation": {"embedding": jnp.array([[0.0, 7.0], [2.0, 0.0]])}}
    >>> stats = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
    >>> x, labels = jnp.array([[1.0], [3.0]]), jnp.array([0, 1])
    >>> variables = {"params": params, "batch_stats": stats}
    >>> norm.apply(variables, x, labels, mutable=["batch_stats"])[0].tolist()
    [[6.0], [3.0]]
    """

    use_running_average: bool | None = None
    num_classes: int | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = initializers.zeros
    bias_init: Initializer = initializers.zeros
    embedding_init: Initializer = initializers.zeros
    axis_name: str | None = None
    axis_index_groups: Any = None
    unbiased: bool = False
    skip_constant: bool = False
    activation = None

    @known_keywords
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        condition: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize ``x``, scale and shift it, and update the running statistics in training.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize; integers and booleans become floats.
          condition: labels ``(batch,)``, or vectors ``(batch, k)``; they may have further leading
            axes of ``x``, or 1.
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        scale, bias = self._parameters(condition, jnp.shape(x))
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        return _over_batch(self, x, options, use_running_average)

    def _parameters(self, condition: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
        """Return scale and bias of x of a shape."""
        if self.num_classes is None:
            return modulation(self, condition, shape, 2)
        labels = conditional.labels(condition, self.num_classes, shape)
        table = nn.Embed(
            self.num_classes,
            2 * shape[-1],
            param_dtype=self.param_dtype,
            embedding_init=self.embedding_init,
            name="modulation",
        )
        return conditional.spread(table(labels), 2, shape)


class SPADE(nn.Module):
    """Spatially adaptive normalization (Park et al. 2019, arXiv 1903.07291) by a map of labels.

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + gamma) + beta``. Gamma and beta have a value for
    each position and channel: they are two convolutions of ``relu(shared(condition))``, where
    ``shared`` is a convolution too, and the condition is first resized to the positions of ``x``.
    Mean and variance are of each channel, the last axis: of each example for ``norm="instance"``,
    of the batch for ``"batch"``, with running statistics as in :class:`BatchNorm`. The paper's
    generators have the latter, over devices.

    Attributes:
      use_running_average: with ``norm="batch"``, whether the running statistics normalize ``x``
        (evaluation) or the statistics of the batch do (training). None, the default, leaves the
        choice to the call.
      norm: ``"instance"``, the default, or ``"batch"``.
      hidden_features: the number of channels of ``shared``; 128 by default.
      kernel_size: the sizes of the kernels along each axis of positions; (3, 3) by default, for
        images.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the convolutions and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the three kernels; by default that of ``nn.Conv``.
      bias_init: initializer of the three biases; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x, labels = jnp.ones((2, 8, 8, 3)), jax.nn.one_hot(jnp.zeros((2, 4, 4), int), 5)
    >>> y, variables = nn.SPADE().init_with_output(jax.random.key(0), x, labels)
    >>> y.shape, variables["params"]["gamma"]["kernel"].shape
    ((2, 8, 8, 3), (3, 3, 128, 3))
    """

    use_running_average: bool | None = None
    norm: ImageKind = "instance"
    hidden_features: int = 128
    kernel_size: Sequence[int] = (3, 3)
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = initializers.zeros
    axis_name: str | None = None
    axis_index_groups: Any = None
    unbiased: bool = False
    skip_constant: bool = False

    @known_keywords
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        condition: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize ``x``, and scale and shift each position by the map.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize, for example images; integers and
            booleans become floats.
          condition: the map ``(batch, ..., labels)``, for example one-hot labels, with positions of
            its own. Each position of ``x`` takes the nearest one, by PyTorch's rule.
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0. The map is not masked.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        conditional.check_kind(self.norm, ("instance", "batch"))
        condition = conditional.label_map(self, condition, x)

        def convolution(features: int, name: str) -> nn.Conv:
            return nn.Conv(
                features,
                tuple(self.kernel_size),
                dtype=condition.dtype,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name=name,
            )

        hidden = nn.relu(convolution(self.hidden_features, "shared")(condition))
        gamma, beta = (convolution(x.shape[-1], name)(hidden) for name in ("gamma", "beta"))
        x, options = conditional.options_of(self, x, mask, scale=gamma, bias=beta)
        if self.norm == "instance":
            return conditional.instance(self, x, options)
        return _over_batch(self, x, options, use_running_average)
