"""The work of every engine on pieces of files: fit one, merge many, and report errors in words.

Errors are results here. An error that a worker raises comes back as a traceback, whose last line
is the reason.
"""

from collections.abc import Iterable
from typing import Any

from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.sources import SourceError, masks

Part = Normalizer | SourceError


def fit_piece(piece: Any, empty: Normalizer) -> Part:
    """Fit a Normalizer to one piece, and return it or the error.

    A piece has ``path`` and ``read``. The argument has no type, since pieces have two classes and
    Beam checks annotations.
    """
    try:
        batch = piece.read()
        new = empty.without_data()
        # one thread, since an engine fits many pieces at a time
        return new.update(batch, where=masks(batch), threads=1)
    except SourceError as error:
        # a new error, without the cause and the traceback, which would be sent with it
        return SourceError(str(error))
    except (ValueError, TypeError) as error:
        return SourceError(f"{piece.path}: {error}")


def merge_parts(parts: Iterable[Part], empty: Normalizer) -> Part:
    """Merge parts into one Normalizer, or return the first error among them."""
    merged = empty
    for part in parts:
        if isinstance(part, SourceError):
            return part
        merged = merged.merge(part)
    return merged


def value_or_raise(part: Part) -> Normalizer:
    """Return the Normalizer, or raise the error."""
    if isinstance(part, SourceError):
        raise part
    return part
