"""RMS norm with a gate."""

from dataclasses import field

import jax
from flax import linen as nn

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.rounding import Rounding
from jaxnorm.flax_common.arguments import across, inexact
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.linen.calls import inputs
from jaxnorm.norms.gated import Activation, gated_rms_norm

__all__ = ["GatedRMSNorm"]


# Flax has no gated norm. Its InstanceNorm has the fields that all norms share.
class GatedRMSNorm(nn.InstanceNorm):
    """RMS normalization with a gate (Dao & Gu 2024, arXiv 2405.21060).

    With ``gate_first=True``, as in Mamba 2, ``h = x * silu(gate)`` is normalized:
    ``y = h / sqrt(mean(h**2) + epsilon) * scale``. With ``gate_first=False``, as in Gated DeltaNet
    (Yang et al. 2024, arXiv 2412.06464) and Qwen3-Next, the gate comes last:
    ``y = x / sqrt(mean(x**2) + epsilon) * scale * silu(gate)``. The mean is taken over
    ``feature_axes``, or over each group of channels. See also :func:`jaxnorm.gated_rms_norm`.

    Attributes:
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias, before a gate that comes last; False by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes to reduce, which give scale and bias their shape; the last axis by
        default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Each device counts by its valid elements. Where no axis is bound, for example
        under sharded ``jit``, the name has no effect; where other axes are bound instead, it raises
        ``ValueError``.
      axis_index_groups: groups of indices along ``axis_name``, for example ``[[0, 1], [2, 3]]``.
        The devices of each group share statistics; by default all devices do.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: has no effect: statistics are always computed in float32 at least.
      gate_first: whether ``x`` is gated before it is normalized, or after; required.
      activation: ``"silu"`` by default, or ``"sigmoid"``.
      num_groups: the number of equal groups of neighbouring channels; 1 by default.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default.
      rounding: where half precision is rounded, ``"once"`` by default or ``"twice"``; see
        :func:`jaxnorm.gated_rms_norm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x, gate = jnp.array([[3.0, -3.0]]), jnp.array([[0.0, 0.0]])  # sigmoid(0) is 1/2
    >>> norm = nn.GatedRMSNorm(gate_first=False, activation="sigmoid")
    >>> norm.init_with_output(jax.random.key(0), x, gate)[0].round(3).tolist()
    [[0.5, -0.5]]
    """

    epsilon: float = 1e-6
    use_bias: bool = False
    gate_first: bool = field(kw_only=True)
    activation: Activation = field(default="silu", kw_only=True)
    num_groups: int = field(default=1, kw_only=True)
    scale_offset: float = field(default=0, kw_only=True)
    rounding: Rounding = field(default="once", kw_only=True)

    @known_keywords
    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, gate: jax.Array, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalize ``x`` with a gate.

        Args:
          x: the array to normalize; integers and booleans become floats.
          gate: real array of the shape of ``x``; integers and booleans become floats.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they or their gates are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = canonical_axes(self.feature_axes, x.ndim, "feature_axes")
        x, options = inputs(self, x, features, mask)
        return apply_norm(
            gated_rms_norm,
            x,
            inexact(gate, options["dtype"]),
            gate_first=self.gate_first,
            activation=self.activation,
            num_groups=self.num_groups,
            axes=features,
            scale_offset=self.scale_offset,
            rounding=self.rounding,
            axis_name=across(self),
            **options,
        )
