"""Write what was measured as JSON that every reader takes."""

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any, *, indent: int) -> str:
    """Return JSON text in which numbers that are not finite are null.

    >>> as_json([1.5, float("nan")], indent=1).split()
    ['[', '1.5,', 'null', ']']
    """
    return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
