"""The statistics of a data set's features: fitted batch by batch, merged, saved, applied."""

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
    joined,
    of_leaf,
    summarized,
    way_out,
)
from jaxnorm.data.trees import (
    axes_by_path,
    flatten,
    index,
    map_leaves,
    masks_by_path,
    of_prefix,
    plain,
    sizes_in,
)


class _State(NamedTuple):
    """What batches change, all at once: an interrupt leaves the old or the new one."""

    summaries: dict[str, Summary]
    # the tree of the batches, with its paths as leaves, or None where nothing is fitted
    structure: Any
    batches: int


class Normalizer:
    """Mean, deviation, minimum and maximum of each feature of a data set, and normalizing by them.

    Batches are pytrees of arrays: an array, or dicts, lists and tuples of them. They are reduced
    one by one on the host, in float64 and by the corrected two-pass, so that the variance is right
    to 1e-10 about a mean of 1e6 deviations; that of features that deviate by 1e150 and more may be
    inf. Fitting needs no JAX.

    Args:
      axes: the reduction axes of every leaf (ints, or a pattern such as ``"[n h w] c"``), or a
        mapping from paths of leaves, or of the trees that hold them, to axes; leaves that it does
        not name are left as they are.
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
        """The Normalizer of all batches, in one pass. The arguments are those of the class and of
        :meth:`extend`.

        Raises:
          ValueError: there is no batch, and no state to go on with.
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
        """Goes on with further batches, in one pass.

        Args:
          batches: any iterable of batches. Where it has ``len`` the bar shows how much is left;
            where it has ``skip(n)``, that passes over batches that a resumed fit has seen already.
          where: from a batch to its masks, as :meth:`update` takes them: ``lambda batch: {"state":
            batch["mask"]}``.
          state: a file for the state, saved every ``every`` batches, every 30 seconds, at the end,
            and when an error or interrupt ends the pass. If it is there already, the pass goes on
            after the batches that it holds, and gives the same numbers.
          every: how often, in batches.
          show_progress: show a bar, by rich.
          threads: how many reduce a batch; those of the machine by default. Their number changes no
            bit.

        Returns:
          self.
        """
        progress.check(batches, where, every)
        if state is not None:
            files.writable(state)
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
                    del batch  # before the next one is read
                    advance()
                    if state is not None and due():
                        self.save(state)
        finally:
            if state is not None and self.batches > begun:
                self.save(state)
        return self

    def update(self, batch, *, where=None, threads: int | None = None) -> "Normalizer":
        """Takes in one batch.

        Args:
          batch: an array or a pytree of arrays, of the structure of those before it. One that
            raises changes nothing.
          where: a mask or weights for every leaf, or a mapping from paths to them; they broadcast
            against the leaf.
          threads: how many reduce it.

        Returns:
          self.

        Raises:
          TypeError: a leaf that holds no numbers.
          ValueError: leaves, shapes or masks that do not fit.
        """
        leaves = {
            path: leaf
            for path, leaf in flatten(batch).items()
            if of_prefix(self.axes, path) is not None
        }
        check_leaves(leaves, self.axes, self._state.summaries)
        masks = masks_by_path(where, leaves)
        threads = os.cpu_count() or 1 if threads is None else threads
        new = {path: self._summarized(path, leaves, masks.get(path), threads) for path in leaves}
        structure = map_leaves(lambda path, _: path if path in leaves else None, plain(batch))
        self._state = self._joined(_State(new, structure, 1))
        return self

    def merge(self, other: "Normalizer") -> "Normalizer":
        """A new Normalizer, of the data of both; one without data is the identity."""
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
        return self._with(self._joined(other._state))

    # what was found ------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """How many batches were taken in."""
        return self._state.batches

    @property
    def summaries(self) -> Mapping[str, Summary]:
        """Moments and extremes of each leaf that is fitted, by its path."""
        return dict(self._state.summaries)

    @property
    def moments(self) -> Any:
        """:class:`jaxnorm.host.Moments` of each leaf that is fitted, in a tree as of a batch, named
        tuples and dataclasses as dicts.
        """
        return self._tree(lambda summary: summary.moments)

    @property
    def mean(self) -> Any:
        """The mean of each feature, in such a tree."""
        return self._tree(lambda summary: summary.moments.mean)

    @property
    def std(self) -> Any:
        """The deviation of each feature, in such a tree."""
        return self._tree(lambda summary: np.sqrt(summary.moments.var))

    @property
    def min(self) -> Any:
        """The smallest element of each feature, in such a tree."""
        return self._tree(lambda summary: summary.min)

    @property
    def max(self) -> Any:
        """The largest element of each feature, in such a tree."""
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
        """Return the tree with ``(x - mean) / max(deviation, floor, floor_relative * |mean|)`` for
        each fitted leaf.

        The other leaves stay as they are.

        A pure function: JAX arrays come back as JAX arrays, within ``jit`` and ``grad`` too, NumPy
        arrays as NumPy arrays.

        Args:
          tree: a batch or a part of one; a single example, without its leading reduction axes, too.
          clip: the largest absolute value of the result.
          floor: the smallest deviation to divide by; that of a constant feature is 0. A mapping
            from paths of leaves, or of the trees that hold them, gives each its own; 1e-6 for the
            others.
          floor_relative: the same in units of the mean's absolute value, 0 for leaves that a
            mapping does not name. 1e-6 takes the rounding of float32 about a constant of any size
            for no signal.
          dtype: of the result: that of the leaf by default, and float32 of integers, whose digits
            all count.
        """
        clip = clip if clip is None else transform.positive("clip", clip)
        return self._applied(
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
        """Return the tree with ``y * max(deviation, floor, floor_relative * |mean|) + mean`` for
        each fitted leaf.

        It undoes :meth:`normalize` with the same floors, but for clipping. An integer ``dtype``
        gets the nearest.
        """
        return self._applied(transform.denormalize, tree, floor, floor_relative, dtype=dtype)

    # files ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Writes a ``.safetensors`` or ``.json`` file, replacing what is there in one step."""
        files.write(path, *self._saved())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Normalizer":
        """Reads what :meth:`save` wrote, equal to the bit.

        Raises:
          FileNotFoundError: nothing is there.
          ValueError: the file holds something else, or is damaged.
        """
        with files.parsed(path):
            facts, arrays = files.read(path)
            new = cls(files.decode(facts["axes"]), **facts["sizes"])
            structure = files.decode(facts["structure"])
            summaries = {leaf: files.summary(arrays, leaf) for leaf in flatten(structure).values()}
            new._state = _State(summaries, structure, facts["batches"])
        return new

    def __repr__(self) -> str:
        return (
            f"Normalizer({self._described()}: {self.batches} batches, "
            f"leaves {sorted(self._state.summaries)})"
        )

    # within --------------------------------------------------------------------------------------

    def _with(self, state: _State) -> "Normalizer":
        new = Normalizer(self.axes, **self.sizes)
        new._state = state
        return new

    def _saved(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Return facts and arrays for a file."""
        facts = {
            "axes": files.encode(self.axes),
            "sizes": self.sizes,
            "batches": self.batches,
            "structure": files.encode(self._state.structure),
        }
        return facts, files.named_arrays(self._state.summaries)

    def _described(self) -> str:
        axes = self.axes[""] if list(self.axes) == [""] else self.axes
        return ", ".join([repr(axes), *(f"{name}={size}" for name, size in self.sizes.items())])

    def _summarized(self, path: str, leaves: Mapping[str, Any], where, threads: int) -> Summary:
        axes = self.axes[str(of_prefix(self.axes, path))]
        try:
            new = summarized(leaves[path], axes, self.sizes, where, threads)
        except TypeError as error:
            raise of_leaf(path, way_out(error, leaves, path)) from None
        except ValueError as error:
            raise of_leaf(path, error) from None
        check_shape(path, self._state.summaries.get(path), new)
        return new

    def _joined(self, new: _State) -> _State:
        old = self._state
        both = {
            path: joined(old.summaries.get(path), summary)
            for path, summary in new.summaries.items()
        }
        structure = new.structure if old.structure is None else old.structure
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

    def _applied(self, function: Callable, tree, floor, floor_relative, **options) -> Any:
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
            axes = self.axes[str(of_prefix(self.axes, path))]
            sizes = sizes_in(axes, self.sizes)
            try:
                return function(x, summaries[path], axes, sizes, floor=least[path], **options)
            except (TypeError, ValueError) as error:
                raise of_leaf(path, error) from None

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
