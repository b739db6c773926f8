"""Bounded functions of each element, which take the place of norms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.flax_common.arguments import inexact
from jaxnorm.norms.pointwise import bounded

__all__ = ["DynamicErf", "DynamicTanh"]


class DynamicTanh(nn.Module):
    """Dynamic tanh, DyT, in place of a norm (Zhu et al. 2025, arXiv 2503.10622).

    ``y = tanh(alpha * x) * scale + bias``, with one learned number ``alpha``, of shape ``(1,)``.
    Scale and bias have the shape of ``feature_axes``. See also :func:`jaxnorm.dynamic_tanh`.

    Attributes:
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes that give scale and bias their shape; the last axis by default.
      alpha_init: initializer of ``alpha``; the constant 0.5 by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> y, variables = nn.DynamicTanh().init_with_output(jax.random.key(0), jnp.array([100.0, 0.0]))
    >>> y.tolist(), sorted(variables["params"])
    ([1.0, 0.0], ['alpha', 'bias', 'scale'])
    """

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    feature_axes: int | tuple[int, ...] = -1
    alpha_init: Initializer = initializers.constant(0.5)

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Bound each element of ``x``.

        Args:
          x: real array; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Where it is 0 the
            output is 0, even if the element is NaN.

        Returns:
          An array of the shape of ``x``.
        """
        alpha = self.param("alpha", self.alpha_init, (1,), self.param_dtype)
        return _bounded(self, jnp.tanh, x, mask, alpha, None)


class DynamicErf(nn.Module):
    """Dynamic erf, Derf, in place of a norm (Chen et al. 2025, arXiv 2512.10938).

    ``y = erf(alpha * x + shift) * scale + bias``, with the learned numbers ``alpha`` and ``shift``,
    of shape ``(1,)``. Scale and bias have the shape of ``feature_axes``. See also
    :func:`jaxnorm.dynamic_erf`.

    Attributes:
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes that give scale and bias their shape; the last axis by default.
      alpha_init: initializer of ``alpha``; the constant 0.5 by default. In language models the
        paper starts from 1.
      shift_init: initializer of ``shift``; zeros by default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> y, variables = nn.DynamicErf().init_with_output(jax.random.key(0), jnp.array([100.0, 0.0]))
    >>> y.tolist(), sorted(variables["params"])
    ([1.0, 0.0], ['alpha', 'bias', 'scale', 'shift'])
    """

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    feature_axes: int | tuple[int, ...] = -1
    alpha_init: Initializer = initializers.constant(0.5)
    shift_init: Initializer = initializers.zeros

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Bound each element of ``x``.

        Args:
          x: real array; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Where it is 0 the
            output is 0, even if the element is NaN.

        Returns:
          An array of the shape of ``x``.
        """
        alpha = self.param("alpha", self.alpha_init, (1,), self.param_dtype)
        shift = self.param("shift", self.shift_init, (1,), self.param_dtype)
        return _bounded(self, lax.erf, x, mask, alpha, shift)


def _bounded(
    module: DynamicTanh | DynamicErf,
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    mask: jax.Array | None,
    alpha: jax.Array,
    shift: jax.Array | None,
) -> jax.Array:
    """Create scale and bias on first use, and apply the function."""
    features = canonical_axes(module.feature_axes, jnp.ndim(x), "feature_axes")
    sizes, params = tuple(jnp.shape(x)[axis] for axis in features), {}
    for name in ("scale", "bias"):
        if getattr(module, f"use_{name}"):
            start = getattr(module, f"{name}_init")
            params[name] = module.param(name, start, sizes, module.param_dtype)
    dtype = promoted(module.dtype, x, alpha, *params.values())
    return bounded(
        function,
        inexact(x, dtype),
        alpha,
        shift,
        feature_axes=features,
        scale=params.get("scale"),
        bias=params.get("bias"),
        where=mask,
        dtype=dtype,
        mask_name="mask",
    )
