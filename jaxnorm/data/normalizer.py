"""Normalizer: fits the statistics of a data set's features, merges, saves and applies them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import exchange, files, formats, given, progress, sharing, state
from jaxnorm.data.fitting import Fitting
from jaxnorm.data.formats.contents import Contents
from jaxnorm.data.formula import OURS, checked_missing
from jaxnorm.data.leaves import check_leaves

# The name of our own format.
OWN = "jaxnorm"


class Normalizer(Fitting):
    """Mean, deviation, minimum and maximum of each feature of a data set, to normalize by.

    Batches are pytrees of arrays: an array, or dicts, lists and tuples of arrays. They are reduced
    one by one on the host, in float64, by the corrected two-pass. So the variance is right to 1e-10
    around a mean of 1e6 deviations. It may be inf for features whose deviation is 1e150 or more.
    Fitting needs no JAX.

    Args:
      axes: the reduction axes of every leaf (ints, or a pattern such as ``"[n h w] c"``), or a
        mapping to axes from paths of leaves, or of trees that hold leaves. Leaves that the mapping
        does not name are not fitted.
      quantiles: ranks from 0 to 1, such as ``(0.01, 0.99)``, to fit quantiles as well, from samples
        of 39 KiB for each feature. The rank of a quantile is right to 0.1 %, in any order of the
        data. Masks are taken, weights are not.
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
        quantiles: Sequence[float] | None = None,
        **sizes: int,
    ) -> "Normalizer":
        """Fit a Normalizer to all batches in one pass.

        The arguments are as in the class and in :meth:`extend`.

        Raises:
          ValueError: there is no batch, and no state to resume.
        """
        new = cls(axes, quantiles=quantiles, **sizes)
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

    @classmethod
    def fit_files(cls, paths, axes: Axes | Mapping = 0, **options) -> "Normalizer":
        """Fit a Normalizer to data in files.

        :func:`jaxnorm.data.fit_files.fit_files` describes the arguments.
        """
        # by its name, as that module imports this one
        return import_module("jaxnorm.data.fit_files").fit_files(paths, axes, **options)

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
                for batch in progress.after(batches, seen, self._check_first):
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

    # files ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike, format: str | None = None) -> None:
        """Write the statistics to a file; an existing file is replaced in one step.

        Args:
          path: the file, or the folder where the format has one.
          format: the name of another library's format, such as "openpi" or "lerobot", of
            :data:`jaxnorm.data.formats.WRITABLE`. By default the file is ours, ``.safetensors`` or
            ``.json`` by its suffix, and keeps everything to the bit.

        Raises:
          ValueError: the format is unknown, or needs what is not known; the path is an address, or
            a file that holds something else than statistics.
        """
        if format in (None, OWN):
            formats.check_replaceable(Path(path))
            files.write(path, *self._saved())
            return
        self._check_fitted()
        held = exchange.to_statistics(self._state, self._ranks())
        formats.write(Path(path), held, str(format), self.notes)

    @classmethod
    def load(cls, path: str | os.PathLike, format: str | None = None) -> "Normalizer":
        """Load the statistics of a file: one of ours, equal to the bit, or of another library.

        Args:
          path: the file, or the folder where the format has one.
          format: the name of the format: "jaxnorm", or a key of
            :data:`jaxnorm.data.formats.FORMATS`. By default the file tells. Nothing is unpickled.

        Returns:
          A Normalizer with the :attr:`formula` of the other library. Its ``notes`` say what to know
          of the file.

        Raises:
          FileNotFoundError: the file does not exist.
          ValueError: the file holds something else, or is damaged.
        """
        name = formats.recognize(Path(path)) if format is None else format
        if name not in (None, OWN):
            return cls._of(formats.read(Path(path), name))
        with files.parsed(path):
            metadata, arrays = files.read(path)
            kept = metadata.get("quantiles") or None
            new = cls(files.decode(metadata["axes"]), quantiles=kept, **metadata["sizes"])
            new._state, new.formula = state.of_file(metadata, arrays)
            new.notes = tuple(map(str, metadata.get("notes", ())))
            if new._state.leaves:
                check_leaves(new._state.leaves, new.axes, new._state.leaves)
        return new

    @classmethod
    def from_object(cls, held: Any, *, without_prior: bool = False) -> "Normalizer":
        """Return a Normalizer of what a fitted object of another library holds.

        It has the ``formula`` of that library, and its ``notes`` say what to know of the object.

        Args:
          held: brax's ``RunningStatisticsState``, ``VecNormalize`` or ``RunningMeanStd`` of
            Stable-Baselines3, a wrapper of Gymnasium that normalizes, scikit-learn's
            ``StandardScaler`` or Keras's ``Normalization``; or a mapping of its attributes.
          without_prior: take out what Stable-Baselines3 and Gymnasium begin with, a count of 1e-4
            of mean 0 and variance 1. It squeezes features far from 0 for long: 101,325 ± 20 is
            normalized to a deviation of 0.2 after 100 elements, and of 0.9 after 10,000.

        Raises:
          ValueError: the object is none of these, or holds something else.

        >>> import numpy as np
        >>> from jaxnorm.data import Normalizer
        >>> seen = {"mean": np.array([2.0]), "var": np.array([4.0]), "count": 100.0001}
        >>> Normalizer.from_object(seen, without_prior=True).moments.count.tolist()
        [[100.0]]
        """
        return cls._of(formats.of_object(held, without_prior=without_prior))

    @classmethod
    def from_statistics(
        cls,
        *,
        mean=None,
        std=None,
        var=None,
        count=None,
        min=None,
        max=None,
        quantiles: Mapping[float, Any] | None = None,
        mask=None,
        missing: str = "keep",
        axes: Axes | Mapping = 0,
        **sizes: int,
    ) -> "Normalizer":
        """Return a Normalizer of known statistics.

        Each argument is an array, or a tree of arrays with the leaves of the first that is given.
        What is left out is unknown: mode "standard" needs a mean and a deviation, "min_max" the
        extremes, "quantile" two quantiles; merging needs counts.

        Args:
          mean: the mean of each feature.
          std: the biased deviation of each feature, or
          var: the biased variance.
          count: how many elements each feature had: an array, a tree, or one number for all.
          min: the smallest element of each feature.
          max: the largest element of each feature.
          quantiles: a mapping from ranks to the quantiles of each feature.
          mask: booleans, False for features that :meth:`normalize` leaves unchanged.
          missing: what :meth:`normalize` does with leaves that have no statistics: "keep" leaves
            them unchanged, "warn" does so and warns of them, "error" refuses them.
          axes: the reduction axes. With integers, arrays without the leading reduction axes get
            them, with size 1; otherwise these axes are there, with size 1.
          **sizes: sizes of split axes in patterns.

        Raises:
          TypeError: both or neither of ``std`` and ``var`` come with ``mean``.
          ValueError: a deviation, variance or count is negative, a minimum is above a maximum, or
            shapes or leaves differ.

        >>> import numpy as np
        >>> from jaxnorm.data import Normalizer
        >>> known = Normalizer.from_statistics(mean=np.array([1.0, 2.0]), std=np.array([2.0, 4.0]))
        >>> known.normalize(np.array([3.0, 2.0])).tolist()
        [1.0, 0.0]
        """
        new = cls(axes, quantiles=None, **sizes)
        columns = {"mean": mean, "std": std, "var": var, "count": count, "min": min, "max": max}
        new._state = given.state(columns, quantiles, mask, new.axes)
        new.formula = OURS._replace(missing=checked_missing(missing))
        return new

    def rename(self, names: Mapping[str, str]) -> "Normalizer":
        """Return a Normalizer whose leaves have other paths, as another library names them.

        Args:
          names: a mapping from paths of leaves to new ones; a ``/`` separates the keys of a tree.
            Leaves that it does not name keep their paths.

        Raises:
          ValueError: a path is no leaf, or two leaves would have the same one.

        >>> import numpy as np
        >>> from jaxnorm.data import Normalizer
        >>> fitted = Normalizer.fit([{"observation.state": np.ones((2, 3))}])
        >>> fitted.rename({"observation.state": "state"}).mean["state"].shape
        (1, 3)
        """
        return self._copy(*exchange.renamed(self._state, self.axes, names))

    def pad(self, sizes: int | Mapping[str, int]) -> "Normalizer":
        """Return a Normalizer with more features in its leaves, which it leaves unchanged.

        Actions of robots are padded to a common size: the new features have mean 0, deviation 1 and
        the range from -1 to 1. The result can be saved and applied, but not fitted further.

        Args:
          sizes: the size of the last axis, or a mapping to sizes from paths of leaves, or of trees
            that hold leaves.

        Raises:
          ValueError: a leaf has more features already.
        """
        self._check_fitted()
        return self._copy(given.padded(self._state, sizes, self._ranks(), self.axes))

    def share_deviation(self, *groups: Sequence) -> "Normalizer":
        """Return a Normalizer in which the features of each group have one deviation.

        It is the root of the mean of their variances, each around its own mean. The directions of
        one vector, such as u and v of a wind, keep their angles so. All else stays as it is. The
        result can be saved and applied, but not fitted further.

        Args:
          *groups: the members of each group: paths of leaves, such as ``["u10", "v10"]``, whose
            features share one by one; or features, ``("wind", 0)`` of a leaf, and ``0`` of an array
            that is no tree. Of several axes of features the first may be named alone.

        Raises:
          ValueError: a group names what is no leaf or feature, or less than two; groups overlap;
            shapes or counts in a group differ; a deviation is unknown.

        >>> import numpy as np
        >>> from jaxnorm.data import Normalizer
        >>> wind = Normalizer.from_statistics(mean=np.zeros(2), std=np.array([1.0, 7.0]))
        >>> wind.share_deviation([0, 1]).std.tolist()
        [[5.0, 5.0]]
        """
        self._check_fitted()
        return self._copy(sharing.shared(self._state, groups))

    def __repr__(self) -> str:
        given = self._state.leaves and not self.batches
        source = "given statistics" if given else f"{self._described()}: {self.batches} batches"
        return f"Normalizer({source}, leaves {sorted(self._state.leaves)})"

    # internals -----------------------------------------------------------------------------------

    @classmethod
    def _of(cls, contents: Contents) -> "Normalizer":
        new = cls()
        new._state, new.formula = exchange.to_state(contents), contents.formula
        new.notes = contents.notes
        return new

    def _saved(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Return the metadata and arrays to write to a file."""
        metadata, arrays = state.to_file(self._state, self.formula)
        own = {"axes": files.encode(self.axes), "sizes": self.sizes}
        own |= {"quantiles": self.ranks} if self.ranks else {}
        own |= {"notes": list(self.notes)} if self.notes else {}
        return own | metadata, arrays

    def _resume(self, state, begun: int) -> None:
        saved = Normalizer.load(state)
        if bool(saved.ranks) != bool(self.ranks):
            raise ValueError(
                f"the state to go on with must have been fitted with quantiles, too, or without "
                f"them: {state} has {saved.ranks or 'none'}, not {self.ranks or 'none'}."
            )
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
