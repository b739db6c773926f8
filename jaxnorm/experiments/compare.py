"""The same network trained once per norm, batch size and seed; interrupted, it keeps what it had finished."""

from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxnorm.experiments import figures, report
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import Run, train

KEY = ("variant", "norm", "batch_size", "seed")  # what tells runs of one comparison apart


@dataclass(frozen=True)
class Settings:
    """What is compared. The numbers depend on all of it; the order of the lists is that of the runs."""

    data: str
    variants: tuple[str, ...]
    norms: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    seeds: int
    epochs: int
    learning_rate: float
    momentum: float
    optimizer: str = "adam"
    train_examples: int | None = None

    def runs(self) -> list[Run]:
        """Seed by seed, so that an interrupted comparison has all norms; a variant has the norms that it takes."""
        known, rest = TASKS[self.data].variants, (self.epochs, self.learning_rate, self.momentum, self.optimizer)
        choices = product(range(self.seeds), self.variants, self.batch_sizes, self.norms)
        return [Run(norm, size, seed, variant, *rest) for seed, variant, size, norm in choices if norm in known[variant]]


def compare(settings: Settings, out: Path, console: Console, *, data_dir: str | None = None, resume: bool = False) -> dict:
    """Trains what is not there yet, writing ``results.json`` after every run and the curves at the end.

    Raises:
      DataError: the data cannot be had.
      ResultsError: there is nothing to resume, or it was made with other settings.
      KeyboardInterrupt: after a word on how to go on.
    """
    task = TASKS[settings.data]
    data = task.load(data_dir).first(settings.train_examples).with_batches_of(max(settings.batch_sizes))
    results = report.begin(_as_json(settings), out, console, resume, loss=task.unit)
    finished = {tuple(run[name] for name in KEY) for run in results["runs"]}
    todo = [run for run in settings.runs() if run.key not in finished]
    report.write(out, results)
    try:
        with progress_on(console) as progress:
            overall = progress.add_task("all runs", total=len(finished) + len(todo), completed=len(finished))
            for run in todo:
                name = f"{run.variant}, {run.norm}, batch {run.batch_size}, seed {run.seed}"
                shown = progress.add_task(name, total=None)
                model = task.model(run.norm, run.variant, run.momentum)
                found = train(run, model, data, partial(_show, progress, shown), task.losses)
                results["runs"].append(dict(zip(KEY, run.key, strict=True)) | found)
                report.write(out, results)
                progress.remove_task(shown)
                progress.advance(overall)
                if not console.is_terminal:
                    console.print(f"{name}: {report.told(found['epochs'][-1])}")
    except KeyboardInterrupt:
        console.print(f"Stopped. {len(results['runs'])} of {len(settings.runs())} runs are in {out / report.RESULTS}; --resume goes on.")
        raise
    figures.plot(out, results)
    return results


def _show(progress: Progress, task: TaskID, step: int, steps: int) -> None:
    progress.update(task, completed=step, total=steps)


def _as_json(settings: Settings) -> dict:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}


def progress_on(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
