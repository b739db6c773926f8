"""What a file of statistics holds, whatever its format."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxnorm.data.formula import Formula


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
