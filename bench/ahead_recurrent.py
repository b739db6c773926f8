"""Count the cycles that a TPU's compiler expects of LSTM layers, with and without a norm.

Programs are compiled ahead of time, which takes no TPU:

    pip install 'jax[tpu]'
    python -m bench.ahead_recurrent [--shapes 32x100x128,...] [--only NAME ...]

writes bench/results/tpu-recurrent.json and tpu-recurrent.md. A shape is batch x time x features,
in float32 with time first; inputs have as many features as states. The body of a loop counts as
often as the loop runs. The gradients are with respect to parameters and inputs.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is none to be asked about
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding
from rich.progress import track

from bench import recurrent
from bench.stamp import commit, versions
from bench.transfers import cycles
from jaxnorm.kernels import placement

RESULTS = Path(__file__).parent / "results" / "tpu-recurrent"
SHAPES = ("32x100x128", "64x256x512")
WITHOUT_NORM = "Flax LSTM, no norm"
PEERS = ("jaxnorm layer", "jaxnorm rms", "jaxnorm none", "naive Flax LN-LSTM", WITHOUT_NORM)
TEXT = """# What layer-normalized LSTMs cost a TPU

`{command}`: {device}, commit {commit}, {packages}.

Compiled for that processor, not run on one.

Cycles that the compiler expects, in thousands, and relative to Flax's LSTM without a norm. The
compiler counts some 1800 cycles for each loop over elements, however small, and none for the start
of a matrix product or of what is fused with it.

Output and gradients of parameters and inputs:

{gradients}

Output alone:

{output}

Temporaries of output and gradients in main memory, MiB; what lies beside the cores is not
counted:

{temporaries}
"""


def programs(name: str, shape: str, sharding: Sharding) -> list[jax.stages.Compiled]:
    """Compile the output of a layer, and its output with all gradients."""
    batch, steps, features = map(int, shape.split("x"))
    recurrent.HIDDEN[0] = recurrent.IN = features
    init, apply = recurrent.PEERS[name]()

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    x = place(jax.ShapeDtypeStruct((steps, batch, features), "float32"))
    params = jax.tree.map(place, jax.eval_shape(lambda x: init(x), x))

    def with_gradients(params, x, dy):
        y, vjp = jax.vjp(apply, params, x)
        return y, vjp(dy)

    calls: list[tuple[Callable, tuple]] = [(apply, (params, x)), (with_gradients, (params, x, x))]
    return [jax.jit(call).trace(*types).lower().compile() for call, types in calls]


def count(name: str, shape: str, sharding: Sharding) -> dict:
    """Return the cycles and temporaries of a layer's programs."""
    output, both = programs(name, shape, sharding)
    return {
        "shape": shape,
        "name": name,
        "output": cycles(output.as_text()),
        "gradients": cycles(both.as_text()),
        "temp_mib": both.memory_analysis().temp_size_in_bytes / 2**20,
    }


def table(rows: list[dict], cell: Callable[[dict, dict | None], str]) -> str:
    """Return a row for each layer, of ``cell(found, found of Flax's LSTM without a norm)``."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by = {(row["shape"], row["name"]): row for row in rows}
    lines = ["| | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [cell(by[shape, name], by.get((shape, WITHOUT_NORM))) for shape in shapes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(command: str, facts: dict, rows: list[dict]) -> str:
    """Return the page of these results."""

    def cost(kind: str) -> str:
        def cell(own: dict, other: dict | None) -> str:
            relative = f" ({own[kind] / other[kind]:.2f})" if other else ""
            return f"{own[kind] / 1000:.0f}{relative}"

        return table(rows, cell)

    return TEXT.format(
        command=command,
        device=facts["device"],
        commit=facts["commit"],
        packages=", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        gradients=cost("gradients"),
        output=cost("output"),
        temporaries=table(rows, lambda own, _: f"{own['temp_mib']:.0f}"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ahead_recurrent", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="%(default)s by default")
    parser.add_argument(
        "--only", nargs="+", choices=PEERS, default=PEERS, metavar="NAME", help="of %(choices)s"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results, without suffix")
    options = parser.parse_args()
    try:
        jax.devices()  # looks for plug-ins
        device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    except (RuntimeError, ValueError) as error:
        print(f"bench.ahead_recurrent: no compiler for a TPU: {error}", file=sys.stderr)
        return 1
    # what is compiled for is not what compiles
    placement.platform = lambda: "tpu"  # type: ignore[assignment]
    cases = [(name, shape) for shape in options.shapes.split(",") for name in options.only]
    sharding = SingleDeviceSharding(device)
    rows = [count(name, shape, sharding) for name, shape in track(cases, "Compiling")]
    packages = {
        "jax": jax.__version__,
        **versions(),
        "flax": importlib.metadata.version("flax"),
        "libtpu": importlib.metadata.version("libtpu"),
    }
    facts = {"device": device.device_kind, "commit": commit(), "packages": packages}
    options.out.with_suffix(".json").write_text(json.dumps({**facts, "rows": rows}, indent=1))
    text = page(" ".join(["python -m bench.ahead_recurrent", *sys.argv[1:]]), facts, rows)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
