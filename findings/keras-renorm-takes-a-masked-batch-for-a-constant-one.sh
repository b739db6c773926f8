#!/usr/bin/env bash
# One would guess: a batch whose mask hides every element leaves the moving statistics of BatchNormalization as they were, and one that
#   is empty too.
# What happens: in Keras 3.15.1 (JAX backend) a batch that is masked out whole counts as one of mean 0 and variance 0: with and
#   without renorm the moving variance falls by the momentum, and with renorm the averaged deviation as well. An empty batch makes
#   all of them NaN, and so every later output. A mask on an input with one channel raises IndexError.
# Why it matters: the last, padded batch of an epoch, or a shard with no valid sequence, is such a batch. Averages that are worn down
#   by it divide by too little in evaluation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
cat > "$folder/program.py" <<'PROGRAM'
import keras
import numpy as np

print("keras", keras.__version__)
x = np.random.default_rng(0).normal(5, 2, (4, 6, 3)).astype("float32")
nothing = np.zeros((4, 6), bool)
found = {}


def states(layer):
    return {variable.name: float(np.asarray(variable).mean()) for variable in layer.non_trainable_variables}


for renorm in (False, True):
    layer = keras.layers.BatchNormalization(momentum=0.5, renorm=renorm)
    layer.build(x.shape)
    before = states(layer)
    layer(x, training=True, mask=nothing)
    after = states(layer)
    layer(x[:0], training=True)
    last = states(layer)
    print(f"renorm={renorm}: at first {before}\n  after a batch that is masked out: {after}\n  after an empty batch: {last}")
    found[renorm] = (after["moving_variance"] < 0.6, all(np.isnan(list(last.values()))))
layer = keras.layers.BatchNormalization()
try:
    layer(x[..., :1], training=True, mask=np.ones((4, 6), bool))
    one_channel = "no error"
except IndexError as error:
    one_channel = "IndexError"
print("a mask, one channel:", one_channel)
raise SystemExit((found, one_channel) != ({False: (True, True), True: (True, True)}, "IndexError"))
PROGRAM
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/program.py"
