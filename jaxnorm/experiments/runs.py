"""Make runs, several at a time, and keep each as it finishes.

After an interrupt they can be resumed.
"""

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

# a function of the step and the number of steps
OnProgress = Callable[[int, int], None]
# stand before values that do not speak for themselves
PREFIXES = {"batch_size": "batch ", "seed": "seed "}


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
    **metadata,
) -> dict:
    """Make the runs of ``settings`` that ``results.json`` lacks, and return the results.

    The file is written after each run.

    Args:
      settings: a dataclass with a method ``runs()``, which returns the runs in the
        order of the results.
      key: the attributes by which the runs differ.
      measure: makes a run, and returns what it found; it takes the run and a function
        to call at every step.
      summarize: returns a line about what a run found.
      out: the folder of ``results.json``.
      console: where progress is shown.
      resume: whether the folder has results to continue.
      jobs: the number of runs at a time.
      resume_command: printed after an interrupt, as the command that continues.
      **metadata: stored in the results next to the settings.

    Raises:
      ResultsError: no results exist that could be resumed, or they were made with other
        settings.
      KeyboardInterrupt: the runs were interrupted; the command that continues them has
        been printed.
    """
    results = report.begin(_as_json(settings), out, console, resume, **metadata)
    identify = lambda run: {name: getattr(run, name) for name in key}
    runs = {_named(identify(run)): run for run in settings.runs()}
    places = {name: place for place, name in enumerate(runs)}
    place = lambda found: places[_named({name: found[name] for name in key})]
    finished = {place(found) for found in results["runs"]}
    todo = {name: run for name, run in runs.items() if places[name] not in finished}
    if todo:
        # speeds depend on the number of runs at a time: the table names the largest
        results["jobs"] = max(jobs, results.get("jobs", 1))
    report.write(out, results)
    try:
        with (
            _interrupts() as stop,
            _progress_on(console) as progress,
            closing(_measured(todo, measure, progress, jobs, stop)) as measured,
        ):
            overall = progress.add_task("all runs", total=len(runs), completed=len(finished))
            for name, found in measured:
                # several runs at a time end in any order: the results keep that of the
                # settings
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
        # soft_wrap: a terminal would copy the line breaks of a wrapped command
        console.print(f"{stopped}\n{resume_command}", soft_wrap=True, markup=False, highlight=False)
        raise
    return report.read(out)


@contextmanager
def _interrupts() -> Iterator[Event]:
    """Yield an event that an interrupt sets before it is raised.

    The event stays set where Python drops what was raised.
    """
    stop = Event()

    def interrupted(number, frame):
        # first the event: Python drops an error raised within a callback of its garbage
        # collector (JAX has one), and the event stays
        stop.set()
        usual[number](number, frame)

    # Python handles signals in the main thread alone
    here = current_thread() is main_thread()
    usual: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if here
    }
    # a handler that is no function ignores the signal or ends the process: leave it
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
    """Yield the name and the findings of each run as it finishes.

    Where a run fails, or the caller stops, the other runs stop too.
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

    # In the caller's thread JAX's settings hold, which belong to a thread, and an
    # interrupt comes at once.
    if jobs == 1:
        yield from map(carry, todo)
        return
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(carry, name) for name in todo]):
            yield future.result()
    finally:
        stop.set()
        # The other runs end at their next step. It may have to be compiled first: do
        # not wait.
        pool.shutdown(wait=False, cancel_futures=True)


def to_resume(arguments: Sequence[str] | None = None) -> str:
    """Return the command line that resumes this one.

    It is ``jaxnorm`` with the arguments, or for None the command line of the process.
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
    """Return the name of a run, of the values that identify it."""
    return ", ".join(f"{PREFIXES.get(word, '')}{value}" for word, value in identity.items())


def _as_json(settings: Any) -> dict:
    """Return the settings as JSON has them, with lists for tuples."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(settings).items()
    }


def _progress_on(console: Console) -> Progress:
    """Return a display of progress, which is disabled where the console is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # before rich 14.3 a disabled display ends with an empty line, if its console is not
    # quiet
    quiet = Console(quiet=True)
    return Progress(
        *columns, console=console if console.is_terminal else quiet, disable=not console.is_terminal
    )
