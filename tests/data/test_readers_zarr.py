"""Test Zarr: what xarray writes is decoded, plain arrays are read as they are, pieces are small."""

import base64
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from reading import opened, read, refused

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.sources import left_out, masks

zarr = pytest.importorskip("zarr")
xarray = pytest.importorskip("xarray")
FORMATS = [2, 3]
pytestmark = pytest.mark.filterwarnings("default")  # zarr and xarray warn of format 3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fitted(axes=0, size=1000, path="a.zarr"):
    whole = Normalizer(axes)
    for piece in opened(path, axes, size):
        batch = piece.read()
        whole.update(batch, where=masks(batch))
    return {
        leaf: (np.round(m.mean, 9).ravel().tolist(), m.count.ravel().tolist())
        for leaf, (m, *_) in whole.summaries.items()
    }


def write_xarray(zarr_format, encoding, **variables):
    data = xarray.Dataset({name: (("time", "x")[: x.ndim], x) for name, x in variables.items()})
    data.to_zarr("a.zarr", mode="w", zarr_format=zarr_format, encoding=encoding, consolidated=False)
    return xarray.open_zarr("a.zarr", consolidated=False)


@pytest.mark.parametrize("zarr_format", FORMATS)
class TestXarray:
    def test_packed_numbers_with_fill_values(self, zarr_format):
        x = 279.6 + np.linspace(-5, 5, 200).reshape(100, 2)
        x[3:7, 1] = np.nan
        packing = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 280.0}
        packing["_FillValue"] = -32768
        found = write_xarray(zarr_format, {"t": packing}, t=x)["t"].values
        assert zarr.open("a.zarr/t").dtype == np.int16
        (mean, count) = fitted()["t"]
        np.testing.assert_allclose(mean, np.nanmean(found, 0), rtol=1e-12)
        np.testing.assert_allclose(mean, np.nanmean(x, 0), atol=1e-3)
        assert count == [100, 96]
        np.testing.assert_array_equal(read("a.zarr")["t"], found)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
    @pytest.mark.parametrize("fill", [-999.0, 1e20, 0.1])
    def test_fill_values_of_any_kind_are_missing(self, zarr_format, dtype, fill):
        """xarray writes those of floats as an attribute, beside the array's own, which is NaN."""
        packed = {"scale_factor": 0.5} if dtype == "int16" else {}
        fill = int(max(-999, min(fill, 999))) if packed else fill
        x = np.array([[1.0, 2.0], [np.nan, 4.0], [3.0, np.nan]])
        encoding = {"t": {"dtype": dtype, "_FillValue": fill} | packed}
        found = write_xarray(zarr_format, encoding, t=x)["t"].values
        assert np.isnan(found).tolist() == np.isnan(x).tolist()
        assert fitted() == {"t": ([2, 3], [2, 2])}

    def test_nan_is_missing_beside_another_fill_value(self, zarr_format):
        x = np.array([1.0, np.nan, -999.0, 5.0])
        attributes = {"_FillValue": -999.0} if zarr_format == 2 else {}
        if zarr_format == 3:
            attributes["_FillValue"] = base64.b64encode(np.float64(-999)).decode()
        options = {"chunks": (2,), "fill_value": np.nan, "attributes": attributes}
        zarr.create_array("a.zarr", data=x, zarr_format=zarr_format, **options)
        assert fitted() == {"": ([3], [2])}

    def test_chunks_that_were_never_written(self, zarr_format):
        x = np.full((100, 2), np.nan)
        x[:10] = 3.0
        fill = {"_FillValue": np.nan} if zarr_format == 2 else {"fill_value": np.nan}
        write_xarray(zarr_format, {"t": {"chunks": (10, 2)} | fill}, t=x)
        written = [path for path in Path("a.zarr/t").rglob("*") if path.is_file()]
        assert len(written) < 10  # and not one for each chunk
        assert fitted() == {"t": ([3, 3], [10, 10])}

    def test_integers_without_a_fill_value_are_all_there(self, zarr_format):
        x = np.array([[0, 1], [0, 3], [0, 2**62 + 1]])
        write_xarray(zarr_format, {}, t=x)
        assert fitted()["t"][1] == [3, 3]
        np.testing.assert_array_equal(read("a.zarr")["t"], x)

    def test_integers_with_a_fill_value_keep_their_digits(self, zarr_format):
        x = np.array([[2**53 + 1], [-1], [2**53 + 3]])
        data = xarray.Dataset({"t": (("time", "x"), x, {"_FillValue": -1})})
        data.to_zarr("a.zarr", zarr_format=zarr_format, consolidated=False)
        (batch,) = [piece.read() for piece in opened("a.zarr")]
        assert batch["t"].tolist() == x.tolist()
        assert masks(batch)["t"].tolist() == [[True], [False], [True]]

    def test_scalars_dates_and_groups(self, zarr_format):
        days = np.datetime64("2020-01-01", "ns") + np.arange(4).astype("m8[D]")
        data = {"t": ("time", np.arange(4.0)), "crs": ((), 3), "name": ("time", list("abcd"))}
        root = xarray.Dataset(data, coords={"time": ("time", days)})
        tree = xarray.DataTree.from_dict(
            {"/": root, "/inner": xarray.Dataset({"u": ("time", np.ones(4))})}
        )
        tree.to_zarr("a.zarr", zarr_format=zarr_format)
        assert fitted() == {"inner/u": ([1], [4]), "t": ([1.5], [4])}
        assert left_out("a.zarr", {"": 0}).keys() == {"crs", "name", "time"}
        assert refused("a.zarr", {"crs": 0}).startswith(
            "a.zarr must hold numbers in 'crs': it holds one number. Name what is fitted: "
        )

    def test_coordinates_are_fitted_where_they_are_named(self, zarr_format, capsys):
        from jaxnorm.data.command import main

        data = xarray.Dataset({"t": (("lat", "x"), np.ones((4, 2)))}, {"lat": np.arange(4.0)})
        data.to_zarr("a.zarr", zarr_format=zarr_format, consolidated=False)
        assert fitted() == {"t": ([1, 1], [4, 4])}
        assert fitted({"lat": 0}) == {"lat": ([1.5], [4])}
        assert left_out("a.zarr", {"": 0}) == {"lat": "a coordinate of the others"}
        assert left_out("a.zarr", {"": 0, "lat": 0}) == {}
        assert main(["a.zarr"]) == 0
        said = "jaxnorm: 'lat' is left out, as it holds a coordinate of the others.\n"
        assert capsys.readouterr().err == said

    def test_at_an_address(self, zarr_format):
        fsspec = pytest.importorskip("fsspec")
        x = np.array([[1.0, np.nan], [3.0, 5.0]])
        write_xarray(zarr_format, {}, t=x)
        address = f"memory://xarray/{zarr_format}.zarr"
        fsspec.filesystem("memory").put("a.zarr", f"/xarray/{zarr_format}.zarr", recursive=True)
        assert fitted(path=address) == {"t": ([2, 5], [2, 1])}


