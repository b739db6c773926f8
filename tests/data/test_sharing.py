"""Test deviations that features share."""

import re

import numpy as np
import pytest

from jaxnorm.data import Normalizer
from jaxnorm.data.command import main as fit
from jaxnorm.data.convert import main as convert


def of_wind(rng):
    """A batch of a wind by its directions at 3 levels, with another field."""
    names = ("u", "v", "t")
    batch = {name: rng.standard_normal((50, 3)) * (k + 1) + 9 * k for k, name in enumerate(names)}
    return batch | {"wind": rng.standard_normal((50, 2)) * [1.0, 30]}


def test_leaves_share_feature_by_feature(rng):
    batch = of_wind(rng)
    fitted = Normalizer.fit([batch], quantiles=(0.01, 0.99))
    shared = fitted.share_deviation(["u", "v"], [("wind", 0), ("wind", 1)])
    true = np.sqrt((batch["u"].var(0) + batch["v"].var(0)) / 2)
    np.testing.assert_allclose(shared.std["u"][0], true, rtol=1e-14)
    assert np.array_equal(shared.std["u"], shared.std["v"])
    of_both = np.sqrt(batch["wind"].var(0).mean())
    np.testing.assert_allclose(shared.std["wind"][0], [of_both] * 2, rtol=1e-14)
    # the angle of a vector is that of its normalized anomaly
    found, anomaly = shared.normalize(batch)["wind"], batch["wind"] - batch["wind"].mean(0)
    angle = lambda x: np.arctan2(x[:, 1], x[:, 0])
    np.testing.assert_allclose(angle(found), angle(anomaly), atol=1e-12)
    # all else stays
    assert np.array_equal(shared.std["t"], fitted.std["t"])
    for name in ("mean", "min", "max"):
        for leaf, array in getattr(fitted, name).items():
            assert np.array_equal(getattr(shared, name)[leaf], array)
    assert np.array_equal(shared.quantile(0.99)["u"], fitted.quantile(0.99)["u"])
    np.testing.assert_allclose(fitted.std["u"][0], batch["u"].std(0), rtol=1e-14)


def test_channels_of_maps_share_by_their_first_axis(rng):
    x = rng.standard_normal((9, 3, 4, 5)) * np.array([1.0, 5, 2]).reshape(3, 1, 1)
    by_point = Normalizer.fit([x], "[t] c h w").share_deviation([0, 1])
    true = np.sqrt(x.var(0)[:2].mean(0))
    np.testing.assert_allclose(by_point.std[0, :2], [true, true], rtol=1e-14)
    np.testing.assert_allclose(by_point.std[0, 2], x.std(0)[2], rtol=1e-14)
    one = Normalizer.fit([x], "[t] c h w").share_deviation([(0, 1, 2), (-1, 1, 2)])
    true = np.sqrt(x.var(0)[[0, 2], 1, 2].mean())
    np.testing.assert_allclose(one.std[0, [0, 2], 1, 2], [true, true], rtol=1e-14)
    np.testing.assert_allclose(one.std[0, 1], x.std(0)[1], rtol=1e-14)


def test_what_shares_is_saved_and_not_fitted_further(rng, tmp_path):
    batch = of_wind(rng)
    shared = Normalizer.fit([batch]).share_deviation(["u", "v"])
    for name in ("a.json", "a.safetensors"):
        shared.save(tmp_path / name)
        loaded = Normalizer.load(tmp_path / name)
        assert np.array_equal(loaded.std["v"], shared.std["v"])
        for more in (lambda one: one.update(batch), lambda one: one.merge(Normalizer.fit([batch]))):
            with pytest.raises(ValueError, match=r"leaf 'u': features that share .* then share"):
                more(loaded)
    again = shared.share_deviation([("u", 0), ("u", 1)])
    np.testing.assert_allclose(
        again.std["u"][0, 0], np.sqrt((shared.std["u"][0, :2] ** 2).mean()), rtol=1e-14
    )


