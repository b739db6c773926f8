"""Test differences along an axis, by ``diff``: across pieces, and not across files or episodes."""

import os
import tracemalloc

import numpy as np
import pytest
from reading import WRITE, members_opened

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main
from jaxnorm.data.sources import SourceError

pytestmark = pytest.mark.filterwarnings("default")  # zarr warns of format 3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PIECE", 1000)  # bytes, so that files have many
    return tmp_path


def assert_moments(found, differences, axes=0):
    """The statistics are those of the differences, given in float64."""
    differences = np.asarray(differences, np.float64)
    moments, low, high = found
    count = differences.size // moments.mean.size
    np.testing.assert_array_equal(moments.count, np.full(moments.mean.shape, count))
    mean = differences.mean(axes, keepdims=True)
    scale = np.abs(differences).max()
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-13, atol=1e-15 * scale)
    np.testing.assert_allclose(
        moments.var, differences.var(axes, keepdims=True), rtol=1e-12, atol=1e-15 * scale**2
    )
    np.testing.assert_array_equal(low, differences.min(axes, keepdims=True))
    np.testing.assert_array_equal(high, differences.max(axes, keepdims=True))


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64])
def test_no_difference_is_lost_between_pieces(suffix, dtype, rng):
    x = rng.integers(0, 200, (400, 3)).astype(dtype)
    WRITE[suffix](f"a.{suffix}", x)
    fitted = Normalizer.fit_files(f"a.{suffix}", "[time] f", diff="time")
    assert fitted.batches > 3
    (summary,) = fitted.summaries.values()
    assert_moments(summary, np.diff(x.astype(np.float64), axis=0))


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("diff", ["t", 1, -1])
def test_along_an_axis_that_is_not_cut(suffix, diff, rng):
    x = rng.standard_normal((400, 6)).astype(np.float32)
    WRITE[suffix](f"a.{suffix}", x)
    fitted = Normalizer.fit_files(f"a.{suffix}", "[n] t", diff=diff)
    (summary,) = fitted.summaries.values()
    assert_moments(summary, np.diff(x.astype(np.float64), axis=1))
    assert summary.min.shape == (1, 5)  # one statistic for each step


def test_a_piece_of_one_row(rng, monkeypatch):
    x = rng.standard_normal((9, 3))
    monkeypatch.setattr(sources, "PIECE", 1)
    for suffix in ("npz", "packed.npz", "zarr", "h5"):
        WRITE[suffix](f"a.{suffix}", x)
        (summary,) = Normalizer.fit_files(f"a.{suffix}", "[n] f", diff=0).summaries.values()
        assert_moments(summary, np.diff(x, axis=0))


def test_float32_is_subtracted_in_float64():
    x = np.float32([[1e8], [1.0], [1e8]])
    np.save("a.npy", x)
    fitted = Normalizer.fit_files("a.npy", "[t] f", diff="t")
    assert fitted.max.tolist() == [[99999999.0]]


def test_a_stream_is_read_once(rng, monkeypatch):
    x = rng.standard_normal((400, 3))
    np.savez_compressed("a.npz", x=x)
    opened = members_opened(monkeypatch)
    fitted = Normalizer.fit_files("a.npz", diff=0)
    assert fitted.batches > 10
    assert len(opened) == 1
    assert_moments(fitted.summaries["x"], np.diff(x, axis=0))


def test_files_are_not_crossed(rng):
    x = rng.standard_normal((2, 50, 3))
    for number in range(2):
        np.save(f"{number}.npy", x[number])
    fitted = Normalizer.fit_files("*.npy", "[t] f", diff="t")
    assert_moments(fitted.summaries[""], np.diff(x, axis=1).reshape(-1, 3))