@pytest.mark.parametrize("zarr_format", FORMATS)
class TestPlain:
    def create(self, zarr_format, x, **options):
        options = {"chunks": (2,), "zarr_format": zarr_format, "overwrite": True} | options
        return zarr.create_array("a.zarr", shape=x.shape, dtype=x.dtype, **options)

    @pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.float32, bool])
    @pytest.mark.parametrize("fill", [0, 1])
    def test_fill_values_are_numbers(self, zarr_format, dtype, fill):
        x = np.array([0, 1, 1, 1], dtype)
        self.create(zarr_format, x, fill_value=dtype(fill))[:] = x
        np.testing.assert_array_equal(read("a.zarr"), x)
        assert all(not piece.read().dtype.hasobject for piece in opened("a.zarr"))

    def test_of_chunks_that_were_never_written(self, zarr_format):
        x = np.zeros(6, np.float32)
        self.create(zarr_format, x, fill_value=7.0)[:2] = 1.0
        assert fitted() == {"": ([5], [6])}
        self.create(zarr_format, x, fill_value=np.nan)[:2] = 1.0
        assert fitted() == {"": ([1], [2])}

    def test_nan_that_is_no_fill_value_stays(self, zarr_format):
        x = np.array([1.0, np.nan, 3.0, 4.0])
        self.create(zarr_format, x, fill_value=0.0)[:] = x
        assert np.isnan(fitted()[""][0]).all()

    def test_attributes_count_without_names_of_dimensions(self, zarr_format):
        x = np.array([10, 20, -1, 40], np.int16)
        attributes = {"scale_factor": 0.5, "add_offset": 1.0, "missing_value": -1}
        self.create(zarr_format, x, attributes=attributes)[:] = x
        assert fitted() == {"": ([np.round((6 + 11 + 21) / 3, 9)], [3])}

    def test_unsigned_numbers_in_signed_ones(self, zarr_format):
        x = np.array([-1, 1, 2, 3], np.int8)
        self.create(zarr_format, x, attributes={"_Unsigned": "true"})[:] = x
        assert read("a.zarr").tolist() == [255, 1, 2, 3]


def group(**arrays):
    """Arrays in a group, each with its chunks."""
    root = zarr.open_group("a.zarr", mode="w")
    for name, (x, chunks) in arrays.items():
        root.create_array(name, data=x, chunks=chunks)


def sizes(path="a.zarr", axes=0, size=1000):
    return [sum(x.nbytes for x in piece.read().values()) for piece in opened(path, axes, size)]


