"""Pieces of files with the steps for each batch: masks, weights, differences, windows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxnorm.data.differences import Differences
from jaxnorm.data.masking import Masks
from jaxnorm.data.sources import Batch, Piece, bare, masks
from jaxnorm.data.weighting import Weights
from jaxnorm.data.windows import Windows


class Step(Protocol):
    """What is done to each batch."""

    def apply(self, piece: Piece, batch: Batch) -> Batch: ...


class PreparedPiece(NamedTuple):
    """A piece, and the steps to take with its batch, one after the other."""

    piece: Piece
    steps: tuple[Step, ...]

    @property
    def path(self) -> str:
        return self.piece.path

    @property
    def size(self) -> int:
        return self.piece.size

    def read(self) -> Any:
        read = self.piece.read()
        batch = Batch(read if isinstance(read, Mapping) else {"": read}, masks(read))
        for step in self.steps:
            batch = step.apply(self.piece, batch)
        return bare(batch)


def prepared(
    found: Sequence[Piece], axes: Mapping, where: Mapping[str, str], skip_nan: bool
) -> list:
    """Return the pieces with the steps that they need; ``axes`` names the leaves to fit."""
    steps: list[Step] = []
    if where or skip_nan:
        dropped = tuple(by for by in where.values() if by not in axes)
        steps.append(Masks(tuple(where.items()), skip_nan, dropped))
    if found[0].weights:
        steps.append(Weights())
    if found[0].diff:
        steps.append(Differences())
    if found[0].horizons:
        steps.append(Windows())
    return [PreparedPiece(piece, tuple(steps)) for piece in found] if steps else list(found)
