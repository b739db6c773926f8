"""What reverse mode keeps: bytes per element of the input that jax.vjp holds on to, for us and for
Flax.

    python -m bench.residuals

writes bench/results/residuals.json and residuals.md. The figures are exact counts and the same on
every machine.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.peers import JAX_PEERS
from jaxnorm.experiments.report import machine

SHAPES = {
    "layer": (4096, 1024),
    "rms": (4096, 1024),
    "batch": (16, 32, 32, 128),
    "instance": (16, 32, 32, 128),
    "group": (16, 32, 32, 128),
}


def measure(norm, shape: tuple[int, ...], dtype: str) -> float:
    x, param = jnp.ones(shape, dtype), jnp.ones(shape[-1])
    _, pullback = jax.vjp(norm, x, param, param)
    return (
        sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "nbytes")) / x.size
    )


def main() -> None:
    rows = [
        {"norm": name, "dtype": dtype}
        | {peer: measure(JAX_PEERS[peer]()[name], shape, dtype) for peer in ("jaxnorm", "flax")}
        for name, shape in SHAPES.items()
        for dtype in ("float32", "bfloat16")
    ]
    lines = ["| norm | dtype | jaxnorm | flax |", "|---|---|---|---|"]
    lines += [
        f"| {row['norm']} | {row['dtype']} | {row['jaxnorm']:.2f} | {row['flax']:.2f} |"
        for row in rows
    ]
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "residuals.json").write_text(
        json.dumps({"machine": machine(), "shapes": SHAPES, "rows": rows}, indent=1)
    )
    text = "\n".join(lines) + "\n"
    (folder / "residuals.md").write_text(
        "Bytes per element that jax.vjp keeps (python -m bench.residuals).\n\n" + text
    )
    print(text)


if __name__ == "__main__":
    main()
