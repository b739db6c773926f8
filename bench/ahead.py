"""What norms cost a TPU: bytes between its memory and its cores, as counted in programs compiled for one.

    pip install 'jax[tpu]'
    python -m bench.tpu [--topology v5e:2x2] [--only NORMS]

compiles every norm ahead of time, which takes no TPU, and writes bench/results/tpu.json and tpu.md. Arrays are larger than the
memory beside the cores, so that each pass over one is a transfer; what is kept there (S(1) in a layout) costs none.
"""

import argparse
import importlib.metadata
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is none to be asked about
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.progress import track

from bench.peers import JAX_PEERS, installed
from bench.speed import DTYPES, IMAGES, ROWS, with_gradients
from bench.stamp import commit, versions

RESULTS = Path(__file__).parent / "results" / "tpu"
KINDS = ("forward", "gradients")
TEXT = """# What norms cost a TPU

`{command}`: {head}.

Compiled for that processor, not run on one. The figures are of the output / of the output and all gradients.

Bytes between its memory and its cores, in sizes of x: a norm that keeps nothing of x beside the cores reads it once for its statistics
and once for the output that it writes, which makes 3; for gradients it reads x and the cotangent twice more and writes the gradient, 8,
or 7 where output and gradient are made at once. A pass for the mean before one for the deviations from it is the price of a variance
that is exact for any mean.

{passes}

Cycles that the compiler expects, relative to Flax:

{cycles}

Over the {chips} chips of such a slice, output and all gradients of x that is sharded along its first / last axis: collectives, which are
all-reduces unless another is named.

{collectives}
"""
SHAPES = {**dict.fromkeys(ROWS, (32768, 4096)), **dict.fromkeys(IMAGES, (256, 56, 56, 256))}
PEERS = tuple(peer for peer in JAX_PEERS if peer != "jaxnorm" and installed(peer))  # kernels are for CPUs
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s8": 1, "u8": 1, "pred": 1}
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\](\{{[^}}]*\}})?")
LINE = re.compile(r"\s*(?:ROOT )?(%[\w.-]+) = (.*?[\})\]]) ([a-z][\w-]*)\((.*)")
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "slice-done")
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
PROGRAMS = ("while", "conditional", "call", "async-start")  # of programs of their own


def transferred(program: str) -> int:
    """The bytes that the instructions of a compiled program read and write in main memory.

    >>> transferred('''
    ... ENTRY %main (x: f32[8,128]) -> f32[8,128] {
    ...   %x = f32[8,128]{1,0:T(8,128)} parameter(0)
    ...   %sum = f32[8]{0:T(128)S(1)} fusion(%x), kind=kLoop, calls=%f
    ...   ROOT %y = f32[8,128]{1,0:T(8,128)} fusion(%x, %sum), kind=kLoop, calls=%g
    ... }''') // (4 * 8 * 128)
    3
    """
    arrays: dict[str, list[tuple[int, bool]]] = {}  # of each name the bytes, and whether they lie there
    total = 0
    for line in filter(None, map(LINE.match, program[program.index("\nENTRY") :].split("\n"))):
        name, types, operation, rest = line.groups()
        arrays[name] = own = [_array(*found) for found in ARRAY.findall(types)]
        if operation in PROGRAMS:
            raise ValueError(f"cannot count what {operation} transfers: {line[0]}")
        if operation in ("copy-start", "slice-start"):  # (to, from, a flag): the part, if it is one
            total += min(size for size, _ in own[:2])
        elif operation not in FREE:
            taken = [array for of in re.findall(r"%[\w.-]+", rest.split("), ")[0]) for array in arrays.get(of, ())]
            total += sum(size for size, there in (*own, *taken) if there)
    return total


