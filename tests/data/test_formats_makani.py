"""Test the statistics of Makani and Earth-2: .npy files by channel, and their climatology."""

import numpy as np
import pytest

from jaxnorm.data import Normalizer, formats
from jaxnorm.data.command import main
from jaxnorm.data.formats import FormatError, Statistics, makani


def channels(folder, **arrays):
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.float32(values).reshape(1, -1, 1, 1))


def test_channels_are_read(tmp_path, rng):
    channels(tmp_path, global_means=[1.0, 280], global_stds=[2.0, 10], mins=[0.0, 200])
    channels(tmp_path, maxs=[9.0, 320], time_diff_means_dt6=[0.0, 1], time_diff_stds_dt6=[1.0, 3])
    for path in (tmp_path, tmp_path / "global_stds.npy", tmp_path / "mins.npy"):
        assert formats.recognize(path) == "makani"
        leaf = formats.read(path, "makani").leaves[""]
        np.testing.assert_array_equal(leaf.mean, [[[1]], [[280]]])
        np.testing.assert_array_equal(leaf.max, [[[9]], [[320]]])
        assert leaf.count is None
    x = rng.standard_normal((2, 2, 3, 4)) + 280
    true = (x - np.load(tmp_path / "global_means.npy")) / np.load(tmp_path / "global_stds.npy")
    np.testing.assert_allclose(Normalizer.load(tmp_path).normalize(x), true, rtol=1e-14)
    differences = makani.read(tmp_path / "time_diff_stds_dt6.npy").leaves[""]
    np.testing.assert_array_equal(differences.var.ravel(), [1, 9])


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1)])
def test_channels_are_written_in_float32(tmp_path, shape):
    whole = lambda *values: np.reshape(values, shape).astype(float)
    leaf = Statistics(whole(0.1, 2), whole(4, 0.25), None, whole(-1, 0), whole(1, 9))
    formats.write(tmp_path, {"fields": leaf}, "makani")
    stored = {path.name: np.load(path) for path in tmp_path.iterdir()}
    assert set(stored) == {"global_means.npy", "global_stds.npy", "mins.npy", "maxs.npy"}
    assert {(array.shape, array.dtype.name) for array in stored.values()} == {
        ((1, 2, 1, 1), "float32")
    }
    np.testing.assert_array_equal(stored["global_stds.npy"].ravel(), [2, 0.5])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    makani.write(tmp_path, makani.read(tmp_path).leaves)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(FormatError, match=r"must not keep the old mins\.npy"):
        makani.write(tmp_path, {"": Statistics(leaf.mean, leaf.var)})


def test_what_is_no_channel_is_refused(tmp_path):
    channels(tmp_path, global_means=[1.0])
    with pytest.raises(FormatError, match=r"no global_stds\.npy"):
        makani.read(tmp_path)
    for array, said in [
        (np.ones((1, 2, 3, 1)), r"one number for each channel, .* it has \(1, 2, 3, 1\)"),
        (np.array(["a"]), "must hold numbers in its array"),
        (np.array([None], object), "must hold an array of numbers"),
    ]:
        np.save(tmp_path / "global_stds.npy", array)
        with pytest.raises(FormatError, match=said):
            makani.read(tmp_path)
    (tmp_path / "global_stds.npy").write_bytes(b"\x93NUMPY\x01")
    with pytest.raises(FormatError, match="numbers: it is damaged"):
        makani.read(tmp_path)
    ones, wide = Statistics(np.ones(2), np.ones(2)), Statistics(np.ones((2, 3)), np.ones((2, 3)))
    for leaves, said in [
        ({"a": ones, "b": ones}, "one leaf, all channels: got 'a', 'b'"),
        ({"a": wide}, r"one number for each channel: 'a' has shape \(2, 3\)"),
        ({"a": Statistics(np.full(2, 1e39), np.ones(2))}, "float32 can"),
    ]:
        with pytest.raises(FormatError, match=said):
            makani.write(tmp_path, leaves)


# climatology -------------------------------------------------------------------------------------


