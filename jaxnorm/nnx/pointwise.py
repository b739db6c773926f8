"""Bounded functions of each element, which take the place of norms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.flax_common.arguments import inexact
from jaxnorm.nnx.calls import check_features
from jaxnorm.norms.pointwise import bounded

__all__ = ["DynamicErf", "DynamicTanh"]

HALF = initializers.constant(0.5)


class DynamicTanh(nnx.Module):
    """Dynamic tanh, DyT, in place of a norm (Zhu et al. 2025, arXiv 2503.10622).

    ``y = tanh(alpha * x) * scale + bias``, with one learned number ``alpha``, of shape ``(1,)``.
    Scale and bias have the shape ``(num_features,)`` and apply along ``feature_axes``. See also
    :func:`jaxnorm.dynamic_tanh`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes along which scale and bias apply; the last axis by default.
      alpha_init: initializer of ``alpha``; the constant 0.5 by default.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.DynamicTanh(2, rngs=Rngs(0))(jnp.array([100.0, 0.0])).tolist()
    [1.0, 0.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: int | tuple[int, ...] = -1,
        alpha_init: Initializer = HALF,
        rngs: nnx.Rngs,
    ) -> None:
        made = lambda start, size: nnx.Param(start(rngs.params(), (size,), param_dtype))
        self.alpha = made(alpha_init, 1)
        self.scale = made(scale_init, num_features) if use_scale else None
        self.bias = made(bias_init, num_features) if use_bias else None
        self.dtype, self.param_dtype, self.feature_axes = dtype, param_dtype, feature_axes

    @known_keywords
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Bound each element of ``x``.

        Args:
          x: real array; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Where it is 0 the
            output is 0, even if the element is NaN.

        Returns:
          An array of the shape of ``x``.
        """
        return _bounded(self, jnp.tanh, x, mask, None)


class DynamicErf(DynamicTanh):
    """Dynamic erf, Derf, in place of a norm (Chen et al. 2025, arXiv 2512.10938).

    ``y = erf(alpha * x + shift) * scale + bias``, with the learned numbers ``alpha`` and ``shift``,
    of shape ``(1,)``. Scale and bias have the shape ``(num_features,)`` and apply along
    ``feature_axes``. See also :func:`jaxnorm.dynamic_erf`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      shift_init: initializer of ``shift``; zeros by default.

    It also takes the other arguments of :class:`DynamicTanh`, with the meanings and
    defaults they have there: ``dtype``, ``param_dtype``, ``use_bias``,
    ``use_scale``, ``bias_init``, ``scale_init``, ``feature_axes``, ``alpha_init``
    and ``rngs``. In language models the paper starts ``alpha`` from 1.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.DynamicErf(2, rngs=Rngs(0))(jnp.array([100.0, 0.0])).tolist()
    [1.0, 0.0]
    """

    def __init__(
        self, num_features: int, *, shift_init: Initializer = initializers.zeros, **options
    ) -> None:
        super().__init__(num_features, **options)
        self.shift = nnx.Param(shift_init(options["rngs"].params(), (1,), self.param_dtype))

    __init__.__signature__ = with_keywords_of(__init__, DynamicTanh.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Bound each element of ``x``.

        Args:
          x: real array; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Where it is 0 the
            output is 0, even if the element is NaN.

        Returns:
          An array of the shape of ``x``.
        """
        return _bounded(self, lax.erf, x, mask, self.shift[...])


def _bounded(
    module: DynamicTanh,
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    mask: jax.Array | None,
    shift: jax.Array | None,
) -> jax.Array:
    """Apply the function with the parameters of the module."""
    features = canonical_axes(module.feature_axes, jnp.ndim(x), "feature_axes")
    sizes = tuple(jnp.shape(x)[axis] for axis in features)
    scale, bias = (None if p is None else p[...] for p in (module.scale, module.bias))
    check_features(module, x, sizes, scale, bias)
    # Parameters are stored flat, (num_features,), also for several feature axes.
    scale, bias = (None if p is None else p.reshape(sizes) for p in (scale, bias))
    alpha = module.alpha[...]
    dtype = promoted(module.dtype, x, alpha, scale, bias)
    return bounded(
        function,
        inexact(x, dtype),
        alpha,
        shift,
        feature_axes=features,
        scale=scale,
        bias=bias,
        where=mask,
        dtype=dtype,
        mask_name="mask",
    )
