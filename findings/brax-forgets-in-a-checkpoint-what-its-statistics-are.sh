#!/usr/bin/env bash
# One would guess: running statistics go on after a checkpoint as they would have without it.
# What happens: brax saves the arrays of RunningStatisticsState and not its mode. summed_variance is the variance in mode 'ema' and the sum
#   of squares in 'welford', and what is loaded has mode 'welford', so the next update takes the one for the other: after ten batches of
#   data of deviation 2, one more leaves the deviation at 1.97 without a checkpoint, and takes it to 0.65 with one.
# Why it matters: the observations of a policy that goes on are suddenly divided by a third. Who reads checkpoints must find out the mode
#   by comparing std with both readings of summed_variance.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q brax==0.14.2 jax==0.10.2 jaxlib==0.10.2
FOLDER="$folder" JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import importlib.metadata
import os

import jax.numpy as jnp
import numpy as np
from brax.training import checkpoint
from brax.training.acme import running_statistics
from ml_collections import config_dict

print("brax", importlib.metadata.version("brax"))
batches = jnp.asarray(2 * np.random.default_rng(0).standard_normal((11, 100, 1)), jnp.float32)
state = running_statistics.init_state(jnp.zeros(1), mode="ema")
for batch in batches[:10]:
    state = running_statistics.update(state, batch)
config = config_dict.create(network_factory_kwargs={})
checkpoint.save(os.environ["FOLDER"], 1, (state,), config)
(loaded,) = checkpoint.load(f"{os.environ['FOLDER']}/{1:012d}")
loaded = loaded.replace(mean=jnp.asarray(loaded.mean), summed_variance=jnp.asarray(loaded.summed_variance))
found = {}
for name, start in (("without a checkpoint", state), ("with one", loaded)):
    found[name] = running_statistics.update(start, batches[10]).std.item()
    print(f"{name}: mode {start.mode!r}, deviation {start.std.item():.3f}, after one more batch {found[name]:.3f}")
raise SystemExit(not (found["without a checkpoint"] > 1.8 and found["with one"] < 1))
PROGRAM
