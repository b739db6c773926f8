"""Horizons: each row of a leaf with the rows that follow it, such as chunks of actions."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxnorm.data.sources.addresses import PatternError
from jaxnorm.data.sources.readers import Leaf

# where the pattern of such a leaf has another number of axes
HINT = "The horizon adds the second axis, of steps: '[n] step f'."


class Horizon(NamedTuple):
    """A leaf that is fitted with an axis of steps after its first axis.

    At step k of row t stands row t + k.

    Attributes:
      leaf: the leaf.
      steps: the number of steps.
      by: the leaf whose row at the first step is subtracted, or None.
      absolute: the features from which nothing is subtracted.
    """

    leaf: str
    steps: int
    by: str | None = None
    absolute: tuple[int, ...] = ()

    def built(self, leaf: Leaf) -> int:
        """Return the bytes of all steps of one row, in float64."""
        return 8 * self.steps * math.prod(leaf.shape[1:])

    def relative(self, size: int) -> list[int]:
        """Return the features from which those of another leaf are subtracted."""
        absolute = {feature % size for feature in self.absolute}
        return [feature for feature in range(size) if feature not in absolute]


def with_steps(named: Mapping[str, Leaf], horizons: Sequence[Horizon]) -> dict[str, Leaf]:
    """Return the leaves as they are fitted: those that have horizons with an axis of steps.

    Raises:
      PatternError: a horizon is of none of them.
    """
    fitted = dict(named)
    for horizon in horizons:
        if (leaf := named.get(horizon.leaf)) is None:
            names = ", ".join(map(repr, named))
            raise PatternError(
                f"horizon must name what is fitted: got {horizon.leaf!r}, fitted are {names}."
            )
        dims = (leaf.dims[0], "step", *leaf.dims[1:]) if leaf.dims else ()
        shape = (leaf.shape[0], horizon.steps, *leaf.shape[1:])
        fitted[horizon.leaf] = leaf._replace(shape=shape, dims=dims)
    return fitted


def check(path: str, named: Mapping[str, Leaf], others: Mapping[str, Leaf], own: Horizon) -> None:
    """Refuse a leaf whose rows do not fit those of the leaf that it is relative to."""
    leaf, by = named[own.leaf], others[str(own.by)]
    if by.shape[0] != leaf.shape[0]:
        must = f"{path} must hold a row of {own.by!r} for each row of {own.leaf!r}"
        raise PatternError(f"{must}: there are {by.shape[0]} for {leaf.shape[0]}.")
    if max(len(leaf.shape), len(by.shape)) > 2:
        name, shape = max((own.leaf, leaf.shape), (own.by, by.shape), key=lambda x: len(x[1]))
        must = f"{path} must hold vectors, of which others are subtracted, in {name!r}"
        raise PatternError(f"{must}: its rows have shape {shape[1:]}.")
    size, known = math.prod(leaf.shape[1:]), math.prod(by.shape[1:])
    if unlike := [feature for feature in own.absolute if not -size <= feature < size]:
        must = f"absolute must name features of {own.leaf!r}, which has {size}"
        raise PatternError(f"{must}: got {unlike[0]}.")
    if unlike := [feature for feature in own.relative(size) if feature >= known]:
        must = f"{path} must hold each feature of {own.leaf!r} in {own.by!r}, or it is absolute"
        raise PatternError(f"{must}: there are {size} and {known}. Name {unlike} absolute.")
