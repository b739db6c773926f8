"""Test the statistics of GraphCast and GenCast: NetCDF files of variables, by level."""

import numpy as np
import pytest

from jaxnorm.data import Normalizer, formats, show
from jaxnorm.data.command import main
from jaxnorm.data.formats import FormatError, Statistics, graphcast

LEVELS = [500, 850, 1000]


def by_level(folder, name, levels=LEVELS, **variables):
    xarray = pytest.importorskip("xarray")
    held = {
        key: ((), value) if np.ndim(value) == 0 else ("level", np.float32(value))
        for key, value in variables.items()
    }
    coordinates = {} if levels is None else {"level": levels}
    dataset = xarray.Dataset(held, coordinates)
    dataset.to_netcdf(folder / f"{name}.nc", engine="scipy")
    return dataset


def weather(folder):
    mean = by_level(folder, "mean_by_level", t=[250.0, 280, 288], sst=285.0)
    std = by_level(folder, "stddev_by_level", t=[10.0, 12, 16], sst=8.0)
    return mean, std


def test_variables_by_level_are_read(tmp_path):
    weather(tmp_path)
    by_level(tmp_path, "min_by_level", sst=271.25)
    for path in (tmp_path, tmp_path / "mean_by_level.nc", tmp_path / "stddev_by_level.nc"):
        assert formats.recognize(path) == "graphcast"
        read = formats.read(path, "graphcast")
        np.testing.assert_array_equal(read.leaves["t"].mean.ravel(), [250, 280, 288])
        assert read.leaves["t"].mean.shape == (3, 1, 1)
        np.testing.assert_array_equal(read.leaves["t"].var.ravel(), [100, 144, 256])
        assert (read.leaves["sst"].var, read.leaves["sst"].min) == (64, 271.25)
        assert read.leaves["t"].min is None
        assert any("the 3 levels 500, 850, 1000, and x has the axes" in note for note in read.notes)


def test_netcdf_4_is_read_by_h5netcdf(tmp_path):
    pytest.importorskip("h5netcdf")
    for dataset, name in zip(weather(tmp_path), ("mean", "stddev"), strict=True):
        dataset.to_netcdf(tmp_path / f"{name}_by_level.nc", engine="h5netcdf")
    np.testing.assert_array_equal(
        graphcast.read(tmp_path).leaves["t"].mean.ravel(), [250, 280, 288]
    )


def test_differences_have_no_mean(tmp_path):
    weather(tmp_path)
    by_level(tmp_path, "diffs_stddev_by_level", t=[1.0, 2, 4])
    read = formats.read(tmp_path / "diffs_stddev_by_level.nc", "graphcast")
    np.testing.assert_array_equal(read.leaves["t"].mean.ravel(), [0, 0, 0])
    np.testing.assert_array_equal(read.leaves["t"].var.ravel(), [1, 4, 16])
    assert read.notes[0] == graphcast.NO_MEAN


def graphcast_normalize(values, mean, std):
    """What GraphCast's normalize does, in xarray: statistics in the dtype of the values."""
    own = {name: statistics.astype(values[name].dtype) for name, statistics in mean.items()}
    scales = {name: statistics.astype(values[name].dtype) for name, statistics in std.items()}
    return {name: (values[name] - own[name]) / scales[name] for name in own}


def test_the_formula_is_that_of_graphcast(tmp_path, rng):
    xarray = pytest.importorskip("xarray")
    mean, std = weather(tmp_path)
    t = rng.standard_normal((2, 3, 4, 5)) * 10 + 270
    fields = {"t": (("time", "level", "lat", "lon"), t), "sst": (("time", "lat", "lon"), t[:, 0])}
    values = xarray.Dataset(fields, {"level": LEVELS})
    true = graphcast_normalize(values, mean, std)
    known = Normalizer.load(tmp_path)
    found = known.normalize({"t": t, "sst": t[:, 0]})
    np.testing.assert_allclose(found["t"], true["t"].values, rtol=1e-14)
    np.testing.assert_allclose(found["sst"], true["sst"].values, rtol=1e-14)


