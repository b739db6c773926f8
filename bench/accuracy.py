"""How exact the norms are: largest error of output and gradient against float64, by mean/std, for
us and the peers.

    python -m bench.accuracy

writes bench/results/accuracy.json and accuracy.md. Errors are per group of elements and relative to
its largest true value.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracle import Part, oracle, worst

from bench.peers import EPSILON, GROUPS, JAX_PEERS, torch_cpu
from jaxnorm.experiments.report import machine

SHAPE = (4, 16, 16, 64)
SPLIT = (4, 16, 16, GROUPS, 64 // GROUPS)
AXES = {
    "layer": (3,),
    "rms": (3,),
    "batch": (0, 1, 2),
    "instance": (1, 2),
    "group": (1, 2, 4),
    "switchable": (1, 2),
}
MEANS = (0, 1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
THIRDS = tuple(Part(axes, 1 / 3, 1 / 3) for axes in ((1, 2), (1, 2, 3), (0, 1, 2)))


def truth(norm: str, x: np.ndarray, cotangent: np.ndarray):
    shape = SPLIT if norm == "group" else SHAPE
    parts = THIRDS if norm == "switchable" else (Part(AXES[norm]),)
    return oracle(
        x.reshape(shape),
        parts,
        epsilon=EPSILON,
        cotangent=cotangent.reshape(shape),
        centered=norm != "rms",
    )


def errors(norm: str, run, x: np.ndarray, cotangent: np.ndarray) -> tuple[float, float]:
    exact = truth(norm, x, cotangent)
    y, dx = (a.reshape(exact.y.shape) for a in run(x, cotangent))
    return worst(y, exact.y, AXES[norm]), worst(dx, exact.dx, AXES[norm])


def with_jax(norm):
    """Output and gradient of a JAX function."""

    def run(x, cotangent):
        y, pullback = jax.vjp(
            lambda x: norm(x, jnp.ones(SHAPE[-1]), jnp.zeros(SHAPE[-1])), jnp.asarray(x)
        )
        return np.asarray(y), np.asarray(pullback(jnp.asarray(cotangent))[0])

    return run


def with_torch(norm):
    """Output and gradient of a PyTorch function."""

    def run(x, cotangent):
        x = torch.tensor(x, requires_grad=True)
        y = norm(x, torch.ones(SHAPE[-1]), torch.zeros(SHAPE[-1]))
        y.backward(torch.tensor(cotangent))
        return y.detach().numpy(), x.grad.numpy()

    return run


def all_runs() -> dict[str, dict]:
    runs = {
        peer: {name: with_jax(norm) for name, norm in make().items()}
        for peer, make in JAX_PEERS.items()
    }
    return runs | {"torch": {name: with_torch(norm) for name, norm in torch_cpu().items()}}


def measure() -> list[dict]:
    rng = np.random.default_rng(0)
    noise, cotangent = rng.standard_normal((2, *SHAPE)).astype(np.float32)
    cases = [
        (norm, peer, runs[norm])
        for norm in AXES
        for peer, runs in all_runs().items()
        if norm in runs
    ]
    rows = []
    for norm, peer, run in track(cases, "norms and peers"):
        found = [errors(norm, run, (noise + mean).astype(np.float32), cotangent) for mean in MEANS]
        rows.append(
            {
                "norm": norm,
                "peer": peer,
                "output": [e[0] for e in found],
                "gradient": [e[1] for e in found],
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    head = "| norm | | " + " | ".join(f"{mean:g}" for mean in MEANS) + " |"
    lines = [head, "|---|---|" + "---|" * len(MEANS)]
    for row in rows:
        cells = [
            f"{_short(y)} / {_short(dx)}"
            for y, dx in zip(row["output"], row["gradient"], strict=True)
        ]
        name = f"**{row['peer']}**" if row["peer"] == "jaxnorm" else row["peer"]
        lines.append(f"| {row['norm']} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _short(error: float) -> str:
    return f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e") if np.isfinite(error) else "NaN"


def main() -> None:
    rows = measure()
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    plain = [
        {
            **row,
            **{k: [e if np.isfinite(e) else None for e in row[k]] for k in ("output", "gradient")},
        }
        for row in rows
    ]
    (folder / "accuracy.json").write_text(
        json.dumps({"machine": machine(), "shape": SHAPE, "means": MEANS, "rows": plain}, indent=1)
    )
    intro = (
        "Largest error of output / gradient, relative, "
        "by mean/std of float32 input (python -m bench.accuracy).\n\n"
    )
    (folder / "accuracy.md").write_text(intro + table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
