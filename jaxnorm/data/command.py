"""The command line ``jaxnorm fit``: the statistics of a data set in files."""

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from jaxnorm.axes import Axes
from jaxnorm.data import files, progress
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.sources import PIECE, Piece, SourceError, masks, pieces

ENGINES = {"local": None, "dask": "dask", "beam": "apache_beam", "ray": "ray"}  # and the module that each needs
ROUND = 64  # pieces of an engine between two savings of its state
INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Runs the command; its exit status: 0, 1 for files that cannot be read or written, 2 for wrong usage, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    try:
        empty = Normalizer(_axes(options.pattern), **dict(options.size))
        files.known(options.out)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"jaxnorm: {error}", file=sys.stderr)
        return 1 if isinstance(error, ModuleNotFoundError) else 2
    try:
        fitted = _fit(options, empty, shlex.join(["jaxnorm", "fit", *(word for word in arguments if word != "--resume"), "--resume"]))
    except (SourceError, OSError, ValueError, TypeError) as error:
        print(f"jaxnorm: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = options.engine if error.name in (ENGINES[options.engine], options.engine) else "data"
        print(f"jaxnorm: {error.name} is not installed: pip install 'jaxnorm[{extra}]'.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"Written: {options.out}, of {', '.join(_described(fitted))}")
    for leaf, summary in fitted.summaries.items():
        if broken := int((~np.isfinite(summary.moments.var)).sum()):
            print(f"jaxnorm: {broken} features of {leaf or 'the array'} hold NaN or Inf, and have no mean.", file=sys.stderr)
    return 0


def _fit(options: argparse.Namespace, empty: Normalizer, resume_command: str) -> Normalizer:
    found = pieces(options.files, empty.axes, empty.sizes)
    state = _state(options, found)
    if not options.resume:
        state.unlink(missing_ok=True)
    elif not state.exists():
        raise SourceError(
            f"there must be an interrupted fit of these files and patterns to go on with: {state} is not there. Leave --resume out."
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        fitted = _fit_local(found, empty, state) if options.engine == "local" else _fit_in_rounds(options.engine, found, empty, state)
    except KeyboardInterrupt:
        if state.exists():
            done = f"{Normalizer.load(state).batches} of {len(found)} pieces are in {state}"
            print(f"Stopped. {done}. This goes on:\n{resume_command}", file=sys.stderr)
        else:
            print(f"Stopped before the first of {len(found)} pieces was done. Run the same command.", file=sys.stderr)
        raise
    fitted.save(options.out)
    state.unlink(missing_ok=True)
    return fitted


class _Pieces:
    """The batches of pieces; what is resumed skips those that it has seen without reading them."""

    def __init__(self, found: Sequence[Piece]):
        self.found = found

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator:
        return (piece.read() for piece in self.found)

    def skip(self, count: int) -> "_Pieces":
        return _Pieces(self.found[count:])


def _fit_local(found: Sequence[Piece], empty: Normalizer, state: Path) -> Normalizer:
    return empty.extend(_Pieces(found), where=masks, state=state, show_progress=True)


def _fit_in_rounds(engine: str, found: Sequence[Piece], empty: Normalizer, state: Path) -> Normalizer:
    """Fits by an engine, round by round, and saves its state after each."""
    fit_pieces = import_module(f"jaxnorm.data.{engine}").fit_pieces
    fitted = Normalizer.load(state) if state.exists() else empty
    with progress.shown(True, len(found), fitted.batches) as advance:
        while fitted.batches < len(found):
            some = found[fitted.batches : fitted.batches + ROUND]
            fitted = fitted.merge(fit_pieces(some, empty))
            fitted.save(state)
            for _ in some:
                advance()
    return fitted


def _state(options: argparse.Namespace, found: Sequence[Piece]) -> Path:
    """The file of an unfinished fit. Its name depends on the files, so that no other fit is resumed by mistake."""
    sizes = [Path(path).stat().st_size for path in options.files]
    facts = json.dumps([options.files, sizes, options.pattern, options.size, found, PIECE])
    return options.out.with_name(f".{options.out.stem}.{hashlib.sha256(facts.encode()).hexdigest()[:12]}{options.out.suffix}")


def _axes(patterns: Sequence[str]) -> Axes | dict[str, Axes]:
    """One pattern for all leaves, or KEY=PATTERN for each that is fitted."""
    if not patterns:
        return 0
    parts = [pattern.rpartition("=") for pattern in patterns]  # patterns hold no "="
    named: dict[str, Axes] = {key: pattern for key, _, pattern in parts}
    if len(named) < len(patterns) or ("" in named and len(named) > 1):
        raise ValueError(
            f"--pattern must be given once for all leaves, or once for each as KEY=PATTERN: got {', '.join(map(repr, patterns))}."
        )
    return named.get("", named)


def _described(fitted: Normalizer) -> Iterator[str]:
    for leaf, summary in fitted.summaries.items():
        size = summary.moments.mean.size
        features = f"{size} feature" if size == 1 else f"{size} features"
        yield f"{leaf or 'an array'}: {features}, {int(summary.moments.count.max(initial=0))} elements each"


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name.isidentifier() or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"must be NAME=SIZE: got {text!r}.")
    return name, int(size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxnorm fit",
        description="Fits mean, deviation, minimum and maximum of the features of a data set larger than memory, in one pass.",
        epilog="Example: jaxnorm fit data/*.npz --pattern 'image=[n h w] c' --pattern 'state=[n t] f' --out stats.safetensors",
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILES", help=".npy, .npz, .parquet or .zarr, all of the same arrays or columns")
    help_pattern = "reduction axes in [ ]: of all arrays, or KEY=PATTERN, once for each that is fitted; by default the first axis"
    add("--pattern", action="append", default=[], metavar="PATTERN", help=help_pattern)
    add("--size", action="append", default=[], type=_size, metavar="NAME=SIZE", help="the size of a split axis in a pattern")
    add("--engine", default="local", choices=ENGINES, help="local by default")
    add("--out", default=Path("stats.safetensors"), type=Path, metavar="FILE", help=".safetensors or .json; stats.safetensors by default")
    add("--resume", action="store_true", help="go on with an interrupted fit of the same files")
    return parser
