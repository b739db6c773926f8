"""Norms of the queries and keys of attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.rounding import Rounding
from jaxnorm.flax_common.attention import Kind, Over, check_kinds, checked_mask, over_heads
from jaxnorm.nnx.calls import check_features
from jaxnorm.nnx.layers import LayerNorm, RMSNorm

__all__ = ["QKNorm"]


class QKNorm(nnx.Module):
    """Normalization of queries and keys (Dehghani et al. 2023, arXiv 2302.05442).

    ``q, k = QKNorm(head_dim, rngs=rngs)(q, k)``. It bounds the logits of attention. The norms are
    the submodules ``q_norm`` and ``k_norm``, each an :class:`RMSNorm` or a :class:`LayerNorm`. Each
    position has statistics of its own. Models that normalize so:

    - Qwen3: the defaults, with ``rounding="twice"``; Gemma 3: with ``scale_offset=1``.
    - Llama 4: ``use_scale=False``. Its L2 norm divides by the root mean square.
    - OLMo 2: ``over="heads"``. It normalizes before it splits the heads, which is the same.
    - Cohere, StableLM: ``norm="layer", per_head_scale=True``; Chameleon: with ``use_bias=True``.
    - ViT-22B, and ``normalize_qk`` of Flax: ``norm="layer"``.

    Args:
      num_features: the number of features of each head.
      num_heads: the number of heads of the queries; required by ``per_head_scale`` and
        ``over="heads"``, whose parameters depend on it.
      num_kv_heads: the number of heads of the keys; ``num_heads`` by default.
      norm: ``"rms"`` by default, or ``"layer"``.
      over: ``"head"``, the default, for statistics of each head, or ``"heads"`` for statistics of
        all heads of a position together, with parameters of shape ``(num_heads * num_features,)``.
      per_head_scale: whether each head has a scale and a bias of its own. They are stored flat,
        with shape ``(num_heads * num_features,)``. By default all heads share those of shape
        ``(num_features,)``.
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
      rngs: random number generators for the initializers.

    In :class:`flax.nnx.MultiHeadAttention` these norms take the place of Flax's:

    >>> import jax.numpy as jnp
    >>> from flax import nnx as flax_nnx
    >>> from jaxnorm import nnx
    >>> rngs = flax_nnx.Rngs(0)
    >>> norms = nnx.QKNorm(2, rngs=rngs)
    >>> q, k = norms(jnp.array([[3.0, -3.0], [4.0, 4.0]]), jnp.array([[0.5, 0.5]]))  # 2 heads and 1
    >>> q.round(3).tolist(), k.round(3).tolist()
    ([[1.0, -1.0], [1.0, 1.0]], [[1.0, 1.0]])
    >>> attention = flax_nnx.MultiHeadAttention(
    ...     4, 8, normalize_qk=True, decode=False, rngs=rngs
    ... )
    >>> attention.query_ln, attention.key_ln = norms.q_norm, norms.k_norm
    """

    def __init__(
        self,
        num_features: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        norm: Kind = "rms",
        over: Over = "head",
        per_head_scale: bool = False,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        use_bias: bool = False,
        scale_init: Initializer = initializers.ones,
        bias_init: Initializer = initializers.zeros,
        scale_offset: float = 0,
        rounding: Rounding = "once",
        rngs: nnx.Rngs,
    ) -> None:
        self.num_features = num_features
        self.norm, self.over, self.per_head_scale = norm, over, per_head_scale
        self.use_bias = use_bias
        check_kinds(self)
        if num_heads is None and (per_head_scale or over == "heads"):
            raise ValueError(
                "num_heads must be given with per_head_scale or over='heads', whose parameters "
                "depend on it: got None."
            )
        options: dict[str, Any] = {
            "epsilon": epsilon,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "use_scale": use_scale,
            "scale_init": scale_init,
            "feature_axes": (-2, -1) if per_head_scale else -1,
            "scale_offset": scale_offset,
            "rounding": rounding,
            "rngs": rngs,
        }

        def made(heads: int | None) -> RMSNorm | LayerNorm:
            size = num_features * (1 if heads is None else heads)
            if norm == "rms":
                return RMSNorm(size, **options)
            return LayerNorm(size, use_bias=use_bias, bias_init=bias_init, **options)

        several = per_head_scale or over == "heads"
        self.q_norm = made(num_heads if several else None)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.k_norm = made(kv_heads if several else None)

    @known_keywords
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
          ValueError: arrays or masks that do not fit.
        """
        q_mask = checked_mask("q", q, mask, None)
        k_mask = checked_mask("k", k, mask, k_mask)
        return self._normalized("q", q, q_mask), self._normalized("k", k, k_mask)

    def _normalized(self, name: str, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        norm = self.q_norm if name == "q" else self.k_norm
        if norm.scale is not None:
            sizes = x.shape[-1:] if norm.scale.size == self.num_features else x.shape[-2:]
            check_features(self, x, sizes, norm.scale, name=name)
        return over_heads(norm, x, mask) if self.over == "heads" else norm(x, mask=mask)
