"""Norms whose scale and bias are computed from a condition, such as a time or a text, at the call.

The condition is vectors ``(batch, k)``, one for each example, or ``(..., k)`` with further leading
axes of ``x``. One layer, ``modulation``, makes scale and bias of them for the norm.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.flax_common import conditional
from jaxnorm.flax_common.conditional import Activation, LayerKind

__all__ = ["AdaInstanceNorm", "AdaLayerNorm", "AdaLayerNormZero", "FiLM"]


def modulation(module, condition: jax.Array, shape: tuple[int, ...], parts: int) -> list[jax.Array]:
    """Return the parts of the output of a dense layer, which broadcast against x of a shape."""
    condition = conditional.vectors(module, condition, shape)
    if module.activation is not None:
        condition = module.activation(condition)
    layer = nn.Dense(
        parts * shape[-1],
        dtype=condition.dtype,
        param_dtype=module.param_dtype,
        kernel_init=module.kernel_init,
        bias_init=module.bias_init,
        name="modulation",
    )
    return conditional.spread(layer(condition), parts, shape)


class AdaLayerNorm(nn.Module):
    """Adaptive layer normalization (Peebles & Xie 2022, arXiv 2212.09748), of diffusion models.

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where bias and scale are the two
    halves, in this order, of ``Dense(activation(condition))``. Mean and variance are of the
    channels, the last axis. With ``norm="rms"`` it is
    ``y = x / sqrt(mean(x**2) + epsilon) * (1 + scale) + bias``. The parameters of the dense layer
    ``modulation`` start as zeros, so that the module starts as a layer norm without parameters.

    The order is DiT's. ``AdaLayerNormContinuous`` of diffusers has the scale first.

    Attributes:
      epsilon: added to the variance or the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the dense layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the dense layer; zeros by default.
      bias_init: initializer of the bias of the dense layer; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      norm: ``"layer"``, the default, or ``"rms"``.
      activation: function of the condition in front of the dense layer; ``silu`` by default, None
        for none.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> params = {"modulation": {"kernel": jnp.zeros((5, 4)), "bias": jnp.array([7.0, 7.0, 1, 1])}}
    >>> x, condition = jnp.array([[1.0, 3.0]]), jnp.ones((1, 5))
    >>> nn.AdaLayerNorm().apply({"params": params}, x, condition).round(3).tolist()
    [[5.0, 9.0]]
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = initializers.zeros
    bias_init: Initializer = initializers.zeros
    axis_name: str | None = None
    axis_index_groups: list | tuple | None = None
    norm: LayerKind = "layer"
    activation: Activation | None = nn.silu

    @known_keywords
    @nn.compact
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
        bias, scale = modulation(self, condition, jnp.shape(x), 2)
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        return conditional.layer(self, x, options)


