"""What norms cost an accelerator, as counted in programs compiled for one ahead of time, which
takes none.

    pip install 'jax[tpu]'
    python -m bench.ahead tpu
    pip install --no-deps jax-cuda12-{plugin,pjrt} nvidia-{cuda-nvcc,nvjitlink}-cu12
    python -m bench.ahead gpu

write bench/results/tpu.json and tpu.md, gpu.json and gpu.md. Arrays are larger than what is kept
beside the cores, so that each pass over one is a transfer.
"""

import argparse
import importlib.metadata
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is none to be asked about
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.progress import track

from bench.peers import JAX_PEERS, installed
from bench.shapes import LARGE, Shape
from bench.speed import DTYPES, with_gradients
from bench.stamp import commit, versions
from bench.transfers import COLLECTIVE, cycles, kernels, transferred
from jaxnorm.core import plan

RESULTS = Path(__file__).parent / "results"
TEXT = """# What norms cost a {name}

`{command}`: {head}.

Compiled for that processor, not run on one.

Bytes between its memory and its cores in sizes of x, for the output / the output and all gradients:
a norm that keeps nothing of x beside the cores reads it once for its statistics and once for the
output that it writes, which makes 3; for gradients it reads x and the cotangent twice more and
writes the gradient, 8, or 7 where output and gradient are made at once.

{passes}

The same where the output is one program and the gradients are another, given what the first keeps
for it:

{apart}

{cost_title}:

{cost}

Over {chips} of them, output and all gradients of x that is sharded along its first / last axis:
collectives, which are all-reduces unless another is named.

{collectives}
"""
SHAPES = {norm: Shape.sizes(name) for name, shape in LARGE.items() for norm in shape.norms}
# kernels are for CPUs
PEERS = tuple(peer for peer in JAX_PEERS if peer != "jaxnorm" and installed(peer))
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Target:
    """What is compiled for: how JAX describes some of them, what it compiles with, and what else a
    program says of its cost.
    """

    topology: dict
    compiler: str
    cost: Callable[[str], int]
    relative: bool
    cost_title: str


TARGETS = {
    "tpu": Target(
        {"platform": "tpu", "topology_name": "v5e:2x2"},
        "libtpu",
        cycles,
        True,
        "Cycles that the compiler expects, in the same order, relative to Flax",
    ),
    "gpu": Target(
        {"platform": "cuda", "topology": "1x1x4", "target_config": H100},
        "jax-cuda12-pjrt",
        kernels,
        False,
        "Kernels that it starts, for the output / the output and all gradients",
    ),
}


