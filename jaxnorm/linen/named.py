"""Modules by the name of their norm."""

import sys
from typing import Any

from flax import linen as nn

from jaxnorm.norms import table

__all__ = ["norm"]


def norm(name: str, /, **options: Any) -> nn.Module:
    """Return a new module of the norm ``name``.

    Args:
      name: a name of the table that :func:`jaxnorm.available_norms` returns.
      **options: the arguments of its class, for example ``epsilon``.

    Returns:
      An unbound linen module. Within a compact module its parameters have the name of its class,
      as if you had written the class.

    Raises:
      TypeError: an option that the class does not take.
      ValueError: an unknown name, or a norm of yours that has no linen module.

    >>> from jaxnorm import linen as nn
    >>> type(nn.norm("rms", epsilon=1e-5)).__name__
    'RMSNorm'
    """
    return table.make("linen", sys.modules["jaxnorm.linen"], name, **options)
