"""What is shown and written: results.json, the table, the learning curves."""

import json
import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.table import Table

RESULTS = "results.json"
CURVES = "curves.png"


class ResultsError(Exception):
    """Results that cannot be used; the message says what to do."""


def machine() -> dict[str, str]:
    """What the speeds depend on."""
    import flax

    from jaxnorm import __version__

    return {
        "jaxnorm": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
    }


def write(folder: Path, results: dict) -> None:
    """Writes ``results.json`` at once: a reader sees the old file or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (RESULTS + ".part")
    part.write_text(json.dumps(_plain(results), separators=(",", ":")) + "\n")
    part.replace(folder / RESULTS)


def read(folder: Path) -> dict:
    """The results in a folder.

    Raises:
      ResultsError: there are none, or they are not those of a comparison.
    """
    path = folder / RESULTS
    try:
        results = json.loads(path.read_text())
        if not isinstance(results["settings"], dict) or not isinstance(results["runs"], list):
            raise KeyError("settings, runs")
        return results
    except FileNotFoundError:
        raise ResultsError(f"there is no {path} to resume: leave out --resume, or pass the --out of the earlier run.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is not the result of a comparison ({error}): pass another --out.") from None


def keep_earlier(folder: Path) -> Path | None:
    """Moves earlier results out of the way; returns where they are now."""
    path = folder / RESULTS
    if not path.exists():
        return None
    number = next(n for n in range(1, 10_000) if not (folder / f"results-{n}.json").exists())
    return path.rename(folder / f"results-{number}.json")


def table(results: dict) -> Table:
    """One row per variant, batch size and norm: mean ± standard deviation over the seeds, after the last epoch."""
    settings = results["settings"]
    seeds = f"{settings['seeds']} seed{'s, mean ± deviation' if settings['seeds'] > 1 else ''}"
    result = Table(
        title=f"{described(settings)}, {settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}, {seeds}",
        caption="accuracy with running statistics, and with those of test batches as large as in training",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in (*shown_keys(settings, ("variant", "batch", "norm")), "train loss", "test loss", "accuracy %", "batch stats", "steps/s"):
        result.add_column(name, justify="left" if name in ("variant", "norm") else "right", no_wrap=True)
    for key, runs in groups(results["runs"]).items():
        result.add_row(*shown_keys(settings, map(str, key)), *_cells(runs), end_section=key[-1] == settings["norms"][-1])
    return result


def shown_keys(settings: dict, key: Iterable[str]) -> list[str]:
    """Of variant, batch size and norm what rows differ in; the norm always."""
    differ = (len(settings["variants"]) > 1, len(settings["batch_sizes"]) > 1, True)
    return [part for part, differs in zip(key, differ, strict=True) if differs]


def described(settings: dict) -> str:
    """The task, and what all runs share of it."""
    single = [
        f"{word}{values[0]}" for word, values in (("", settings["variants"]), ("batch ", settings["batch_sizes"])) if len(values) == 1
    ]
    return ", ".join([settings["data"], *single])


def markdown(results: dict) -> str:
    """The same rows for a page, without the speeds and without what all rows share."""
    settings = results["settings"]
    titles = [*shown_keys(settings, ("variant", "batch size", "norm")), "training loss", "test loss", "accuracy %", "with batch statistics"]
    rows = [[*shown_keys(settings, map(str, key)), *_cells(runs)[:-1]] for key, runs in groups(results["runs"]).items()]
    if not any(row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" if row else "|" + "---|" * len(titles) for row in (titles, [], *rows))


def groups(runs: Iterable[dict]) -> dict[tuple[str, int, str], list[dict]]:
    """The runs of all seeds by variant, batch size and norm, in the order in which they were made."""
    result: dict[tuple[str, int, str], list[dict]] = {}
    for run in runs:
        result.setdefault((run["variant"], run["batch_size"], run["norm"]), []).append(run)
    return result


def _cells(runs: list[dict]) -> list[str]:
    last = [run["epochs"][-1] for run in runs]
    return [
        _spread([epoch["train_loss"] for epoch in last], ".3f"),
        _spread([epoch["test_loss"] for epoch in last], ".3f"),
        _spread([epoch["test_accuracy"] for epoch in last], ".1f", 100),
        _spread([epoch["batch_test_accuracy"] for epoch in last], ".1f", 100) if "batch_test_accuracy" in last[0] else "",
        f"{np.median([run['steps_per_second'] for run in runs]):.0f}",
    ]


def _spread(values: list[float | None], form: str, factor: float = 1) -> str:
    if any(value is None or not math.isfinite(value) for value in values):
        return "diverged"
    numbers = factor * np.array(values, float)
    mean = format(numbers.mean(), form)
    return f"{mean}±{format(numbers.std(ddof=1), form)}" if len(values) > 1 else mean


def plot(folder: Path, results: dict) -> Path:
    """Draws the learning curves: training loss by step and test accuracy by epoch, a column per batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings, grouped = results["settings"], groups(results["runs"])
    columns = list(dict.fromkeys(key[:2] for key in grouped))
    width = 5.2 if len(columns) < 4 else 3.4
    figure, axes = plt.subplots(2, len(columns), figsize=(width * len(columns), 7), squeeze=False, layout="constrained", sharey="row")
    colors = {norm: f"C{i}" for i, norm in enumerate(settings["norms"])}
    for (variant, size, norm), runs in grouped.items():
        above, below = axes[:, columns.index((variant, size))]
        loss = np.array([run["curve"]["loss"] for run in runs], float)
        _band(above, runs[0]["curve"]["step"], loss, colors[norm], norm)
        epochs = np.arange(1, len(runs[0]["epochs"]) + 1)
        for name, style in (("test_accuracy", "-"), ("batch_test_accuracy", "--")):
            if name in runs[0]["epochs"][0]:
                values = np.array([[epoch[name] for epoch in run["epochs"]] for run in runs], float)
                label = norm if name == "test_accuracy" else f"{norm}, batch statistics"
                _band(below, epochs, 100 * values, colors[norm], label, style)
    several = len(settings["variants"]) > 1
    for (variant, size), (above, below) in zip(columns, axes.T, strict=True):
        above.set(title=f"{variant}, batch {size}" if several else f"batch size {size}", xlabel="step", yscale="log")
        below.set(xlabel="epoch")
        below.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test accuracy (%)")
    axes[0, 0].legend()
    axes[1, 0].legend()
    seeds = f"{settings['seeds']} seeds, mean and range" if settings["seeds"] > 1 else "1 seed"
    figure.suptitle(f"{described(settings)} ({seeds})")
    path = folder / CURVES
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _band(axes, x, values: np.ndarray, color: str, label: str, style: str = "-") -> None:
    axes.plot(x, values.mean(0), style, color=color, label=label, linewidth=1.4)
    axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)


def _plain(value):
    """Six digits of every number; JSON has no NaN, so that null stands for a loss that is not finite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
