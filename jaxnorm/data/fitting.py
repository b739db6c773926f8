"""What batches change: the statistics so far, and how more of them are taken in."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.fitted import Fitted, first
from jaxnorm.data.formats.episodes import without_counts
from jaxnorm.data.formula import OURS, Formula
from jaxnorm.data.host.sketch import ranks
from jaxnorm.data.leaves import check_leaves, check_shape, elements, naming_leaf, with_remedy
from jaxnorm.data.results import Results
from jaxnorm.data.state import EMPTY, State
from jaxnorm.data.trees import (
    axes_by_path,
    flatten,
    index,
    map_leaves,
    masks_by_path,
    plain,
    prefix_of,
    sizes_in,
)


class Fitting(Results):
    """The part of a Normalizer that takes in batches, and merges.

    :class:`jaxnorm.data.Normalizer` describes the arguments.
    """

    def __init__(
        self,
        axes: Axes | Mapping = 0,
        *,
        quantiles: Sequence[float] | None = None,
        **sizes: int,
    ):
        self.ranks = ranks(quantiles)
        self.axes = axes_by_path(axes)
        if not self.axes:
            raise ValueError(f"axes must name at least one leaf: got {axes!r}.")
        self.sizes = {name: index(size) for name, size in sizes.items()}
        for name in sizes:
            if not any(name in sizes_in(axes, self.sizes) for axes in self.axes.values()):
                raise TypeError(
                    f"{name!r} is neither an argument nor a name in a pattern of "
                    f"{self._described()}."
                )
        self.formula: Formula = OURS
        self.notes: tuple[str, ...] = ()
        self._state: State = EMPTY

    def update(self, batch, *, where=None, threads: int | None = None) -> Self:
        """Update the statistics with one batch.

        Args:
          batch: an array or a pytree of arrays, with the structure of the batches before it. A
            batch that raises an error changes nothing.
          where: a mask or weights for every leaf, or a mapping from paths to masks or weights. They
            broadcast against the leaf.
          threads: the number of threads that reduce the batch.

        Returns:
          self.

        Raises:
          TypeError: a leaf without numbers.
          ValueError: leaves, shapes or masks that do not fit.
        """
        leaves = self._leaves(batch)
        masks = masks_by_path(where, leaves)
        threads = os.cpu_count() or 1 if threads is None else threads
        new = {path: self._with(path, leaves, masks.get(path), threads) for path in leaves}
        structure = self._state.structure
        if structure is None:
            structure = map_leaves(lambda path, _: path if path in leaves else None, plain(batch))
        # assigned once all leaves are reduced, so that an error before leaves the state as it was
        self._state = State(new or self._state.leaves, structure, self._state.batches + 1)
        self.notes = without_counts(self.notes)
        return self

    def merge(self, other: Self) -> Self:
        """Return a Normalizer of the data of both; a Normalizer without data is the identity.

        Raises:
          TypeError: the other is no Normalizer.
          ValueError: axes, leaves or shapes differ; one has statistics without counts, or
            quantiles without the samples that they were read from.
        """
        if not isinstance(other, Fitting):
            raise TypeError(f"merge takes a Normalizer: got {type(other).__name__}.")
        if (self.axes, self.sizes) != (other.axes, other.sizes):
            raise ValueError(
                f"merged Normalizers must have the same axes: got {self._described()} and "
                f"{other._described()}."
            )
        # the one with data says how to normalize and which ranks to show
        known = self if self._state.leaves or not other._state.leaves else other
        alike = self.formula._replace(missing=other.formula.missing) == other.formula
        if self._state.leaves and other._state.leaves and not alike:
            raise ValueError(
                "merged Normalizers must divide in the same way: one computes "
                f"{self.formula.standard_in_words()}, the other "
                f"{other.formula.standard_in_words()}. Give the statistics of one to "
                "from_statistics."
            )
        merged = known._copy(self._state.merge(other._state, self.axes))
        if self._state.leaves and other._state.leaves:
            merged.notes = without_counts(merged.notes)
        return merged

    def without_data(self) -> Self:
        """Return a Normalizer of the same axes and ranks, which has taken in no batch."""
        return self._copy(EMPTY)

    # internals -----------------------------------------------------------------------------------

    def _copy(self, state: State, axes: Mapping[str, Axes] | None = None) -> Self:
        new = type(self)(axes or self.axes, quantiles=self.ranks or None, **self.sizes)
        new.formula, new.notes, new._state = self.formula, self.notes, state
        return new

    def _described(self) -> str:
        # axes for all leaves have the path of the whole tree, which a caller did not write
        axes = self.axes[""] if list(self.axes) == [""] else self.axes
        return ", ".join([repr(axes), *(f"{name}={size}" for name, size in self.sizes.items())])

    def _check_first(self, batch) -> None:
        """Refuse a state of other data, by the leaves and features of their first batch."""
        leaves = self._leaves(batch)
        try:
            for path, leaf in leaves.items():
                axes = self.axes[str(prefix_of(self.axes, path))]
                found = elements(leaf, axes, self.sizes, None, False)
                check_shape(path, self._state.leaves[path].shape, found.reduction.stats_shape)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the state to go on with must be of these batches: {error} Name another state."
            ) from None

    def _leaves(self, batch) -> dict[str, Any]:
        """Return the leaves of a batch to fit, after checking their names."""
        leaves = {
            path: leaf
            for path, leaf in flatten(batch).items()
            if prefix_of(self.axes, path) is not None
        }
        check_leaves(leaves, self.axes, self._state.leaves)
        return leaves

    def _with(self, path: str, leaves: Mapping[str, Any], where, threads: int) -> Fitted:
        """Return the statistics of a leaf after the next batch."""
        axes = self.axes[str(prefix_of(self.axes, path))]
        before = self._state.leaves.get(path)
        try:
            new = elements(leaves[path], axes, self.sizes, where, bool(self.ranks))
            if before is None:
                return first(*new, threads=threads, with_sketch=bool(self.ranks))
            check_shape(path, before.shape, new.reduction.stats_shape)
            return before.updated(*new, threads=threads)
        except TypeError as error:
            raise naming_leaf(path, with_remedy(error, leaves, path)) from None
        except ValueError as error:
            raise naming_leaf(path, error) from None
