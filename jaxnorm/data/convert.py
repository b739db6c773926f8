"""The command ``jaxnorm convert``, which writes statistics in the format of another library."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxnorm.data.fitted import Fitted
from jaxnorm.data.formats import FORMATS, WRITABLE
from jaxnorm.data.normalizer import OWN, Normalizer
from jaxnorm.data.option_values import name_and_new
from jaxnorm.data.options import UsageError, add_share, check_names, check_out
from jaxnorm.data.show import CannotLoad, loaded

# Float64 keeps a number to the first, and float32 to the second of it, or to the smallest number.
DOUBLE, SINGLE, TINY = 1e-12, 1e-6, float(np.finfo(np.float32).tiny)


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, 1 for a file that cannot be read or written, or whose statistics
    the format cannot say, 2 for arguments that are wrong or do not fit the files.
    """
    options = _parser().parse_args(arguments)
    try:
        fitted = loaded(options.source, options.source_format)
        check_names(options, fitted.summaries)
        check_out(options.target, options.target_format)
        fitted = fitted.share_deviation(*options.share).rename(dict(options.rename))
        fitted.save(options.target, options.target_format)
        written = Normalizer.load(options.target, options.target_format)
    except CannotLoad as error:
        return _failed(str(error), error.status)
    except UsageError as error:
        return _failed(str(error), 2)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        return _failed(str(error), 1)
    leaves = ", ".join(
        f"{leaf or 'an array'} {found.shape}" for leaf, found in written._state.leaves.items()
    )
    print(f"Written: {options.target}, in the format {options.target_format}, of {leaves}")
    for note in (*fitted.notes, *notes_on(fitted, written)):
        print(f"Note: {note}")
    return 0


def notes_on(before: Normalizer, after: Normalizer) -> list[str]:
    """Return what a file of statistics does not hold, and how its readers normalize."""
    return [*_lost(before, after), *_formulas(before, after)]


def _lost(before: Normalizer, after: Normalizer) -> list[str]:
    """Return what the new file does not hold."""
    lost: list[str] = []
    for leaf, old in before._state.leaves.items():
        new = after._state.leaves.get(leaf)
        if new is None and list(after._state.leaves) == [""]:
            # scikit-learn and Makani keep one array, which has no name
            new = after._state.leaves[""]
            lost.append(f"the file does not hold the name {leaf!r}.")
        if new is None:
            lost.append(f"the file does not hold {leaf!r}.")
            continue
        missing = sorted(new.unknown - old.unknown)
        if new.sketch is None:
            missing += [f"the quantile {rank}" for rank in before._ranks() if rank not in new.given]
        missing += ["the mask"] if old.mask is not None and new.mask is None else []
        if missing:
            lost.append(f"the file does not hold {', '.join(missing)} of {leaf or 'the array'}.")
        lost += _rounded(leaf or "the array", old, new)
    return lost


def _rounded(leaf: str, before: Fitted, after: Fitted) -> Iterator[str]:
    """Yield what the new file holds of a leaf with fewer digits, or differently."""
    for field, name in (("mean", "mean"), ("var", "variance")):
        if field in before.unknown | after.unknown:
            continue
        old, new = (getattr(one.summary.moments, field).ravel() for one in (before, after))
        away, size = abs(new - old), abs(old)
        if np.any(away > SINGLE * size + TINY):
            away_by = f"it differs by up to {np.max(away):.1g}"
            yield f"the file has another {name} of {leaf}: {away_by}."
        elif np.any(lost := away > DOUBLE * size):
            most = np.max(away[lost] / np.maximum(size[lost], TINY))
            yield f"the file keeps float32: the {name} of {leaf} is off by up to {most:.0e} of it."


def _formulas(before: Normalizer, after: Normalizer) -> list[str]:
    if before.formula == after.formula:
        return []
    old, new = before.formula.standard_in_words(), after.formula.standard_in_words()
    return [f"readers of this file compute {new}, not {old}."] * (old != new)


def _failed(text: str, status: int) -> int:
    print(f"jaxnorm: {text}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    readable, writable = [OWN, *FORMATS], [OWN, *WRITABLE]
    parser = argparse.ArgumentParser(
        prog="jaxnorm convert",
        description="Writes a file of statistics in the format of another library.",
        epilog="Example: jaxnorm convert stats.safetensors norm_stats.json --to openpi",
    )
    parser.add_argument("source", type=Path, metavar="FILE", help="statistics of any format")
    parser.add_argument("target", type=Path, metavar="NEW", help="the file to write")
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=readable,
        metavar="NAME",
        help=f"the format of FILE, where it does not tell: {', '.join(readable)}",
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=name_and_new,
        metavar="OLD=NEW",
        help="the name of a leaf in NEW; repeat it for each leaf",
    )
    add_share(parser.add_argument)
    parser.add_argument(
        "--to",
        dest="target_format",
        default=OWN,
        choices=writable,
        metavar="NAME",
        help=f"the format of NEW, {OWN} by default: {', '.join(writable)}",
    )
    return parser
