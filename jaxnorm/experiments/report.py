"""What is shown and written: results.json, the table, the learning curves."""

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
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


def _processor() -> str:
    """Its name and generation, where Linux tells them: a cloud gives one name to several."""
    facts = cpu()
    named = [
        facts.get("model name", ""),
        *(f"{name} {facts[name]}" for name in ("cpu family", "model") if name in facts),
    ]
    return ", ".join(filter(None, named)) or platform.machine()


def write(folder: Path, results: dict) -> None:
    """Writes ``results.json``.

    Raises:
      ResultsError: it cannot be written.
    """
    text = json.dumps(_plain(results), separators=(",", ":")) + "\n"
    put(folder / RESULTS, lambda path: path.write_text(text))


def put(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file at once: a reader sees the old one or the new one, and nothing is left of one
    that fails.

    Raises:
      ResultsError: it cannot be written.
    """
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
        raise ResultsError(
            f"there is no {path} to resume: leave out --resume, or pass the --out of the earlier "
            "run."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"{path} is not the result of a comparison ({error}): pass another --out."
        ) from None


def begin(settings: dict, folder: Path, console: Console, resume: bool, **facts) -> dict:
    """The results so far, none for a new comparison; earlier ones of other settings are kept
    beside.

    Raises:
      ResultsError: there is nothing to resume, or it was made with other settings.
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
    return {"settings": settings, **facts, "machine": machine(), "runs": []}


def keep_earlier(folder: Path) -> Path | None:
    """Moves earlier results out of the way, unless they have no runs or are kept already; returns
    where they are now.

    Raises:
      ResultsError: they cannot be moved.
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
    try:
        return not read(folder)["runs"]
    except ResultsError:  # something else, which is kept
        return False


def table(results: dict) -> Table:
    """One row per variant, batch size and norm: mean ± standard deviation over the seeds, after the
    last epoch.
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
        # where 80 columns don't do, names are folded, numbers whole
        named = name in ("variant", "norm")
        result.add_column(
            name.replace(" ", "\n"),
            justify="left" if named else "right",
            no_wrap=not named,
            overflow="fold",
        )
    for key, runs in groups(results["runs"]).items():
        speed = f"{np.median([run['steps_per_second'] for run in runs]):.0f}"
        cells = [_cell(runs, *column) for column in columns.values()]
        result.add_row(
            *shown_keys(settings, map(str, key)),
            *cells,
            speed,
            end_section=key[-1] == settings["norms"][-1],
        )
    return result


# title -> name in an epoch's results, format, factor
COLUMNS = {
    "train loss": ("train_loss", ".3f", 1),
    "test loss": ("test_loss", ".3f", 1),
    "batch stats loss": ("batch_test_loss", ".3f", 1),
    "accuracy %": ("test_accuracy", ".1f", 100),
    "batch stats": ("batch_test_accuracy", ".1f", 100),
}


IN_FULL = {"train loss": "training loss", "batch stats": "with batch statistics"}


def _columns(results: dict) -> dict[str, tuple]:
    """Those that any run has; the loss with batch statistics only where there is no accuracy."""
    found = {name for run in results["runs"] for name in run["epochs"][-1]}
    if "test_accuracy" in found:
        found -= {"batch_test_loss"}
    return {title: column for title, column in COLUMNS.items() if column[0] in found}


def _caption(results: dict) -> str:
    """What the columns are."""
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
    """One run in a line."""
    accuracy = (
        f"test accuracy {epoch['test_accuracy']:.2%}"
        if "test_accuracy" in epoch
        else f"test loss {epoch['test_loss']:.4f}"
    )
    return f"{accuracy}, training loss {epoch['train_loss']:.4f}"


def shown_keys(settings: dict, key: Iterable[str]) -> list[str]:
    """Of variant, batch size and norm what rows differ in; the norm always."""
    differ = (len(settings["variants"]) > 1, len(settings["batch_sizes"]) > 1, True)
    return [part for part, differs in zip(key, differ, strict=True) if differs]


def described(settings: dict) -> str:
    """The task, and what all runs share of it."""
    single = [
        f"{word}{values[0]}"
        for word, values in (("", settings["variants"]), ("batch ", settings["batch_sizes"]))
        if len(values) == 1
    ]
    return ", ".join([settings["data"], *single])


def markdown(results: dict) -> str:
    """The same rows for a page, without the speeds and without what all rows share."""
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
    """The runs of all seeds by variant, batch size and norm, in the order they were made in."""
    result: dict[tuple[str, int, str], list[dict]] = {}
    for run in runs:
        result.setdefault((run["variant"], run["batch_size"], run["norm"]), []).append(run)
    return result


def _cell(runs: list[dict], name: str, form: str, factor: float) -> str:
    """Over the seeds, after the last epoch; empty where a norm has no such number."""
    last = [run["epochs"][-1] for run in runs]
    return _spread([epoch[name] for epoch in last], form, factor) if name in last[0] else ""


def _spread(values: list[float | None], form: str, factor: float = 1) -> str:
    if any(value is None or not math.isfinite(value) for value in values):
        return "diverged"
    numbers = factor * np.array(values, float)
    mean = format(numbers.mean(), form)
    return f"{mean}±{format(numbers.std(ddof=1), form)}" if len(values) > 1 else mean


def _plain(value):
    """Six digits of every number; JSON has no NaN, so that null stands for a loss that is not
    finite.
    """
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
