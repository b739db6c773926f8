#!/usr/bin/env bash
# One would guess: jit of vmap gives what jit gives for each example, up to rounding.
# What happens: in jaxlib 0.10.2 on a CPU, t + x * sum(x * t, -1) for one x of (3, 5, 32) and 480 t is wrong by as much as the result
#   itself. XLA hands the sum of the product, with what reads it, to YNNPACK as one fused loop; a factor that is broadcast along the
#   first axis, and not along the second, is then read at the wrong place. Small batches, x of (32,) and a sum that nothing in the
#   loop reads are right. An optimization barrier does not help, since XLA removes it before; lax.reduce_precision of the sum to
#   float32's own precision does, and so does the flag below. 0.10.1 makes no such loop, 0.11.0 makes one that is right.
# Why it matters: this is the projection in the derivative of every norm, and vmap over t is how jacfwd, jacrev and hessian call
#   it. 0.10.2 is the newest release for Python 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
cat > "$folder/program.py" <<'PROGRAM'
import sys

import jax
import jaxlib
import numpy as np
from jax import lax

rng = np.random.default_rng(0)
keep = lambda total: total
to_float32 = lambda total: lax.reduce_precision(total, 8, 23)


def largest_error(end, directions, shape):
    x = rng.normal(size=shape).astype(np.float32)
    t = rng.normal(size=(directions, *shape)).astype(np.float32)
    project = lambda d: d + x * end((x * d).sum(-1, keepdims=True))
    found = np.asarray(jax.jit(jax.vmap(project))(t), np.float64)
    wide = x.astype(np.float64)
    truth = t + wide * (wide * t).sum(-1, keepdims=True)
    return np.abs(found - truth).max() / np.abs(truth).max()


print("jaxlib", jaxlib.__version__, sys.argv[1])
wrong = []
for name, arguments in {
    "480 directions, x of (3, 5, 32)": (keep, 480, (3, 5, 32)),
    "480 directions, x of (3, 5, 32), sum behind a barrier": (lax.optimization_barrier, 480, (3, 5, 32)),
    "480 directions, x of (3, 5, 32), sum by reduce_precision": (to_float32, 480, (3, 5, 32)),
    "480 directions, x of (32,)": (keep, 480, (32,)),
    "8 directions, x of (3, 5, 32)": (keep, 8, (3, 5, 32)),
}.items():
    error = largest_error(*arguments)
    print(f"{name}: largest error {error:.1e} of the largest value")
    wrong.append(bool(error > 1e-3))
raise SystemExit(wrong != ([True, True, False, False, False] if sys.argv[1] == "as it is" else [False] * 5))
PROGRAM
export JAX_PLATFORMS=cpu
"$folder/env/bin/python" "$folder/program.py" "as it is"
XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=" "$folder/env/bin/python" "$folder/program.py" "without YNNPACK"
