#!/usr/bin/env bash
# One would guess: x / d in JAX is the quotient of IEEE 754 for each element, whatever shape d has, since XLA's fast math is off by default.
# What happens on a CPU: where d is broadcast, as a deviation is, XLA divides 1 by d once and multiplies. So 3e38 / 3e38 is 0 for every d
#   above 8.5e37, whose reciprocal is subnormal and counts as 0, under jit and without; and of ordinary quotients 27 % have another last
#   bit than NumPy's. Where d has the shape of x, all quotients are those of NumPy.
# Why it matters: normalizing is division by a broadcast number. A reference in NumPy differs by a bit, and a range as wide as that of
#   float32 normalizes to 0 without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
divide = jax.jit(jnp.divide)
for d in (8e37, 9e37, 3e38):
    x = np.full((4, 8), d, np.float32)
    row = x[0]
    found = [float(divide(x, row)[0, 0]), float((jnp.asarray(x) / row)[0, 0]), float(divide(x, x)[0, 0])]
    print(f"{d:g} / {d:g}: broadcast, jit {found[0]}, without jit {found[1]}; of the same shape {found[2]}")
    assert found == ([1.0, 1.0, 1.0] if d < 8.5e37 else [0.0, 0.0, 1.0]), "xla has changed"

rng = np.random.default_rng(0)
x, d = rng.normal(size=(1000, 64)).astype("float32"), rng.uniform(0.5, 2, 64).astype("float32")
other = np.mean(np.asarray(divide(x, d)) != x / d)
same = np.mean(np.asarray(divide(x, np.broadcast_to(d, x.shape).copy())) != x / d)
print(f"ordinary quotients that differ from NumPy's: broadcast {other:.0%}, of the same shape {same:.0%}")
assert 0.1 < other < 0.5 and same == 0, "xla has changed"
PROGRAM
