"""Running statistics of brax and Acme: from a state in memory, and in brax's Orbax checkpoints.

The state is ``RunningStatisticsState`` of ``brax.training.acme.running_statistics``
(https://github.com/google/brax), or Acme's of the same name. brax saves it by
``brax.training.checkpoint``, as the first entry of a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats import orbax
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.values import assembled, not_finite, numbers, scalar, writable
from jaxnorm.data.formula import Formula
from jaxnorm.data.trees import flatten

NAME = "brax"
check = orbax.check
# std = clip(sqrt(summed_variance / count + std_eps), 1e-6, 1e6), by which brax divides
LEAST, MOST = 1e-6, 1e6
# float32 rounds the deviation of the state by 6e-8 of it, and sums by some more
CLOSE = 1e-3
WELFORD, EMA = 0, 1
NOTES: tuple[str, ...] = ("brax leaves integers as they are.",)
INFERRED = (
    "A checkpoint does not keep the mode of the statistics: by its deviations it is {}, but brax "
    "goes on in 'welford'."
)
OTHER_STD = (
    "The deviations of the state are not those of its variances. They are taken, as brax divides "
    "by them."
)


@dataclass(frozen=True)
class _State:
    """The parts of a state: trees by leaf, and numbers; None for what a state lacks."""

    mean: dict[str, np.ndarray]
    std: dict[str, np.ndarray]
    summed_variance: dict[str, np.ndarray] | None
    count: float | None
    std_eps: float
    mode: int | None


def contents(state: Any) -> Contents:
    """Return the statistics of a ``RunningStatisticsState``, or of brax's ``NestedMeanStd``.

    Args:
      state: the state, or a mapping with its fields: ``mean``, ``std``, ``summed_variance``,
        ``count`` (a number, or a ``UInt64`` of two words ``hi`` and ``lo``), ``std_eps`` and
        ``mode``. A state of ``NestedMeanStd`` has the first two alone.

    Raises:
      FormatError: a field is missing, or holds something else.

    >>> import numpy as np
    >>> from jaxnorm.data.formats import brax
    >>> words = {"hi": 0, "lo": 4}
    >>> state = {"mean": np.zeros(2), "std": np.full(2, 3.0), "count": words}
    >>> read = brax.contents(state | {"summed_variance": np.full(2, 36.0)})
    >>> read.leaves[""].var.tolist(), read.leaves[""].count.tolist()
    ([9.0, 9.0], [4.0, 4.0])
    """
    return _contents("the state", state)


def state(leaves: dict[str, Statistics], *, std_eps: float = 0.0) -> dict[str, Any]:
    """Return the fields of brax's ``RunningStatisticsState`` in float32, as a dict.

    ``count`` is a dict too, of the fields of ``brax.training.types.UInt64``.

    Args:
      leaves: the statistics by path, which must have one count.
      std_eps: what brax adds to the variance.

    Raises:
      FormatError: a mean, variance or count is missing; counts that differ.
    """
    whole = writable(leaves, "brax's state", ("mean", "var", "count"))
    count = _one_count(whole)
    deviation = lambda leaf: np.clip(np.sqrt(leaf.var + std_eps), LEAST, MOST)
    return {
        "mean": _tree(whole, lambda leaf: leaf.mean),
        "std": _tree(whole, deviation),
        "count": {"hi": np.uint32(count >> 32), "lo": np.uint32(count & 0xFFFFFFFF)},
        "summed_variance": _tree(whole, lambda leaf: leaf.var * count),
        "std_eps": float(std_eps),
    }


def recognizes(path: Path) -> bool:
    """Return whether a path is an Orbax checkpoint that holds running statistics."""
    # a folder of steps too, so that reading it can say to name one
    steps = [step for step in Path(path).glob("*") if step.is_dir()] if Path(path).is_dir() else []
    return any(orbax.mentions(one, b"summed_variance") for one in (path, *steps))


def read(path: Path) -> Contents:
    """Read the running statistics in an Orbax checkpoint, the folder of one step."""
    found = list(_states(orbax.load(path)))
    if len(found) != 1:
        raise FormatError(
            f"{path} must hold one state with mean, std and summed_variance: it holds {len(found)}."
        )
    return _contents(str(path), found[0])


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write an Orbax checkpoint that ``brax.training.checkpoint.load`` reads; it has no networks.

    The folder must not exist.
    """
    orbax.save(path, (state(leaves),))


@np.errstate(over="ignore", invalid="ignore")
def _contents(where: str, given: Any) -> Contents:
    held = _held(where, given)
    leaves, eps, notes = {}, held.std_eps, NOTES
    variances = None if held.count is None else held.summed_variance
    if variances is not None:
        mode = held.mode if held.mode is not None else _inferred(held)
        if held.mode is None and mode == EMA:
            notes += (INFERRED.format("'ema'"),)
        variances = {path: _variance(array, held, mode) for path, array in variances.items()}
        if not all(_close(_deviation(variances[path], eps), held.std[path]) for path in held.std):
            variances, notes = None, (*notes, OTHER_STD)
    own = Formula() if variances is None else Formula(inside=eps, least=LEAST, most=MOST)
    for path, mean in held.mean.items():
        var = held.std[path] ** 2 if variances is None else variances[path]
        count = None if held.count is None else np.array(held.count)
        leaves[path] = assembled(where, path, {"mean": mean, "var": var, "count": count})
    return Contents(leaves, own, notes + not_finite(leaves))


