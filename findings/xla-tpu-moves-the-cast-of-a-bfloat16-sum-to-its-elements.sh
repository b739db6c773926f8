#!/usr/bin/env bash
# One would guess: the gradients of scale and bias of a norm are two sums over the same bfloat16 array, dy times x and dy, both taken in
#   float32 and cast at the end. XLA makes one loop of them, which reads dy once, whatever the dtype of the results.
# What happens, compiled for a TPU v5e: with float32 results it is one loop. With the second sum cast to bfloat16, XLA drops both casts and
#   sums bfloat16 with a bfloat16 result, in a loop of its own: dy is read twice, and the program says that the sum is one of bfloat16. An
#   optimization barrier around the sum, before its cast, restores the one loop in float32.
# Why it matters: parameters in bfloat16 cost a norm's backward pass a sixth more memory traffic, and the float32 that was asked for is gone
#   from the program. No TPU is needed to see it: libtpu compiles ahead of time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/env/bin/python" - 2>/dev/null <<'PROGRAM'
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

jax.devices()
chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
rows = jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16, sharding=SingleDeviceSharding(chip))


def sums(finish):
    def call(x, dy):
        wide = dy.astype(jnp.float32)
        return (wide * x.astype(jnp.float32)).sum(0), finish(wide.sum(0))

    return call


def loops(finish):
    text = jax.jit(sums(finish)).trace(rows, rows).lower().compile().as_text()
    entry = text[text.index("\nENTRY") :]
    return re.findall(r" = (\S.*?) (fusion|reduce)\(", entry)


cases = {
    "float32": lambda a: a,
    "cast to bfloat16": lambda a: a.astype(jnp.bfloat16),
    "cast behind a barrier": lambda a: lax.optimization_barrier(a).astype(jnp.bfloat16),
}
found = {name: loops(finish) for name, finish in cases.items()}
print("jax", jax.__version__)
for name, made in found.items():
    print(f"{name}: {len(made)} loops over the rows: {[types.split('{')[0] for types, _ in made]}")
in_bfloat16 = lambda name: any(types.startswith("bf16") and kind == "reduce" for types, kind in found[name])
assert in_bfloat16("cast to bfloat16"), "no sum in bfloat16 any more"
assert not in_bfloat16("float32") and not in_bfloat16("cast behind a barrier")
PROGRAM
