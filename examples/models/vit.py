"""Vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) in Flax (linen).

model = ViT.of(json.loads(Path("config.json").read_text()))
like = jax.eval_shape(model.init, jax.random.key(0), images)
variables = jn.interop.load(like, "model.safetensors", framework="torch", names=OF_FILE)
logits = model.apply(variables, images)
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxnorm.linen import LayerNorm

# Names in files of checkpoints, and in the state dict of transformers 5, which renames what it
# reads and writes. Other names are those of the modules.
OF_FILE = {
    "layers_*": "vit.encoder.layer.*",
    "layers_*/attention/*": "vit.encoder.layer.*.attention.attention.*",
    "layers_*/attention/out": "vit.encoder.layer.*.attention.output.dense",
    "layers_*/mlp_fc1": "vit.encoder.layer.*.intermediate.dense",
    "layers_*/mlp_fc2": "vit.encoder.layer.*.output.dense",
}
OF_STATE_DICT = {
    f"layers_*/attention/{ours}": f"vit.layers.*.attention.{theirs}_proj"
    for ours, theirs in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()
}


class Embeddings(nn.Module):
    """Patches of images as vectors, after one more vector, each with its position."""

    features: int
    patch_size: int
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        patch, n = (self.patch_size, self.patch_size), self.features
        project = nn.Conv(
            n,
            patch,
            patch,
            "VALID",
            param_dtype=self.param_dtype,
            name="patch_embeddings_projection",
        )
        x = project(x).reshape(len(x), -1, n)
        draw = nn.initializers.normal(0.02)
        first = self.param("cls_token", draw, (1, 1, n), self.param_dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, n)), x], axis=1)
        return x + self.param("position_embeddings", draw, (1, *x.shape[1:]), self.param_dtype)


class Block(nn.Module):
    """Attention and an MLP, each after layer norm, with residuals."""

    num_heads: int
    hidden: int
    epsilon: float
    qkv_bias: bool
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(LayerNorm, epsilon=self.epsilon, param_dtype=self.param_dtype)
        dense = partial(nn.Dense, param_dtype=self.param_dtype)
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads,
            use_bias=self.qkv_bias,
            param_dtype=self.param_dtype,
            force_fp32_for_softmax=True,
            name="attention",
        )
        x = x + attention(norm(name="layernorm_before")(x))
        y = dense(self.hidden, name="mlp_fc1")(norm(name="layernorm_after")(x))
        y = nn.gelu(y, approximate=False)
        return x + dense(x.shape[-1], name="mlp_fc2")(y)


class ViT(nn.Module):
    """Images (batch, height, width, channels) to logits; they must have one dtype with the
    parameters.
    """

    num_classes: int = 1000
    num_layers: int = 12
    features: int = 768
    num_heads: int = 12
    hidden: int = 3072
    patch_size: int = 16
    epsilon: float = 1e-12
    qkv_bias: bool = True
    param_dtype: Any = jnp.float32

    @classmethod
    def of(cls, hf: Mapping[str, Any], **options: Any) -> "ViT":
        """Read a ``config.json``, or ``model.config.to_dict()`` of transformers."""
        return cls(
            len(hf["id2label"]),
            hf["num_hidden_layers"],
            hf["hidden_size"],
            hf["num_attention_heads"],
            hf["intermediate_size"],
            hf["patch_size"],
            hf["layer_norm_eps"],
            hf["qkv_bias"],
            **options,
        )

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.param_dtype
        x = Embeddings(self.features, self.patch_size, dtype, name="embeddings")(x)
        for i in range(self.num_layers):
            options = (self.num_heads, self.hidden, self.epsilon, self.qkv_bias, dtype)
            x = Block(*options, name=f"layers_{i}")(x)
        x = LayerNorm(epsilon=self.epsilon, param_dtype=dtype, name="layernorm")(x)
        return nn.Dense(self.num_classes, param_dtype=dtype, name="classifier")(x[:, 0])
