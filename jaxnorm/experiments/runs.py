"""Runs made one after the other and kept as they finish: interrupted, they go on where they were."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxnorm.experiments import report

OnProgress = Callable[[int, int], None]  # takes the step and the number of steps
SAID = {"batch_size": "batch ", "seed": "seed "}  # before a value that does not speak for itself


def carry_out(
    settings: Any,
    key: Iterable[str],
    measure: Callable[[Any, OnProgress], dict],
    told: Callable[[dict], str],
    out: Path,
    console: Console,
    *,
    resume: bool,
    **facts,
) -> dict:
    """Measures the runs of ``settings`` that are not in ``results.json`` yet, and writes it after each.

    ``settings`` is a dataclass with ``runs()``, which gives objects that differ in the attributes ``key``; ``told`` says
    in a line what was found; ``facts`` stand in the results beside the settings.

    Raises:
      ResultsError: there is nothing to resume, or it was made with other settings.
      KeyboardInterrupt: after a word on how to go on.
    """
    results = report.begin(_as_json(settings), out, console, resume, **facts)
    identify = lambda run: {name: getattr(run, name) for name in key}  # noqa: E731
    finished = [{name: run[name] for name in key} for run in results["runs"]]
    todo = [run for run in settings.runs() if identify(run) not in finished]
    report.write(out, results)
    try:
        with _progress_on(console) as progress:
            overall = progress.add_task("all runs", total=len(finished) + len(todo), completed=len(finished))
            for run in todo:
                name = ", ".join(f"{SAID.get(word, '')}{value}" for word, value in identify(run).items())
                shown = progress.add_task(name, total=None)
                found = measure(run, partial(_show, progress, shown))
                results["runs"].append(identify(run) | found)
                report.write(out, results)
                progress.remove_task(shown)
                progress.advance(overall)
                if not console.is_terminal:
                    console.print(f"{name}: {told(found)}")
    except KeyboardInterrupt:
        console.print(f"Stopped. {len(results['runs'])} of {len(settings.runs())} runs are in {out / report.RESULTS}; --resume goes on.")
        raise
    return report.read(out)


def _as_json(settings: Any) -> dict:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}


def _show(progress: Progress, task: TaskID, step: int, steps: int) -> None:
    progress.update(task, completed=step, total=steps)


def _progress_on(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
