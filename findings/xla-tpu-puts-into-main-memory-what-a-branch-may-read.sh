#!/usr/bin/env bash
# One would guess: on a TPU lax.cond costs nothing while its predicate is False. A batch norm after a convolution can look at its cheap sums,
#   and read x again only where they are not accurate.
# What happens, compiled for a TPU v5e with libtpu 0.0.42.1: a bfloat16 x of 49 MiB, which the convolution else leaves in VMEM for the norm,
#   goes to main memory if a branch may read it, and comes back for the norm whether the branch was taken or not: 4 sizes of x move, not 2.
#   With libtpu 0.0.52 of JAX 0.12 it stays in VMEM. Nothing is said.
# Why it matters: a check of a norm's accuracy that is free by one compiler doubles its memory traffic by another. No TPU is needed to see it.
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
place = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(chip))
AXES = (0, 1, 2)


def norm_after_convolution(branch):
    def call(x, weight):
        x = lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        wide = x.astype(jnp.float32)
        mean, square = (jnp.mean(a, AXES, keepdims=True) for a in (wide, wide * wide))
        var = square - mean * mean
        if branch:
            far = (mean * mean > 7 * var).any()
            again = lambda: jnp.mean((x.astype(jnp.float32) - mean) ** 2, AXES, keepdims=True)
            var = lax.cond(far, again, lambda: var)
        return ((wide - mean) * lax.rsqrt(var + 1e-5)).astype(x.dtype)

    return call


def where_the_convolution_leaves_x(branch):
    text = jax.jit(norm_after_convolution(branch)).trace(place(64, 56, 56, 128), place(3, 3, 128, 128)).lower().compile().as_text()
    made = re.search(r"convert_reduce_fusion = \(.*bf16\[64,56,56,128\]\{(\S+?)\}\) fusion", text[text.index("\nENTRY") :])
    return "VMEM" if "S(1)" in made[1] else "main memory"


found = {branch: where_the_convolution_leaves_x(branch) for branch in (False, True)}
print("jax", jax.__version__)
for branch, place in found.items():
    print(f"x, {'which a branch may read' if branch else 'without a branch'}: {place}")
assert found == {False: "VMEM", True: "main memory"}
PROGRAM
