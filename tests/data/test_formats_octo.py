"""Test the dataset_statistics.json of Octo and of OpenVLA."""

import json

import numpy as np
import pytest

from jaxnorm.data import Normalizer, formats
from jaxnorm.data.command import main as fit
from jaxnorm.data.formats import FormatError, Statistics, episodes, octo, openvla

MASK = [True, True, True, False]


def entry(low, high):
    return {
        "mean": [1.0, 2.0, 0.0, 0.5],
        "std": [0.0, 2.0, 1.0, 0.5],
        "max": [1.0, 4.0, 2.0, 1.0],
        "min": [1.0, 0.0, -2.0, 0.0],
        high: [1.0, 4.0, 1.0, 1.0],
        low: [1.0, 0.0, -1.0, 0.0],
    }


OCTO = {"action": entry("p01", "p99") | {"mask": MASK}, "num_transitions": 7, "num_trajectories": 2}
OPENVLA = {"bridge": {"action": entry("q01", "q99") | {"mask": MASK}, "num_transitions": 7}}
X = np.array([1.25, 5.0, 0.5, 0.75])


def stored(folder, contents):
    path = folder / "dataset_statistics.json"
    path.write_text(json.dumps(contents))
    return path


@pytest.mark.parametrize(("name", "contents"), [("octo", OCTO), ("openvla", OPENVLA)])
def test_a_file_is_read_and_written_to_the_bit(tmp_path, name, contents):
    path = stored(tmp_path, contents)
    assert formats.recognize(path) == name
    read = formats.read(path, name)
    (leaf,) = read.leaves.values()
    assert list(read.leaves) == ["action" if name == "octo" else "bridge/action"]
    np.testing.assert_array_equal(leaf.var, [0, 4, 1, 0.25])
    np.testing.assert_array_equal(leaf.count, [7] * 4)
    np.testing.assert_array_equal(leaf.mask, MASK)
    np.testing.assert_array_equal(leaf.quantiles[0.99], [1, 4, 1, 1])
    assert leaf.min[2] == -2
    formats.write(tmp_path / "new.json", read.leaves, name)
    new = json.loads((tmp_path / "new.json").read_text())
    # what no statistics say, and Octo cannot do without
    at = lambda held: held["bridge"] if name == "openvla" else held
    assert at(new).pop("num_trajectories") is None
    at(contents := json.loads(json.dumps(contents))).pop("num_trajectories", None)
    assert new == contents


def test_the_formula_gives_the_numbers_of_octo(tmp_path):
    """octo.data.utils.data_utils of commit 241fb35 gave these, in float64."""
    known = Normalizer.load(stored(tmp_path, OCTO))
    standard = known.normalize({"action": X})["action"]
    np.testing.assert_allclose(standard, [25000000, 1.4999999925, 0.499999995, 0.75], rtol=1e-15)
    bounds = known.normalize({"action": X}, mode="quantile")["action"]
    np.testing.assert_allclose(bounds, [1, 1, 0.49999999250000005, 0.75], rtol=1e-15)
    inside = known.normalize({"action": np.array([1.0, 3, -0.25, 2])}, mode="quantile")["action"]
    np.testing.assert_allclose(inside, [-1, 0.49999999625, -0.25000000375, 2], rtol=1e-14)


def test_the_formula_gives_the_numbers_of_openvla(tmp_path):
    """prismatic.vla.datasets.rlds.utils.data_utils of commit c8f03f4 gave these, in float64."""
    known = Normalizer.load(stored(tmp_path, OPENVLA["bridge"]))
    for mode, x, true in [
        ("standard", X, [25000000, 1.4999999925, 0.499999995, 0.75]),
        ("min_max", [1.0, 5.0, 0.5, 0.75], [0, 1, 0.24999999687499996, 0.75]),
        ("quantile", [1.0, 3, -0.25, 0.75], [0, 0.49999999625, -0.25000000375, 0.75]),
    ]:
        found = known.normalize({"action": np.array(x)}, mode=mode)["action"]
        np.testing.assert_allclose(found, true, rtol=1e-12)


def test_data_sets_have_leaves_of_their_own(tmp_path):
    path = stored(
        tmp_path, {"a": OCTO, "b": {"proprio": OCTO["action"], "num_transitions": [2, 3]}}
    )
    known = Normalizer.load(path)
    assert list(known.mean) == ["a", "b"]
    # several data sets that Octo combined have a list of counts
    assert formats.read(path, "octo").leaves["b/proprio"].count.tolist() == [5] * 4
    known.save(tmp_path / "new.json", format="octo")
    assert json.loads((tmp_path / "new.json").read_text())["b"]["num_transitions"] == 5


def test_the_configuration_of_an_openvla_model_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "openvla", "norm_stats": OPENVLA}))
    assert formats.recognize(path) == "openvla"
    assert list(Normalizer.load(path).mean["bridge"]) == ["action"]


