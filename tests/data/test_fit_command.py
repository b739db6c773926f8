"""Test ``jaxnorm fit`` and ``jaxnorm show``: what they leave out, keep and say.

Fits may end early.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxnorm
from jaxnorm.data import Normalizer, files, progress, sources
from jaxnorm.data.command import main

ROWS = 400


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # of processes that start here
    monkeypatch.setenv("PYTHONPATH", str(Path(jaxnorm.__file__).parents[1]))
    monkeypatch.setattr(sources, "PIECE", 1000)  # bytes, so that files have many
    return tmp_path


@pytest.fixture
def x(rng):
    return (rng.standard_normal((ROWS, 3)) + 1e3).astype(np.float32)


def fit(*arguments):
    return main(list(map(str, arguments)))


def states():
    return sorted(name for name in os.listdir() if name.startswith(".stats"))


class Reading:
    """Reading stops with an interrupt after ``limit`` pieces; ``done`` are those that were read."""

    def __init__(self, monkeypatch):
        self.done, self.limit, read = [], None, sources.Piece.read

        def reading(piece):
            if len(self.done) == self.limit:
                raise KeyboardInterrupt
            self.done.append(piece)
            return read(piece)

        monkeypatch.setattr(sources.Piece, "read", reading)

    def up_to(self, limit):
        self.done.clear()
        self.limit = limit


@pytest.fixture
def reading(monkeypatch):
    return Reading(monkeypatch)


# what is left out --------------------------------------------------------------------------------


def test_nan_is_skipped(x, capsys):
    x[::3, 0] = np.nan
    np.save("a.npy", x)
    assert fit("a.npy", "--skip-nan") == 0
    assert capsys.readouterr().err == ""
    moments, low, high = Normalizer.load("stats.safetensors").summaries[""]
    assert moments.count.tolist() == [[ROWS - 134, ROWS, ROWS]]
    np.testing.assert_allclose(moments.mean[0], np.nanmean(x.astype(np.float64), 0), rtol=1e-14)
    np.testing.assert_allclose(moments.var[0], np.nanvar(x.astype(np.float64), 0), rtol=1e-12)
    np.testing.assert_array_equal((low[0], high[0]), (np.nanmin(x, 0), np.nanmax(x, 0)))
    # of an array, as without
    assert isinstance(Normalizer.load("stats.safetensors").moments, jaxnorm.host.Moments)


def test_inf_is_not_skipped(x, capsys):
    x[0, 0], x[1, 1] = np.inf, np.nan
    np.savez("a.npz", x=x, n=np.arange(ROWS))
    assert fit("a.npz", "--skip-nan") == 1
    assert capsys.readouterr().err == "jaxnorm: 1 feature of x (0) holds Inf, and has no mean.\n"
    assert Normalizer.load("stats.safetensors").moments["n"].mean.tolist() == [199.5]


def test_features_without_any_element_have_no_mean(x, capsys):
    x[:, 1], x[0, 0] = np.nan, np.inf
    np.savez("a.npz", x=x, y=x[:, ::2], keep=np.zeros(ROWS, bool))
    patterns = ["--pattern", "x=[n] f", "--pattern", "y=[n] f"]
    assert fit("a.npz", "--skip-nan", *patterns, "--where", "y=keep") == 1
    assert capsys.readouterr().err == (
        "jaxnorm: 1 feature of x (0) holds Inf, and has no mean.\n"
        "jaxnorm: 1 feature of x (1) holds no element that counts, and has no mean.\n"
        "jaxnorm: 2 features of y (0, 1) hold no element that counts, and have no mean.\n"
    )


@pytest.mark.parametrize("kind", ["bool", "float32", "0 and 1"])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 6), (ROWS, 6, 1), (ROWS, 1, 2)])
def test_a_leaf_masks_another(kind, shape, rng):
    state = rng.standard_normal((ROWS, 6, 2))
    keep = rng.random(shape) < 0.6
    if kind == "float32":
        keep = (keep * rng.integers(1, 4, shape)).astype(kind)
    keep = keep.astype(np.int8) if kind == "0 and 1" else keep
    full = np.broadcast_to(keep.reshape(shape + (1,) * (3 - len(shape))), state.shape).astype(
        np.float64
    )
    state[full == 0] = np.nan
    np.savez("a.npz", state=state, keep=keep, other=np.arange(ROWS))
    assert fit("a.npz", "--pattern", "state=[n t] f", "--where", "state=keep") == 0
    fitted = Normalizer.load("stats.safetensors")
    assert set(fitted.summaries) == {"state"}
    filled = np.nan_to_num(state)
    mean = (full * filled).sum((0, 1)) / full.sum((0, 1))
    np.testing.assert_allclose(fitted.moments["state"].count[0, 0], full.sum((0, 1)), rtol=1e-14)
    np.testing.assert_allclose(fitted.moments["state"].mean[0, 0], mean, atol=1e-14)
    np.testing.assert_allclose(
        fitted.moments["state"].var[0, 0],
        (full * (filled - mean) ** 2).sum((0, 1)) / full.sum((0, 1)),
        rtol=1e-12,
    )


def test_integers_that_are_no_booleans_mask_nothing(x, capsys):
    """They may be labels; as weights they would change the statistics without a word."""
    np.savez("a.npz", x=x, label=np.arange(ROWS) % 7)
    assert fit("a.npz", "--where", "x=label") == 2
    assert capsys.readouterr().err.startswith(
        "jaxnorm: a.npz must hold booleans or float weights in 'label', as it masks: "
        "it holds the integer 2. Write it as booleans or floats.\n"
    )


def test_strings_mask_nothing(x, capsys):
    np.savez("a.npz", x=x, name=np.array(["a"] * ROWS))
    assert fit("a.npz", "--where", "x=name") == 2
    said = "jaxnorm: the mask 'name' holds strings: give booleans or weights.\n"
    assert capsys.readouterr().err.endswith(said)
    assert fit("a.npz", "--where", "x=name", "--pattern", "x=[n] f") == 2
    assert capsys.readouterr().err.endswith(said)
    np.savez("a.npz", x=x, one=np.array(1.0))
    assert fit("a.npz", "--where", "x=one") == 2
    said = "jaxnorm: the mask 'one' holds one number: give booleans or weights.\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_mask_of_another_shape_is_wrong_usage(x, capsys):
    np.savez("a.npz", x=x, image=np.ones((ROWS, 5, 5)))
    assert fit("a.npz", "--where", "x=image") == 2
    assert "must hold a mask of the leading axes of 'x' in 'image'" in capsys.readouterr().err


def test_a_pattern_of_what_holds_no_numbers_is_wrong_usage(x, capsys):
    np.savez("a.npz", x=x, s=np.array(["a"] * ROWS))
    assert fit("a.npz", "--pattern", "s=[n]") == 2
    assert "must hold numbers in 's': it holds <U1" in capsys.readouterr().err


def test_without_a_pattern_masks_are_not_fitted(x):
    keep = np.arange(ROWS) % 2 == 0
    x[1] = np.nan
    x[2, 0] = np.nan
    np.savez("a.npz", x=x, y=x, keep=keep)
    assert fit("a.npz", "--where", "x=keep", "--skip-nan") == 0
    fitted = Normalizer.load("stats.safetensors")
    assert {
        leaf: found.moments.count.ravel().tolist() for leaf, found in fitted.summaries.items()
    } == {
        "x": [199, 200, 200],
        "y": [398, 399, 399],
    }
    # NaN at 2, 0
    assert fit("a.npz", "--where", "x=keep", "--pattern", "x=[n] f", "--pattern", "keep=[n]") == 1
    assert Normalizer.load("stats.safetensors").moments["keep"].mean.tolist() == [0.5]


def test_a_mask_along_another_axis(x):
    keep = np.ones((3, ROWS), bool)
    keep[0, 50:] = False
    np.savez("a.npz", x=x.T, keep=keep)
    assert fit("a.npz", "--pattern", "x=f [n]", "--where", "x=keep") == 0
    assert Normalizer.load("stats.safetensors").moments["x"].count.tolist() == [
        [50],
        [ROWS],
        [ROWS],
    ]


def test_masks_of_parquet_and_their_nulls():
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "x": [1.0, 2.0, None, 40.0, 50.0],
        "ok": pa.array([True, True, True, False, None]),
        "name": ["a"] * 5,
    }
    parquet.write_table(pa.table(columns), "a.parquet", row_group_size=2)
    assert fit("a.parquet", "--pattern", "x=[n]", "--where", "x=ok") == 0
    found = Normalizer.load("stats.safetensors").moments["x"]
    assert (found.count.tolist(), found.mean.tolist()) == ([2], [1.5])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "beam"])
def test_engines_take_the_same_masks(engine, x):
    """In a process of its own, since engines warn, and Beam reads the command line."""
    pytest.importorskip({"beam": "apache_beam"}.get(engine, engine))
    x[::5] = np.nan
    np.savez("a.npz", x=x, keep=np.arange(ROWS) < 100)
    command = ["fit", "a.npz", "--skip-nan", "--where", "x=keep", "--engine", engine]
    subprocess.run([sys.executable, "-m", "jaxnorm", *command], check=True)
    assert Normalizer.load("stats.safetensors").moments["x"].count.tolist() == [[80] * 3]


def test_columns_that_hold_no_numbers_are_left_out_and_said(capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    when = np.array(["2020-01-01", "2020-01-02"], "datetime64[ms]")
    parquet.write_table(
        pa.table({"x": [1.0, 3.0], "name": ["a", "b"], "when": when, "done": [True, False]}),
        "a.parquet",
    )
    assert fit("a.parquet") == 0
    assert capsys.readouterr().err.splitlines() == [
        "jaxnorm: 'name' is left out, as it holds no numbers: string.",
        "jaxnorm: 'when' is left out, as it holds no numbers: timestamp[ms].",
    ]
    fitted = Normalizer.load("stats.safetensors")
    assert {leaf: found.moments.mean.item() for leaf, found in fitted.summaries.items()} == {
        "x": 2,
        "done": 0.5,
    }
    assert fit("a.parquet", "--pattern", "name=[n]") == 2
    said = capsys.readouterr().err
    assert (
        "a.parquet must hold numbers in 'name': it holds string. Name what is fitted: --pattern "
        "'x=[n]'." in said
    )


WRONG = {
    "--where must name what is fitted: got 'z', fitted are 'x', 'y'.": ["--where", "z=keep"],
    "--where must name what is fitted: got 'y', fitted are 'x'.": [
        "--pattern",
        "x=[n] f",
        "--where",
        "y=keep",
    ],
    "a.npz must hold 'none': it holds 'x', 'y', 'keep'.": ["--where", "x=none"],
    "--where must be given once for each leaf: got x=keep, x=y.": [
        "--where",
        "x=keep",
        "--where",
        "x=y",
    ],
    "must be given: pass --size g=… --size h=….": ["--pattern", "x=[n] (g h [c])"],
    "must be given: pass --size g=….": ["--pattern", "x=[n] (g [c])", "--pattern", "y=(g [n])"],
    "--size must give the size of a name in a --pattern: got g=2, patterns none.": [
        "--size",
        "g=2",
    ],
    "a.npz, 'x': g=2 must divide the size of its axis: 2 against 3.": [
        "--pattern",
        "x=[n] (g [c])",
        "--size",
        "g=2",
    ],
    "'x': the pattern must name every axis: it names 1": ["--pattern", "[n]"],
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_the_files_is_wrong_usage_in_words_of_the_command(text, x, capsys):
    np.savez("a.npz", x=x, y=np.arange(ROWS), keep=np.ones(ROWS, bool))
    assert fit("a.npz", *WRONG[text]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert "keyword" not in said
    assert os.listdir() == ["a.npz"]


def test_masks_that_do_not_fit_name_the_file(x, capsys):
    np.savez("a.npz", x=x, keep=np.ones((ROWS, 2), bool), less=np.full(ROWS, -1.0))
    assert fit("a.npz", "--pattern", "x=[n] f", "--where", "x=keep") == 2
    assert (
        "a.npz must hold a mask of the leading axes of 'x' in 'keep': 'x' has shape ("
        in capsys.readouterr().err
    )
    assert fit("a.npz", "--pattern", "x=[n] f", "--where", "x=less") == 1
    assert "a.npz: leaf 'x': where, for x of shape" in capsys.readouterr().err
    np.save("b.npy", x)
    assert fit("b.npy", "--where", "x=keep") == 2
    assert (
        "--where must name an array of the files: b.npy holds one array, which has no name."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("engine", ["dask", "beam", "ray"])
def test_an_engine_that_is_not_installed_is_the_first_that_is_said(engine, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, {"beam": "apache_beam"}.get(engine, engine), None)
    monkeypatch.delitem(sys.modules, f"jaxnorm.data.{engine}", raising=False)
    assert fit("none.npy", "--engine", engine) == 1
    assert f"is not installed: pip install 'jaxnorm[{engine}]'." in capsys.readouterr().err


def test_a_file_without_a_name_is_wrong_usage(capsys):
    assert fit("") == 2
    assert capsys.readouterr().err == "jaxnorm: FILES must be names: got ''.\n"


@pytest.mark.parametrize(("word", "meant"), [("shwo", "show"), ("fits", "fit")])
def test_an_unknown_command_is_wrong_usage(word, meant, monkeypatch, capsys):
    from jaxnorm import __main__

    monkeypatch.setattr(sys, "argv", ["jaxnorm", word, "stats.json"])
    assert __main__.main() == 2
    assert capsys.readouterr().err == (
        f"jaxnorm: {word!r} is no command: did you mean {meant}? jaxnorm --help lists them.\n"
    )


# what is kept ------------------------------------------------------------------------------------


def test_a_file_replaced_by_one_of_the_same_size_is_refused(x, reading, capsys):
    np.save("a.npy", x)
    np.save("b.npy", x)
    reading.up_to(7)
    assert fit("a.npy", "b.npy", "--out", "stats.json") == 130
    kept, size = Path(states()[0]).read_bytes(), os.path.getsize("b.npy")
    time.sleep(0.01)
    np.save("b.npy", x + 1)
    assert os.path.getsize("b.npy") == size
    reading.up_to(None)
    capsys.readouterr()
    assert fit("a.npy", "b.npy", "--out", "stats.json", "--resume") == 1
    said = (
        "jaxnorm: files must be as they were when the fit was interrupted: "
        "b.npy has changed since. Leave --resume out"
    )
    assert capsys.readouterr().err.startswith(said)
    assert Path(states()[0]).read_bytes() == kept
    assert reading.done == []
    assert fit("a.npy", "b.npy", "--out", "stats.json") == 0
    assert (
        "of an interrupted fit, is no longer of these files. It is replaced."
        in capsys.readouterr().err
    )
    assert Normalizer.load("stats.json").moments.count.tolist() == [[2 * ROWS] * 3]
    assert states() == []


def test_a_file_that_was_only_read_since_goes_on(x, reading):
    np.save("a.npy", x)
    assert fit("a.npy", "--out", "whole.json") == 0
    reading.up_to(3)
    assert fit("a.npy", "--out", "stats.json") == 130
    os.utime("a.npy", ns=(1, os.stat("a.npy").st_mtime_ns))
    reading.up_to(None)
    assert fit("a.npy", "--out", "stats.json", "--resume") == 0
    assert len(reading.done) == 2
    assert Path("stats.json").read_bytes() == Path("whole.json").read_bytes()


def test_pieces_that_are_cut_otherwise_are_refused(x, reading, monkeypatch, capsys):
    np.save("a.npy", x)
    reading.up_to(3)
    assert fit("a.npy") == 130
    monkeypatch.setattr(sources, "PIECE", 700)
    assert fit("a.npy", "--resume") == 1
    assert (
        "files must be read in the same pieces as when the fit was interrupted"
        in capsys.readouterr().err
    )


def test_other_options_are_another_fit(x, reading, capsys):
    np.save("a.npy", x)
    reading.up_to(3)
    assert fit("a.npy") == 130
    for other in (["--skip-nan"], ["--pattern", "[n] f"]):
        assert fit("a.npy", *other, "--resume") == 1
        assert (
            "there must be an interrupted fit of these files and patterns"
            in capsys.readouterr().err
        )


def test_without_resume_a_saved_state_is_announced_and_kept_until_a_fit_has_come_as_far(
    x, reading, capsys
):
    np.save("a.npy", x)
    reading.up_to(3)
    assert fit("a.npy", "--out", "stats.json") == 130
    (state,), kept = states(), Path(states()[0]).read_bytes()
    capsys.readouterr()
    reading.up_to(2)
    assert fit("a.npy", "--out", "stats.json") == 130
    said = capsys.readouterr().err
    assert (
        f"jaxnorm: {state} holds 3 of 5 pieces of an interrupted fit, which this one begins anew."
        in said
    )
    assert "To go on with it: jaxnorm fit a.npy --out stats.json --resume\n" in said
    assert f"Stopped. 3 of 5 pieces are in {state}." in said
    assert Path(state).read_bytes() == kept
    reading.up_to(4)
    assert fit("a.npy", "--out", "stats.json") == 130
    assert Normalizer.load(state).batches == 4
    reading.up_to(None)
    assert fit("a.npy", "--out", "stats.json", "--resume") == 0
    assert len(reading.done) == 1
    assert states() == []


def test_a_state_is_saved_by_time(x, monkeypatch):
    np.save("a.npy", x)
    saved = []
    read = sources.Piece.read
    monkeypatch.setattr(
        sources.Piece, "read", lambda piece: saved.append(len(states())) or read(piece)
    )
    assert fit("a.npy") == 0
    assert saved == [0] * 5
    saved.clear()
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    assert fit("a.npy") == 0
    assert saved == [0, 1, 1, 1, 1]


def test_extend_saves_by_time(x, monkeypatch, tmp_path):
    now, saved = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def batches():
        for batch in np.split(x, 8):
            saved.append(Normalizer.load("s.json").batches if Path("s.json").exists() else 0)
            yield batch
            now[0] += 11

    Normalizer.fit(batches(), state="s.json")
    assert saved == [0, 0, 0, 0, 4, 4, 4, 7]


def test_a_process_that_is_killed_goes_on(x):
    np.save("a.npy", x)
    code = """
