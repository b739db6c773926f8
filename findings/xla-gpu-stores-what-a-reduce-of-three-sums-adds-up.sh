#!/usr/bin/env bash
# One would guess: batch statistics of bfloat16 that take three sums over the examples (of u, and of u**2 in two scales, since squares
#   leave float32's range) are one kernel that reads x once, as two sums are; and if not as three sums, then as one reduce of three operands.
# What happens, compiled for an H100: two sums are 1 kernel that reads x, three sums are 2. One reduce of three operands is 1 kernel that
#   reads x and writes all three arrays of float32, six times the size of x, for another to add up. One reduce of two operands writes
#   nothing. Values are the same, and nothing is said.
# Why it matters: the third sum costs a second read of x, and the way around it that reads like one pass moves four times as much as that.
#   No GPU is needed to see it: the plug-in compiles ahead of time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
"$folder/env/bin/pip" install -q --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12==12.9.86 nvidia-nvjitlink-cu12==12.9.86
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
INSTRUCTION = re.compile(r"^ +(?:ROOT )?(%\S+) = .*?[\})\]] ([a-z][\w-]*)\((.*?)\)", re.M)
jax.devices()
device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100).devices[0]
x = jax.ShapeDtypeStruct((200704, 256), jnp.bfloat16, sharding=SingleDeviceSharding(device))


def terms(x, number):
    u = x.astype(jnp.float32) - 1
    return (u, u * u, (u * 2.0**-78) ** 2)[:number]


def apart(x, number):
    return [jnp.sum(term, 0) for term in terms(x, number)]


def together(x, number):
    add = lambda a, b: tuple(one + other for one, other in zip(a, b))
    return lax.reduce(terms(x, number), (jnp.float32(0),) * number, add, (0,))


def cost(sums, number):
    """Return how many kernels read x, and the sizes of x that are stored on the way."""
    program = jax.jit(lambda x: sums(x, number)).trace(x).lower().compile()
    text = program.as_text()
    names, kernels = set(), 0
    for name, operation, operands in INSTRUCTION.findall(text[text.index("\nENTRY") :]):
        reads = names & set(re.findall(r"%[\w.-]+", operands))
        if (operation, operands) == ("parameter", "0") or (operation == "bitcast" and reads):
            names.add(name)
        else:
            kernels += bool(reads)
    return kernels, round(program.memory_analysis().temp_size_in_bytes / (2 * x.size), 1)


print("jax", jax.__version__, device.device_kind)
found = {}
for sums in (apart, together):
    for number in (2, 3):
        found[sums.__name__, number] = cost(sums, number)
        kernels, stored = found[sums.__name__, number]
        print(f"{number} sums {sums.__name__:8}: kernels that read x {kernels}, stored on the way {stored} sizes of x")
expected = {("apart", 2): (1, 0.0), ("apart", 3): (2, 0.0), ("together", 2): (1, 0.0), ("together", 3): (1, 6.0)}
assert found == expected, "xla has changed"
PROGRAM
