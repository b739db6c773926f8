"""Fitting a Normalizer in Apache Beam: ``batches | beam.CombineGlobally(FitNormalizer(axes))``."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path

import apache_beam as beam

from jaxnorm.axes import Axes
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.sources import Piece, masks


class FitNormalizer(beam.CombineFn):
    """Combines batches (arrays or pytrees of them) to a Normalizer: in any order, in bundles of any size, empty ones too.

    Single examples become batches by ``beam.BatchElements()`` and ``beam.Map(np.stack)``. The arguments are those of
    :class:`jaxnorm.data.Normalizer`; ``where`` takes a batch and gives its masks.
    """

    def __init__(self, axes: Axes | Mapping = 0, *, where: Callable | None = None, **sizes: int):
        super().__init__()
        self.axes, self.where, self.sizes = axes, where, sizes

    def create_accumulator(self, *args, **kwargs) -> Normalizer:
        return Normalizer(self.axes, **self.sizes)

    def add_input(self, accumulator: Normalizer, batch, *args, **kwargs) -> Normalizer:
        return accumulator.update(batch, where=None if self.where is None else self.where(batch), threads=1)

    def merge_accumulators(self, accumulators: Iterable[Normalizer], *args, **kwargs) -> Normalizer:
        return reduce(Normalizer.merge, accumulators, self.create_accumulator())

    def extract_output(self, accumulator: Normalizer, *args, **kwargs) -> Normalizer:
        return accumulator


def fit_pieces(pieces: Sequence[Piece], empty: Normalizer) -> Normalizer:
    """The Normalizer of pieces of files, by the runner that Beam is configured for, on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "fitted.json")
        with beam.Pipeline() as pipeline:
            batches = pipeline | beam.Create(pieces) | beam.Reshuffle() | beam.Map(Piece.read)
            _ = batches | beam.CombineGlobally(FitNormalizer(empty.axes, where=masks, **empty.sizes)) | beam.Map(Normalizer.save, path)
        return Normalizer.load(path)