import sys, time
from jaxnorm import __main__
from jaxnorm.data import progress, sources
sources.PIECE, progress.SECONDS, read, left = 1000, 0.0, sources.Piece.read, [{}]
def reading(piece):
    print("read", flush=True)
    left[0] -= 1
    time.sleep(100 if not left[0] else 0)
    return read(piece)
sources.Piece.read = reading
sys.argv = ["jaxnorm", "fit", "a.npy", *{}]
sys.exit(__main__.main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code.format(4, [])], stdout=subprocess.PIPE, text=True
    )
    assert [process.stdout.readline() for _ in range(4)] == ["read\n"] * 4
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = subprocess.run(
        [sys.executable, "-c", code.format(9, ["--resume"])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert resumed.stdout.count("read") == 2
    np.testing.assert_allclose(
        Normalizer.load("stats.safetensors").std[0], x.astype(np.float64).std(0), rtol=1e-12
    )


def full_disk(monkeypatch, after=0):
    sync, calls = os.fsync, []

    def fails(descriptor):
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", fails)


def test_a_full_disk_is_named_and_nothing_is_lost(x, monkeypatch, capsys):
    np.save("a.npy", x)
    assert fit("a.npy", "--out", "stats.json") == 0
    before = Path("stats.json").read_bytes()
    np.save("a.npy", x + 1)
    with monkeypatch.context() as full:
        full_disk(full, after=1)  # the state is written, the statistics are not
        assert fit("a.npy", "--out", "stats.json") == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "jaxnorm: stats.json must be written: No space left on device. Make room there, or name a "
        "file elsewhere."
    )
    assert said.endswith("This goes on:\njaxnorm fit a.npy --out stats.json --resume\n")
    assert Path("stats.json").read_bytes() == before
    assert fit("a.npy", "--out", "stats.json", "--resume") == 0
    assert Path("stats.json").read_bytes() != before
    with monkeypatch.context() as full:
        full_disk(full)
        with pytest.raises(
            OSError, match=r"s\.json must be written: No space left on device\."
        ) as caught:
            Normalizer.fit([x], state="s.json")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir()) == ["a.npy", "stats.json"]


