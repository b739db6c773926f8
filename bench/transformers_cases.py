"""Make models of transformers with random weights, and load the weights into ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import getsource
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxnorm as jn
from examples.models.decoder import Config, Decoder
from examples.models.resnet import ResNet
from examples.models.vit import OF_STATE_DICT, ViT

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12))
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = {
    **SIZES,
    "head_dim": 16,
    "sliding_window": 4,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 3.0,
}
IMAGES: dict[str, Any] = {"num_labels": 7, "attn_implementation": "eager"}


# The lines of the first three functions are what a user writes.


def load_decoder(hf: Any, inputs: np.ndarray, dtype: Any) -> tuple:
    config = Config.of(hf.config.to_dict())
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    jn.interop.load(model, hf.state_dict(), framework="torch", names=config.names)
    return model, None, (model, config.names)


def load_vit(hf: Any, inputs: np.ndarray, dtype: Any) -> tuple:
    model = ViT.of(hf.config.to_dict(), param_dtype=dtype)
    like = jax.eval_shape(model.init, jax.random.key(0), inputs)
    found = jn.interop.load(like, hf.state_dict(), framework="torch", names=OF_STATE_DICT)
    return model, found, (like, OF_STATE_DICT)


def load_resnet(hf: Any, inputs: np.ndarray, dtype: Any) -> tuple:
    model = ResNet.of(hf.config.to_dict(), param_dtype=dtype)
    like = jax.eval_shape(model.init, jax.random.key(0), inputs)
    found = jn.interop.load(like, hf.state_dict(), framework="torch", show=False)
    return model, found, (like, None)


@dataclass(frozen=True)
class Case:
    """A model of transformers: its classes, the options of its config, and our way to load it."""

    config: str
    model: str
    options: Mapping[str, Any]
    load: Callable[[Any, np.ndarray, Any], tuple]
    image: int = 0

    def inputs(self) -> np.ndarray:
        """Return token numbers, or images with channels last."""
        shape = (2, self.image, self.image, 3)
        drawn = np.random.default_rng(0).standard_normal(shape, np.float32)
        return drawn if self.image else TOKENS

    def lines(self) -> int:
        """Return how many lines of a user's load the weights."""
        return len(getsource(self.load).rstrip().splitlines()) - 2


RESNET: dict[str, Any] = {"layer_type": "basic"}
CASES = {
    "Llama 3": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**SIZES, "head_dim": 16, "rope_parameters": LLAMA3},
        load_decoder,
    ),
    "Qwen 3": Case(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            **SIZES,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        load_decoder,
    ),
    "Gemma 2": Case(
        "Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0}, load_decoder
    ),
    "Gemma 3": Case(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": LOCAL,
            },
        },
        load_decoder,
    ),
    "OLMo 2": Case("Olmo2Config", "Olmo2ForCausalLM", SIZES, load_decoder),
    "ViT": Case(
        "ViTConfig",
        "ViTForImageClassification",
        {
            **IMAGES,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 4,
        },
        load_vit,
        16,
    ),
    "ResNet, tiny": Case(
        "ResNetConfig",
        "ResNetForImageClassification",
        {"num_labels": 7, **RESNET, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
        load_resnet,
        32,
    ),
    "ResNet-18": Case(
        "ResNetConfig",
        "ResNetForImageClassification",
        {
            **RESNET,
            "num_labels": 1000,
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
        },
        load_resnet,
        64,
    ),
}


@cache
def transformers() -> ModuleType:
    import transformers

    return transformers


def theirs(case: Case, dtype: str = "float32") -> Any:
    """Return the model of transformers with random weights, which are the same in each dtype."""
    import torch

    config = getattr(transformers(), case.config)(**case.options)
    model = getattr(transformers(), case.model)._from_config(config, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + drawn.abs())
            elif tensor.ndim == 1:  # of norms, and biases
                tensor.add_(0.3 * drawn)
            elif tensor.ndim:
                tensor.copy_(drawn * tensor[0].numel() ** -0.5)
    return model.eval()
