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
# # One batch norm, three ways to write it, the same training to the last digits
#
# Functional calls inside a jitted optax step, Flax linen, and Flax nnx: a small classifier of handwritten digits starts
# from the same numbers and takes the same 60 steps in each. Only where the running statistics live differs: in a value that is
# passed on, in the collection `batch_stats`, or in the module.

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

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxnorm as jn
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx
from jaxnorm.experiments.data import digits

print(jax.devices()[0].device_kind)
data = digits()
images = jnp.asarray(data.train_inputs.reshape(len(data.train_inputs), -1))
test = jnp.asarray(data.test_inputs.reshape(len(data.test_inputs), -1))
labels = jnp.asarray(data.train_labels)
order = (
    np.random.default_rng(0).permutation(len(images))[:960].reshape(15, 64).repeat(4, 0)
)  # 60 batches
optimizer = optax.adam(1e-2)


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# %% [markdown]
# ## Functional: statistics are a value
#
# `batch_norm` returns the output and the batch's `Moments`; `ema` blends them into the running ones; `normalize` applies
# those at evaluation.

# %%
keys = jax.random.split(jax.random.key(0))
start = {
    "w": jax.random.normal(keys[0], (400, 64)) / 20,
    "scale": jnp.ones(64),
    "bias": jnp.zeros(64),
    "v": jax.random.normal(keys[1], (64, 10)) / 8,
}


def loss_fn(params, running, x, y):
    h, batch = jn.batch_norm(x @ params["w"], scale=params["scale"], bias=params["bias"])
    running = jn.ema(running, batch, momentum=0.9)
    return cross_entropy(jax.nn.relu(h) @ params["v"], y), running


@jax.jit
def step(params, running, state, x, y):
    (loss, running), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, running, x, y)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), running, state, loss


params, state = start, optimizer.init(start)
running = jn.Moments(jnp.zeros((1, 64)), jnp.zeros((1, 64)), jnp.ones((1, 64)))
functional = []
for batch in order:
    params, running, state, loss = step(params, running, state, images[batch], labels[batch])
    functional.append(float(loss))

h = jn.normalize(test @ params["w"], running, scale=params["scale"], bias=params["bias"])
accuracy = (jnp.argmax(jax.nn.relu(h) @ params["v"], -1) == data.test_labels).mean()
print(f"loss {functional[0]:.3f} -> {functional[-1]:.3f}, test accuracy {accuracy:.1%}")
assert accuracy > 0.9

# %% [markdown]
# ## Flax linen: statistics are a collection


# %%
class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, *, evaluating: bool):
        x = nn.Dense(64, use_bias=False)(x)
        x = jnn.BatchNorm(use_running_average=evaluating, momentum=0.9)(x)
        return nn.Dense(10, use_bias=False)(nn.relu(x))


def linen_loss(params, stats, x, y):
    logits, new = model.apply(
        {"params": params, "batch_stats": stats}, x, evaluating=False, mutable=["batch_stats"]
    )
    return cross_entropy(logits, y), new["batch_stats"]


@jax.jit
def linen_step(params, stats, state, x, y):
    (loss, stats), gradient = jax.value_and_grad(linen_loss, has_aux=True)(params, stats, x, y)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), stats, state, loss


model = Classifier()
stats = model.init(jax.random.key(0), images[:2], evaluating=True)["batch_stats"]
norm = {"scale": start["scale"], "bias": start["bias"]}
linen_params = {
    "Dense_0": {"kernel": start["w"]},
    "BatchNorm_0": norm,
    "Dense_1": {"kernel": start["v"]},
}
state, linen = optimizer.init(linen_params), []
for batch in order:
    linen_params, stats, state, loss = linen_step(
        linen_params, stats, state, images[batch], labels[batch]
    )
    linen.append(float(loss))

# %% [markdown]
# ## Flax nnx: statistics are in the module


# %%
class Module(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(400, 64, use_bias=False, rngs=rngs)
        self.norm = jnnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(64, 10, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


@nnx.jit
def nnx_step(module, optimizer, x, y):
    loss, gradient = nnx.value_and_grad(lambda module: cross_entropy(module(x), y))(module)
    optimizer.update(module, gradient)
    return loss


module = Module(nnx.Rngs(0))
module.first.kernel[...], module.last.kernel[...] = start["w"], start["v"]
own = nnx.Optimizer(module, optimizer, wrt=nnx.Param)
in_nnx = [float(nnx_step(module, own, images[batch], labels[batch])) for batch in order]

# %% [markdown]
# All three took the same way:

# %%
for name, losses in (("linen", linen), ("nnx", in_nnx)):
    print(
        f"{name:6} largest difference of 60 losses from the functional ones: {np.abs(np.array(losses) - functional).max():.1e}"
    )
    np.testing.assert_allclose(losses, functional, rtol=2e-3, atol=2e-4)
np.testing.assert_allclose(stats["BatchNorm_0"]["mean"], running.mean[0], rtol=1e-2, atol=1e-3)