def test_where_nothing_can_be_written_is_known_before_a_piece_is_read(x, reading, capsys):
    np.save("a.npy", x)
    Path("stats.json").mkdir()
    assert fit("a.npy", "--out", "stats.json") == 1
    assert (
        capsys.readouterr().err
        == "jaxnorm: stats.json must be a file: it is a folder. Name another one.\n"
    )
    Path("file").touch()
    assert fit("a.npy", "--out", "file/stats.json") == 1
    assert "file" in capsys.readouterr().err
    assert reading.done == []


# show --------------------------------------------------------------------------------------------


def show(capsys, *arguments):
    from jaxnorm.data.show import main as show_main

    status = show_main(list(map(str, arguments)))
    found = capsys.readouterr()
    return status, found.out, found.err


def test_show_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    x = np.array([[1.0, 10.0], [3.0, 10.0]])
    many = np.arange(2000.0).reshape(2, 1000)
    Normalizer.fit([{"x": x, "many": many, "one": x[:, 0]}]).save("stats.json")
    status, out, err = show(capsys, "stats.json")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["x", "(1,", "2)"] in rows
    assert ["0", "2", "2", "1", "1", "3"] in rows
    assert ["1", "2", "10", "0", "10", "10"] in rows
    assert ["one", "(1)", "2", "2", "1", "1", "3"] in rows
    assert ["…", "994", "more"] in rows
    assert ["999", "2", "1499", "500", "999", "1999"] in rows
    assert ["all", "2000", "999.5", "577.35", "0", "1999"] in rows
    assert max(map(len, out.splitlines())) <= 80
    assert len(rows) < 30


