"""A pass through batches: checks of its arguments, where it resumes, when it saves, and its bar."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from typing import Any

# Time between two savings of a state: a fit that is killed repeats about this much.
SECONDS = 30.0


class Due:
    """A clock that says when to save: ``every`` batches, or :data:`SECONDS` after the last time.

    >>> due = Due(2)
    >>> [due() for _ in range(5)]
    [False, True, False, True, False]
    """

    def __init__(self, every: int):
        self.every, self.batches, self.saved = every, 0, time.monotonic()

    def __call__(self) -> bool:
        self.batches += 1
        late = time.monotonic() - self.saved >= SECONDS
        if late or self.batches % self.every == 0:
            self.saved = time.monotonic()
            return True
        return False


def check(batches: Iterable, where: Callable | None, every: int) -> None:
    """Refuse a bare batch, whose rows or names would be taken for batches, and bare masks."""
    array = hasattr(batches, "shape") and hasattr(batches, "dtype")
    if array or isinstance(batches, Mapping | str | bytes):
        kind = f"array, of shape {tuple(batches.shape)}" if array else type(batches).__name__  # type: ignore[attr-defined]
        raise TypeError(
            f"batches must be an iterable of batches: got one {kind}. Put it in a list."
        )
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches must be an iterable of batches: got {type(batches).__name__}.")
    if where is not None and not callable(where):
        raise TypeError(
            f"where must be a function, from a batch to its masks: got {type(where).__name__}."
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be an integer >= 1: got {every!r}.")


def after(batches: Iterable, seen: int, check_first: Callable[[Any], None]) -> Iterator:
    """Return an iterator over the batches after the first ``seen``.

    ``check_first`` refuses a first batch that is not of the data that were seen.
    """
    # a data set with `skip` passes over batches without reading them
    if seen and hasattr(batches, "skip"):
        return iter(batches.skip(seen))
    rest, passed = iter(batches), 0
    for batch in islice(rest, seen):
        if not passed:
            check_first(batch)
        passed += 1
    if passed < seen:
        raise ValueError(
            f"the state to go on with must be of these batches: it holds {seen}, and there are "
            f"{passed}."
        )
    return rest


@contextmanager
def shown(
    show: bool, total: int | None, done: int, unit: str = "batches"
) -> Iterator[Callable[..., None]]:
    """Yield a function that advances the bar, which is drawn if standard error is a terminal.

    The function takes the number of units that were done, by default 1. For ``unit="bytes"`` the
    bar also shows their speed.
    """
    # elsewhere than on a terminal rich (13.7) writes an empty line
    if not (show and sys.stderr.isatty()):
        yield lambda amount=1: None
        return
    if find_spec("rich") is None:
        raise ModuleNotFoundError(
            "show_progress needs rich, which is not installed: pip install 'jaxnorm[data]'.",
            name="rich",
        )
    from rich import progress
    from rich.console import Console

    counts = (
        (progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn())
        if unit == "bytes"
        else (progress.MofNCompleteColumn(),)
    )
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *counts,
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(unit if unit == "batches" else "fit", total=total, completed=done)
        yield lambda amount=1: bar.advance(task, amount)
