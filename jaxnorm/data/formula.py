"""What a normalizer subtracts and divides by, given statistics: ours, and those of other files."""

import math
from typing import NamedTuple

import numpy as np

# The smallest deviation or width that is divided by, unless a caller names another.
FLOOR = 1e-6
# What is done with leaves that have no statistics, which are left unchanged.
MISSING = {
    "keep": "left unchanged",
    "warn": "left unchanged, with a warning",
    "error": "refused",
}


class Formula(NamedTuple):
    """How statistics become a center and a divisor: ``y = (x - center) / divisor``.

    In mode "standard" the center is the mean, and the divisor is the deviation
    ``sqrt(var + inside) + added``, which is then clipped to ``[max(least, relative * |mean|),
    most]``. In the modes with a range, from low to high, the result is
    ``2 * (x - low) / width - 1`` with ``width = max(high - low + range_added, range_least)``, so
    that low becomes -1.

    Attributes:
      inside: added to the variance.
      added: added to the deviation.
      least: the smallest deviation.
      relative: the smallest deviation in units of the mean's absolute value.
      most: the largest deviation.
      unit: whether a deviation of 0 (but for rounding) becomes 1.
      range_added: added to the width of a range.
      range_least: the smallest width of a range.
      range_zero: the width to use where it is 0, instead of ``range_least``; None for no exception.
      constant_is_zero: whether a feature whose range has width 0 becomes 0 instead of -1.
      clip: the largest absolute value of the result in mode "standard"; inf for all.
      range_clip: the same in the modes with a range.
      missing: what is done with leaves that have no statistics: "keep" leaves them unchanged,
        "warn" does so and warns, "error" refuses them.
    """

    inside: float = 0.0
    added: float = 0.0
    least: float = 0.0
    relative: float = 0.0
    most: float = math.inf
    unit: bool = False
    range_added: float = 0.0
    range_least: float = 0.0
    range_zero: float | None = None
    constant_is_zero: bool = False
    clip: float = math.inf
    range_clip: float = math.inf
    missing: str = "keep"

    def standard(self, count: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        """Return the divisor of mode "standard"."""
        deviation = np.sqrt(var + self.inside) + self.added
        # without the condition, an infinite mean times 0 would be NaN
        least = (
            np.maximum(self.least, self.relative * np.abs(mean)) if self.relative else self.least
        )
        deviation = np.minimum(np.maximum(deviation, least), self.most)
        return np.where(is_rounding(count, mean, var), 1.0, deviation) if self.unit else deviation

    def ranged(
        self, low: np.ndarray, high: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return two numbers whose sum is the center of a range, and the divisor.

        A feature without data has the range from inf to -inf; its center is 0 and its divisor 1.
        """
        empty = np.isposinf(low) & np.isneginf(high)
        low, high = np.where(empty, -1.0, low), np.where(empty, 1.0, high)
        # half the width has the same bits as the width, and no range is too wide for it
        with np.errstate(invalid="ignore"):
            exact = high / 2 - low / 2
        half = np.maximum(exact + self.range_added / 2, self.range_least / 2)
        if self.range_zero is not None:
            half = np.where(exact == 0, self.range_zero / 2, half)
        # only a width that was replaced has its center moved: what is added keeps low at -1
        constant = self.constant_is_zero & (exact <= self.range_least / 2)
        return low, np.where(constant, exact, half), half

    def standard_in_words(self) -> str:
        """Return the formula of mode "standard".

        >>> Formula(added=1e-6).standard_in_words()
        '(x - mean) / (deviation + 1e-06)'
        """
        deviation = f"sqrt(variance + {self.inside:g})" if self.inside else "deviation"
        if self.added:
            deviation = f"({deviation} + {self.added:g})"
        least = [f"{self.least:g}"] if self.least else []
        least += [f"{self.relative:g} |mean|"] if self.relative else []
        if least:
            deviation = f"max({', '.join([deviation, *least])})"
        if self.most < math.inf:
            deviation = f"min({deviation}, {self.most:g})"
        unit = ", by 1 where the variance is rounding" if self.unit else ""
        return f"(x - mean) / {deviation}{unit}{_clipped(self.clip)}"

    def range_in_words(self) -> str:
        """Return the formula of the modes with a range.

        >>> Formula(range_added=1e-6).range_in_words()
        '2 (x - low) / (high - low + 1e-06) - 1'
        """
        added = f" + {self.range_added:g}" if self.range_added else ""
        width = f"(high - low{added})"
        if self.range_least:
            width = f"max{width[:-1]}, {self.range_least:g})"
        zero = ""
        if self.range_zero is not None:
            zero = f", by {self.range_zero:g} where low = high"
        constant = ", 0 where low = high" if self.constant_is_zero else ""
        return f"2 (x - low) / {width} - 1{zero}{constant}{_clipped(self.range_clip)}"


def checked_missing(value: object) -> str:
    """Return what is done with leaves that have no statistics, after checking it."""
    if not isinstance(value, str) or value not in MISSING:
        raise ValueError(f"missing must be one of {', '.join(map(repr, MISSING))}: got {value!r}.")
    return value


def _clipped(bound: float) -> str:
    return f", clipped to [-{bound:g}, {bound:g}]" if bound < math.inf else ""


def is_rounding(count: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Return whether a variance is no more than the rounding of its float64 sums.

    The bound is that of scikit-learn's StandardScaler: ``n * eps * var + (n * mean * eps)^2``.
    """
    eps = np.finfo(np.float64).eps
    return var <= count * eps * var + (count * mean * eps) ** 2


OURS = Formula(least=FLOOR, range_least=FLOOR, constant_is_zero=True)