def test_show_tells_numbers_apart_that_are_far_from_zero(capsys):
    x = np.array([[1e6 - 1.79, 0.25], [1e6 + 2.21, 0.25]])
    Normalizer.fit([x]).save("stats.json")
    rows = [line.split() for line in show(capsys, "stats.json")[1].splitlines()]
    assert ["0", "2", "1000000.21", "2", "999998.21", "1000002.21"] in rows
    assert ["1", "2", "0.25", "0", "0.25", "0.25"] in rows


def test_show_gives_counts_as_integers():
    from jaxnorm.data.show import _count

    assert [_count(12e9), _count(1234567.0), _count(0.5)] == ["12000000000", "1234567", "0.5"]


def test_show_gives_features_that_are_not_finite(capsys):
    x = np.arange(2000.0).reshape(2, 1000)
    x[0, 500], x[1, 701] = np.nan, np.inf
    Normalizer.fit([{"x": x, "y": x[:, :20]}]).save("stats.json")
    lines = show(capsys, "stats.json")[1].splitlines()
    rows = [line.split() for line in lines]
    assert ["500", "2", "nan", "nan", "nan", "nan"] in rows
    assert [row[:3] for row in rows if row[:1] == ["701"]] == [["701", "2", "nan"]]
    assert [row for row in rows if row[:1] == ["…"]] == [
        ["…", "497", "more"],
        ["…", "200", "more"],
        ["…", "295", "more"],
    ]
    assert ["10", "2", "510", "500", "10", "1010"] in rows  # of y, whose features are all shown