def _held(where: str, given: Any) -> _State:
    """Return the parts of a state after checking them."""
    get = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
    trees = {name: get(name) for name in ("mean", "std", "summed_variance")}
    if missing := [name for name in ("mean", "std") if trees[name] is None]:
        raise FormatError(
            f"{where} must have mean and std: {type(given).__name__} has no {missing[0]}. Pass a "
            "RunningStatisticsState, or a mapping with its fields."
        )
    arrays = {
        name: {
            path: numbers(where, f"{name} of {path!r}", leaf)
            for path, leaf in flatten(tree).items()
        }
        for name, tree in trees.items()
        if tree is not None
    }
    for name, leaves in arrays.items():
        shapes = {path: array.shape for path, array in leaves.items()}
        if shapes != {path: array.shape for path, array in arrays["mean"].items()}:
            raise FormatError(f"{where} must have the leaves of mean in {name}: got {shapes}.")
    mode, eps = get("mode"), get("std_eps")
    if mode is not None and (_shape(mode) != () or mode not in (WELFORD, EMA)):
        raise FormatError(f"{where} must have mode 0 ('welford') or 1 ('ema'): got {mode!r:.60}.")
    return _State(
        arrays["mean"],
        arrays["std"],
        arrays.get("summed_variance"),
        _count(where, get("count")),
        0.0 if eps is None else scalar(where, "std_eps", eps),
        None if mode is None else int(mode),
    )


def _count(where: str, count: Any) -> float | None:
    """Return a count from a number, or from two words of 32 bits."""
    if count is None:
        return None
    words = count if isinstance(count, Mapping) else vars(count) if hasattr(count, "hi") else None
    parts: list[Any] = [count] if words is None else [words.get("hi"), words.get("lo")]
    shapes = {_shape(part) for part in parts}
    kinds = "iuf" if words is None else "iu"
    if shapes != {()} or any(np.asarray(part).dtype.kind not in kinds for part in parts):
        raise FormatError(
            f"{where} must have one number as count, or the words hi and lo: got "
            f"{_described(parts[0])}. Take the state of one device: "
            "jax.tree.map(lambda x: x[0], state)."
        )
    total = float(parts[0]) if words is None else float((int(parts[0]) << 32) + int(parts[1]))
    if total < 0:
        raise FormatError(f"{where} must have a count >= 0: got {total:g}, an int32 that overran.")
    return total


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a number or of an array, or None for lists of different lengths."""
    try:
        return np.shape(value)
    except ValueError:
        return None


def _described(value: Any) -> str:
    shape = _shape(value)
    return f"{value!r:.60}" if shape in ((), None) else f"shape {shape}"


def _variance(summed: np.ndarray, held: _State, mode: int) -> np.ndarray:
    """Return the variance: ``summed_variance`` is a sum in 'welford', the variance in 'ema'."""
    return np.maximum(summed, 0) / (max(held.count or 0, 1) if mode == WELFORD else 1)


def _deviation(var: np.ndarray, eps: float) -> np.ndarray:
    return np.clip(np.sqrt(var + eps), LEAST, MOST)


def _inferred(held: _State) -> int:
    """Return the mode by which the variances give the deviations, or 'welford' if neither does."""
    fits = [
        all(
            _close(_deviation(_variance(array, held, mode), held.std_eps), held.std[path])
            for path, array in (held.summed_variance or {}).items()
        )
        for mode in (WELFORD, EMA)
    ]
    return EMA if fits == [False, True] else WELFORD


def _close(deviation: np.ndarray, std: np.ndarray) -> bool:
    """Return whether deviations are those of a state, whose first ones are 1 before any data."""
    return bool(np.all((abs(deviation - std) <= CLOSE * std) | np.isnan(std)))


def _states(tree: Any) -> Iterator[Mapping]:
    """Yield the states within a tree of dicts and lists."""
    if isinstance(tree, Mapping):
        if {"mean", "std", "summed_variance"} <= set(tree):
            yield tree
            return
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from _states(part)


def _one_count(leaves: dict[str, Any]) -> int:
    counts = np.unique(np.concatenate([np.ravel(leaf.count) for leaf in leaves.values()]))
    if len(counts) > 1 or counts[0] != int(counts[0]):
        raise FormatError(
            f"brax must have one whole count for all leaves: they have {counts[0]:g} to "
            f"{counts[-1]:g}. Fit them on the same elements, without masks and weights."
        )
    return int(counts[0])


@np.errstate(over="ignore")
def _tree(leaves: dict[str, Any], array: Callable[[Any], np.ndarray]) -> Any:
    """Return arrays of the leaves in float32, as nested dicts by their paths."""
    tree: Any = {}
    for path, statistics in leaves.items():
        value = np.asarray(array(statistics), np.float32)
        if not np.all(np.isfinite(value)):
            raise FormatError(
                f"brax must hold numbers that float32 can: those of {path!r} are too large."
            )
        if not path:
            return value
        *parents, last = path.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree
