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
# # On Colab: a wheel, and what runs there
#
# The cell below installs jaxnorm from a wheel: put its address into `ADDRESS`, or leave it empty and upload the file. It replaces nothing of
# what Colab has installed; where that is too old and something had to be replaced, it says so, and the session has to be restarted.

# %%
# @title Install jaxnorm, if it is not installed { display-mode: "form" }
# The address or the path of a wheel. Left empty, Colab asks for an upload.
ADDRESS = ""  # @param {type: "string"}

import importlib
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def versions():
    """Of all that is installed: where a package is there twice, the one that Python finds."""
    importlib.invalidate_caches()
    return {
        name: metadata.version(name)
        for name in {package.name for package in metadata.distributions()}
        if name
    }


def installed():
    """Not whether Python finds a module: a folder ``jaxnorm`` beside the notebook, such as a clone, counts as one."""
    try:
        return bool(metadata.version("jaxnorm"))
    except metadata.PackageNotFoundError:
        return False


def uploaded():
    """The path of a file that the user has been asked for."""
    try:
        from google.colab import files
    except ImportError:
        raise SystemExit(
            "Put the address or the path of a wheel of jaxnorm into ADDRESS, and run this cell again."
        ) from None
    for name, content in files.upload().items():
        path = Path(
            tempfile.mkdtemp(), re.sub(r" ?\(\d+\)", "", name)
        )  # which browsers add to a name that they have seen
        path.write_bytes(content)
        return str(path)
    raise SystemExit("Nothing was uploaded: run this cell again.")


if not installed():
    place, before = (
        ADDRESS.strip() or os.environ.get("JAXNORM", "").strip() or uploaded(),
        versions(),
    )
    if not re.match(r"https?://|git\+\w+://|(?!.*://).*\.whl$", place):
        raise SystemExit(
            "ADDRESS must be an address that begins with http://, https:// or git+https://, or the path of a file that ends in .whl: "
            f"it is {place!r}. Correct it, and run this cell again."
        )
    address = place if "://" in place else Path(place).resolve().as_uri()
    command = [sys.executable, "-m", "pip", "install", "-q", f"jaxnorm[experiments] @ {address}"]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip cannot install {place}: see pip's message above.")
    after = versions()
    replaced = [
        f"{name} {version} by {after.get(name, 'nothing')}"
        for name, version in before.items()
        if after.get(name) != version
    ]
    if replaced:
        raise SystemExit(
            f"Restart the session (Runtime, Restart session), and run this notebook again: pip has replaced {', '.join(replaced)}."
        )
print(
    ", ".join(f"{name} {metadata.version(name)}" for name in ("jaxnorm", "jax", "jaxlib", "flax")),
    "on Python",
    sys.version.split()[0],
)

# %% [markdown]
# ## What runs here
#
# The devices, and which implementation computes a norm. On a CPU, those are the kernels that the wheel brings. On a TPU JAX compiles with
# libtpu: if the one that is installed is not the one that JAX asks for and JAX finds no TPU or crashes, install that one by
# `%pip install libtpu==VERSION` and restart the session.

# %%
from importlib import metadata, util

asked_for = next(
    requirement for requirement in metadata.requires("jax") if requirement.startswith("libtpu")
).split(";")[0]
here = metadata.version("libtpu") if util.find_spec("libtpu") else "none"
print(
    f"libtpu: {here} is installed; jax {metadata.version('jax')} asks for {asked_for}, where there is a TPU"
)

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm as jn

print(len(jax.devices()), jax.devices()[0].device_kind)
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
        scores, state = model.apply(
            variables | {"params": params}, inputs, train=True, mutable=["batch_stats"]
        )
        return jnp.log1p(jnp.exp(-labels * scores)).mean(), state

    (loss, state), gradient = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
    return {
        "params": jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], gradient),
        **state,
    }, loss


losses = []
for _ in range(100):
    variables, loss = step(variables)
    losses.append(float(loss))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]
