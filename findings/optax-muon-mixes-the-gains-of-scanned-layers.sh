#!/usr/bin/env bash
# One would guess: optax.contrib.muon, which is for matrices, leaves the gains and biases of norms to Adam, and takes the kernels.
# What happens: it takes every leaf of rank 2 and no other. In a model whose layers nn.scan stacks, a gain is (layers, features), of rank
#   2, and a kernel (layers, in, out), of rank 3. So the gains of all layers are orthogonalized together, as the rows of one matrix, and
#   the kernels get Adam. If the gradient of one layer becomes 100 times larger, the updates of the other layers' gains change by a sixth.
#   Nothing is said. The same model without nn.scan is treated as one would guess.
# Why it matters: a scan over layers is how large models compile, and is meant to change nothing. With it Muon trains the norms of a model
#   and none of its weights. muon_weight_dimension_numbers says which axes are a matrix, and must be given.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 flax==0.12.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

LAYERS, FEATURES = 4, 16


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(FEATURES)(nn.LayerNorm()(x)), None


Stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
params = Stack().init(jax.random.key(0), jnp.ones((2, FEATURES)), None)["params"]
rng = np.random.default_rng(0)
gradients = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params)


def update(gradients, **options):
    optimizer = optax.contrib.muon(1.0, **options)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


def change(name, leaf, **options):
    """The change of the updates of layers 1 to 3, if the gradient of layer 0 is 100 times as large."""
    larger = jax.tree.map(lambda g: g.at[0].multiply(100.0), gradients)
    before, after = (update(g, **options)[name][leaf][1:] for g in (gradients, larger))
    return float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))


def is_orthogonal(name, leaf):
    """Whether the singular values of the update are near each other, as Muon makes them."""
    values = jnp.linalg.svd(update(gradients)[name][leaf].reshape(-1, FEATURES), compute_uv=False)
    return bool(values[-1] > values[0] / 2)


print("optax", optax.__version__, {"/".join(k.key for k in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)})
gain, kernel = change("LayerNorm_0", "scale"), change("Dense_0", "kernel")
print(f"gains of the other layers change by {gain:.0%}, their kernels by {kernel:.0%}")
taken = is_orthogonal("LayerNorm_0", "scale")
print("the gains of all layers are one orthogonal matrix:", taken)
sizes = abs(update(gradients)["Dense_0"]["kernel"])  # a first step of Adam has one size
print(f"elements of the kernels' updates have sizes of {sizes.min():.3f} to {sizes.max():.3f}")
numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
said = {"LayerNorm_0": {"scale": None, "bias": None}, "Dense_0": {"kernel": numbers, "bias": None}}
apart = change("LayerNorm_0", "scale", muon_weight_dimension_numbers=said)
print(f"with dimension numbers they change by {apart:.0%}")
assert gain > 0.1 and taken and kernel == 0 and apart == 0 and sizes.max() - sizes.min() < 1e-3, "optax has changed"
PROGRAM
