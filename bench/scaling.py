"""Collectives and bytes of a training step over 1 to 8 devices: batch, layer and group norm, ours
and Flax's, and without norms.

    python -m bench.scaling [--rounds 11] [--out bench/results/scaling]

writes scaling.json and scaling.md there. Counts are read from compiled programs and do not vary
from run to run; times are of host devices, which share the cores of one machine. Data parallel,
both ways: ``jit`` of sharded arrays, and shard_map with ``axis_name``.
"""

import argparse
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# before JAX reads it
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import track

from bench.models import ResNet, Transformer
from bench.peers import wished
from bench.speed import repeats_for, sample
from bench.stamp import commit
from bench.transfers import ARRAY, BYTES, COLLECTIVE
from jaxnorm import linen as jn
from jaxnorm.experiments.report import machine

DEVICES = (1, 2, 4, 8)
# of machine code alone: no collectives
QUICK = (("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True))
AXIS = "data"
WAYS = ("jit", "shard_map")
PARTS = ("output", "step")


class Without:
    """Norms that do nothing, so that nothing is summed over devices for them."""

    @staticmethod
    def nothing(*_, **options):
        return lambda x: x

    LayerNorm = BatchNorm = GroupNorm = nothing


KINDS = {"jaxnorm": jn, "flax": nn, "without norms": Without}
NORMS = {"batch": "BatchNorm", "layer": "LayerNorm", "group": "GroupNorm"}


class Alone(nn.Module):
    """One norm between two layers, so that its gradients by x, scale and bias are all needed."""

    norms: object
    norm: str
    features: int = 32

    @nn.compact
    def __call__(self, x):
        options = {
            "batch": {"use_running_average": False},
            "layer": {},
            "group": {"num_groups": 8},
        }[self.norm]
        return nn.Dense(8)(
            getattr(self.norms, NORMS[self.norm])(**options)(nn.Dense(self.features)(x))
        )


# The model, how many norms it has, and the shape of a batch.
MODELS: dict[str, tuple[Callable, int, tuple[int, ...]]] = {
    **{f"one {norm} norm": (partial(Alone, norm=norm), 1, (64, 8, 8, 16)) for norm in NORMS},
    "ResNet stage, batch norm": (
        partial(ResNet, kind="batch", blocks=1, features=32),
        2,
        (64, 16, 16, 32),
    ),
    "ResNet stage, group norm": (
        partial(ResNet, kind="group", blocks=1, features=32),
        2,
        (64, 16, 16, 32),
    ),
    "transformer, layer norm": (partial(Transformer, blocks=1, features=64), 3, (64, 16, 64)),
}


def norms_of(kind: str, way: str) -> object:
    """The classes, of which batch norm is told the axis that shard_map binds."""
    module = KINDS[kind]
    batch = partial(module.BatchNorm, axis_name=AXIS if way == "shard_map" else None)
    return SimpleNamespace(BatchNorm=batch, LayerNorm=module.LayerNorm, GroupNorm=module.GroupNorm)


def program(
    name: str, kind: str, way: str, part: str, devices: int, options: tuple = ()
) -> tuple[jax.stages.Compiled, tuple]:
    """The compiled output, or step of gradient descent, over so many devices, and arrays to call it
    with.
    """
    make, _, shape = MODELS[name]
    model, x = (
        make(norms_of(kind, way)),
        np.random.default_rng(0).normal(size=shape).astype(np.float32),
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))
    total = partial(jax.lax.pmean, axis_name=AXIS) if way == "shard_map" else lambda value: value
    types = jax.eval_shape(make(norms_of(kind, "jit")).init, jax.random.key(0), x)
    # no count and no time depends on them
    variables = jax.tree.map(lambda of: np.full(of.shape, 0.01, of.dtype), types)

    def output(variables, x):
        return model.apply(variables, x, mutable=["batch_stats"])

    def step(variables, x):
        def loss(params):
            y, new = output({**variables, "params": params}, x)
            return total((y**2 * jnp.arange(y.shape[-1], dtype=y.dtype)).mean()), new

        (_, new), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return {
            "params": jax.tree.map(lambda p, g: p - 1e-3 * g, variables["params"], gradient),
            **new,
        }

    function, results = (output, (P(AXIS), P())) if part == "output" else (step, P())
    if way == "shard_map":
        compiled = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=results)
        )
    else:
        compiled = jax.jit(
            function, out_shardings=jax.tree.map(partial(NamedSharding, mesh), results)
        )
    given = (
        jax.device_put(variables, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P(AXIS))),
    )
    return compiled.lower(*given).compile(compiler_options=dict(options)), given


def collectives(text: str) -> list[tuple[str, int]]:
    """The kind and the bytes of each collective of a compiled program: those of its results, on one
    device.

    >>> collectives("  %sums = (f32[8]{0}, f32[4,2]{1,0}) all-reduce(%a, %b), to_apply=%add")
    [('all-reduce', 64)]
    """
    found = re.findall(rf"^\s*(?:ROOT )?%\S+ = (.*?){COLLECTIVE.pattern}", text, re.MULTILINE)
    return [
        (kind, sum(size_of(*array[:2]) for array in ARRAY.findall(results)))
        for results, kind in found
    ]


def size_of(dtype: str, shape: str) -> int:
    return BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size)


def count(name: str, kind: str, way: str, devices: int) -> dict:
    """The collectives of the output and of the step, and the bytes of all of them."""
    found = {}
    for part in PARTS:
        rows = collectives(program(name, kind, way, part, devices, QUICK)[0].as_text())
        found[part] = {
            "kinds": dict(Counter(kind for kind, _ in rows)),
            "bytes": sum(size for _, size in rows),
        }
    return {"model": name, "kind": kind, "way": way, "devices": devices, **found}


def times(name: str, kind: str, rounds: int) -> dict:
    """Of a sharded step over each number of devices, relative to one: the median ratio of
    neighbours in time.
    """
    calls = {}
    for devices in DEVICES:
        step, given = program(name, kind, "jit", "step", devices)
        calls[devices] = partial(step, *given)
    repeats, order, rng = (
        {devices: repeats_for(call) for devices, call in calls.items()},
        list(DEVICES),
        random.Random(0),
    )
    ratios: dict[int, list[float]] = {devices: [] for devices in DEVICES}
    for _ in range(rounds):
        rng.shuffle(order)
        seconds = {devices: sample(calls[devices], repeats[devices])[0] for devices in order}
        for devices in DEVICES:
            ratios[devices].append(seconds[devices] / seconds[1])
    return {
        "model": name,
        "kind": kind,
        "ratios": {devices: float(np.median(values)) for devices, values in ratios.items()},
    }


def format_counts(found: dict) -> str:
    kinds = (
        ", ".join(f"{number} {name}" for name, number in sorted(found["kinds"].items())) or "none"
    )
    return f"{kinds}; {found['bytes']:,} B" if found["kinds"] else kinds


def counts_table(rows: list[dict]) -> str:
    """A row for each model, way and number of devices; devices with the same counts share one."""
    lines = [
        "| model (norms) | by | devices | of | " + " | ".join(KINDS) + " |",
        "|---" * (4 + len(KINDS)) + "|",
    ]
    for name, (_, norms, _) in MODELS.items():
        for way in WAYS:
            for part in PARTS:
                by_cells: dict[tuple, list[int]] = {}
                for devices in DEVICES:
                    cells = tuple(
                        format_counts(row[part])
                        for kind in KINDS
                        for row in rows
                        if (row["model"], row["kind"], row["way"], row["devices"])
                        == (name, kind, way, devices)
                    )
                    by_cells.setdefault(cells, []).append(devices)
                for cells, of in by_cells.items():
                    lines.append(
                        f"| {name} ({norms}) | {way} | {', '.join(map(str, of))} | {part} | "
                        + " | ".join(cells)
                        + " |"
                    )
    return "\n".join(lines)


def times_table(rows: list[dict]) -> str:
    lines = [
        "| step | " + " | ".join(f"{devices} devices" for devices in DEVICES[1:]) + " |",
        "|---" * len(DEVICES) + "|",
    ]
    cells = [
        [
            f"{row['model']}, {row['kind']}",
            *(f"{row['ratios'][devices]:.2f}" for devices in DEVICES[1:]),
        ]
        for row in rows
    ]
    lines += [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(lines)


TEXT = """# Collectives of a training step over several devices

`{command}`: jax {jax}, flax {flax}, {cores} cores, commit {commit}.

How many collectives a compiled program has, and the bytes of their results on each device, for the
output (with the new running statistics) and for a step (which sums the gradients of the parameters
over devices, in every model). Exact: read from the program. XLA joins sums that do not wait for
each other into one collective.

{counts}

Time of a step (`jit`) of the same batch over host devices, relative to one device: the median of
{rounds} interleaved rounds. These devices are threads that share {cores} cores with each other and
with other work, and hand sums over in memory: the ratios show that cost on one machine, and nothing
of an interconnect. The two ResNets without norms are the same program: by what their rows differ,
others differ too.

{times}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=11, help="measured rounds, 11 by default")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/scaling"), help="results, without suffix"
    )
    options = parser.parse_args()
    cases = [
        (name, kind, way, devices)
        for name in MODELS
        for kind in KINDS
        for way in WAYS
        for devices in DEVICES
    ]
    with wished("xla"):  # plain JAX: kernels are for CPUs
        rows = [count(*case) for case in track(cases, "Compiling")]
        of_models = [
            (name, kind) for name, (_, norms, _) in MODELS.items() if norms > 1 for kind in KINDS
        ]
        measured = [times(*case, options.rounds) for case in track(of_models, "Measuring")]
    command = f"python -m bench.scaling --rounds {options.rounds} --out {options.out}"
    facts = machine() | {"commit": commit(), "command": command, "rounds": options.rounds}
    options.out.with_suffix(".json").write_text(
        json.dumps({"machine": facts, "counts": rows, "times": measured}, indent=1) + "\n"
    )
    text = TEXT.format(**facts, counts=counts_table(rows), times=times_table(measured))
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
