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
# # Statistics over all devices: one word, `axis_name`, or none at all
#
# Here eight devices that the CPU pretends to have; on a TPU its own cores. Batch norm over a sharded batch is that of the whole
# batch: inside `shard_map` by `axis_name`, in a sharded `jit` by itself.

# %%
import importlib.util
import os

from IPython import get_ipython

if importlib.util.find_spec("jaxnorm") is None:  # on Colab: put the folder or address of jaxnorm into the variable JAXNORM
    get_ipython().run_line_magic("pip", f"install -q {os.environ.get('JAXNORM', 'jaxnorm')}[experiments]")

# %%
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"  # of no effect on a TPU

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm as jn

devices = jax.devices()
print(len(devices), devices[0].device_kind)
mesh = Mesh(np.array(devices), ("data",))
x = 3 + jax.random.normal(jax.random.key(0), (16 * len(devices), 8, 8, 4)) * jnp.arange(1.0, 5.0)
whole, moments = jn.batch_norm(x)

# %% [markdown]
# In `shard_map` each device has its part; `axis_name` merges the parts' `Moments`, weighted by their counts. Without it each
# device would use its own statistics.

# %%
spec = P("data")


def across(x):
    return jn.batch_norm(x, axis_name="data")[0]


def apart(x):
    return jn.batch_norm(x)[0]


for name, function in (("axis_name", across), ("without", apart)):
    y = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    print(f"{name:10} largest difference from the whole batch: {float(jnp.abs(y - whole).max()):.1e}")
    if name == "axis_name":
        np.testing.assert_allclose(y, whole, atol=2e-6)

# %% [markdown]
# Weighted by counts: where a mask leaves devices different numbers of images, even none, nothing changes.

# %%
mask = jnp.arange(len(x)) < len(x) // 2 + 3
masked = jax.jit(
    jax.shard_map(lambda x, m: jn.batch_norm(x, where=m, axis_name="data")[0], mesh=mesh, in_specs=(spec, spec), out_specs=spec)
)(x, mask[:, None, None, None])
expected = jn.batch_norm(x[: int(mask.sum())])[0]
np.testing.assert_allclose(masked[: len(expected)], expected, atol=2e-6)
print("images taken by each device:", mask.reshape(len(devices), -1).sum(1).tolist())

# %% [markdown]
# In a sharded `jit` the arrays say where they are, and statistics are global without a word. The compiled program sums
# over devices and gathers nothing:

# %%
sharded = jax.device_put(x, NamedSharding(mesh, spec))
compiled = jax.jit(lambda x: jn.batch_norm(x)[0]).lower(sharded).compile()
np.testing.assert_allclose(compiled(sharded), whole, atol=2e-6)
text = compiled.as_text()
print({name: text.count(f" {name}(") for name in ("all-reduce", "all-gather", "all-to-all")})
assert " all-gather(" not in text
