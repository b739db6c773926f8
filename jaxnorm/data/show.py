"""The command line ``jaxnorm show``: the statistics in a file, as a table or as JSON."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.host.statistics import Moments, Summary

SHOWN = 6  # features of a leaf, or the first and the last half of them
COLUMNS = ("count", "mean", "deviation", "min", "max")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status.

    That is 0, 1 for a file that cannot be shown, 2 for wrong usage.
    """
    options = _parser().parse_args(arguments)
    try:
        files.known(options.stats)
    except ValueError as error:
        return _failed(str(error), 2)
    except ModuleNotFoundError as error:
        return _failed(str(error), 1)
    try:
        summaries = Normalizer.load(options.stats).summaries
    except FileNotFoundError:
        return _failed(f"{options.stats} must exist: there is no such file.", 1)
    except OSError as error:
        return _failed(f"{options.stats} cannot be read: {error.strerror}.", 1)
    except ValueError as error:
        return _failed(str(error), 1)
    if options.json:
        print(json.dumps({leaf: _plain(summary) for leaf, summary in summaries.items()}, indent=1))
    elif find_spec("rich") is None:
        return _failed("the table needs rich, which is not installed: pip install 'jaxnorm[data]', or give --json.", 1)
    else:
        _print_table(options.stats, dict(summaries))
    return 0


def _print_table(path: Path, summaries: dict[str, Summary]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("leaf, feature", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for leaf, summary in summaries.items():
        name = Text(f"{leaf or 'the array'} ", "bold").append(_shape(summary.min.shape), "dim")
        for number, (label, values) in enumerate(_rows(summary)):
            if label and number == 0:
                table.add_row(name)
            table.add_row(Text(f"  {label}") if label else name, *map(Text, values))
        table.add_section()
    if not summaries:
        table.add_row("nothing was fitted")
    Console().print(table)


def _rows(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """Yield a label and the numbers of features: the first, the last, and all together.

    One feature has no label.
    """
    shape = [size for size in summary.min.shape if size > 1]
    columns = [np.ravel(leaf) for leaf in _columns(summary)]
    features = columns[0].size
    if features == 1:
        yield "", [_number(column[0]) for column in columns]
        return
    half = SHOWN // 2
    shown = range(features) if features <= SHOWN else [*range(half), *range(features - half, features)]
    for at, feature in enumerate(shown):
        if features > SHOWN and at == half:
            yield f"… {features - SHOWN} more", []
        label = ",".join(map(str, np.unravel_index(feature, shape)))
        yield label, [_number(column[feature]) for column in columns]
    if features:
        yield "all", [_number(np.ravel(column)[0]) for column in _columns(_together(summary))]


def _together(summary: Summary) -> Summary:
    moments = Moments(*(np.ravel(leaf) for leaf in vars(summary.moments).values()))
    with np.errstate(invalid="ignore"):
        return Summary(moments.merge(0), summary.min.min(keepdims=True), summary.max.max(keepdims=True))


def _columns(summary: Summary) -> tuple[np.ndarray, ...]:
    moments = summary.moments
    return moments.count, moments.mean, np.sqrt(moments.var), summary.min, summary.max


def _number(value: float) -> str:
    """
    >>> _number(1234567.0), _number(0.123456789), _number(float("nan"))
    ('1234567', '0.123457', 'nan')
    """
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e9
    return str(int(value)) if whole else f"{value:.6g}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _plain(summary: Summary) -> dict:
    arrays = dict(zip(COLUMNS, _columns(summary), strict=True))
    return {"shape": list(summary.min.shape)} | {name: _coded(array.tolist()) for name, array in arrays.items()}


def _coded(values):
    if isinstance(values, list):
        return list(map(_coded, values))
    return values if math.isfinite(values) else str(values)


def _failed(text: str, status: int) -> int:
    print(f"jaxnorm: {text}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxnorm show",
        description="Prints count, mean, deviation, minimum and maximum of each leaf in a file of statistics, for the first and last "
        "of its features and for all of them together.",
    )
    parser.add_argument("stats", type=Path, metavar="STATS", help="what `jaxnorm fit` or Normalizer.save wrote")
    parser.add_argument("--json", action="store_true", help="print all features, for programs; NaN and Inf are strings")
    return parser