def test_fit_names_features_that_are_not_finite(x, capsys):
    many = np.zeros((4, 3, 4))
    many[0, 1] = many[0, 2, 1:] = np.nan
    np.savez("a.npz", many=many)
    assert fit("a.npz") == 1
    assert "jaxnorm: 7 features of many (1,0; 1,1; 1,2; 1,3; 2,1; …) hold NaN or Inf" in (
        capsys.readouterr().err
    )


def test_show_of_images_has_a_row_for_each_channel(capsys):
    Normalizer.fit([{"image": np.full((2, 4, 4, 3), 7, np.uint8)}], "[n h w] c").save("stats.json")
    _, out, _ = show(capsys, "stats.json")
    assert [line.split() for line in out.splitlines()].count(["1", "32", "7", "0", "7", "7"]) == 1
    Normalizer.fit([np.zeros((2, 4, 5))]).save("stats.json")
    _, out, _ = show(capsys, "stats.json")
    assert ["0,2", "2", "0", "0", "0", "0"] in [line.split() for line in out.splitlines()]


def test_show_json_is_what_programs_read(capsys):
    Normalizer.fit([{"x": np.array([[1.0, np.nan], [3.0, 2.0]])}]).save("stats.safetensors")
    status, out, _ = show(capsys, "stats.safetensors", "--json")
    assert status == 0
    assert json.loads(out)["x"] == {
        "shape": [1, 2],
        "count": [[2.0, 2.0]],
        "mean": [[2.0, "nan"]],
        "deviation": [[1.0, "nan"]],
        "min": [[1.0, "nan"]],
        "max": [[3.0, "nan"]],
    }


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.json", None, "none.json must exist: there is no such file."),
        ("a.json", "{}", "a.json must be a Normalizer's file: it holds other JSON."),
        ("b.json", "[1, 2]", "b.json must be a Normalizer's file: it holds other JSON."),
        ("c.json", '{"jaxnorm"', "c.json must be a Normalizer's file: it is no JSON, or cut off."),
        (
            "d.safetensors",
            "x" * 99,
            "d.safetensors must be a Normalizer's file: it is no safetensors file, or cut off.",
        ),
        ("e.txt", "x", "e.txt must be statistics in a known format: it is none. To fit"),
    ],
)
def test_what_holds_no_statistics_is_one_sentence(name, text, said, capsys):
    if text is not None:
        Path(name).write_text(text)
    status, out, err = show(capsys, name)
    assert status == 1
    assert said in err
    assert err.startswith("jaxnorm: ")
    assert err.count("\n") == 1
    assert out == ""


def test_a_safetensors_file_of_something_else_is_named(capsys):
    from safetensors.numpy import save_file

    save_file({"weight": np.ones(3)}, "model.safetensors")
    status, _, err = show(capsys, "model.safetensors")
    assert (status, err) == (
        1,
        "jaxnorm: model.safetensors must be a Normalizer's file: it holds other arrays, 'weight'. "
        "Fit it again, or name another one.\n",
    )


def test_the_help_lists_both_commands():
    for missing in ("()", "('optax', 'sklearn', 'matplotlib')"):
        code = (
            "import sys, importlib.util as u\nfind = u.find_spec\n"
            f"u.find_spec = lambda n, *a: None if n in {missing} else find(n, *a)\n"
        )
        code += (
            "sys.argv = ['jaxnorm', '--help']\nfrom jaxnorm.__main__ import main\nsys.exit(main())"
        )
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert "fit" in shown
        assert "show" in shown
