"""Bring weights from other frameworks, and back.

:func:`load` puts the arrays of another framework's file into a model, :func:`save` returns a
model's arrays by the other framework's names, and :func:`match` shows what belongs together.
"""

from jaxnorm.interop.matching import Matching
from jaxnorm.interop.transfer import load, match, save

__all__ = ["Matching", "load", "match", "save"]
