"""Fitting a Normalizer in Apache Beam: ``batches | beam.CombineGlobally(FitNormalizer(axes))``."""

import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path

import apache_beam as beam

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.parts import fit_piece, merge_parts, settled
from jaxnorm.data.sources import Piece


class FitNormalizer(beam.CombineFn):
    """Combines batches (arrays or pytrees of them) to a Normalizer: in any order, in bundles of any
    size, empty ones too.

    Single examples become batches by ``beam.BatchElements()`` and ``beam.Map(np.stack)``. The
    arguments are those of :class:`jaxnorm.data.Normalizer`; ``where`` takes a batch and gives its
    masks.
    """

    def __init__(self, axes: Axes | Mapping = 0, *, where: Callable | None = None, **sizes: int):
        super().__init__()
        self.axes, self.where, self.sizes = axes, where, sizes

    def create_accumulator(self, *args, **kwargs) -> Normalizer:
        return Normalizer(self.axes, **self.sizes)

    def add_input(self, mutable_accumulator: Normalizer, element, *args, **kwargs) -> Normalizer:
        where = None if self.where is None else self.where(element)
        return mutable_accumulator.update(element, where=where, threads=1)

    def merge_accumulators(self, accumulators: Iterable[Normalizer], *args, **kwargs) -> Normalizer:
        return reduce(Normalizer.merge, accumulators, self.create_accumulator())

    def extract_output(self, accumulator: Normalizer, *args, **kwargs) -> Normalizer:
        return accumulator


def fit_pieces(pieces: Sequence[Piece], empty: Normalizer) -> Normalizer:
    """The Normalizer of pieces of files, by the runner that Beam is configured for, on this
    machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fitted"
        with beam.Pipeline() as pipeline:
            parts = pipeline | beam.Create(pieces) | beam.Reshuffle() | beam.Map(fit_piece, empty)
            merged = parts | beam.CombineGlobally(partial(merge_parts, empty=empty))
            _ = merged | beam.Map(lambda part: path.write_bytes(pickle.dumps(part)))
        return settled(pickle.loads(path.read_bytes()))
