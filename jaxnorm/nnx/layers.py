"""Norms of each position over its features: layer, RMS and positional norm."""

from collections.abc import Mapping
from typing import Any, Unpack, overload

import jax
from flax import nnx
from jax.nn import initializers

from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.arguments.options import Param
from jaxnorm.arguments.validation import summands
from jaxnorm.core.call import run, run_of_sum, run_with_moments
from jaxnorm.core.normalization import takes_arguments_of
from jaxnorm.core.rounding import Rounding
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import initial_scale, module_axes
from jaxnorm.nnx.calls import LayerOptions, RMSOptions, over, over_axes

__all__ = ["LayerNorm", "PositionalNorm", "RMSNorm"]


def _with_initial_scale(offset: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor with the initializer of a scale with an offset."""
    given = options.get("scale_init", initializers.ones)
    return {**options, **({"scale_init": initial_scale(given, offset)} if offset else {})}


class LayerNorm(nnx.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over
    ``reduction_axes``. Scale and bias have the shape ``(num_features,)`` and apply along
    ``feature_axes``. A subclass of :class:`flax.nnx.LayerNorm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes along which scale and bias apply; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with
        ``(x, scale, bias)`` and ``dtype``. Flax's rule, the default, is not called: it would round
        ``x`` before its statistics are computed.
      rngs: random number generators for the initializers.
      bias_metadata: metadata of the ``nnx.Param`` that holds the bias; none by default.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default. With 1
        the gain is ``1 + scale``, as in Gemma, and the scale starts from zeros where ``scale_init``
        is not given.
      rounding: where half precision is rounded, ``"once"`` by default, ``"twice"`` or ``"input"``;
        see :func:`jaxnorm.rms_norm`.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.LayerNorm(2, rngs=Rngs(0))(jnp.array([[1.0, 3.0]])).round(3).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        rngs: nnx.Rngs,
        scale_offset: float = 0,
        rounding: Rounding = "once",
        **options: Unpack[LayerOptions],
    ) -> None:
        """Take the arguments of :class:`flax.nnx.LayerNorm`, ``scale_offset`` and ``rounding``."""
        super().__init__(num_features, rngs=rngs, **_with_initial_scale(scale_offset, options))
        self.scale_offset, self.rounding = scale_offset, rounding

    # for modules that were pickled before these attributes existed
    scale_offset: float = 0
    rounding: Rounding = "once"

    # The installed Flax decides which other arguments the constructor takes.
    __init__.__signature__ = with_keywords_of(__init__, nnx.LayerNorm.__init__)  # type: ignore[attr-defined]

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: None = None,
        segments: Param = None,
        num_segments: int | None = None,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array,
        segments: Param = None,
        num_segments: int | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        segments: Param = None,
        num_segments: int | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Normalize ``x``, or each of its segments.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.
          residual: array of the shape of ``x`` that is added first, for example a residual stream.
          segments: integer ids from 0 to ``num_segments - 1``, in any order. Positions along the
            first reduction axis with the same id form a group, for example the tokens of a
            document. The shape is ``(n,)`` or, if every row has ids of its own, the shape of ``x``
            up to that axis; see :func:`jaxnorm.moments`.
          num_segments: the number of segments, a static integer; required with ``segments``.

        Returns:
          The normalized array, of the shape of ``x``. With a residual it is that of the sum, and
          the sum is returned as well, as :func:`jaxnorm.add_norm` does.
        """
        if residual is not None:
            x, residual = summands(x, residual)
        features, reduced = module_axes(self, x.ndim)
        reduction = unsplit(x.shape, reduced)
        call = over(
            self, x, reduction, features, mask, segments=segments, num_segments=num_segments
        )
        return run(call) if residual is None else run_of_sum(call, residual)


class RMSNorm(nnx.RMSNorm):
    """Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467).

    ``y = x / sqrt(mean(x**2) + epsilon) * scale``. The mean is taken over ``reduction_axes``. The
    scale has the shape ``(num_features,)`` and applies along ``feature_axes``. A subclass of
    :class:`flax.nnx.RMSNorm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_scale: whether to multiply by a learned scale; True by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes along which the scale applies; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      promote_dtype: your own promotion rule (Flax 0.12.1 or newer), called with ``(x, scale)`` and
        ``dtype``. Flax's rule, the default, is not called: it would round ``x`` before its
        statistics are computed.
      rngs: random number generators for the initializers.
      scale_metadata: metadata of the ``nnx.Param`` that holds the scale; none by default.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default. With 1
        the gain is ``1 + scale``, as in Gemma, and the scale starts from zeros where ``scale_init``
        is not given.
      rounding: where half precision is rounded, ``"once"`` by default, ``"twice"`` or ``"input"``;
        see :func:`jaxnorm.rms_norm`.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.RMSNorm(2, rngs=Rngs(0))(jnp.array([[3.0, -3.0]])).round(3).tolist()
    [[1.0, -1.0]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        rngs: nnx.Rngs,
        scale_offset: float = 0,
        rounding: Rounding = "once",
        **options: Unpack[RMSOptions],
    ) -> None:
        """Take the arguments of :class:`flax.nnx.RMSNorm`, ``scale_offset`` and ``rounding``."""
        super().__init__(num_features, rngs=rngs, **_with_initial_scale(scale_offset, options))
        self.scale_offset, self.rounding = scale_offset, rounding

    # for modules that were pickled before these attributes existed
    scale_offset: float = 0
    rounding: Rounding = "once"

    # The installed Flax decides which other arguments the constructor takes.
    __init__.__signature__ = with_keywords_of(__init__, nnx.RMSNorm.__init__)  # type: ignore[attr-defined]

    @overload
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, *, residual: None = None
    ) -> jax.Array: ...

    @overload
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Normalize ``x``.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.
          residual: array of the shape of ``x`` that is added first, for example a residual stream.

        Returns:
          The normalized array, of the shape of ``x``. With a residual it is that of the sum, and
          the sum is returned as well, as :func:`jaxnorm.add_norm` does.
        """
        if residual is None:
            return run(over_axes(self, x, mask, centered=False))
        x, residual = summands(x, residual)
        return run_of_sum(over_axes(self, x, mask, centered=False), residual)


class PositionalNorm(nnx.LayerNorm):
    """Positional normalization (Li et al. 2019, arXiv 1907.04312), which also returns the Moments.

    ``y = (x - mean) / sqrt(var + epsilon)``, then times scale with ``use_scale`` and plus bias with
    ``use_bias``. The mean and variance of each position are computed over ``reduction_axes``, the
    channels. Scale and bias apply along ``feature_axes``; by default there are none.

    A call returns ``(y, moments)``. The formula
    ``z * jnp.sqrt(moments.var + epsilon) + moments.mean`` gives the output z of a later layer the
    moments of ``x``: the paper's moment shortcut.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      use_bias: whether to add a learned bias; False by default.
      use_scale: whether to multiply by a learned scale; False by default.

    It also takes the other arguments of :class:`LayerNorm`, with the meanings and
    defaults they have there: ``dtype``, ``param_dtype``, ``bias_init``,
    ``scale_init``, ``reduction_axes``, ``feature_axes``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``,
    ``bias_metadata``, ``scale_metadata`` and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> y, moments = nnx.PositionalNorm(2, rngs=Rngs(0))(jnp.array([[1.0, 3.0], [10.0, 30.0]]))
    >>> y.round(3).tolist(), moments.mean.tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]])
    """

    @takes_arguments_of(nnx.LayerNorm.__init__)
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        use_bias: bool = False,
        use_scale: bool = False,
        **options,
    ) -> None:
        super().__init__(
            num_features, epsilon=epsilon, use_bias=use_bias, use_scale=use_scale, **options
        )

    # what the installed Flax's LayerNorm takes
    __init__.__signature__ = with_keywords_of(__init__, nnx.LayerNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> tuple[jax.Array, Moments]:
        """Normalize ``x`` and return the Moments of each position.

        Args:
          x: the array to normalize; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``, and the Moments, whose reduced axes have size
          1.
        """
        return run_with_moments(over_axes(self, x, mask))
