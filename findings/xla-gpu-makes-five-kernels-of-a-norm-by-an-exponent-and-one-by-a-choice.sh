#!/usr/bin/env bash
# One would guess: XLA makes one GPU kernel of an RMS norm of rows whatever way the rows are scaled first by a power of two, since each
#   step (largest element, scale, mean of squares, output) takes one row alone. For softmax and layer norm it does.
# What happens, compiled for an H100: with the power chosen among constants, and epsilon the same for all, it is 1 kernel that reads x and
#   writes y. With the power made of the exponent's bits (frexp, shifts), or with an epsilon that is scaled by the power, it is 3 to 5
#   kernels, which read x up to three times. Nothing is said, and values are the same.
# Why it matters: bfloat16 has float32's range, so a norm of it has to scale before it squares. The obvious way doubles the memory traffic
#   of the output. No GPU is needed to see it: the plug-in compiles ahead of time.
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
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
jax.devices()
device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100).devices[0]
x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16, sharding=SingleDeviceSharding(device))


def by_bits(largest):
    exponent = jnp.frexp(largest)[1]
    return lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)


def by_choice(largest):
    return jnp.where(largest < 2.0**50, 1.0, jnp.where(largest < 2.0**90, 2.0**-40, 2.0**-78))


def rms_norm(power, scaled_epsilon, x):
    u = x.astype(jnp.float32)
    unit = power(jnp.max(jnp.abs(u), -1, keepdims=True))
    u = u * unit
    epsilon = jnp.maximum(1e-6 * unit * unit, 2.0**-126) if scaled_epsilon else 1e-6
    return (u * lax.rsqrt(jnp.mean(u * u, -1, keepdims=True) + epsilon)).astype(x.dtype)


def kernels(power, scaled_epsilon):
    program = jax.jit(lambda x: rms_norm(power, scaled_epsilon, x)).trace(x).lower().compile().as_text()
    lines = re.findall(r"^ +(?:ROOT )?%\S+ = .*?[\})\]] ([a-z][\w-]*)\(", program[program.index("\nENTRY") :], re.M)
    return sum(operation not in FREE for operation in lines)


print("jax", jax.__version__, device.device_kind)
found = {}
for name, power in (("bits", by_bits), ("choice", by_choice)):
    for scaled in (False, True):
        found[name, scaled] = kernels(power, scaled)
        print(f"power by {name:6}, epsilon {'scaled' if scaled else 'as is ':6}: kernels {found[name, scaled]}")
assert found["choice", False] == 1, "xla has changed"
assert all(number > 1 for way, number in found.items() if way != ("choice", False)), "xla has changed"
PROGRAM
