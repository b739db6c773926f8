"""The command ``jaxnorm fit``, which fits statistics to a data set in files."""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import numpy as np

from jaxnorm.data import files, fit_files, formats, windows
from jaxnorm.data.convert import notes_on
from jaxnorm.data.leaves import label
from jaxnorm.data.normalizer import OWN, Normalizer
from jaxnorm.data.options import (
    UsageError,
    by_leaf,
    check_differences,
    check_names,
    check_out,
    check_sizes,
    parse_axes,
    parser,
)
from jaxnorm.data.sources import PatternError, SourceError
from jaxnorm.data.unfinished import Unfinished, hidden

# Most features that a message names.
NAMED = 5
# The status that shells report for an interrupt: 128 + SIGINT.
INTERRUPTED = 130


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
    # a missing package should be named before any other message
    fit_files.check_engine(options.engine)
    if "" in options.files:
        raise UsageError("FILES must be names: got ''.")
    axes, sizes = parse_axes(options.pattern), dict(options.size)
    where, horizon, relative, absolute = (
        by_leaf(name, getattr(options, name))
        for name in ("where", "horizon", "relative", "absolute")
    )
    check_sizes(axes, sizes)
    check_differences(options.diff, options.format, options.out)
    check_out(options.out, options.format)
    given = {name: getattr(options, name) for name in ("weights", "diff", "skip_nan")}
    given["quantiles"] = _ranks(options)
    given["horizons"] = windows.parsed(horizon, relative, absolute)
    # a shell leaves patterns in quotation marks as they are
    paths = fit_files.with_local_patterns(options.files)
    task = fit_files.planned(paths, axes, sizes, where=where, **given)
    check_names(options, task.leaves)
    _print_left_out(task.left_out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    arguments = [paths, options.pattern, options.size, options.where, options.skip_nan]
    added = {name: given[name] for name in ("quantiles", "weights", "diff", "horizons")}
    arguments += [value for value in added.items() if value[1] not in (None, [], ())]
    kept = options.out if options.format == OWN else options.out.with_suffix(files.SUFFIXES[0])
    # a long fit should not end in an error of its output
    files.writable(kept)
    state = Unfinished(hidden(kept, arguments), arguments, task.pieces)
    try:
        begun = state.resumed() if options.resume else task.empty
        if state.exists() and not options.resume:
            _announce(state, resume_command)
        fitted = fit_files.run(task, state, begun, options.engine, find_spec("rich") is not None)
        fitted = _saved(fitted, options, state)
    except (KeyboardInterrupt, OSError) as error:
        error.add_note(_how_to_resume(state, resume_command))
        raise
    state.remove()
    return fitted


def _ranks(options: argparse.Namespace) -> list[float] | None:
    """Return the ranks of ``--quantiles``, and those that the format has.

    Quantiles of weighted elements are refused, so that weights leave the format's out.
    """
    known = options.format != OWN and not options.weights
    of_format = formats.ranks(options.format) if known else ()
    return sorted({*(options.quantiles or ()), *of_format}) or None


def _saved(fitted: Normalizer, options: argparse.Namespace, state: Unfinished) -> Normalizer:
    """Save what was fitted; if the format cannot say it, tell how to save it otherwise."""
    try:
        named = fitted.share_deviation(*options.share).rename(dict(options.rename))
        named.save(options.out, options.format)
    except ValueError as error:
        state.save(fitted)
        error.add_note(
            f"What was fitted is in {state.path}. This writes it, without another fit:\n"
            f"jaxnorm convert {shlex.quote(str(state.path))} NEW --to NAME"
        )
        raise
    if options.format != OWN:
        for note in notes_on(named, Normalizer.load(options.out, options.format)):
            print(f"Note: {note}", file=sys.stderr)
    return named


def _print_left_out(left_out: Mapping[str, str]) -> None:
    """Print a line for each reason, with the names of all leaves that it holds for."""
    names: dict[str, list[str]] = {}
    for name, held in left_out.items():
        names.setdefault(held, []).append(repr(name))
    for held, named in names.items():
        # what holds numbers, in another arrangement, is told as a phrase
        why = held if re.match("(a|arrays|no|one|the) ", held) else f"no numbers: {held}"
        *others, last = named
        said = f"{', '.join(others)} and {last} are left out, as each" if others else ""
        said = said or f"{last} is left out, as it"
        print(f"jaxnorm: {said} holds {why}.", file=sys.stderr)


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
    text = re.sub(r"^(where|weights|diff|horizon|relative|absolute) (?=must)", r"--\1 ", text)
    return re.sub(r"axes=\{[^}]*\}, or (?=--pattern)", "", text)


def _not_installed(error: ModuleNotFoundError, engine: str) -> ModuleNotFoundError:
    # jaxnorm's own messages are sentences that say what to install; Python's are not
    if str(error).endswith("."):
        return error
    extra = engine if error.name in (fit_files.ENGINES[engine], engine) else "data"
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'jaxnorm[{extra}]'.")


def _report_broken(fitted: Normalizer, skip_nan: bool) -> int:
    """Print the features that have no finite mean or variance, and return the exit status."""
    status = 0
    remedy = "" if skip_nan else " --skip-nan leaves out elements that are NaN."
    for leaf, summary in fitted.summaries.items():
        moments = summary.moments
        empty = np.broadcast_to(moments.count, moments.mean.shape) == 0
        broken = ~empty & ~(np.isfinite(moments.mean) & np.isfinite(moments.var))
        for found, what, way in (
            (broken, "Inf" if skip_nan else "NaN or Inf", remedy),
            (empty, "no element that counts", ""),
        ):
            if found.any():
                _print_broken(leaf, found, what, way)
                status = 1
    return status


def _print_broken(leaf: str, found: np.ndarray, what: str, remedy: str) -> None:
    number = int(found.sum())
    features, hold, have = (
        ("1 feature", "holds", "has") if number == 1 else (f"{number} features", "hold", "have")
    )
    named = _labels(found.shape, np.flatnonzero(found))
    print(
        f"jaxnorm: {features} of {leaf or 'the array'}{named} {hold} {what}, and {have} no mean."
        f"{remedy}",
        file=sys.stderr,
    )


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
        most = float(count.max(initial=0))
        bound = "" if (count == most).all() else "up to "
        # weights add up to fractions
        number = int(most) if most.is_integer() else f"{most:.2f}"
        yield f"{leaf or 'an array'}: {features}, {bound}{number} elements each"
