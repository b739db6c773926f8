"""Test ``jaxnorm fit``: data sets in files, read in pieces and resumable.

Errors say which file is at fault, and why.
"""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import jaxnorm
from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main

ROWS, FEATURES = 400, 3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # of processes that start here
    monkeypatch.setenv("PYTHONPATH", str(Path(jaxnorm.__file__).parents[1]))
    monkeypatch.setattr(sources, "PIECE", 1000)  # bytes, so that files have many
    return tmp_path


@pytest.fixture
def arrays(rng):
    return {
        "image": rng.integers(0, 256, (ROWS, 2, 2, FEATURES), np.uint8),
        "state": (rng.standard_normal((ROWS, FEATURES)) + 1e3).astype(np.float32),
        "label": np.arange(ROWS),
    }


def fit(*arguments):
    return main(list(map(str, arguments)))


def said(capsys):
    return capsys.readouterr().err


def assert_fitted(path, leaves):
    fitted = Normalizer.load(path)
    assert set(fitted.summaries) == set(leaves)
    for leaf, x in leaves.items():
        x = x.reshape(-1, x.shape[-1]).astype(np.float64)
        moments, low, high = fitted.summaries[leaf]
        np.testing.assert_array_equal(moments.count.ravel(), np.full(x.shape[-1], len(x)))
        np.testing.assert_allclose(moments.mean.ravel(), x.mean(0), rtol=1e-14)
        np.testing.assert_allclose(moments.var.ravel(), x.var(0), rtol=1e-12)
        np.testing.assert_array_equal(low.ravel(), x.min(0))
        np.testing.assert_array_equal(high.ravel(), x.max(0))
    return fitted


@pytest.mark.parametrize("layout", ["C", "F"])
def test_npy(layout, arrays, capsys):
    np.save("a.npy", np.asarray(arrays["state"][:150], order=layout))
    np.save("b.npy", arrays["state"][150:])
    np.save("none.npy", arrays["state"][:0])
    assert fit("a.npy", "none.npy", "b.npy", "--pattern", "[n] f", "--out", "to/stats.json") == 0
    assert (
        capsys.readouterr().out
        == "Written: to/stats.json, of an array: 3 features, 400 elements each\n"
    )
    assert assert_fitted("to/stats.json", {"": arrays["state"]}).batches > 3
    assert os.listdir("to") == ["stats.json"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save, arrays):
    save("a.npz", **arrays)
    assert fit("a.npz", "--pattern", "image=[n h w] c", "--pattern", "state=[n] f") == 0
    fitted = assert_fitted("stats.safetensors", {leaf: arrays[leaf] for leaf in ("image", "state")})
    assert fitted.normalize(arrays)["image"].dtype == np.float32
    save("b.npz", **{leaf: x[:7] for leaf, x in arrays.items()})
    assert fit("a.npz", "b.npz", "--out", "all.json") == 0
    assert Normalizer.load("all.json").moments["label"].count.item() == ROWS + 7
    save("f.npz", state=np.asfortranarray(arrays["state"]))
    assert fit("f.npz") == 0
    assert_fitted("stats.safetensors", {"state": arrays["state"]})


def test_an_axis_that_is_not_the_first(arrays):
    np.save("a.npy", arrays["state"].T)
    assert fit("a.npy", "--pattern", "f [n]") == 0
    assert_fitted("stats.safetensors", {"": arrays["state"]})
    np.savez_compressed("a.npz", x=arrays["state"].T)
    assert fit("a.npz", "--pattern", "(g [f]) [n]", "--size", "g=1") == 0
    assert_fitted("stats.safetensors", {"x": arrays["state"].reshape(-1, 1)})


def test_parquet(arrays):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    state = arrays["state"]
    with_nulls = pa.array(state[:, 0], mask=np.arange(ROWS) % 5 == 0)
    columns = {"x": state[:, 0], "nulls": with_nulls, "list": list(state), "text": ["a"] * ROWS}
    parquet.write_table(pa.table(columns), "a.parquet", row_group_size=37)
    given = ["--pattern", "x=[n]", "--pattern", "nulls=[n]", "--pattern", "list=[n] f"]
    assert fit("a.parquet", *given) == 0
    kept = state[np.arange(ROWS) % 5 != 0, :1]
    fitted = assert_fitted("stats.safetensors", {"x": state[:, :1], "nulls": kept, "list": state})
    assert fitted.batches > 3
    assert fit("a.parquet") == 0  # text, which holds no numbers, is left out
    fitted = assert_fitted("stats.safetensors", {"x": state[:, :1], "nulls": kept, "list": state})


