"""A bar that shows how far a pass through the batches is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown(show: bool, total: int | None, done: int) -> Iterator[Callable[[], None]]:
    """What is called after each batch. The bar is drawn where standard error is a terminal."""
    if not (show and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("batches", total=total, completed=done)
        yield lambda: bar.advance(task)
