"""Draw learning curves, and the losses and errors after the last epoch by batch size."""

from pathlib import Path
from textwrap import fill

import numpy as np

from jaxnorm.experiments.report import described, groups, write_atomically

CURVES, SIZES = "curves.png", "batch_sizes.png"
# letters of a title for which an inch has room
LETTERS_PER_INCH = 10
# with so many batch sizes or more, a picture has them as an axis
MANY = 3


def pictures(settings: dict) -> list[str]:
    """Return the names of the pictures of a comparison."""
    return [CURVES, SIZES] if len(settings["batch_sizes"]) >= MANY else [CURVES]


def plot(folder: Path, results: dict) -> None:
    """Draw the pictures of a comparison into a folder."""
    draw = {CURVES: _curves, SIZES: _by_batch_size}
    for name in pictures(results["settings"]):
        save(draw[name](results), folder / name, _title(results["settings"]))


def _curves(results: dict):
    """Draw the training loss by step, and the test accuracy or loss by epoch.

    Every variant and batch size has a column.
    """
    plt, settings, grouped = pyplot(), results["settings"], groups(results["runs"])
    columns = list(dict.fromkeys(key[:2] for key in grouped))
    # many columns are narrower, lest the picture grow too wide
    width = 5.2 if len(columns) < 4 else 3.4
    figure, axes = plt.subplots(
        2,
        len(columns),
        figsize=(width * len(columns), 7),
        squeeze=False,
        layout="constrained",
        sharey="row",
    )
    colors = {norm: f"C{i}" for i, norm in enumerate(settings["norms"])}
    measure, factor, label = tested(results)
    for (variant, size, norm), runs in grouped.items():
        above, below = axes[:, columns.index((variant, size))]
        loss = np.array([run["curve"]["loss"] for run in runs], float)
        band(above, runs[0]["curve"]["step"], loss, colors[norm], norm)
        epochs = np.arange(1, len(runs[0]["epochs"]) + 1)
        for name, style in ((f"test_{measure}", "-"), (f"batch_test_{measure}", "--")):
            if name in runs[0]["epochs"][0]:
                values = np.array([[epoch[name] for epoch in run["epochs"]] for run in runs], float)
                shown = norm if style == "-" else f"{norm}, batch statistics"
                band(
                    below,
                    epochs,
                    factor * values,
                    colors[norm],
                    shown,
                    style,
                    # a line through a single point is invisible
                    "o" if len(epochs) == 1 else "",
                )
    several = len(settings["variants"]) > 1
    # densities may have a negative loss, and diverged runs None in place of a number
    positive = all(
        loss is None or loss > 0 for run in results["runs"] for loss in run["curve"]["loss"]
    )
    for (variant, size), (above, below) in zip(columns, axes.T, strict=True):
        above.set(
            title=f"{variant}, batch {size}" if several else f"batch size {size}",
            xlabel="training step",
        )
        above.set_yscale("log" if positive else "linear")
        below.set(xlabel="epoch, a pass over the training data")
        # epochs are counted: half of one is no tick
        below.xaxis.get_major_locator().set_params(integer=True)
        if settings["epochs"] == 1:
            below.set_xticks([1])
    unit = results.get("loss", "cross entropy")
    axes[0, 0].set_ylabel(f"training loss, {unit}")
    axes[1, 0].set_ylabel(label)
    axes[0, 0].legend(title="norm")
    axes[1, 0].legend(title="norm")
    return figure


def _by_batch_size(results: dict):
    """Draw training loss, and test accuracy or loss, after the last epoch, by batch size.

    Every variant has a column.
    """
    plt, settings, grouped = pyplot(), results["settings"], groups(results["runs"])
    figure, axes = plt.subplots(
        2,
        len(settings["variants"]),
        figsize=(5.2 * len(settings["variants"]), 7),
        squeeze=False,
        layout="constrained",
        sharey="row",
    )
    measure, factor, label = tested(results)
    for (above, below), variant in zip(axes.T, settings["variants"], strict=True):
        for i, norm in enumerate(settings["norms"]):
            found = {
                size: runs for (v, size, n), runs in grouped.items() if (v, n) == (variant, norm)
            }
            for axis, name, scale in ((above, "train_loss", 1), (below, f"test_{measure}", factor)):
                if found:
                    values = np.array(
                        [[run["epochs"][-1][name] for run in runs] for runs in found.values()],
                        float,
                    )
                    band(axis, list(found), scale * values.T, f"C{i}", norm, marker="o")
        for axis in (above, below):
            axis.set_xscale("log", base=2)
            axis.set(
                xlabel="batch size, examples",
                xticks=settings["batch_sizes"],
                xticklabels=settings["batch_sizes"],
            )
            # from large to small batches, the direction in which batch norm degrades
            axis.invert_xaxis()
        above.set(title=variant)
        logarithmic(above)
    axes[0, 0].set_ylabel(f"training loss, last epoch, {results.get('loss', 'cross entropy')}")
    axes[1, 0].set_ylabel(label)
    axes[0, 0].legend(title="norm")
    return figure


def tested(results: dict) -> tuple[str, float, str]:
    """Return the name of the test measure in an epoch's results, a factor, and a label.

    The measure is the accuracy if every run has one, else the loss.
    """
    if all("test_accuracy" in run["epochs"][-1] for run in results["runs"]):
        return "accuracy", 100, "test accuracy (%)"
    return "loss", 1, f"test loss, {results.get('loss', 'cross entropy')}"


def _title(settings: dict) -> str:
    """Return the title of a picture of a comparison."""
    seeds = f"{settings['seeds']} seeds, mean and range" if settings["seeds"] > 1 else "1 seed"
    return f"{described(settings)} ({seeds})"


def pyplot():
    """Return ``matplotlib.pyplot`` with a back end that needs no screen."""
    import matplotlib

    # selected before pyplot is imported, which would look for a screen
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def band(
    axes, x, values: np.ndarray, color: str, label: str, style: str = "-", marker: str = ""
) -> None:
    """Draw the mean over the first axis as a line, in a band from the least to the largest value.

    Where no value is finite, draw nothing, and add "diverged" to the legend.
    """
    if not np.isfinite(values).any():
        axes.plot([], [], style, color=color, label=f"{label}: diverged")
        return
    axes.plot(x, values.mean(0), style, color=color, label=label, linewidth=1.4, marker=marker)
    axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)


def logarithmic(axes) -> None:
    """Make the y axis logarithmic, if any value that is drawn there is positive."""
    if any((np.asarray(line.get_ydata(), float) > 0).any() for line in axes.lines):
        axes.set_yscale("log")


def save(figure, path: Path, title: str, dpi: int = 110) -> None:
    """Write a picture in the format that its suffix names, and close the figure.

    Raises:
      ResultsError: the file cannot be written.
    """
    figure.suptitle(fill(title, int(LETTERS_PER_INCH * figure.get_figwidth())))
    try:
        write_atomically(path, lambda part: figure.savefig(part, dpi=dpi, format=path.suffix[1:]))
    finally:
        # pyplot keeps every figure until it is closed
        pyplot().close(figure)


def formats() -> list[str]:
    """Return the suffixes that a picture may have."""
    from matplotlib.backend_bases import FigureCanvasBase

    # pgf needs a LaTeX installation
    return sorted(f".{name}" for name in FigureCanvasBase.filetypes if name != "pgf")
