"""What a file of statistics holds, whatever its format."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data.formula import Formula

# The attributes of Statistics that are arrays of numbers.
FIELDS = ("mean", "var", "count", "min", "max")


@dataclass(frozen=True)
class Statistics:
    """What a file says of one leaf, in float64 arrays of one shape; None where it says nothing.

    Attributes:
      mean: the mean of each feature.
      var: the biased variance of each feature.
      count: the number of elements of each feature.
      min: the smallest element of each feature.
      max: the largest element of each feature.
      quantiles: the quantiles of each feature by their rank, from 0 to 1.
      mask: False for features that are left as they are.
    """

    mean: np.ndarray | None = None
    var: np.ndarray | None = None
    count: np.ndarray | None = None
    min: np.ndarray | None = None
    max: np.ndarray | None = None
    quantiles: dict[float, np.ndarray] | None = None
    mask: np.ndarray | None = None


class Contents(NamedTuple):
    """A file of statistics.

    Attributes:
      leaves: the statistics by the path of their leaf.
      formula: how the file's own library normalizes by them.
      notes: sentences on what a reader of the numbers should know.
    """

    leaves: dict[str, Statistics]
    formula: Formula
    notes: tuple[str, ...] = ()


class FormatError(ValueError):
    """An error of a file, or of what a format cannot say, in one sentence."""


def tree_of(paths: list[str], tree: dict[str, Any] | None = None) -> Any:
    """Return a tree whose leaves are their paths, whose keys a slash separates.

    The leaves are added to those that ``tree`` has already.

    Raises:
      FormatError: a leaf would lie within another one.

    >>> tree_of(["action", "observation/state"])
    {'action': 'action', 'observation': {'state': 'observation/state'}}
    """
    tree = {} if tree is None else tree
    if paths == [""] and not tree:
        return ""
    for path in paths:
        *outer, last = path.split("/")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise FormatError(f"{path!r} must not lie within a leaf, which {key!r} is.")
        if last in inner:
            raise FormatError(f"{path!r} must not be a leaf and a tree of leaves.")
        inner[last] = path
    return tree
