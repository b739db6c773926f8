"""Norms of each position over its features: layer, RMS and positional norm."""

from dataclasses import field
from typing import overload

import jax
from flax import linen as nn

from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.arguments.validation import summands
from jaxnorm.core.call import run, run_of_sum, run_with_moments
from jaxnorm.core.rounding import Rounding
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import module_axes
from jaxnorm.linen.calls import over, over_axes

__all__ = ["LayerNorm", "PositionalNorm", "RMSNorm"]


class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Mean and variance are computed over
    ``reduction_axes``. Scale and bias have the shape of ``feature_axes``. A subclass of
    :class:`flax.linen.LayerNorm`.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes that give scale and bias their shape; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default. With 1
        the gain is ``1 + scale``, as in Gemma, and the scale starts from zeros where ``scale_init``
        is not given.
      rounding: where half precision is rounded, ``"once"`` by default, ``"twice"`` or ``"input"``;
        see :func:`jaxnorm.rms_norm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> y, variables = nn.LayerNorm().init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))
    >>> y.round(3).tolist(), sorted(variables["params"])
    ([[-1.0, 1.0]], ['bias', 'scale'])
    """

    # only by keyword, so that the positional fields are Flax's
    scale_offset: float = field(default=0, kw_only=True)
    rounding: Rounding = field(default="once", kw_only=True)

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
    @nn.compact
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


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467).

    ``y = x / sqrt(mean(x**2) + epsilon) * scale``. The mean is taken over ``reduction_axes``. The
    scale has the shape of ``feature_axes``. A subclass of :class:`flax.linen.RMSNorm`.

    Attributes:
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_scale: whether to multiply by a learned scale; True by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes that give the scale its shape; the last axis by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default. With 1
        the gain is ``1 + scale``, as in Gemma, and the scale starts from zeros where ``scale_init``
        is not given.
      rounding: where half precision is rounded, ``"once"`` by default, ``"twice"`` or ``"input"``;
        see :func:`jaxnorm.rms_norm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> y, _ = nn.RMSNorm().init_with_output(jax.random.key(0), jnp.array([[3.0, -3.0]]))
    >>> y.round(3).tolist()
    [[1.0, -1.0]]
    """

    # only by keyword, so that the positional fields are Flax's
    scale_offset: float = field(default=0, kw_only=True)
    rounding: Rounding = field(default="once", kw_only=True)

    @overload
    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, residual: None = None
    ) -> jax.Array: ...

    @overload
    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...

    @known_keywords
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
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


class PositionalNorm(nn.LayerNorm):
    """Positional normalization (Li et al. 2019, arXiv 1907.04312), which also returns the Moments.

    ``y = (x - mean) / sqrt(var + epsilon)``, then times scale with ``use_scale`` and plus bias with
    ``use_bias``. The mean and variance of each position are computed over ``reduction_axes``, the
    channels. Scale and bias have the shape of ``feature_axes``; by default there are none.

    A call returns ``(y, moments)``. The formula
    ``z * jnp.sqrt(moments.var + epsilon) + moments.mean`` gives the output z of a later layer the
    moments of ``x``: the paper's moment shortcut.

    Attributes:
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; False by default.
      use_scale: whether to multiply by a learned scale; False by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      reduction_axes: the axes to reduce; the last axis by default.
      feature_axes: the axes that give scale and bias their shape; the last axis by default.
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
    >>> y, moments = nn.PositionalNorm().apply({}, jnp.array([[1.0, 3.0], [10.0, 30.0]]))
    >>> y.round(3).tolist(), moments.mean.tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]])
    """

    epsilon: float = 1e-5
    use_bias: bool = False
    use_scale: bool = False

    @known_keywords
    @nn.compact
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