class TestSizes:
    def test_chunks_that_do_not_meet(self, rng):
        x, y = rng.standard_normal((5000, 3)), np.arange(5000)
        group(x=(x, (127, 3)), y=(y, (1000,)))
        assert max(sizes(size=10_000)) <= 10_000
        found = read("a.zarr", size=10_000)
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["y"], y)

    def test_chunks_that_meet_often_are_unpacked_once(self, rng):
        group(x=(rng.standard_normal((600, 3)), (10, 3)), y=(np.arange(600), (15,)))
        cuts = [piece.cut for piece in opened("a.zarr", size=4000)]
        assert cuts[0] == (0, 120)  # of 125 that would fit
        assert all(start % 30 == 0 for start, _ in cuts)

    @pytest.mark.parametrize("names", [["x", "y"], ["y", "x"]])
    def test_each_chunk_is_unpacked_once_or_twice(self, names, rng, monkeypatch):
        """However long it is, in one pass."""
        arrays = {
            "x": (rng.standard_normal((5000, 30)), (127, 30)),
            "y": (np.arange(5000), (1000,)),
        }
        group(**{name: arrays[name] for name in names})
        touched = {name: np.zeros(-(-5000 // arrays[name][1][0]), int) for name in names}
        pieces = opened("a.zarr", size=20_000)
        reader = sources.opening.reader("a.zarr")

        class Counted:
            def __init__(self, name, array):
                self.name, self.array = name, array

            def __getattr__(self, attribute):
                return getattr(self.array, attribute)

            def __getitem__(self, region):
                rows, chunk = region[0], self.array.chunks[0]
                touched[self.name][rows.start // chunk : -(-rows.stop // chunk)] += 1
                return self.array[region]

        for name, array in reader.arrays.items():
            monkeypatch.setattr(array, "array", Counted(name, array.array))
        for piece in pieces:
            piece.read()
        assert touched["y"].tolist() == [1] * 5
        assert touched["x"].min() == 1
        assert touched["x"].max() <= 2

    def test_chunks_side_by_side_that_are_too_large_together(self, rng):
        """Of 400 rows each; all of 400 rows would be 64 times as large as a piece."""
        x = rng.standard_normal((400, 20, 20))
        group(x=(x, (400, 2, 2)), y=(x[:, 0], (400, 2)))
        assert max(sizes(size=20_000)) <= 20_000
        np.testing.assert_array_equal(read("a.zarr", size=20_000)["x"], x)

    def test_an_array_alone_is_cut_where_its_chunks_are(self, rng):
        x = rng.standard_normal((400, 20, 20))
        group(x=(x, (400, 2, 20)))
        found = opened("a.zarr", "[n h] w", size=130_000)
        assert [piece.along for piece in found] == [(("x", 1),)] * 10
        assert [piece.read()["x"].nbytes for piece in found] == [128_000] * 10

    def test_one_chunk_is_the_bound(self, rng):
        group(x=(rng.standard_normal((400, 20)), (100, 20)))
        assert sizes(size=1000) == [16_000] * 4

    def test_memory_is_bounded_too(self, rng):
        """A folder of 2 x 64 MB in chunks of 127 and 1000 rows was one piece of it all."""
        group(
            x=(rng.integers(0, 9, (64_000, 1000), np.uint8), (127, 1000)),
            y=(np.zeros(64_000), (1000,)),
        )
        found = opened("a.zarr", size=4 << 20)
        tracemalloc.start()
        for piece in found:
            piece.read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20


def test_arrays_that_are_empty_or_shorter_than_others(rng):
    x = rng.standard_normal((300, 3))
    group(
        x=(x, (100, 3)), short=(x[:70, 0], (70,)), none=(x[:0], (1, 3)), flat=(x[:, :0], (300, 1))
    )
    batches = [piece.read() for piece in opened("a.zarr")]
    assert len(batches) == 5  # of 70 rows, as a chunk of x is larger than a piece
    for name, expected in (("x", x), ("short", x[:70, 0]), ("none", x[:0]), ("flat", x[:, :0])):
        found = np.concatenate([batch[name] for batch in batches])
        np.testing.assert_array_equal(found, expected)


def test_whole_chunks_are_read_without_a_copy(rng, monkeypatch):
    x = rng.standard_normal((250, 3))
    group(x=(x, (100, 3)))
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    np.testing.assert_array_equal(read("a.zarr", size=2 * 100 * 24)["x"], x)


@pytest.mark.parametrize("name", ["zarr.json", ".zmetadata"])
def test_folders_of_any_name_are_found_by_what_they_hold(name, rng):
    x = rng.standard_normal((40, 3))
    zarr.save_array("data", x, zarr_format=3 if name == "zarr.json" else 2)
    np.testing.assert_array_equal(read("data"), x)


def test_shards_are_read_chunk_by_chunk(rng):
    x = rng.standard_normal((400, 3))
    zarr.create_array("a.zarr", data=x, chunks=(10, 3), shards=(100, 3))
    assert opened("a.zarr", size=1000)[0].cut == (0, 40)
    np.testing.assert_array_equal(read("a.zarr"), x)


def test_a_group_without_arrays():
    zarr.open_group("a.zarr", mode="w")
    assert refused("a.zarr") == "a.zarr must hold arrays: it holds none."
    assert json.loads(Path("a.zarr/zarr.json").read_text())["node_type"] == "group"
    assert os.listdir("a.zarr") == ["zarr.json"]
