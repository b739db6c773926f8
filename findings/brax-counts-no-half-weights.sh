#!/usr/bin/env bash
# One would guess: weights of running_statistics.update may be fractions: their docstring says that a weight of 2 is as good as two points.
# What happens: brax casts the sum of the weights to int32. Of weights 0.5 and 0.25 the count stays 0 and the mean is inf; of 1.5 and 1.25
#   the count is 2, the sum of squares is below 0, and the deviation is 1e-6, of two observations that differ by 2.
# Why it matters: importance weights are fractions. The observations are then divided by 1e-6, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q brax==0.14.2 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import importlib.metadata

import jax.numpy as jnp
from brax.training.acme import running_statistics

print("brax", importlib.metadata.version("brax"))
found = []
for weights in ([1.0, 1.0], [0.5, 0.25], [1.5, 1.25]):
    state = running_statistics.init_state(jnp.zeros(1))
    state = running_statistics.update(state, jnp.array([[1.0], [3.0]]), weights=jnp.array(weights))
    found.append((int(state.count), state.mean.item(), state.std.item()))
    print(f"weights {weights}: count {found[-1][0]}, mean {found[-1][1]:.4f}, deviation {found[-1][2]:.6f}")
whole, less, more = found
raise SystemExit(not (whole == (2, 2.0, 1.0) and less[0] == 0 and more[0] == 2 and more[2] < 1e-5))
PROGRAM
