#!/usr/bin/env bash
# One would guess: JAX, which has integers of 32 bits by default, refuses a number that these do not hold, or wraps it, in one way.
# What happens: a list with 2**32 + 1 is an OverflowError, and an int64 array of NumPy with the same number becomes 1 without a
#   warning, in jnp.asarray, in jax.device_put and as an argument of jit. A floating array is warned about where a dtype is asked for.
# Why it matters: segment ids, lengths and counts come from NumPy. An id that no segment has is then the id of another one, and its
#   elements are added to the wrong mean, before any check within JAX can see it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" -W error - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

ids = np.array([0, 2**32 + 1])
print("jax", jax.__version__)
ways = {"asarray": jnp.asarray, "device_put": jax.device_put, "argument of jit": jax.jit(lambda a: a + 0)}
found = {name: way(ids).tolist() for name, way in ways.items()}
try:
    found["asarray of a list"] = jnp.asarray(ids.tolist()).tolist()
except OverflowError as error:
    found["asarray of a list"] = f"OverflowError: {error}"
sums = jax.ops.segment_sum(jnp.array([1.0, 10.0]), ids, 2)
found["segment_sum of 1 and 10 by ids 0 and 2**32 + 1"] = sums.tolist()
for name, value in found.items():
    print(f"{name}: {value}")
wrapped = [found[name] for name in ways] == [[0, 1]] * 3
raise SystemExit(not (wrapped and found["asarray of a list"].startswith("OverflowError") and sums.tolist() == [1.0, 10.0]))
PROGRAM
