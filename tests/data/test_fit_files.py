"""Test ``Normalizer.fit_files``: the work of ``jaxnorm fit`` as a function."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from reading import WRITE, X, opened

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main
from jaxnorm.data.sources import SourceError

ROWS = 400


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PIECE", 1000)  # bytes, so that files have many
    return tmp_path


@pytest.fixture
def x(rng):
    return rng.standard_normal((ROWS, 3)) + 1e3


def test_it_equals_the_command_to_the_bit(x):
    x[::7, 0] = np.nan
    np.savez("a.npz", x=x, keep=np.arange(ROWS) % 3 > 0, name=np.array(["a"] * ROWS))
    assert main(["a.npz", "--pattern", "x=[n] f", "--where", "x=keep", "--skip-nan"]) == 0
    loaded = Normalizer.load("stats.safetensors")
    fitted = Normalizer.fit_files("a.npz", {"x": "[n] f"}, where={"x": "keep"}, skip_nan=True)
    for name in ("count", "mean", "var", "low_mean"):
        np.testing.assert_array_equal(
            getattr(fitted.moments["x"], name), getattr(loaded.moments["x"], name)
        )
    kept = np.nan_to_num(x)[(np.arange(ROWS) % 3 > 0) & (np.arange(ROWS) % 7 > 0)]
    np.testing.assert_allclose(fitted.mean["x"][0, 0], kept[:, 0].mean(), rtol=1e-14)


def test_paths_may_be_objects_and_have_stars(x):
    np.save("b.npy", x[200:])
    np.save("a.npy", x[:200])
    for paths in ("*.npy", Path("*.npy"), ["a.npy", Path("b.npy")]):
        fitted = Normalizer.fit_files(paths, "[n] f")
        assert fitted.moments.count.tolist() == [[ROWS] * 3]
        np.testing.assert_allclose(fitted.std[0], x.std(0), rtol=1e-12)
    with pytest.raises(SourceError, match=r"^\*\.npz must name files: there are none\.$"):
        Normalizer.fit_files("*.npz")
    with pytest.raises(ValueError, match=r"^paths must name files: got none\.$"):
        Normalizer.fit_files([])


def test_the_command_takes_stars_in_quotation_marks(x, capsys):
    os.mkdir("d")
    for number in range(3):
        np.savez(f"d/{number}.npz", x=x[number::3])
    assert main(["d/*.npz", "--pattern", "[n] f", "--out", "a.json"]) == 0
    assert Normalizer.load("a.json").moments["x"].count.tolist() == [[ROWS] * 3]
    capsys.readouterr()
    assert main(["d/*.npy"]) == 1
    assert capsys.readouterr().err == "jaxnorm: d/*.npy must name files: there are none.\n"


def test_a_file_is_named_once(x, capsys):
    np.save("a.npy", x)
    for paths in (["a.npy", "./a.npy"], ["*.npy", "a.npy"], [os.path.abspath("a.npy"), "a.npy"]):
        said = f"each file must be named once: {paths[0].replace('*', 'a')} is named 2 times."
        with pytest.raises(SourceError) as caught:
            Normalizer.fit_files(paths)
        assert str(caught.value) == said
        assert main(paths) == 1
        assert capsys.readouterr().err == f"jaxnorm: {said}\n"
        assert os.listdir() == ["a.npy"]


def test_sizes_of_split_axes_and_threads(x):
    np.save("a.npy", x[:, :2])
    fitted = Normalizer.fit_files("a.npy", "[n] (g [c])", g=1, threads=1)
    np.testing.assert_allclose(fitted.mean.item(), x[:, :2].mean(), rtol=1e-13)


@pytest.fixture
def stopped(monkeypatch):
    """Reading stops with an interrupt after so many pieces; returns what was read."""
    read, done = sources.Piece.read, []

    def stopping(limit):
        done.clear()

        def reading(piece):
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(piece)
            return read(piece)

        monkeypatch.setattr(sources.Piece, "read", reading)
        return done

    return stopping


def test_a_state_goes_on_and_gives_the_same_bits(x, stopped):
    np.save("a.npy", x)
    whole = Normalizer.fit_files("a.npy")
    stopped(4)
    with pytest.raises(KeyboardInterrupt):
        Normalizer.fit_files("a.npy", state="state.json")
    assert Normalizer.load("state.json").batches == 4
    done = stopped(None)
    fitted = Normalizer.fit_files("a.npy", state="state.json")
    assert len(done) == whole.batches - 4
    np.testing.assert_array_equal(fitted.moments.var, whole.moments.var)
    done = stopped(None)
    assert Normalizer.fit_files("a.npy", state="state.json").batches == whole.batches
    assert done == []


def test_a_state_of_another_fit_is_refused_and_kept(x):
    np.save("a.npy", x)
    Normalizer.fit_files("a.npy", state="state.json")
    kept = Path("state.json").read_bytes()
    for options in ({"axes": "[n f]"}, {"skip_nan": True}):
        with pytest.raises(SourceError) as caught:
            Normalizer.fit_files("a.npy", state="state.json", **options)
        assert str(caught.value) == (
            "a state must be of the same files, axes and options: state.json is of others. Name "
            "another state."
        )
    np.save("a.npy", x + 1)
    os.utime("a.npy", ns=(1, 1))
    with pytest.raises(SourceError, match=r"a\.npy has changed since\. Name another state, to "):
        Normalizer.fit_files("a.npy", state="state.json")
    assert Path("state.json").read_bytes() == kept
    Normalizer.fit(list(x)).save("other.json")
    with pytest.raises(ValueError, match=r"^other\.json must be a state of fit_files: "):
        Normalizer.fit_files("a.npy", state="other.json")


def test_the_bar_counts_bytes(x, stopped, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    np.savez_compressed("a.npz", x=x, other=x)
    Normalizer.fit_files("a.npz", {"x": 0}, show_progress=True)
    assert "9.4/9.4 KiB" in capsys.readouterr().err  # of x alone, unpacked
    stopped(5)
    with pytest.raises(KeyboardInterrupt):
        Normalizer.fit_files("a.npz", {"x": 0}, show_progress=True, state="state.json")
    assert "4.8/9.4 KiB" in capsys.readouterr().err
    stopped(0)
    with pytest.raises(KeyboardInterrupt):
        Normalizer.fit_files("a.npz", {"x": 0}, show_progress=True, state="state.json")
    assert "4.8/9.4 KiB" in capsys.readouterr().err  # goes on where it was


@pytest.mark.parametrize("suffix", WRITE)
def test_sizes_of_pieces_are_those_of_their_numbers(suffix):
    WRITE[suffix](f"a.{suffix}", X)
    found = opened(f"a.{suffix}")
    assert sum(piece.size for piece in found) == X.nbytes
    for piece in found:
        batch = piece.read()
        assert (batch["x"] if isinstance(batch, dict) else batch).nbytes == piece.size


def test_what_does_not_fit_is_said_in_the_words_of_the_function(x):
    np.savez("a.npz", x=x, keep=np.ones(ROWS, bool))
    with pytest.raises(ValueError, match=r"^engine must be one of local, dask, beam, ray: got 's"):
        Normalizer.fit_files("a.npz", engine="spark")
    with pytest.raises(SourceError, match=r"^where must name what is fitted: got 'z', fitted are"):
        Normalizer.fit_files("a.npz", where={"z": "keep"})
    with pytest.raises(SourceError, match=r"^none\.npz must exist: there is no such file\.$"):
        Normalizer.fit_files("none.npz")
    with pytest.raises(SourceError, match=r"^a\.npz must hold 'y': it holds 'x', 'keep'\.$"):
        Normalizer.fit_files("a.npz", {"y": 0})
