"""Norms that divide each vector by its length: unit and scale norm."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.axes import canonical_axes, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.flax_common.arguments import across, inexact, module_axes
from jaxnorm.nnx.calls import inputs
from jaxnorm.norms.vectors import divide_by_length

__all__ = ["ScaleNorm", "UnitNorm"]


# Flax has no unit norm. The constructor of its RMSNorm makes the scale.
class UnitNorm(nnx.RMSNorm):
    """Unit normalization: divides each vector by its length (Wang et al. 2017, arXiv 1704.06369).

    ``y = x / max(sqrt(sum(|x|**2)), epsilon)``, then times scale with ``use_scale``. With its
    defaults it is UnitNormalization of Keras. See also :func:`jaxnorm.unit_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: the least length that divides; 1e-12 by default.
      use_scale: whether to multiply by a learned scale; False by default.
      ord: the order of the length; 2 by default.

    It also takes the other arguments of :class:`RMSNorm`, with the meanings and defaults they have
    there: ``dtype``, ``param_dtype``, ``scale_init``, ``reduction_axes``, ``feature_axes``,
    ``axis_name``, ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.UnitNorm(4, rngs=Rngs(0))(jnp.array([[3.0, -3.0, 3.0, -3.0]])).tolist()
    [[0.5, -0.5, 0.5, -0.5]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-12,
        use_scale: bool = False,
        ord: float = 2,
        **options,
    ):
        super().__init__(num_features, epsilon=epsilon, use_scale=use_scale, **options)
        self.ord = ord

    # The installed Flax decides which other arguments the constructor takes.
    __init__.__signature__ = with_keywords_of(__init__, nnx.RMSNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Divide each vector of ``x`` by its length.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features, reduced = module_axes(self, x.ndim)
        x, options, _ = inputs(self, x, features, mask)
        return divide_by_length(
            x,
            unsplit(x.shape, reduced),
            features,
            ord=self.ord,
            axis_name=across(self),
            **options,
        )


class ScaleNorm(nnx.Module):
    """Scale normalization: one learned length (Nguyen & Salazar 2019, arXiv 1910.05895).

    ``y = scale * x / max(sqrt(sum(|x|**2)), epsilon)``. The parameter ``scale`` is one number. See
    also :func:`jaxnorm.scale_norm`.

    Args:
      num_features: number of elements of a vector.
      epsilon: the least length that divides; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the scale promote.
      param_dtype: dtype of the scale; float32 by default.
      scale_init: initializer of the scale; by default it starts from the root of ``num_features``,
        as in the paper, so that the root mean square of the output is 1.
      reduction_axes: the axes of a vector; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the length as well; None by
        default. Where no axis is bound, for example under sharded ``jit``, the name has no effect;
        where other axes are bound instead, it raises ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share lengths; by default all devices do.
      rngs: random number generators for the initializer.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.ScaleNorm(4, rngs=Rngs(0))(jnp.array([[3.0, -3.0, 3.0, -3.0]])).tolist()
    [[1.0, -1.0, 1.0, -1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: Initializer | None = None,
        reduction_axes: int | Sequence[int] = -1,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Sequence[Sequence[int]] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        start = scale_init or initializers.constant(math.sqrt(num_features))
        self.scale = nnx.Param(start(rngs.params(), (), param_dtype))
        self.num_features = num_features
        self.epsilon, self.dtype, self.param_dtype = epsilon, dtype, param_dtype
        # tuples, since Flax takes a list in an attribute for a part of the model
        self.reduction_axes = _tuples(reduction_axes)
        self.axis_name, self.axis_index_groups = _tuples(axis_name), _tuples(axis_index_groups)

    @known_keywords
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
        if reduction.group_size != self.num_features:
            raise ValueError(
                f"x must have vectors of the {self.num_features} elements that ScaleNorm was made "
                f"for: got {reduction.group_size} of an x of shape {x.shape}."
            )
        scale = self.scale[...]
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


def _tuples(value):
    """Return a value with tuples for lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
