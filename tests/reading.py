"""Write files of every format with the same numbers, and read them in small pieces."""

import os

import numpy as np
import pytest

from jaxnorm.data import sources
from jaxnorm.data.sources import SourceError, numpy_files, pieces

X = np.arange(4000 * 3, dtype=np.float32).reshape(4000, 3)


def write_parquet(path, x, rows=40):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": list(x)}), path, row_group_size=rows)


def write_zarr(path, x):
    pytest.importorskip("zarr").open_group(path, mode="w").create_array("x", data=x, chunks=(37, 2))


def write_hdf5(path, x):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(min(37, len(x)), 2), compression="gzip")


def write_netcdf(path, x, engine="h5netcdf"):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip(engine)
    # classic NetCDF has no unsigned numbers
    x = x.astype(np.int16) if engine == "scipy" and x.dtype == np.uint8 else x
    data = xarray.Dataset({"x": (("row", "column"), x)})
    chunks = {"chunksizes": (min(37, len(x)), 2), "zlib": True} if engine == "h5netcdf" else {}
    data.to_netcdf(path, engine=engine, encoding={"x": chunks})


WRITE = {
    "npy": np.save,
    "fortran.npy": lambda path, x: np.save(path, np.asfortranarray(x)),
    "npz": lambda path, x: np.savez(path, x=x),
    "packed.npz": lambda path, x: np.savez_compressed(path, x=x),
    "parquet": write_parquet,
    "zarr": write_zarr,
    "h5": write_hdf5,
    "nc": write_netcdf,
    "classic.nc": lambda path, x: write_netcdf(path, x, "scipy"),
}


def opened(path, axes=0, size=1000, **sizes):
    """Return the pieces of a file, of about ``size`` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", size)
        return pieces([str(path)], axes if isinstance(axes, dict) else {"": axes}, sizes)


def read(path, axes=0, size=1000, along=0):
    """Return a file's arrays, joined from their pieces."""
    batches = [piece.read() for piece in opened(path, axes, size)]
    if not isinstance(batches[0], dict):
        return np.concatenate(batches, along)
    return {name: np.concatenate([batch[name] for batch in batches], along) for name in batches[0]}


def refused(path, axes=0):
    """Return the sentence by which a file is refused, at first sight or when it is read."""
    with pytest.raises(SourceError) as caught:
        read(path, axes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cut(name, share):
    WRITE[name](f"a.{name}", X)
    os.truncate(f"a.{name}", int(os.path.getsize(f"a.{name}") * share))
    return f"a.{name}"


def members_opened(monkeypatch):
    """Return a list that gets an element each time when a member of an archive is opened."""
    opened, open_member = [], numpy_files._open_member
    monkeypatch.setattr(
        numpy_files, "_open_member", lambda *args: opened.append(args) or open_member(*args)
    )
    return opened
