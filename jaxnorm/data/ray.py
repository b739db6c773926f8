"""Fit a Normalizer to a Ray data set.

Call ``fit(dataset, axes)``, or ``dataset.aggregate(FitNormalizer(axes))``.
"""

from collections.abc import Callable, Mapping, Sequence

import ray
from ray.data.aggregate import AggregateFn
from ray.data.block import BlockAccessor

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.parts import fit_piece, merge_parts, value_or_raise
from jaxnorm.data.sources import Piece

NAME = "normalizer"


class FitNormalizer(AggregateFn):
    """Aggregate blocks into a Normalizer, in the column ``"normalizer"``.

    The columns of blocks are the leaves. The arguments are as in
    :class:`jaxnorm.data.Normalizer`. ``where`` takes a batch, a dict of arrays, and returns its
    masks.
    """

    def __init__(
        self,
        axes: Axes | Mapping = 0,
        *,
        where: Callable | None = None,
        quantiles: Sequence[float] | None = None,
        **sizes: int,
    ):
        def accumulate(fitted: Normalizer, block) -> Normalizer:
            batch = BlockAccessor.for_block(block).to_batch_format("numpy")
            # Ray also passes blocks without rows
            if not len(next(iter(batch.values()), ())):
                return fitted
            return fitted.update(batch, where=None if where is None else where(batch), threads=1)

        super().__init__(
            init=lambda _: Normalizer(axes, quantiles=quantiles, **sizes),
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
    quantiles: Sequence[float] | None = None,
    **sizes: int,
) -> Normalizer:
    """Fit a Normalizer to a data set, whose columns are the leaves.

    Only columns that ``axes`` name are fitted. A data set without rows gives an empty Normalizer.
    """
    found = dataset.aggregate(FitNormalizer(axes, where=where, quantiles=quantiles, **sizes))
    # Ray gives None for a data set without rows
    return Normalizer(axes, quantiles=quantiles, **sizes) if found is None else found[NAME]


def fit_pieces(pieces: Sequence[Piece], empty: Normalizer) -> Normalizer:
    """Fit a Normalizer to pieces of files, in a task for each piece.

    Ray repeats a task whose worker dies.
    """
    fit_one = ray.remote(fit_piece)
    # the list starts all tasks before the first result is awaited
    parts = map(ray.get, [fit_one.remote(piece, empty) for piece in pieces])
    return value_or_raise(merge_parts(parts, empty))
