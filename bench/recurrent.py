"""Recurrent networks: time, temporaries and compile time of ours and of the peers, interleaved in
one process.

    python -m bench.recurrent [--shapes 32x100x128,...] [--repeats 15] [--only NAMES]

writes bench/results/recurrent.json and recurrent.md. A shape is batch x time x features; inputs
have 100 features, float32, time first for everyone. Times are medians (minima) in ms of the outputs
alone, and of the gradients with respect to parameters and inputs of ``sum(outputs * fixed random
numbers)``. PyTorch takes part where it is installed.
"""

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.progress import track

import jaxnorm as jn
from bench.speed import sample
from bench.stamp import commit, versions
from jaxnorm.experiments.report import machine
from jaxnorm.kernels.cpu import loading

IN = 100
TORCH = importlib.util.find_spec("torch") is not None
SHAPES = "32x100x128,128x100x128,32x400x128,32x100x512,128x100x512"
KEY = jax.random.key(0)


class NaiveCell(nn.RNNCellBase):
    """What one writes first: Flax's Dense and LayerNorm in a cell."""

    features: int

    @nn.compact
    def __call__(self, carry, x):
        c, h = carry
        gates = nn.LayerNorm(use_bias=False)(nn.Dense(4 * self.features, use_bias=False)(x))
        gates = gates + nn.LayerNorm()(nn.Dense(4 * self.features, use_bias=False)(h))
        i, f, g, o = jnp.split(gates, 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(g)
        h = nn.sigmoid(o) * nn.tanh(nn.LayerNorm()(c))
        return (c, h), h

    @nn.nowrap
    def initialize_carry(self, rng, shape):
        return (jnp.zeros((*shape[:-1], self.features)),) * 2

    @property
    def num_feature_axes(self):
        return 1


def flax_rnn(cell):
    module = nn.RNN(cell, time_major=True)
    return lambda x: module.init(KEY, x[:2]), module.apply


def ours(norm, masked=False, implementation=None):
    def apply(params, x):
        lengths = jnp.linspace(len(x) // 2, len(x), x.shape[1]).astype(int) if masked else None
        return jn.recurrent.lstm(
            x, params, norm=norm, time_major=True, lengths=lengths, implementation=implementation
        )[1]

    return lambda x: jn.recurrent.init_lstm(KEY, IN, HIDDEN[0], norm=norm), apply


HIDDEN = [0]  # of the shape being measured


def haiku():
    def run(x):
        core = hk.LSTM(HIDDEN[0])
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    transformed = hk.without_apply_rng(hk.transform(run))
    return lambda x: transformed.init(KEY, x[:2]), transformed.apply


def products(params, x, ct, backward: bool):
    """The matrix products that forward and backward cannot do without, and sums that keep each of
    them whole.
    """
    w, wx = params
    xg = (x.reshape(-1, IN) @ wx).reshape(*x.shape[:2], -1)
    together = lambda g: sum(jnp.split(g, 4, -1))
    h, hs = lax.scan(lambda h, g: (0.1 * together(h @ w + g),) * 2, jnp.zeros_like(ct[0]), xg)
    if not backward:
        return h, hs
    d, ds = lax.scan(lambda d, g: ((g + d[:, :1]) @ w.T, d), ct[0], xg, reverse=True)
    rows = xg.reshape(-1, xg.shape[-1])
    return d, ds, hs.reshape(-1, len(w)).T @ rows, x.reshape(-1, IN).T @ rows, rows @ wx.T


PEERS: dict[str, Callable] = {
    "jaxnorm layer": lambda: ours("layer"),
    "jaxnorm layer, lengths": lambda: ours("layer", masked=True),
    "jaxnorm rms": lambda: ours("rms"),
    "jaxnorm none": lambda: ours(None),
    "jaxnorm layer, plain JAX": lambda: ours("layer", implementation="xla"),
    "jaxnorm none, plain JAX": lambda: ours(None, implementation="xla"),
    "Flax LSTM, no norm": lambda: flax_rnn(nn.OptimizedLSTMCell(HIDDEN[0])),
    "naive Flax LN-LSTM": lambda: flax_rnn(NaiveCell(HIDDEN[0])),
    "Haiku LSTM, no norm": haiku,
}


def measure(shape: str, repeats: int, only: list[str] | None, console: Console) -> list[dict]:
    batch, steps, HIDDEN[0] = (int(number) for number in shape.split("x"))
    keys = jax.random.split(KEY, 2)
    x, ct = (
        jax.random.normal(keys[0], (steps, batch, IN)),
        jax.random.normal(keys[1], (steps, batch, HIDDEN[0])),
    )
    calls, facts = {}, {}
    for name, make in PEERS.items():
        if only and name not in only:
            continue
        init, apply = make()
        params = init(x)
        gradient = jax.grad(
            lambda params, x, apply=apply: (apply(params, x) * ct).sum(), argnums=(0, 1)
        )
        started = time.perf_counter()
        compiled = jax.jit(gradient).lower(params, x).compile()
        facts[name] = {
            "compile_s": time.perf_counter() - started,
            "temp_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        }
        forward = jax.jit(apply).lower(params, x).compile()
        calls[name] = (lambda f=forward, p=params: f(p, x), lambda f=compiled, p=params: f(p, x))
    weights = [
        jax.random.normal(keys[0], (rows, 4 * HIDDEN[0])) / rows**0.5 for rows in (HIDDEN[0], IN)
    ]
    bare = jax.jit(products, static_argnums=3)
    calls["the products alone"] = (
        lambda: bare(weights, x, ct, False),
        lambda: bare(weights, x, ct, True),
    )
    if TORCH:
        from bench.torch_recurrent import torch_calls

        calls |= {
            name: pair
            for name, pair in torch_calls(batch, steps, IN, HIDDEN[0]).items()
            if not only or name in only
        }
    times: dict[tuple[str, int], list[float]] = {
        (name, which): [] for name in calls for which in (0, 1)
    }
    order, rng = list(times), random.Random(0)
    for repeat in track(range(repeats + 1), shape, console=console):
        rng.shuffle(order)  # threads of one peer may still spin when the next one begins
        for name, which in order:
            seconds, *_ = sample(calls[name][which], 1)
            if repeat:
                times[name, which].append(1e3 * seconds)
    rows = []
    for name in calls:
        numbers = {
            f"{label}_{kind}": float(value(times[name, which]))
            for which, label in enumerate(("forward", "gradients"))
            for kind, value in (("median", np.median), ("min", np.min))
        }
        rows.append({"shape": shape, "name": name, **numbers, **facts.get(name, {})})
    return rows


KINDS = {
    "gradients_median": "",
    "forward_median": ", outputs",
    "temp_mib": ", temporaries",
    "compile_s": ", compiling",
}
RATIOS = [  # ours, other, what, goal
    ("jaxnorm layer", "naive Flax LN-LSTM", "gradients_median", "0.55; 0.75 at 512"),
    ("jaxnorm layer", "Flax LSTM, no norm", "gradients_median", "1.0; 1.1 at 512"),
    ("jaxnorm layer", "Flax LSTM, no norm", "forward_median", "0.9; 1.0 at 512"),
    ("jaxnorm layer", "the products alone", "gradients_median", "1.8; 1.33 at 512"),
    ("jaxnorm layer", "torch LSTM, no norm", "gradients_median", "1.6"),
    ("jaxnorm layer", "torch LN-LSTM, script", "gradients_median", "0.75; 1.0 at batch 128"),
    ("jaxnorm none", "Flax LSTM, no norm", "gradients_median", "0.7"),
    ("jaxnorm layer, lengths", "jaxnorm layer", "gradients_median", "1.08"),
    ("jaxnorm layer", "naive Flax LN-LSTM", "temp_mib", "0.2; 0.1 at 400 steps"),
    ("jaxnorm layer", "Flax LSTM, no norm", "compile_s", "1.5"),
    ("jaxnorm layer, plain JAX", "Flax LSTM, no norm", "gradients_median", "1.0; 1.1 at 512"),
    ("jaxnorm layer, plain JAX", "naive Flax LN-LSTM", "gradients_median", "0.55; 0.75 at 512"),
]


def tables(rows: list[dict]) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by = {(row["shape"], row["name"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    head = "| | " + " | ".join(shapes) + " |\n|" + "---|" * (len(shapes) + 1) + "\n"
    text = ""
    for title, cell in (
        (
            "Gradients, ms: median (minimum)",
            lambda row: f"{row['gradients_median']:.0f} ({row['gradients_min']:.0f})",
        ),
        (
            "Outputs alone, ms: median (minimum)",
            lambda row: f"{row['forward_median']:.1f} ({row['forward_min']:.1f})",
        ),
        (
            "Temporaries of the gradients, MiB",
            lambda row: f"{row['temp_mib']:.1f}" if "temp_mib" in row else "",
        ),
        (
            "Compiling the gradients, s",
            lambda row: f"{row['compile_s']:.2f}" if "compile_s" in row else "",
        ),
    ):
        lines = [
            f"| {name} | " + " | ".join(cell(by[shape, name]) for shape in shapes) + " |"
            for name in names
        ]
        text += f"\n**{title}**\n\n{head}" + "\n".join(lines) + "\n"
    text += f"\n**Ratios of medians**\n\n{head}"
    for ours_, other, kind, goal in RATIOS:
        if (shapes[0], ours_) not in by or (shapes[0], other) not in by:
            continue
        ratios = [by[shape, ours_][kind] / by[shape, other][kind] for shape in shapes]
        text += f"| {ours_} / {other}{KINDS[kind]} (goal {goal}) | "
        text += " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |\n"
    return text


LIMIT = """
With a norm the backward pass recomputes the recurrent products, one of four of their size, rather
than keep 4 H floats for every step and sequence as Flax and PyTorch do (see the temporaries);
without one, and from 256 features on, the kernels keep them. At 512 features and 128 sequences
products are nearly everything: `jaxnorm none` takes less time there than XLA does for the products
alone. Each time is of a call that follows one of its own, which is not counted, as steps of a
training do.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recurrent", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--shapes",
        default=SHAPES,
        help=f"batch x time x features, comma-separated; {SHAPES} by default",
    )
    parser.add_argument("--repeats", type=int, default=15, help="measured rounds, 15 by default")
    parser.add_argument("--only", help="comma-separated names of peers")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results" / "recurrent",
        help="results, without suffix",
    )
    options = parser.parse_args()
    console, rows = Console(), []
    for shape in options.shapes.split(","):
        rows += measure(
            shape, options.repeats, options.only.split(",") if options.only else None, console
        )
    facts = machine() | versions() | {"commit": commit()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(
        json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n"
    )
    command = f"python -m bench.recurrent --shapes {options.shapes} --repeats {options.repeats}"
    packages = ", ".join(
        f"{name} {facts[name]}" for name in ("jax", "flax", "torch") if name in facts
    )
    built = "kernels built" if loading.built() else "no kernels"
    text = (
        f"LSTM layers, {facts['cores']} cores, {packages}, {built} (`{command}`).\n"
        + tables(rows)
        + LIMIT
    )
    options.out.with_suffix(".md").write_text(text)
    console.print(text)


if __name__ == "__main__":
    main()