class AdaLayerNormZero(nn.Module):
    """Adaptive layer normalization with a gate, adaLN-Zero (Peebles & Xie 2022, arXiv 2212.09748).

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where bias, scale and gate are
    the three parts, in this order, of ``Dense(activation(condition))``. It returns ``y`` and the
    gate for the block that follows: ``x + gate * block(y)``. The parameters of the dense layer
    ``modulation`` start as zeros, so that each block starts as the identity.

    A block of DiT has two of these, one before its attention and one before its perceptron. Its
    one layer of 6 C outputs holds both: the outputs up to 3 C are the first one's ``modulation``,
    the others the second one's.

    Attributes:
      epsilon: added to the variance or the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the dense layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the dense layer; zeros by default.
      bias_init: initializer of the bias of the dense layer; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      norm: ``"layer"``, the default, or ``"rms"``, as of :class:`AdaLayerNorm`.
      activation: function of the condition in front of the dense layer; ``silu`` by default, None
        for none.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x, condition = jnp.array([[[1.0, 3.0], [5.0, 9.0]]]), jnp.ones((1, 5))
    >>> (y, gate), _ = nn.AdaLayerNormZero().init_with_output(jax.random.key(0), x, condition)
    >>> y.round(3).tolist(), gate.tolist()
    ([[[-1.0, 1.0], [-1.0, 1.0]]], [[[0.0, 0.0]]])
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = initializers.zeros
    bias_init: Initializer = initializers.zeros
    axis_name: str | None = None
    axis_index_groups: list | tuple | None = None
    norm: LayerKind = "layer"
    activation: Activation | None = nn.silu

    @known_keywords
    @nn.compact
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
        bias, scale, gate = modulation(self, condition, jnp.shape(x), 3)
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        y = conditional.layer(self, x, options)
        return y, gate.astype(y.dtype)


class FiLM(nn.Module):
    """Feature-wise linear modulation (Perez et al. 2017, arXiv 1709.07871), without statistics.

    ``y = x * (1 + scale) + bias``, where scale and bias are the two halves, in this order, of
    ``Dense(condition)``. The paper's networks put it behind a norm without parameters.

    Attributes:
      dtype: dtype of the dense layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the dense layer; by default that of ``nn.Dense``.
      bias_init: initializer of the bias of the dense layer; zeros by default.
      scale_offset: a number that is added to the scale, in float32 at least; 1 by default, as in
        the authors' experiments. With 0 the layer returns the gain itself.
      activation: function of the condition in front of the dense layer; None, the default, for
        none.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> params = {"modulation": {"kernel": jnp.zeros((5, 4)), "bias": jnp.array([2.0, 2, 10, 20])}}
    >>> x, condition = jnp.array([[1.0, 3.0]]), jnp.ones((1, 5))
    >>> nn.FiLM().apply({"params": params}, x, condition).tolist()
    [[13.0, 29.0]]
    """

    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = initializers.zeros
    scale_offset: float = 1
    activation: Activation | None = None

    @known_keywords
    @nn.compact
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
        scale, bias = modulation(self, condition, jnp.shape(x), 2)
        x, options = conditional.options_of(
            self, x, mask, scale=scale, bias=bias, offset=self.scale_offset
        )
        return conditional.scale_and_shift(x, options)


class AdaInstanceNorm(nn.Module):
    """Adaptive instance normalization of StyleGAN (Karras et al. 2018, arXiv 1812.04948).

    ``y = (x - mean) / sqrt(var + epsilon) * (1 + scale) + bias``, where scale and bias are the two
    halves, in this order, of ``Dense(condition)``. Mean and variance are of each channel of each
    example over its positions. For the statistics of another image in place of learned ones see
    :func:`jaxnorm.ada_instance_norm`.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-8 by default, as in StyleGAN.
      dtype: dtype of the dense layer and of the output; by default the dtype to which ``x``, the
        condition and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      kernel_init: initializer of the kernel of the dense layer; by default that of ``nn.Dense``.
      bias_init: initializer of the bias of the dense layer; zeros by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. It has no effect where no axis is bound, for example under sharded ``jit``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      activation: function of the condition in front of the dense layer; None, the default, for
        none.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> params = {"modulation": {"kernel": jnp.zeros((5, 2)), "bias": jnp.array([1.0, 7.0])}}
    >>> x, condition = jnp.array([[[1.0], [3.0]]]), jnp.ones((1, 5))
    >>> nn.AdaInstanceNorm().apply({"params": params}, x, condition).round(3).tolist()
    [[[5.0], [9.0]]]
    """

    epsilon: float = 1e-8
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = initializers.zeros
    axis_name: str | None = None
    axis_index_groups: list | tuple | None = None
    activation: Activation | None = None

    @known_keywords
    @nn.compact
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
        scale, bias = modulation(self, condition, jnp.shape(x), 2)
        x, options = conditional.options_of(self, x, mask, scale=scale, bias=bias)
        return conditional.instance(self, x, options)
