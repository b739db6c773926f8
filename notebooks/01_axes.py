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
import importlib.util
import os

from IPython import get_ipython

if importlib.util.find_spec("jaxnorm") is None:  # on Colab: put the folder or address of jaxnorm into the variable JAXNORM
    get_ipython().run_line_magic("pip", f"install -q {os.environ.get('JAXNORM', 'jaxnorm')}[experiments]")

# %%
import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import Image

import jaxnorm as jn
from jaxnorm.experiments.picture import PATTERNS, draw

print(jax.devices()[0].device_kind)

# %% [markdown]
# A pattern names the axes and puts brackets around the reduction axes; parentheses split an axis.

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