def test_a_folder_of_parquet_is_one_table(rng):
    pytest.importorskip("pyarrow")
    x = rng.standard_normal((120, 2))
    os.mkdir("a")
    for number, (start, stop) in enumerate([(0, 50), (50, 50), (50, 120)]):
        WRITE["parquet"](f"a/{number}.parquet", x[start:stop]) if stop > start else None
    fitted = Normalizer.fit_files("a", "[t] f", diff="t")
    assert_moments(fitted.summaries["x"], np.diff(x, axis=0))


class TestEpisodes:
    LENGTHS = (7, 1, 40, 3)

    @pytest.fixture
    def x(self, rng):
        return rng.standard_normal((sum(self.LENGTHS), 2))

    def within(self, x):
        """The differences of each episode."""
        episodes = np.split(x, np.cumsum(self.LENGTHS)[:-1])
        return np.concatenate([np.diff(episode, axis=0) for episode in episodes])

    @pytest.mark.parametrize("size", [1, 200, 10**6])
    def test_demonstrations_are_not_crossed(self, x, size, monkeypatch):
        h5py = pytest.importorskip("h5py")
        monkeypatch.setattr(sources, "PIECE", size)
        with h5py.File("a.h5", "w") as file:
            for number, part in enumerate(np.split(x, np.cumsum(self.LENGTHS)[:-1])):
                file[f"data/demo_{number}/x"] = part
        name = "data/demo_*/x"
        fitted = Normalizer.fit_files("a.h5", {name: "[time] f"}, diff="time")
        assert fitted.moments[name].count.tolist() == [[47, 47]]
        assert_moments(fitted.summaries[name], self.within(x))
        flipped = Normalizer.fit_files("a.h5", {name: "[time f]"}, diff=0)
        assert_moments(flipped.summaries[name], self.within(x), (0, 1))

    def test_episodes_of_a_flat_file_end_where_it_says(self, x):
        h5py = pytest.importorskip("h5py")
        ends = np.zeros(len(x), bool)
        ends[np.cumsum(self.LENGTHS) - 1] = True
        with h5py.File("a.hdf5", "w") as file:
            file["observations"] = x
            file["terminals"] = ends & (np.arange(len(x)) < 20)
            file["timeouts"] = ends & (np.arange(len(x)) >= 20)
        fitted = Normalizer.fit_files("a.hdf5", {"observations": 0}, diff=0)
        assert_moments(fitted.summaries["observations"], self.within(x))

    @pytest.mark.parametrize("rows", [1, 6, 100])
    def test_episodes_of_a_table_are_told_by_their_number(self, x, rows):
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        episode = np.repeat(np.arange(len(self.LENGTHS)), self.LENGTHS)
        table = pa.table({"x": list(x), "episode_index": episode})
        parquet.write_table(table, "a.parquet", row_group_size=rows)
        fitted = Normalizer.fit_files("a.parquet", {"x": 0}, diff=0)
        assert_moments(fitted.summaries["x"], self.within(x))


class TestMasks:
    def test_a_masked_element_masks_both_of_its_differences(self, rng):
        x, keep = rng.standard_normal((200, 2)), rng.random(200) < 0.8
        x[~keep] = np.nan
        np.savez("a.npz", x=x, keep=keep)
        masked = Normalizer.fit_files("a.npz", {"x": "[t] f"}, where={"x": "keep"}, diff="t")
        skipped = Normalizer.fit_files("a.npz", {"x": "[t] f"}, skip_nan=True, diff="t")
        expected = np.diff(x, axis=0)
        expected = expected[~np.isnan(expected[:, 0])]
        for fitted in (masked, skipped):
            assert_moments(fitted.summaries["x"], expected)

    def test_float_weights(self):
        np.savez("a.npz", x=np.array([[0.0], [1.0], [5.0], [6.0]]), w=np.array([1.0, 2.0, 3.0, 0]))
        fitted = Normalizer.fit_files("a.npz", {"x": "[t] f"}, where={"x": "w"}, diff="t")
        assert fitted.moments["x"].count.item() == 3.0  # 1 and 2, the smaller of each pair
        np.testing.assert_allclose(fitted.mean["x"].item(), (1 * 1 + 2 * 4) / 3, rtol=1e-15)

    def test_infinities_side_by_side_are_not_warned_of(self):
        np.save("a.npy", np.array([[np.inf], [np.inf], [1.0], [3.0]]))
        fitted = Normalizer.fit_files("a.npy", skip_nan=True, diff=0)
        assert np.isnan(fitted.mean).all()

    def test_one_of_two_arrays_is_masked_along_another_axis(self, rng):
        x, y, keep = rng.random((40, 5, 2)), rng.random((40, 5, 2)), rng.random(40) < 0.7
        np.savez("a.npz", x=x, y=y, keep=keep)
        axes = dict.fromkeys("xy", "[t l] f")
        fitted = Normalizer.fit_files("a.npz", axes, where={"x": "keep"}, diff="l")
        assert_moments(fitted.summaries["x"], np.diff(x[keep], axis=1), (0, 1))
        assert_moments(fitted.summaries["y"], np.diff(y, axis=1), (0, 1))


