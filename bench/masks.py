"""Norms beside a mask: times of output and gradients, beside Flax's and our own without one.

    python -m bench.masks [--rounds 15]

writes bench/results/masks.json and masks.md. Three tenths are masked out: by "padding" the ends of
sequences or the rows of images, by "positions" single ones at random, by "elements" single
elements, which no kernel takes. All is measured in turn in one process.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from bench.peers import flax_linen, ours_by
from bench.shapes import Shape
from bench.speed import Case, arrays, repeats_for, sample, with_gradients
from bench.stamp import commit
from jaxnorm.experiments.report import machine

HIDDEN = 0.3
SEQUENCES, IMAGES = "16x1024x128", "16x32x32x128"
MASKS = {
    "padding": [
        ("layer", SEQUENCES),
        ("rms", SEQUENCES),
        *((norm, shape) for shape in (SEQUENCES, IMAGES) for norm in ("batch", "group")),
    ],
    "positions": [
        ("layer", SEQUENCES),
        *((norm, shape) for shape in (SEQUENCES, IMAGES) for norm in ("batch", "group")),
    ],
    "elements": [("layer", SEQUENCES), ("batch", SEQUENCES)],
}
KERNELS, PLAIN, FLAX, WITHOUT = "kernels", "plain JAX", "flax", "kernels, no mask"


def mask_of(kind: str, shape: tuple[int, ...]) -> jax.Array:
    """False where something is masked out: an argument of the program, not a constant in it."""
    rng = np.random.default_rng(0)
    if kind == "padding":
        ends = rng.uniform(1 - 2 * HIDDEN, 1, (shape[0], 1)) * shape[1]
        return jnp.asarray(np.arange(shape[1]) < ends).reshape(*shape[:2], *(1,) * (len(shape) - 2))
    return jnp.asarray(rng.random(shape if kind == "elements" else (*shape[:-1], 1)) >= HIDDEN)


def calls(case: Case, kind: str) -> Iterator[tuple[str, Callable]]:
    """What is compared: output and gradients, compiled."""
    given, where = arrays(case), mask_of(kind, Shape.sizes(case.shape))
    masked = lambda norm: lambda *given: with_gradients(partial(norm, where=given[-1]))(*given[:-1])
    peers = {
        KERNELS: ours_by("native"),
        PLAIN: ours_by("xla"),
        FLAX: flax_linen(fast=True),
        WITHOUT: ours_by("native"),
    }
    for name, norms in peers.items():
        arguments, both = (given, with_gradients) if name == WITHOUT else ((*given, where), masked)
        yield name, partial(jax.jit(both(norms[case.norm])).lower(*arguments).compile(), *arguments)


def measure(case: Case, kind: str, rounds: int) -> dict:
    """Milliseconds of each, the median of as many rounds."""
    compared = dict(calls(case, kind))
    repeats = {name: repeats_for(call) for name, call in compared.items()}
    rows = [
        {name: 1e3 * sample(call, repeats[name])[0] for name, call in compared.items()}
        for _ in range(rounds)
    ]
    medians = {name: float(np.median([row[name] for row in rows])) for name in compared}
    return {
        "norm": case.norm,
        "shape": case.shape,
        "dtype": case.dtype,
        "mask": kind,
        "ms": medians,
    }


def table(rows: list[dict]) -> str:
    lines = [
        f"| norm | x | mask | {KERNELS}, of {FLAX} | {PLAIN}, of {FLAX} | {KERNELS}, of {WITHOUT} "
        f"| {FLAX}, ms |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        ms = row["ms"]
        ratios = [
            ms[ours] / ms[other]
            for ours, other in ((KERNELS, FLAX), (PLAIN, FLAX), (KERNELS, WITHOUT))
        ]
        taken = [
            f"{ratio:.2f}" if row["mask"] != "elements" or place == 1 else ""
            for place, ratio in enumerate(ratios)
        ]
        lines.append(
            f"| {row['norm']} | {row['shape']} {row['dtype']} | {row['mask']} | "
            f"{' | '.join(taken)} | {ms[FLAX]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.masks", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=15, help="samples of each; 15 by default")
    rounds = parser.parse_args().rounds
    cases = [
        (Case(norm, shape, dtype), kind)
        for kind, norms in MASKS.items()
        for norm, shape in norms
        for dtype in ("float32", "bfloat16")
    ]
    rows = [measure(*case, rounds) for case in track(cases, "Measuring")]
    folder, facts = Path(__file__).parent / "results", machine()
    (folder / "masks.json").write_text(
        json.dumps({"machine": facts, "commit": commit(), "rounds": rounds, "rows": rows}, indent=1)
    )
    text = f"""# Norms beside a mask

`python -m bench.masks --rounds {rounds}`: output and gradients in turn in one process, medians;
{facts["cores"]} cores ({facts["processor"]}), jax {facts["jax"]}, flax {facts["flax"]}, commit
{commit()}. Three tenths are masked out: by "padding" the ends of sequences or the rows of images,
by "positions" single ones at random, by "elements" single elements, which no kernel takes. Times
are ratios: below 1 ours is faster. Flax's are the modules of linen, with `mask=`.

{table(rows)}
"""
    (folder / "masks.md").write_text(text)
    print(table(rows))


if __name__ == "__main__":
    main()
