"""Reader of Zarr arrays and groups, decoded by xarray."""

import base64
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxnorm.data.sources import decoding
from jaxnorm.data.sources.addresses import SourceError, is_folder, is_web, local, remote
from jaxnorm.data.sources.chunked import ChunkedReader
from jaxnorm.data.sources.decoding import Decoded
from jaxnorm.data.sources.readers import ZARR_METADATA


class Zarr(ChunkedReader):
    def __init__(self, path: str):
        root = _opened(path)
        found = {"": root} if hasattr(root, "chunks") else dict(_members(root))
        if not found and is_web(path):
            must = f"{path} must have consolidated metadata, as it is no folder that can be listed"
            raise SourceError(f"{must}: its metadata names no array.")
        arrays = {
            name: Decoded(array, array.chunks, _attributes(array)) for name, array in found.items()
        }
        self.arrays = arrays
        dims = {name: _dimensions(array) for name, array in found.items()}
        coordinates = decoding.coordinates(
            dims, {name: array.attrs.asdict() for name, array in found.items()}
        )
        self.leaves = {
            name: array.leaf._replace(is_coordinate=name in coordinates, dims=dims[name])
            for name, array in arrays.items()
        }


def _dimensions(array) -> tuple[str, ...]:
    """Return the names of an array's axes, as xarray writes them."""
    format_3 = getattr(array.metadata, "dimension_names", None)
    names = tuple(format_3 or array.attrs.get("_ARRAY_DIMENSIONS", ()))
    return names if None not in names else ()


def _attributes(array) -> dict[str, Any]:
    """Return the attributes that say how numbers are packed and which elements are missing.

    An array's own fill value counts as a number. It means a missing element only if it is NaN, or
    if xarray wrote it instead of ``_FillValue`` (format 2).
    """
    if array.dtype.kind not in "biuf":
        return {}
    given = array.attrs.asdict()
    found = decoding.attributes(given)
    # in format 3 xarray writes a float's fill value as base64 of a float64's bytes
    if isinstance(text := found.get("_FillValue"), str) and array.dtype.kind == "f":
        (found["_FillValue"],) = struct.unpack("<d", base64.b64decode(text))
    fill = array.fill_value
    of_xarray = array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in given
    if fill is not None and np.isnan(fill):
        # an attribute may name another fill value, which stays: NaN is masked anyway
        found.setdefault("_FillValue", fill)
    elif fill is not None and of_xarray:
        found["_FillValue"] = fill
    return found


def _opened(path: str) -> Any:
    import zarr

    if not is_web(path) and not is_folder(path):
        raise SourceError(f"{path} must be a folder, as Zarr writes it: it is a file.")
    if (found := local(path)) is not None:
        store: Any = str(found)
    else:
        from fsspec import FSMap

        system, inside = remote(path)
        store = zarr.storage.FsspecStore.from_mapper(FSMap(inside, system), read_only=True)
    try:
        return zarr.open(store, mode="r")
    except FileNotFoundError:
        raise SourceError(
            f"{path} must be a Zarr: it holds no {', no '.join(ZARR_METADATA)}."
        ) from None


def _members(group, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, array in sorted(group.arrays()):
        yield prefix + name, array
    for name, inner in sorted(group.groups()):
        yield from _members(inner, f"{prefix}{name}/")
