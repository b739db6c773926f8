"""Read and write results.json, and show results as tables."""

import errno
import json
import math
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxnorm.kernels.cpu.libraries import cpu

RESULTS = "results.json"


class ResultsError(Exception):
    """Raised where results cannot be used. The message says what to do."""


def machine() -> dict[str, str]:
    """Return the versions and the hardware on which speeds depend."""
    import flax

    from jaxnorm import __version__

    return {
        "jaxnorm": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


def _processor() -> str:
    """Return the name and the generation of the processor, where Linux gives them."""
    # a cloud gives one model name to several generations: family and model tell them
    # apart
    entries = cpu()
    named = [
        entries.get("model name", ""),
        *(f"{name} {entries[name]}" for name in ("cpu family", "model") if name in entries),
    ]
    return ", ".join(filter(None, named)) or platform.machine()


def write(folder: Path, results: dict) -> None:
    """Write ``results.json``.

    Raises:
      ResultsError: the file cannot be written.
    """
    text = json.dumps(_plain(results), separators=(",", ":")) + "\n"
    write_atomically(folder / RESULTS, lambda path: path.write_text(text))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step.

    Readers see the old file or the new one. A write that fails leaves no part of the
    new one.

    Raises:
      ResultsError: the file cannot be written.
    """
    # a rename replaces the file in one step: a reader sees the old file or the new one,
    # and a write that fails leaves the old one
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.replace(path)
    except OSError as error:
        remedy = "make room, or pass" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "pass"
        raise ResultsError(
            f"{path} cannot be written ({error.strerror or error}): {remedy} another --out."
        ) from None
    finally:
        with suppress(OSError):
            part.unlink()


def read(folder: Path) -> dict:
    """Return the results in a folder.

    Raises:
      ResultsError: the folder has none, or the file holds something else.
    """
    path = folder / RESULTS
    try:
        results = json.loads(path.read_text())
        if not isinstance(results["settings"], dict) or not isinstance(results["runs"], list):
            raise KeyError("settings, runs")
        return results
    except FileNotFoundError:
        raise ResultsError(
            f"there is no {path} to resume: leave out --resume, or pass the --out of the earlier "
            "run."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"{path} is not the result of a comparison ({error}): pass another --out."
        ) from None


def begin(settings: dict, folder: Path, console: Console, resume: bool, **metadata) -> dict:
    """Return the results so far: those to resume, or new ones without runs.

    Earlier results that are not resumed are kept under another name.

    Raises:
      ResultsError: no results exist that could be resumed, or they were made with other
        settings.
    """
    if resume:
        results = read(folder)
        differing = {
            key for key, value in settings.items() if results["settings"].get(key) != value
        }
        if differing:
            changes = ", ".join(
                f"{key} ({results['settings'].get(key)} there, {settings[key]} now)"
                for key in sorted(differing)
            )
            raise ResultsError(
                f"{folder / RESULTS} was made with other settings: {changes}. Pass those, or "
                "another --out."
            )
        return results
    earlier = keep_earlier(folder)
    if earlier is not None:
        console.print(f"Earlier results are kept as {earlier}.")
    return {"settings": settings, **metadata, "machine": machine(), "runs": []}


def keep_earlier(folder: Path) -> Path | None:
    """Rename earlier results, and return their new path.

    Results without runs stay, and so do results that a backup holds already.

    Raises:
      ResultsError: they cannot be renamed.
    """
    path = folder / RESULTS
    if not path.exists() or _without_runs(folder):
        return None
    try:
        number = 1
        while (backup := folder / f"results-{number}.json").exists():
            if backup.read_bytes() == path.read_bytes():
                return backup
            number += 1
        return path.rename(backup)
    except OSError as error:
        raise ResultsError(
            f"the earlier {path} cannot be kept ({error.strerror or error}): pass another --out."
        ) from None


def _without_runs(folder: Path) -> bool:
    """Return whether a folder's results have no runs."""
    try:
        return not read(folder)["runs"]
    except ResultsError:
        # a file of another kind is kept as well
        return False


def table(results: dict) -> Table:
    """Return a table with a row for each variant, batch size and norm.

    The numbers are mean ± standard deviation over the seeds, after the last epoch.
    """
    settings = results["settings"]
    seeds = f"{settings['seeds']} seed{'s, mean ± deviation' if settings['seeds'] > 1 else ''}"
    result = Table(
        title=(
            f"{described(settings)}, {settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}, "
            f"{seeds}"
        ),
        caption=_caption(results),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = _columns(results)
    for name in (*shown_keys(settings, ("variant", "batch", "norm")), *columns, "steps/s"):
        # where 80 columns are too few, names are folded, since a cut number would be
        # wrong
        named = name in ("variant", "norm")
        result.add_column(
            name.replace(" ", "\n"),
            justify="left" if named else "right",
            no_wrap=not named,
            overflow="fold",
        )
    for key, runs in groups(results["runs"]).items():
        # the median, since a slow run says more about the machine than about the norm
        speed = f"{np.median([run['steps_per_second'] for run in runs]):.0f}"
        cells = [_cell(runs, *column) for column in columns.values()]
        result.add_row(
            *shown_keys(settings, map(str, key)),
            *cells,
            speed,
            end_section=key[-1] == settings["norms"][-1],
        )
    return result


# a column's title -> the name in an epoch's results, a format and a factor
COLUMNS = {
    "train loss": ("train_loss", ".3f", 1),
    "test loss": ("test_loss", ".3f", 1),
    "batch stats loss": ("batch_test_loss", ".3f", 1),
    "accuracy %": ("test_accuracy", ".1f", 100),
    "batch stats": ("batch_test_accuracy", ".1f", 100),
}


# titles that a page, which has more room, spells out
IN_FULL = {"train loss": "training loss", "batch stats": "with batch statistics"}


def _columns(results: dict) -> dict[str, tuple]:
    """Return the columns for which a run has numbers.

    The loss with batch statistics is left out where runs have accuracies.
    """
    found = {name for run in results["runs"] for name in run["epochs"][-1]}
    if "test_accuracy" in found:
        found -= {"batch_test_loss"}
    return {title: column for title, column in COLUMNS.items() if column[0] in found}


def _caption(results: dict) -> str:
    """Return the caption that explains the columns."""
    words = (
        [f"losses: {results['loss']}"]
        if results.get("loss", "cross entropy") != "cross entropy"
        else []
    )
    if "batch stats" in _columns(results):
        words.append(
            "accuracy with running statistics, and with those of test batches as large as in "
            "training"
        )
    if results.get("jobs", 1) > 1:
        words.append(f"steps/s of up to {results['jobs']} runs at a time")
    return "; ".join(words)


def summarize(epoch: dict[str, float]) -> str:
    """Return the last epoch of one run, in a line."""
    accuracy = (
        f"test accuracy {epoch['test_accuracy']:.2%}"
        if "test_accuracy" in epoch
        else f"test loss {epoch['test_loss']:.4f}"
    )
    return f"{accuracy}, training loss {epoch['train_loss']:.4f}"


def shown_keys(settings: dict, key: Iterable[str]) -> list[str]:
    """Return those of variant, batch size and norm in which the rows differ.

    The norm is always among them.
    """
    differ = (len(settings["variants"]) > 1, len(settings["batch_sizes"]) > 1, True)
    return [part for part, differs in zip(key, differ, strict=True) if differs]


def described(settings: dict) -> str:
    """Return the task, and the variant and batch size that all runs share."""
    single = [
        f"{word}{values[0]}"
        for word, values in (("", settings["variants"]), ("batch ", settings["batch_sizes"]))
        if len(values) == 1
    ]
    return ", ".join([settings["data"], *single])


def markdown(results: dict) -> str:
    """Return the table in Markdown, without speeds and without what all rows share."""
    settings, columns = results["settings"], _columns(results)
    titles = [
        *shown_keys(settings, ("variant", "batch size", "norm")),
        *(IN_FULL.get(title, title) for title in columns),
    ]
    rows = [
        [
            *shown_keys(settings, map(str, key)),
            *(_cell(runs, *column) for column in columns.values()),
        ]
        for key, runs in groups(results["runs"]).items()
    ]
    return "\n".join(
        "| " + " | ".join(row) + " |" if row else "|" + "---|" * len(titles)
        for row in (titles, [], *rows)
    )


def groups(runs: Iterable[dict]) -> dict[tuple[str, int, str], list[dict]]:
    """Return the runs of all seeds by variant, batch size and norm.

    The groups come in the order in which their first runs were made.
    """
    result: dict[tuple[str, int, str], list[dict]] = {}
    for run in runs:
        result.setdefault((run["variant"], run["batch_size"], run["norm"]), []).append(run)
    return result


def _cell(runs: list[dict], name: str, form: str, factor: float) -> str:
    """Return a number after the last epoch, over the seeds.

    The cell is empty where runs have no such number.
    """
    last = [run["epochs"][-1] for run in runs]
    return _spread([epoch[name] for epoch in last], form, factor) if name in last[0] else ""


def _spread(values: list[float | None], form: str, factor: float = 1) -> str:
    """Return mean ± standard deviation, or the single value, or "diverged"."""
    if any(value is None or not math.isfinite(value) for value in values):
        return "diverged"
    numbers = factor * np.array(values, float)
    mean = format(numbers.mean(), form)
    return f"{mean}±{format(numbers.std(ddof=1), form)}" if len(values) > 1 else mean


def _plain(value):
    """Round every number to six digits, and replace those that are not finite by None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        # JSON has no NaN: null stands for a loss that is not finite
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