def test_what_one_file_alone_names_is_noted(tmp_path):
    by_level(tmp_path, "mean_by_level", a=1.0, b=2.0)
    by_level(tmp_path, "stddev_by_level", b=2.0, c=3.0)
    read = graphcast.read(tmp_path)
    assert list(read.leaves) == ["a", "b", "c"]
    assert (read.leaves["a"].var, read.leaves["c"].mean) == (None, None)
    assert "'a' has no std: GraphCast only subtracts its mean." in read.notes
    assert "'c' has no mean: GraphCast only divides by its deviation." in read.notes


def test_files_of_variables_are_written(tmp_path, rng):
    pytest.importorskip("xarray")
    t = Statistics(mean=rng.standard_normal(3), var=np.array([4.0, 2, 1]))
    q = Statistics(
        mean=t.mean.reshape(3, 1, 1), var=t.var.reshape(3, 1, 1), count=np.ones((3, 1, 1))
    )
    sst = Statistics(mean=np.ones(1), var=np.ones(1))
    formats.write(tmp_path, {"2m_temperature": sst, "t": t, "q": q}, "graphcast")
    read = graphcast.read(tmp_path).leaves
    np.testing.assert_array_equal(read["t"].mean.ravel(), t.mean)
    np.testing.assert_array_equal(read["q"].mean.ravel(), t.mean)
    assert read["2m_temperature"].mean.shape == ()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["mean_by_level.nc", "stddev_by_level.nc"]
    graphcast.write(tmp_path, read)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ({"a": (3,), "b": (4,)}, "one number of levels for all variables: got 3, 4"),
        ({"a": (3, 2)}, r"by level, or one for all: 'a' has shape \(3, 2\)"),
        ({"": (3,)}, "variables with names, without '/': got ''"),
        ({"a/b": (3,)}, "without '/': got 'a/b'"),
    ],
)
def test_what_variables_cannot_say_is_refused(tmp_path, leaves, said):
    held = {name: Statistics(np.ones(shape), np.ones(shape)) for name, shape in leaves.items()}
    with pytest.raises(FormatError, match=said):
        graphcast.write(tmp_path, held)
    one = {"a": Statistics(np.ones(1), np.ones(1))}
    with pytest.raises(FileNotFoundError, match="must lie in a folder that exists"):
        graphcast.write(tmp_path / "none" / "stats", one)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="must be a folder: it is a file"):
        graphcast.write(tmp_path / "file", one)


def test_half_and_damaged_folders_are_refused(tmp_path):
    by_level(tmp_path, "mean_by_level", t=[1.0, 2, 3])
    assert formats.recognize(tmp_path) is None
    with pytest.raises(FormatError, match=r"it has no stddev_by_level\.nc"):
        graphcast.read(tmp_path)
    by_level(tmp_path, "stddev_by_level", levels=[1, 2, 3], t=[1.0, 2, 3])
    with pytest.raises(FormatError, match="must have the same levels in all files"):
        graphcast.read(tmp_path)
    by_level(tmp_path, "stddev_by_level", t=[1.0, -2, 3])
    with pytest.raises(FormatError, match="leaf 't': std must be >= 0: got -2"):
        graphcast.read(tmp_path)
    path = tmp_path / "stddev_by_level.nc"
    for damaged in (b"", b"no NetCDF", path.read_bytes()[:40]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"stddev_by_level\.nc must hold NetCDF"):
            graphcast.read(tmp_path)


# differences -------------------------------------------------------------------------------------


def test_deviations_of_differences_are_written_alone(tmp_path, rng):
    pytest.importorskip("h5netcdf")
    path = tmp_path / graphcast.DIFFERENCES
    var = np.array([4.0, 2, 1])
    leaves = {"t": Statistics(np.ones(3), var), "sst": Statistics(var=np.full(1, 9.0))}
    formats.write(path, leaves, "graphcast")
    assert [one.name for one in tmp_path.iterdir()] == [graphcast.DIFFERENCES]
    assert formats.recognize(path) == "graphcast"
    found = graphcast.read(path).leaves
    np.testing.assert_allclose(found["t"].var.ravel(), var, rtol=1e-15)
    assert found["sst"].var == 9
    assert not found["t"].mean.any()
    before = path.read_bytes()
    with pytest.raises(FormatError, match="needs var: 'a' has no var"):
        formats.write(path, {"a": Statistics(np.ones(1))}, "graphcast")
    with pytest.raises(FormatError, match="got 3, 4"):
        formats.write(
            path, {"a": Statistics(var=var), "b": Statistics(var=np.ones(4))}, "graphcast"
        )
    assert path.read_bytes() == before


