"""Packed numbers and missing elements by the Climate and Forecast (CF) conventions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.data.sources.chunked import Chunked
from jaxnorm.data.sources.readers import Cut, Leaf, leaf_of

# Attributes of the conventions.
PACKED = ("scale_factor", "add_offset", "_Unsigned")
MISSING = ("_FillValue", "missing_value")


def attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that say how numbers are packed and which elements are missing."""
    return {name: given[name] for name in PACKED + MISSING if given.get(name) is not None}


def coordinates(
    dims: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, Any]]
) -> set[str]:
    """Return the names of the arrays that hold positions of others.

    These are arrays along the dimension of their own name, and those that others name as their
    coordinates or bounds. The arguments are the dimensions and attributes of all arrays by name.

    >>> sorted(
    ...     coordinates(
    ...         {"t": ["time", "x"], "time": ["time"], "span": ["time", "two"]},
    ...         {"t": {}, "time": {"bounds": "span"}, "span": {}},
    ...     )
    ... )
    ['span', 'time']
    """
    named = {name for name, own in dims.items() if list(own) == [name.rpartition("/")[2]]}
    for name, given in attributes.items():
        group = name[: name.rfind("/") + 1]
        for attribute in ("coordinates", "bounds", "climatology"):
            named |= {f"{group}{other}" for other in str(given.get(attribute, "")).split()}
    return named & dims.keys()


class Decoded(Chunked):
    """An array in chunks whose attributes say how its numbers are decoded."""

    def __init__(self, array: Any, chunks: tuple[int, ...], attributes: Mapping[str, Any]):
        super().__init__(array, chunks)
        self.attributes = dict(attributes)
        self.leaf = leaf_of(tuple(array.shape), array.dtype)
        if self.attributes.keys() & set(PACKED):
            self.leaf = Leaf(self.leaf.shape, "float64", self.leaf.is_number)

    def read(self, axis: int, cut: Cut) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the decoded numbers, and a mask of the elements that are not fill values."""
        raw = self.raw(axis, cut)
        if not self.attributes:
            return raw, None
        from xarray import Variable
        from xarray.conventions import decode_cf_variable

        packed = Variable([f"axis {axis}" for axis in range(raw.ndim)], raw, self.attributes)
        values = decode_cf_variable("", packed, decode_times=False).values
        missing = np.isnan(values) if self.attributes.keys() & set(MISSING) else np.zeros(1, bool)
        if not self.attributes.keys() & set(PACKED):
            # xarray turns integers with fill values into floats, which lose digits
            values = raw
        return values, ~missing if missing.any() else None
