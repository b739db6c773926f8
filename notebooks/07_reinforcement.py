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
# # Normalized observations: a pendulum learns to swing up, whatever its units
#
# A controller sees a pendulum's position and its angular velocity, and learns by an evolution strategy. Whether it learns depends on
# the units of the velocity, unless observations are normalized by statistics that are collected while it learns.

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
import time
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxnorm import online

print(jax.devices()[0].device_kind)

# %% [markdown]
# ## The pendulum
#
# A rod of length 1 m and mass 1 kg, moved by a torque of at most 2 Nm, which is too weak to lift it at once: it has to swing. Each step is
# 0.05 s. The cost counts the angle from upright, the velocity and the torque.

# %%
STEPS, GRAVITY = 150, 10.0


def dynamics(state, torque):
    angle, velocity = state
    cost = jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
    cost = cost**2 + 0.1 * velocity**2 + 0.001 * torque**2
    velocity = jnp.clip(velocity + (1.5 * GRAVITY * jnp.sin(angle) + 3 * torque) * 0.05, -8, 8)
    return (angle + velocity * 0.05, velocity), -cost


def observe(state, unit):
    """Cosine, sine, and the velocity in rad/s (unit 1) or in degrees per second (unit 57.3)."""
    angle, velocity = state
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), velocity * unit])


# %% [markdown]
# ## The learner
#
# A network with 16 hidden units; in each generation 32 pairs of opposite perturbations of its weights play an episode each, and Adam follows
# the gradient that the ranks of their returns give. With `normalized`, the network sees `online.normalize(x, seen)`, and
# after each generation `online.update` merges all observations that were made into `seen`; the first are those of pendulums that nobody moves.

# %%
PAIRS, GENERATIONS, SIGMA = 32, 250, 0.3
optimizer = optax.adam(0.1)
shapes = {"w": jnp.zeros((3, 16)), "b": jnp.zeros(16), "v": jnp.zeros(16)}
_, unravel = ravel_pytree(shapes)


def policy(weights, x):
    p = unravel(weights)
    return 2 * jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])


def episode(weights, seen, start, unit, normalized):
    def step(state, _):
        x = observe(state, unit)
        shown = jnp.where(normalized, online.normalize(x, seen, clip=5.0), x)
        state, reward = dynamics(state, policy(weights, shown))
        return state, (x, reward)

    _, (observations, rewards) = jax.lax.scan(step, start, length=STEPS)
    return observations, rewards.sum()


def starts(key):
    angle_key, velocity_key = jax.random.split(key)
    return jax.random.uniform(
        angle_key, (PAIRS,), minval=-jnp.pi, maxval=jnp.pi
    ), jax.random.uniform(velocity_key, (PAIRS,), minval=-1)


def generation(unit, normalized, carry, key):
    weights, state, seen = carry
    noise_key, start_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, (PAIRS, weights.size))
    start = jax.tree.map(
        lambda a: jnp.concatenate([a, a]), starts(start_key)
    )  # both of a pair start alike
    tried = weights + SIGMA * jnp.concatenate([noise, -noise])
    observations, returns = jax.vmap(episode, (0, None, 0, None, None))(
        tried, seen, start, unit, normalized
    )
    better = jnp.sign(returns[:PAIRS] - returns[PAIRS:])
    updates, state = optimizer.update(-(better @ noise) / PAIRS, state)
    return (
        optax.apply_updates(weights, updates),
        state,
        online.update(seen, observations),
    ), returns.mean()


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.vmap, in_axes=(None, None, 0))
def learn(unit, normalized, key):
    first, second, rest = jax.random.split(key, 3)
    weights, seen = jax.random.normal(first, (80,)) * 0.3, online.init(jnp.zeros(3))
    observations, _ = jax.vmap(episode, (None, None, 0, None, None))(
        0 * weights, seen, starts(second), unit, False
    )
    carry = weights, optimizer.init(weights), online.update(seen, observations)
    (_, _, seen), returns = jax.lax.scan(
        partial(generation, unit, normalized), carry, jax.random.split(rest, GENERATIONS)
    )
    return returns, seen


# %% [markdown]
# ## Five seeds each
#
# The same seeds, that is the same initial weights, perturbations and starts, in each of the four.

# %%
seeds = jax.random.split(jax.random.key(1), 5)
began = time.process_time()
found = {}
for units, unit in (("rad/s", 1.0), ("degrees/s", 180 / np.pi)):
    for normalized in (False, True):
        returns, seen = jax.block_until_ready(learn(unit, normalized, seeds))
        found[units, normalized] = np.asarray(returns)
        last = found[units, normalized][:, -20:].mean(1)
        print(f"{units:9} normalized={normalized!s:5}  return in the last 20 generations: median {np.median(last):6.0f}, "
              f"from {last.min():6.0f} to {last.max():6.0f}")  # fmt: skip
print(
    "deviations seen by the last one, first seed:",
    np.sqrt(seen.var[0]).round(2),
    "of",
    int(seen.count[0, 0]),
    "observations",
)
print(f"{time.process_time() - began:.0f} s of one core")

# %% [markdown]
# The return is the negative cost of an episode of 150 steps: higher is better. See that with normalized
# observations (blue) the median (bold) ends nearly the same in both units; on the way there the curves differ, and so do
# single seeds (thin). As they are (red), in degrees per second, nothing is learned.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
for axis, units, name in zip(
    axes, ("rad/s", "degrees/s"), ("radians per second", "degrees per second"), strict=True
):
    for normalized, color in ((False, "C3"), (True, "C0")):
        curves = found[units, normalized]
        axis.plot(curves.T, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(
            np.median(curves, 0),
            color=color,
            linewidth=2,
            label="normalized" if normalized else "as they are",
        )
    axis.set_title(f"velocity in {name}")
    axis.set_xlabel("generation, an update of the weights")
axes[0].set_ylabel("return of an episode, mean of the generation")
axes[0].legend(title="observations; bold: median")
plt.show()

# %% [markdown]
# In degrees per second the hidden units are saturated from the start, and nothing is learned. With normalized observations the units
# differ by rounding alone, which training magnifies: single seeds take other ways, and the medians end within 5 of each other.
# In rad/s, a unit in which the velocity is about as large as the rest, the gain is small: the median
# is better by some 50, and one of the five seeds, which learns to swing late or never, is worse than any without.
