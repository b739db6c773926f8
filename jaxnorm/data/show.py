"""The command ``jaxnorm show``, which prints the statistics in a file as a table or as JSON."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.host.statistics import Moments, Summary
from jaxnorm.data.leaves import label
from jaxnorm.data.normalizer import Normalizer

# Features that are shown of one leaf. A leaf with more shows its ends, and at most this many that
# are not finite.
SHOWN = 20
# Features at each end.
ENDS = 3
COLUMNS = ("count", "mean", "deviation", "min", "max")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, 1 for a file that cannot be shown, 2 for wrong usage.
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
        return _failed(
            "the table needs rich, which is not installed: pip install 'jaxnorm[data]', or give "
            "--json.",
            1,
        )
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
        for number, (feature, values) in enumerate(_rows(summary)):
            if feature and number == 0:
                table.add_row(name)
            table.add_row(Text(f"  {feature}") if feature else name, *map(Text, values))
        table.add_section()
    if not summaries:
        table.add_row("nothing was fitted")
    Console().print(table)


def _rows(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """Yield a label and the numbers of each feature to show, and then of all features together.

    A single feature has no label.
    """
    columns = [np.ravel(leaf) for leaf in _columns(summary)]
    features = columns[0].size
    if features == 1:
        yield "", _numbers(columns, 0)
        return
    broken = ~np.all(np.isfinite(columns), axis=0)
    before = -1
    for feature in _shown(broken):
        if between := feature - before - 1:
            lost = int(broken[before + 1 : feature].sum())
            yield f"… {between} more" + (f", {lost} not finite" if lost else ""), []
        yield label(summary.min.shape, feature), _numbers(columns, feature)
        before = feature
    if features:
        yield "all", _numbers([np.ravel(column) for column in _columns(_pooled(summary))], 0)


def _shown(broken: np.ndarray) -> list[int]:
    """Return the features to show: all up to SHOWN, or both ends and some that are not finite."""
    features = range(len(broken))
    if len(features) <= SHOWN:
        return list(features)
    named = np.flatnonzero(broken)[:SHOWN].tolist()
    return sorted({*features[:ENDS], *features[-ENDS:], *named})


def _pooled(summary: Summary) -> Summary:
    moments = Moments(*(np.ravel(leaf) for leaf in vars(summary.moments).values()))
    # Inf of one feature minus Inf of another is NaN, which the row shows
    with np.errstate(invalid="ignore"):
        return Summary(
            moments.merge(0), summary.min.min(keepdims=True), summary.max.max(keepdims=True)
        )


def _columns(summary: Summary) -> tuple[np.ndarray, ...]:
    moments = summary.moments
    return moments.count, moments.mean, np.sqrt(moments.var), summary.min, summary.max


def _numbers(columns: list[np.ndarray], feature: int) -> list[str]:
    count, *others = (float(column[feature]) for column in columns)
    deviation = others[1]
    return [_count(count), *(_number(value, deviation) for value in others)]


def _count(value: float) -> str:
    # a count of weights may be a fraction
    return str(int(value)) if value.is_integer() else f"{value:.9g}"


def _number(value: float, deviation: float) -> str:
    """Format a number to a thousandth of the deviation or to 6 digits, whichever is more.

    >>> _number(1000000.2134, 2.0), _number(0.123456789, 1.0), _number(float("nan"), 1.0)
    ('1000000.21', '0.123457', 'nan')
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    # 9 digits tell all float32 numbers apart
    digits = 9
    if deviation and math.isfinite(deviation):
        # from the number's first digit down to the third after the deviation's first
        digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(deviation)) + 3
    return f"{value:.{min(max(digits, 6), 17)}g}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _plain(summary: Summary) -> dict:
    arrays = dict(zip(COLUMNS, _columns(summary), strict=True))
    return {"shape": list(summary.min.shape)} | {
        name: _coded(array.tolist()) for name, array in arrays.items()
    }


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
        description=(
            "Prints count, mean, deviation, minimum and maximum of each leaf in a file of "
            "statistics, for its features (of more than 20, the first, the last, and those that "
            "are not finite) and for all of them together."
        ),
    )
    parser.add_argument(
        "stats", type=Path, metavar="STATS", help="what `jaxnorm fit` or Normalizer.save wrote"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print all features, for programs; NaN and Inf are strings",
    )
    return parser
