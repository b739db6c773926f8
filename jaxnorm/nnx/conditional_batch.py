"""Norms with running statistics whose scale and bias are computed from a condition at the call."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Initializer
from jax.nn import initializers

from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.flax_common import conditional
from jaxnorm.flax_common.calls import Options
from jaxnorm.flax_common.conditional import ImageKind
from jaxnorm.nnx.batch import is_evaluating, update
from jaxnorm.nnx.modulation import Conditional, Modulated, ModulationOptions

__all__ = ["SPADE", "ConditionalBatchNorm"]


class Running(Conditional):
    """A norm that may have running statistics; ``mean`` and ``var`` are None if it has none."""

    use_running_average: bool | None

    def _add_running(
        self,
        use_running_average: bool | None,
        momentum: float,
        unbiased: bool,
        skip_constant: bool,
        *,
        present: bool = True,
    ) -> None:
        self.use_running_average, self.momentum = use_running_average, momentum
        self.unbiased, self.skip_constant = unbiased, skip_constant
        sizes = (self.num_features,)
        self.mean: Any = nnx.BatchStat(jnp.zeros(sizes, jnp.float32)) if present else nnx.data(None)
        self.var: Any = nnx.BatchStat(jnp.ones(sizes, jnp.float32)) if present else nnx.data(None)

    def _over_batch(
        self, x: jax.Array, options: Options, use_running_average: bool | None
    ) -> jax.Array:
        """Normalize over the batch or by the running statistics, which training updates."""
        evaluating = is_evaluating(self, use_running_average)
        running = (self.mean[...], self.var[...])
        y, batch = conditional.batch(self, x, options, running, evaluating=bool(evaluating))
        if batch is not None:
            update(self, batch)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set whether the running statistics are used; ``nnx.view`` calls this method."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


class ConditionalBatchNorm(Running, Modulated):
    """Conditional batch normalization (de Vries et al. 2017, arXiv 1707.00683).

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where scale and bias are the two
    halves, in this order, of ``modulation(condition)``. The layer ``modulation`` is a linear layer
    for vectors. With ``num_classes`` it is a table of embeddings, for labels (Dumoulin et al.
    2016, arXiv 1610.07629; Miyato & Koyama 2018, arXiv 1802.05637). It starts as zeros, so that the
    module starts as a batch norm without parameters. Subtract 1 from the tables of other
    libraries, which hold the gain itself.

    Mean, variance and running statistics are as in :class:`BatchNorm`: of each channel, the last
    axis, over all examples, whatever their conditions are.

    Args:
      num_features: number of channels of ``x``.
      condition_features: size of the vectors of the condition; None, the default, where it is
        labels.
      num_classes: the number of classes, where the condition is labels; None, the default, where it
        is vectors.
      use_running_average: whether the running statistics normalize ``x`` (evaluation) or the
        statistics of the batch do (training); False by default. ``.train()`` and ``.eval()`` set
        it.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the linear layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the linear layer; zeros by default.
      bias_init: initializer of the bias of the linear layer; zeros by default.
      embedding_init: initializer of the table; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.ConditionalBatchNorm(1, num_classes=2, epsilon=0.0, rngs=Rngs(0))
    >>> norm.modulation.embedding[...] = jnp.array([[0.0, 7.0], [2.0, 0.0]])
    >>> norm(jnp.array([[1.0], [3.0]]), jnp.array([0, 1])).tolist()
    [[6.0], [3.0]]
    """

    @known_keywords
    def __init__(
        self,
        num_features: int,
        condition_features: int | None = None,
        *,
        num_classes: int | None = None,
        use_running_average: bool | None = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        kernel_init: Initializer = initializers.zeros,
        embedding_init: Initializer = initializers.zeros,
        unbiased: bool = False,
        skip_constant: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[ModulationOptions],
    ) -> None:
        if (condition_features is None) == (num_classes is None):
            raise ValueError(
                "exactly one of condition_features and num_classes must be given: got "
                f"{condition_features} and {num_classes}. Vectors have features, labels have "
                "classes."
            )
        super().__init__(num_features, condition_features, **options)
        self.num_classes, self.epsilon = num_classes, epsilon
        self._add_running(use_running_average, momentum, unbiased, skip_constant)
        if num_classes is None:
            self.add_modulation(kernel_init, rngs)
        else:
            self.modulation = nnx.Embed(
                num_classes,
                2 * num_features,
                param_dtype=self.param_dtype,
                embedding_init=embedding_init,
                rngs=rngs,
            )

    __init__.__signature__ = with_keywords_of(__init__, Conditional.__init__)  # type: ignore[attr-defined]

    @known_keywords
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
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        shape = jnp.shape(x)
        if self.num_classes is None:
            scale, bias = self.modulate(condition, shape)
        else:
            self.check_features("x", self.num_features, shape)
            labels = conditional.labels(condition, self.num_classes, shape)
            scale, bias = conditional.spread(self.modulation(labels), 2, shape)
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        return self._over_batch(x, options, use_running_average)


class SPADE(Running):
    """Spatially adaptive normalization (Park et al. 2019, arXiv 1903.07291) by a map of labels.

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + gamma) + beta``. Gamma and beta have a value for
    each position and channel: they are two convolutions of ``relu(shared(condition))``, where
    ``shared`` is a convolution too, and the condition is first resized to the positions of ``x``.
    Mean and variance are of each channel, the last axis: of each example for ``norm="instance"``,
    of the batch for ``"batch"``, with running statistics as in :class:`BatchNorm`. The paper's
    generators have the latter, over devices.

    Args:
      num_features: number of channels of ``x``.
      condition_features: number of channels of the map, for example of labels.
      norm: ``"instance"``, the default, or ``"batch"``.
      hidden_features: the number of channels of ``shared``; 128 by default.
      kernel_size: the sizes of the kernels along each axis of positions; (3, 3) by default, for
        images.
      use_running_average: with ``norm="batch"``, whether the running statistics normalize ``x``
        (evaluation) or the statistics of the batch do (training); False by default. ``.train()``
        and ``.eval()`` set it.
      momentum: weight of the old value in the running statistics; 0.99 by default, which is 0.01 in
        PyTorch.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the convolutions and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the three kernels; by default that of ``nnx.Conv``.
      bias_init: initializer of the three biases; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      unbiased: whether to average the unbiased variance ``var * n / (n - 1)``, as PyTorch does;
        False by default.
      skip_constant: whether to keep the running statistics of a feature whose batch has variance 0,
        because it holds one element or equal elements; False by default. See :func:`jaxnorm.ema`.
      rngs: random number generators for the initializers.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x, labels = jnp.ones((2, 8, 8, 3)), jax.nn.one_hot(jnp.zeros((2, 4, 4), int), 5)
    >>> norm = nnx.SPADE(3, 5, rngs=Rngs(0))
    >>> norm(x, labels).shape, norm.gamma.kernel.shape
    ((2, 8, 8, 3), (3, 3, 128, 3))
    """

    @known_keywords
    def __init__(
        self,
        num_features: int,
        condition_features: int,
        *,
        norm: ImageKind = "instance",
        hidden_features: int = 128,
        kernel_size: Sequence[int] = (3, 3),
        use_running_average: bool | None = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        kernel_init: Initializer = default_kernel_init,
        unbiased: bool = False,
        skip_constant: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[ModulationOptions],
    ) -> None:
        conditional.check_kind(norm, ("instance", "batch"))
        super().__init__(num_features, condition_features, **options)
        self.norm, self.epsilon, self.kernel_size = norm, epsilon, tuple(kernel_size)
        self._add_running(
            use_running_average, momentum, unbiased, skip_constant, present=norm == "batch"
        )

        def convolution(inputs: int, outputs: int) -> nnx.Conv:
            return nnx.Conv(
                inputs,
                outputs,
                tuple(kernel_size),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=kernel_init,
                bias_init=self.bias_init,
                rngs=rngs,
            )

        self.shared = convolution(condition_features, hidden_features)
        self.gamma = convolution(hidden_features, num_features)
        self.beta = convolution(hidden_features, num_features)

    __init__.__signature__ = with_keywords_of(__init__, Conditional.__init__)  # type: ignore[attr-defined]

    @known_keywords
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
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0. The map is not masked.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        self.check_features("x", self.num_features, jnp.shape(x))
        assert self.condition_features is not None
        self.check_features("condition", self.condition_features, jnp.shape(condition))
        hidden = nnx.relu(self.shared(conditional.label_map(self, condition, x)))
        gamma, beta = self.gamma(hidden), self.beta(hidden)
        x, options = conditional.options_of(self, x, mask, scale=gamma, bias=beta)
        if self.norm == "instance":
            return conditional.instance(self, x, options)
        return self._over_batch(x, options, use_running_average)