def test_anomalies_from_the_climatology(tmp_path, rng):
    channels(tmp_path, global_means=[1.0, 280], global_stds=[2.0, 10])
    means = np.float32(rng.standard_normal((1, 2, 3, 4)) + 280)
    path = tmp_path / "time_means.npy"
    np.save(path, means)
    assert formats.recognize(path) == "makani"
    known = Normalizer.load(path)
    x = rng.standard_normal((5, 2, 3, 4)) + 280
    true = (x - means) / np.load(tmp_path / "global_stds.npy")
    np.testing.assert_allclose(known.normalize(x), true, rtol=1e-14)
    np.testing.assert_allclose(known.normalize(x[0]), true[0], rtol=1e-14)
    assert known.notes[0] == makani.ANOMALIES
    # the folder's own statistics are the global ones
    assert Normalizer.load(tmp_path).mean.shape == (1, 2, 1, 1)
    known.save(tmp_path / "own.safetensors")
    np.testing.assert_array_equal(
        Normalizer.load(tmp_path / "own.safetensors").normalize(x), known.normalize(x)
    )


@pytest.mark.parametrize("features", [1, 2])
def test_the_climatology_is_written(tmp_path, rng, features):
    x = np.float32(rng.standard_normal((6, features, 3, 4)))
    np.save(tmp_path / "x.npy", x)
    path = tmp_path / "time_means.npy"
    pattern = ["--pattern", "[t] c h w", "--format", "makani"]
    assert main([str(tmp_path / "x.npy"), *pattern, "--out", str(path)]) == 0
    stored = np.load(path)
    assert (stored.shape, stored.dtype.name) == ((1, features, 3, 4), "float32")
    np.testing.assert_array_equal(stored, np.float32(x.astype(float).mean(0, keepdims=True)))
    alone = Normalizer.load(path)
    assert makani.NO_STD in alone.notes
    with pytest.raises(ValueError, match="mean and var: these statistics came without var"):
        alone.normalize(x)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["time_means.npy", "x.npy"]


@pytest.mark.parametrize("tail", ["", "_dt6"])
def test_statistics_of_differences_are_written(tmp_path, rng, tail):
    x = rng.standard_normal((6, 2, 3, 4))
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "stats").mkdir()
    channels(tmp_path / "stats", maxs=[9.0, 320])
    before = {path: path.read_bytes() for path in (tmp_path / "stats").iterdir()}
    path = tmp_path / "stats" / f"time_diff_stds{tail}.npy"
    arguments = ["--pattern", "[t] c [h w]", "--diff", "t", "--format", "makani", "--out", path]
    assert main(list(map(str, [tmp_path / "x.npy", *arguments]))) == 0
    steps = np.diff(x, axis=0)
    for name, expected in (("means", steps.mean((0, 2, 3))), ("stds", steps.std((0, 2, 3)))):
        stored = np.load(path.with_name(f"time_diff_{name}{tail}.npy"))
        assert (stored.shape, stored.dtype.name) == ((1, 2, 1, 1), "float32")
        np.testing.assert_allclose(stored.ravel(), expected, rtol=1e-6, atol=1e-7)
    # the statistics of fields stay, and nothing else is written
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(path.parent.iterdir())) == len(before) + 2


def test_what_is_no_climatology_is_refused(tmp_path):
    path = tmp_path / "time_means.npy"
    channels(tmp_path, global_stds=[1.0, 2])
    for shape, said in [
        (
            (1, 3, 4, 5),
            r"the channels of .*global_stds\.npy: it has 3, of shape \(1, 3, 4, 5\), not 2",
        ),
        ((2, 4, 5), r"a mean at each grid point, .*: it has \(2, 4, 5\)"),
        ((3, 2, 4, 5), r"a mean at each grid point, .*: it has \(3, 2, 4, 5\)"),
    ]:
        np.save(path, np.ones(shape))
        with pytest.raises(FormatError, match=said):
            makani.read(path)
    before = path.read_bytes()
    for array in (np.ones(2), np.ones((2, 1, 1))):
        with pytest.raises(FormatError, match="Fit it over time alone"):
            formats.write(path, {"x": Statistics(array)}, "makani")
    assert path.read_bytes() == before