def cycles(program: str) -> int:
    """How many the compiler expects the instructions to take."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program[program.index("\nENTRY") :])))


def _array(dtype: str, sizes: str, layout: str) -> tuple[int, bool]:
    return BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size), "S(" not in layout


def compiled(norm: Callable, kind: str, shape: tuple[int, ...], dtype: str, of_x: Sharding, of_params: Sharding) -> jax.stages.Compiled:
    x, param = jax.ShapeDtypeStruct(shape, dtype, sharding=of_x), jax.ShapeDtypeStruct(shape[-1:], dtype, sharding=of_params)
    function, given = (norm, (x, param, param)) if kind == "forward" else (with_gradients(norm), (x, param, param, x))
    return jax.jit(function).trace(*given).lower().compile()


def count(norm: Callable, shape: tuple[int, ...], dtype: str, devices: list) -> dict:
    """Of the output, and of it with all gradients; of these also the collectives where x is sharded, by the axis."""
    one, size = SingleDeviceSharding(devices[0]), math.prod(shape) * jnp.dtype(dtype).itemsize
    found: dict = {}
    for kind in KINDS:
        program = compiled(norm, kind, shape, dtype, one, one)
        temporaries = program.memory_analysis().temp_size_in_bytes / size
        found[kind] = {"passes": transferred(program.as_text()) / size, "cycles": cycles(program.as_text()), "temporaries": temporaries}
    mesh, found["collectives"] = Mesh(np.array(devices), ("chips",)), {}
    for name, axis in (("first", 0), ("last", len(shape) - 1)):
        of_x = NamedSharding(mesh, P(*("chips" if at == axis else None for at in range(len(shape)))))
        text = compiled(norm, "gradients", shape, dtype, of_x, NamedSharding(mesh, P())).as_text()
        found["collectives"][name] = Counter(re.findall(COLLECTIVE, text))
    return found


def table(rows: list[dict], cell: Callable[[dict, dict | None], str]) -> str:
    """A row for each norm and dtype, of ``cell(found of the peer, found of Flax)``."""
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ["| | " + " | ".join(peers) + " |", "|---" * (len(peers) + 1) + "|"]
    for norm, dtype in dict.fromkeys((row["norm"], row["dtype"]) for row in rows):
        found = {row["peer"]: row for row in rows if (row["norm"], row["dtype"]) == (norm, dtype)}
        cells = [cell(found[peer], found.get("flax")) if peer in found else "" for peer in peers]
        lines.append(f"| {norm} {'x'.join(map(str, SHAPES[norm]))} {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def passes_of(own: dict, _) -> str:
    return " / ".join(f"{own[kind]['passes']:.1f}" for kind in KINDS)


def cycles_of(own: dict, flax: dict | None) -> str:
    return " / ".join(f"{own[kind]['cycles'] / flax[kind]['cycles']:.2f}" for kind in KINDS) if flax else ""


def collectives_of(own: dict, _) -> str:
    def told(found: dict[str, int]) -> str:
        others = (f"{number} {name}" for name, number in found.items() if name != "all-reduce")
        return ", ".join([str(found.get("all-reduce", 0)), *others])

    return " / ".join(map(told, own["collectives"].values()))


def page(command: str, facts: dict, rows: list[dict]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    head = f"{facts['device']}, commit {facts['commit']}, {packages}"
    tables = {"passes": table(rows, passes_of), "cycles": table(rows, cycles_of), "collectives": table(rows, collectives_of)}
    return TEXT.format(command=command, head=head, chips=facts["chips"], **tables)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tpu", description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v5e:2x2", help="the kind of TPU, as JAX names a slice of them (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), metavar="NORM", help="of %(choices)s")
    options = parser.parse_args()
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices
    except (RuntimeError, ValueError) as error:
        print(f"bench.tpu: no compiler for {options.topology} (pip install 'jax[tpu]'): {error}", file=sys.stderr)
        return 1
    cases = [(norm, dtype, peer) for norm in options.only for dtype in DTYPES for peer in PEERS if norm in JAX_PEERS[peer]()]
    rows = []
    for norm, dtype, peer in track(cases, "Compiling"):
        rows.append({"norm": norm, "dtype": dtype, "peer": peer} | count(JAX_PEERS[peer]()[norm], SHAPES[norm], dtype, devices))
    packages = {"jax": jax.__version__, **versions(), "libtpu": importlib.metadata.version("libtpu")}
    facts = {"device": devices[0].device_kind, "chips": len(devices), "commit": commit(), "packages": packages}
    RESULTS.with_suffix(".json").write_text(json.dumps({**facts, "rows": rows}, indent=1))
    text = page(" ".join(["python -m bench.tpu", *sys.argv[1:]]), facts, rows)
    RESULTS.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
