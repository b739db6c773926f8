"""The options of the command ``jaxnorm fit``: the parser, and checks before data are read."""

import argparse
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import files, formats
from jaxnorm.data.fit_files import ENGINES
from jaxnorm.data.formats import WRITABLE, graphcast, makani
from jaxnorm.data.normalizer import OWN
from jaxnorm.data.option_values import (
    key_and,
    key_and_features,
    key_and_steps,
    members,
    name_and_new,
    number_or_name,
    ranks_of,
    size,
)

# Formats that keep differences in a file of its own: their library, the file, and a pattern of it.
OF_DIFFERENCES = {
    "graphcast": ("GraphCast", graphcast.DIFFERENCES, graphcast.ALONE),
    "makani": ("Makani", "time_diff_stds_dt1.npy", makani.DIFFERENCES),
}


class UsageError(ValueError):
    """An error of arguments that do not fit each other, or the files."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    new = argparse.ArgumentParser(
        prog="jaxnorm fit",
        description=(
            "Fits mean, standard deviation, minimum, maximum and quantiles of the features of a "
            "data set larger than memory, in one pass."
        ),
        epilog=(
            "Example: jaxnorm fit data/*.npz --pattern 'image=[n h w] c' --pattern 'state=[n t] f' "
            "--out stats.safetensors. Then: jaxnorm show stats.safetensors"
        ),
    )
    _add_data(new.add_argument)
    _add_statistics(new.add_argument)
    _add_output(new.add_argument)
    return new


def _add_data(add: Callable) -> None:
    """Add the files, and which of their arrays are reduced over which axes."""
    add(
        "files",
        nargs="+",
        metavar="FILES",
        help=(
            ".npy, .npz, .parquet, .zarr, .nc or .h5, or folders of LeRobot or Parquet, all of "
            "the same arrays or columns"
        ),
    )
    help_pattern = (
        "reduction axes in [ ], for all arrays; or KEY=PATTERN for one array: repeat it for each "
        "array to fit; by default the first axis of all arrays"
    )
    add("--pattern", action="append", default=[], metavar="PATTERN", help=help_pattern)
    add(
        "--size",
        action="append",
        default=[],
        type=size,
        metavar="NAME=SIZE",
        help="the size of a split axis in a pattern",
    )
    help_where = (
        "the array MASK_KEY of the same files, boolean or weights, "
        "says which elements of KEY count; its axes are the first of KEY's"
    )
    add(
        "--where",
        action="append",
        default=[],
        type=key_and("MASK_KEY"),
        metavar="KEY=MASK_KEY",
        help=help_where,
    )


def _add_statistics(add: Callable) -> None:
    """Add what is fitted, and of which elements."""
    add(
        "--quantiles",
        type=ranks_of,
        metavar="RANKS",
        help="ranks from 0 to 1 of quantiles to fit as well, such as 0.01,0.99; with "
        "--format also those that its own programs write",
    )
    help_weights = (
        "an array of the same files along one axis, whose values weight what lies along it; "
        "cos(KEY) takes the cosine of degrees: cos(latitude); repeat it for their product"
    )
    add("--weights", action="append", default=[], metavar="KEY", help=help_weights)
    help_diff = (
        "fit the differences from one index to the next along this axis: a dimension of the file, "
        "a name in the pattern or a number"
    )
    add("--diff", type=number_or_name, metavar="AXIS", help=help_diff)
    _add_horizon(add)
    add("--skip-nan", action="store_true", help="leave out elements that are NaN")


def _add_horizon(add: Callable) -> None:
    """Add what makes chunks of actions of rows."""
    help_horizon = (
        "fit each row of KEY with those that follow it in its episode, a chunk of STEPS actions, "
        "along an axis of steps after the first: --pattern 'KEY=[n] step f'"
    )
    help_relative = (
        "subtract the row of the array OTHER, such as the state, at the first step of each chunk"
    )
    help_absolute = "features from which --relative subtracts nothing, such as grippers: 6,-1"
    for option, type_, metavar, help_text in (
        ("--horizon", key_and_steps, "KEY=STEPS", help_horizon),
        ("--relative", key_and("OTHER"), "KEY=OTHER", help_relative),
        ("--absolute", key_and_features, "KEY=FEATURES", help_absolute),
    ):
        add(option, action="append", default=[], type=type_, metavar=metavar, help=help_text)


def _add_output(add: Callable) -> None:
    """Add where it is computed, and the file that is written."""
    help_engine = (
        "where to compute: in this process (local, the default), or with Dask, Beam or Ray"
    )
    add("--engine", default="local", choices=ENGINES, help=help_engine)
    add(
        "--out",
        default=Path("stats.safetensors"),
        type=Path,
        metavar="FILE",
        help="file to write the statistics to, .safetensors or .json; stats.safetensors by default",
    )
    add(
        "--format",
        default=OWN,
        choices=[OWN, *WRITABLE],
        metavar="NAME",
        help=f"format of the file, of another library: {', '.join(WRITABLE)}",
    )
    add(
        "--rename",
        action="append",
        default=[],
        type=name_and_new,
        metavar="OLD=NEW",
        help="the name of a leaf in the file of statistics; repeat it for each leaf",
    )
    add_share(add)
    add("--resume", action="store_true", help="go on with an interrupted fit of the same files")


def add_share(add: Callable) -> None:
    """Add which leaves and features share a deviation."""
    add(
        "--share",
        action="append",
        default=[],
        type=members,
        metavar="NAMES",
        help=(
            "arrays that share one deviation, feature by feature, such as u10,v10; or features, "
            "wind[0],wind[1], or 0,1 of a single array; repeat it for each group"
        ),
    )


def parse_axes(patterns: Sequence[str]) -> Axes | dict[str, Axes]:
    """Parse ``--pattern``: one pattern for all leaves, or KEY=PATTERN for each leaf to fit."""
    if not patterns:
        return 0
    # a key may hold "=", a pattern cannot
    parts = [pattern.rpartition("=") for pattern in patterns]
    named: dict[str, Axes] = {key: pattern for key, _, pattern in parts}
    if len(named) < len(patterns) or ("" in named and len(named) > 1):
        given = ", ".join(map(repr, patterns))
        raise UsageError(
            "--pattern must be given once for all leaves, or once for each as KEY=PATTERN: got "
            f"{given}."
        )
    return named.get("", named)


def by_leaf(name: str, given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an option as a mapping from each leaf to what is given for it."""
    if len(dict(given)) < len(given):
        pairs = ", ".join(f"{key}={value}" for key, value in given)
        raise UsageError(f"--{name} must be given once for each leaf: got {pairs}.")
    return dict(given)