class TestResiduals:
    """GraphCast's targets: differences in time, by level, weighted by area."""

    @pytest.fixture
    def data(self, rng):
        xarray = pytest.importorskip("xarray")
        t = np.cumsum(rng.standard_normal((40, 2, 5, 4)), 0)
        return xarray.Dataset(
            {
                "t": (("time", "level", "lat", "lon"), t),
                "t2m": (("time", "lat", "lon"), t[:, 0]),
                "z": (("lat", "lon"), t[0, 0]),
            },
            {"lat": np.linspace(-80, 80, 5), "time": np.arange(40)},
        )

    @pytest.mark.parametrize("suffix", ["zarr", "nc"])
    def test_by_level_and_area(self, data, suffix):
        pytest.importorskip({"nc": "h5netcdf"}.get(suffix, suffix))
        if suffix == "nc":
            data.to_netcdf("a.nc", engine="h5netcdf")
        else:
            chunks = {"t": {"chunks": (2, 2, 5, 4)}, "t2m": {"chunks": (3, 5, 4)}}
            data.to_zarr("a.zarr", zarr_format=2, consolidated=False, encoding=chunks)
        axes = {"t": "[time] level [lat lon]", "t2m": "[time lat lon]"}
        fitted = Normalizer.fit_files(f"a.{suffix}", axes, weights="cos(lat)", diff="time")
        assert fitted.batches > 5
        weights = np.cos(np.deg2rad(data.lat.values))[:, None]
        for name, pooled in (("t", (0, 2, 3)), ("t2m", (0, 1, 2))):
            d = np.diff(data[name].values, axis=0)
            w = np.broadcast_to(weights, d.shape)
            mean = (w * d).sum(pooled, keepdims=True) / w.sum(pooled, keepdims=True)
            var = (w * (d - mean) ** 2).sum(pooled) / w.sum(pooled)
            np.testing.assert_allclose(fitted.mean[name], mean, rtol=1e-12)
            np.testing.assert_allclose(fitted.std[name].ravel(), np.sqrt(var).ravel(), rtol=1e-12)

    def test_static_fields_are_left_out_unless_they_are_named(self, data, capsys):
        pytest.importorskip("h5netcdf")
        data.to_netcdf("a.nc", engine="h5netcdf")
        assert main(["a.nc", "--diff", "time"]) == 0
        assert set(Normalizer.load("stats.safetensors").summaries) == {"t", "t2m"}
        said = "jaxnorm: 'z' is left out, as it holds no axis 'time'.\n"
        assert said in capsys.readouterr().err
        assert main(["a.nc", "--diff", "time", "--pattern", "z=[lat lon]"]) == 2
        assert capsys.readouterr().err == (
            "jaxnorm: --diff must name an axis of 'z' in a.nc: got 'time', its axes are lat, lon.\n"
        )


