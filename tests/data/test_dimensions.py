"""Test names of dimensions in patterns, and weights along one of them, such as of latitudes."""

import os

import numpy as np
import pytest

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main
from jaxnorm.data.sources import SourceError

xarray = pytest.importorskip("xarray")
LATITUDES = np.linspace(90, -90, 7, dtype=np.float32)
AREA = np.cos(np.deg2rad(LATITUDES.astype(np.float64)))
pytestmark = pytest.mark.filterwarnings("default")  # zarr warns of format 3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PIECE", 1000)  # bytes, so that files have many
    return tmp_path


@pytest.fixture
def t(rng):
    return 280 + 10 * AREA[:, None] + rng.standard_normal((30, 7, 4))


@pytest.fixture(params=["zarr", "nc"])
def path(request, t):
    """A file of temperatures, with a static field and with weights of another name."""
    pytest.importorskip({"nc": "h5netcdf"}.get(request.param, request.param))
    data = xarray.Dataset(
        {
            "t2m": (("time", "latitude", "longitude"), t),
            "z": (("latitude", "longitude"), t[0]),
            "thickness": (("time",), np.arange(30.0)),
        },
        {"time": np.arange(30), "latitude": LATITUDES, "longitude": np.arange(4)},
    )
    path = f"a.{request.param}"
    if request.param == "zarr":
        data.to_zarr(path, zarr_format=2, consolidated=False)
    else:
        data.to_netcdf(path, engine="h5netcdf")
    return path


def refused(*args, **kwargs):
    with pytest.raises(SourceError) as caught:
        Normalizer.fit_files(*args, **kwargs)
    return str(caught.value)


class TestPatterns:
    def test_names_of_dimensions(self, path, t):
        fitted = Normalizer.fit_files(path, {"t2m": "[time latitude] longitude"})
        np.testing.assert_allclose(fitted.mean["t2m"][0, 0], t.mean((0, 1)), rtol=1e-13)
        fitted = Normalizer.fit_files(path, {"t2m": "[n h] w", "z": "[latitude] ..."})
        np.testing.assert_allclose(fitted.mean["z"][0], t[0].mean(0), rtol=1e-13)

    @pytest.mark.parametrize(
        ("pattern", "written"),
        [
            ("[latitude longitude] time", "time [latitude longitude]"),
            ("[time longitude]", "[time] latitude [longitude]"),
            ("[time latitude longitude level]", "[time latitude longitude]"),
            ("[n time] w", "[time] latitude longitude"),
        ],
    )
    def test_in_another_order_or_missing(self, path, pattern, written, capsys):
        said = (
            f"{path}: the pattern of 't2m' must name its dimensions in their order, time, "
            f"latitude, longitude: got {pattern!r}. Write {written!r}."
        )
        assert refused(path, {"t2m": pattern}) == said
        assert main([path, "--pattern", f"t2m={pattern}"]) == 2
        assert capsys.readouterr().err == f"jaxnorm: {said}\n"
        assert os.listdir() == [path]

    @pytest.mark.parametrize("diff", [[], ["--diff", "time"]])
    def test_arrays_that_lack_a_dimension_of_one_pattern_for_all(self, path, t, diff, capsys):
        assert main([path, "--pattern", "[time] ...", *diff]) == 0
        shown = capsys.readouterr()
        assert "jaxnorm: 'z' is left out, as it holds no dimension 'time'.\n" in shown.err
        assert "longitude" not in shown.err.partition("'z'")[2].partition("\n")[0]
        fitted = Normalizer.load("stats.safetensors")
        assert set(fitted.mean) == {"t2m", "thickness"}
        expected = np.diff(t, axis=0).mean(0) if diff else t.mean(0)
        np.testing.assert_allclose(fitted.mean["t2m"][0], expected, rtol=1e-10, atol=1e-12)
        fitted = Normalizer.fit_files(path, "[time latitude longitude]")
        assert set(fitted.mean) == {"t2m"}

    @pytest.mark.parametrize("diff", [None, "time"])
    def test_a_dimension_of_the_file_that_the_named_array_lacks(self, path, diff):
        must = f"{path}: the pattern of 'z' must name its dimensions in their order, latitude, "
        for pattern in ("[time] ...", "[time] n"):
            said = f"{must}longitude: got {pattern!r}. Name all of them in this order, or none."
            assert refused(path, {"z": pattern}, diff=diff) == said
        said = f"{must}longitude: got '[time latitude]'. Write '[latitude] longitude'."
        assert refused(path, {"z": "[time latitude]"}, diff=diff) == said

    def test_one_pattern_that_is_right_for_no_array(self, path):
        said = refused(path, "[time longitude]")
        assert said.endswith(
            "got '[time longitude]'. Name the arrays to fit, each with its pattern: "
            "'t2m=[time] latitude [longitude]'."
        )
        said = refused(path, {"t2m": "[latitude ...] time"})
        assert said.endswith(" Name all of them in this order, or none.")


