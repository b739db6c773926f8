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
# # Statistics of a robot's data: three ways to normalize, and one broken frame
#
# A small robot is recorded, and a policy learns from the recording. Before it does, states and actions are normalized. This notebook
# writes the recording as LeRobot does, fits its statistics where it lies, writes them as openpi's `norm_stats.json`, and trains a policy
# with each of the three common modes: by mean and deviation, by minimum and maximum, and by quantiles. Then one frame of 12,000 breaks.

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
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from jaxnorm.data import Normalizer

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A robot, and its teacher
#
# An arm with two joints moves its hand to a goal and closes its gripper there. The teacher knows the arm: it finds the angles that
# belong to the goal, and pushes the joints there. Every quantity comes in the unit that its sensor has, so that their sizes differ a
# thousandfold, as on real robots: radians, radians per second, millimetres, and a pressure in pascals about a large mean.

# %%
LINKS = np.array([0.4, 0.35])  # metres
INERTIA = np.array([2.0, 0.05])  # the torques of the second joint are small
STEP, LENGTH, EPISODES = 0.05, 60, 200


def hand(angles):
    """The place of the hand, in metres."""
    first, both = angles[..., 0], angles.sum(-1)
    return np.stack(
        [
            LINKS[0] * np.cos(first) + LINKS[1] * np.cos(both),
            LINKS[0] * np.sin(first) + LINKS[1] * np.sin(both),
        ],
        -1,
    )


def angles_of(goal):
    """The angles that put the hand at a goal, with the elbow to one side."""
    cosine = ((goal**2).sum(-1) - (LINKS**2).sum()) / (2 * LINKS.prod())
    elbow = np.arccos(np.clip(cosine, -1, 1))
    shoulder = np.arctan2(goal[..., 1], goal[..., 0]) - np.arctan2(
        LINKS[1] * np.sin(elbow), LINKS[0] + LINKS[1] * np.cos(elbow)
    )
    return np.stack([shoulder, elbow], -1)


def teacher(state):
    """Torques in newton metres, and whether to close the gripper."""
    angles, speeds, goal = state[..., :2], state[..., 2:4], state[..., 4:6] / 1000
    torques = INERTIA * (16 * (angles_of(goal) - angles) - 8 * speeds)
    near = np.linalg.norm(hand(angles) - goal, axis=-1, keepdims=True) < 0.02
    return np.concatenate([torques, near], -1)


def run(policy, rng, episodes):
    """Let a policy move the arm; return all states, actions and the last distances to the goal."""
    radius, direction = rng.uniform(0.3, 0.7, episodes), rng.uniform(-1.2, 1.2, episodes)
    goal = np.stack([radius * np.cos(direction), radius * np.sin(direction)], -1)
    angles = angles_of(goal) + rng.uniform(-0.8, 0.8, (episodes, 2))
    speeds, states, actions = np.zeros((episodes, 2)), [], []
    for _ in range(LENGTH):
        pressure = 101_325 + 20 * rng.standard_normal((episodes, 1))
        state = np.concatenate([angles, speeds, 1000 * goal, pressure], -1).astype(np.float32)
        action = np.asarray(policy(state), np.float32)
        states.append(state)
        actions.append(action)
        speeds = speeds + STEP * action[:, :2] / INERTIA
        angles = angles + STEP * speeds
    distance = np.linalg.norm(hand(angles) - goal, axis=-1)
    return np.stack(states, 1), np.stack(actions, 1), distance


states, actions, distance = run(teacher, np.random.default_rng(0), EPISODES)
print(
    f"{states.shape[0]} episodes of {LENGTH} frames; the teacher ends {1000 * distance.mean():.1f} mm from the goal"
)

# %% [markdown]
# ## The recording, as LeRobot writes it
#
# A data set of LeRobot (v3) is a folder: Parquet files of all frames, and a file that says what they hold.

# %%
NAMES = {"observation.state": 7, "action": 3}


def write_lerobot(folder, states, actions):
    frames = np.arange(states.shape[0] * LENGTH)
    episode, frame = np.divmod(frames, LENGTH)
    columns = {
        name: list(values.reshape(len(frames), -1))
        for name, values in zip(NAMES, (states, actions), strict=True)
    }
    numbers = {"episode_index": episode, "frame_index": frame, "index": frames}
    numbers["timestamp"] = (frame * STEP).astype(np.float32)
    numbers["task_index"] = np.zeros_like(frames)
    data = folder / "data" / "chunk-000"
    data.mkdir(parents=True)
    pq.write_table(pa.table(columns | numbers), data / "file-000.parquet")
    features = {name: {"dtype": "float32", "shape": [size]} for name, size in NAMES.items()}
    features |= {
        name: {"dtype": str(column.dtype), "shape": [1]} for name, column in numbers.items()
    }
    info = {
        "codebase_version": "v3.0",
        "robot_type": "two_joints",
        "total_episodes": states.shape[0],
        "total_frames": len(frames),
        "fps": round(1 / STEP),
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "features": features,
    }
    (folder / "meta").mkdir()
    (folder / "meta" / "info.json").write_text(json.dumps(info, indent=1))


write_lerobot(folder / "clean", states, actions)
fitted = Normalizer.fit_files(folder / "clean", quantiles=(0.01, 0.99))
fitted

