"""Test files of statistics as a user meets them: load, save, show, convert, fit --format."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxnorm.__main__ import COMMANDS
from jaxnorm.data import Normalizer
from jaxnorm.data.command import main as fit
from jaxnorm.data.convert import main as convert
from jaxnorm.data.formats import FORMATS, WRITABLE
from jaxnorm.data.show import main as show
from jaxnorm.data.trees import flatten, map_leaves

# what each writer makes: a file, or a folder
TARGETS = {
    "openpi": "norm_stats.json",
    "octo": "dataset_statistics.json",
    "openvla": "dataset_statistics.json",
    "lerobot": "stats.json",
    "brax": "checkpoint",
    "graphcast": "stats",
    "makani": "stats",
    "sklearn": "scaler.npz",
}
NEEDS = {"brax": "orbax.checkpoint", "graphcast": "h5netcdf"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def of_robot(rng, leaves=("state", "action")):
    batch = {leaf: rng.standard_normal((400, 3)) * [1, 5, 0.1] + [0, 100, 0] for leaf in leaves}
    return batch, Normalizer.fit([batch], quantiles=(0.01, 0.1, 0.5, 0.9, 0.99))


@pytest.mark.parametrize("name", TARGETS)
def test_written_and_read_by_its_contents_alone(name, rng):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    leaves = {"openvla": ("action", "proprio"), "octo": ("action", "proprio")}.get(
        name, ("state", "action")
    )
    batch, fitted = of_robot(rng, leaves)
    if name in ("makani", "sklearn"):
        batch, fitted = batch[leaves[0]], Normalizer.fit([batch[leaves[0]]], quantiles=(0.01, 0.99))
    fitted.save(TARGETS[name], format=name)
    loaded = Normalizer.load(TARGETS[name])
    rtol = 1e-6 if name in ("brax", "makani", "graphcast") else 1e-13  # float32 in these files
    for path, leaf in fitted._state.leaves.items():
        found = loaded._state.leaves[path]
        for array in ("mean", "var"):
            np.testing.assert_allclose(
                getattr(found.summary.moments, array).ravel(),
                getattr(leaf.summary.moments, array).ravel(),
                rtol=rtol,
                atol=1e-12,
            )
    # channels and levels have maps behind them
    maps = name in ("makani", "graphcast")
    apart = (lambda x: x[..., None, None]) if maps else (lambda x: x)
    exact = flatten(fitted.normalize(batch))
    normalized = loaded.normalize(jax.tree.map(apart, batch))
    restored = flatten(loaded.denormalize(normalized))
    for path, x in flatten(batch).items():
        y = flatten(normalized)[path]
        np.testing.assert_allclose(y, apart(exact[path]), rtol=2e-5, atol=2e-4)
        np.testing.assert_allclose(restored[path], apart(x), rtol=1e-9, atol=1e-9)


def test_every_format_is_tried_here():
    assert set(TARGETS) == set(WRITABLE)
    # the statistics of a policy come within its weights, and are not written
    assert set(FORMATS) - set(WRITABLE) == {"lerobot_policy"}


# the commands ------------------------------------------------------------------------------------


def test_fit_show_and_convert(rng, capsys):
    batch, fitted = of_robot(rng)
    np.savez("robot.npz", **batch)
    assert (
        fit(["robot.npz", "--quantiles", "0.01,0.99", "--format", "openpi", "--out", "n.json"]) == 0
    )
    held = json.loads(Path("n.json").read_text())["norm_stats"]
    assert set(held) == {"state", "action"}
    np.testing.assert_allclose(held["state"]["q99"], fitted.quantile(0.99)["state"][0], rtol=1e-12)
    capsys.readouterr()
    assert show(["n.json", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"]["count"] is None
    assert shown["(formula)"]["standard"] == "(x - mean) / (deviation + 1e-06)"
    np.testing.assert_allclose(shown["state"]["quantiles"]["0.99"], fitted.quantile(0.99)["state"])
    assert show(["n.json"]) == 0
    printed = capsys.readouterr().out
    assert "99 %" in printed
    assert "standard: (x - mean) / (deviation + 1e-06)" in printed
    assert convert(["n.json", "ours.safetensors"]) == 0
    ours, theirs = Normalizer.load("ours.safetensors"), Normalizer.load("n.json")
    assert (ours.formula, ours.notes) == (theirs.formula, theirs.notes)
    assert any("openpi takes the first dimensions" in note for note in ours.notes)
    assert show(["ours.safetensors"]) == 0
    assert "Note: openpi takes the first dimensions" in capsys.readouterr().out
    assert convert(["ours.safetensors", "again.json", "--to", "openpi"]) == 0
    assert Path("again.json").read_text() == Path("n.json").read_text()


def test_convert_says_what_is_lost_and_how_readers_normalize(rng, capsys):
    _, fitted = of_robot(rng)
    fitted.save("stats.safetensors")
    assert convert(["stats.safetensors", "n.json", "--to", "openpi"]) == 0
    printed = capsys.readouterr().out
    assert "the file does not hold count, max, min, the quantile 0.1, " in printed
    said = "readers of this file compute (x - mean) / (deviation + 1e-06), not (x - mean) / max("
    assert said in printed


@pytest.mark.parametrize("name", TARGETS)
def test_convert_says_where_digits_are_lost(name, rng, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    leaf = "action"
    _, fitted = of_robot(rng, (leaf,))
    fitted.save("ours.json")
    assert convert(["ours.json", TARGETS[name], "--to", name]) == 0
    printed = capsys.readouterr().out
    single = name in ("brax", "makani")
    assert (f"the file keeps float32: the mean of {leaf} is off by up to " in printed) == single
    assert (f"the file keeps float32: the variance of {leaf} is off by" in printed) == single
    assert "is another one" not in printed
    nameless = name in ("makani", "sklearn")
    assert ("the file does not hold the name 'action'" in printed) == nameless
    assert "the file does not hold 'action'" not in printed


def test_convert_says_that_differences_have_no_mean(rng, capsys):
    pytest.importorskip("h5netcdf")
    Normalizer.fit([{"t": np.full((4, 1), 3.0) + np.arange(4.0)[:, None]}]).save("ours.json")
    assert convert(["ours.json", "diffs_stddev_by_level.nc", "--to", "graphcast"]) == 0
    printed = capsys.readouterr().out
    assert "Note: the file has another mean of t: it differs by up to 4." in printed
    assert "variance" not in printed


def test_what_a_format_cannot_say_is_refused_and_changes_nothing(capsys):
    Normalizer.from_statistics(mean=np.zeros(2), std=np.ones(2)).save("ours.json")
    assert convert(["ours.json", "stats.json", "--to", "lerobot"]) == 1
    assert "needs count, min and max" in capsys.readouterr().err
    assert convert(["ours.json", "n.json", "--to", "openpi"]) == 0
    merged = Normalizer.load("n.json")
    with pytest.raises(ValueError, match="merging needs count"):
        merged.merge(merged)


MISTAKES = {
    "missing.json must exist: there is no such file.": ["missing.json"],
    "it holds other JSON": ["other.json"],
    "it is no JSON, or cut off": ["cut.json"],
    "must be no pickle": ["scaler.pkl"],
    "damaged/global_means.npy must hold ": ["damaged"],
    "text.txt must be statistics in a known format: it is none": ["text.txt"],
}


@pytest.mark.parametrize("message", MISTAKES)
@pytest.mark.parametrize("command", [show, lambda arguments: convert([*arguments, "new.json"])])
def test_files_that_are_none(command, message, capsys):
    for name, text in {
        "other.json": '{"a": 1}',
        "cut.json": '{"norm_stats": {',
        "text.txt": "1",
    }.items():
        Path(name).write_text(text)
    Path("scaler.pkl").write_bytes(b"\x80\x04N.")
    Path("damaged").mkdir()
    for name in ("global_means.npy", "global_stds.npy"):
        Path("damaged", name).write_bytes(b"none")
    assert command(MISTAKES[message]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_command_is_listed():
    assert "convert" in COMMANDS


# objects -----------------------------------------------------------------------------------------


def test_objects_of_other_libraries(rng):
    scaler = {
        "mean_": np.array([1.0, 5.0]),
        "var_": np.array([4.0, 0.0]),
        "scale_": np.array([2.0, 1.0]),
        "n_samples_seen_": 10,
    }
    fitted = Normalizer.from_object(scaler)
    np.testing.assert_array_equal(fitted.normalize(np.array([[3.0, 6.0]])), [[1, 1]])
    running = {"mean": np.array([1.0]), "std": np.array([2.0]), "count": np.array(9)}
    running |= {"summed_variance": np.array([36.0])}
    assert Normalizer.from_object(running).moments.var.item() == 4
    with pytest.raises(ValueError, match="must have mean_, var_ and n_samples_seen_"):
        Normalizer.from_object(object())


def test_the_prior_of_gymnasium_is_taken_out(rng):
    x = 101_325 + 20 * rng.standard_normal(100)
    count, mean, var = 1e-4, 0.0, 1.0
    for one in x:
        total = count + 1
        moved = mean + (one - mean) / total
        var = (var * count + (one - mean) ** 2 * count / total) / total
        mean, count = moved, total
    held = {"mean": np.array([mean]), "var": np.array([var]), "count": count}
    squeezed = Normalizer.from_object(held)
    assert squeezed.normalize(x[:, None]).std() == pytest.approx(0.2, abs=0.02)
    assert "1e-4" in " ".join(squeezed.notes)
    freed = Normalizer.from_object(held, without_prior=True)
    assert freed.std.item() == pytest.approx(x.std(), rel=1e-6)
    assert freed.mean.item() == pytest.approx(x.mean(), rel=1e-12)


def test_the_guide_lists_every_format():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "statistics-files.md"
    rows = [
        line.split("|")[1].strip(" `") for line in guide.read_text().splitlines() if "| `" in line
    ]
    assert set(rows) == {*FORMATS, "jaxnorm"}


# found by a user ---------------------------------------------------------------------------------


def test_leaves_are_renamed(rng, capsys):
    batch, fitted = of_robot(rng, ("observation.state", "action"))
    np.savez("robot.npz", **batch)
    names = ["--rename", "observation.state=state", "--rename", "action=actions"]
    assert fit(["robot.npz", "--format", "openpi", "--out", "n.json", *names]) == 0
    said = capsys.readouterr().err
    assert "the file does not hold count, max, min of state." in said
    assert set(json.loads(Path("n.json").read_text())["norm_stats"]) == {"state", "actions"}
    fitted.save("ours.json")
    assert convert(["ours.json", "again.json", "--to", "openpi", *names]) == 0
    renamed = fitted.rename({"action": "robot/action"})
    x = {"robot": {"action": batch["action"]}}
    np.testing.assert_array_equal(
        renamed.normalize(x)["robot"]["action"], fitted.normalize(batch)["action"]
    )
    assert renamed.update({"observation.state": batch["action"], **x}).batches == 2
    flat = Normalizer.fit([{"data/x": np.ones((2, 1)), "data/y": np.ones((2, 1)), "z": None}])
    assert set(flat.rename({"data/y": "y"}).mean) == {"data/x", "y", "z"}
    with pytest.raises(ValueError, match="names must be of leaves that are fitted"):
        fitted.rename({"state": "x"})
    with pytest.raises(ValueError, match=r"a name of its own: 'observation\.state' would be of 2"):
        fitted.rename({"action": "observation.state"})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"u": "east"}, {"east", "wind/a", "wind/b", "rest/0", "rest/1/k"}),
        ({"wind/a": "a"}, {"u", "a", "wind/b", "rest/0", "rest/1/k"}),
        ({"rest/1/k": "k"}, {"u", "wind/a", "wind/b", "rest/0", "k"}),
    ],
)
def test_leaves_of_trees_are_renamed(names, expected):
    tree = {"u": 1, "wind": {"a": 2, "b": 3}, "rest": [4, {"k": 5}], "none": None}
    fitted = Normalizer.fit([map_leaves(lambda path, value: np.full((2, 1), value), tree)])
    renamed, before = flatten(fitted.rename(names).mean), flatten(fitted.mean)
    assert renamed.keys() == expected
    assert all(renamed[names.get(path, path)] == mean for path, mean in before.items())


def test_a_fit_that_a_format_cannot_say_is_not_lost(rng, capsys):
    np.savez("robot.npz", observation=rng.random((50, 3)))
    assert fit(["robot.npz", "--format", "octo", "--out", "d.json"]) == 1
    *_, way = capsys.readouterr().err.strip().splitlines()
    path = way.split()[2]
    assert way == f"jaxnorm convert {path} NEW --to NAME"
    assert convert([path, "d.json", "--to", "octo", "--rename", "observation=action"]) in (0, 1)
    assert convert([path, "n.json", "--to", "openpi"]) == 0


def test_show_keeps_names_whole_and_leaves_out_what_is_unknown(rng, capsys):
    name = "data/demo_*/obs/robot0_agentview_image_of_the_left_hand"
    Normalizer.from_statistics(mean={name: np.zeros(2)}, std={name: np.ones(2)}).save("s.json")
    assert show(["s.json"]) == 0
    printed = capsys.readouterr().out
    assert name in printed
    assert "count" not in printed
    assert show(["missing"]) == 1
    assert "missing must exist" in capsys.readouterr().err
