"""The same network trained once per norm, batch size and seed; interrupted, it keeps what it had
finished.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from jaxnorm.experiments import figures, report, samples
from jaxnorm.experiments.runs import OnProgress, carry_out
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import Run, train

KEY = ("variant", "norm", "batch_size", "seed")  # what identifies a run of one comparison


@dataclass(frozen=True)
class Settings:
    """What is compared. The numbers depend on all of it; the order of the lists is that of the
    runs.
    """

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
        """Seed by seed, so that an interrupted comparison has all norms; a variant has the norms
        that it takes.
        """
        known, rest = (
            TASKS[self.data].variants,
            (self.epochs, self.learning_rate, self.momentum, self.optimizer),
        )
        choices = product(range(self.seeds), self.variants, self.batch_sizes, self.norms)
        return [
            Run(norm, size, seed, variant, *rest)
            for seed, variant, size, norm in choices
            if norm in known[variant]
        ]


def compare(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    data_dir: str | None = None,
    resume: bool = False,
    jobs: int = 1,
    resume_command: str = "--resume",
) -> dict:
    """Trains what is not there yet, writing ``results.json`` after every run; shows the table, and
    draws.

    ``jobs`` runs are made at a time: the numbers don't depend on it, the speeds do.
    ``resume_command`` is the command that goes on.

    Raises:
      DataError: the data cannot be had.
      ResultsError: there is nothing to resume, or it was made with other settings, or something
        cannot be written.
      KeyboardInterrupt: after a word on how to go on.
    """
    task = TASKS[settings.data]
    data = (
        task.load(data_dir)
        .first(settings.train_examples)
        .with_batches_of(max(settings.batch_sizes))
    )
    kind = samples.KINDS.get(settings.data)

    def measure(run: Run, on_progress: OnProgress) -> dict:
        def finish(model, variables) -> dict:
            return (
                {"samples": kind.of(model, variables, data, run.seed)}
                if kind and run.seed == 0
                else {}
            )

        return train(
            run,
            task.model(run.norm, run.variant, run.momentum),
            data,
            on_progress,
            task.losses,
            finish,
        )

    def summarize(found: dict) -> str:
        return report.summarize(found["epochs"][-1])

    results = carry_out(
        settings,
        KEY,
        measure,
        summarize,
        out,
        console,
        resume=resume,
        jobs=jobs,
        resume_command=resume_command,
        loss=task.unit,
    )
    console.print(report.table(results))
    figures.plot(out, results)
    samples.plot(out, results, data)
    return results
