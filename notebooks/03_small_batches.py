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
# With `JAXNORM_FULL=1` in the environment: more sizes, epochs and seeds.

# %%
import importlib.util
import os

from IPython import get_ipython

if importlib.util.find_spec("jaxnorm") is None:  # on Colab: put the folder or address of jaxnorm into the variable JAXNORM
    get_ipython().run_line_magic("pip", f"install -q {os.environ.get('JAXNORM', 'jaxnorm')}[experiments]")

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
    return np.mean([run["epochs"][-1]["train_loss"] for run in results["runs"] if (run["norm"], run["batch_size"]) == (norm, size)])


ratios = {size: loss("batch", size) / loss("group", size) for size in settings.batch_sizes}
for size, ratio in ratios.items():
    print(f"batch {size:2}: {ratio:.2f}")
assert ratios[2] > 5 * ratios[settings.batch_sizes[0]]

# %% [markdown]
# Why: the statistics of a small batch are noisy. The variance of a channel, estimated from batches of the same images:

# %%
import jax.numpy as jnp

import jaxnorm as jn

features = jax.random.normal(jax.random.key(0), (256, 4, 4, 1)) * jnp.exp(0.7 * jax.random.normal(jax.random.key(1), (256, 1, 1, 1)))
exact = float(jn.moments(features, "[n h w] c").var[0, 0, 0, 0])
for size in (64, 8, 2):
    estimates = jn.moments(features, "(k [n]) [h w] c", n=size).var
    print(f"batch {size:2}: deviation of the estimates {float(estimates.std() / exact):.0%} of the variance")
