"""Test NetCDF: what xarray writes by each library is decoded as xarray decodes it."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from reading import opened, read, refused

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main
from jaxnorm.data.sources import left_out

xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")
ENGINES = ["h5netcdf", "scipy"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(rng):
    t = 279.6 + rng.standard_normal((60, 4, 5))
    t[3:9, 1, 2] = np.nan
    return xarray.Dataset(
        {
            "t2m": (("time", "latitude", "longitude"), t),
            "count": (("time",), np.arange(60, dtype=np.int32)),
            "time_bounds": (("time", "two"), np.ones((60, 2))),
            "crs": ((), 3),
        },
        {
            "time": ("time", np.arange(60), {"bounds": "time_bounds"}),
            "latitude": np.linspace(-90, 90, 4),
            "longitude": np.arange(5.0),
            "area": (("latitude", "longitude"), np.ones((4, 5))),
        },
    )


PACKED = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 280.0, "_FillValue": -32768}


def fitted(path, axes):
    whole = Normalizer(axes)
    for piece in opened(path, axes if isinstance(axes, dict) else {"": axes}):
        batch = piece.read()
        whole.update(batch, where=sources.masks(batch))
    return whole


@pytest.mark.parametrize("suffix", ["nc", "nc4"])
@pytest.mark.parametrize("engine", ENGINES)
class TestEveryLibrary:
    def test_packed_numbers_with_fill_values(self, data, engine, suffix):
        chunks = {"chunksizes": (7, 4, 5), "zlib": True} if engine == "h5netcdf" else {}
        data.to_netcdf(f"a.{suffix}", engine=engine, encoding={"t2m": PACKED | chunks})
        expected = xarray.load_dataset(f"a.{suffix}", engine=engine)["t2m"].values
        found = fitted(f"a.{suffix}", {"t2m": "[time latitude] longitude"})
        moments = found.moments["t2m"]
        assert moments.count.ravel().tolist() == [240, 240, 234, 240, 240]
        np.testing.assert_allclose(moments.mean.ravel(), np.nanmean(expected, (0, 1)), rtol=1e-13)
        np.testing.assert_allclose(moments.var.ravel(), np.nanvar(expected, (0, 1)), rtol=1e-9)
        np.testing.assert_array_equal(read(f"a.{suffix}", {"t2m": 0})["t2m"], expected)

    def test_coordinates_and_bounds_are_left_out(self, data, engine, suffix, capsys):
        data.to_netcdf(f"a.{suffix}", engine=engine)
        assert set(read(f"a.{suffix}")) == {"t2m", "count"}
        assert left_out(f"a.{suffix}", {"": 0}) == {
            **dict.fromkeys(("time", "latitude", "longitude"), sources.COORDINATE),
            **dict.fromkeys(("area", "time_bounds"), sources.COORDINATE),
            "crs": "one number",
        }
        assert read(f"a.{suffix}", {"area": 0})["area"].shape == (4, 5)
        assert main([f"a.{suffix}", "--pattern", "count=[n]"]) == 0
        assert Normalizer.load("stats.safetensors").mean["count"].tolist() == [29.5]

    def test_at_an_address(self, data, engine, suffix):
        fsspec = pytest.importorskip("fsspec")
        data.to_netcdf(f"a.{suffix}", engine=engine)
        fsspec.filesystem("memory").put(f"a.{suffix}", f"/netcdf/a.{suffix}")
        found = read(f"memory://netcdf/a.{suffix}")
        np.testing.assert_array_equal(found["t2m"], data["t2m"].values)
        assert len(opened(f"memory://netcdf/a.{suffix}")) > 5


def test_groups_have_paths(data):
    tree = xarray.DataTree.from_dict({"/": data[["count"]], "/inner": data[["t2m"]]})
    tree.to_netcdf("a.nc", engine="h5netcdf")
    found = read("a.nc")
    assert set(found) == {"count", "inner/t2m"}
    np.testing.assert_array_equal(found["inner/t2m"], data["t2m"].values)


def test_what_h5py_wrote_has_no_names_of_dimensions():
    h5py = pytest.importorskip("h5py")
    with h5py.File("a.nc", "w") as file:
        file["x"] = np.arange(12.0).reshape(4, 3)
    assert read("a.nc")["x"].shape == (4, 3)


def test_damaged_files_are_named(data):
    for engine in ENGINES:
        data.to_netcdf("whole.nc", engine=engine)
        whole = Path("whole.nc").read_bytes()
        for share in (0.001, 0.1, 0.5, 0.9):
            Path("a.nc").write_bytes(whole[: int(share * len(whole))])
            os.utime("a.nc", ns=(1, int(share * 1000) + len(engine)))
            said = refused("a.nc")
            assert said.startswith("a.nc cannot be read, it may be damaged or no .nc file: ")
    Path("a.nc").write_text("some text")
    assert refused("a.nc") == (
        "a.nc cannot be read, it may be damaged or no .nc file: ValueError, it begins as no NetCDF "
        "file does."
    )


def test_a_library_that_is_missing_is_named(data, monkeypatch):
    from jaxnorm.data.sources import netcdf

    data.to_netcdf("a.nc", engine="h5netcdf")
    monkeypatch.setattr(netcdf, "find_spec", lambda name: None)
    assert refused("a.nc") == (
        "a.nc needs h5netcdf, which is not installed: pip install 'jaxnorm[formats]'."
    )
    Path("b.nc").write_bytes(b"CDF\5 and more")
    assert refused("b.nc") == ("b.nc needs netCDF4, which is not installed: pip install netCDF4.")
    monkeypatch.setitem(sys.modules, "xarray", None)
    assert refused("a.nc") == (
        "a.nc needs xarray, which is not installed: pip install 'jaxnorm[formats]'."
    )


def test_chunks_meet_pieces(data):
    data[["t2m"]].to_netcdf(
        "a.nc", engine="h5netcdf", encoding={"t2m": {"chunksizes": (7, 4, 5), "zlib": True}}
    )
    cuts = [piece.cut for piece in opened("a.nc", {"t2m": "[n] h w"}, size=2000)]
    assert cuts[0] == (0, 7)
    assert all(start % 7 == 0 for start, _ in cuts)
