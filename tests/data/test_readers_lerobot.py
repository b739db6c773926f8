"""Test LeRobot's data sets, v2.1 and v3: features, padding, episodes, and what is left out."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from lerobot_folders import LENGTHS, feature, write
from reading import opened, read, refused

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
# times of changes, since readers are kept open by path and time
TIMES = itertools.count(1000)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


FEATURES = {
    "observation.state": feature("float32", 3),
    "action": feature("float32", 2),
    "observation.images.top": feature("video", 480, 640, 3),
    "next.done": feature("bool", 1),
}


@pytest.fixture(params=["v2.1", "v3.0"])
def arrays(request, rng):
    rows = sum(LENGTHS)
    state = rng.standard_normal((rows, 3)).astype(np.float32)
    action = rng.standard_normal((rows, 2)).astype(np.float32)
    fixed = pa.FixedSizeListArray.from_arrays(state.ravel(), 3)
    columns = {"observation.state": fixed, "action": list(action), "next.done": [False] * rows}
    write(request.param, columns, FEATURES)
    return {"observation.state": state, "action": action}


def test_features_are_leaves(arrays, capsys):
    found = read("set", size=100)
    assert set(found) == {"observation.state", "action", "next.done"}
    for name, x in arrays.items():
        np.testing.assert_array_equal(found[name], x)
    assert main(["set"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Written: stats.safetensors, of observation.state: 3 features, ")
    assert set(shown.err.splitlines()) == {
        "jaxnorm: 'observation.images.top' is left out, as it holds the frames of videos.",
        "jaxnorm: 'timestamp', 'frame_index', 'episode_index', 'index' and 'task_index' are left "
        "out, as each holds a coordinate of the others.",
    }
    assert read("set", {"timestamp": 0})["timestamp"].shape == (48,)
    assert Normalizer.load("stats.safetensors").notes == ("The data set has 4 episodes.",)


@pytest.mark.parametrize("size", [1, 300, 10**6])
def test_differences_stay_within_episodes(arrays, size, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", size)
    fitted = Normalizer.fit_files("set", {"action": "[time] f"}, diff="time")
    episodes = np.split(arrays["action"].astype(np.float64), np.cumsum(LENGTHS)[:-1])
    differences = np.concatenate([np.diff(episode, axis=0) for episode in episodes])
    assert fitted.moments["action"].count.tolist() == [[44, 44]]
    np.testing.assert_allclose(fitted.mean["action"][0], differences.mean(0), rtol=1e-12)
    np.testing.assert_allclose(fitted.std["action"][0], differences.std(0), rtol=1e-12)


def test_at_an_address(arrays):
    system = pytest.importorskip("fsspec").filesystem("memory")
    name = json.loads(Path("set/meta/info.json").read_text())["codebase_version"]
    system.put("set", f"/lerobot/{name}", recursive=True)
    np.testing.assert_array_equal(read(f"memory://lerobot/{name}")["action"], arrays["action"])


@pytest.mark.parametrize("deep", [False, True])
def test_padded_actions_are_masked(deep, rng):
    action = rng.standard_normal((10, 4, 2))
    pad = rng.random((10, 4)) < 0.3 if deep else rng.random(10) < 0.3
    action[pad] = np.nan
    columns = {"action": action.tolist(), "action_is_pad": pad.tolist()}
    write("v3.0", columns, {"action": feature("float32", 4, 2)})
    fitted = Normalizer.fit_files("set", {"action": "[n] t f"})  # for each step of a chunk
    keep = np.broadcast_to(~pad if deep else ~pad[:, None], (10, 4))
    count = fitted.moments["action"].count[0, :, 0]
    assert count.tolist() == keep.sum(0).tolist()
    np.testing.assert_allclose(fitted.mean["action"][0], np.nanmean(action, 0), rtol=1e-12)
    assert set(read("set")) == {"action"}


def test_images_in_tables_are_left_out():
    images = [{"bytes": b"png", "path": "a.png"}] * 4
    columns = {"observation.image": images, "action": np.ones((4, 2)).tolist()}
    features = {"observation.image": feature("image", 8, 8, 3), "action": feature("float32", 2)}
    write("v2.1", columns, features)
    assert set(read("set")) == {"action"}
    assert refused("set", {"observation.image": 0}) == (
        "set must hold numbers in 'observation.image': it holds the images of frames. Name what "
        "is fitted: axes={'action': 0}, or --pattern 'action=[n]'."
    )


def test_what_is_damaged_is_one_sentence():
    write("v2.1", {"action": np.ones((4, 2)).tolist()}, {"action": feature("float32", 3)})
    assert refused("set").startswith(
        "set must hold rows of shape (3,) in 'action', by meta/info.json: there are lists of "
        "length 2. Mend meta/info.json, or leave the column out: --pattern "
    )
    info = json.loads(Path("set/meta/info.json").read_text())
    info["features"]["other"] = feature("float32", 3)
    Path("set/meta/info.json").write_text(json.dumps(info))
    os.utime("set", ns=(1, 1))
    assert refused("set") == ("set must hold the column 'other', of meta/info.json: it has none.")
    for number, text in enumerate(("{", "[]", '{"features": {"a": {}}}')):
        Path("set/meta/info.json").write_text(text)
        os.utime("set", ns=(2, number))
        assert refused("set").startswith("set must describe features in meta/info.json: ")
    os.makedirs("none/meta")
    Path("none/meta/info.json").write_text('{"features": {}}')
    assert (
        refused("none") == "none must hold the folder data, beside meta/info.json: there is none."
    )
    os.makedirs("none/data")
    os.utime("none", ns=(3, 3))
    assert refused("none") == "none/data must hold .parquet files: there are none."


def describe(**changes):
    """Change what meta/info.json says."""
    info = json.loads(Path("set/meta/info.json").read_text())
    features = info["features"] | changes.pop("features", {})
    Path("set/meta/info.json").write_text(json.dumps(info | changes | {"features": features}))
    os.utime("set", ns=(1, next(TIMES)))


def test_files_that_were_not_downloaded_are_missed(arrays):
    describe(total_frames=48)
    assert len(read("set")["action"]) == 48
    described = json.loads(Path("set/meta/info.json").read_text())["codebase_version"]
    if described == "v2.1":
        os.remove("set/data/chunk-000/episode_000002.parquet")
        os.utime("set", ns=(1, next(TIMES)))
        assert refused("set") == (
            "set must hold 48 frames by meta/info.json: it holds 18. Download the rest, or fit "
            "set/data for these alone."
        )
        assert len(read("set/data")["action"]) == 18
    else:
        describe(total_frames=47)
        assert refused("set") == (
            "set must hold 47 frames by meta/info.json: it holds 48. Download it anew, or fit "
            "set/data for these alone."
        )


@pytest.mark.parametrize(
    ("name", "shape", "held"),
    [
        ("observation.state", (4,), "it holds rows of shape (3,)"),
        ("next.done", (2,), "it holds rows of shape ()"),
        ("action", (3,), "there are lists of length 2"),
        ("action", (2, 2), "it holds rows of shape (2,)"),
    ],
)
def test_features_of_other_shapes_than_described(arrays, name, shape, held):
    describe(features={name: feature("float32", *shape)})
    assert refused("set").startswith(
        f"set must hold rows of shape {shape} in {name!r}, by meta/info.json: {held}. Mend "
    )


def test_axes_of_size_one_are_left_out_of_columns(arrays):
    describe(features={"action": feature("float32", 1, 2), "next.done": feature("bool")})
    assert read("set")["action"].shape == (48, 2)


def test_no_data_are_read_to_know_the_shapes(arrays, monkeypatch):
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    assert len(opened("set", size=100)) > 3
