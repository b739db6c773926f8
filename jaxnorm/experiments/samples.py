"""Draw samples from networks that model densities, and pictures of them.

The samples are images, pen drawings and texts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from jaxnorm.experiments.data import Dataset
from jaxnorm.experiments.figures import pyplot, save
from jaxnorm.experiments.painter import SIDE
from jaxnorm.experiments.report import described, shown_keys
from jaxnorm.experiments.writers import sample_points

SAMPLES = "samples.png"
# points of a sampled drawing: about the median of Omniglot's
DRAWN = 30
# characters of a sampled text, and of a line in a picture
TEXT_LENGTH, WIDTH = 200, 48


@dataclass(frozen=True)
class Kind:
    """One kind of sample.

    Attributes:
      count: samples in a row of the picture.
      height: height of a sample, relative to its width.
      make: draws samples; it takes a network, its variables, a random key and the
        count.
      write: turns an array of samples into a list for JSON.
      show: draws one sample of such a list on axes.
    """

    count: int
    height: float
    make: Callable[[nn.Module, Any, jax.Array, int], jax.Array]
    write: Callable[[np.ndarray, Dataset], list]
    show: Callable[[Any, Any], object]

    def sample(self, model: nn.Module, variables, data: Dataset, seed: int) -> list:
        """Return samples of a trained network, as a list for JSON."""
        return self.write(
            np.asarray(self.make(model, variables, jax.random.key(seed), self.count)), data
        )


def _predict(model: nn.Module, variables, inputs: jax.Array, key: jax.Array) -> Any:
    """Return what a network predicts, instead of its losses."""
    return model.apply(variables, inputs, evaluating=True, making=True, rngs={"noise": key})


def _in_turn(
    model: nn.Module, variables, key: jax.Array, draw: Callable, empty: jax.Array, given: int
) -> jax.Array:
    """Fill ``(count, steps, ...)`` step by step, after the first ``given`` steps.

    Each step is drawn from what the network predicts of it from the steps before.
    """

    # The network reads the whole array again at every step. Elements ahead do not
    # change what it predicts, since it reads from the first to the last.
    def one_more(at: jax.Array, made: jax.Array) -> jax.Array:
        now = jax.random.fold_in(key, at)
        return made.at[:, at + given].set(draw(now, _predict(model, variables, made, now)[:, at]))

    return lax.fori_loop(0, empty.shape[1] - given, one_more, empty)


@partial(jax.jit, static_argnums=(0, 3))
def _images(model: nn.Module, variables, key: jax.Array, count: int) -> jax.Array:
    """Return sampled images, as probabilities of ink."""
    return _predict(model, variables, jnp.zeros((count, SIDE**2)), key)


@partial(jax.jit, static_argnums=(0, 3))
def _drawings(model: nn.Module, variables, key: jax.Array, count: int) -> jax.Array:
    """Return sampled drawings."""
    return _in_turn(model, variables, key, sample_points, jnp.zeros((count, DRAWN, 3)), 0)


@partial(jax.jit, static_argnums=(0, 3))
def _texts(model: nn.Module, variables, key: jax.Array, count: int) -> jax.Array:
    """Return sampled texts. They begin with symbol 0, which is the end of a line."""
    return _in_turn(
        model,
        variables,
        key,
        jax.random.categorical,
        jnp.zeros((count, TEXT_LENGTH + 1), jnp.int32),
        1,
    )


def _digits_of(images: np.ndarray, data: Dataset) -> list[str]:
    """Return images as strings of digits, the probability of ink in ninths; NaN is blank."""
    return ["".join(map(str, image)) for image in (9 * np.nan_to_num(images)).round().astype(int)]


def _points_of(drawings: np.ndarray, data: Dataset) -> list[list]:
    """Return the finite points of each drawing, rounded to hundredths."""
    return [
        np.round(points[np.isfinite(points).all(1)].astype(float), 2).tolist()
        for points in drawings
    ]


def _characters_of(texts: np.ndarray, data: Dataset) -> list[str]:
    """Return texts as strings."""
    return [
        # mode="clip": a text of fewer than 65 symbols has no characters for the last
        # logits
        "".join(map(chr, np.take(data.tables["alphabet"], symbols, mode="clip")))
        for symbols in texts
    ]


def _show_image(axes, digits: str) -> None:
    """Draw an image from its digits."""
    axes.imshow(np.array(list(map(int, digits))).reshape(SIDE, SIDE), cmap="gray_r", vmin=0, vmax=9)


def _show_drawing(axes, points: list) -> None:
    """Draw a line from each point to the next, unless the pen is lifted between them."""
    *offsets, lifted = np.array(points).reshape(-1, 3).T
    x, y = np.cumsum(offsets, 1)
    for part in np.split(np.arange(len(x)), np.flatnonzero(lifted) + 1):
        axes.plot(x[part], y[part], "k", linewidth=1, solid_capstyle="round")
    axes.set_aspect("equal", adjustable="datalim")


def _show_text(axes, text: str) -> None:
    """Draw a text, in lines of at most ``WIDTH`` characters."""
    lines = chain.from_iterable(wrap(line, WIDTH) or [""] for line in text.strip().splitlines())
    # parse_math=False: a $ in the text would begin a formula
    axes.text(0, 1, "\n".join(lines), family="monospace", fontsize=7, va="top", parse_math=False)


# the kind of sample of each task that has one
KINDS = {
    "draw": Kind(8, 1, _images, _digits_of, _show_image),
    "handwriting": Kind(8, 1, _drawings, _points_of, _show_drawing),
    "text": Kind(3, 0.4, _texts, _characters_of, _show_text),
}


def pictures(results: dict) -> list[str]:
    """Return the names of the pictures of samples."""
    return [SAMPLES] if any("samples" in run for run in results["runs"]) else []


def plot(folder: Path, results: dict, data: Dataset) -> None:
    """Draw a row of test examples, and a row of samples of each network.

    Without samples, draw nothing.
    """
    runs = [run for run in results["runs"] if "samples" in run]
    if not runs:
        return
    plt, settings, kind = pyplot(), results["settings"], KINDS[results["settings"]["data"]]
    examples = data.test_inputs[:: max(1, len(data.test_inputs) // kind.count)][: kind.count]
    rows = {"data": kind.write(examples, data)}
    for run in runs:
        rows[
            ", ".join(
                shown_keys(settings, (run["variant"], f"batch {run['batch_size']}", run["norm"]))
            )
        ] = run["samples"]
    size = 10.5, len(rows) * kind.height * 10 / kind.count + 0.5
    figure, axes = plt.subplots(
        len(rows), kind.count, figsize=size, squeeze=False, layout="constrained"
    )
    for (name, samples), row in zip(rows.items(), axes, strict=True):
        row[0].set_ylabel(name)
        # not strict: a small test set has fewer examples than a row
        for ax, sample in zip(row, samples, strict=False):
            kind.show(ax, sample)
        for ax in row:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    save(figure, folder / SAMPLES, f"{described(settings)}: samples")