MISTAKES = {
    "fitted are ['t', 'u', 'v', 'wind']": [["u", "w"]],
    "got 0, fitted are": [[0, 1]],
    "two members at least, to share: got ['u']": [["u"]],
    "two members at least, to share: got ['uv']": ["uv"],
    "two members at least, to share: got []": [[]],
    "two members at least, to share: got [0]": [0, 1],
    "got (), fitted are": [[(), "u"]],
    "groups must not overlap: 'u' stands in them twice": [["u", "u"]],
    "groups must not overlap: ('u', 1) stands in them twice": [["u", "v"], [("u", 1), ("t", 1)]],
    "groups must not overlap: ('u', -1) stands": [[("u", 2), ("u", -1)]],
    "got ('wind', 2), the features of 'wind' have shape (2,)": [[("wind", 0), ("wind", 2)]],
    "got ('wind', 0, 0), the features of": [[("wind", 0, 0), ("wind", 1)]],
    "got ('wind', True), the features of": [[("wind", True), ("wind", 0)]],
    "must have one shape: 'u' has (3,), 'wind' has (2,)": [["u", "wind"]],
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_said_in_words(rng, said):
    fitted = Normalizer.fit([of_wind(rng)])
    with pytest.raises(ValueError, match=re.escape(said)):
        fitted.share_deviation(*MISTAKES[said])


def test_counts_must_be_equal_and_deviations_known():
    known = {"mean": {"u": np.zeros(2), "v": np.ones(2)}, "std": {"u": np.ones(2), "v": np.ones(2)}}
    counted = Normalizer.from_statistics(
        **known, count={"u": np.array([5, 5]), "v": np.array([5, 4])}
    )
    with pytest.raises(ValueError, match="equal counts: 'u' has 5, 'v' has 4"):
        counted.share_deviation(["u", "v"])
    # as in files that have no counts
    Normalizer.from_statistics(**known).share_deviation(["u", "v"])
    ranges = Normalizer.from_statistics(min=np.zeros(2), max=np.ones(2))
    with pytest.raises(ValueError, match="must be known to be shared: that of 0 is not"):
        ranges.share_deviation([0, 1])


# the commands ------------------------------------------------------------------------------------


def test_the_commands_share(rng, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = of_wind(rng)
    np.savez("x.npz", **batch)
    shares = ["--share", "u,v", "--share", "wind[0],wind[1]"]
    assert fit(["x.npz", *shares, "--out", "a.json", "--rename", "u=east"]) == 0
    shared = Normalizer.fit([batch]).share_deviation(["u", "v"], [("wind", 0), ("wind", 1)])
    found = Normalizer.load("a.json")
    for name, leaf in (("east", "u"), ("v", "v"), ("wind", "wind"), ("t", "t")):
        np.testing.assert_allclose(found.std[name], shared.std[leaf], rtol=1e-14)
    assert fit(["x.npz", "--out", "b.json"]) == 0
    assert convert(["b.json", "c.json", *shares]) == 0
    assert np.array_equal(Normalizer.load("c.json").std["u"], found.std["east"])
    np.save("y.npy", batch["wind"])
    assert fit(["y.npy", "--share", "0,1", "--out", "d.json"]) == 0
    assert np.array_equal(Normalizer.load("d.json").std, shared.std["wind"])
    before = sorted(path.name for path in tmp_path.iterdir())
    capsys.readouterr()
    for wrong, said in [
        (["--share", "u,w"], "fitted are ['t', 'u', 'v', 'wind']"),
        (["--rename", "w=x"], "must name arrays that are fitted: got ['w']"),
        (["--share", "wind[0],wind[7]"], "got ('wind', 7), the features of 'wind'"),
    ]:
        assert fit(["x.npz", *wrong, "--out", "e.json"]) in (1, 2)
        assert said in capsys.readouterr().err
    assert convert(["b.json", "e.json", "--share", "u,w"]) == 2
    for run, files in ((fit, ["x.npz"]), (convert, ["b.json", "e.json"])):
        with pytest.raises(SystemExit, match="2"):
            run([*files, "--share", "u"])
        assert "--share: must name two or more, such as u10,v10: got 'u'" in capsys.readouterr().err
    # what was fitted before the last mistake is kept
    left = {path.name for path in tmp_path.iterdir()} - set(before)
    assert all(name.startswith(".e.") for name in left)
