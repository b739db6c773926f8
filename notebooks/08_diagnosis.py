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
# # Diagnosis: find why a network does not learn
#
# The same small network learns handwritten digits four times: once as it should, and three times with a fault that its output does not
# show, since norms hide what is wrong in front of them. `diagnose` looks at the inputs of the norms, and names each fault.
#
# 1. A momentum of 0.999 for a training of 90 steps: the running statistics never arrive, and evaluation is wrong.
# 2. A layer that starts at a hundred-thousandth of its size: its variance is below epsilon, so that the norm passes little on, and
#    hands back a gradient that throws the layer far away in one step.
# 3. A layer one of whose outputs is a million times the others: it is all that layer norm sees.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx
from sklearn.datasets import load_digits

from jaxnorm import nnx as jnnx

digits = load_digits()
order = jax.random.permutation(jax.random.key(0), len(digits.data))
x, labels = jnp.asarray(digits.data / 16, jnp.float32)[order], jnp.asarray(digits.target)[order]
train, test = (x[:1440], labels[:1440]), (x[1440:], labels[1440:])

# %% [markdown]
# ## The network, and its faults


# %%
class Net(nnx.Module):
    def __init__(self, *, momentum=0.9, first=1.0, channel=1.0, rngs):
        self.first = nnx.Linear(64, 32, rngs=rngs)
        factors = (first * jnp.ones(32)).at[5].multiply(channel)
        self.first.kernel[...] = self.first.kernel[...] * factors
        self.layer_norm = nnx.LayerNorm(32, rngs=rngs)
        self.second = nnx.Linear(32, 32, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(32, momentum=momentum, rngs=rngs)
        self.last = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.layer_norm(self.first(x)))
        return self.last(nnx.relu(self.batch_norm(self.second(x))))


networks = {
    "as it should be": {},
    "momentum 0.999": {"momentum": 0.999},
    "first layer at 1e-5": {"first": 1e-5},
    "a channel at 1e6": {"channel": 1e6},
}

# %% [markdown]
# Training is that of any model of nnx. After every tenth step we keep a diagnosis, which is a pytree: it is computed in `jit`, at the
# cost of one forward pass.


# %%
@nnx.jit
def step(model, optimizer, x, labels):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


@nnx.jit
def look(model, x):
    return jnnx.diagnose(model, x)


def accuracy(model, x, labels):
    model.eval()
    found = (model(x).argmax(-1) == labels).mean()
    model.train()
    return float(found)


def learn(options, steps=90):
    model = Net(**options, rngs=nnx.Rngs(0))
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses, diagnoses = [], []
    for number in range(steps):
        batch = slice(number % 45 * 32, number % 45 * 32 + 32)
        x, labels = train[0][batch], train[1][batch]
        if number % 10 == 0:
            diagnoses.append(look(model, x))
        losses.append(float(step(model, optimizer, x, labels)))
    return model, losses, diagnoses


learned = {name: learn(options) for name, options in networks.items()}
for name, (model, losses, _) in learned.items():
    right = accuracy(model, *test)
    print(f"{name:20} loss {sum(losses[-10:]) / 10:.2f}   right in the test {right:.0%}")

# %% [markdown]
# The second network has the losses of the first and evaluates far worse. The third learns slower, and the fourth learns nothing. The
# losses do not say why.

# %%
for name, (_, losses, _) in learned.items():
    plt.plot(losses, label=name)
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()

# %% [markdown]
# ## The tables
#
# After the training, each names its fault below the numbers, but for the third. The first table has no findings. `from running` is how
# far running means are from those of the batch, in running deviations.

# %%
found = {name: jnnx.diagnose(model, train[0][:256]) for name, (model, _, _) in learned.items()}
for name, diagnosis in found.items():
    print(f"--- {name}\n{diagnosis}\n")

# %% [markdown]
# The third fault shows at the start, before the first step. By the tenth the layer's outputs had a deviation of thousands: the gradient
# of a norm is divided by the deviation of its input.

# %%
start, later, *_ = learned["first layer at 1e-5"][2]
print(f"--- before the first step\n{start}\n\n--- after ten\n{later}")

# %% [markdown]
# ## Over depth, and over time
#
# A diagnosis draws itself over the depth of the network. Those of several steps are drawn over time: here the collapsed variance.

# %%
found["a channel at 1e6"].plot()

# %%
jnnx.plot_diagnoses(learned["first layer at 1e-5"][2], steps=range(0, 90, 10))