# %% [markdown]
# The same in a shell is `jaxnorm fit clean --quantiles 0.01,0.99`. The leaves are the features of the recording; indices and time stamps
# are left out. `save` with a format writes what other libraries read, and `load` reads it: it tells the format by itself.

# %%
fitted.save(folder / "norm_stats.json", format="openpi")
fitted.save(folder / "clean" / "meta" / "stats.json", format="lerobot")
loaded = Normalizer.load(folder / "norm_stats.json")
print(loaded.formula.standard_in_words())
print((folder / "norm_stats.json").read_text()[:300])

# %% [markdown]
# ## A policy that learns from the recording
#
# A network of two layers imitates the teacher. It sees normalized states and predicts normalized actions; `denormalize` brings them back
# to newton metres. The gripper is 0 or 1 already: a mask leaves it as it is. All of this runs within `jit`.

# %%
GRIPPER = {"action": np.array([True, True, False])}
STEPS, BATCH = 1500, 256


def network(params, x):
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def initial(key, sizes=(7, 128, 128, 3)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (inner, outer)) / np.sqrt(inner), jnp.zeros(outer))
        for key, inner, outer in zip(keys, sizes, sizes[1:], strict=False)
    ]


clean_states, clean_actions, _ = run(teacher, np.random.default_rng(1), 40)


def train(stats, mode, states, actions):
    """Train a policy; return its errors on clean episodes, and how far from the goal it ends."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))

    def policy(params, x):
        y = stats.normalize({"observation.state": x}, mode=mode, clip=5.0)
        y = network(params, y["observation.state"])
        return stats.denormalize({"action": y}, mode=mode, mask=GRIPPER)["action"]

    @jax.jit
    def step(params, optimizer_state, x, y):
        batch = {"observation.state": x, "action": y}
        batch = stats.normalize(batch, mode=mode, mask=GRIPPER, clip=5.0)

        def loss(params):
            predicted = network(params, batch["observation.state"])
            return ((predicted - batch["action"]) ** 2).mean()

        updates, optimizer_state = optimizer.update(jax.grad(loss)(params), optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state

    @jax.jit
    def error(params):
        off = policy(params, clean_states.reshape(-1, 7)) - clean_actions.reshape(-1, 3)
        return jnp.abs(off[:, 0]).mean()

    x, y = states.reshape(-1, 7), actions.reshape(-1, 3)
    params, rng, errors = initial(jax.random.key(0)), np.random.default_rng(0), []
    optimizer_state = optimizer.init(params)
    for number in range(STEPS):
        rows = rng.integers(0, len(x), BATCH)
        params, optimizer_state = step(params, optimizer_state, x[rows], y[rows])
        if number % 50 == 49:
            errors.append(float(error(params)))
    act = jax.jit(policy)
    distance = run(lambda state: act(params, state), np.random.default_rng(2), 50)[2]
    return errors, 1000 * np.median(distance)


MODES = ("standard", "min_max", "quantile")
found = {
    ("clean", mode): train(loaded if mode != "min_max" else fitted, mode, states, actions)
    for mode in MODES
}
for (_, mode), (_, distance) in found.items():
    print(f"{mode:10} ends {distance:6.1f} mm from the goal")

# %% [markdown]
# (openpi's file keeps no minimum and maximum, so `min_max` takes ours.) On clean data all three modes reach the goal.
#
# ## One broken frame
#
# One frame of 12,000 is a glitch: every sensor reports a million, and so do the recorded torques. Such frames are in most recordings.

# %%
broken_states, broken_actions = states.copy(), actions.copy()
broken_states[17, 30], broken_actions[17, 30, :2] = 1e6, 1e6
write_lerobot(folder / "broken", broken_states, broken_actions)
broken = Normalizer.fit_files(folder / "broken", quantiles=(0.01, 0.99))

print("first torque      clean        one broken frame")
for name, value in {
    "deviation": lambda stats: stats.std["action"],
    "maximum": lambda stats: stats.max["action"],
    "99 % quantile": lambda stats: stats.quantile(0.99)["action"],
}.items():
    print(f"{name:15} {value(fitted)[0, 0]:8.2f} {value(broken)[0, 0]:16.2f}")

# %%
found |= {
    ("one broken frame", mode): train(broken, mode, broken_states, broken_actions) for mode in MODES
}

figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True)
for axis, data in zip(axes, ("clean", "one broken frame"), strict=True):
    for mode in MODES:
        errors, distance = found[data, mode]
        axis.semilogy(
            np.arange(1, len(errors) + 1) * 50,
            errors,
            label=f"{mode}: ends {distance:.0f} mm from the goal",
        )
    axis.set(title=data, xlabel="step")
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
axes[0].set_ylabel("error of the first torque, N m")
figure.tight_layout()

# %% [markdown]
# The broken frame makes the deviation 3,800 times larger and the maximum 40,000 times: all other frames become nearly the same number,
# and the policy learns nothing. The quantiles do not move. `clip` bounds what the broken frame itself can do to the training.

# %%
ends = {key: distance for key, (_, distance) in found.items()}
assert max(ends["clean", mode] for mode in MODES) < 20
assert ends["one broken frame", "quantile"] < 20
assert min(ends["one broken frame", mode] for mode in ("standard", "min_max")) > 200
