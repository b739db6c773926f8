#!/usr/bin/env bash
# One would guess: BatchNorm(mode="batch") in inference divides by the average variance of the batches it has seen, as its documentation
#   says PyTorch and Flax do; after one step, by that batch's.
# What happens: Equinox 0.13.8 starts the running variance at one, and divides by 1 - momentum^steps, which is the correction for an average
#   that starts at zero. So momentum^steps / (1 - momentum^steps) is added: 99 after one step of momentum 0.99. Batches of variance 1
#   come out with a deviation of 0.1 in inference, and those of variance 0.01 with 0.01. After 200 steps it still is 0.93 and 0.25.
#   mode="ema" is right from the first step, and so is the mean, which starts at zero.
# Why it matters: evaluation early in training, fine-tuning in few steps, and momentum near one give outputs far too small, in each layer
#   again, while the loss of training is as it should be.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2
cat > "$folder/program.py" <<'PROGRAM'
import equinox as eqx
import jax
import numpy as np

print("equinox", eqx.__version__, "jax", jax.__version__)


def deviations(mode, scale):
    """The deviation of the output in inference after 1, 3, 20 and 200 steps on one batch."""
    x = jax.random.normal(jax.random.key(0), (256, 4))
    x = scale * (x - x.mean(0)) / x.std(0)  # the variance of each batch is the square of scale
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode=mode, momentum=0.99, eps=1e-7)
    call = lambda layer, state: jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    step = eqx.filter_jit(lambda state: call(layer, state)[1])
    found = []
    for count in range(1, 201):
        state = step(state)
        if count in (1, 3, 20, 200):
            found.append(float(call(eqx.nn.inference_mode(layer), state)[0].std()))
    return np.array(found)


powers = 0.99 ** np.array([1, 3, 20, 200])
changed = False
for scale in (1.0, 0.1):
    batch, average = deviations("batch", scale), deviations("ema", scale)
    expected = scale / np.sqrt(scale**2 + powers / (1 - powers))
    print(f"variance {scale**2:.2f}: deviations after 1, 3, 20 and 200 steps: batch {batch.round(3)}, ema {average.round(3)}")
    print(f"  with momentum^steps / (1 - momentum^steps) added to the variance: {expected.round(3)}")
    changed |= not np.allclose(batch, expected, rtol=0.01) or not np.allclose(average, 1, rtol=0.01)
raise SystemExit(bool(changed))
PROGRAM
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/program.py"