class TestWeights:
    def test_of_latitudes(self, path, t):
        pattern = "[time latitude longitude]"
        fitted = Normalizer.fit_files(path, {"t2m": pattern}, weights="cos(latitude)")
        weights = np.broadcast_to(AREA[:, None], t.shape)
        mean = (weights * t).sum() / weights.sum()
        np.testing.assert_allclose(fitted.mean["t2m"].item(), mean, rtol=1e-13)
        var = (weights * (t - mean) ** 2).sum() / weights.sum()
        np.testing.assert_allclose(fitted.moments["t2m"].var.item(), var, rtol=1e-12)
        assert abs(fitted.mean["t2m"].item() - t.mean()) > 0.5

    @pytest.mark.parametrize("pattern", ["[time latitude longitude]", "time [latitude] longitude"])
    def test_several_are_multiplied_and_cut_with_the_pieces(self, path, t, pattern, capsys):
        given = ["--weights", "thickness", "--weights", "cos(latitude)"]
        bound = "" if pattern.startswith("[") else "up to "
        # the weight of the first time is 0, so that its features have no mean of their own
        status = int(bool(bound))
        assert main([path, "--pattern", f"t2m={pattern}", *given, "--out", "a.json"]) == status
        most = 435 * 4 * AREA.sum() if not bound else 29 * AREA.sum()
        shown = capsys.readouterr()
        assert shown.out.endswith(f", {bound}{most:.2f} elements each\n")
        assert ("4 features of t2m (0,0; 0,1; 0,2; 0,3) hold no element" in shown.err) == bool(
            bound
        )
        fitted = Normalizer.load("a.json").moments["t2m"]
        weights = np.arange(30.0)[:, None, None] * AREA[:, None] * np.ones(4)
        axes = (0, 1, 2) if pattern.startswith("[") else (1,)
        count = weights.sum(axes, keepdims=True)
        np.testing.assert_allclose(fitted.count, count, rtol=1e-12)
        mean = (weights * t).sum(axes, keepdims=True) / np.where(count > 0, count, 1)
        np.testing.assert_allclose(fitted.mean, mean, rtol=1e-12)

    def test_leaves_without_the_dimension_are_not_weighted(self, path):
        axes = {"z": "[latitude longitude]", "thickness": "[time]"}
        fitted = Normalizer.fit_files(path, axes, weights="cos(latitude)")
        assert fitted.moments["thickness"].count.item() == 30
        np.testing.assert_allclose(fitted.moments["z"].count.item(), 4 * AREA.sum(), rtol=1e-12)

    def test_with_missing_elements_and_masks(self, t):
        pytest.importorskip("h5netcdf")
        t[3:9, 2, 1] = np.nan
        data = xarray.Dataset(
            {
                "t2m": (("time", "latitude", "longitude"), t),
                "keep": (("time",), np.arange(30) % 2 == 0),
            },
            {"latitude": LATITUDES},
        )
        data.to_netcdf("a.nc", engine="h5netcdf")
        fitted = Normalizer.fit_files(
            "a.nc", {"t2m": "[n h w]"}, where={"t2m": "keep"}, weights="cos(latitude)"
        )
        weights = np.where(np.isnan(t), 0, AREA[:, None]) * (np.arange(30) % 2 == 0)[:, None, None]
        np.testing.assert_allclose(fitted.moments["t2m"].count.item(), weights.sum(), rtol=1e-12)
        mean = (weights * np.nan_to_num(t)).sum() / weights.sum()
        np.testing.assert_allclose(fitted.mean["t2m"].item(), mean, rtol=1e-13)

    def test_the_pattern_names_the_axis_where_the_file_does_not(self, t):
        np.savez("a.npz", t=t, latitude=LATITUDES)
        fitted = Normalizer.fit_files("a.npz", {"t": "[time latitude] w"}, weights="cos(latitude)")
        mean = (AREA[:, None] * t).sum((0, 1)) / (30 * AREA.sum())
        np.testing.assert_allclose(fitted.mean["t"][0, 0], mean, rtol=1e-13)
        assert refused("a.npz", {"t": "[time lat] w"}, weights="cos(latitude)") == (
            "weights must lie along an axis of what is fitted: those of 'latitude' lie along "
            "'latitude'. Name that axis so in a pattern, or fit an array that has it."
        )

    def test_what_does_not_fit(self, path, capsys):
        axes = {"t2m": "[time latitude longitude]"}
        assert refused(path, axes, weights="sin(latitude)") == (
            "weights must be KEY or cos(KEY): got 'sin(latitude)'."
        )
        assert refused(path, axes, weights="lat").startswith(
            f"{path} must hold the weights 'lat': it holds "
        )
        assert refused(path, axes, weights="z") == (
            f"{path} must hold one axis of numbers in 'z': it holds an array of shape (7, 4)."
        )
        assert refused(path, {"thickness": 0}, weights="cos(latitude)").startswith(
            "weights must lie along an axis of what is fitted: those of 'latitude'"
        )
        assert main([path, "--pattern", "t2m=[n h w]", "--weights", "sin(a)"]) == 2
        assert capsys.readouterr().err == (
            "jaxnorm: --weights must be KEY or cos(KEY): got 'sin(a)'.\n"
        )

    @pytest.mark.parametrize(
        ("values", "weights", "said"),
        [
            ([1.0, 2.0], "w", "must hold a weight for each index of 'x' along 'w': there are 2 in"),
            ([91.0, 0, 0], "cos(w)", "must hold degrees from -90 to 90 in 'w', for cos(w): it hol"),
            ([np.nan, 0, 0], "cos(w)", "must hold degrees from -90 to 90 in 'w', for cos(w): it "),
            ([1.0, -2.0, 0], "w", "must hold finite weights >= 0 in 'w': it holds -2.0."),
        ],
    )
    def test_values_that_are_no_weights(self, values, weights, said):
        np.savez("a.npz", x=np.ones((5, 3)), w=np.array(values))
        assert refused("a.npz", {"x": "[n w]"}, weights=weights).startswith(f"a.npz {said}")

    def test_rows_of_a_table_are_weighted_by_masks(self):
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"x": [1.0, 4.0], "w": [2.0, 1.0]}), "a.parquet")
        assert refused("a.parquet", {"x": "[w]"}, weights="w") == (
            "a.parquet is a table, whose rows are weighted by masks: got weights='w'. Give where "
            "x=w instead."
        )
        fitted = Normalizer.fit_files("a.parquet", {"x": "[n]"}, where={"x": "w"})
        assert fitted.mean["x"].item() == 2.0

    def test_each_file_has_its_own(self, rng):
        x = rng.standard_normal((2, 5, 3))
        for number, w in enumerate(([1.0, 2.0, 3.0], [0.0, 1.0, 0.0])):
            np.savez(f"{number}.npz", x=x[number], w=np.array(w))
        fitted = Normalizer.fit_files("*.npz", {"x": "[n w]"}, weights="w")
        weights = np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])[:, None]
        expected = (weights * x).sum() / (5 * weights.sum())
        np.testing.assert_allclose(fitted.mean["x"].item(), expected, rtol=1e-13)
