"""Print what belongs to what."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxnorm.arguments.text import in_columns
from jaxnorm.interop.layers import Shape

COLUMNS = ("model", "shape", "layer", "file", "shape", "change", "found by")


@dataclass(frozen=True)
class Entry:
    """One line: leaves of the model, and the arrays of the file that they come from."""

    ours: tuple[str, ...]
    our_shapes: tuple[Shape, ...]
    layer: str
    theirs: tuple[str, ...]
    their_shapes: tuple[Shape, ...]
    said: str
    by: str


def table(
    entries: Sequence[Entry],
    missing: Sequence[str],
    unused: Sequence[str],
    problems: Sequence[str],
    notes: Sequence[str],
) -> str:
    """Return the table of a matching as text, without spaces at the ends of lines."""
    rows = [COLUMNS] + [
        (
            _names(entry.ours),
            _shapes(entry.our_shapes),
            entry.layer,
            _names(entry.theirs),
            _shapes(entry.their_shapes),
            entry.said,
            entry.by,
        )
        for entry in entries
    ]
    lines = in_columns(rows) if entries else []
    for title, items in (
        ("without a value", missing),
        ("not used", unused),
        ("problem", problems),
        ("note", notes),
    ):
        lines += [f"{title}: {item}" for item in items]
    return "\n".join(lines)


def _names(names: Sequence[str]) -> str:
    """Join names, of which many are shown by the first and the last.

    >>> _names(["bn.mean.average", "bn.mean.hidden"])
    'bn.mean.average, hidden'
    """
    if len(names) > 3:
        return f"{names[0]} ... {names[-1]}"
    starts = {name[: -len(_last(name))] for name in names}
    short = [*names[:1], *map(_last, names[1:])] if len(starts) == 1 else names
    return ", ".join(short)


def _last(name: str) -> str:
    return re.split(r"[/.]", name)[-1]


def _shapes(shapes: Sequence[Shape]) -> str:
    different = list(dict.fromkeys(shapes))
    return ", ".join(str(shape).replace(" ", "") for shape in different[:2])
