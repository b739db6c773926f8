"""Fit a Normalizer in Apache Beam: ``batches | beam.CombineGlobally(FitNormalizer(axes))``."""

import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path

import apache_beam as beam

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.parts import fit_piece, merge_parts, value_or_raise
from jaxnorm.data.sources import Piece


class FitNormalizer(beam.CombineFn):
    """Combine batches (arrays, or pytrees of arrays) into a Normalizer.

    Batches may come in any order and in bundles of any size, also empty ones. To make batches of
    single examples, use ``beam.BatchElements()`` and ``beam.Map(np.stack)``. The arguments are as
    in :class:`jaxnorm.data.Normalizer`. ``where`` takes a batch and returns its masks.
    """

    def __init__(
        self,
        axes: Axes | Mapping = 0,
        *,
        where: Callable | None = None,
        quantiles: Sequence[float] | None = None,
        **sizes: int,
    ):
        super().__init__()
        self.axes, self.where, self.quantiles, self.sizes = axes, where, quantiles, sizes

    def create_accumulator(self, *args, **kwargs) -> Normalizer:
        return Normalizer(self.axes, quantiles=self.quantiles, **self.sizes)

    def add_input(self, mutable_accumulator: Normalizer, element, *args, **kwargs) -> Normalizer:
        where = None if self.where is None else self.where(element)
        return mutable_accumulator.update(element, where=where, threads=1)

    def merge_accumulators(self, accumulators: Iterable[Normalizer], *args, **kwargs) -> Normalizer:
        return reduce(Normalizer.merge, accumulators, self.create_accumulator())

    def extract_output(self, accumulator: Normalizer, *args, **kwargs) -> Normalizer:
        return accumulator


def fit_pieces(pieces: Sequence[Piece], empty: Normalizer) -> Normalizer:
    """Fit a Normalizer to pieces of files on this machine, with the runner that Beam is set to."""
    # a pipeline returns no values, so the result comes back in a file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fitted"
        with beam.Pipeline() as pipeline:
            # without Reshuffle Beam would fuse the steps, and one worker would fit all pieces
            parts = pipeline | beam.Create(pieces) | beam.Reshuffle() | beam.Map(fit_piece, empty)
            merged = parts | beam.CombineGlobally(partial(merge_parts, empty=empty))
            _ = merged | beam.Map(lambda part: path.write_bytes(pickle.dumps(part)))
        return value_or_raise(pickle.loads(path.read_bytes()))