def test_what_octo_combines_has_no_quantiles(tmp_path):
    short = {key: value for key, value in OCTO["action"].items() if key[0] != "p"}
    path = stored(tmp_path, OCTO | {"action": short})
    assert formats.recognize(path) == "octo"
    assert formats.read(path, "octo").leaves["action"].quantiles is None
    # and without a count it is LeRobot's of format 2.0
    path = stored(tmp_path, {"action": short})
    assert formats.recognize(path) == "lerobot"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"std": None}, "numbers in 'std' of 'action': it holds None"),
        ({"mask": [1, 0, 1, 1]}, r"true or false in 'mask' of 'action': it holds \[1, 0"),
        ({"mask": [True, [False]]}, r"true or false in 'mask' of 'action'"),
        ({"mask": [True]}, r"one shape for 'action': mean has \(4,\), mask has \(1,\)"),
        ({"p99": [1.0]}, r"the quantile 0.99 has \(1,\)"),
    ],
)
def test_half_files_are_refused(tmp_path, change, said):
    path = stored(tmp_path, OCTO | {"action": OCTO["action"] | change})
    with pytest.raises(FormatError, match=said):
        octo.read(path)


@pytest.mark.parametrize("contents", [[], {}, {"a": 1}, {"a": {"action": 1}}, {"action": {}}])
def test_foreign_files_are_refused(tmp_path, contents):
    path = stored(tmp_path, contents)
    assert formats.recognize(path) is None
    for module in (octo, openvla):
        with pytest.raises(FormatError, match=r"dataset_statistics\.json must hold"):
            module.read(path)


def test_what_the_format_cannot_say_is_refused(tmp_path):
    ones, ranks = np.ones(2), {0.01: np.zeros(2), 0.99: np.ones(2)}
    whole = Statistics(*[ones] * 5, quantiles=ranks)
    other = Statistics(ones, ones, ones * 2, ones, ones, quantiles=ranks)
    for leaves, said in [
        ({"state": whole}, r"'action' and 'proprio', or those of data sets, .*: got 'state'"),
        ({"a/b/action": whole}, "got 'a/b/action'"),
        ({"action": whole, "b/action": whole}, "got 'action'"),
        ({"action": Statistics(*[ones] * 5)}, r"needs the quantiles 0.01 and 0.99: .* no 0\.01"),
        (
            {"action": whole, "proprio": other},
            r"one count for action and proprio: .* 1 and 2",
        ),
        ({"action": Statistics(ones, ones)}, "needs count, min and max"),
    ]:
        with pytest.raises(FormatError, match=said):
            octo.write(tmp_path / "new.json", leaves)
    assert not list(tmp_path.iterdir())


def test_padding_is_written_with_its_mask(tmp_path):
    known = Normalizer.load(stored(tmp_path, OPENVLA["bridge"])).pad(6)
    known.save(tmp_path / "new.json", format="openvla")
    new = json.loads((tmp_path / "new.json").read_text())
    assert new["action"]["mask"] == [*MASK, False, False]
    assert new["num_transitions"] == 7


# episodes ----------------------------------------------------------------------------------------


def test_the_number_of_episodes_comes_along(tmp_path, rng):
    numbers = {"a": 2, "b": [3, 4], "c": None}
    many = {name: OCTO | {"num_trajectories": held} for name, held in numbers.items()}
    known = Normalizer.load(stored(tmp_path, many))
    assert episodes.counts(known.notes) == {"a": 2, "b": 7}
    known.save(tmp_path / "own.json")
    Normalizer.load(tmp_path / "own.json").save(tmp_path / "new.json", format="octo")
    new = json.loads((tmp_path / "new.json").read_text())
    assert [new[name]["num_trajectories"] for name in "abc"] == [2, 7, None]


@pytest.mark.parametrize("held", [-1, 1e400, [2, None]])
def test_what_is_no_number_of_episodes_is_unknown(tmp_path, held):
    known = Normalizer.load(stored(tmp_path, OCTO | {"num_trajectories": held}))
    assert episodes.counts(known.notes) == {}


def test_fitting_demonstrations_knows_their_number(tmp_path, rng, capsys):
    h5py = pytest.importorskip("h5py")
    for name, numbers in (("a", (0, 1, 10)), ("b", (2, 3))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for number in numbers:
                file[f"data/demo_{number}/actions"] = rng.standard_normal((4, 2))
    wanted = ["--format", "octo", "--quantiles", "0.01,0.99", "--out", str(tmp_path / "o.json")]
    rename = ["--rename", "data/demo_*/actions=x/action"]
    files = [str(tmp_path / f"{name}.h5") for name in "ab"]
    assert fit([*files, *wanted, *rename]) == 0
    new = json.loads((tmp_path / "o.json").read_text())["x"]
    assert (new["num_transitions"], new["num_trajectories"]) == (20, 5)
    # of one of them alone, and of more batches, it is another one
    one = Normalizer.fit_files(files[0], {"data/demo_1/actions": 0})
    assert episodes.counts(one.notes) == {}
    whole = Normalizer.fit_files(files)
    assert episodes.counts(whole.notes) == {"": 5}
    assert episodes.counts(whole.merge(whole.without_data()).notes) == {"": 5}
    assert episodes.counts(whole.merge(whole).notes) == {}
    assert whole.update({"data/demo_*/actions": np.ones((4, 2))}).notes == ()


def test_a_fit_has_the_quantiles_that_a_file_needs(tmp_path, rng, capsys):
    x = rng.normal(size=(200, 3)).astype("float32")
    np.savez(tmp_path / "set.npz", action=x)
    out = tmp_path / "stats.json"
    assert fit([str(tmp_path / "set.npz"), "--format", "octo", "--out", str(out)]) == 0
    fitted = Normalizer.fit([{"action": x}], quantiles=(0.01, 0.99))
    own = json.loads(out.read_text())["action"]
    for key, rank in octo.QUANTILES.items():
        np.testing.assert_array_equal(own[key], fitted.quantiles[rank]["action"][0])
