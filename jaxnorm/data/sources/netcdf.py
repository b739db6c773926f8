"""Reader of NetCDF files, opened by xarray with h5netcdf, netCDF4 or scipy."""

import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import numpy as np

from jaxnorm.data.sources import decoding
from jaxnorm.data.sources.addresses import SourceError, local, opened_file
from jaxnorm.data.sources.chunked import ChunkedReader
from jaxnorm.data.sources.decoding import Decoded

# What xarray would do to a variable. `decode_cf=False` says it all, but open_groups (xarray 2026.9)
# decodes all the same.
DECODERS = (
    *("decode_cf", "mask_and_scale", "decode_times", "decode_timedelta"),
    *("decode_coords", "concat_characters"),
)


class NetCdf(ChunkedReader):
    """Reader of variables, decoded; those in groups are named by their paths."""

    def __init__(self, path: str):
        found = _variables(path)
        arrays = {
            name: Decoded(Stored(variable), _chunks(variable), decoding.attributes(variable.attrs))
            for name, variable in found.items()
        }
        self.arrays = arrays
        dims = {name: tuple(map(str, variable.dims)) for name, variable in found.items()}
        coordinates = decoding.coordinates(
            dims, {name: variable.attrs for name, variable in found.items()}
        )
        self.leaves = {
            name: array.leaf._replace(is_coordinate=name in coordinates, dims=dims[name])
            for name, array in arrays.items()
        }


class Stored:
    """A variable that is read from its file only where it is sliced."""

    def __init__(self, variable: Any):
        self.variable, self.shape, self.dtype = variable, variable.shape, variable.dtype

    def __getitem__(self, region: Any) -> np.ndarray:
        return self.variable[region].values


def _chunks(variable: Any) -> tuple[int, ...]:
    # a variable without chunks can be cut between any rows
    return variable.encoding.get("chunksizes") or (1, *variable.shape[1:])[: variable.ndim]


def _variables(path: str) -> Mapping[str, Any]:
    import xarray

    engine = _engine(path)
    options: dict[str, Any] = {"engine": engine, "cache": False} | dict.fromkeys(DECODERS, False)
    if engine == "scipy":
        return _of_scipy(path, options)
    found = local(path)
    if found is None and engine == "netcdf4":
        must = "must be a local file, as netCDF4 reads no addresses"
        raise SourceError(f"{path} {must}: install h5netcdf, or copy the file.")
    if engine == "h5netcdf":
        # files that other programs wrote may lack names of dimensions
        options["phony_dims"] = "access"
    groups = xarray.open_groups(opened_file(path) if found is None else str(found), **options)
    return {
        f"{group}/{name}".lstrip("/"): variable
        for group, members in groups.items()
        for name, variable in members.variables.items()
    }


def _of_scipy(path: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    import xarray

    with ExitStack() as stack:
        found = str(local(path) or "")
        if not found:
            # scipy maps local files, and reads all of a remote one at once
            copy = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".nc"))
            with opened_file(path) as file:
                shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            found = copy.name
        # scipy warns of the maps of a damaged file that it leaves open
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            # the variables are mapped here, and stay when the copy is removed
            opened = xarray.open_dataset(found, **options)
            return {str(name): variable for name, variable in opened.variables.items()}
        except Exception as error:
            said = f"{type(error).__name__}, {error}"
        raise ValueError(said)


def _engine(path: str) -> str:
    """Return xarray's name for the library that reads a file, by the file's first bytes."""
    with opened_file(path) as file:
        first = file.read(4)
    if first in (b"CDF\1", b"CDF\2"):
        return "scipy"
    if first not in (b"CDF\5", b"\x89HDF"):
        raise ValueError("it begins as no NetCDF file does")
    if first == b"\x89HDF" and find_spec("h5netcdf") is not None:
        return "h5netcdf"
    if find_spec("netCDF4") is None:
        # of the two only netCDF4 reads CDF5
        name = "h5netcdf" if first == b"\x89HDF" else "netCDF4"
        raise ModuleNotFoundError(f"{path} needs {name}", name=name)
    return "netcdf4"
