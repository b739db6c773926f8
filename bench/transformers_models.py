"""Compare models of transformers with models in Flax that have their weights.

    python -m bench.transformers_models

writes bench/results/transformers.json and transformers.md. The models are those of examples/models,
with random weights. In bfloat16 every norm gets the input of the norm that it stands for, so that
what differs is its own; logits are compared with those of transformers, and both with float32 on
the same weights.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxnorm as jn
from bench.stamp import commit
from examples.models.decoder import Config, Decoder
from examples.models.resnet import ResNet
from examples.models.vit import OF_STATE_DICT, ViT
from jaxnorm.experiments.report import machine
from jaxnorm.interop.files import as_numpy

RESULTS = Path(__file__).parent / "results"
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


class Loaded(NamedTuple):
    """A model in Flax with weights: what it computes, and where its norms are."""

    model: Any
    variables: Any
    matching: jn.interop.Matching


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


def logits_of(model: Any, inputs: np.ndarray) -> np.ndarray:
    """Return the logits of a model of transformers in float32."""
    import torch

    given = torch.tensor(np.moveaxis(inputs, -1, 1) if inputs.ndim == 4 else inputs)
    with torch.no_grad():
        return model(given.to(model.dtype) if inputs.ndim == 4 else given).logits.float().numpy()


def ours(case: Case, hf: Any, inputs: np.ndarray) -> Loaded:
    """Return our model with the weights of one of transformers, in their dtype."""
    dtype = str(hf.dtype).removeprefix("torch.")
    model, variables, (like, names) = case.load(hf, jnp.asarray(inputs, dtype), dtype)
    matching = jn.interop.match(like, hf.state_dict(), framework="torch", names=names)
    return Loaded(model, variables, matching)


def computed(loaded: Loaded, inputs: Any) -> np.ndarray:
    """Return the logits of our model in float32."""
    if loaded.variables is None:
        found = nnx.jit(lambda model, given: model(given))(loaded.model, jnp.asarray(inputs))
    else:
        dtype = jax.tree.leaves(loaded.variables)[0].dtype
        found = jax.jit(loaded.model.apply)(loaded.variables, jnp.asarray(inputs, dtype))
    return np.asarray(found, np.float32)


def largest(found: np.ndarray, true: np.ndarray) -> float:
    """Return the largest difference, as a part of the largest logit."""
    return float(np.abs(found - true).max() / np.abs(true).max())


def recorded(model: Any, inputs: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return input and output of each norm of a model of transformers, channels last."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def last(tensor: Any) -> np.ndarray:
        array = as_numpy(tensor)
        return np.moveaxis(array, 1, -1) if inputs.ndim == array.ndim == 4 else array

    for name, module in model.named_modules():
        if re.search("Norm", type(module).__name__):
            module.register_forward_hook(
                # a copy: residuals are added in place
                lambda _, given, y, name=name: found.update(
                    {name: (last(given[0]), last(y.clone()))}
                )
            )
    logits_of(model, inputs)
    return found


def normalized(loaded: Loaded, given: Mapping[tuple, np.ndarray], inputs: Any) -> dict:
    """Return what our norms make of the given inputs, by their paths."""
    if loaded.variables is None:
        found = {}
        for path, x in given.items():
            module = loaded.model
            for name in path:
                module = module[int(name)] if name.isdigit() else getattr(module, name)
            found[path] = module(jnp.asarray(x))
        return found
    found = {}

    def intercept(call: Any, arguments: tuple, options: dict, context: Any) -> Any:
        path = tuple("/".join(context.module.path).split("/"))
        if path not in given:
            return call(*arguments, **options)
        found[path] = call(jnp.asarray(given[path]), **options)
        return found[path]

    with nn.intercept_methods(intercept):
        loaded.model.apply(loaded.variables, jnp.asarray(inputs, next(iter(given.values())).dtype))
    return found


def norm_bits(loaded: Loaded, hf: Any, inputs: np.ndarray) -> tuple[int, int, int]:
    """Return how many norms, elements of their outputs, and elements with other bits there are.

    Raises:
      AssertionError: outputs that differ by more than their last bit.
    """
    both = recorded(hf, inputs)
    pairs = {
        pair.ours.path: ".".join(pair.theirs.path)
        for pair in loaded.matching.pairs
        if pair.fit.ours.kind == "norm"
    }
    given = {path: both[name][0] for path, name in pairs.items()}
    made = normalized(loaded, given, inputs)
    different = elements = 0
    for path, name in pairs.items():
        mine, true = np.asarray(made[path]), both[name][1]
        assert mine.shape == true.shape, (path, mine.shape, true.shape)
        assert mine.dtype == true.dtype, (path, mine.dtype, true.dtype)
        steps = np.abs(mine.view(np.int16).astype(int) - true.view(np.int16))
        assert steps.max() <= 1, (path, steps.max())
        different += int(steps.sum())
        elements += true.size
    return len(pairs), elements, different


def measure(name: str) -> dict[str, Any]:
    """Return all that is compared of one model."""
    case = CASES[name]
    inputs = case.inputs()
    full, half = theirs(case), theirs(case, "bfloat16")
    loaded = ours(case, full, inputs)
    row = {
        "model": name,
        "layers": len(loaded.matching.pairs),
        "found": sorted({re.sub(r" of \d+", "", pair.by) for pair in loaded.matching.pairs}),
        "lines": case.lines(),
        "float32": largest(computed(loaded, inputs), logits_of(full, inputs)),
    }
    loaded = ours(case, half, inputs)
    row["norms"], row["elements"], row["different"] = norm_bits(loaded, half, inputs)
    mine, true = computed(loaded, inputs), logits_of(half, inputs)
    rounded = np.asarray(jnp.asarray(inputs, jnp.bfloat16), np.float32) if case.image else inputs
    exact = logits_of(half.float(), rounded)
    return row | {
        "bfloat16": largest(mine, true),
        "ours to float32": largest(mine, exact),
        "theirs to float32": largest(true, exact),
    }


def page(rows: list[dict[str, Any]], facts: Mapping[str, str]) -> str:
    """Return the results as a page."""
    head = (
        "model | layers, found by | lines | float32 logits | elements of norms in bfloat16, with "
        "other bits | bfloat16 logits | ours to float32 | theirs to float32"
    )
    lines = [f"| {head} |", "|---" * 8 + "|"]
    for row in rows:
        cells = [
            row["model"],
            f"{row['layers']}, {', '.join(row['found'])}",
            str(row["lines"]),
            f"{row['float32']:.1e}",
            f"{row['elements']:,} in {row['norms']} norms, {row['different']}",
            *(f"{row[name]:.1e}" for name in ("bfloat16", "ours to float32", "theirs to float32")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            "# Models of transformers in Flax, with their weights",
            "",
            f"`python -m bench.transformers_models`: {', '.join(facts.values())}. Random weights,",
            "small sizes, and the sizes of ResNet-18. Differences are parts of the largest logit;",
            "the last three columns are of bfloat16, of which the smallest step is 3.9e-3 to",
            "7.8e-3 of a number. Each norm is given the input of transformers' norm; logits differ",
            "by the order of sums in matrix products, and by what XLA keeps in float32 between",
            "operations.",
            "",
            *lines,
            "",
        ]
    )


def main() -> None:
    rows = []
    for name in CASES:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    facts = {
        "machine": machine(),
        **{name: f"{name} {version(name)}" for name in ("jax", "flax", "torch", "transformers")},
        "commit": f"commit {commit()}",
    }
    found = {**facts, "rows": rows}
    (RESULTS / "transformers.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "transformers.md").write_text(page(rows, facts))


if __name__ == "__main__":
    main()
