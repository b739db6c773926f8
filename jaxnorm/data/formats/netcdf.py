"""NetCDF files, read and written by xarray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats.contents import FormatError


def load(path: Path) -> Any:
    """Return the xarray.Dataset in a file."""
    xarray = _xarray(path)
    head = path.read_bytes()[:4]
    # NetCDF 4 is HDF5
    engine = {b"\x89HDF": "h5netcdf", b"CDF\x01": "scipy", b"CDF\x02": "scipy"}.get(head)
    if engine is None:
        raise FormatError(f"{path} must hold NetCDF: it is none, or damaged.")
    _check_engine(path, xarray, engine)
    try:
        return xarray.load_dataset(path, engine=engine, decode_times=False)
    except Exception as error:
        # the readers raise errors of any type at damaged bytes
        said = f"{type(error).__name__}, {str(error).partition(chr(10))[0][:120].rstrip('.')}"
        raise FormatError(f"{path} must hold NetCDF: it may be damaged, {said}.") from error


def check(path: Path) -> None:
    """Refuse to write where a library is missing."""
    _check_engine(path, _xarray(path), "scipy")


def dumped(path: Path, variables: Mapping[str, tuple[tuple[str, ...], np.ndarray]]) -> bytes:
    """Return the bytes of a NetCDF 3 file of variables, each its dimensions and values.

    scipy alone reads these, which GraphCast has.
    """
    dataset = _xarray(path).Dataset(dict(variables))
    return bytes(dataset.to_netcdf(engine="scipy"))


def _check_engine(path: Path, xarray: Any, engine: str) -> None:
    if engine not in xarray.backends.list_engines():
        package = "scipy" if engine == "scipy" else "'jaxnorm[formats]'"
        raise ModuleNotFoundError(
            f"{path} needs {engine}, which is not installed: pip install {package}.", name=engine
        )


def _xarray(path: Path) -> Any:
    try:
        import xarray
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path} needs xarray, which is not installed: pip install 'jaxnorm[formats]'.",
            name="xarray",
        ) from None
    return xarray
