"""Reversible instance norm of time series, and its inverse."""

import jax
from flax import linen as nn

from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import across, inexact, instance_axes
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.reversible import reverse, reversible_instance_norm

__all__ = ["ReversibleInstanceNorm"]


# Flax has no such norm. Its InstanceNorm has the fields that all norms share.
class ReversibleInstanceNorm(nn.InstanceNorm):
    """Reversible instance normalization of time series (RevIN, Kim et al. 2022, ICLR).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, with the mean and variance of each
    channel of each example over time, as constants under differentiation. A call returns
    ``(y, moments)``. The method :meth:`inverse` undoes it by these Moments, for a forecast made
    from y. Scale and bias have the shape of ``feature_axes``, and serve both. See also
    :func:`jaxnorm.reversible_instance_norm`.

    Within a model, call the layer and its inverse on one instance::

        norm = ReversibleInstanceNorm()
        y, moments = norm(series)
        return norm.inverse(forecaster(y), moments)

    Outside, ``norm.apply(variables, forecast, moments, method="inverse")`` does the same.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes that, besides the batch, are not reduced; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, series = nn.ReversibleInstanceNorm(), jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> (y, moments), variables = norm.init_with_output(jax.random.key(0), series)
    >>> y[..., 0].round(3).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    >>> forecast = norm.apply(variables, jnp.zeros((2, 1, 1)), moments, method="inverse")
    >>> forecast[..., 0].tolist()
    [[2.0], [20.0]]
    """

    epsilon: float = 1e-5

    @known_keywords
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> tuple[jax.Array, Moments]:
        """Normalize ``x``, and return the Moments that undo it.

        Args:
          x: the array ``(batch, time, features)`` to normalize; integers and booleans become
            floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``, and the Moments, whose reduced axes have size
          1.
        """
        features, reduced = instance_axes(self.feature_axes, x.ndim)
        x, options = inputs(self, x, features, mask)
        return apply_norm(
            reversible_instance_norm, x, axes=reduced, axis_name=across(self), **options
        )

    @known_keywords
    def inverse(
        self, x: jax.Array, moments: Moments, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Undo the norm: ``(x - bias) / (scale + epsilon**2) * sqrt(var + epsilon) + mean``.

        Args:
          x: the array ``(batch, ..., features)``, for example a forecast of the normalized series,
            of any length; integers and booleans become floats.
          moments: the Moments that the call of this layer returned for the series.
          mask: boolean mask or float weights that broadcast against ``x``. Where it is 0 outputs
            are 0, even if ``x`` is NaN.

        Returns:
          An array of the shape of ``x``, at the level and in the unit of the series.

        Raises:
          ValueError: the layer has no parameters yet; it makes them when it is first called.
        """
        names = [name for name in ("scale", "bias") if getattr(self, f"use_{name}")]
        if missing := [name for name in names if not self.has_variable("params", name)]:
            raise ValueError(
                f"{type(self).__name__} must have its parameters before inverse: got no "
                f"{' and no '.join(missing)}. Call the layer on the series first."
            )
        params: dict[str, jax.Array] = {name: self.get_variable("params", name) for name in names}
        scale, bias = params.get("scale"), params.get("bias")
        dtype = promoted(self.dtype, x, scale, bias)
        return reverse(
            inexact(x, dtype),
            moments,
            axes=instance_axes(self.feature_axes, x.ndim)[1],
            scale=scale,
            bias=bias,
            epsilon=self.epsilon,
            where=mask,
            dtype=dtype,
            mask_name="mask",
        )
