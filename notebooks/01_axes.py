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
# # Batch, layer, instance and group norm differ in one thing: the axes they pool
#
# Statistics over a set of axes are a mergeable value (count, mean, variance); normalizing is applying it.

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
from IPython.display import Image

import jaxnorm as jn
from jaxnorm.experiments.picture import PATTERNS, draw

print(jax.devices()[0].device_kind)

# %% [markdown]
# A pattern names the axes and puts brackets around the reduction axes; parentheses split an axis. In the picture each block is a
# batch of images: examples to the right, channels to the left, positions (height and width as one axis) upwards. The coloured elements
# share one mean and one variance; see that the norms differ in nothing else.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

with TemporaryDirectory() as folder:
    draw(Path(folder) / "axes.png")
    picture = Image((Path(folder) / "axes.png").read_bytes())
picture

# %% [markdown]
# Each norm by its pattern: within every group of elements the output has mean 0 and variance 1.

# %%
x = 5 + 3 * jax.random.normal(jax.random.key(0), (8, 6, 6, 4))
for name, (pattern, sizes) in PATTERNS.items():
    y = jn.standardize(x, pattern, **sizes)
    found = jn.moments(y, pattern, **sizes)
    print(
        f"{name:20}{pattern:22}{found.mean.size:4} groups, |mean| <= {jnp.abs(found.mean).max():.0e}, |var - 1| <= {jnp.abs(found.var - 1).max():.0e}"
    )
    assert jnp.abs(found.mean).max() < 1e-6
    assert jnp.abs(found.var - 1).max() < 1e-3

# %% [markdown]
# Moments merge: reducing the instance statistics over the channels gives the layer's, over the batch the batch's.
# That is all of switchable norm, of synchronized batch norm, and of statistics gathered batch by batch.

# %%
instance = jn.moments(x, "n [h w] c")
np.testing.assert_allclose(instance.merge(3).var, jn.moments(x, "n [h w c]").var, rtol=1e-5)
np.testing.assert_allclose(instance.merge(0).var, jn.moments(x, "[n h w] c").var, rtol=1e-5)
halves = jn.merge(jn.moments(x[:3], "[n h w] c"), jn.moments(x[3:], "[n h w] c"))
np.testing.assert_allclose(halves.var, jn.moments(x, "[n h w] c").var, rtol=1e-5)
print("count of the halves together:", halves.count[0, 0, 0, 0])

# %% [markdown]
# A large mean costs nothing: the same data at 0 and at 10,000 standard deviations.

# %%
far = x + 30_000.0
exact = np.asarray(far, np.float64)
exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
print(f"jaxnorm: {np.abs(jn.layer_norm(far) - exact).max():.0e}")
print(
    f"E[x²] − E[x]²: {np.abs((far - far.mean(-1, keepdims=True)) / jnp.sqrt(jnp.maximum((far**2).mean(-1, keepdims=True) - far.mean(-1, keepdims=True) ** 2, 0) + 1e-6) - exact).max():.0e}"
)
