"""Training steps of whole models with our modules, with Flax's and with scale and bias alone: time,
CPU time, temporaries.

    python -m bench.models [--rounds 21] [--models batch] [--out bench/results/models]

writes models.json and models.md there, anew after each model. All have the same layers and data;
steps are jitted, with gradients of all parameters and plain gradient descent, in one process, in an
order that is drawn anew each round. Compared are the steps of one round, since a machine changes
its pace within a run. What scale and bias alone take no norm can save.
"""

import argparse
import json
import random
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from bench.peers import wished
from bench.speed import repeats_for, sample
from bench.stamp import allocator, commit, in_front
from jaxnorm import linen as jn
from jaxnorm.experiments.report import machine
from jaxnorm.kernels.cpu import loading

KEY = jax.random.key(0)


class Affine(nn.Module):
    """Scale and bias, without statistics."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return x * scale + self.param("bias", nn.initializers.zeros, x.shape[-1:])


class WithoutStatistics:
    """The norms' classes, each of scale and bias alone."""

    @staticmethod
    def affine(*_, **options):
        return Affine()

    LayerNorm = BatchNorm = GroupNorm = affine


class GemmaNorm(nn.Module):
    """RMS norm as Google's Gemma has it, all in the dtype of x; no class of Flax's adds 1."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:], x.dtype)
        root = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x * root * (1 + scale)


OURS = ("jaxnorm", "jaxnorm, plain JAX")
OTHERS = ("flax", "scale and bias alone")
KINDS = dict(zip((*OURS, *OTHERS), (jn, jn, nn, WithoutStatistics), strict=True))


class Transformer(nn.Module):
    """Blocks with layer norm before attention and before the MLP."""

    norms: object
    blocks: int = 4
    features: int = 256

    @nn.compact
    def __call__(self, x):
        for _ in range(self.blocks):
            h = self.norms.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
            h = self.norms.LayerNorm()(x)
            x = x + nn.Dense(self.features)(nn.gelu(nn.Dense(4 * self.features)(h)))
        return self.norms.LayerNorm()(x)


class Gemma(nn.Module):
    """Two layers as in Gemma, in bfloat16: RMS norms of gain 1 + scale, and a gated MLP."""

    norms: object
    features: int = 256

    def norm(self):
        if self.norms is jn:
            return jn.RMSNorm(scale_offset=1, param_dtype=jnp.bfloat16)
        return GemmaNorm() if self.norms is nn else Affine()

    @nn.compact
    def __call__(self, x):
        kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "use_bias": False}
        dense, x = partial(nn.Dense, **kinds), x.astype(jnp.bfloat16)
        for _ in range(2):
            h = self.norm()(x).astype(x.dtype)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, **kinds)(h, h)
            h = self.norm()(x).astype(x.dtype)
            gate, up = jnp.split(dense(8 * self.features)(h), 2, axis=-1)
            x = x + dense(self.features)(nn.gelu(gate) * up)
        return self.norm()(x).astype(jnp.float32)


class ResNet(nn.Module):
    """A stage of residual blocks of 3 x 3 convolutions."""

    norms: object
    kind: str
    blocks: int = 3
    features: int = 64

    @nn.compact
    def __call__(self, x):
        norm = (
            partial(self.norms.BatchNorm, use_running_average=False)
            if self.kind == "batch"
            else partial(self.norms.GroupNorm, 32)
        )
        for _ in range(self.blocks):
            h = nn.relu(norm()(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
            x = nn.relu(x + norm()(nn.Conv(self.features, (3, 3), use_bias=False)(h)))
        return x


class Convolutions(nn.Module):
    """Four 3 x 3 convolutions with batch norm: the first two of fewer features."""

    norms: object
    features: int

    @nn.compact
    def __call__(self, x):
        for features in (self.features, self.features, 2 * self.features, 2 * self.features):
            norm = self.norms.BatchNorm(use_running_average=False)
            x = nn.relu(norm(nn.Conv(features, (3, 3), use_bias=False)(x)))
        return x


class LeNet(nn.Module):
    """On digits, with batch norm in the dense part."""

    norms: object

    @nn.compact
    def __call__(self, x):
        for features in (6, 16):
            x = nn.tanh(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for features in (120, 84):
            x = nn.tanh(self.norms.BatchNorm(use_running_average=False)(nn.Dense(features)(x)))
        return nn.Dense(10)(x)


MODELS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "transformer, 4 blocks of 256, 16 x 64 tokens": (Transformer, (16, 64, 256)),
    "2 layers as in Gemma, bfloat16, 16 x 64 tokens of 256": (Gemma, (16, 64, 256)),
    "ResNet stage, batch norm, 16 x 32 x 32 x 64": (
        partial(ResNet, kind="batch"),
        (16, 32, 32, 64),
    ),
    "ResNet stage, group norm, 16 x 32 x 32 x 64": (
        partial(ResNet, kind="group"),
        (16, 32, 32, 64),
    ),
    "LeNet on digits, batch 128": (LeNet, (128, 8, 8, 1)),
} | {
    f"4 convolutions of {features} to {2 * features}, batch norm, 32 x {side} x {side}": (
        partial(Convolutions, features=features),
        (32, side, side, channels),
    )
    for features in (16, 64)
    for side, channels in ((28, 1), (32, 3))
}


def training_step(make: Callable, norms, shape: tuple[int, ...]) -> tuple[Callable, float]:
    """The compiled step on its data, and its temporaries in MiB."""
    x, model = jax.random.normal(KEY, shape), make(norms)
    variables = model.init(KEY, x)

    def loss(params, stats, x):
        y, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return (y**2 * jnp.arange(y.shape[-1])).mean(), new.get("batch_stats", {})

    def step(params, stats, x):
        (_, stats), gradient = jax.value_and_grad(loss, has_aux=True)(params, stats, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), stats

    given = variables["params"], variables.get("batch_stats", {}), x
    compiled = jax.jit(step).lower(*given).compile()
    return partial(compiled, *given), compiled.memory_analysis().temp_size_in_bytes / 2**20


def measure(name: str, rounds: int, console: Console) -> dict:
    make, shape = MODELS[name]
    calls, temporaries = {}, {}
    for kind in KINDS:
        with wished("xla" if kind == "jaxnorm, plain JAX" else None):
            calls[kind], temporaries[kind] = training_step(make, KINDS[kind], shape)
    repeats = {kind: repeats_for(call) for kind, call in calls.items()}
    samples: dict[str, list] = {kind: [] for kind in calls}
    order, rng = list(calls), random.Random(0)
    for _ in track(range(rounds), name, console=console):
        # what one leaves behind, in caches and threads, is not always the same one's to bear
        rng.shuffle(order)
        for kind in order:
            samples[kind].append(sample(calls[kind], repeats[kind]))
    found, measured = {}, {kind: np.array(rows, float) for kind, rows in samples.items()}
    for kind, rows in measured.items():
        wall, cpu, faults = np.median(rows, axis=0)
        found[kind] = {
            "ms": 1e3 * wall,
            "cpu_ms": 1e3 * cpu,
            "faults": faults,
            "temporaries_mib": temporaries[kind],
            "gains": {
                other: np.quantile(measured[other][:, 0] / rows[:, 0], (0.25, 0.5, 0.75)).tolist()
                for other in OTHERS
            },
        }
    return {"model": name, "kinds": found}


def table(rows: list[dict]) -> str:
    ratios = [(other, kind) for kind in OURS for other in OTHERS]
    titles = [*KINDS, *(f"{other} / {kind}" for other, kind in ratios)]
    lines = [
        f"| training step, ms (CPU ms; temporaries, MiB) | {' | '.join(titles)} |",
        "|---|" + "---|" * len(titles),
    ]
    for row in rows:
        cells = [
            f"{row['kinds'][kind]['ms']:.1f} ({row['kinds'][kind]['cpu_ms']:.1f}; "
            f"{row['kinds'][kind]['temporaries_mib']:.1f})"
            for kind in KINDS
        ]
        for other, kind in ratios:
            low, median, high = row["kinds"][kind]["gains"][other]
            cells.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {row['model']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


LEAST = 0.98  # the speed of ours, of the slower of Flax's and of scale and bias alone


def bounds(rows: list[dict]) -> str:
    """Return the slowest of our models beside the slower of the others, in a sentence each."""
    found = []
    for kind in OURS:
        speeds = {
            row["model"]: max(ratios[1] for ratios in row["kinds"][kind]["gains"].values())
            for row in rows
        }
        slowest = min(speeds, key=speeds.__getitem__)
        found.append(f"{kind}: {speeds[slowest]:.2f} ({slowest})")
    return (
        "Our slowest, where the slower of Flax's and of scale and bias alone has speed 1, and "
        f"{LEAST} is wanted: {'; '.join(found)}.\n"
    )


EXPLANATION = """
Times are medians. Ratios are medians, and quartiles, of those within each round: above 1, the
others take longer. What scale and bias alone take no norm can save.

"""


def page(results: dict) -> str:
    facts = results["machine"]
    cores = f"{facts['cores']} cores ({facts['processor']})"
    packages = (
        f"jax {facts['jax']}, flax {facts['flax']}, {cores}, "
        f"kernels {'built' if facts['native'] else 'not built'}"
    )
    return (
        f"Whole models (`{facts['command']}`; {packages}, commit {facts['commit']}).\n\n"
        f"{table(results['rows'])}{EXPLANATION}{bounds(results['rows'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.models", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds, 21 by default")
    parser.add_argument(
        "--models", type=re.compile, default="", help="those whose names this pattern is found in"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/models"), help="results, without suffix"
    )
    options = parser.parse_args()
    names = [name for name in MODELS if re.search(options.models, name)]
    if not names:
        parser.error(f"no model has this in its name; there are: {'; '.join(MODELS)}")
    command = f"{in_front(allocator())}python -m bench.models {shlex.join(sys.argv[1:])}".strip()
    facts = machine() | {"commit": commit(), "native": loading.built(), "command": command}
    console, rows = Console(), []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        rows.append(measure(name, options.rounds, console))
        results = {"machine": facts, "rows": rows}
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(results))
    console.print(table(rows), markup=False)


if __name__ == "__main__":
    main()
