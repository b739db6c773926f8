#!/usr/bin/env bash
# One would guess: a flax.nnx model that a transformation calls updates its running statistics, as nnx.jit does, or the transformation
#   refuses to drop the update.
# What happens: jax.jit of a function of the model, and nnx.scan with the model broadcast (in_axes=None), return the right output, raise
#   nothing, and leave mean and variance as they were. Carried by nnx.StateAxes they are updated at every step.
# Why it matters: training runs and the loss falls, since batches are normalized by their own statistics. Evaluation then normalizes by
#   mean 0 and variance 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import flax
import jax
import jax.numpy as jnp
from flax import nnx

batches = jnp.ones((2, 4, 3))  # of mean 1
call = lambda norm, x: norm(x)
carried = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})
ways = {
    "nnx.jit": lambda norm: nnx.jit(call)(norm, batches[0]),
    "jax.jit": lambda norm: jax.jit(call)(norm, batches[0]),
    "nnx.scan, broadcast": lambda norm: nnx.scan(call, in_axes=(None, 0), out_axes=0)(norm, batches),
    "nnx.scan, carried": lambda norm: nnx.scan(call, in_axes=(carried, 0), out_axes=0)(norm, batches),
}
print("flax", flax.__version__, "jax", jax.__version__)
means = {}
for name, way in ways.items():
    norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    way(norm)
    means[name] = norm.mean[...].tolist()
    print(f"{name}: running mean {means[name]}")
raise SystemExit(list(means.values()) != [[0.5] * 3, [0.0] * 3, [0.0] * 3, [0.75] * 3])
PROGRAM
