"""Test that files of statistics replace no other files, and what damaged ones hold is named."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxnorm.data import Normalizer
from jaxnorm.data.command import main as fit
from jaxnorm.data.convert import main as convert
from jaxnorm.data.formats import WRITABLE, FormatError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fitted(rng):
    batch = {leaf: rng.standard_normal((40, 3)) for leaf in ("action", "proprio")}
    return Normalizer.fit([batch], quantiles=(0.01, 0.99))


# targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("target", ["v.npy", "v.npz", "v.txt", "other.json", "v.nc", "run/v.zarr"])
def test_data_files_are_never_overwritten(name, target, fitted, capsys):
    fitted.save("stats.safetensors")
    Path("run").mkdir()
    np.save("v.npy", np.ones(3))
    np.savez("v.npz", a=np.ones(3))
    Path("other.json").write_text('{"a": 1}')
    for path in ("v.txt", "v.nc", "run/v.zarr"):
        Path(path).write_bytes(b"CDF\x01")
    before = Path(target).read_bytes()
    assert convert(["stats.safetensors", target, "--to", name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert Path(target).name in said
    assert Path(target).read_bytes() == before
    # before a long fit begins
    np.savez("robot.npz", a=np.ones((4, 2)))
    assert fit(["robot.npz", "--format", name, "--out", target]) == 2
    assert capsys.readouterr().err == said
    assert Path(target).read_bytes() == before


@pytest.mark.parametrize("name", ["model.safetensors", "package.json"])
def test_our_own_format_replaces_statistics_alone(name, fitted, capsys):
    from safetensors.numpy import save_file

    fitted.save("stats.json")
    save_file({"weight": np.ones(3)}, "model.safetensors")
    Path("package.json").write_text('{"name": "jaxnorm"}' + " " * 100)
    before = Path(name).read_bytes()
    assert convert(["stats.json", name]) == 2
    assert "must be a new file, or one of statistics" in capsys.readouterr().err
    assert Path(name).read_bytes() == before
    Path(name).write_bytes(b"")
    assert convert(["stats.json", name]) == 0  # an empty file holds nothing
    assert convert(["stats.json", name]) == 0


def test_the_configuration_of_a_model_is_kept(fitted, capsys):
    entry = {key: [1.0] for key in ("mean", "std", "min", "max", "q01", "q99")}
    steps = [{"registry_name": "normalizer_processor", "state_file": "x.safetensors"}]
    fitted.save("stats.json")
    for name, held in {
        "config.json": {"vocabulary": 3, "norm_stats": {"bridge": {"action": entry}}},
        "policy_preprocessor.json": {"steps": steps},
    }.items():
        Path(name).write_text(json.dumps(held))
        for format in ("jaxnorm", "openpi", "openvla", "lerobot"):
            assert convert(["stats.json", name, "--to", format]) == 2
            assert "it holds something else" in capsys.readouterr().err
        assert json.loads(Path(name).read_text()) == held


@pytest.mark.parametrize("name", ["s3://bucket/stats.json", "memory://a/stats.safetensors"])
def test_addresses_are_refused_in_words(name, fitted, capsys):
    said = re.escape(f"{name} must be a local file: addresses are read as data, not as statistics")
    fitted.save("stats.safetensors")
    np.savez("robot.npz", a=np.ones((4, 2)))
    for format in (None, "openpi", "brax"):
        with pytest.raises(ValueError, match=said):
            fitted.save(name, format=format)
        with pytest.raises(ValueError, match=said):
            Normalizer.load(name, format=format)
    for command, arguments in [
        (convert, ["stats.safetensors", name]),
        (convert, [name, "new.json"]),
        (fit, ["robot.npz", "--out", name]),
    ]:
        assert command(arguments) in (1, 2)
        assert re.search(said, capsys.readouterr().err)
    assert sorted(path.name for path in Path().iterdir()) == ["robot.npz", "stats.safetensors"]


@pytest.mark.parametrize(
    ("name", "target", "status", "said"),
    [
        ("brax", "folder", 2, "folder must not exist: it does. Name another folder, or remove it."),
        ("octo", "folder", 1, "folder must be a file: it is a folder. Name another one."),
        (
            "lerobot",
            "folder",
            1,
            "must lie in a folder that exists: folder/meta is none. Make it first.",
        ),
        ("makani", "file", 2, "file must be a folder: it is a file. Name another one."),
        ("jaxnorm", "file/a.json", 1, "file must be a folder: it is a file. Name another one."),
        ("graphcast", "file/a", 1, "file must be a folder: it is a file. Name another one."),
    ],
)
def test_where_a_format_cannot_be_written_is_known_before_the_fit(
    name, target, status, said, capsys
):
    for needed, module in (("brax", "orbax.checkpoint"), ("graphcast", "xarray")):
        if name == needed:
            pytest.importorskip(module)
    Path("folder").mkdir()
    Path("file").touch()
    np.savez("robot.npz", action=np.ones((4, 2)))
    assert fit(["robot.npz", "--format", name, "--out", target]) == status
    assert capsys.readouterr().err.endswith(f"{said}\n")
    # no state of a fit
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder", "robot.npz"]


@pytest.mark.parametrize(("name", "module"), [("brax", "orbax"), ("graphcast", "xarray")])
def test_a_library_that_is_missing_is_known_before_the_fit(name, module, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    np.savez("robot.npz", action=np.ones((4, 2)))
    assert fit(["robot.npz", "--format", name, "--out", "new"]) == 1
    assert "which is not installed: pip install" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["robot.npz"]


# damaged files -----------------------------------------------------------------------------------

BIG = "1" + 400 * "0"
ENTRY = '"mean": [1.0], "std": [1.0], "max": [2.0]'
ABOVE = "a minimum must not be above its maximum: got 3.0, 2.0"
SCALER = '{"mean_": [1, 2], "var_": [1, 2], "scale_": [1, 2], "n_samples_seen_":'
DAMAGED = [
    (
        "openpi",
        '{"norm_stats": {"s": {"mean": [1, BIG], "std": [1, 2]}}}',
        "beyond those of fl",
    ),
    ("openpi", '{"norm_stats": {"s": {"mean": BIG, "std": 1}}}', "'mean' of 's'"),
    ("sklearn", '{"mean": [[1], [1, 2]], "variance": [1, 2]}', "lists of different lengths"),
    ("sklearn", "SCALER [[1], [1, 2]]}", "lists of different lengths"),
    ("sklearn", "SCALER BIG}", "numbers in n_samples_seen_"),
    ("sklearn", "SCALER 1e400}", "count must be finite: got inf"),
    (
        "lerobot",
        '{"s": {ENTRY, "min": [0], "count": [1e400]}}',
        "leaf 's': count must be finite: got inf",
    ),
    ("lerobot", '{"s": {ENTRY, "min": [3], "count": [5]}}', f"leaf 's': {ABOVE}"),
    ("octo", '{"action": {ENTRY, "min": [3]}}', f"leaf 'action': {ABOVE}"),
    ("openvla", '{"b": {"action": {ENTRY, "min": [3]}}}', f"leaf 'b/action': {ABOVE}"),
    (
        "openpi",
        '{"norm_stats": {"a": {"mean": [1], "std": [1]}, "a/b": {"mean": [1], "std": [1]}}}',
        "'a/b' must not lie within a leaf, which 'a' is",
    ),
    (
        "openpi",
        '{"norm_stats": {"a/b": {"mean": [1], "std": [1]}, "a": {"mean": [1], "std": [1]}}}',
        "'a' must not be a leaf and a tree of leaves",
    ),
]


@pytest.mark.parametrize(("name", "text", "said"), DAMAGED)
def test_damaged_files_are_refused_by_their_names(name, text, said):
    for word, meant in (("BIG", BIG), ("ENTRY", ENTRY), ("SCALER", SCALER)):
        text = text.replace(word, meant)
    Path("damaged.json").write_text(text)
    with pytest.raises(FormatError, match=re.escape(said)) as error:
        Normalizer.load("damaged.json", format=name)
    assert "damaged.json" in str(error.value)


@pytest.mark.parametrize("name", ["openpi", "lerobot", "octo", "openvla"])
def test_quantiles_that_are_not_finite_are_not_written(name):
    known = {"mean": np.ones(2), "std": np.ones(2), "min": np.zeros(2), "max": 2 * np.ones(2)}
    trees = {key: {"action": array} for key, array in known.items()}
    ranks = {0.01: {"action": np.array([0.0, np.nan])}, 0.99: {"action": np.ones(2)}}
    fitted = Normalizer.from_statistics(**trees, count=5, quantiles=ranks)
    with pytest.raises(FormatError, match=r"the quantile 0\.01 of 'action' is nan in feature 1"):
        fitted.save("new.json", format=name)
    assert not list(Path().iterdir())
