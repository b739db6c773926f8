"""Lay out tables of plain text, for what prints itself."""

from collections.abc import Iterable, Sequence


def in_columns(lines: Iterable[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return lines of cells with each column as wide as its longest cell, two spaces apart.

    Args:
      lines: the cells of each line, of which all have as many.
      right: whether all columns but the first end at the right.

    >>> in_columns([("norm", "mean"), ("layer", "0")])
    ['norm   mean', 'layer  0']
    >>> in_columns([("norm", "mean"), ("layer", "0")], right=True)
    ['norm   mean', 'layer     0']
    """
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    later = str.rjust if right else str.ljust
    return [
        "  ".join([row[0].ljust(widths[0]), *map(later, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
