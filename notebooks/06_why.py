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
# # What norms change: the loss along the gradient, and the scale of the weights
#
# A LeNet learns handwritten digits by plain gradient descent. On the way we look down the gradient, as
# Santurkar et al. (2018) did, watch the layers drift, and scale the weights. `jaxnorm explain` does the same for more norms and seeds.
#
# See in the four pictures below:
#
# 1. Along the gradient, lower is smoother. From a point of the training we look at points 0.25 to 4 learning rates down its gradient.
#    "Largest less smallest loss" (left): the difference between the highest and the lowest loss there. "Length of its change" (middle):
#    the distance between the gradient 4 learning rates away and the one at the start. "Largest change of the gradient per length moved"
#    (right): that distance divided by the way to the point, at the point where this is largest. Layer norm (green) is mostly the highest:
#    in this network and at this learning rate it makes nothing smoother.
# 2. Drift: how far the inputs of the nonlinearities have moved since the last snapshot, in standard deviations (left): with batch norm
#    (orange) least. How much a layer's gradient changes when the layers before it make their step, as a part of its length (right).
# 3. Scale: with a norm the loss is a flat line whatever the factor of the weights is, and the gradient a straight one.
# 4. The blend: the shares that switchable norm gives to each kind of statistics, for large and for small batches. Here they show no
#    difference: about a third each, as at the start.

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
from IPython.display import Image, Markdown, display
from rich.console import Console

from jaxnorm.experiments import explain, explain_figures

FULL = os.environ.get("JAXNORM_FULL") == "1"
print(jax.devices()[0].device_kind)
settings = (
    explain.Settings()
    if FULL
    else explain.Settings(
        norms=("none", "batch", "layer"), blend_batch_sizes=(64, 8), epochs=6, variant="conv"
    )
)
with TemporaryDirectory() as folder:
    results = explain.explain(settings, Path(folder), Console(quiet=True))
    for name, words in zip(explain_figures.PICTURES, explain.words(results), strict=True):
        display(Image((Path(folder) / name).read_bytes()), Markdown(words))

# %% [markdown]
# With a norm the scale of the weights before it does not matter: the loss stays, the gradient goes with one over the factor.
# Weights that grow learn more slowly, by themselves.

# %%
for run in results["runs"]:
    if run["norm"] in ("batch", "layer"):
        losses, gradients = (np.array(run["scaled"][name]) for name in ("losses", "gradients"))
        print(f"{run['norm']}: losses of scaled weights within {np.ptp(losses):.1e}")
        assert np.ptp(losses) < 1e-3 * losses.mean() + 1e-5
        np.testing.assert_allclose(gradients[0] / gradients[-1], 16, rtol=0.05)
