"""Samples of networks that model densities, and pictures of them: images, pen drawings, texts."""

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
from jaxnorm.experiments.writers import some_points

SAMPLES = "samples.png"
DRAWN = 30  # points of a drawing: about the median of Omniglot's
TEXT_LENGTH, WIDTH = 200, 48  # characters of a text, and of a line of a picture


@dataclass(frozen=True)
class Kind:
    """One kind of sample; written ones are for JSON."""

    count: int  # in a row
    height: float  # of one, next to its width
    # of a network, its variables, a key and the count
    make: Callable[[nn.Module, Any, jax.Array, int], jax.Array]
    write: Callable[[np.ndarray, Dataset], list]
    show: Callable[[Any, Any], object]  # one, on axes

    def of(self, model: nn.Module, variables, data: Dataset, seed: int) -> list:
        """Written samples of a trained network."""
        return self.write(
            np.asarray(self.make(model, variables, jax.random.key(seed), self.count)), data
        )


def _predict(model: nn.Module, variables, inputs: jax.Array, key: jax.Array) -> Any:
    return model.apply(variables, inputs, evaluating=True, making=True, rngs={"noise": key})


def _in_turn(
    model: nn.Module, variables, key: jax.Array, draw: Callable, empty: jax.Array, given: int
) -> jax.Array:
    """Fills ``(count, steps, ...)`` after the given steps, each drawn from what the network
    predicts from those before it.
    """

    def one_more(at: jax.Array, made: jax.Array) -> jax.Array:
        now = jax.random.fold_in(key, at)
        return made.at[:, at + given].set(draw(now, _predict(model, variables, made, now)[:, at]))

    return lax.fori_loop(0, empty.shape[1] - given, one_more, empty)


@partial(jax.jit, static_argnums=(0, 3))
def _images(model: nn.Module, variables, key: jax.Array, count: int) -> jax.Array:
    return _predict(model, variables, jnp.zeros((count, SIDE**2)), key)


@partial(jax.jit, static_argnums=(0, 3))
def _drawings(model: nn.Module, variables, key: jax.Array, count: int) -> jax.Array:
    return _in_turn(model, variables, key, some_points, jnp.zeros((count, DRAWN, 3)), 0)


@partial(jax.jit, static_argnums=(0, 3))
def _texts(model: nn.Module, variables, key: jax.Array, count: int) -> jax.Array:
    """From the first symbol, the end of a line, on."""
    return _in_turn(
        model,
        variables,
        key,
        jax.random.categorical,
        jnp.zeros((count, TEXT_LENGTH + 1), jnp.int32),
        1,
    )


def _digits_of(images: np.ndarray, data: Dataset) -> list[str]:
    """Chances of ink, in ninths; those that are no number are blank."""
    return ["".join(map(str, image)) for image in (9 * np.nan_to_num(images)).round().astype(int)]


def _points_of(drawings: np.ndarray, data: Dataset) -> list[list]:
    """The points of each that are there, in hundredths."""
    return [
        np.round(points[np.isfinite(points).all(1)].astype(float), 2).tolist()
        for points in drawings
    ]


def _characters_of(texts: np.ndarray, data: Dataset) -> list[str]:
    return [
        "".join(map(chr, np.take(data.tables["alphabet"], symbols, mode="clip")))
        for symbols in texts
    ]


def _show_image(axes, digits: str) -> None:
    axes.imshow(np.array(list(map(int, digits))).reshape(SIDE, SIDE), cmap="gray_r", vmin=0, vmax=9)


def _show_drawing(axes, points: list) -> None:
    """Lines from each point to the next, where the pen is not lifted."""
    *offsets, lifted = np.array(points).reshape(-1, 3).T
    x, y = np.cumsum(offsets, 1)
    for part in np.split(np.arange(len(x)), np.flatnonzero(lifted) + 1):
        axes.plot(x[part], y[part], "k", linewidth=1, solid_capstyle="round")
    axes.set_aspect("equal", adjustable="datalim")


def _show_text(axes, text: str) -> None:
    lines = chain.from_iterable(wrap(line, WIDTH) or [""] for line in text.strip().splitlines())
    axes.text(0, 1, "\n".join(lines), family="monospace", fontsize=7, va="top", parse_math=False)


KINDS = {  # by task
    "draw": Kind(8, 1, _images, _digits_of, _show_image),
    "handwriting": Kind(8, 1, _drawings, _points_of, _show_drawing),
    "text": Kind(3, 0.4, _texts, _characters_of, _show_text),
}


def pictures(results: dict) -> list[str]:
    """The names of the files that there are."""
    return [SAMPLES] if any("samples" in run for run in results["runs"]) else []


def plot(folder: Path, results: dict, data: Dataset) -> None:
    """Draws a row of test examples, and one of every network's samples, where there are any."""
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
        for ax, sample in zip(row, samples, strict=False):  # there may be fewer
            kind.show(ax, sample)
        for ax in row:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    save(figure, folder / SAMPLES, f"{described(settings)}: samples")
