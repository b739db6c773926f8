"""Measure why norms help, and say it in words and pictures.

The measures are the loss along the gradient, the drift of layers, the effect of scaling
the weights, and the weights that the blend of switchable norm learns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from jaxnorm.experiments import explain_figures, probes, report
from jaxnorm.experiments.data import Dataset
from jaxnorm.experiments.models import LeNet
from jaxnorm.experiments.probes import FACTORS, REACH
from jaxnorm.experiments.runs import OnProgress, carry_out
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import Run, watched

BLEND = "switchable"
EXPLANATION = "explanation.md"
# the attributes that identify a run of one explanation
KEY = ("norm", "batch_size", "seed")


@dataclass(frozen=True)
class Settings:
    """The settings of an explanation.

    The network is LeNet with the norm after its convolutions, trained by plain gradient
    descent.
    """

    data: str = "digits"
    variant: str = "deep"
    norms: tuple[str, ...] = ("none", "batch", "layer", "group")
    batch_size: int = 64
    blend_batch_sizes: tuple[int, ...] = (64, 32, 16, 8, 4, 2)
    seeds: int = 1
    epochs: int = 15
    learning_rate: float = 0.1
    snapshots: int = 30

    def runs(self) -> list[Run]:
        """Return the runs: one for each norm, and one of switchable norm for each batch size.

        Switchable norm is trained by Adam, at each batch size for the same number of
        steps, four times that of the other norms. Under plain gradient descent the
        weights of its blend hardly move.
        """
        result: list[Run] = []
        for seed in range(self.seeds):
            rest = seed, self.variant
            result += [
                Run(norm, self.batch_size, *rest, self.epochs, self.learning_rate, 0.9, "sgd")
                for norm in self.norms
            ]
            # a smaller batch makes more steps in an epoch: all sizes get as many steps
            epochs = {
                size: max(1, 4 * self.epochs * size // self.batch_size)
                for size in self.blend_batch_sizes
            }
            result += [
                Run(BLEND, size, *rest, epochs[size], 1e-3, 0.9, "adam")
                for size in self.blend_batch_sizes
            ]
        return result


def explain(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    data_dir: str | None = None,
    resume: bool = False,
    resume_command: str = "--resume",
) -> dict:
    """Make the measurements that are missing, print paragraphs on all, and draw pictures.

    ``results.json`` is written after every run, and the paragraphs to
    ``explanation.md``. ``resume_command`` is printed after an interrupt, as the command
    that continues.

    Raises:
      DataError: the data are not available.
      ResultsError: no results exist that could be resumed, they were made with other
        settings, or a file cannot be written.
      KeyboardInterrupt: the measurements were interrupted; the command that continues
        them has been printed.
    """
    data = (
        TASKS[settings.data]
        .load(data_dir)
        .with_batches_of(max(settings.batch_size, *settings.blend_batch_sizes))
    )

    def measure(run: Run, on_progress: OnProgress) -> dict:
        return _measured(run, data, settings.snapshots, on_progress)

    results = carry_out(
        settings,
        KEY,
        measure,
        lambda found: "measured",
        out,
        console,
        resume=resume,
        resume_command=resume_command,
    )
    paragraphs = [*words(results), *seen(results)]
    for paragraph in paragraphs:
        console.print(Markdown(paragraph), "")
    report.write_atomically(
        out / EXPLANATION, lambda path: path.write_text("\n\n".join(paragraphs) + "\n")
    )
    explain_figures.plot(out, results)
    return results


def _measured(run: Run, data: Dataset, snapshots: int, on_progress: OnProgress) -> dict:
    """Train a network and return its probes at ``snapshots`` moments of the training.

    For switchable norm return the weights of its blend instead.
    """
    model = LeNet(run.norm, run.variant, run.momentum)
    steps = len(data.train_inputs) // run.batch_size * run.epochs
    every = max(1, steps // snapshots)
    if run.norm == BLEND:
        last: dict = {}
        for step, params, _ in watched(run, model, data, every):
            on_progress(step, steps)
            last = params
        return {"weights": _blend(last)}
    # every probe sees the same batch, so that snapshots differ by the parameters alone
    batch = data.train_inputs[: run.batch_size], data.train_labels[: run.batch_size]
    history: dict[str, Any] = {}
    before = None
    for step, params, stats in watched(run, model, data, every):
        found = probes.along_gradient(model, params, stats, batch, run.learning_rate)
        found |= {
            "shift": probes.shift_of_gradients(model, params, stats, batch, run.learning_rate)
        }
        moments = probes.before_activations(model, params, stats, batch[0])
        found |= {"drift": probes.drift(before or moments, moments), "step": np.array(step)}
        found |= {"length": probes.length_of_second(params)}
        before = moments
        for name, value in found.items():
            history.setdefault(name, []).append(np.asarray(value).tolist())
        on_progress(step, steps)
    scaled = probes.scaled_weights(model, params, stats, batch)
    history["scaled"] = {name: np.asarray(value).tolist() for name, value in scaled.items()}
    if run.norm != "none":
        history["health"] = probes.health(model, params, stats, batch[0])
    return history


def _blend(params) -> dict[str, list[float]]:
    """Return the weights of instance, layer and batch statistics, averaged over the layers."""
    own = [leaf for name, leaf in params.items() if name.startswith("SwitchableNorm")]
    return {
        kind: np.mean(
            [jax.nn.softmax(leaf[f"{kind}_logits"]) for leaf in own], axis=0, dtype=float
        ).tolist()
        for kind in ("mean", "var")
    }


def words(results: dict) -> list[str]:
    """Return a paragraph for each picture, with the numbers behind it."""
    norms = results["settings"]["norms"]

    def summarize(measure, form: str = ".2g") -> str:
        values = {
            norm: np.mean([measure(run) for run in _runs_of(results, norm)]) for norm in norms
        }
        return ", ".join(
            f"{norm} {value:{form}}"
            for norm, value in sorted(values.items(), key=lambda item: item[1])
        )

    ranges = summarize(lambda run: np.median(np.ptp(np.array(run["losses"], float), axis=1)))
    turns = summarize(lambda run: np.median(np.array(run["turns"], float)[:, -1]))
    smooth = summarize(lambda run: np.median(np.array(run["smoothness"], float)))
    # the first snapshot has none before it, and its drift from itself is 0
    drifts = summarize(lambda run: np.mean(np.array(run["drift"], float)[1:]))
    # no layer stands before the first one, whose shift is 0
    shifts = summarize(lambda run: np.median(np.array(run["shift"], float)[:, 1:]))
    spread = summarize(lambda run: np.ptp(np.array(run["scaled"]["losses"], float)))
    slope = summarize(lambda run: _power(np.array(run["scaled"]["gradients"], float)), ".2f")
    growth = summarize(lambda run: np.divide(*np.array(run["length"], float)[[-1, 0]]), ".2f")
    near, far, low, high = REACH[0], REACH[-1], FACTORS[0], FACTORS[-1]
    return [
        f"**Along the gradient.** Over steps of {near} to {far:.0f} learning rates the loss ranges "
        "over (median over the training): "
        f"{ranges}. At the longest the gradient has moved by: {turns}; its largest change per "
        f"length is: {smooth}.",
        "**Drift.** From one snapshot to the next the distribution before a nonlinearity moves by "
        "(in deviations of its features, "
        f"mean over layers): {drifts}. When all layers before it make one step, a layer's gradient "
        "changes by (relative to its "
        f"length): {shifts}.",
        f"**Scale.** When the second layer's weights are multiplied by {low} to {high:.0f}, the "
        f"loss ranges over: {spread}. Its "
        f"gradient goes with the factor to the power: {slope}. Over the training the weights grew "
        f"by a factor of: {growth}.",
        "**The blend.** Switchable norm gave the batch's statistics these weights, mean and "
        f"variance: {_batch_weights(results)}.",
    ]


def seen(results: dict) -> list[str]:
    """Return a paragraph without a picture on the inputs of the norms, if results have health."""
    health = {
        norm: [run.get("health", {}) for run in _runs_of(results, norm)]
        for norm in results["settings"]["norms"]
        if norm != "none"
    }
    if not health or not all(found for runs in health.values() for found in runs):
        return []

    def worst(number: str) -> str:
        values = {
            norm: [v for found in runs for name, v in found.items() if name.endswith(f"/{number}")]
            for norm, runs in health.items()
        }
        return ", ".join(f"{norm} {max(found):.2g}" for norm, found in values.items() if found)

    return [
        "**What the norms saw.** At the end of the training the largest |mean| / deviation of a "
        f"group was: {worst('offset') or 'nothing'}; the largest channel over the median channel: "
        f"{worst('exploding')}; the distance of a running mean from that of a batch, in "
        f"deviations: {worst('mean_distance') or 'nothing'}."
    ]


def _power(values: np.ndarray) -> float:
    """Return the exponent p for which the values are proportional to ``FACTORS**p``.

    It is the slope of a least-squares line through the logarithms, and NaN where a
    value is not positive.
    """
    if not (values > 0).all():
        return float("nan")
    # the slope of least squares is x @ y / (x @ x) where x has mean 0, whatever the
    # mean of y
    x = np.log(FACTORS) - np.log(FACTORS).mean()
    return float(x @ np.log(values) / (x @ x))


def _batch_weights(results: dict) -> str:
    """Return the weights of the batch's mean and variance at each batch size, in words."""

    def describe(size: int) -> str:
        mean, var = (
            np.mean([run["weights"][kind][2] for run in _runs_of(results, BLEND, size)])
            for kind in ("mean", "var")
        )
        return f"{mean:.2f} and {var:.2f} at batch {size}"

    return ", ".join(map(describe, results["settings"]["blend_batch_sizes"]))


def _runs_of(results: dict, norm: str, batch_size: int | None = None) -> Iterator[dict]:
    """Return the runs of a norm, at one batch size or at all."""
    return (
        run
        for run in results["runs"]
        if run["norm"] == norm and batch_size in (None, run["batch_size"])
    )
