"""Test LeRobot's statistics of data formats 2.0, 2.1 and 3.0."""

import json

import numpy as np
import pytest

from jaxnorm import host
from jaxnorm.data import Normalizer, formats
from jaxnorm.data.formats import FormatError, Statistics, lerobot

# What lerobot.datasets.compute_stats of commit 7427f31 gave for the frames [[1, 10], [3, 10]] and
# for [[8, 10]], in float32; an episode of one frame has its mean as every quantile.
FIRST = {
    "min": [1.0, 10.0],
    "max": [3.0, 10.0],
    "mean": [2.0, 10.0],
    "std": [1.0, 0.0],
    "count": [2],
    "q01": [1.0, 10.0],
    "q50": [1.0, 10.0],
    "q99": [2.9999, 10.0],
}
SECOND = {
    "min": [8.0, 10.0],
    "max": [8.0, 10.0],
    "mean": [8.0, 10.0],
    "std": [0.0, 0.0],
    "count": [1],
    "q01": [8.0, 10.0],
    "q50": [8.0, 10.0],
    "q99": [8.0, 10.0],
}
# A boolean feature has a boolean minimum and maximum in an episode of one frame.
DONE = {"min": [True], "max": [True], "mean": [1.0], "std": [0.0], "count": [1]}
IMAGE = {key: [[[0.25 if key == "std" else 0.5]]] * 3 for key in ("min", "max", "mean", "std")} | {
    "count": [4]
}
MEAN_OF_ALL, VAR_OF_ALL = [4.0, 10.0], [26 / 3, 0.0]


def lines(folder, *episodes):
    path = folder / "meta" / "episodes_stats.jsonl"
    path.parent.mkdir()
    held = [{"episode_index": i, "stats": stats} for i, stats in enumerate(episodes)]
    path.write_text("\n".join(map(json.dumps, held)) + "\n")
    return path


def rows(folder, *episodes, number=0):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "meta" / "episodes" / "chunk-000" / f"file-{number:03d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = [
        {"episode_index": i, "tasks": ["pick"]}
        | {
            f"stats/{leaf}/{key}": value
            for leaf, entry in stats.items()
            for key, value in entry.items()
        }
        for i, stats in enumerate(episodes)
    ]
    names = {name: None for row in table for name in row}
    filled = [{name: row.get(name) for name in names} for row in table]
    parquet.write_table(pa.Table.from_pylist(filled), path)
    return path


def whole(folder, **features):
    path = folder / "stats.json"
    path.write_text(json.dumps(features))
    return path


@pytest.mark.parametrize("store", [lines, rows])
def test_episodes_are_merged_to_all_of_their_elements(tmp_path, store):
    path = store(tmp_path, {"action": FIRST}, {"action": SECOND, "next.done": DONE})
    for given in (tmp_path, tmp_path / "meta", path):
        assert formats.recognize(given) == "lerobot"
        read = formats.read(given, "lerobot")
        action, done = read.leaves["action"], read.leaves["next.done"]
        np.testing.assert_array_equal(action.count, [3, 3])
        np.testing.assert_array_equal(action.mean, MEAN_OF_ALL)
        np.testing.assert_allclose(action.var, VAR_OF_ALL, rtol=1e-15)
        np.testing.assert_array_equal(action.min, [1, 10])
        np.testing.assert_array_equal(action.max, [8, 10])
        np.testing.assert_array_equal(done.max, [1])
        np.testing.assert_array_equal(done.count, [1])


def test_quantiles_of_episodes_are_bounds(tmp_path):
    read = lerobot.read(lines(tmp_path, {"action": FIRST}, {"action": SECOND}))
    quantiles = read.leaves["action"].quantiles
    np.testing.assert_array_equal([quantiles[rank][0] for rank in (0.01, 0.5, 0.99)], [1, 1, 8])
    assert sum("bounds" in note for note in read.notes) == 1


def test_the_merge_is_that_of_the_data(tmp_path, rng):
    """Also where the mean is large, and episodes have very different lengths."""
    episodes = [rng.standard_normal((n, 2)) * [1, 1e-3] + 1e6 * n for n in (2, 3000, 7)]
    stats = [
        {"min": x.min(0), "max": x.max(0), "mean": x.mean(0), "std": x.std(0), "count": [len(x)]}
        for x in episodes
    ]
    stored = [{"s": {key: np.asarray(v).tolist() for key, v in one.items()}} for one in stats]
    read = lerobot.read(lines(tmp_path, *stored)).leaves["s"]
    true = host.moments(np.concatenate(episodes), 0)
    np.testing.assert_allclose(read.mean, true.mean[0], rtol=1e-14)
    np.testing.assert_allclose(read.var, true.var[0], rtol=1e-12)


def test_rows_of_several_files_are_read_in_order(tmp_path):
    rows(tmp_path, {"action": FIRST})
    rows(tmp_path, {"action": SECOND}, number=1)
    np.testing.assert_array_equal(lerobot.read(tmp_path).leaves["action"].mean, MEAN_OF_ALL)


