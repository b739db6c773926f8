"""What is known of one leaf: moments and extremes, quantiles, and features that are left alone."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Reduction
from jaxnorm.data.host.sketch import Sketch
from jaxnorm.data.host.statistics import Summary, merge, summarize

# Among what is unknown, where features share a deviation.
SHARED = "own variance"


class Fitted(NamedTuple):
    """The statistics of one leaf.

    Attributes:
      summary: moments and extremes; NaN where they are unknown.
      sketch: what quantiles of any rank are read from, or None.
      given: quantiles by their rank, of statistics that came without a sketch.
      mask: False for features that stay as they are, or None if all are normalized.
      unknown: the names of what is not known: "count", "mean", "var", "min", "max", and
        :data:`SHARED`.
    """

    summary: Summary
    sketch: Sketch | None = None
    given: Mapping[float, np.ndarray] = {}  # which nothing changes
    mask: np.ndarray | None = None
    unknown: frozenset[str] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the statistics."""
        return self.summary.min.shape

    def merge(self, other: "Fitted") -> "Fitted":
        """Return the statistics of the data of both.

        Raises:
          ValueError: something that is needed for this is unknown.
        """
        _check_mergeable(self, other)
        both = Summary(
            merge(self.summary.moments, other.summary.moments),
            np.minimum(self.summary.min, other.summary.min),
            np.maximum(self.summary.max, other.summary.max),
        )
        sketch = None
        if self.sketch is not None and other.sketch is not None:
            sketch = self.sketch.merge(other.sketch)
        return self._replace(summary=both, sketch=sketch)

    def updated(
        self, x: np.ndarray, reduction: Reduction, where: np.ndarray | None, threads: int
    ) -> "Fitted":
        """Return the statistics with the elements of an array as well."""
        # a sketch takes in the elements themselves: merged with the sketch of each batch, it would
        # be no worse, but slower
        sketch = self.sketch and self.sketch.updated(x, reduction, where, threads)
        new = Fitted(summarize(x, reduction, where, threads=threads), mask=self.mask)
        return self._replace(sketch=None).merge(new)._replace(sketch=sketch)

    def quantile(self, rank: float) -> np.ndarray:
        """Return the quantile of a rank.

        Raises:
          ValueError: it is not known.
        """
        if self.sketch is not None:
            return self.sketch.quantile(rank, self.summary.min, self.summary.max)
        if rank in self.given:
            return self.given[rank]
        end = {0.0: "min", 1.0: "max"}.get(rank, "")
        if end and end not in self.unknown:
            return getattr(self.summary, end)
        held = f"known are {', '.join(map(str, sorted(self.given)))}" if self.given else "none is"
        remedy = "Fit with quantiles=(0.01, 0.99), which keeps a sketch of all ranks"
        raise ValueError(f"the quantile of rank {rank} must be known: {held}. {remedy}.")


def first(
    x: np.ndarray,
    reduction: Reduction,
    where: np.ndarray | None,
    *,
    threads: int,
    with_sketch: bool,
) -> Fitted:
    """Return the statistics of one array."""
    sketch = Sketch.of(x, reduction, where, threads) if with_sketch else None
    return Fitted(summarize(x, reduction, where, threads=threads), sketch)


def _check_mergeable(first: Fitted, second: Fitted) -> None:
    for one in (first, second):
        if SHARED in one.unknown:
            raise ValueError(
                "features that share a deviation have lost their own, which merging needs. Merge "
                "first, then share."
            )
        if unknown := sorted(one.unknown):
            raise ValueError(
                f"merging needs count, mean, variance, minimum and maximum of both: one lacks "
                f"{', '.join(unknown)}. Give them to from_statistics."
            )
        if one.given:
            raise ValueError(
                "quantiles without their data cannot be merged: one has quantiles that were "
                "given. Leave them out, or fit both with quantiles=."
            )
    for one in (first, second):
        if one.mask is not None and (~one.mask & (one.summary.moments.count == 0)).any():
            raise ValueError(
                "features that were padded have no data to merge with. Merge first, then pad."
            )
    masks = [np.ones(one.shape, bool) if one.mask is None else one.mask for one in (first, second)]
    if not np.array_equal(masks[0], masks[1]):
        raise ValueError("both must leave the same features as they are: their masks differ.")
    if (first.sketch is None) != (second.sketch is None):
        raise ValueError(
            "both must have been fitted with quantiles, or neither: one was. Fit the other "
            "with quantiles=, too."
        )
