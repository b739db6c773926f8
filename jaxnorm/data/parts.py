"""What each engine does with pieces of files: fit one, merge many, and say in words what is wrong.

Errors are results here. Raised in a worker they come back as its traceback, of which the reason is
the last line.
"""

from collections.abc import Iterable
from typing import Any

from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.sources import SourceError, masks

Part = Normalizer | SourceError


def fit_piece(piece: Any, empty: Normalizer) -> Part:
    """Return the Normalizer of one piece, or why it cannot be fitted.

    A piece has a ``path`` and is ``read``. It has no type here, since Beam takes types for
    promises.
    """
    try:
        batch = piece.read()
        new = Normalizer(empty.axes, **empty.sizes)
        return new.update(batch, where=masks(batch), threads=1)
    except SourceError as error:
        return SourceError(str(error))  # without what led to it
    except (ValueError, TypeError) as error:
        return SourceError(f"{piece.path}: {error}")


def merge_parts(parts: Iterable[Part], empty: Normalizer) -> Part:
    """Return the Normalizer of all parts, or the first error among them."""
    merged = empty
    for part in parts:
        if isinstance(part, SourceError):
            return part
        merged = merged.merge(part)
    return merged


def settled(part: Part) -> Normalizer:
    """Return the Normalizer, or raise the error."""
    if isinstance(part, SourceError):
        raise part
    return part
