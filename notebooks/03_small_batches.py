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
# # Batch norm needs a batch; group norm does not
#
# The same LeNet learns handwritten digits with the norm in its dense part at smaller and smaller batch sizes. Batch norm's
# statistics are those of ever fewer images; group norm's are those of one image at any size (Wu & He 2018, figure 1). After
# convolutions a batch of two is still hundreds of positions, and batch norm holds out longer.
#
# The picture shows the loss and the accuracy after the last epoch; batches become smaller to the right. See that batch norm's loss
# (blue) rises where they are small, and group norm's (orange) does not. Its title says "digits, dense (1 seed)": LeNet's dense part, and
# a single run per point. With one seed batch norm's accuracy may come out ahead at batch 8, as here (99 against 98 %). Three seeds and
# ten epochs show no such lead: 98.3 ± 0.3 % with batch norm, 98.5 ± 0.4 % with group norm, and a training loss 18 times as large with
# batch norm (`bench/results/sweep-dense/README.md`).
#
# With `JAXNORM_FULL=1` in the environment: more sizes, epochs and seeds.

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
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from IPython.display import Image
from rich.console import Console

from jaxnorm.experiments import figures
from jaxnorm.experiments.compare import Settings, compare

FULL = os.environ.get("JAXNORM_FULL") == "1"
print(jax.devices()[0].device_kind)
settings = Settings(
    data="digits",
    variants=("dense",),
    norms=("none", "batch", "layer", "group") if FULL else ("batch", "group"),
    batch_sizes=(64, 32, 16, 8, 4, 2) if FULL else (32, 8, 2),
    seeds=3 if FULL else 1,
    epochs=10 if FULL else 4,
    learning_rate=1e-3,
    momentum=0.99,
)

with TemporaryDirectory() as folder:
    results = compare(settings, Path(folder), Console(quiet=True))
    picture = Image((Path(folder) / figures.SIZES).read_bytes())
picture

# %% [markdown]
# How much worse the training loss is with batch norm than with group norm, by batch size:


# %%
def loss(norm, size):
    return np.mean(
        [
            run["epochs"][-1]["train_loss"]
            for run in results["runs"]
            if (run["norm"], run["batch_size"]) == (norm, size)
        ]
    )


ratios = {size: loss("batch", size) / loss("group", size) for size in settings.batch_sizes}
for size, ratio in ratios.items():
    print(f"batch {size:2}: {ratio:.2f}")
assert ratios[2] > 5 * ratios[settings.batch_sizes[0]]

# %% [markdown]
# Why: the statistics of a small batch are noisy. The variance of a channel, estimated from batches of the same images:

# %%
import jax.numpy as jnp

import jaxnorm as jn

features = jax.random.normal(jax.random.key(0), (256, 4, 4, 1)) * jnp.exp(
    0.7 * jax.random.normal(jax.random.key(1), (256, 1, 1, 1))
)
exact = float(jn.moments(features, "[n h w] c").var[0, 0, 0, 0])
for size in (64, 8, 2):
    estimates = jn.moments(features, "(k [n]) [h w] c", n=size).var
    print(
        f"batch {size:2}: deviation of the estimates {float(estimates.std() / exact):.0%} of the variance"
    )