def test_the_command_keeps_differences_and_fields_apart(tmp_path, rng, capsys, monkeypatch):
    pytest.importorskip("h5netcdf")
    monkeypatch.chdir(tmp_path)
    x = rng.standard_normal((20, 3))
    np.savez("x.npz", t=x)
    common = ["x.npz", "--format"]
    for arguments, said in [
        (["graphcast", "--diff", "0", "--out", "stats"], "--out must be a file named diffs_stddev"),
        (["graphcast", "--out", graphcast.DIFFERENCES], "--out must not be a file named diffs_st"),
        (["makani", "--diff", "0", "--out", "stats"], "--out must be a file named time_diff_stds"),
        (["makani", "--out", "time_diff_stds_dt1.npy"], "--out must not be a file named time_diff"),
    ]:
        assert main([*common, *arguments]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]
    assert main([*common, "graphcast", "--diff", "0", "--out", graphcast.DIFFERENCES]) == 0
    found = Normalizer.load(graphcast.DIFFERENCES).std["t"].ravel()
    np.testing.assert_allclose(found, np.diff(x, axis=0).std(0), rtol=1e-12)


# names without statistics ------------------------------------------------------------------------


def test_variables_without_statistics_are_kept_with_a_warning(tmp_path, rng):
    weather(tmp_path)
    x = rng.standard_normal((2, 3, 4, 5))
    known = Normalizer.load(tmp_path)
    for stats in (known, saved_and_loaded(known, tmp_path / "own.json")):
        with pytest.warns(UserWarning, match=r"stay unchanged: 'a', 'b/c' have none\.") as caught:
            found = stats.normalize({"a": x, "t": x, "b": {"c": x}})
        assert [warning.filename for warning in caught] == [__file__]
        assert found["a"] is x
        assert found["b"]["c"] is x
        np.testing.assert_array_equal(found["t"], known.normalize({"t": x})["t"])
        with pytest.warns(UserWarning, match="'a' has none"):
            assert stats.denormalize({"a": x})["a"] is x


def saved_and_loaded(stats, path):
    stats.save(path)
    return Normalizer.load(path)


def test_the_warning_comes_when_jit_traces(tmp_path):
    jax = pytest.importorskip("jax")
    weather(tmp_path)
    known = Normalizer.load(tmp_path)
    x = np.ones((3, 1, 1), np.float32)
    normalize = jax.jit(known.normalize)
    with pytest.warns(UserWarning, match="'a' has none"):
        normalize({"a": x, "t": x})
    # a second warning would be an error
    np.testing.assert_array_equal(normalize({"a": x, "t": x})["a"], x)


def test_what_is_missing_is_chosen(tmp_path, capsys):
    stats = {
        missing: Normalizer.from_statistics(mean={"x": 1.0}, std={"x": 2.0}, missing=missing)
        for missing in ("keep", "warn", "error")
    }
    batch = {"x": np.ones((2, 1)), "y": np.ones(2)}
    assert stats["keep"].normalize(batch)["y"] is batch["y"]
    with pytest.warns(UserWarning, match="'y' has none"):
        stats["warn"].normalize(batch)
    with pytest.raises(ValueError, match="every leaf must have statistics: 'y' has none"):
        stats["error"].normalize(batch)
    with pytest.raises(ValueError, match=r"missing must be one of 'keep', .*got 'no'"):
        Normalizer.from_statistics(mean=1.0, std=1.0, missing="no")
    stats["warn"].save(tmp_path / "x.json")
    assert show.main([str(tmp_path / "x.json")]) == 0
    assert "missing:  leaves without statistics are left unchanged, with a warning" in (
        capsys.readouterr().out
    )
    text = (tmp_path / "x.json").read_text()
    (tmp_path / "x.json").write_text(text.replace('"missing": "warn"', '"missing": 3'))
    with pytest.raises(ValueError, match=r"missing must be one of .*: got 3"):
        Normalizer.load(tmp_path / "x.json")
