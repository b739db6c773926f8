"""Say what does not fit between a model and the arrays of another framework."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.interop.search import Pair
from jaxnorm.interop.trees import Tree, loses

LISTED = 8  # problems in an error
# what errors call the arrays: those that are loaded, and those that save is to be like
FILE, LIKE = "the file", "like"


def refusal(problems: Sequence[str], source: str, hint: str) -> ValueError:
    """Return an error that lists the first 8 problems.

    Args:
      problems: what does not fit.
      source: :data:`FILE` or :data:`LIKE`.
      hint: a sentence, or "".
    """
    more = len(problems) - LISTED
    lines = [*problems[:LISTED], *([f"and {more} more"] if more > 0 else [])]
    listed = "".join(f"\n  {line}" for line in lines)
    if source == FILE:
        must, done = "each array a place", "changed"
        left_over = " What allow_missing and allow_unused name may be left over."
    else:
        must, done, left_over = f"each array of {source} a parameter", "saved", ""
    hint = f"{hint} " if hint else ""
    return ValueError(
        f"each parameter must have one array of its shape, and {must}: got {len(problems)} "
        f"without.{listed}\nNothing was {done}. {hint}Say what belongs together by "
        f"names={{ours: theirs}}; jaxnorm.interop.match shows it as a table.{left_over}"
    )


def rounded(values: Mapping[str, np.ndarray], tree: Tree, allow_rounding: bool) -> Iterator[str]:
    """Yield the leaves whose dtype cannot hold their value."""
    for key, value in values.items():
        if not allow_rounding and loses(value, tree.leaves[key].dtype):
            yield (
                f"{key}: {value.dtype} does not go into {tree.leaves[key].dtype} without rounding; "
                "allow_rounding=True rounds"
            )


def without(
    missing: Sequence[str],
    unused: Sequence[str],
    pairs: Sequence[Pair],
    tree: Tree,
    arrays: Mapping[str, np.ndarray],
    allowed: tuple[Callable[[str], bool], Callable[[str], bool]],
    source: str,
) -> Iterator[str]:
    """Yield the leaves without a value and the arrays without a place that are not allowed."""
    shapes = {key: tuple(np.shape(array)) for key, array in arrays.items()}
    may_miss, may_stay = allowed
    running = {
        pair.theirs.leaves[name]: "; running statistics need a place in like, as in batch_stats"
        for pair in pairs
        for name in pair.fit.unused
        if (row := pair.fit.theirs.row_of(name)) and row.common in (("mean",), ("var",))
    }
    for key in missing:
        if not (may_miss(key) or may_miss("/".join(tree.paths[key]))):
            shape = tree.shape(key)
            yield f"{key} {shape}: nothing in {source} fits it{_others(shape, unused, shapes)}"
    for key in unused:
        if not may_stay(key):
            yield f"{key} {shapes[key]}: the model has no parameter for it{running.get(key, '')}"


def _others(shape: tuple[int, ...], unused: Sequence[str], shapes: Mapping[str, Any]) -> str:
    """Name arrays without a place that have as many elements."""
    size = np.prod(shape, dtype=int)
    alike = [f"{key} {shapes[key]}" for key in unused if np.prod(shapes[key], dtype=int) == size]
    return f"; as large are {', '.join(alike[:3])}" if alike else ""
