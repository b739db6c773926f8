"""Attention of language models: grouped keys and values, rotary positions, a sliding window."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxnorm.nnx import QKNorm


def frequencies(head_dim: int, rope: Mapping[str, Any]) -> jax.Array:
    """Return the angles per position of the pairs of features (Su et al. 2021, arXiv 2104.09864).

    Args:
      head_dim: the features of a head.
      rope: ``rope_theta``, and what ``rope_type`` needs: "default", "linear", or "llama3", which
        slows down the waves that are longer than the context of the first training.
    """
    found = float(rope["rope_theta"]) ** -(np.arange(0, head_dim, 2) / head_dim)
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            pass
        case "linear":
            found = found / rope["factor"]
        case "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            waves = rope["original_max_position_embeddings"] * found / (2 * math.pi)
            kept = np.clip((waves - low) / (high - low), 0, 1)
            found = found * (kept + (1 - kept) / rope["factor"])
        case other:
            raise ValueError(f"rope_type must be default, linear or llama3: got {other!r}.")
    return jnp.asarray(found, jnp.float32)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs of features of ``x`` (batch, length, heads, head_dim) by their angles."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def causal_mask(length: int, window: int | None = None) -> jax.Array:
    """Return which positions (rows) see which: the last ``window`` up to their own."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    return (distance >= 0) & (distance < (window or length))


def softcapped(x: jax.Array, cap: float | None) -> jax.Array:
    """Bound ``x`` smoothly by ``cap``: ``cap * tanh(x / cap)``."""
    return x if cap is None else jnp.tanh(x / cap) * cap


class Attention(nnx.Module):
    """Causal attention with rotary positions, whose keys and values may serve several heads.

    Args:
      features: of the input and output.
      num_heads, num_kv_heads, head_dim: sizes of the heads.
      scale: of the products of queries and keys.
      rope: see :func:`frequencies`.
      window: how many positions are seen; None for all.
      softcap: bound of the products; None for none.
      use_bias: of the projections.
      rope_dtype: in which the rotation is computed; the dtype of the input by default.
      qk_norm: options of :class:`jaxnorm.nnx.QKNorm`, or None for no norm.
      dtype: of the parameters.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float,
        rope: Mapping[str, Any],
        window: int | None = None,
        softcap: float | None = None,
        use_bias: bool = False,
        rope_dtype: Any = None,
        qk_norm: Mapping[str, Any] | None = None,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        def linear(n: int, m: int) -> nnx.Linear:
            return nnx.Linear(n, m, use_bias=use_bias, param_dtype=dtype, rngs=rngs)

        self.q_proj = linear(features, num_heads * head_dim)
        self.k_proj = linear(features, num_kv_heads * head_dim)
        self.v_proj = linear(features, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, features)
        self.norms = qk_norm and QKNorm(
            head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            param_dtype=dtype,
            rngs=rngs,
            **qk_norm,
        )
        self.head_dim, self.repeats, self.scale = head_dim, num_heads // num_kv_heads, scale
        self.window, self.softcap, self.rope_dtype = window, softcap, rope_dtype
        self.rope = dict(rope)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, length, features) to the same shape."""
        length = x.shape[1]
        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.norms is not None:
            q, k = self.norms(q, k)
        angles = jnp.arange(length)[:, None, None] * frequencies(self.head_dim, self.rope)
        cos, sin = (f(angles).astype(self.rope_dtype or x.dtype) for f in (jnp.cos, jnp.sin))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (jnp.repeat(heads, self.repeats, axis=2) for heads in (k, v))
        scores = softcapped(jnp.einsum("blhd,bmhd->bhlm", q, k) * self.scale, self.softcap)
        scores = jnp.where(causal_mask(length, self.window), scores, -jnp.inf)
        # in float32, whatever the rest is in
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        return self.o_proj(jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(*x.shape[:2], -1))
