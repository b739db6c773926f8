"""Numbers among arguments, where JAX may not be imported."""

from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Return whether a value is a real number; True and False are mistakes rather than numbers.

    >>> is_number(0.5), is_number(np.float32(1)), is_number(True), is_number("1")
    (True, True, False, False)
    """
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
