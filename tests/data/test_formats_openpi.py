"""Test openpi's norm_stats.json: its own numbers, round trips, and files that are not one."""

import json

import numpy as np
import pytest

from jaxnorm.data import Normalizer, formats
from jaxnorm.data.command import main as fit
from jaxnorm.data.formats import FormatError, Statistics, openpi

STATE = {"mean": [1.0, 2.0, 0.0], "std": [0.0, 2.0, 1.0], "q01": [1.0, 0, -1], "q99": [1.0, 4, 1]}
ACTIONS = {"mean": [0.1, 0.2], "std": [1.5, 2.5], "q01": None, "q99": None}


def written(folder, **leaves):
    path = folder / "norm_stats.json"
    path.write_text(json.dumps({"norm_stats": leaves}))
    return path


def test_a_file_is_read_in_its_own_shapes(tmp_path):
    path = written(tmp_path, state=STATE, actions=ACTIONS)
    for given in (path, tmp_path):
        assert formats.recognize(given) == "openpi"
        read = formats.read(given, "openpi")
        assert list(read.leaves) == ["state", "actions"]
        state, actions = read.leaves.values()
        np.testing.assert_array_equal(state.mean, STATE["mean"])
        np.testing.assert_array_equal(state.var, [0, 4, 1])
        assert state.mean.dtype == np.float64
        assert list(state.quantiles) == [0.01, 0.99]
        assert (state.count, state.min, state.max, state.mask) == (None,) * 4
        assert actions.quantiles is None


def test_the_formula_gives_the_numbers_of_openpi(tmp_path):
    """openpi.transforms.Normalize of commit 15a9616 gave these."""
    known = Normalizer.load(written(tmp_path, state=STATE))
    x = {"state": np.array([1.25, 3.0, 0.5])}
    np.testing.assert_allclose(
        known.normalize(x)["state"],
        [250000.0, 0.49999975000012498, 0.49999950000050003],
        rtol=1e-15,
    )
    ranged = known.normalize(x, mode="quantile")
    np.testing.assert_allclose(
        ranged["state"], [499999.0, 0.49999962500009376, 0.49999925000037493], rtol=1e-12
    )
    # a constant feature becomes -1, not 0
    constant = known.normalize({"state": np.array([1.0, 0, 0])}, mode="quantile")
    assert constant["state"][0] == -1
    y = {"state": np.array([0.5, -1, 2])}
    np.testing.assert_allclose(
        known.denormalize(y)["state"], [1.0000005, -1.000000000139778e-06, 2.000002], rtol=1e-9
    )


def test_round_trips_keep_every_bit(tmp_path, rng):
    leaf = Statistics(
        mean=rng.standard_normal(5) * 1e3,
        var=np.square(rng.standard_normal(5)),
        quantiles={0.01: -rng.random(5), 0.5: np.zeros(5), 0.99: rng.random(5)},
    )
    formats.write(tmp_path, {"state": leaf, "actions/left": leaf}, "openpi")
    first = openpi.read(tmp_path).leaves
    np.testing.assert_array_equal(first["state"].mean, leaf.mean)
    np.testing.assert_array_equal(np.sqrt(first["state"].var), np.sqrt(leaf.var))
    np.testing.assert_array_equal(first["state"].quantiles[0.99], leaf.quantiles[0.99])
    text = (tmp_path / "norm_stats.json").read_text()
    openpi.write(tmp_path / "norm_stats.json", first)
    assert (tmp_path / "norm_stats.json").read_text() == text
    assert list(json.loads(text)["norm_stats"]) == ["state", "actions/left"]
    # as pydantic writes what is missing, and without 0.5, for which there is no key
    openpi.write(tmp_path, {"state": Statistics(mean=np.zeros(1), var=np.ones(1))})
    assert json.loads((tmp_path / "norm_stats.json").read_text())["norm_stats"] == {
        "state": {"mean": [0.0], "std": [1.0], "q01": None, "q99": None}
    }