def test_what_does_not_fit(rng, capsys):
    np.savez("a.npz", x=rng.standard_normal((6, 2)), y=rng.standard_normal((3, 6)))
    with pytest.raises(SourceError, match=r"^diff must name an axis of 'x' in a\.npz: got 'time'"):
        Normalizer.fit_files("a.npz", {"x": "[n] f"}, diff="time")
    assert main(["a.npz", "--pattern", "x=[n] f", "--diff", "2"]) == 2
    assert capsys.readouterr().err == (
        "jaxnorm: --diff must name an axis of 'x' in a.npz: got 2, its axes are '[n] f'.\n"
    )
    with pytest.raises(SourceError, match="g=2 must divide the size of its axis: 2 against 5"):
        Normalizer.fit_files("a.npz", {"x": "(g [t]) [f]"}, diff=0, g=2)
    axes = {"x": "[t] f", "y": "[n] t"}
    with pytest.raises(SourceError) as caught:
        Normalizer.fit_files("a.npz", axes, diff="t")
    assert str(caught.value) == (
        "a.npz: differences must lie along a reduction axis of all arrays, or of none: 'x', 'y' "
        "differ. Fit them one by one."
    )


def test_a_state_goes_on(rng, monkeypatch):
    x = rng.standard_normal((400, 3))
    np.save("a.npy", x)
    read, done = sources.Piece.read, []

    def reading(piece):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(piece)
        return read(piece)

    monkeypatch.setattr(sources.Piece, "read", reading)
    with pytest.raises(KeyboardInterrupt):
        Normalizer.fit_files("a.npy", diff=0, state="state.json")
    monkeypatch.setattr(sources.Piece, "read", read)
    fitted = Normalizer.fit_files("a.npy", diff=0, state="state.json")
    assert_moments(fitted.summaries[""], np.diff(x, axis=0))
    with pytest.raises(SourceError, match="a state must be of the same files, axes and options"):
        Normalizer.fit_files("a.npy", diff=1, state="state.json")


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_memory_is_two_pieces_at_most(dtype, monkeypatch):
    x = np.zeros((100_000, 100), dtype)
    np.savez_compressed("a.npz", x=x)
    monkeypatch.setattr(sources, "PIECE", 4 << 20)
    Normalizer.fit_files("a.npz", diff=0, threads=1)  # imports and caches
    tracemalloc.start()
    Normalizer.fit_files("a.npz", diff=0, threads=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * (4 << 20)


@pytest.mark.parametrize("suffix", ["h5", "parquet"])
def test_memory_is_two_chunks_or_row_groups_at_most(suffix, monkeypatch):
    x, chunk = np.zeros((3 << 17, 16), np.float32), 1 << 17  # rows, of 8 MiB
    if suffix == "h5":
        with pytest.importorskip("h5py").File("a.h5", "w") as file:
            file.create_dataset("x", data=x, chunks=(chunk, 16), compression="gzip")
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        lists = pa.FixedSizeListArray.from_arrays(x.ravel(), 16)
        parquet.write_table(pa.table({"x": lists}), "a.parquet", row_group_size=chunk)
    monkeypatch.setattr(sources, "PIECE", 8 << 20)
    fit = lambda: Normalizer.fit_files(f"a.{suffix}", {"x": "[n] f"}, diff=0, threads=1)
    fit()  # imports and caches
    tracemalloc.start()
    fitted = fit()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fitted.moments["x"].count.tolist() == [[(3 << 17) - 1] * 16]
    assert peak < 2 * (8 << 20)


@pytest.mark.parametrize("options", [{"diff": "n"}, {"weights": "w"}, {}])
def test_patterns_are_checked_first(options):
    np.savez("a.npz", x=np.ones((6, 2)), w=np.ones(6))
    with pytest.raises(SourceError, match=r"^a\.npz, 'x': the pattern must name every axis: it na"):
        Normalizer.fit_files("a.npz", {"x": "[n]"}, **options)
