#!/usr/bin/env bash
# One would guess: with xla_allow_excess_precision off, a jitted function of bfloat16 has the bits of its operations one by one.
# What happens: on a CPU, JAX 0.10.2 and 0.12.0.1 leave out the rounding of the square in mean(square(x)) all the same, by
#   compiler_options and by XLA_FLAGS: 17 of 1024 means, and 0.7 % of the outputs of an RMS norm written in bfloat16, differ from eager
#   ones. JAX 0.7.2 does as it is told. A square that is returned is rounded in all of them.
# Why it matters: this flag is what one turns to, to compare a model's bits under jit with a checkpoint's. RMS norms that are written
#   without a cast to float32, as Google's Gemma for JAX is, cannot be compared so; lax.reduce_precision of each result can.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 512)), jnp.bfloat16)
bits = jnp.finfo(jnp.bfloat16)
rounded = lambda a: jax.lax.reduce_precision(a.astype(jnp.float32), bits.nexp, bits.nmant)
functions = {
    "square": jnp.square,
    "mean(square)": lambda x: jnp.mean(jnp.square(x), -1, keepdims=True),
    "x * rsqrt(mean(square) + 1e-6)": lambda x: x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6),
    "mean(reduce_precision(square))": lambda x: jnp.mean(rounded(jnp.square(x)), -1, keepdims=True).astype(x.dtype),
}
strict = {} if "XLA_FLAGS" in os.environ else {"compiler_options": {"xla_allow_excess_precision": False}}
print("jax", jax.__version__, os.environ.get("XLA_FLAGS", "by compiler_options"))
differ = {}
for name, function in functions.items():
    eager, jitted = function(x), jax.jit(function, **strict)(x)
    differ[name] = int((eager != jitted).sum())
    print(f"{name}: {differ[name]} of {eager.size} differ")
kept = sys.argv[1] == "kept"
expected = [False, kept, kept, False]
raise SystemExit([bool(count) for count in differ.values()] != expected)
PROGRAM
export JAX_PLATFORMS=cpu
for version in 0.7.2 0.10.2; do
  python3.11 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q jax==$version jaxlib==$version
done
"$folder/0.7.2/bin/python" "$folder/program.py" dropped
"$folder/0.10.2/bin/python" "$folder/program.py" kept
XLA_FLAGS=--xla_allow_excess_precision=false "$folder/0.10.2/bin/python" "$folder/program.py" kept
