"""The command ``jaxnorm show``, which prints the statistics in a file as a table or as JSON."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.fitted import Fitted
from jaxnorm.data.formats import FORMATS
from jaxnorm.data.formula import MISSING, OURS
from jaxnorm.data.host.statistics import Moments, Summary
from jaxnorm.data.leaves import label
from jaxnorm.data.normalizer import OWN, Normalizer

# Features that are shown of one leaf. A leaf with more shows its ends, and at most this many that
# are not finite.
SHOWN = 20
# Columns of text where the output is no terminal.
WIDTH = 120
# Features at each end.
ENDS = 3
# The key of the formula in JSON, which is no name of a leaf.
FORMULA = "(formula)"
# Labels of features and their cells.
Rows = Iterator[tuple[str, list[str]]]
COLUMNS = ("count", "mean", "deviation", "min", "max")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, 1 for a file that cannot be shown, 2 for arguments that are wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        fitted = loaded(options.stats, options.format)
    except CannotLoad as error:
        return _failed(str(error), error.status)
    if options.json:
        print(json.dumps(_plain(fitted), indent=1))
    elif find_spec("rich") is None:
        return _failed(
            "the table needs rich, which is not installed: pip install 'jaxnorm[data]', or give "
            "--json.",
            1,
        )
    else:
        _print_table(options.stats, fitted)
    return 0


class CannotLoad(Exception):  # noqa: N818  # what it says is the message
    """A file of statistics that cannot be loaded, in one sentence, with the exit status."""

    def __init__(self, text: str, status: int = 1):
        super().__init__(text)
        self.status = status


def loaded(path: Path, format: str | None) -> Normalizer:
    """Load statistics of any format, and turn every error into one sentence."""
    try:
        files.check_local(path)
    except ValueError as error:
        raise CannotLoad(str(error), 2) from None
    try:
        if not path.exists():
            raise FileNotFoundError
        return Normalizer.load(path, format=format)
    except FileNotFoundError:
        raise CannotLoad(f"{path} must exist: there is no such file.") from None
    except OSError as error:
        raise CannotLoad(f"{path} cannot be read: {error.strerror or error}.") from None
    except ModuleNotFoundError as error:
        raise CannotLoad(str(error)) from None
    except ValueError as error:
        raise CannotLoad(str(error)) from None


def _print_table(path: Path, fitted: Normalizer) -> None:
    from rich.console import Console

    ranks = fitted._ranks()
    # a file or a pipe has no width, and names must not be cut
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    held = [name for name in COLUMNS if _is_known(fitted, name)] or list(COLUMNS)
    console.print(_table(fitted, held, lambda leaf: _rows(leaf, held)))
    if ranks and fitted._state.leaves:
        heads = tuple(f"{100 * rank:g} %" for rank in ranks)
        console.print(_table(fitted, heads, lambda leaf: _quantile_rows(leaf, ranks)))
    if fitted.formula != OURS:
        console.print(f"standard: {fitted.formula.standard_in_words()}", highlight=False)
        if ranks or _is_known(fitted, "min"):
            console.print(f"range:    {fitted.formula.range_in_words()}", highlight=False)
    if fitted.formula.missing != OURS.missing:
        said = f"leaves without statistics are {MISSING[fitted.formula.missing]}"
        console.print(f"missing:  {said}", highlight=False)
    for note in fitted.notes:
        console.print(f"Note: {note}", highlight=False)


def _table(fitted: Normalizer, heads: Iterable[str], rows: Callable[[Fitted], Rows]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("leaf, feature", overflow="fold")
    for column in heads:
        table.add_column(column, justify="right", no_wrap=True)
    for leaf, statistics in fitted._state.leaves.items():
        name = Text(f"{leaf or 'the array'} ", "bold").append(_shape(statistics.shape), "dim")
        for number, (feature, values) in enumerate(rows(statistics)):
            if feature and number == 0:
                table.add_row(name)
            table.add_row(Text(f"  {feature}") if feature else name, *map(Text, values))
        table.add_section()
    if not fitted._state.leaves:
        table.add_row("nothing was fitted")
    return table


def _is_known(fitted: Normalizer, name: str) -> bool:
    return any(name not in _unknown(leaf) for leaf in fitted._state.leaves.values())


def _rows(fitted: Fitted, held: Sequence[str]) -> Rows:
    """Yield a label and the numbers of each feature to show, and then of all features together.

    A single feature has no label. What is unknown is an empty cell.
    """
    columns = [np.ravel(leaf) for leaf in _columns(fitted.summary)]
    known = {name: name not in _unknown(fitted) for name in COLUMNS}
    finite = [column for name, column in zip(COLUMNS, columns, strict=True) if known[name]]

    def cells(of: list, feature: int) -> list[str]:
        numbers = dict(zip(COLUMNS, _numbers(of, feature), strict=True))
        return [numbers[name] if known[name] else "" for name in held]

    yield from _features(fitted, finite, lambda feature: cells(columns, feature))
    if columns[0].size > 1 and not fitted.unknown:
        yield "all", cells([np.ravel(column) for column in _columns(_pooled(fitted.summary))], 0)


def _quantile_rows(fitted: Fitted, ranks: list[float]) -> Rows:
    columns = [np.ravel(leaf) for leaf in _quantiles(fitted, ranks)]
    deviations = np.ravel(np.sqrt(fitted.summary.moments.var))

    def cells(feature: int) -> list[str]:
        return [_number(float(column[feature]), float(deviations[feature])) for column in columns]

    yield from _features(fitted, columns, cells)


def _features(fitted: Fitted, columns: list, cells: Callable[[int], list[str]]) -> Rows:
    """Yield a label and the cells of each feature to show."""
    size = math.prod(fitted.shape)
    if size == 1:
        yield "", cells(0)
        return
    broken = ~np.all(np.isfinite(columns), axis=0)
    before = -1
    for feature in _shown(broken):
        if between := feature - before - 1:
            lost = int(broken[before + 1 : feature].sum())
            yield f"… {between} more" + (f", {lost} not finite" if lost else ""), []
        alone = fitted.mask is not None and not fitted.mask.ravel()[feature]
        name = label(fitted.shape, feature) + (", left as it is" if alone else "")
        yield name, cells(feature)
        before = feature


def _quantiles(fitted: Fitted, ranks: list[float]) -> list[np.ndarray]:
    """Return the quantiles of the ranks; NaN for those that this leaf does not have."""
    found = []
    for rank in ranks:
        try:
            found.append(fitted.quantile(rank))
        except ValueError:
            found.append(np.full(fitted.shape, np.nan))
    return found


def _unknown(fitted: Fitted) -> set[str]:
    """Return the columns that are not known."""
    return {"deviation" if name == "var" else name for name in fitted.unknown}


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
    if not math.isfinite(value):
        return str(value)
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


def _plain(fitted: Normalizer) -> dict:
    ranks = fitted._ranks()
    plain = {leaf: _plain_leaf(found, ranks) for leaf, found in fitted._state.leaves.items()}
    if fitted.formula != OURS:
        words = fitted.formula.standard_in_words(), fitted.formula.range_in_words()
        plain[FORMULA] = dict(zip(("standard", "range"), words, strict=True))
        if fitted.formula.missing != OURS.missing:
            plain[FORMULA]["missing"] = fitted.formula.missing
    return plain


def _plain_leaf(fitted: Fitted, ranks: list[float]) -> dict:
    arrays = dict(zip(COLUMNS, _columns(fitted.summary), strict=True))
    plain: dict[str, Any] = {"shape": list(fitted.shape)} | {
        name: None if name in _unknown(fitted) else _coded(array.tolist())
        for name, array in arrays.items()
    }
    if ranks:
        pairs = zip(ranks, _quantiles(fitted, ranks), strict=True)
        plain["quantiles"] = {str(rank): _coded(array.tolist()) for rank, array in pairs}
    return plain if fitted.mask is None else plain | {"mask": fitted.mask.tolist()}


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
            "Prints count, mean, deviation, minimum, maximum and quantiles of each leaf in a file "
            "of statistics, of ours or another library, for its features (of more than 20, the "
            "first, the last, and those that are not finite) and for all of them together."
        ),
    )
    parser.add_argument(
        "stats",
        type=Path,
        metavar="STATS",
        help="what `jaxnorm fit` or Normalizer.save wrote, or statistics of another library",
    )
    parser.add_argument(
        "--format",
        choices=[OWN, *FORMATS],
        metavar="NAME",
        help=f"the format, where the file does not tell: {', '.join([OWN, *FORMATS])}",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print all features, for programs; NaN and Inf are strings",
    )
    return parser
