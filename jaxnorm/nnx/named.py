"""Modules by the name of their norm."""

import sys
from typing import Any

from flax import nnx

from jaxnorm.norms import table

__all__ = ["norm"]


def norm(name: str, /, num_features: int, *, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
    """Return a new module of the norm ``name``.

    Args:
      name: a name of the table that :func:`jaxnorm.available_norms` returns.
      num_features: the number of features.
      rngs: random number generators for the initializers.
      **options: the other arguments of its class, for example ``epsilon``.

    Returns:
      An nnx module.

    Raises:
      TypeError: an option that the class does not take.
      ValueError: an unknown name, or a norm of yours that has no nnx module.

    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> type(nnx.norm("rms", 8, rngs=Rngs(0), epsilon=1e-5)).__name__
    'RMSNorm'
    """
    return table.make("nnx", sys.modules["jaxnorm.nnx"], name, num_features, rngs=rngs, **options)