def test_what_openpi_writes_for_nan_is_read_as_nan(tmp_path):
    read = openpi.read(written(tmp_path, state={"mean": [None, 1.0], "std": [1.0, 2.0]}))
    np.testing.assert_array_equal(read.leaves["state"].mean, [np.nan, 1])
    assert "The mean of 'state' is not finite: nan in feature 0." in read.notes
    assert openpi.NULLS in read.notes
    with pytest.raises(FormatError, match="the mean of 'state' is nan in feature 0"):
        openpi.write(tmp_path / "new.json", read.leaves)
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"mean": [1.0]}, "'mean' and 'std' of 'state': 'std' is missing"),
        ({"mean": [1.0], "std": None}, "'mean' and 'std' of 'state': 'std' is missing"),
        ({"mean": ["1.0"], "std": [1.0]}, r"numbers in 'mean' of 'state': it holds \['1.0'\]"),
        ({"mean": [[1.0], [1.0, 2]], "std": [1.0]}, "lists of different lengths"),
        ({"mean": [], "std": []}, r"numbers in 'mean' of 'state': it holds \[\]"),
        ({"mean": [1.0, 2], "std": [1.0]}, r"mean has \(2,\), std has \(1,\)"),
        ({"mean": [1.0], "std": [-1.0]}, "leaf 'state': std must be >= 0: got -1"),
        ({"mean": [1.0], "std": [1.0], "q01": [1.0, 2]}, r"the quantile 0.01 has \(2,\)"),
        (3, "'mean' and 'std' of 'state'"),
    ],
)
def test_half_files_are_refused_in_a_sentence(tmp_path, entry, said):
    path = written(tmp_path, state=entry)
    with pytest.raises(FormatError, match=said) as error:
        openpi.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"norm_stats": {}}', '{"norm_stats": 3}', "\xff", "[" * 10**5]
)
def test_damaged_and_foreign_files_are_refused(tmp_path, text):
    path = tmp_path / "norm_stats.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(FormatError, match=r"norm_stats\.json must hold"):
        openpi.read(path)
    assert formats.recognize(path) in (None, "openpi")


def test_a_name_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "norm_stats.json"
    path.write_text('{"norm_stats": {"state": {"mean": [1], "mean": [2], "std": [1]}}}')
    with pytest.raises(FormatError, match="must name everything once: 'mean' stands twice"):
        openpi.read(path)


def test_a_missing_file_is_not_found(tmp_path):
    assert formats.recognize(tmp_path / "none.json") is None
    with pytest.raises(FileNotFoundError):
        openpi.read(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="must lie in a folder that exists"):
        openpi.write(
            tmp_path / "none" / "norm_stats.json", {"s": Statistics(np.ones(1), np.ones(1))}
        )


def test_what_the_format_cannot_say_is_refused(tmp_path):
    ones = np.ones(2)
    for leaves, said in [
        ({}, "must hold one leaf at least"),
        ({"s": Statistics(mean=ones)}, "needs var: 's' has no var"),
        ({"": Statistics()}, "needs mean and var: the array has no mean or var"),
        (
            {"s": Statistics(ones, ones, mask=ones > 1)},
            "must take every feature: the mask of 's' is False in",
        ),
        (
            {"s": Statistics(ones, ones, count=ones * [0, 1])},
            "the count of 's' is 0.0 in feature 0",
        ),
    ]:
        with pytest.raises(FormatError, match=said):
            openpi.write(tmp_path / "norm_stats.json", leaves)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FormatError, match=r"format must be one of 'openpi'.*: got 'pickle'"):
        formats.write(tmp_path / "x", {}, "pickle")


def test_a_fit_has_the_quantiles_that_openpi_writes(tmp_path, rng):
    np.savez(tmp_path / "set.npz", state=rng.normal(size=(40, 2)), w=np.ones(40))
    out, command = tmp_path / "norm_stats.json", [str(tmp_path / "set.npz"), "--format", "openpi"]
    pattern = ["--pattern", "state=[w] f", "--out", str(out)]
    for weights, known in (([], True), (["--weights", "w"], False)):
        assert fit([*command, *pattern, *weights]) == 0
        held = json.loads(out.read_text())["norm_stats"]["state"]
        assert (held["q01"] is not None, held["q99"] is not None) == (known, known)
