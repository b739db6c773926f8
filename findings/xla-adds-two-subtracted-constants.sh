#!/usr/bin/env bash
# One would guess: (x - high) - low is computed in that order, since floating-point subtraction is not associative and XLA's fast
#   math is off by default.
# What happens: where high and low are constants of the compiled program, XLA computes x - (high + low), in float32, and low is lost
#   in that sum. As arguments of the same program, or outside of jit, they are subtracted in turn. (c - p) + low alike.
# Why it matters: a mean that is no float32 number is carried in two parts, and statistics of a data set are constants of the
#   program that normalizes by them. A barrier around the low part keeps the order.
# JAX 0.12.0.1 subtracts in turn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

high, low = np.float32(1e7), np.float32(0.5)
x = jnp.array([1e7, 1e7 + 1], jnp.float32)
in_turn = lambda x, high, low: (x - high) - low
from_it = lambda x, high, low: (high - x) + low
print("jax", jax.__version__)
found = {
    "outside of jit": in_turn(x, high, low),
    "arguments": jax.jit(in_turn)(x, high, low),
    "constants": jax.jit(lambda x: in_turn(x, high, low))(x),
    "constants, low behind a barrier": jax.jit(lambda x: in_turn(x, high, lax.optimization_barrier(jnp.asarray(low))))(x),
    "constants, (high - x) + low": jax.jit(lambda x: from_it(x, high, low))(x),
}
for name, y in found.items():
    print(f"{name}: {y.tolist()}")
expected = [[-0.5, 0.5], [-0.5, 0.5], [0.0, 1.0], [-0.5, 0.5], [0.0, -1.0]]
raise SystemExit([y.tolist() for y in found.values()] != expected)
PROGRAM