def test_stats_json_is_preferred_to_episodes(tmp_path):
    rows(tmp_path, {"action": FIRST})
    whole(tmp_path / "meta", action=SECOND)
    np.testing.assert_array_equal(lerobot.read(tmp_path).leaves["action"].mean, [8, 10])


def test_a_whole_file_is_read_in_its_own_shapes(tmp_path):
    path = whole(
        tmp_path, **{"observation.images.top": IMAGE, "action": FIRST, "reward": {"left": DONE}}
    )
    assert formats.recognize(path) == "lerobot"
    leaves = lerobot.read(path).leaves
    assert leaves["observation.images.top"].mean.shape == (3, 1, 1)
    np.testing.assert_array_equal(leaves["observation.images.top"].count, np.full((3, 1, 1), 4))
    np.testing.assert_array_equal(leaves["observation.images.top"].var, np.full((3, 1, 1), 0.0625))
    # LeRobot splits a name at its slashes
    assert leaves["reward/left"].mean.shape == (1,)


@pytest.mark.parametrize(("std", "wrong"), [(0.0, True), (0.3, False), (0.5, False), (0.6, True)])
def test_deviations_that_cannot_be_are_noted(tmp_path, std, wrong):
    """LeRobot 0.4.4 saves 0 for every image; half the width is the most that there is."""
    like = lambda value: [[[value]]] * 3
    entry = {"min": like(0.0), "max": like(1.0), "mean": like(0.5), "std": like(std), "count": [9]}
    notes = lerobot.read(whole(tmp_path, **{"observation.image": entry})).notes
    said = f"cannot be right beside its minimum and maximum: it is {std} in feature 0, 1, 2."
    assert any(said in note for note in notes) == wrong
    assert any("cannot be right" in note for note in notes) == wrong


def test_format_2_0_has_no_count(tmp_path):
    old = {key: value for key, value in FIRST.items() if key in ("mean", "std", "min", "max")}
    read = lerobot.read(whole(tmp_path, action=old))
    assert read.leaves["action"].count is None
    assert lerobot.NO_COUNT in read.notes
    with pytest.raises(FormatError, match=r"stats\.json needs count: 'action' has no count"):
        lerobot.write(tmp_path / "new.json", read.leaves)


def test_the_formula_gives_the_numbers_of_lerobot(tmp_path):
    """lerobot.processor.normalize_processor of commit 7427f31 gave these, in float64."""
    entry = {
        "mean": [1.0, 2.0, 0.0],
        "std": [0.0, 2.0, 1.0],
        "min": [1.0, 0.0, -2.0],
        "max": [1.0, 4.0, 2.0],
        "count": [7],
        "q10": [1.0, 1.0, -0.5],
        "q90": [1.0, 3.0, 0.5],
    }
    known = Normalizer.load(whole(tmp_path, s=entry))
    x = {"s": np.array([1.25, 3.0, 0.5])}
    for mode, true in [
        ("standard", [25000000, 0.4999999975, 0.499999995]),
        ("min_max", [49999999, 0.5, 0.25]),
        ("quantile", [49999999, 1, 1]),
    ]:
        np.testing.assert_allclose(known.normalize(x, mode=mode)["s"], true, rtol=1e-12)


def test_round_trips_keep_every_bit(tmp_path, rng):
    n = lambda *shape: rng.standard_normal(shape)
    low = n(4)
    state = Statistics(
        mean=low + 1e3, var=n(4) ** 2, count=np.full(4, 2.0**40), min=low, max=low + 2, quantiles={
            0.01: n(4), 0.25: n(4), 0.99: n(4)
        }
    )  # fmt: skip
    color = Statistics(
        *(np.abs(n(3)) / 9 for _ in range(2)), *(np.full(3, v) for v in (9.0, 0.0, 1.0))
    )
    (tmp_path / "meta").mkdir()
    formats.write(tmp_path, {"state": state, "images.top": color}, "lerobot")
    path = tmp_path / "meta" / "stats.json"
    read = lerobot.read(path).leaves
    for name in ("mean", "count", "min", "max"):
        np.testing.assert_array_equal(getattr(read["state"], name), getattr(state, name))
    np.testing.assert_array_equal(np.sqrt(read["state"].var), np.sqrt(state.var))
    # LeRobot computes no 25 %
    assert list(read["state"].quantiles) == [0.01, 0.99]
    assert read["images.top"].mean.shape == (3, 1, 1)
    text = path.read_text()
    lerobot.write(path, read)
    assert path.read_text() == text
    assert json.loads(text)["state"]["count"] == [2**40]