def types_of(
    shape: tuple[int, ...], dtype: str, of_x: Sharding, of_params: Sharding
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Those of x, scale, bias and the cotangent of y."""
    x, param = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=of_x),
        jax.ShapeDtypeStruct(shape[-1:], dtype, sharding=of_params),
    )
    return x, param, param, x


def compiled(function: Callable, *types) -> jax.stages.Compiled:
    return jax.jit(function).trace(*types).lower().compile()


def in_two(norm: Callable, x, scale, bias, dy) -> tuple[str, str]:
    """Two programs: output and residuals, but for those that are arguments; and the gradients from
    residuals and dy.
    """

    def forward(*given):
        return jax.vjp(norm, *given)

    traced = jax.make_jaxpr(forward)(x, scale, bias).jaxpr
    made = [
        place
        for place, of in enumerate(traced.outvars)
        if not isinstance(of, Literal) and of not in traced.invars
    ]
    first = compiled(
        lambda *given: [jax.tree.leaves(forward(*given))[place] for place in made], x, scale, bias
    )
    y, pullback = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=x.sharding),
        jax.eval_shape(forward, x, scale, bias),
    )
    return first.as_text(), compiled(lambda pullback, dy: pullback(dy), pullback, y).as_text()


def count(
    norm: Callable, shape: tuple[int, ...], dtype: str, devices: list, cost: Callable[[str], int]
) -> dict:
    """Of the output, and of it with all gradients; of these also the collectives where x is
    sharded, by the axis.
    """
    one = SingleDeviceSharding(devices[0])
    types = types_of(shape, dtype, one, one)
    size = types[0].size * types[0].dtype.itemsize
    programs = [compiled(norm, *types[:3]), compiled(with_gradients(norm), *types)]
    texts = [program.as_text() for program in programs]
    found: dict = {
        "passes": [transferred(text) / size for text in texts],
        "apart": [transferred(text) / size for text in in_two(norm, *types)],
        "cost": list(map(cost, texts)),
        "temporaries": [
            program.memory_analysis().temp_size_in_bytes / size for program in programs
        ],
        "collectives": {},
    }
    mesh = Mesh(np.array(devices), ("chips",))
    for name, axis in (("first", 0), ("last", len(shape) - 1)):
        of_x = NamedSharding(
            mesh, P(*("chips" if at == axis else None for at in range(len(shape))))
        )
        program = compiled(
            with_gradients(norm), *types_of(shape, dtype, of_x, NamedSharding(mesh, P()))
        )
        found["collectives"][name] = Counter(re.findall(COLLECTIVE, program.as_text()))
    return found


def table(rows: list[dict], cell: Callable[[dict, dict | None], str]) -> str:
    """A row for each norm and dtype, of ``cell(found of the peer, found of Flax)``."""
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ["| | " + " | ".join(peers) + " |", "|---" * (len(peers) + 1) + "|"]
    for norm, dtype in dict.fromkeys((row["norm"], row["dtype"]) for row in rows):
        found = {row["peer"]: row for row in rows if (row["norm"], row["dtype"]) == (norm, dtype)}
        cells = [cell(found[peer], found.get("flax")) if peer in found else "" for peer in peers]
        lines.append(
            f"| {norm} {'x'.join(map(str, SHAPES[norm]))} {dtype} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def tables(rows: list[dict], relative: bool) -> dict[str, str]:
    def format_counts(found: dict[str, int]) -> str:
        others = (f"{number} {name}" for name, number in found.items() if name != "all-reduce")
        return ", ".join([str(found.get("all-reduce", 0)), *others])

    def cost(own: dict, flax: dict | None) -> str:
        if not relative:
            return " / ".join(map(str, own["cost"]))
        return (
            " / ".join(
                f"{one / other:.2f}" for one, other in zip(own["cost"], flax["cost"], strict=True)
            )
            if flax
            else ""
        )

    return {
        "passes": table(
            rows, lambda own, _: " / ".join(f"{passes:.1f}" for passes in own["passes"])
        ),
        "apart": table(rows, lambda own, _: " + ".join(f"{passes:.1f}" for passes in own["apart"])),
        "cost": table(rows, cost),
        "collectives": table(
            rows, lambda own, _: " / ".join(map(format_counts, own["collectives"].values()))
        ),
    }


def page(command: str, target: Target, facts: dict, rows: list[dict]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    head = f"{facts['device']}, commit {facts['commit']}, {packages}"
    shown = {"name": facts["name"], "chips": facts["chips"], "cost_title": target.cost_title}
    return TEXT.format(command=command, head=head, **shown, **tables(rows, target.relative))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ahead", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("target", choices=tuple(TARGETS), help="a TPU v5e, or an NVIDIA H100")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(SHAPES),
        default=tuple(SHAPES),
        metavar="NORM",
        help="of %(choices)s",
    )
    options = parser.parse_args()
    target = TARGETS[options.target]
    try:
        jax.devices()  # looks for plug-ins
        devices = topologies.get_topology_desc(**target.topology).devices
    except (RuntimeError, ValueError) as error:
        how = next(
            before.strip()
            for before, line in pairwise(__doc__.split("\n"))
            if line.endswith(f"bench.ahead {options.target}")
        )
        print(f"bench.ahead: no compiler for a {options.target} ({how}): {error}", file=sys.stderr)
        return 1
    # what is compiled for is not what compiles
    plan.platform = lambda: options.target  # type: ignore[assignment]
    cases = [
        (norm, dtype, peer)
        for norm in options.only
        for dtype in DTYPES
        for peer in PEERS
        if norm in JAX_PEERS[peer]()
    ]
    rows = []
    for norm, dtype, peer in track(cases, "Compiling"):
        found = count(JAX_PEERS[peer]()[norm], SHAPES[norm], dtype, devices, target.cost)
        rows.append({"norm": norm, "dtype": dtype, "peer": peer} | found)
    packages = {
        "jax": jax.__version__,
        **versions(),
        target.compiler: importlib.metadata.version(target.compiler),
    }
    facts = {
        "name": options.target.upper(),
        "device": devices[0].device_kind,
        "chips": len(devices),
        "commit": commit(),
        "packages": packages,
    }
    (RESULTS / f"{options.target}.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))
    text = page(" ".join(["python -m bench.ahead", *sys.argv[1:]]), target, facts, rows)
    (RESULTS / f"{options.target}.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
