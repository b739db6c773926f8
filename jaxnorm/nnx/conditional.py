"""Norms whose scale and bias are computed from a condition, such as a time or a text, at the call.

The condition is vectors ``(batch, k)``, one for each example, or ``(..., k)`` with further leading
axes of ``x``. One layer, ``modulation``, makes scale and bias of them for the norm.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.flax_common import conditional
from jaxnorm.flax_common.conditional import Activation, LayerKind
from jaxnorm.nnx.modulation import Conditional, Modulated, ModulationOptions

__all__ = ["AdaInstanceNorm", "AdaLayerNorm", "AdaLayerNormZero", "FiLM"]


class AdaLayer(Modulated):
    """The constructor of :class:`AdaLayerNorm` and :class:`AdaLayerNormZero`."""

    @known_keywords
    def __init__(
        self,
        num_features: int,
        condition_features: int,
        *,
        epsilon: float = 1e-6,
        kernel_init: Initializer = initializers.zeros,
        norm: LayerKind = "layer",
        activation: Activation | None = nnx.silu,
        rngs: nnx.Rngs,
        **options: Unpack[ModulationOptions],
    ) -> None:
        super().__init__(num_features, condition_features, **options)
        self.epsilon, self.norm, self.activation = epsilon, norm, activation
        self.add_modulation(kernel_init, rngs)

    __init__.__signature__ = with_keywords_of(__init__, Conditional.__init__)  # type: ignore[attr-defined]


class AdaLayerNorm(AdaLayer):
    """Adaptive layer normalization (Peebles & Xie 2022, arXiv 2212.09748), of diffusion models.

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where bias and scale are the two
    halves, in this order, of ``Linear(activation(condition))``. Mean and variance are of the
    channels, the last axis. With ``norm="rms"`` it is
    ``y = x / sqrt(mean(x**2) + epsilon) * (1 + scale) + bias``. The parameters of the linear layer
    ``modulation`` start as zeros, so that the module starts as a layer norm without parameters.

    The order is DiT's. ``AdaLayerNormContinuous`` of diffusers has the scale first.

    Args:
      num_features: number of channels of ``x``.
      condition_features: size of the vectors of the condition.
      epsilon: added to the variance or the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the linear layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the linear layer; zeros by default.
      bias_init: initializer of the bias of the linear layer; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      norm: ``"layer"``, the default, or ``"rms"``.
      activation: function of the condition in front of the linear layer; ``silu`` by default, None
        for none.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.AdaLayerNorm(2, 5, rngs=Rngs(0))
    >>> norm.modulation.bias[...] = jnp.array([7.0, 7.0, 1.0, 1.0])
    >>> norm(jnp.array([[1.0, 3.0]]), jnp.ones((1, 5))).round(3).tolist()
    [[5.0, 9.0]]
    """

    @known_keywords
    def __call__(
        self, x: jax.Array, condition: jax.Array, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalize ``x``, and scale and shift it by the condition.

        Args:
          x: the array ``(..., channels)`` to normalize; integers and booleans become floats.
          condition: vectors ``(batch, k)``, or ``(..., k)`` with leading axes of ``x`` or 1.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        bias, scale = self.modulate(condition, jnp.shape(x))
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        return conditional.layer(self, x, options)


class AdaLayerNormZero(AdaLayer):
    """Adaptive layer normalization with a gate, adaLN-Zero (Peebles & Xie 2022, arXiv 2212.09748).

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where bias, scale and gate are
    the three parts, in this order, of ``Linear(activation(condition))``. It returns ``y`` and the
    gate for the block that follows: ``x + gate * block(y)``. The parameters of the linear layer
    ``modulation`` start as zeros, so that each block starts as the identity.

    A block of DiT has two of these, one before its attention and one before its perceptron. Its
    one layer of 6 C outputs holds both: the outputs up to 3 C are the first one's ``modulation``,
    the others the second one's.

    Args:
      num_features: number of channels of ``x``.
      condition_features: size of the vectors of the condition.
      epsilon: added to the variance or the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the linear layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the linear layer; zeros by default.
      bias_init: initializer of the bias of the linear layer; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      norm: ``"layer"``, the default, or ``"rms"``, as of :class:`AdaLayerNorm`.
      activation: function of the condition in front of the linear layer; ``silu`` by default, None
        for none.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x, condition = jnp.array([[[1.0, 3.0], [5.0, 9.0]]]), jnp.ones((1, 5))
    >>> y, gate = nnx.AdaLayerNormZero(2, 5, rngs=Rngs(0))(x, condition)
    >>> y.round(3).tolist(), gate.tolist()
    ([[[-1.0, 1.0], [-1.0, 1.0]]], [[[0.0, 0.0]]])
    """

    parts = 3

    @known_keywords
    def __call__(
        self, x: jax.Array, condition: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Normalize ``x``, scale and shift it by the condition, and return the gate as well.

        Args:
          x: the array ``(..., channels)`` to normalize; integers and booleans become floats.
          condition: vectors ``(batch, k)``, or ``(..., k)`` with leading axes of ``x`` or 1.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``, and the gate, which broadcasts against it.
        """
        bias, scale, gate = self.modulate(condition, jnp.shape(x))
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        y = conditional.layer(self, x, options)
        return y, gate.astype(y.dtype)


