"""Train the same network once per norm, variant, batch size and seed.

Every finished run is written at once, so that an interrupted comparison loses none.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from jaxnorm.experiments import figures, report, samples
from jaxnorm.experiments.runs import OnProgress, carry_out
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import Run, train

# the attributes that identify a run of one comparison
KEY = ("variant", "norm", "batch_size", "seed")


@dataclass(frozen=True)
class Settings:
    """The settings of a comparison.

    The numbers depend on all of them. The order of variants, batch sizes and norms is
    the order of the runs.
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
        """Return the runs, seed by seed.

        After an interrupt the finished seeds thus cover all norms. Each variant runs
        with the norms that it takes.
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
    """Make the runs that are missing, print a table of all of them, and draw pictures.

    ``results.json`` is written after every run. ``jobs`` is the number of runs at a
    time. It changes the speeds alone. ``resume_command`` is printed after an interrupt,
    as the command that continues.

    Raises:
      DataError: the data are not available.
      ResultsError: no results exist that could be resumed, they were made with other
        settings, or a file cannot be written.
      KeyboardInterrupt: the comparison was interrupted; the command that continues it
        has been printed.
    """
    task = TASKS[settings.data]
    data = (
        task.load(data_dir)
        .first(settings.train_examples)
        .with_batches_of(max(settings.batch_sizes))
    )
    # None for tasks whose networks classify, which have nothing to sample
    kind = samples.KINDS.get(settings.data)

    def measure(run: Run, on_progress: OnProgress) -> dict:
        def finish(model, variables) -> dict:
            return (
                {"samples": kind.sample(model, variables, data, run.seed)}
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
