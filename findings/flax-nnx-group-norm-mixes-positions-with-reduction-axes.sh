#!/usr/bin/env bash
# One would guess: flax.nnx.GroupNorm(reduction_axes=(2,)) of x (batch, positions, channels) normalizes the groups of channels of each
#   position by their own mean and variance, as flax.linen.GroupNorm with the same argument does.
# What happens: it computes these statistics rightly, but then repeats them along axis 1 instead of along the groups, and the reshape that
#   follows fits. Channels meet the statistics of other groups, and with several positions those of other positions. It raises nothing.
#   Without reduction_axes, and where they have all axes but the batch's, the output is right.
# Why it matters: per-position group norm (as in video or point clouds, where positions are padded or masked) trains on wrong outputs of a
#   plausible size, and a model moved from linen to nnx changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import flax
import jax
import numpy as np
from flax import linen, nnx

x = np.array([[[0, 2, 10, 30, 5, 5.5], [7, 8, -1, 1, 40, 0]]], np.float32)  # 1 example, 2 positions, 3 groups of 2 channels
groups = x.astype(np.float64).reshape(1, 2, 3, 2)
truth = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-6)
truth = truth.reshape(x.shape)

by_linen = linen.GroupNorm(3, reduction_axes=(2,))
of_linen = by_linen.apply(by_linen.init(jax.random.key(0), x), x)
of_nnx = nnx.GroupNorm(6, 3, reduction_axes=(2,), rngs=nnx.Rngs(0))(x)
print("flax", flax.__version__, "jax", jax.__version__)
for name, y in (("float64", truth), ("linen", of_linen), ("nnx", of_nnx)):
    print(f"{name:8}", np.round(np.asarray(y), 2).tolist())
errors = [float(np.abs(np.asarray(y) - truth).max()) for y in (of_linen, of_nnx)]
print("largest error: linen %.1e, nnx %.1f" % tuple(errors))
assert errors[0] < 1e-4 and errors[1] > 1, "flax has changed"

# which statistics each channel meets: those of the groups, repeated in another order
mean, var = groups.mean(-1), groups.var(-1)
mixed = [np.repeat(a, 2, axis=1).reshape(x.shape) for a in (mean, var)]
assert np.allclose(of_nnx, (x - mixed[0]) / np.sqrt(mixed[1] + 1e-6), rtol=1e-4, atol=1e-4), "it is another fault now"

whole = nnx.GroupNorm(6, 3, reduction_axes=(1, 2), rngs=nnx.Rngs(0))(x)
mean, var = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
right = ((groups - mean) / np.sqrt(var + 1e-6)).reshape(x.shape)
assert np.allclose(whole, right, atol=1e-4), "flax has changed"
print("with reduction_axes=(1, 2), all but the batch's, nnx is right")
PROGRAM
