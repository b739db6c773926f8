"""Reversible instance norm of time series, and its inverse."""

import jax
from flax import nnx

from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import across, instance_axes
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.nnx import flax_versions
from jaxnorm.nnx.calls import inputs
from jaxnorm.norms.reversible import reverse, reversible_instance_norm

__all__ = ["ReversibleInstanceNorm"]


# Flax has no such norm. The constructor of its InstanceNorm makes scale and bias.
class ReversibleInstanceNorm(flax_versions.InstanceNorm):
    """Reversible instance normalization of time series (RevIN, Kim et al. 2022, ICLR).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, with the mean and variance of each
    channel of each example over time, as constants under differentiation. A call returns
    ``(y, moments)``. The method :meth:`inverse` undoes it by these Moments, for a forecast made
    from y. Scale and bias have the shape ``(num_features,)``, apply along ``feature_axes``, and
    serve both. See also :func:`jaxnorm.reversible_instance_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variance, inside the root; 1e-5 by default.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``scale_init``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.ReversibleInstanceNorm(1, rngs=Rngs(0))
    >>> y, moments = norm(jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]]))
    >>> y[..., 0].round(3).tolist(), norm.inverse(jnp.zeros((2, 1, 1)), moments)[..., 0].tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]])
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-5, **options):
        super().__init__(num_features, epsilon=epsilon, **options)

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
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
        x, options, _ = inputs(self, x, features, mask)
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
        """
        features, reduced = instance_axes(self.feature_axes, x.ndim)
        x, options, _ = inputs(self, x, features, mask)
        return reverse(x, moments, axes=reduced, **options)
