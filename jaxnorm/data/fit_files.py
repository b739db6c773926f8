"""Fit a Normalizer to data in files, piece by piece: what ``jaxnorm fit`` does."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import files, masking, progress, sources, weighting, windows
from jaxnorm.data.formats.episodes import counted, without_counts
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.prepared import prepared
from jaxnorm.data.sources import Horizon, PatternError, SourceError, Wanted
from jaxnorm.data.unfinished import Unfinished

# Engines, and the module that each one needs.
ENGINES = {"local": None, "dask": "dask", "beam": "apache_beam", "ray": "ray"}
# Pieces of an engine's first round. Later rounds take about progress.SECONDS.
ROUND = 16
# Most pieces between two savings of the state, which progress.SECONDS may cause earlier.
EVERY = 100


class Task(NamedTuple):
    """What is to be fitted.

    Attributes:
      empty: a Normalizer without data.
      pieces: the pieces of the files.
      leaves: the leaves that are fitted.
      left_out: the leaves that are not fitted, although the axes include them, with their contents
        in words.
      episodes: how many episodes the leaves are of, or None if the files do not tell.
    """

    empty: Normalizer
    pieces: list
    leaves: list[str]
    left_out: dict[str, str]
    episodes: int | None


def fit_files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    axes: Axes | Mapping = 0,
    *,
    where: Mapping[str, str] | None = None,
    weights: str | Sequence[str] | None = None,
    diff: int | str | None = None,
    horizon: Mapping[str, int] | None = None,
    relative: Mapping[str, str] | None = None,
    absolute: Mapping[str, Sequence[int]] | None = None,
    skip_nan: bool = False,
    engine: str = "local",
    state: str | os.PathLike | None = None,
    show_progress: bool = False,
    threads: int | None = None,
    quantiles: Any = None,
    **sizes: int,
) -> Normalizer:
    """Fit a Normalizer to data in files, in pieces of about 64 MiB.

    Args:
      paths: files or folders of one format with the same arrays or columns, local or at addresses
        that fsspec knows; also with ``*``.
      axes: the reduction axes, as in :class:`jaxnorm.data.Normalizer`. The leaves are named as in
        the files; ``tree/*`` stands for all leaves of a tree.
      where: the names of masks, by leaf: ``{"state": "valid"}`` masks the array ``state`` by the
        array ``valid`` of the same files, booleans or float weights. The axes of a mask are the
        first axes of the leaf.
      weights: an array of the files along one axis, such as layer thickness, whose values weight
        what lies along that axis; ``"cos(latitude)"`` takes the cosine of an array in degrees. Of
        several, the product counts. The dimensions of Zarr and NetCDF say which axis it is, and a
        pattern in other files: the axis must have the array's name.
      diff: an axis, by its number, by the name of a dimension or by its name in a pattern: fit the
        differences ``x[t + 1] - x[t]`` along it, in float64. Files and episodes are not crossed.
      horizon: numbers of steps, by leaf. ``{"action": 16}`` fits each row together with the 15
        after it, as a chunk of actions, along an axis of steps after the first: ``"[n] step f"``
        keeps the steps apart, ``"[n step] f"`` pools them. Steps beyond the end of an episode or a
        file are masked.
      relative: of leaves with a horizon, another leaf: ``{"action": "state"}`` subtracts the state
        at the first step of a chunk from all its steps, in float64.
      absolute: of leaves that are relative, the features that are not: ``{"action": [6, -1]}``.
      skip_nan: leave out elements that are NaN.
      engine: ``"local"`` fits in this process; ``"dask"``, ``"beam"`` and ``"ray"`` spread the
        pieces over their workers.
      state: a file for the state, saved at least every 30 seconds and at the end. If it exists, the
        fit resumes after the pieces that it holds, and gives the same numbers as without a break.
      show_progress: show a bar, with rich.
      threads: the number of threads that reduce a piece, in this process.
      quantiles: as in :class:`jaxnorm.data.Normalizer`.
      **sizes: sizes of split axes in patterns.

    Returns:
      A fitted :class:`jaxnorm.data.Normalizer`.

    Raises:
      SourceError: files that are missing, damaged or unlike the others, or names and axes that do
        not fit them. The message is one sentence that names the file.
      ValueError: an engine that is unknown, or a state of another fit.
      ModuleNotFoundError: a library that is needed and missing; the message says which to install.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from jaxnorm.data import Normalizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for day in (0, 2):
    ...         np.savez(Path(folder, f"day{day}.npz"), x=np.full((4, 3), day), name="a")
    ...     fitted = Normalizer.fit_files(f"{folder}/day*.npz", {"x": "[n] f"})
    >>> fitted.mean["x"].tolist(), fitted.std["x"].tolist()
    ([[1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]])
    """
    check_engine(engine)
    found = with_local_patterns([paths] if isinstance(paths, str | os.PathLike) else list(paths))
    given: dict[str, Any] = {"weights": weights, "diff": diff, "quantiles": quantiles}
    given |= {"where": dict(where or {}), "skip_nan": skip_nan}
    given["horizons"] = windows.parsed(horizon, relative, absolute)
    task = planned(found, axes, sizes, **given)
    if state is None:
        return run(task, None, task.empty, engine, show_progress, threads)
    files.writable(state)
    arguments = [found, files.encode(task.empty.axes), sizes, given]
    kept = Unfinished(Path(state), arguments, task.pieces, "Name another state")
    begun = kept.resumed() if kept.exists() else task.empty
    return run(task, kept, begun, engine, show_progress, threads)


def check_engine(engine: str) -> None:
    """Refuse an engine that is unknown or not installed, before anything else is said."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}: got {engine!r}.")
    if engine != "local":
        import_module(f"jaxnorm.data.{engine}")


def planned(
    paths: Sequence[str],
    axes: Axes | Mapping,
    sizes: Mapping[str, int],
    *,
    where: Mapping[str, str],
    weights: str | Sequence[str] | None = None,
    diff: int | str | None = None,
    horizons: tuple[Horizon, ...] = (),
    skip_nan: bool = False,
    quantiles: Any = None,
) -> Task:
    """Return the task for the files, whose data are not read yet.

    Raises:
      SourceError: as in :func:`fit_files`.
    """
    empty = _empty(axes, quantiles, sizes)
    masks = frozenset(by for by in where.values() if by not in empty.axes)
    wanted = Wanted(diff, weighting.parsed(weights), masks, horizons=horizons)
    if horizons and (wanted.weights or diff is not None):
        other = "weights" if wanted.weights else "diff"
        raise PatternError(f"horizon must be left out with {other}: got both. Fit one by one.")
    found = sources.pieces(paths, empty.axes, empty.sizes, wanted)
    left_out = _left_out(paths[0], empty.axes)
    if diff is not None:
        left_out |= sources.lacking(paths[0], empty.axes, wanted)
    # a mask is not fitted, but it is not left out either
    left_out = {name: held for name, held in left_out.items() if name not in where.values()}
    if where:
        _check_masks(paths[0], where)
        fitted = masking.fitted(found[0], empty.axes, where)
        empty = _empty(fitted, quantiles, sizes)
        # read together with its mask, a leaf may be cut along another axis
        together = wanted._replace(where=tuple(where.items()))
        found = sources.pieces(paths, fitted, empty.sizes, together)
    leaves = [name for name, _ in found[0].along if name not in masks]
    steps = prepared(found, empty.axes, where, skip_nan)
    return Task(empty, steps, leaves, left_out, sources.episodes(paths, leaves))


def run(
    task: Task,
    state: Unfinished | None,
    begun: Normalizer,
    engine: str,
    show_progress: bool,
    threads: int | None = None,
) -> Normalizer:
    """Fit the pieces after those that ``begun`` holds, and save the state on the way."""
    sizes = [piece.size for piece in task.pieces]
    done = sum(sizes[: begun.batches])
    with progress.shown(show_progress, sum(sizes), done, "bytes") as advance:
        if engine == "local":
            fitted = _fit_local(begun, task, state, advance, threads)
        else:
            fitted = _fit_in_rounds(begun, task, state, advance, engine)
    if task.episodes is not None:
        fitted.notes = (*without_counts(fitted.notes), counted(task.episodes))
    return fitted


def _fit_local(
    fitted: Normalizer, task: Task, state: Unfinished | None, advance: Callable, threads: int | None
) -> Normalizer:
    # not the Normalizer of the task, which a caller may use again
    fitted = task.empty.merge(fitted)
    due = progress.Due(EVERY)
    try:
        for piece in task.pieces[fitted.batches :]:
            batch = piece.read()
            try:
                fitted.update(batch, where=sources.masks(batch), threads=threads)
            except (ValueError, TypeError) as error:
                raise SourceError(f"{piece.path}: {error}") from error
            # frees its memory before the next batch is read
            del batch
            advance(piece.size)
            if state is not None and due():
                state.save(fitted)
    finally:
        if state is not None and fitted.batches:
            state.save(fitted)
    return fitted


def _fit_in_rounds(
    fitted: Normalizer, task: Task, state: Unfinished | None, advance: Callable, engine: str
) -> Normalizer:
    """Fit pieces with an engine in rounds, and save after each round."""
    # the size of rounds adapts until one takes about progress.SECONDS, the time between savings
    fit_pieces, size = import_module(f"jaxnorm.data.{engine}").fit_pieces, ROUND
    while fitted.batches < len(task.pieces):
        some, start = task.pieces[fitted.batches : fitted.batches + size], time.monotonic()
        fitted = fitted.merge(fit_pieces(some, task.empty))
        if state is not None:
            state.save(fitted)
        advance(sum(piece.size for piece in some))
        took = (time.monotonic() - start) / progress.SECONDS
        size = size * 2 if took < 0.5 else max(1, size // 2) if took > 1 else size
    return fitted


def _empty(axes: Axes | Mapping, quantiles: Any, sizes: Mapping[str, int]) -> Normalizer:
    if isinstance(axes, Mapping):
        # all members of a tree are the tree
        axes = {str(key).removesuffix("/*"): value for key, value in axes.items()}
    return Normalizer(axes, quantiles=quantiles, **sizes)


def _check_masks(path: str, where: Mapping[str, str]) -> None:
    # the path "" is the whole file: a mask may lie outside of the patterns
    for name, held in _left_out(path, {"": 0}).items():
        if name in where.values() and held != sources.COORDINATE:
            raise PatternError(f"the mask {name!r} holds {held}: give booleans or weights.")


def _left_out(path: str, axes: Mapping[str, Axes]) -> dict[str, str]:
    found = sources.left_out(path, axes)
    # NumPy's name for strings of 5 characters is <U5, which tells a user little
    strings = r"[<>|=]?[SU]\d+"
    return {name: re.sub(strings, "strings", held) for name, held in found.items()}


def with_local_patterns(paths: Sequence[str | os.PathLike]) -> list[str]:
    """Replace each local path with ``*`` by the files that it matches."""
    result: list[str] = []
    for given in paths:
        path = os.fspath(given)
        if "*" not in path or "://" in path or os.path.exists(path):
            result.append(path)
        elif found := sorted(glob(path)):
            result += found
        else:
            raise SourceError(f"{path} must name files: there are none.")
    if not result:
        raise ValueError("paths must name files: got none.")
    return result
