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
from IPython.display import Image, Markdown, display
from rich.console import Console

from jaxnorm.experiments import explain, explain_figures

FULL = os.environ.get("JAXNORM_FULL") == "1"
print(jax.devices()[0].device_kind)
settings = (
    explain.Settings() if FULL else explain.Settings(norms=("none", "batch", "layer"), blend_batch_sizes=(64, 8), epochs=6, variant="conv")
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
