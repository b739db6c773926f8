"""What a Normalizer knows of a data set, and normalizes by."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import scales, transform
from jaxnorm.data.fitted import Fitted
from jaxnorm.data.formula import Formula
from jaxnorm.data.host.sketch import ranks
from jaxnorm.data.host.statistics import Summary
from jaxnorm.data.leaves import naming_leaf
from jaxnorm.data.state import State
from jaxnorm.data.trees import flatten, map_leaves, prefix_of, sizes_in


class Results:
    """The statistics of each leaf, and what normalizes by them.

    Attributes:
      axes: the reduction axes, by leaf or by a tree of leaves.
      sizes: sizes of split axes in patterns.
      ranks: the ranks of the quantiles that are fitted.
      formula: how statistics become a divisor.
      notes: sentences on the file that the statistics come from.
    """

    axes: dict[str, Axes]
    sizes: dict[str, int]
    ranks: tuple[float, ...]
    formula: Formula
    notes: tuple[str, ...]
    _state: State

    # results -------------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """The number of batches so far."""
        return self._state.batches

    @property
    def summaries(self) -> Mapping[str, Summary]:
        """The Moments and extremes of each fitted leaf, by its path."""
        return {path: leaf.summary for path, leaf in self._state.leaves.items()}

    @property
    def moments(self) -> Any:
        """The :class:`jaxnorm.host.Moments` of each fitted leaf, in a tree like a batch.

        Named tuples and dataclasses of the batch are dicts in this tree.
        """
        return self._tree_of(lambda leaf: leaf.summary.moments)

    @property
    def mean(self) -> Any:
        """The mean of each feature, in a tree like ``moments``."""
        return self._tree_of(lambda leaf: leaf.summary.moments.mean)

    @property
    def std(self) -> Any:
        """The deviation of each feature, in a tree like ``moments``."""
        return self._tree_of(lambda leaf: np.sqrt(leaf.summary.moments.var))

    @property
    def min(self) -> Any:
        """The smallest element of each feature, in a tree like ``moments``."""
        return self._tree_of(lambda leaf: leaf.summary.min)

    @property
    def max(self) -> Any:
        """The largest element of each feature, in a tree like ``moments``."""
        return self._tree_of(lambda leaf: leaf.summary.max)

    @property
    def quantiles(self) -> dict[float, Any]:
        """The quantiles of each feature, in trees like ``moments``, by their rank."""
        return {rank: self.quantile(rank) for rank in self._ranks()}

    def quantile(self, rank: float) -> Any:
        """Return the quantile of a rank from 0 to 1 of each feature, in a tree like ``moments``.

        Raises:
          ValueError: the rank is not known, as the Normalizer was fitted without quantiles or
            comes from statistics without this one.

        >>> import numpy as np
        >>> from jaxnorm.data import Normalizer
        >>> fitted = Normalizer.fit([np.arange(101.0)[:, None]], quantiles=(0.01, 0.99))
        >>> fitted.quantile(0.25).tolist()
        [[25.0]]
        """
        (rank,) = ranks((rank,))
        return self._tree_of(lambda leaf: leaf.quantile(rank))

    # applying ------------------------------------------------------------------------------------

    def normalize(
        self,
        tree,
        *,
        mode: str | Mapping = "standard",
        clip: float | Mapping | None = None,
        floor: float | Mapping | None = None,
        floor_relative: float | Mapping | None = None,
        mask=None,
        ranks: tuple[float, float] | None = None,
        dtype=None,
    ) -> Any:
        """Normalize each fitted leaf of a tree, and leave the others unchanged.

        ``from_statistics(missing=...)``, and files of libraries that do so, warn of others or
        refuse them. Statistics of leaves that the tree does not hold are not used.

        In mode "standard" the result is ``(x - mean) / max(deviation, floor, floor_relative *
        |mean|)``. In modes "min_max" and "quantile" it is ``2 * (x - low) / (high - low) - 1``,
        from -1 at the minimum or lower quantile to 1 at the maximum or upper quantile; where the
        width is below the floor, it is ``2 * (x - (low + high) / 2) / floor``, so a constant
        feature becomes 0. Statistics that were loaded from a file of another library are
        used by the formula of that library instead (:attr:`formula`). The function is pure. JAX
        arrays come back as JAX arrays, also within ``jit`` and ``grad``, and NumPy arrays as NumPy
        arrays.

        Args:
          tree: a batch or a part of one, or a single example without its leading reduction axes.
          mode: "standard", "min_max" or "quantile", or a mapping from paths of leaves, or of trees
            that hold leaves, to modes. Leaves that it does not name have "standard".
          clip: the largest absolute value of the result, or a mapping.
          floor: the smallest deviation or width to divide by, since a constant feature has
            deviation 0; by default 1e-6. A mapping gives each leaf its own floor; leaves that it
            does not name have the default.
          floor_relative: a floor of the deviation in units of the mean's absolute value, or a
            mapping; by default 0. With 1e-6, float32 rounding of a constant of any size is no
            signal.
          mask: booleans that broadcast to the statistics, in an array or a list, or a mapping to
            them: features where it is False stay as they are.
          ranks: the ranks of the quantiles that become -1 and 1 in mode "quantile"; by default the
            lowest and the highest that were fitted.
          dtype: the dtype of the result. By default it is the leaf's dtype; for integers it is
            float32, computed from all of their digits.

        Raises:
          TypeError: a dtype that is no number.
          ValueError: statistics that a mode needs are unknown; shapes that do not fit.
        """
        chosen = self._scales(mode, clip, floor, floor_relative, mask, ranks)
        return self._map_fitted(transform.normalize, tree, chosen, dtype)

    def denormalize(
        self,
        tree,
        *,
        mode: str | Mapping = "standard",
        floor: float | Mapping | None = None,
        floor_relative: float | Mapping | None = None,
        mask=None,
        ranks: tuple[float, float] | None = None,
        dtype=None,
    ) -> Any:
        """Denormalize each fitted leaf of a tree, and leave the others unchanged.

        This undoes :meth:`normalize` with the same mode, floors, mask and ranks, but for clipping.
        In mode "standard" it is ``y * max(deviation, floor, floor_relative * |mean|) + mean``. With
        an integer ``dtype`` the result is rounded to the nearest integer.
        """
        chosen = self._scales(mode, None, floor, floor_relative, mask, ranks)
        return self._map_fitted(transform.denormalize, tree, chosen, dtype)

    # internals -----------------------------------------------------------------------------------

    def _ranks(self) -> list[float]:
        known = [set(leaf.given) for leaf in self._state.leaves.values() if leaf.given]
        return sorted(set(self.ranks).union(*known))

    def _tree_of(self, function: Callable[[Fitted], Any]) -> Any:
        self._check_fitted()
        return map_leaves(lambda _, path: self._of_leaf(path, function), self._state.structure)

    def _of_leaf(self, path: str, function: Callable[[Fitted], Any]) -> Any:
        try:
            return function(self._state.leaves[path])
        except ValueError as error:
            raise naming_leaf(path, error) from None

    def _check_fitted(self) -> None:
        if not self._state.leaves:
            raise ValueError(
                "a Normalizer must have been fitted: no batch was taken in. Use fit or update."
            )

    def _scales(self, mode, clip, floor, floor_relative, mask, pair) -> Callable[[str], Any]:
        """Return a function from the path of a leaf to its scale."""
        self._check_fitted()
        if pair is None and len(known := self._ranks()) > 1:
            pair = known[0], known[-1]
        chosen = scales.choices(self._state.leaves, mode, clip, floor, floor_relative, mask, pair)
        return lambda path: scales.scale(self._state.leaves[path], self.formula, chosen[path])

    def _map_fitted(self, function: Callable, tree, chosen: Callable, dtype) -> Any:
        self._report_missing(list(flatten(tree)))

        def leaf(path: str, x) -> Any:
            if path not in self._state.leaves:
                return x
            axes = self.axes[str(prefix_of(self.axes, path))]
            try:
                return function(x, chosen(path), axes, sizes_in(axes, self.sizes), dtype=dtype)
            except (TypeError, ValueError) as error:
                raise naming_leaf(path, error) from None

        return map_leaves(leaf, tree)

    def _report_missing(self, paths: list[str]) -> None:
        """Warn of leaves without statistics, or refuse them, as the formula says."""
        lacking = [path for path in paths if path not in self._state.leaves]
        missing = self.formula.missing
        if lacking == paths and missing != "warn":
            raise ValueError(
                f"the tree must hold a leaf that was fitted: got {sorted(paths)}, fitted "
                f"{sorted(self._state.leaves)}."
            )
        if lacking and missing != "keep":
            said = f"{', '.join(map(repr, lacking))} {'has' if len(lacking) == 1 else 'have'} none"
            if missing == "error":
                raise ValueError(f"every leaf must have statistics: {said}. Leave it out.")
            # the caller of normalize or denormalize
            warnings.warn(f"leaves without statistics stay unchanged: {said}.", stacklevel=4)
