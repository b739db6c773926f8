"""The models of Flax's own examples, with Flax's norms and with ours, by jaxnorm's ``compare``.

    python -m bench.adoption FLAX [--rounds N]

FLAX is a checkout of https://github.com/google/flax, from whose examples the models come: small
configurations with random weights, in training. Writes bench/results/adoption.json and adoption.md.
"""

import argparse
import ast
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import linen, nnx

import jaxnorm
from bench.stamp import commit
from jaxnorm.experiments.report import machine
from jaxnorm.flax_common.comparison import Comparison

SMALL = {"emb_dim": 128, "num_heads": 4, "num_layers": 1, "qkv_dim": 128, "mlp_dim": 512}
SMALL |= {"vocab_size": 256, "output_vocab_size": 256, "max_len": 64}
KEYS = {"dropout": jax.random.key(1)}


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (8, 64), dtype=np.int32)


def images(channels: int, size: int) -> np.ndarray:
    drawn = np.random.default_rng(0).standard_normal((8, size, size, channels))
    return drawn.astype(np.float32)


def imagenet(examples: Path, **options) -> Comparison:
    models = load(examples / "imagenet" / "models.py", "imagenet_models")
    # its batch norms name an axis, which Flax wants bound: here it has one device
    model = OneDevice(models.ResNet18(num_classes=10, num_filters=16))
    return jaxnorm.linen.compare(model, None, images(3, 64), **options)


class OneDevice(linen.Module):
    model: linen.Module

    @linen.compact
    def __call__(self, x):
        each = linen.vmap(
            lambda model, x: model(x, train=True),
            variable_axes={"params": None, "batch_stats": 0},
            split_rngs={"params": False},
            axis_name="batch",
        )
        return each(self.model, x[None])


def lm1b(examples: Path, **options) -> Comparison:
    models = load(examples / "lm1b" / "models.py", "lm1b_models")
    model = models.TransformerLM(models.TransformerConfig(**SMALL))
    return jaxnorm.linen.compare(model, None, tokens(), rngs=KEYS, **options)


def nlp_seq(examples: Path, **options) -> Comparison:
    models = load(examples / "nlp_seq" / "models.py", "nlp_seq_models")
    model = models.Transformer(models.TransformerConfig(**SMALL))
    return jaxnorm.linen.compare(model, None, inputs=tokens(), train=True, rngs=KEYS, **options)


def wmt(examples: Path, **options) -> Comparison:
    models = load(examples / "wmt" / "models.py", "wmt_models")
    model = models.Transformer(models.TransformerConfig(**SMALL))
    return jaxnorm.linen.compare(model, None, tokens(), tokens()[::-1], rngs=KEYS, **options)


def mnist(examples: Path, **options) -> Comparison:
    # The file trains when it is imported: its model alone is taken.
    tree = ast.parse((examples / "mnist" / "train.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "CNN"]
    names = {"nnx": nnx, "partial": partial, "__name__": "mnist_train"}
    exec(compile(tree, "mnist/train.py", "exec"), names)
    model, keys = names["CNN"](nnx.Rngs(0)), nnx.Rngs(1)
    return jaxnorm.nnx.compare(model, images(1, 28), keys, **options)


MODELS = (mnist, imagenet, lm1b, nlp_seq, wmt)
# examples without a row of numbers, and why
REST = {
    "gemma": "its RMSNorm is a class of its own, which is left alone",
    "ogbg_molpcba": "LayerNorm, not measured: its graphs need the package jraph",
    "nnx_toy_examples": "one BatchNorm in a loop over layers, not measured",
    "linen_design_test": "no norm",
    "ppo": "no norm",
    "seq2seq": "no norm",
    "sst2": "no norm",
    "vae": "no norm",
}


def row(name: str, found: dict) -> str:
    by = {each["part"]: each for each in found["differences"]}
    outputs, gradients = by["outputs"], by["gradients of parameters"]
    numbers = [outputs["between"], outputs["flax_error"], outputs["our_error"]]
    cells = [
        f"{value:.1e}" for value in (*numbers, gradients["flax_error"], gradients["our_error"])
    ]
    cells.append(f"{found['ours']['residual_bytes'] / found['flax']['residual_bytes']:.2f}")
    kinds = sorted({norm["name"] for norm in found["norms"]})
    return f"| {name} | {len(found['norms'])} {', '.join(kinds)} | {' | '.join(cells)} |"


HEAD = """| example | norms | outputs, Flax - ours | Flax - float64 | ours - float64 | gradients, \
Flax - float64 | ours - float64 | residuals |
|---|---|---|---|---|---|---|---|
"""


def page(results: dict) -> str:
    """Return the page of the results."""
    facts = results["machine"]
    table = HEAD + "\n".join(row(name, found) for name, found in results["rows"].items())
    table += "".join(f"\n| {name} | {why} | | | | | | |" for name, why in REST.items())
    return f"""# Flax's examples in one line

`python -m bench.adoption FLAX --rounds {results["rounds"]}`: small models of Flax's own examples,
with Flax's norms and adopted; {facts["cores"]} cores ({facts["processor"]}), jax {facts["jax"]},
flax {facts["flax"]}, commit {results["commit"]}. Differences are the largest, divided by the
largest value. Residuals are those of ours over Flax's. Such small models say nothing about speed;
models.md does. Examples without numbers come last.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adoption", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("flax", type=Path, help="checkout of Flax's repository")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each; 20 by default")
    options = parser.parse_args()
    examples = options.flax / "examples"
    if not examples.is_dir():
        parser.error(f"flax must be a checkout with a folder examples: got {options.flax}")
    rows = {}
    for make in MODELS:
        rows[make.__name__] = json.loads(make(examples, rounds=options.rounds).to_json())
        print(row(make.__name__, rows[make.__name__]), flush=True)
    results = {"machine": machine(), "commit": commit(), "rounds": options.rounds, "rows": rows}
    folder = Path(__file__).parent / "results"
    (folder / "adoption.json").write_text(json.dumps(results, indent=1))
    (folder / "adoption.md").write_text(page(results))


if __name__ == "__main__":
    main()
