"""Norms that divide each vector by its length: unit and scale norm."""

import math
from collections.abc import Sequence
from dataclasses import field

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.axes import canonical_axes, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.flax_common.arguments import across, inexact, module_axes
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.vectors import divide_by_length

__all__ = ["ScaleNorm", "UnitNorm"]


# Flax has no unit norm. Its RMSNorm has the fields that both share.
class UnitNorm(nn.RMSNorm):
    """Unit normalization: divides each vector by its length (Wang et al. 2017, arXiv 1704.06369).

    ``y = x / max(sqrt(sum(|x|**2)), epsilon)``, then times scale with ``use_scale``. With its
    defaults it is UnitNormalization of Keras. See also :func:`jaxnorm.unit_norm`.

    Attributes:
      epsilon: the least length that divides; 1e-12 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_scale: whether to multiply by a learned scale; False by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes of a vector; the last axis by default.
      feature_axes: the axes that give the scale its shape; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the length as well; None by
        default. Where no axis is bound, for example under sharded ``jit``, the name has no effect;
        where other axes are bound instead, it raises ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share lengths; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      ord: the order of the length; 2 by default.

    >>> import jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> nn.UnitNorm().apply({}, jnp.array([[3.0, -3.0, 3.0, -3.0]])).tolist()
    [[0.5, -0.5, 0.5, -0.5]]
    """

    epsilon: float = 1e-12
    use_scale: bool = False
    # only by keyword, so that the positional fields are Flax's
    ord: float = field(default=2, kw_only=True)

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Divide each vector of ``x`` by its length.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features, reduced = module_axes(self, x.ndim)
        x, options = inputs(self, x, features, mask)
        return divide_by_length(
            x,
            unsplit(x.shape, reduced),
            features,
            ord=self.ord,
            axis_name=across(self),
            **options,
        )


class ScaleNorm(nn.Module):
    """Scale normalization: one learned length (Nguyen & Salazar 2019, arXiv 1910.05895).

    ``y = scale * x / max(sqrt(sum(|x|**2)), epsilon)``. The parameter ``scale`` is one number. See
    also :func:`jaxnorm.scale_norm`.

    Attributes:
      epsilon: the least length that divides; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the scale promote.
      param_dtype: dtype of the scale; float32 by default.
      scale_init: initializer of the scale; by default it starts from the root of the number of
        elements of a vector, as in the paper, so that the root mean square of the output is 1.
      reduction_axes: the axes of a vector; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the length as well; None by
        default. Where no axis is bound, for example under sharded ``jit``, the name has no effect;
        where other axes are bound instead, it raises ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share lengths; by default all devices do.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.array([[3.0, -3.0, 3.0, -3.0]])
    >>> y, variables = nn.ScaleNorm().init_with_output(jax.random.key(0), x)
    >>> y.tolist(), variables["params"]["scale"].tolist()
    ([[1.0, -1.0, 1.0, -1.0]], 2.0)
    """

    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer | None = None
    reduction_axes: int | Sequence[int] = -1
    axis_name: str | Sequence[str] | None = None
    axis_index_groups: Sequence[Sequence[int]] | None = None

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Give each vector of ``x`` the learned length.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        reduced = canonical_axes(self.reduction_axes, x.ndim, "reduction_axes")
        reduction = unsplit(x.shape, reduced)
        start = self.scale_init or initializers.constant(math.sqrt(reduction.group_size))
        scale = self.param("scale", start, (), self.param_dtype)
        dtype = promoted(self.dtype, x, scale)
        return divide_by_length(
            inexact(x, dtype),
            reduction,
            reduced,
            gain=scale,
            epsilon=self.epsilon,
            where=mask,
            mask_name="mask",
            axis_name=across(self),
            dtype=dtype,
        )