def test_columns_that_no_pattern_names_may_hold_anything(arrays):
    """Their first row, by which columns of lists are measured, may be missing."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    others = {
        "text": [None, "a"],
        "texts": [[None, "b"], ["a", "b"]],
        "lists": [None, [1.0]],
        "structs": [None, {"k": 1}],
    }
    columns = {"x": arrays["state"][:2, 0], "flag": [None, True], **others}
    parquet.write_table(pa.table(columns), "a.parquet")
    assert fit("a.parquet", "--pattern", "x=[n]") == 0
    assert_fitted("stats.safetensors", {"x": arrays["state"][:2, :1]})


def test_columns_that_hold_no_numbers_are_refused(capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": [None, "a"], "lists": [None, [1.0]]}), "a.parquet")
    assert fit("a.parquet", "--pattern", "text=[n]") == 2
    assert (
        "a.parquet must hold numbers in 'text': it holds string. Name what is fitted: --pattern "
        "'lists=[n]'." in said(capsys)
    )
    assert fit("a.parquet", "--pattern", "lists=[n] f") == 0  # without the list that is null
    assert_fitted("stats.safetensors", {"lists": np.ones((1, 1))})


def test_ragged_lists_are_refused(capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": [[1.0, 2.0], [3.0], [4.0]]}), "a.parquet")
    assert fit("a.parquet") == 1
    assert (
        "a.parquet must hold lists of one length in 'x': there are lengths 1, 2. Pad them, or "
        "leave the column out." in said(capsys)
    )


def test_zarr(arrays):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group("a.zarr", mode="w")
    for leaf, inside in (("image", group), ("state", group.create_group("inner"))):
        inside.create_array(leaf, data=arrays[leaf], chunks=(64, *arrays[leaf].shape[1:]))
    assert fit("a.zarr", "--pattern", "image=[n h w] c", "--pattern", "inner/state=[n] f") == 0
    fitted = assert_fitted(
        "stats.safetensors", {"image": arrays["image"], "inner/state": arrays["state"]}
    )
    assert fitted.batches == 7
    zarr.save("b.zarr", arrays["state"])
    assert fit("b.zarr") == 0
    assert_fitted("stats.safetensors", {"": arrays["state"]})


def test_features_that_are_not_finite_are_counted(arrays, capsys):
    x = np.ones((4, 3), np.float32)
    x[0, 0], x[1, 2] = np.nan, np.inf
    np.save("nan.npy", x)
    assert fit("nan.npy") == 1
    says = (
        "jaxnorm: 2 features of the array (0, 2) hold NaN or Inf, and have no mean. "
        "--skip-nan leaves out elements that are NaN.\n"
    )
    assert said(capsys).endswith(says)


def test_interrupted_it_goes_on_and_gives_the_same(arrays, monkeypatch, capsys):
    np.save("a.npy", arrays["state"])
    assert fit("a.npy", "--out", "whole.json") == 0
    read, done = sources.Piece.read, []

    def interrupted(piece):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(piece)
        return read(piece)

    monkeypatch.setattr(sources.Piece, "read", interrupted)
    done[:] = [None] * 3
    assert fit("a.npy", "--out", "stats.json") == 130
    assert said(capsys) == "Stopped before the first of 5 pieces was done. Run the same command.\n"
    done.clear()
    assert fit("a.npy", "--out", "stats.json") == 130
    text = said(capsys)
    assert text.startswith("Stopped. 3 of 5 pieces are in .stats.")
    assert text.endswith("This goes on:\njaxnorm fit a.npy --out stats.json --resume\n")
    monkeypatch.setattr(sources.Piece, "read", lambda piece: done.append(piece) or read(piece))
    assert fit("a.npy", "--out", "stats.json", "--resume") == 0
    assert len(done) == len(set(done)) == 5
    assert Path("stats.json").read_text() == Path("whole.json").read_text()
    assert fit("a.npy", "--out", "stats.json", "--resume") == 1
    assert "there must be an interrupted fit of these files" in said(capsys)


@pytest.fixture
def heeded():
    """Interrupts, of processes that start here: what a shell runs beside others ignores them, and
    so would they.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_a_process_ends_on_an_interrupt_and_goes_on(arrays):
    np.save("a.npy", arrays["state"])
    code = """
import sys, time
from jaxnorm import __main__
from jaxnorm.data import sources
sources.PIECE, read, seconds = 1000, sources.Piece.read, iter({} or [0] * 9)
def slowly(piece):
    print("read", flush=True)
    time.sleep(next(seconds))
    return read(piece)
sources.Piece.read = slowly
sys.argv = ["jaxnorm", "fit", "a.npy", *{}]
sys.exit(__main__.main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code.format([0, 100], [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert [process.stdout.readline() for _ in range(2)] == ["read\n"] * 2
    process.send_signal(signal.SIGINT)  # however late, the second piece is still being read
    assert "This goes on:\njaxnorm fit a.npy --resume" in process.communicate()[1]
    assert process.returncode == 130
    resumed = subprocess.run(
        [sys.executable, "-c", code.format([], ["--resume"])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert resumed.stdout.count("read") == 4
    assert_fitted("stats.safetensors", {"": arrays["state"]})


def damaged(path, arrays):
    np.save(path, arrays["state"])
    os.truncate(path, os.path.getsize(path) // 2)


WRONG = {
    "none.npy must exist: there is no such file.": lambda arrays: ["none.npy"],
    "cut.npy cannot be read, it may be damaged or no .npy file: ValueError": lambda arrays: (
        damaged("cut.npy", arrays) or ["cut.npy"]
    ),
    "text.npz cannot be read, it may be damaged or no .npz file: Bad": lambda arrays: (
        Path("text.npz").write_text("x") and ["text.npz"]
    ),
    "empty.npy must hold data: it is empty.": lambda arrays: (
        Path("empty.npy").touch() or ["empty.npy"]
    ),
    "a.txt must be one of .npy, .npz, .parquet, .pq, .zarr": lambda arrays: (
        Path("a.txt").write_text("x") and ["a.txt"]
    ),
    "the files must hold elements: zero.npy holds none.": lambda arrays: (
        np.save("zero.npy", np.ones((0, 3))) or ["zero.npy"]
    ),
    "all files must hold the same arrays: b.npz and a.npz differ in 'y'.": lambda arrays: (
        np.savez("a.npz", x=arrays["state"])
        or np.savez("b.npz", x=arrays["state"], y=arrays["label"])
        or ["a.npz", "b.npz"]
    ),
    (
        "all files must have the same features: the statistics have shape (1, 3) in a.npy, "
        "(1, 2) in b.npy."
    ): lambda arrays: (
        np.save("a.npy", arrays["state"])
        or np.save("b.npy", arrays["state"][:, :2])
        or ["a.npy", "b.npy"]
    ),
    "a.npy must hold numbers: it holds <U1.": lambda arrays: (
        np.save("a.npy", np.array([["a"]])) or ["a.npy"]
    ),
}
USAGE = {
    "a.npz must hold 'z': it holds 'x'.": lambda arrays: (
        np.savez("a.npz", x=arrays["state"]) or ["a.npz", "--pattern", "z=[n] f"]
    ),
    "a.npy: the pattern must name every axis": lambda arrays: (
        np.save("a.npy", arrays["state"]) or ["a.npy", "--pattern", "[n]"]
    ),
    "must end in .safetensors or .json: got 'out.txt'": lambda arrays: [
        "a.npy",
        "--out",
        "out.txt",
    ],
    "--pattern must be given once for all leaves": lambda arrays: [
        "a.npy",
        "--pattern",
        "[n]",
        "--pattern",
        "x=[n]",
    ],
    (
        "--size must give the size of a name in a --pattern: got g=3, patterns '[n] f'."
    ): lambda arrays: [
        "a.npy",
        "--pattern",
        "[n] f",
        "--size",
        "g=3",
    ],
}
WRONG |= USAGE


@pytest.mark.parametrize("text", WRONG)
def test_errors_name_the_file_and_the_reason(text, arrays, capsys):
    assert fit(*WRONG[text](arrays)) == (2 if text in USAGE else 1)
    found = said(capsys)
    assert text in found
    assert found.startswith("jaxnorm: ")
    assert not [name for name in os.listdir() if name.startswith((".stats", "stats"))]


def test_it_needs_neither_jax_nor_the_experiments(arrays):
    np.save("a.npy", arrays["state"])
    code = """
import sys
import zipfile
for missing in ("jax", "flax", "optax", "sklearn", "matplotlib"):
    sys.modules[missing] = None
from jaxnorm.__main__ import main
sys.argv = ["jaxnorm", "fit", "a.npy"]
sys.exit(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert_fitted("stats.safetensors", {"": arrays["state"]})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_objects_that_no_pattern_names_are_left_alone(save, arrays, capsys):
    save("o.npz", x=arrays["state"], meta=np.array([{"k": 1}] * 50, object))
    assert fit("o.npz", "--pattern", "x=[n] f") == 0
    assert fit("o.npz", "--pattern", "meta=[n]") == 2
    assert "o.npz must hold numbers in 'meta': it holds Python's objects." in said(capsys)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_of_an_archive_that_are_no_arrays_are_left_alone(compression, arrays):
    np.savez("a.npz", x=arrays["state"])
    with zipfile.ZipFile("a.npz", "a", compression) as archive:
        archive.writestr("README.txt", "about x")
    assert fit("a.npz") == 0
    assert_fitted("stats.safetensors", {"x": arrays["state"]})
