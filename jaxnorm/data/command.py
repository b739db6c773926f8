"""The command ``jaxnorm fit``, which fits statistics to a data set in files."""

import argparse
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import files, masking, progress, sources
from jaxnorm.data.leaves import label
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.options import (
    ENGINES,
    UsageError,
    check_out,
    empty_normalizer,
    parse_axes,
    parse_where,
    parser,
)
from jaxnorm.data.sources import PatternError, SourceError
from jaxnorm.data.unfinished import Unfinished

# Pieces of an engine's first round. Later rounds take about progress.SECONDS.
ROUND = 16
# Most pieces between two savings of the state, which progress.SECONDS may cause earlier.
EVERY = 100
# Most features that a message names.
NAMED = 5
# The status that shells report for an interrupt: 128 + SIGINT.
INTERRUPTED = 130


class _Task(NamedTuple):
    """The pieces to fit, an empty Normalizer for them, and the file of the state."""

    empty: Normalizer
    pieces: list
    state: Unfinished


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, 1 for files that cannot be read or written or for statistics that
    are not finite, 2 for arguments that are wrong or do not fit the files, 130 for an interrupt.
    """
    options = parser().parse_args(arguments)
    others = [word for word in arguments if word != "--resume"]
    try:
        fitted = _fit(options, shlex.join(["jaxnorm", "fit", *others, "--resume"]))
    except (UsageError, PatternError) as error:
        return _failed(error, 2)
    except ModuleNotFoundError as error:
        return _failed(_not_installed(error, options.engine), 1)
    except (SourceError, OSError, ValueError, TypeError) as error:
        return _failed(error, 1)
    except KeyboardInterrupt as error:
        print(*_notes(error), sep="\n", file=sys.stderr)
        return INTERRUPTED
    print(f"Written: {options.out}, of {', '.join(_described(fitted))}")
    return _report_broken(fitted, options.skip_nan)


def _fit(options: argparse.Namespace, resume_command: str) -> Normalizer:
    if options.engine != "local":
        # a missing package should be named before any other message
        import_module(f"jaxnorm.data.{options.engine}")
    if "" in options.files:
        raise UsageError("FILES must be names: got ''.")
    axes, where = parse_axes(options.pattern), parse_where(options.where)
    empty = empty_normalizer(axes, dict(options.size))
    check_out(options.out)
    found = sources.pieces(options.files, empty.axes, empty.sizes)
    if where:
        _check_masks(options.files[0], where)
    for name, held in _left_out(options.files[0], empty.axes).items():
        why = f"no numbers: {held}" if held != sources.COORDINATE else f"{held} of the others"
        print(f"jaxnorm: {name!r} is left out, as it holds {why}.", file=sys.stderr)
    if where:
        empty, found = _with_masks(options, empty, found, where)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # a long fit should not end in an error of its output
    files.writable(options.out)
    arguments = [options.files, options.pattern, options.size, options.where, options.skip_nan]
    masked = masking.masked(found, empty.axes, where, options.skip_nan)
    task = _Task(empty, masked, Unfinished(options.out, arguments, found))
    try:
        fitted = _fit_pieces(options, task, resume_command)
        fitted.save(options.out)
    except (KeyboardInterrupt, OSError) as error:
        error.add_note(_how_to_resume(task.state, resume_command))
        raise
    task.state.remove()
    return fitted


def _left_out(path: str, axes: Mapping[str, Axes]) -> dict[str, str]:
    found = sources.left_out(path, axes)
    # NumPy's name for strings of 5 characters is <U5, which tells a user little
    strings = r"[<>|=]?[SU]\d+"
    return {name: re.sub(strings, "strings", kind) for name, kind in found.items()}


def _check_masks(path: str, where: Mapping[str, str]) -> None:
    # the path "" is the whole file: a mask may lie outside of the patterns
    for name, held in _left_out(path, {"": 0}).items():
        if name in where.values() and held != sources.COORDINATE:
            raise UsageError(f"the mask {name!r} holds {held}: give booleans or weights.")


def _fit_pieces(options: argparse.Namespace, task: _Task, resume_command: str) -> Normalizer:
    state = task.state
    fitted = state.resumed() if options.resume else task.empty
    if state.exists() and not options.resume:
        _announce(state, resume_command)
    with progress.shown(find_spec("rich") is not None, len(task.pieces), fitted.batches) as advance:
        if options.engine == "local":
            return _fit_local(fitted, task, advance)
        return _fit_in_rounds(fitted, task, advance, options.engine)


def _fit_local(fitted: Normalizer, task: _Task, advance) -> Normalizer:
    due = progress.Due(EVERY)
    try:
        for piece in task.pieces[fitted.batches :]:
            batch = piece.read()
            try:
                fitted.update(batch, where=sources.masks(batch))
            except (ValueError, TypeError) as error:
                raise SourceError(f"{piece.path}: {error}") from error
            # frees its memory before the next batch is read
            del batch
            advance()
            if due():
                task.state.save(fitted)
    finally:
        if fitted.batches:
            task.state.save(fitted)
    return fitted


def _fit_in_rounds(fitted: Normalizer, task: _Task, advance, engine: str) -> Normalizer:
    """Fit pieces with an engine in rounds, and save after each round."""
    # the size of rounds adapts until one takes about progress.SECONDS, the time between savings
    fit_pieces, size = import_module(f"jaxnorm.data.{engine}").fit_pieces, ROUND
    while fitted.batches < len(task.pieces):
        some, start = task.pieces[fitted.batches : fitted.batches + size], time.monotonic()
        fitted = fitted.merge(fit_pieces(some, task.empty))
        task.state.save(fitted)
        for _ in some:
            advance()
        took = (time.monotonic() - start) / progress.SECONDS
        size = size * 2 if took < 0.5 else max(1, size // 2) if took > 1 else size
    return fitted


def _with_masks(
    options: argparse.Namespace, empty: Normalizer, found: list, where: Mapping[str, str]
) -> tuple[Normalizer, list]:
    """Return an empty Normalizer for the leaves that are no masks, and pieces with the masks."""
    axes, along = empty.axes, dict(found[0].along)
    if "" in along:
        raise UsageError(
            f"--where must name an array of the files: {found[0].path} holds one array, which has "
            "no name."
        )
    # one pattern for all leaves now holds for each leaf that is no mask
    if "" in axes:
        axes = {leaf: axes[""] for leaf in along if leaf not in where.values()}
    if unknown := sorted(set(where) - set(along)):
        raise UsageError(
            f"--where must name what is fitted: got {', '.join(map(repr, unknown))}, fitted are "
            f"{', '.join(map(repr, axes))}."
        )
    empty = Normalizer(axes, quantiles=empty.ranks or None, **empty.sizes)
    # read together with its mask, a leaf may be cut along another axis
    for _ in range(2):
        found = sources.pieces(options.files, masking.with_masks(axes, where, along), empty.sizes)
        along = dict(found[0].along)
    return empty, found


def _announce(state: Unfinished, resume_command: str) -> None:
    if state.held:
        said = (
            f"{state.path} holds {state.held} of {state.total} pieces of an interrupted fit, "
            "which this one begins anew"
        )
        print(
            f"jaxnorm: {said}.\nIt is kept until this fit has come as far. To go on with it: "
            f"{resume_command}",
            file=sys.stderr,
        )
    else:
        print(
            f"jaxnorm: {state.path}, of an interrupted fit, is no longer of these files. It is "
            "replaced.",
            file=sys.stderr,
        )


def _how_to_resume(state: Unfinished, resume_command: str) -> str:
    if state.held:
        return (
            f"Stopped. {state.held} of {state.total} pieces are in {state.path}. This goes on:\n"
            f"{resume_command}"
        )
    return f"Stopped before the first of {state.total} pieces was done. Run the same command."


def _failed(error: Exception, status: int) -> int:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    named = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    print(
        f"jaxnorm: {_with_names_of_options(text)}{named}",
        *_notes(error),
        sep="\n",
        file=sys.stderr,
    )
    return status


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _with_names_of_options(text: str) -> str:
    """Rewrite a message of the library so that it names the command's options.

    >>> _with_names_of_options("all sizes but one must be given: pass g=…, k=… by keyword.")
    'all sizes but one must be given: pass --size g=… --size k=….'
    """
    sizes = re.search(r"pass (\w+=…(?:, \w+=…)*) by keyword", text)
    if sizes:
        text = text.replace(f"{sizes[1]} by keyword", re.sub(r", |^", " --size ", sizes[1]).strip())
    return re.sub(r"axes=\{[^}]*\}, or (?=--pattern)", "", text)


def _not_installed(error: ModuleNotFoundError, engine: str) -> ModuleNotFoundError:
    # jaxnorm's own messages are sentences that say what to install; Python's are not
    if str(error).endswith("."):
        return error
    extra = engine if error.name in (ENGINES[engine], engine) else "data"
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'jaxnorm[{extra}]'.")


def _report_broken(fitted: Normalizer, skip_nan: bool) -> int:
    """Print the leaves whose statistics are not finite, and return the exit status."""
    status = 0
    for leaf, summary in fitted.summaries.items():
        moments = summary.moments
        found = np.flatnonzero(~np.isfinite(moments.mean) | ~np.isfinite(moments.var))
        if broken := len(found):
            what = "Inf" if skip_nan else "NaN or Inf"
            features, hold, have = (
                ("1 feature", "holds", "has")
                if broken == 1
                else (f"{broken} features", "hold", "have")
            )
            remedy = "" if skip_nan else " --skip-nan leaves out elements that are NaN."
            named = _labels(moments.mean.shape, found)
            print(
                f"jaxnorm: {features} of {leaf or 'the array'}{named} {hold} {what}, and {have} no "
                f"mean.{remedy}",
                file=sys.stderr,
            )
            status = 1
    return status


def _labels(shape: tuple[int, ...], features: np.ndarray) -> str:
    """Return the indices of the first few features, in brackets."""
    some = [label(shape, int(feature)) for feature in features[:NAMED]]
    more = ["…"] if len(features) > NAMED else []
    between = "; " if any("," in name for name in some) else ", "
    return f" ({between.join(some + more)})" if any(some) else ""


def _described(fitted: Normalizer) -> Iterator[str]:
    for leaf, summary in fitted.summaries.items():
        size = summary.moments.mean.size
        features = f"{size} feature" if size == 1 else f"{size} features"
        count = summary.moments.count
        most = int(count.max(initial=0))
        bound = "" if (count == most).all() else "up to "
        yield f"{leaf or 'an array'}: {features}, {bound}{most} elements each"
