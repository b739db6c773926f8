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
# # A layer-normalized LSTM reads sequences of any length, and what is padding does not exist
#
# `jaxnorm.recurrent` scans a layer-normalized LSTM (Ba, Kiros & Hinton 2016) over a batch of sequences. Where a sequence has
# ended nothing is read, not even NaN, and no gradient comes from there.

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
import numpy as np

from jaxnorm import recurrent

print(jax.devices()[0].device_kind)
params = recurrent.init_lstm(jax.random.key(0), in_features=6, features=16)
{name: leaf.shape for name, leaf in params.items()}

# %% [markdown]
# Four sequences of 20, 3, 11 and 7 steps in one batch; everything beyond their ends is NaN.

# %%
lengths = jnp.array([20, 3, 11, 7])
x = jax.random.normal(jax.random.key(1), (4, 20, 6))
x = jnp.where((jnp.arange(20) < lengths[:, None])[..., None], x, jnp.nan)
(h, c), outputs = jax.jit(recurrent.lstm)(x, params, lengths=lengths)

for row, length in enumerate(lengths.tolist()):
    (alone, _), _ = recurrent.lstm(x[row, :length], params)
    np.testing.assert_allclose(h[row], alone, atol=1e-6)
gradient = jax.grad(lambda x: recurrent.lstm(x, params, lengths=lengths)[0][0].sum())(x)
print(
    "last states are those of each sequence alone; gradients in the padding:",
    jnp.abs(jnp.where(jnp.isnan(x), gradient, 0)).max(),
)
assert jnp.isfinite(gradient).all()

# %% [markdown]
# ## In a model: digits read row by row
#
# LSTM and GRU with 64 units, without a norm (blue) and with layer norm (orange). The upper curves are the training loss by training
# step, the lower ones the test accuracy by epoch. See that with layer norm the loss falls faster and the accuracy rises sooner.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

from IPython.display import Image
from rich.console import Console

from jaxnorm.experiments import figures
from jaxnorm.experiments.compare import Settings, compare

FULL = os.environ.get("JAXNORM_FULL") == "1"
settings = Settings(
    data="sequential",
    variants=("lstm-rows", "gru-rows", "rnn-rows") if FULL else ("lstm-rows", "gru-rows"),
    norms=("none", "layer", "batch") if FULL else ("none", "layer"),
    batch_sizes=(128,),
    seeds=3 if FULL else 1,
    epochs=15,
    learning_rate=1e-3,
    momentum=0.9,
)
with TemporaryDirectory() as folder:
    results = compare(settings, Path(folder), Console(quiet=True))
    picture = Image((Path(folder) / figures.CURVES).read_bytes())
picture

# %% [markdown]
# Here layer norm learns faster: the training loss of the first five epochs, without and with it.

# %%
for variant in settings.variants:
    losses = {
        norm: np.mean(
            [
                np.mean([e["train_loss"] for e in run["epochs"][:5]])
                for run in results["runs"]
                if (run["variant"], run["norm"]) == (variant, norm)
            ]
        )
        for norm in ("none", "layer")
    }
    print(f"{variant}: {losses['none']:.2f}, {losses['layer']:.2f}")
    assert losses["layer"] < losses["none"]
