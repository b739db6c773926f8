"""Norms of the queries and keys of attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.rounding import Rounding
from jaxnorm.flax_common.attention import Kind, Over, check_kinds, checked_mask, over_heads
from jaxnorm.linen.layers import LayerNorm, RMSNorm

__all__ = ["QKNorm"]


class QKNorm(nn.Module):
    """Normalization of queries and keys (Dehghani et al. 2023, arXiv 2302.05442).

    ``q, k = QKNorm()(q, k)``. It bounds the logits of attention. The norms are the
    submodules ``q_norm`` and ``k_norm``, each an :class:`RMSNorm` or a :class:`LayerNorm`. Each
    position has statistics of its own. Models that normalize so:

    - Qwen3: the defaults, with ``rounding="twice"``; Gemma 3: with ``scale_offset=1``.
    - Llama 4: ``use_scale=False``. Its L2 norm divides by the root mean square.
    - OLMo 2: ``over="heads"``. It normalizes before it splits the heads, which is the same.
    - Cohere, StableLM: ``norm="layer", per_head_scale=True``; Chameleon: with ``use_bias=True``.
    - ViT-22B, and ``normalize_qk`` of Flax: ``norm="layer"``.

    Attributes:
      norm: ``"rms"`` by default, or ``"layer"``.
      over: ``"head"``, the default, for statistics of each head, or ``"heads"`` for statistics of
        all heads of a position together.
      per_head_scale: whether each head has a scale and a bias of its own, of shape
        ``(heads, head_dim)``; False by default: all heads share those of shape ``(head_dim,)``.
        With ``over="heads"`` the shape is ``(heads * head_dim,)``.
      epsilon: added to the mean square or variance, inside the root; 1e-6 by default.
      dtype: dtype of the outputs; by default the dtype to which each input and its parameters
        promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_scale: whether to multiply by a learned scale; True by default.
      use_bias: whether layer norm adds a learned bias; False by default.
      scale_init: initializer of the scale; ones by default.
      bias_init: initializer of the bias; zeros by default.
      scale_offset: a number that is added to the scale, in float32 at least; 0 by default.
      rounding: where half precision is rounded, ``"once"`` by default or ``"twice"``; see
        :func:`jaxnorm.rms_norm`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> q, k = jnp.array([[3.0, -3.0], [4.0, 4.0]]), jnp.array([[0.5, 0.5]])  # 2 heads and 1
    >>> (q, k), variables = nn.QKNorm().init_with_output(jax.random.key(0), q, k)
    >>> q.round(3).tolist(), k.round(3).tolist(), sorted(variables["params"])
    ([[1.0, -1.0], [1.0, 1.0]], [[1.0, 1.0]], ['k_norm', 'q_norm'])
    """

    norm: Kind = "rms"
    over: Over = "head"
    per_head_scale: bool = False
    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_scale: bool = True
    use_bias: bool = False
    scale_init: Initializer = initializers.ones
    bias_init: Initializer = initializers.zeros
    scale_offset: float = 0
    rounding: Rounding = "once"

    @known_keywords
    @nn.compact
    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        *,
        mask: jax.Array | None = None,
        k_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Normalize queries and keys.

        Args:
          q: queries ``(..., length, heads, head_dim)``; integers and booleans become floats.
          k: keys, likewise. They may have another length and other heads.
          mask: boolean mask or float weights that broadcast against ``q``, such as
            ``(..., length, 1, 1)`` for padding. Elements where it is 0 do not count, even if they
            are NaN, and their outputs are 0.
          k_mask: the mask of ``k``, by default ``mask``.

        Returns:
          The normalized queries and keys, of the shapes of ``q`` and ``k``.

        Raises:
          ValueError: an unknown norm; arrays, masks or parameters that do not fit.
        """
        check_kinds(self)
        q_mask = checked_mask("q", q, mask, None)
        k_mask = checked_mask("k", k, mask, k_mask)
        return self._normalized("q", q, q_mask), self._normalized("k", k, k_mask)

    def _normalized(self, name: str, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = {
            "epsilon": self.epsilon,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "use_scale": self.use_scale,
            "scale_init": self.scale_init,
            "feature_axes": (-2, -1) if self.per_head_scale else -1,
            "scale_offset": self.scale_offset,
            "rounding": self.rounding,
            "name": f"{name}_norm",
        }
        made = (
            LayerNorm(use_bias=self.use_bias, bias_init=self.bias_init, **options)
            if self.norm == "layer"
            else RMSNorm(**options)
        )
        return over_heads(made, x, mask) if self.over == "heads" else made(x, mask=mask)
