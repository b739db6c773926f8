#!/usr/bin/env bash
# One would guess: keras.layers.LayerNormalization(dtype="float64") computes in float64, as Dense(dtype="float64") does, where JAX has
#   float64 switched on: weights and output have that dtype.
# What happens: LayerNormalization, GroupNormalization, RMSNormalization and BatchNormalization in training cast their input to float32 and
#   their result back. At a mean of 10,000 deviations six or seven of the sixteen digits are gone before the mean is subtracted: the output
#   is wrong by 2e-3 to 4e-3. UnitNormalization and Dense stay in float64.
# Why it matters: who takes float64 as the truth for a norm, or norms coordinates or timestamps, compares with rounded numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
KERAS_HOME="$folder" KERAS_BACKEND=jax JAX_ENABLE_X64=1 JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import keras
import numpy as np

print("keras", keras.__version__, "jax", jax.__version__)
x = 1e4 + np.random.default_rng(0).normal(size=(64, 32))
rows = x.reshape(64, 4, 8)


def normalized(x, axis, epsilon=1e-3):
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)


layers = {
    "LayerNormalization": (keras.layers.LayerNormalization(dtype="float64"), normalized(x, 1)),
    "GroupNormalization": (keras.layers.GroupNormalization(4, dtype="float64"), normalized(rows, 2).reshape(x.shape)),
    "BatchNormalization": (keras.layers.BatchNormalization(dtype="float64"), normalized(x, 0)),
    "RMSNormalization": (keras.layers.RMSNormalization(dtype="float64"), x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)),
    "UnitNormalization": (keras.layers.UnitNormalization(dtype="float64"), x / np.sqrt((x**2).sum(1, keepdims=True))),
}
errors = {}
for name, (layer, truth) in layers.items():
    y = layer(x, training=True) if name == "BatchNormalization" else layer(x)
    assert y.dtype == "float64" and all(weight.dtype == "float64" for weight in layer.weights)
    errors[name] = float(np.abs(np.asarray(y) - truth).max())
    print(f"{name:18}: dtype {y.dtype}, largest error {errors[name]:.0e}")
assert errors["UnitNormalization"] < 1e-12, "keras has changed"
assert errors["RMSNormalization"] > 1e-8, "keras has changed"
assert all(error > 1e-5 for name, error in errors.items() if name[:3] in ("Lay", "Gro", "Bat")), "keras has changed"
PROGRAM
