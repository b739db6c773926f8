"""Llama, Qwen 3, Gemma 2 and 3, and OLMo 2 by one class of Flax (nnx), each with its own norms.

    config = Config.of(json.loads(Path("config.json").read_text()))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    jn.interop.load(model, "model.safetensors", framework="torch", names=config.names)
    logits = model(tokens)

Modules have the names that the checkpoints give them. Llama 3's frequencies are scaled as its
config says. There is no cache of keys and values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.models.attention import Attention, softcapped
from jaxnorm.nnx import RMSNorm

Names = tuple[str | None, str | None, str | None, str | None]
BEFORE: Names = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Names = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Names = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# a list of modules; before Flax 0.12 any list held modules
List = getattr(nnx, "List", list)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu_pytorch_tanh": nnx.gelu,
}


@dataclass(frozen=True)
class Family:
    """What a family of models does in its own way.

    Attributes:
      norm: options of its RMS norms: where they round, and what is added to the scale.
      places: names of the norms before and after attention, before and after the MLP.
      qk_norm: further options of the norm of queries and keys; None for no such norm.
      scaled: whether embeddings are multiplied by the square root of the features.
      tied: whether the head is the transposed embedding, unless a config says otherwise.
      epsilon: of the norms, likewise.
      rope_dtype: in which positions are rotated; the parameters' dtype by default.
    """

    norm: Mapping[str, Any] = field(default_factory=dict)
    places: Names = BEFORE
    qk_norm: Mapping[str, Any] | None = None
    scaled: bool = False
    tied: bool = False
    epsilon: float = 1e-6
    rope_dtype: Any = None


GEMMA: dict[str, Any] = {
    "norm": {"scale_offset": 1},
    "places": AROUND,
    "scaled": True,
    "tied": True,
}
FAMILIES = {
    "llama": Family({"rounding": "twice"}),
    "qwen3": Family({"rounding": "twice"}, qk_norm={}),
    "gemma2": Family(**GEMMA),
    "gemma3_text": Family(**GEMMA, qk_norm={}),
    "olmo2": Family({}, AFTER, {"over": "heads"}, epsilon=1e-5, rope_dtype=jnp.float32),
}


@dataclass(frozen=True)
class Config:
    """The sizes of a model; ``layers`` has the window (or None) and the rope of each layer."""

    family: Family
    vocabulary: int
    features: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[tuple[int | None, Mapping[str, Any]], ...]
    epsilon: float
    query_scale: float
    activation: str
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    attention_softcap: float | None
    logit_softcap: float | None

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> "Config":
        """Read a ``config.json``, or ``model.config.to_dict()`` of transformers.

        Raises:
          ValueError: a kind of model that is not in FAMILIES.
        """
        if hf.get("model_type") not in FAMILIES:
            raise ValueError(
                f"model_type must be one of {', '.join(FAMILIES)}: got {hf.get('model_type')!r}."
            )
        given = {name: value for name, value in hf.items() if value is not None}
        family, heads = FAMILIES[hf["model_type"]], hf["num_attention_heads"]
        head_dim = given.get("head_dim", hf["hidden_size"] // heads)
        return cls(
            family=family,
            vocabulary=hf["vocab_size"],
            features=hf["hidden_size"],
            hidden=hf["intermediate_size"],
            num_heads=heads,
            num_kv_heads=given.get("num_key_value_heads", heads),
            head_dim=head_dim,
            layers=tuple(_layers(given)),
            epsilon=given.get("rms_norm_eps", family.epsilon),
            query_scale=given.get("query_pre_attn_scalar", head_dim) ** -0.5,
            activation=given.get("hidden_activation", given.get("hidden_act", "silu")),
            attention_bias=given.get("attention_bias", False),
            mlp_bias=given.get("mlp_bias", False),
            tied=given.get("tie_word_embeddings", family.tied),
            # Gemma 3 has the option, and no model that uses it: transformers does not read it
            attention_softcap=given.get("attn_logit_softcapping")
            if hf["model_type"] == "gemma2"
            else None,
            logit_softcap=given.get("final_logit_softcapping"),
        )

    @property
    def names(self) -> dict[str, str]:
        """The names of a checkpoint that are not those of the modules."""
        return {"layers/*/self_attn/norms": "model.layers.*.self_attn"} if self.qk_norm else {}

    @property
    def qk_norm(self) -> dict[str, Any] | None:
        """All options of the norm of queries and keys."""
        own = self.family.qk_norm
        return None if own is None else {"epsilon": self.epsilon, **self.family.norm, **own}


def _layers(given: Mapping[str, Any]) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
    """Yield the window and the rope of each layer, by a config of whatever age."""
    kind, window = given["model_type"], given.get("sliding_window")
    every = {"gemma2": 2, "gemma3_text": given.get("sliding_window_pattern", 6)}.get(kind)
    first = given.get("max_window_layers", 0) if given.get("use_sliding_window") else None
    theta = given.get("rope_theta", 1_000_000 if kind == "gemma3_text" else 10_000)
    ropes = given.get("rope_parameters", {"rope_theta": theta, **given.get("rope_scaling", {})})
    if kind == "gemma3_text" and "full_attention" not in ropes:
        local = {"rope_theta": given.get("rope_local_base_freq", 10_000)}
        ropes = {"full_attention": ropes, "sliding_attention": local}
    for i in range(given["num_hidden_layers"]):
        slides = bool((i + 1) % every) if every else first is not None and i >= first
        layer = "sliding_attention" if slides else "full_attention"
        layer = given["layer_types"][i] if "layer_types" in given else layer
        yield window if layer == "sliding_attention" else None, ropes.get(layer, ropes)


class MLP(nnx.Module):
    """A gated network of two layers: ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"use_bias": config.mlp_bias, "param_dtype": dtype, "rngs": rngs}
        self.gate_proj = nnx.Linear(config.features, config.hidden, **options)
        self.up_proj = nnx.Linear(config.features, config.hidden, **options)
        self.down_proj = nnx.Linear(config.hidden, config.features, **options)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and MLP, each with a norm before or after it, or both, and a residual."""

    def __init__(self, config: Config, index: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        window, rope = config.layers[index]
        self.self_attn = Attention(
            config.features,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.query_scale,
            rope=rope,
            window=window,
            softcap=config.attention_softcap,
            use_bias=config.attention_bias,
            rope_dtype=config.family.rope_dtype,
            qk_norm=config.qk_norm,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.places = config.family.places
        for name in filter(None, self.places):
            setattr(self, name, norm(config, dtype=dtype, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        before, after, before_mlp, after_mlp = (
            getattr(self, name) if name else lambda x: x for name in self.places
        )
        x = x + after(self.self_attn(before(x)))
        return x + after_mlp(self.mlp(before_mlp(x)))


def norm(config: Config, *, dtype: Any, rngs: nnx.Rngs) -> RMSNorm:
    """Return a norm of all features as the family has it."""
    return RMSNorm(
        config.features, epsilon=config.epsilon, param_dtype=dtype, rngs=rngs, **config.family.norm
    )


class Decoder(nnx.Module):
    """A language model: token numbers (batch, length) to logits (batch, length, vocabulary).

    ``dtype`` is that of the parameters and of all activations.
    """

    def __init__(self, config: Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(
            config.vocabulary, config.features, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = List(
            [Block(config, i, dtype=dtype, rngs=rngs) for i in range(len(config.layers))]
        )
        self.norm = norm(config, dtype=dtype, rngs=rngs)
        if not config.tied:
            self.lm_head = nnx.Linear(
                config.features, config.vocabulary, use_bias=False, param_dtype=dtype, rngs=rngs
            )
        self.config = config

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        if self.config.family.scaled:
            x = x * jnp.asarray(self.config.features**0.5, x.dtype)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.embed_tokens.attend(x) if self.config.tied else self.lm_head(x)
        return softcapped(logits, self.config.logit_softcap)
