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
import importlib.util
import os

from IPython import get_ipython

if importlib.util.find_spec("jaxnorm") is None:  # on Colab: put the folder or address of jaxnorm into the variable JAXNORM
    get_ipython().run_line_magic("pip", f"install -q {os.environ.get('JAXNORM', 'jaxnorm')}[experiments]")

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
print("last states are those of each sequence alone; gradients in the padding:", jnp.abs(jnp.where(jnp.isnan(x), gradient, 0)).max())
assert jnp.isfinite(gradient).all()

# %% [markdown]
# ## In a model: digits read row by row
#
# LSTM and GRU with 64 units, without a norm and with layer norm; the curves are the training loss and the test accuracy.

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