def check_sizes(axes: Axes | dict[str, Axes], sizes: dict[str, int]) -> None:
    """Refuse a ``--size`` that no pattern names."""
    patterns = list(axes.values()) if isinstance(axes, dict) else [axes] if axes else []
    names = {name for pattern in patterns for name in re.findall(r"\w+", str(pattern))}
    if unknown := [f"{name}={size}" for name, size in sizes.items() if name not in names]:
        given = ", ".join(map(repr, patterns)) or "none"
        raise UsageError(
            f"--size must give the size of a name in a --pattern: got {', '.join(unknown)}, "
            f"patterns {given}."
        )


def check_names(options: argparse.Namespace, leaves: Collection[str]) -> None:
    """Refuse names of ``--share`` and ``--rename`` that no leaf has which will be fitted."""
    members = [
        one[0] if isinstance(one, tuple) else one for group in options.share for one in group
    ]
    # a number is a feature of the one array, which has no name
    named = {one: "" if isinstance(one, int) else one for one in [*members, *dict(options.rename)]}
    if unknown := [one for one, name in named.items() if name not in leaves]:
        raise UsageError(
            f"--share and --rename must name arrays that are fitted: got {unknown}, fitted are "
            f"{sorted(leaves)}."
        )


def check_differences(diff: int | str | None, format: str, out: Path) -> None:
    """Refuse files of fields for statistics of differences, and the other way round."""
    if format not in OF_DIFFERENCES:
        return
    title, name, pattern = OF_DIFFERENCES[format]
    if (diff is not None) != bool(re.fullmatch(pattern, out.name)):
        must = "be a file" if diff is not None else "not be a file"
        raise UsageError(
            f"--out must {must} named {name} with --format {format} and "
            f"{'--diff' if diff is not None else 'without --diff'}, as {title} reads statistics "
            f"of differences from it alone: got {str(out)!r}."
        )


def check_out(path: Path, format: str) -> None:
    """Refuse a path that is no file or folder of the format, or that holds something else.

    Raises:
      UsageError: the name is wrong, or something else would be lost.
      OSError: nothing can be written there.
    """
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} must be a folder: it is a file. Name another one.")
    try:
        if format == OWN:
            files.known(path)
            formats.check_replaceable(path)
        else:
            formats.check_target(path, format)
    except (ValueError, FileExistsError, NotADirectoryError) as error:
        raise UsageError(str(error)) from None
