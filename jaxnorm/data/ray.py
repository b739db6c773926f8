"""Fitting a Normalizer to a Ray data set: ``fit(dataset, axes)``, or
``dataset.aggregate(FitNormalizer(axes))``.
"""

from collections.abc import Callable, Mapping, Sequence

import ray
from ray.data.aggregate import AggregateFn
from ray.data.block import BlockAccessor

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.parts import fit_piece, merge_parts, settled
from jaxnorm.data.sources import Piece

NAME = "normalizer"


class FitNormalizer(AggregateFn):
    """Aggregates blocks, whose columns are the leaves, to a Normalizer, in the column
    ``"normalizer"``.

    The arguments are those of :class:`jaxnorm.data.Normalizer`; ``where`` takes a batch, a dict of
    arrays, and gives its masks.
    """

    def __init__(self, axes: Axes | Mapping = 0, *, where: Callable | None = None, **sizes: int):
        def accumulate(fitted: Normalizer, block) -> Normalizer:
            batch = BlockAccessor.for_block(block).to_batch_format("numpy")
            if not len(next(iter(batch.values()), ())):
                return fitted
            return fitted.update(batch, where=None if where is None else where(batch), threads=1)

        super().__init__(
            init=lambda _: Normalizer(axes, **sizes),
            merge=Normalizer.merge,
            accumulate_block=accumulate,
            finalize=lambda fitted: fitted,
            name=NAME,
        )


def fit(
    dataset: ray.data.Dataset,
    axes: Axes | Mapping = 0,
    *,
    where: Callable | None = None,
    **sizes: int,
) -> Normalizer:
    """The Normalizer of a data set: each column that the axes name is a leaf. One without rows
    gives an empty Normalizer.
    """
    found = dataset.aggregate(FitNormalizer(axes, where=where, **sizes))
    return Normalizer(axes, **sizes) if found is None else found[NAME]


def fit_pieces(pieces: Sequence[Piece], empty: Normalizer) -> Normalizer:
    """The Normalizer of pieces of files, a task for each, which Ray tries again where its worker
    dies.
    """
    fit_one = ray.remote(fit_piece)
    parts = map(ray.get, [fit_one.remote(piece, empty) for piece in pieces])
    return settled(merge_parts(parts, empty))