class FiLM(Modulated):
    """Feature-wise linear modulation (Perez et al. 2017, arXiv 1709.07871), without statistics.

    ``y = x * (1 + scale) + bias``, where scale and bias are the two halves, in this order, of
    ``Linear(condition)``. The paper's networks put it behind a norm without parameters.

    Args:
      num_features: number of channels of ``x``.
      condition_features: size of the vectors of the condition.
      dtype: dtype of the linear layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the linear layer; by default that of ``nnx.Linear``.
      bias_init: initializer of the bias of the linear layer; zeros by default.
      scale_offset: a number that is added to the scale, in float32 at least; 1 by default, as in
        the authors' experiments. With 0 the layer returns the gain itself.
      activation: function of the condition in front of the linear layer; None, the default, for
        none.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.FiLM(2, 5, rngs=Rngs(0))
    >>> norm.modulation.bias[...] = jnp.array([2.0, 2.0, 10.0, 20.0])
    >>> norm(jnp.array([[1.0, 3.0]]), jnp.zeros((1, 5))).tolist()
    [[13.0, 29.0]]
    """

    @known_keywords
    def __init__(
        self,
        num_features: int,
        condition_features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = initializers.zeros,
        scale_offset: float = 1,
        activation: Activation | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            num_features,
            condition_features,
            dtype=dtype,
            param_dtype=param_dtype,
            bias_init=bias_init,
        )
        self.scale_offset, self.activation = scale_offset, activation
        self.add_modulation(kernel_init, rngs)

    @known_keywords
    def __call__(
        self, x: jax.Array, condition: jax.Array, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Scale and shift ``x`` by the condition.

        Args:
          x: the array ``(..., channels)``; integers and booleans become floats.
          condition: vectors ``(batch, k)``, or ``(..., k)`` with leading axes of ``x`` or 1.
          mask: boolean mask or float weights that broadcast against ``x``. Where it is 0 the output
            is 0, even if ``x`` is NaN.

        Returns:
          An array of the shape of ``x``.
        """
        scale, bias = self.modulate(condition, jnp.shape(x))
        x, options = conditional.options_of(
            self, x, mask, scale=scale, bias=bias, offset=self.scale_offset
        )
        return conditional.scale_and_shift(x, options)


class AdaInstanceNorm(Modulated):
    """Adaptive instance normalization of StyleGAN (Karras et al. 2018, arXiv 1812.04948).

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where scale and bias are the two
    halves, in this order, of ``Linear(condition)``. Mean and variance are of each channel of each
    example over its positions. For the statistics of another image in place of learned ones see
    :func:`jaxnorm.ada_instance_norm`.

    Args:
      num_features: number of channels of ``x``.
      condition_features: size of the vectors of the condition.
      epsilon: added to the variance, inside the root; 1e-8 by default, as in StyleGAN.
      dtype: dtype of the linear layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the linear layer; by default that of ``nnx.Linear``.
      bias_init: initializer of the bias of the linear layer; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      activation: function of the condition in front of the linear layer; None, the default, for
        none.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.AdaInstanceNorm(1, 5, rngs=Rngs(0))
    >>> norm.modulation.bias[...] = jnp.array([1.0, 7.0])
    >>> norm(jnp.array([[[1.0], [3.0]]]), jnp.zeros((1, 5))).round(3).tolist()
    [[[5.0], [9.0]]]
    """

    @known_keywords
    def __init__(
        self,
        num_features: int,
        condition_features: int,
        *,
        epsilon: float = 1e-8,
        kernel_init: Initializer = default_kernel_init,
        activation: Activation | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[ModulationOptions],
    ) -> None:
        super().__init__(num_features, condition_features, **options)
        self.epsilon, self.activation = epsilon, activation
        self.add_modulation(kernel_init, rngs)

    __init__.__signature__ = with_keywords_of(__init__, Conditional.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(
        self, x: jax.Array, condition: jax.Array, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalize ``x``, and scale and shift it by the condition.

        Args:
          x: the array ``(batch, ..., channels)`` to normalize; integers and booleans become floats.
          condition: vectors ``(batch, k)``, or ``(..., k)`` with leading axes of ``x`` or 1.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        scale, bias = self.modulate(condition, jnp.shape(x))
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        return conditional.instance(self, x, options)
