"""Normalizer: fits the statistics of a data set's features, merges, saves and applies them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import files, progress, transform
from jaxnorm.data.host.statistics import Summary
from jaxnorm.data.leaves import (
    check_leaves,
    check_shape,
    floors,
    merge_summaries,
    naming_leaf,
    summarized,
    with_remedy,
)
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


class _State(NamedTuple):
    """Everything that a batch changes, replaced as one, so that an interrupt cannot split it."""

    summaries: dict[str, Summary]
    # the tree of a batch, whose leaves are their paths, or None where a leaf is not fitted
    structure: Any
    batches: int


class Normalizer:
    """Mean, deviation, minimum and maximum of each feature of a data set, to normalize by.

    Batches are pytrees of arrays: an array, or dicts, lists and tuples of arrays. They are reduced
    one by one on the host, in float64, by the corrected two-pass. So the variance is right to 1e-10
    around a mean of 1e6 deviations. It may be inf for features whose deviation is 1e150 or more.
    Fitting needs no JAX.

    Args:
      axes: the reduction axes of every leaf (ints, or a pattern such as ``"[n h w] c"``), or a
        mapping to axes from paths of leaves, or of trees that hold leaves. Leaves that the mapping
        does not name are not fitted.
      **sizes: sizes of split axes in patterns.

    >>> import numpy as np
    >>> from jaxnorm.data import Normalizer
    >>> images = [np.full((2, 4, 4, 3), i, np.uint8) for i in (0, 2)]
    >>> rest = {"state": np.ones((2, 5)), "label": np.zeros(2)}
    >>> batches = [{"image": image, **rest} for image in images]
    >>> fitted = Normalizer.fit(batches, {"image": "[n h w] c", "state": "[n] f"})
    >>> fitted.moments["image"].mean.ravel().tolist(), fitted.max["image"].ravel().tolist()
    ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    >>> fitted.normalize({"image": np.full((4, 4, 3), 3, np.uint8)})["image"][0, 0].tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(self, axes: Axes | Mapping = 0, **sizes: int):
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
        self._state = _State({}, None, 0)

    # fitting -------------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        batches: Iterable,
        axes: Axes | Mapping = 0,
        *,
        where: Callable | None = None,
        state=None,
        every: int = 100,
        show_progress: bool = False,
        threads: int | None = None,
        **sizes: int,
    ) -> "Normalizer":
        """Fit a Normalizer to all batches in one pass.

        The arguments are as in the class and in :meth:`extend`.

        Raises:
          ValueError: there is no batch, and no state to resume.
        """
        new = cls(axes, **sizes)
        new.extend(
            batches,
            where=where,
            state=state,
            every=every,
            show_progress=show_progress,
            threads=threads,
        )
        if not new.batches:
            raise ValueError(
                "batches must hold one batch at least: there was none. Was a generator used before?"
            )
        return new

    def extend(
        self,
        batches: Iterable,
        *,
        where: Callable | None = None,
        state=None,
        every: int = 100,
        show_progress: bool = False,
        threads: int | None = None,
    ) -> "Normalizer":
        """Update the statistics with more batches, in one pass.

        Args:
          batches: any iterable of batches. If it has ``len``, the bar shows how much is left. If it
            has ``skip(n)``, a resumed fit calls it to pass over the batches that it has seen.
          where: a function from a batch to its masks, as :meth:`update` takes them:
            ``lambda batch: {"state": batch["mask"]}``.
          state: a file for the state. It is saved every ``every`` batches, every 30 seconds, at the
            end, and when an error or interrupt ends the pass. If the file exists, the pass resumes
            after the batches that it holds, and gives the same numbers as a pass without a break.
          every: the number of batches between two savings of the state.
          show_progress: show a bar, with rich.
          threads: the number of threads that reduce a batch; by default one for each CPU of the
            machine. It changes no bit.

        Returns:
          self.
        """
        progress.check(batches, where, every)
        if state is not None:
            files.writable(state)
        # a state counts all batches, also those of earlier passes, which are not in `batches`
        begun = self.batches
        if state is not None and Path(state).exists():
            self._resume(state, begun)
        seen = self.batches - begun
        total = len(batches) if isinstance(batches, Sized) else None
        due = progress.Due(every)
        try:
            with progress.shown(show_progress, total, seen) as advance:
                for batch in progress.after(batches, seen):
                    self.update(
                        batch, where=None if where is None else where(batch), threads=threads
                    )
                    # frees its memory before the next batch is read
                    del batch
                    advance()
                    if state is not None and due():
                        self.save(state)
        finally:
            # after an error or interrupt as well, so that the batches seen are not read again
            if state is not None and self.batches > begun:
                self.save(state)
        return self

    def update(self, batch, *, where=None, threads: int | None = None) -> "Normalizer":
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
        leaves = {
            path: leaf
            for path, leaf in flatten(batch).items()
            if prefix_of(self.axes, path) is not None
        }
        check_leaves(leaves, self.axes, self._state.summaries)
        masks = masks_by_path(where, leaves)
        threads = os.cpu_count() or 1 if threads is None else threads
        new = {path: self._summarized(path, leaves, masks.get(path), threads) for path in leaves}
        structure = map_leaves(lambda path, _: path if path in leaves else None, plain(batch))
        # assigned once all leaves are reduced, so that an error before leaves the state as it was
        self._state = self._merged(_State(new, structure, 1))
        return self

    def merge(self, other: "Normalizer") -> "Normalizer":
        """Return a Normalizer of the data of both; a Normalizer without data is the identity."""
        if not isinstance(other, Normalizer):
            raise TypeError(f"merge takes a Normalizer: got {type(other).__name__}.")
        if (self.axes, self.sizes) != (other.axes, other.sizes):
            raise ValueError(
                f"merged Normalizers must have the same axes: got {self._described()} and "
                f"{other._described()}."
            )
        if self._state.summaries and other._state.summaries:
            check_leaves(other._state.summaries, self.axes, self._state.summaries)
            for path, summary in other._state.summaries.items():
                check_shape(path, self._state.summaries[path], summary)
        return self._with(self._merged(other._state))

    # results -------------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """The number of batches so far."""
        return self._state.batches

    @property
    def summaries(self) -> Mapping[str, Summary]:
        """The Moments and extremes of each fitted leaf, by its path."""
        return dict(self._state.summaries)

    @property
    def moments(self) -> Any:
        """The :class:`jaxnorm.host.Moments` of each fitted leaf, in a tree like a batch.

        Named tuples and dataclasses of the batch are dicts in this tree.
        """
        return self._tree(lambda summary: summary.moments)

    @property
    def mean(self) -> Any:
        """The mean of each feature, in a tree like ``moments``."""
        return self._tree(lambda summary: summary.moments.mean)

    @property
    def std(self) -> Any:
        """The deviation of each feature, in a tree like ``moments``."""
        return self._tree(lambda summary: np.sqrt(summary.moments.var))

    @property
    def min(self) -> Any:
        """The smallest element of each feature, in a tree like ``moments``."""
        return self._tree(lambda summary: summary.min)

    @property
    def max(self) -> Any:
        """The largest element of each feature, in a tree like ``moments``."""
        return self._tree(lambda summary: summary.max)

    # applying ------------------------------------------------------------------------------------

    def normalize(
        self,
        tree,
        *,
        clip: float | None = None,
        floor: float | Mapping = 1e-6,
        floor_relative: float | Mapping = 0.0,
        dtype=None,
    ) -> Any:
        """Normalize each fitted leaf of a tree, and leave the others unchanged.

        The result is ``(x - mean) / max(deviation, floor, floor_relative * |mean|)``. The function
        is pure. JAX arrays come back as JAX arrays, also within ``jit`` and ``grad``, and NumPy
        arrays as NumPy arrays.

        Args:
          tree: a batch or a part of one, or a single example without its leading reduction axes.
          clip: the largest absolute value of the result.
          floor: the smallest deviation to divide by, since a constant feature has deviation 0. A
            mapping from paths of leaves, or of trees that hold leaves, gives each its own floor;
            leaves that it does not name have 1e-6.
          floor_relative: a floor in units of the mean's absolute value. Leaves that a mapping does
            not name have 0. With 1e-6, float32 rounding of a constant of any size is no signal.
          dtype: the dtype of the result. By default it is the leaf's dtype; for integers it is
            float32, computed from all of their digits.
        """
        clip = clip if clip is None else transform.positive("clip", clip)
        return self._map_fitted(
            transform.normalize, tree, floor, floor_relative, clip=clip, dtype=dtype
        )

    def denormalize(
        self,
        tree,
        *,
        floor: float | Mapping = 1e-6,
        floor_relative: float | Mapping = 0.0,
        dtype=None,
    ) -> Any:
        """Denormalize each fitted leaf of a tree, and leave the others unchanged.

        The result is ``y * max(deviation, floor, floor_relative * |mean|) + mean``. This undoes
        :meth:`normalize` with the same floors, but for clipping. With an integer ``dtype`` the
        result is rounded to the nearest integer.
        """
        return self._map_fitted(transform.denormalize, tree, floor, floor_relative, dtype=dtype)

    # files ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write a ``.safetensors`` or ``.json`` file; an existing file is replaced in one step."""
        files.write(path, *self._saved())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Normalizer":
        """Load a Normalizer that :meth:`save` wrote, equal to the bit.

        Raises:
          FileNotFoundError: the file does not exist.
          ValueError: the file holds something else, or is damaged.
        """
        with files.parsed(path):
            metadata, arrays = files.read(path)
            new = cls(files.decode(metadata["axes"]), **metadata["sizes"])
            structure = files.decode(metadata["structure"])
            summaries = {leaf: files.summary(arrays, leaf) for leaf in flatten(structure).values()}
            new._state = _State(summaries, structure, metadata["batches"])
        return new

    def __repr__(self) -> str:
        return (
            f"Normalizer({self._described()}: {self.batches} batches, "
            f"leaves {sorted(self._state.summaries)})"
        )

    # internals -----------------------------------------------------------------------------------

    def _with(self, state: _State) -> "Normalizer":
        new = Normalizer(self.axes, **self.sizes)
        new._state = state
        return new

    def _saved(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Return the metadata and arrays to write to a file."""
        metadata = {
            "axes": files.encode(self.axes),
            "sizes": self.sizes,
            "batches": self.batches,
            "structure": files.encode(self._state.structure),
        }
        return metadata, files.named_arrays(self._state.summaries)

    def _described(self) -> str:
        # axes for all leaves have the path of the whole tree, which a caller did not write
        axes = self.axes[""] if list(self.axes) == [""] else self.axes
        return ", ".join([repr(axes), *(f"{name}={size}" for name, size in self.sizes.items())])

    def _summarized(self, path: str, leaves: Mapping[str, Any], where, threads: int) -> Summary:
        axes = self.axes[str(prefix_of(self.axes, path))]
        try:
            new = summarized(leaves[path], axes, self.sizes, where, threads)
        except TypeError as error:
            raise naming_leaf(path, with_remedy(error, leaves, path)) from None
        except ValueError as error:
            raise naming_leaf(path, error) from None
        check_shape(path, self._state.summaries.get(path), new)
        return new

    def _merged(self, new: _State) -> _State:
        old = self._state
        both = {
            path: merge_summaries(old.summaries.get(path), summary)
            for path, summary in new.summaries.items()
        }
        structure = new.structure if old.structure is None else old.structure
        # `both` is empty if `new` is, and merging with nothing keeps the old summaries
        return _State(both or old.summaries, structure, old.batches + new.batches)

    def _tree(self, function: Callable[[Summary], Any]) -> Any:
        self._check_fitted()
        return map_leaves(
            lambda _, path: function(self._state.summaries[path]), self._state.structure
        )

    def _check_fitted(self) -> None:
        if not self._state.summaries:
            raise ValueError(
                "a Normalizer must have been fitted: no batch was taken in. Use fit or update."
            )

    def _map_fitted(self, function: Callable, tree, floor, floor_relative, **options) -> Any:
        self._check_fitted()
        summaries = self._state.summaries
        least = floors(floor, floor_relative, summaries)
        if not any(path in summaries for path in flatten(tree)):
            raise ValueError(
                f"the tree must hold a leaf that was fitted: got {sorted(flatten(tree))}, fitted "
                f"{sorted(summaries)}."
            )

        def leaf(path: str, x) -> Any:
            if path not in summaries:
                return x
            axes = self.axes[str(prefix_of(self.axes, path))]
            sizes = sizes_in(axes, self.sizes)
            try:
                return function(x, summaries[path], axes, sizes, floor=least[path], **options)
            except (TypeError, ValueError) as error:
                raise naming_leaf(path, error) from None

        return map_leaves(leaf, tree)

    def _resume(self, state, begun: int) -> None:
        saved = Normalizer.load(state)
        if (saved.axes, saved.sizes) != (self.axes, self.sizes):
            raise ValueError(
                f"the state to go on with must have the same axes: {state} has "
                f"{saved._described()}, not {self._described()}."
            )
        if saved.batches < begun:
            raise ValueError(
                f"the state to go on with must hold what is fitted already: {state} has "
                f"{saved.batches} batches of {begun}."
            )
        self._state = saved._state
