#!/usr/bin/env bash
# One would guess: linen's MultiHeadDotProductAttention passes its mask to attention_fn, which may take it among its **options; or it
#   says that the function does not take a mask.
# What happens: Flax 0.12.8 passes the arguments that inspect.signature names, and no others. To a function of (query, key, value,
#   **options) it passes no mask, no dropout and no precision, without a word: causal attention then sees the future. A function with
#   the signature of flax.linen.dot_product_attention, for example by functools.wraps, gets them all.
# Why it matters: such a function is how queries and keys are normalized in a linen model (QK norm), as in f(norm(query), norm(key),
#   value, **options). The model trains, with a loss that is far too good.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 flax==0.12.8
cat > "$folder/program.py" <<'PROGRAM'
from functools import wraps

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

unit = lambda a: a / jnp.sqrt((a**2).mean(-1, keepdims=True) + 1e-6)


def of_keywords(query, key, value, **options):
    return nn.dot_product_attention(unit(query), unit(key), value, **options)


@wraps(nn.dot_product_attention)
def wrapped(*arrays, **options):
    return of_keywords(*arrays, **options)


x = jax.random.normal(jax.random.key(0), (2, 6, 8))
changed = x.at[:, -1].add(1.0)  # the last position alone
mask = nn.make_causal_mask(jnp.ones((2, 6)))
print("flax", flax.__version__)
sees = []
for name, function in (("(query, key, value, **options)", of_keywords), ("the signature of dot_product_attention", wrapped)):
    layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=function)
    variables = layer.init(jax.random.key(1), x, mask=mask)
    first = lambda x: layer.apply(variables, x, x, x, mask=mask)[:, 0]
    change = float(jnp.abs(first(changed) - first(x)).max())
    print(f"{name}: the first output moves by {change:.3f} with the last input, under a causal mask")
    sees.append(change > 0)
raise SystemExit(sees != [True, False])
PROGRAM
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/program.py"
