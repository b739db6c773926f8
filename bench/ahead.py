"""What norms cost an accelerator, as counted in programs compiled for one ahead of time, which
takes none.

    python -m bench.ahead tpu
    python -m bench.ahead gpu

write bench/results/tpu.json and tpu.md, gpu.json and gpu.md: of norms alone, and of blocks of
models with them. Where the compiler is missing they say how to install it. Arrays are larger than
what is kept beside the cores, so that each pass over one is a transfer.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # what compiles

import jax
from rich.progress import track

from bench import blocks, passes
from bench.blocks import BLOCKS
from bench.passes import SHAPES
from bench.peers import JAX_PEERS
from bench.speed import DTYPES
from bench.stamp import commit, versions
from bench.targets import TARGETS, NoCompilerError, Target, asked_by, compiling_for, version

RESULTS = Path(__file__).parent / "results"
HEAD = """# What norms cost a {name}

`{command}`: {head}.

Compiled for that processor, not run on one.
"""
NORMS = """
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
BLOCKS_TEXT = """
Blocks of models in bfloat16, but for scale and bias, which are float32; output and all gradients as
one program. Counted are the MiB between its memory and its cores, and the {cost}.
In brackets is the ratio to Flax. "No norm" has scale and bias alone: below it no norm can be.

{table}
"""


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


def page(command: str, target: Target, facts: dict, rows: list[dict], of_blocks: list) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    head = f"{facts['device']}, commit {facts['commit']}, {packages}"
    shown = {"chips": facts["chips"], "cost_title": target.cost_title}
    parts = [HEAD.format(name=facts["name"], command=command, head=head)]
    if rows:
        parts.append(NORMS.format(**shown, **tables(rows, target.relative)))
    if of_blocks:
        table = blocks.table(of_blocks, target.unit)
        parts.append(BLOCKS_TEXT.format(cost=target.unit_title, table=table))
    return "".join(parts)


def count(target: Target, only: tuple[str, ...], devices: list) -> tuple[list[dict], list[dict]]:
    """Return a row of counters for each norm, dtype and peer, and for each block and kind."""
    norms = [
        (norm, dtype, peer)
        for norm in SHAPES
        for dtype in DTYPES
        for peer in passes.peers(target.platform)
        if norm in only and norm in JAX_PEERS[peer]()
    ]
    pairs = [
        (block, kind) for block in BLOCKS for kind in blocks.kinds(target.platform) if block in only
    ]
    rows, of_blocks = [], []
    for norm, dtype, peer in track(norms, "Norms") if norms else ():
        with asked_by(peer, target.platform):
            found = passes.count(JAX_PEERS[peer]()[norm], SHAPES[norm], dtype, devices, target.cost)
        rows.append({"norm": norm, "dtype": dtype, "peer": peer} | found)
    for block, kind in track(pairs, "Blocks") if pairs else ():
        found = blocks.count(BLOCKS[block], kind, devices[0], target)
        of_blocks.append({"block": block, "kind": kind} | found)
    return rows, of_blocks


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ahead", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("target", choices=tuple(TARGETS), help="a TPU v5e, or an NVIDIA H100")
    names = (*SHAPES, *BLOCKS)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="norms and blocks, of %(choices)s; the results have these alone",
    )
    options = parser.parse_args()
    target = TARGETS[options.target]
    try:
        with compiling_for(target) as devices:
            rows, of_blocks = count(target, options.only, devices)
    except NoCompilerError as error:
        print(f"bench.ahead: {error}", file=sys.stderr)
        return 1
    facts = {
        "name": options.target.upper(),
        "device": devices[0].device_kind,
        "chips": len(devices),
        "commit": commit(),
        "packages": {"jax": jax.__version__, **versions(), target.compiler: version(target)},
    }
    results = {**facts, "rows": rows, "blocks": of_blocks}
    (RESULTS / f"{options.target}.json").write_text(json.dumps(results, indent=1))
    command = " ".join(["python -m bench.ahead", *sys.argv[1:]])
    text = page(command, target, facts, rows, of_blocks)
    (RESULTS / f"{options.target}.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
