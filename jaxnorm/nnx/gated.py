"""RMS norm with a gate."""

import jax
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments.axes import canonical_axes
from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.core.rounding import Rounding
from jaxnorm.flax_common.arguments import across, inexact, initial_scale
from jaxnorm.flax_common.calls import apply_norm
from jaxnorm.nnx import flax_versions
from jaxnorm.nnx.calls import inputs
from jaxnorm.norms.gated import Activation, gated_rms_norm

__all__ = ["GatedRMSNorm"]


# Flax has no gated norm. The constructor of its InstanceNorm makes scale and bias.
class GatedRMSNorm(flax_versions.InstanceNorm):
    """RMS normalization with a gate (Dao & Gu 2024, arXiv 2405.21060).

    With ``gate_first=True``, as in Mamba 2, ``h = x * silu(gate)`` is normalized:
    ``y = h / sqrt(mean(h**2) + epsilon) * scale``. With ``gate_first=False``, as in Gated DeltaNet
    (Yang et al. 2024, arXiv 2412.06464) and Qwen3-Next, the gate comes last:
    ``y = x / sqrt(mean(x**2) + epsilon) * scale * silu(gate)``. The mean is taken over
    ``feature_axes``, or over each group of channels. See also :func:`jaxnorm.gated_rms_norm`.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      gate_first: whether ``x`` is gated before it is normalized, or after; required.
      activation: ``"silu"`` by default, or ``"sigmoid"``.
      num_groups: the number of equal groups of neighbouring channels; 1 by default.
      epsilon: added to the mean square, inside the root; 1e-6 by default.
      use_bias: whether to add a learned bias, before a gate that comes last; False by default.
      scale_init: initializer of the scale; ones by default.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default.
      rounding: where half precision is rounded, ``"once"`` by default or ``"twice"``; see
        :func:`jaxnorm.gated_rms_norm`.

    It also takes the other arguments of :class:`InstanceNorm`, with the meanings
    and defaults they have there: ``dtype``, ``param_dtype``, ``use_scale``,
    ``bias_init``, ``feature_axes``, ``axis_name``, ``axis_index_groups``,
    ``use_fast_variance``, ``promote_dtype``, ``bias_metadata``, ``scale_metadata``
    and ``rngs``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> x, gate = jnp.array([[3.0, -3.0]]), jnp.array([[0.0, 0.0]])  # sigmoid(0) is 1/2
    >>> norm = nnx.GatedRMSNorm(2, gate_first=False, activation="sigmoid", rngs=Rngs(0))
    >>> norm(x, gate).round(3).tolist()
    [[0.5, -0.5]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        gate_first: bool,
        activation: Activation = "silu",
        num_groups: int = 1,
        epsilon: float = 1e-6,
        use_bias: bool = False,
        scale_init: Initializer = initializers.ones,
        scale_offset: float = 0,
        rounding: Rounding = "once",
        **options,
    ):
        scale_init = initial_scale(scale_init, scale_offset)
        super().__init__(
            num_features, epsilon=epsilon, use_bias=use_bias, scale_init=scale_init, **options
        )
        self.gate_first, self.activation, self.num_groups = gate_first, activation, num_groups
        self.scale_offset, self.rounding = scale_offset, rounding

    # InstanceNorm's constructor takes what LayerNorm's takes, in every version of Flax, but these.
    __init__.__signature__ = with_keywords_of(  # type: ignore[attr-defined]
        __init__, nnx.LayerNorm.__init__, without="reduction_axes"
    )

    @known_keywords
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
        x, options, _ = inputs(self, x, features, mask)
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
