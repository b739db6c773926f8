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
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)  # of no effect on a TPU

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
    print(
        f"{name:10} largest difference from the whole batch: {float(jnp.abs(y - whole).max()):.1e}"
    )
    if name == "axis_name":
        np.testing.assert_allclose(y, whole, atol=2e-6)

# %% [markdown]
# Weighted by counts: where a mask leaves devices different numbers of images, even none, nothing changes.

# %%
mask = jnp.arange(len(x)) < len(x) // 2 + 3
masked = jax.jit(
    jax.shard_map(
        lambda x, m: jn.batch_norm(x, where=m, axis_name="data")[0],
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
    )
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
