"""Runs made some at a time and kept as they finish: interrupted, they go on where they were."""

import shlex
import shutil
import signal
import sys
from bisect import insort
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxnorm.experiments import report

OnProgress = Callable[[int, int], None]  # takes the step and the number of steps
SAID = {"batch_size": "batch ", "seed": "seed "}  # before a value that does not speak for itself


def carry_out(
    settings: Any,
    key: Iterable[str],
    measure: Callable[[Any, OnProgress], dict],
    summarize: Callable[[dict], str],
    out: Path,
    console: Console,
    *,
    resume: bool,
    jobs: int = 1,
    resume_command: str = "--resume",
    **facts,
) -> dict:
    """Measures the runs of ``settings`` that are not in ``results.json`` yet, ``jobs`` at a time,
    and writes it after each.

    ``settings`` is a dataclass with ``runs()``, which gives objects that differ in the attributes
    ``key`` and the order of the results; ``summarize`` puts in a line what was found;
    ``resume_command`` is the command that goes on; ``facts`` stand in the results beside the
    settings.

    Raises:
      ResultsError: there is nothing to resume, or it was made with other settings.
      KeyboardInterrupt: after a word on how to go on.
    """
    results = report.begin(_as_json(settings), out, console, resume, **facts)
    identify = lambda run: {name: getattr(run, name) for name in key}
    runs = {_named(identify(run)): run for run in settings.runs()}
    places = {name: place for place, name in enumerate(runs)}
    place = lambda found: places[_named({name: found[name] for name in key})]
    finished = {place(found) for found in results["runs"]}
    todo = {name: run for name, run in runs.items() if places[name] not in finished}
    if todo:
        results["jobs"] = max(jobs, results.get("jobs", 1))  # of which its speeds are
    report.write(out, results)
    try:
        with (
            _interrupts() as stop,
            _progress_on(console) as progress,
            closing(_measured(todo, measure, progress, jobs, stop)) as measured,
        ):
            overall = progress.add_task("all runs", total=len(runs), completed=len(finished))
            for name, found in measured:
                insort(results["runs"], identify(todo[name]) | found, key=place)
                report.write(out, results)
                progress.advance(overall)
                if not console.is_terminal:
                    console.print(f"{name}: {summarize(found)}")
    except KeyboardInterrupt:
        stopped = (
            f"Stopped. {len(results['runs'])} of {len(runs)} runs are in {out / report.RESULTS}. "
            "This goes on:"
        )
        # to be copied
        console.print(f"{stopped}\n{resume_command}", soft_wrap=True, markup=False, highlight=False)
        raise
    return report.read(out)


@contextmanager
def _interrupts() -> Iterator[Event]:
    """An event that interrupts set before they are raised.

    What is raised within a callback of Python's garbage collector (JAX has one) is shown and
    dropped; the event stays set.
    """
    stop = Event()

    def interrupted(number, frame):
        stop.set()
        usual[number](number, frame)

    here = current_thread() is main_thread()  # the others get no signals
    usual: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if here
    }
    # which raises KeyboardInterrupt
    usual = {number: handler for number, handler in usual.items() if callable(handler)}
    for number in usual:
        signal.signal(number, interrupted)
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _measured(
    todo: Mapping[str, Any], measure: Callable, progress: Progress, jobs: int, stop: Event
) -> Generator[tuple[str, dict]]:
    """Names and what was found, as the runs finish; where one fails, or nobody waits any more, the
    others stop, too.
    """

    def carry(name: str) -> tuple[str, dict]:
        shown = progress.add_task(name, total=None)

        def on_progress(step: int, steps: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            progress.update(shown, completed=step, total=steps)

        found = measure(todo[name], on_progress)
        progress.remove_task(shown)
        return name, found

    # in this thread, whose JAX settings then hold, and which an interrupt reaches at once
    if jobs == 1:
        yield from map(carry, todo)
        return
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(carry, name) for name in todo]):
            yield future.result()
    finally:
        stop.set()
        # the others end at their next step, which may have to be compiled
        pool.shutdown(wait=False, cancel_futures=True)


def to_resume(arguments: Sequence[str] | None = None) -> str:
    """The command line that goes on with what this one did: ``jaxnorm`` with the arguments, or that
    of the process.
    """
    if arguments is None:
        script = [
            Path(sys.argv[0]).name
            if shutil.which(Path(sys.argv[0]).name) == sys.argv[0]
            else sys.argv[0],
            *sys.argv[1:],
        ]
        words = sys.orig_argv if Path(sys.argv[0]).name == "__main__.py" else script
    else:
        words = ["jaxnorm", *arguments]
    return shlex.join([*(word for word in words if word != "--resume"), "--resume"])


def _named(identity: dict) -> str:
    return ", ".join(f"{SAID.get(word, '')}{value}" for word, value in identity.items())


def _as_json(settings: Any) -> dict:
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(settings).items()
    }


def _progress_on(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    quiet = Console(quiet=True)  # before rich 14.3 what is disabled ends with an empty line
    return Progress(
        *columns, console=console if console.is_terminal else quiet, disable=not console.is_terminal
    )
