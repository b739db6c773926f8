#!/usr/bin/env bash
# One would guess: within `nn.intercept_methods(f)` every call of a linen module goes through f, as its documentation says; under jax.jit
#   the function is traced again, or the program belongs to the context.
# What happens: jit looks at its arguments alone. A function that ran once outside the context keeps its program within it, and f is not
#   called. A function that ran first within the context keeps f's program outside of it, for good. Nothing is said. What separates them is
#   a context of JAX's own, jax.make_user_context, whose value is a part of the key by which jit finds programs.
# Why it matters: interceptors are how one replaces a norm, watches its input or leaves it out without a change of the model. In a training
#   step by jit that has run before, nothing is replaced, and what was measured is the old norm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

x = jnp.array([[1.0, 3.0]])
norm = nn.LayerNorm(use_scale=False, use_bias=False, epsilon=0)
apply = lambda x: norm.apply({}, x)


def left_out(call, args, kwargs, context):
    return args[0] if context.method_name == "__call__" else call(*args, **kwargs)


def results(step, within_first):
    def within():
        with nn.intercept_methods(left_out):
            return step(x).tolist()

    return (within(), step(x).tolist())[::-1] if within_first else (step(x).tolist(), within())


found = {first: results(jax.jit(lambda x: apply(x)), first) for first in (False, True)}
named = jax.make_user_context(None)


def in_a_context_of_jax():
    step = jax.jit(lambda x: apply(x))
    outside = step(x).tolist()
    with nn.intercept_methods(left_out), named("left out"):
        return outside, step(x).tolist()


apart = in_a_context_of_jax()
print("jax", jax.__version__, "flax", flax.__version__)
print("eager                      outside, within:", *results(apply, False))
print("jit, outside first         outside, within:", *found[False])
print("jit, within first          outside, within:", *found[True])
print("jit, in a context of JAX   outside, within:", *apart)
normalized, plain = [[-1.0, 1.0]], [[1.0, 3.0]]
assert results(apply, False) == (normalized, plain), "flax has changed"
assert found == {False: (normalized, normalized), True: (plain, plain)}, "jax or flax has changed"
assert apart == (normalized, plain), "jax has changed"
PROGRAM