def test_what_the_format_cannot_say_is_refused(tmp_path):
    ones = np.ones(3)
    for leaf, statistics, said in [
        ("s", Statistics(ones, ones), "needs count, min and max: 's' has no count, min or max"),
        ("s", Statistics(ones, ones, ones / 2, ones, ones), "one whole count .* 0.5 to 0.5"),
        ("s", Statistics(ones, ones, np.array([1, 2, 2]), ones, ones), "they have 1 to 2"),
        ("images.a", Statistics(ones, ones, ones, ones, ones * 255), r"\[0, 1\]: .* up to 255"),
        ("images.a", Statistics(*[np.ones((5, 5, 3))] * 5), r"'images.a' has \(5, 5, 3\)"),
        ("s", Statistics(ones, ones * np.inf, ones, ones, ones), "the var of 's' is inf"),
    ]:
        with pytest.raises(FormatError, match=said):
            lerobot.write(tmp_path, {leaf: statistics})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"action": 3}', '{"action": {"mean": [1]}}'])
def test_foreign_json_is_not_recognized_and_refused(tmp_path, text):
    path = tmp_path / "stats.json"
    path.write_text(text)
    assert formats.recognize(path) is None
    with pytest.raises(FormatError, match=r"stats\.json must hold"):
        lerobot.read(path)


def test_damaged_episodes_are_refused_by_line(tmp_path):
    path = lines(tmp_path, {"action": FIRST}, {"action": SECOND})
    path.write_text(path.read_text()[:-40])
    with pytest.raises(FormatError, match=r"episodes_stats.jsonl, line 2, must hold JSON"):
        lerobot.read(path)
    path.write_text('{"episode_index": 0}\n')
    with pytest.raises(FormatError, match="line 1, must hold 'stats': it holds none"):
        lerobot.read(path)
    path.write_text("\n")
    with pytest.raises(FormatError, match="must hold an episode at least"):
        lerobot.read(path)


def test_episodes_that_differ_are_refused(tmp_path):
    less = {key: value for key, value in SECOND.items() if key != "count"}
    path = lines(tmp_path, {"a": FIRST, "s": FIRST}, {"a": DONE, "s": less})
    with pytest.raises(FormatError, match=r"same statistics of 'a' .* \(1,\), \(2,\)"):
        lerobot.read(path)
    path.write_text(path.read_text().replace('"a"', '"unused"', 1).replace("[1.0, 10.0]", "[1, 2]"))
    with pytest.raises(FormatError, match=r"same statistics of 's' .* one has no count"):
        lerobot.read(path)


def test_damaged_parquet_is_refused(tmp_path):
    path = rows(tmp_path, {"action": FIRST})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match="must hold Parquet: it is none, or damaged"):
        lerobot.read(tmp_path)
    path.unlink()
    rows(tmp_path, {})
    with pytest.raises(FormatError, match="must hold columns such as 'stats/action/mean'"):
        lerobot.read(tmp_path)
    with pytest.raises(FormatError, match="must hold LeRobot's statistics"):
        lerobot.read(tmp_path / "meta" / "episodes" / "chunk-000")


def policy(folder, **config):
    numpy = pytest.importorskip("safetensors.numpy")
    name = "policy_preprocessor_step_3_normalizer_processor"
    arrays = {f"action.{key}": np.float32(value) for key, value in FIRST.items()}
    numpy.save_file(arrays, folder / f"{name}.safetensors")
    step = {"registry_name": "normalizer_processor", "config": config}
    steps = [{"registry_name": "device_processor"}, step | {"state_file": f"{name}.safetensors"}]
    path = folder / "policy_preprocessor.json"
    path.write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    return folder / f"{name}.safetensors"


def test_the_statistics_of_a_policy_are_read(tmp_path):
    path = policy(
        tmp_path,
        eps=1e-5,
        features={"action": {"type": "ACTION", "shape": [2]}},
        norm_map={"ACTION": "MIN_MAX"},
    )
    for given in (path, tmp_path, tmp_path / "policy_preprocessor.json"):
        assert formats.recognize(given) == "lerobot_policy"
        known = Normalizer.load(given)
        np.testing.assert_array_equal(known.mean["action"], [FIRST["mean"]])
        assert (known.formula.added, known.formula.range_zero) == (1e-5, 1e-5)
        assert "The policy normalizes ACTION by MIN_MAX, where ACTION is action." in known.notes
    with pytest.raises(FormatError, match="must be written by LeRobot, with the policy"):
        known.save(tmp_path / "new", format="lerobot_policy")


def test_damaged_policies_are_refused(tmp_path):
    path = policy(tmp_path)
    (tmp_path / "other").mkdir()
    policy(tmp_path / "other", eps="x")
    with pytest.raises(FormatError, match="a number >= 0 as eps: got 'x'"):
        formats.read(tmp_path / "other", "lerobot_policy")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(FormatError, match="must be a safetensors file: it is none, or cut off"):
        formats.read(tmp_path, "lerobot_policy")
    config = tmp_path / "policy_preprocessor.json"
    config.write_text('{"steps": [{"registry_name": "normalizer_processor", "state_file": 3}]}')
    with pytest.raises(FormatError, match="must name the file of a normalizer"):
        formats.read(tmp_path, "lerobot_policy")
