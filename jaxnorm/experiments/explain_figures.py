"""Draw the pictures of ``jaxnorm explain``."""

from pathlib import Path

import numpy as np

from jaxnorm.experiments.figures import band, logarithmic, pyplot, save
from jaxnorm.experiments.probes import FACTORS, REACH

PICTURES = {
    "along_gradient.png": "Along the gradient",
    "drift.png": "Drift of the layers",
    "scale.png": "Scales of the weights",
    "blend.png": "What switchable norm learned",
}
STATISTICS = ("instance", "layer", "batch")


def plot(folder: Path, results: dict) -> None:
    """Draw the four pictures into a folder."""
    settings = results["settings"]
    seeds = f"{settings['seeds']} seeds" if settings["seeds"] > 1 else "1 seed"
    for (name, title), draw in zip(
        PICTURES.items(), (_along_gradient, _drift, _scale, _blend), strict=True
    ):
        save(
            draw(results),
            folder / name,
            f"{title} ({settings['data']}, {settings['variant']}, {seeds})",
        )


def _panels(results: dict, titles: dict[str, str], xlabel: str = "training step"):
    """Return a figure, a row of panels, and the norm, color and runs of each norm.

    ``titles`` maps the title of each panel to the label of its y axis.
    """
    figure, axes = pyplot().subplots(
        1, len(titles), figsize=(4.6 * len(titles), 4), squeeze=False, layout="constrained"
    )
    for axis, (title, ylabel) in zip(axes[0], titles.items(), strict=True):
        axis.set(title=title, ylabel=ylabel, xlabel=xlabel)
    norms = [
        (norm, f"C{i}", [run for run in results["runs"] if run["norm"] == norm])
        for i, norm in enumerate(results["settings"]["norms"])
    ]
    return figure, axes[0], norms


def _history(runs: list[dict], name: str, reduce=lambda values: values) -> np.ndarray:
    """Return a measure of several runs, ``(runs, snapshots)``.

    ``reduce`` reduces what one run has of it, where a snapshot holds several numbers.
    """
    return np.array([reduce(np.array(run[name], float)) for run in runs])


def _finished(figure, logarithms):
    """Give these panels a logarithmic y axis, and the first one the legend."""
    for axes in logarithms:
        logarithmic(axes)
    logarithms[0].legend(title="norm")
    return figure


def _along_gradient(results: dict):
    """Draw how loss and gradient change along the gradient, over the training."""
    titles = {
        "range of the loss": "largest less smallest loss, cross entropy",
        "how far the gradient moves": f"length of its change, {REACH[-1]:.0f} learning rates away",
        "smoothness": "largest change of the gradient per length moved",
    }
    figure, axes, norms = _panels(results, titles)
    for norm, color, runs in norms:
        steps = runs[0]["step"]
        band(axes[0], steps, _history(runs, "losses", lambda v: np.ptp(v, axis=1)), color, norm)
        band(axes[1], steps, _history(runs, "turns", lambda v: v[:, -1]), color, norm)
        band(axes[2], steps, _history(runs, "smoothness"), color, norm)
    return _finished(figure, axes)


def _drift(results: dict):
    """Draw how layers' inputs and gradients move over the training."""
    titles = {
        "inputs of nonlinearities": "drift since the last snapshot, in deviations",
        "gradients, when earlier layers step": "change relative to its length, median layer",
    }
    figure, axes, norms = _panels(results, titles)
    for norm, color, runs in norms:
        steps = runs[0]["step"]
        # the first snapshot has none before it, and the first layer no earlier layers
        band(axes[0], steps[1:], _history(runs, "drift", lambda v: v[1:].mean(1)), color, norm)
        band(
            axes[1],
            steps,
            _history(runs, "shift", lambda v: np.median(v[:, 1:], axis=1)),
            color,
            norm,
        )
    return _finished(figure, axes)


def _scale(results: dict):
    """Draw loss and gradient of scaled weights, and the relative step by training step."""
    titles = {
        "loss of scaled weights": "loss, cross entropy",
        "gradient of scaled weights": "length of the gradient",
        "relative step": "learning rate / squared length of weights",
    }
    figure, axes, norms = _panels(results, titles)
    for norm, color, runs in norms:
        for axis, name in zip(axes, ("losses", "gradients"), strict=False):
            band(
                axis,
                FACTORS,
                np.array([run["scaled"][name] for run in runs], float),
                color,
                norm,
                marker="o",
            )
            axis.set(
                xscale="log",
                xlabel="factor of the second layer's weights",
                xticks=FACTORS,
                xticklabels=FACTORS,
            )
            axis.minorticks_off()
        # a network that ignores the scale of its weights moves by the step relative to
        # their length, and its gradient shrinks as 1 / length: the quotient is by the
        # square
        relative = results["settings"]["learning_rate"] / _history(runs, "length") ** 2
        band(axes[2], runs[0]["step"], relative, color, norm)
    return _finished(figure, axes[:2])


def _blend(results: dict):
    """Draw the weights of switchable norm's statistics at each batch size, as stacked bars."""
    sizes = results["settings"]["blend_batch_sizes"]
    figure, axes = pyplot().subplots(1, 2, figsize=(9.2, 4), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("mean", "var"), strict=True):
        runs = [
            [
                run["weights"][kind]
                for run in results["runs"]
                if "weights" in run and run["batch_size"] == size
            ]
            for size in sizes
        ]
        weights = np.array([np.mean(found, axis=0) for found in runs])
        bottom = np.zeros(len(sizes))
        for i, name in enumerate(STATISTICS):
            axis.bar([str(size) for size in sizes], weights[:, i], bottom=bottom, label=name)
            bottom += weights[:, i]
        axis.set(
            title=f"weights of the {'means' if kind == 'mean' else 'variances'}",
            xlabel="batch size, examples",
        )
    axes[0].set_ylabel("share of the statistics, mean over the layers")
    drawn = axes[1].get_legend_handles_labels()
    figure.legend(*drawn, loc="outside right center", reverse=True, title="statistics of")
    return figure
