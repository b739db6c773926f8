# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # On Colab: from a wheel
#
# `JAXNORM` is the address or the path of a wheel. If it is empty, a wheel `jaxnorm-*.whl` is taken that has been uploaded to this
# folder. Where no wheel can be installed, a source distribution `jaxnorm-*.tar.gz` is. On a TPU runtime JAX is installed for its TPU.

# %%
import os
import subprocess
import sys
from glob import glob
from pathlib import Path

JAXNORM = os.environ.get("JAXNORM", "")

on_tpu = bool(glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*"))
for_tpu = ["jax[tpu]"] if on_tpu else []


def install(place: str) -> bool:
    address = place if "://" in place else Path(place).resolve().as_uri()
    return subprocess.run([sys.executable, "-m", "pip", "install", "-qq", f"jaxnorm[flax] @ {address}", *for_tpu]).returncode == 0


candidates = [JAXNORM] if JAXNORM else glob("jaxnorm-*.whl")
if not any(install(place) for place in [*candidates, *glob("jaxnorm-*.tar.gz")]):
    raise SystemExit("Put the address of a wheel into JAXNORM, or upload a wheel or a source distribution.")

# %% [markdown]
# ## What runs here
#
# The devices, and which implementation computes a norm. On a CPU, those are the kernels that the wheel brings.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm as jn

print(jn.__version__, "on", len(jax.devices()), jax.devices()[0].device_kind)
x = 1000 + jax.random.normal(jax.random.key(0), (4096, 1024))
print(jn.plan(x, "n [c]"))

# %% [markdown]
# ## Exact
#
# The largest error of layer norm where the mean is a thousand standard deviations, against float64.

# %%
exact = np.asarray(x, np.float64)
exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-6)
error = np.abs(np.asarray(jn.layer_norm(x), np.float64) - exact).max()
print(f"{error:.1e}")
assert error < 1e-5

# %% [markdown]
# ## In a model, over all devices
#
# A perceptron learns which half of its inputs has the larger sum. The batch is sharded over the devices, and batch statistics are
# those of the whole batch.

# %%
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxnorm import linen as jnn


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(jnn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x)))
        return nn.Dense(1)(jnn.LayerNorm()(x))[:, 0]


devices = jax.devices()
sharding = NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))
inputs = jax.device_put(jax.random.normal(jax.random.key(1), (256 * len(devices), 16)), sharding)
labels = jnp.sign(inputs[:, :8].sum(1) - inputs[:, 8:].sum(1))
model = Perceptron()
variables = model.init(jax.random.key(2), inputs, train=True)


@jax.jit
def step(variables):
    def loss_fn(params):
        scores, state = model.apply(variables | {"params": params}, inputs, train=True, mutable=["batch_stats"])
        return jnp.log1p(jnp.exp(-labels * scores)).mean(), state

    (loss, state), gradient = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], gradient), **state}, loss


losses = []
for _ in range(100):
    variables, loss = step(variables)
    losses.append(float(loss))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]
