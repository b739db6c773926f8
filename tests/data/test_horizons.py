"""Test horizons: chunks of actions, relative to a state, against chunks that NumPy builds."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from lerobot_folders import LENGTHS, feature, write
from reading import WRITE, members_opened

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main
from jaxnorm.data.sources import SourceError

pytestmark = pytest.mark.filterwarnings("default")  # zarr warns of format 3
ROWS = sum(LENGTHS)
STEPS = 4
RANKS = (0.0, 0.01, 0.5, 0.99)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PIECE", 1000)  # bytes, so that files have many
    return tmp_path


def chunks(x, lengths=LENGTHS, steps=STEPS, first=None):
    """Return the chunks of each row in float64; NaN beyond the end of an episode.

    ``first`` is subtracted from all steps of a chunk.
    """
    found = np.full((len(x), steps, *x.shape[1:]), np.nan)
    ends = np.repeat(np.cumsum(lengths), lengths)
    for row, end in enumerate(ends):
        chunk = x[row : min(row + steps, end)].astype(np.float64)
        found[row, : len(chunk)] = chunk if first is None else chunk - first[row]
    return found


def assert_fitted(fitted, leaf, expected, axes=0, ranks=()):
    """The statistics are those of the elements of ``expected`` that are not NaN."""
    moments, low, high = fitted.summaries[leaf]
    keep = ~np.isnan(expected)
    shape = moments.mean.shape
    np.testing.assert_array_equal(
        np.broadcast_to(moments.count, shape), keep.sum(axes, keepdims=True)
    )
    scale = np.nanmax(np.abs(expected))
    mean, var = np.nanmean(expected, axes, keepdims=True), np.nanvar(expected, axes, keepdims=True)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-13, atol=1e-15 * scale)
    np.testing.assert_allclose(moments.var, var, rtol=1e-12, atol=1e-15 * scale**2)
    np.testing.assert_array_equal(low, np.nanmin(expected, axes, keepdims=True))
    np.testing.assert_array_equal(high, np.nanmax(expected, axes, keepdims=True))
    for rank in ranks:
        quantile = np.nanquantile(expected, rank, axes, keepdims=True)
        np.testing.assert_allclose(fitted.quantile(rank)[leaf], quantile, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_steps_of_every_format(suffix, dtype, rng):
    x = rng.integers(0, 200, (200, 3)).astype(dtype)
    WRITE[suffix](f"a.{suffix}", x)
    leaf = "" if suffix.endswith("npy") else "x"
    fitted = Normalizer.fit_files(f"a.{suffix}", {leaf: "[n] step f"}, horizon={leaf: 7})
    assert fitted.batches > 3
    assert_fitted(fitted, leaf, chunks(x, (200,), 7))


def test_a_stream_is_read_once(rng, monkeypatch):
    x = rng.standard_normal((400, 3))
    np.savez_compressed("a.npz", x=x)
    opened = members_opened(monkeypatch)
    fitted = Normalizer.fit_files("a.npz", {"x": "[n] step f"}, horizon={"x": 50})
    assert fitted.batches > 10
    assert len(opened) == 1
    assert_fitted(fitted, "x", chunks(x, (400,), 50))


class TestLeRobot:
    @pytest.fixture(params=["v2.1", "v3.0"])
    def arrays(self, request, rng):
        pytest.importorskip("pyarrow")
        state = rng.standard_normal((ROWS, 4)).astype(np.float32)
        action = (state[:, :3] + rng.standard_normal((ROWS, 3))).astype(np.float32)
        features = {"state": feature("float32", 4), "action": feature("float32", 3)}
        write(request.param, {"state": list(state), "action": list(action)}, features)
        return {"state": state, "action": action}

    @pytest.mark.parametrize("size", [1, 700, 10**6])
    def test_steps_stay_within_episodes(self, arrays, size, monkeypatch):
        monkeypatch.setattr(sources, "PIECE", size)
        options = {"horizon": {"action": STEPS}, "quantiles": RANKS}
        fitted = Normalizer.fit_files("set", {"action": "[n] step f", "state": 0}, **options)
        assert_fitted(fitted, "action", chunks(arrays["action"]), ranks=RANKS)
        assert_fitted(fitted, "state", arrays["state"].astype(np.float64), ranks=RANKS)
        pooled = Normalizer.fit_files("set", {"action": "[n step] f"}, **options)
        assert_fitted(pooled, "action", chunks(arrays["action"]), (0, 1))
        assert set(pooled.summaries) == {"action"}

    @pytest.mark.parametrize("size", [1, 700, 10**6])
    @pytest.mark.parametrize("fits_state", [True, False])
    def test_actions_relative_to_the_state_at_the_first_step(
        self, arrays, size, fits_state, monkeypatch
    ):
        monkeypatch.setattr(sources, "PIECE", size)
        options = {"horizon": {"action": STEPS}, "relative": {"action": "state"}}
        axes = {"action": "[n] step f"} | ({"state": 0} if fits_state else {})
        fitted = Normalizer.fit_files("set", axes, absolute={"action": [-1]}, **options)
        first = arrays["state"][:, :3] * np.float64([1, 1, 0])
        assert_fitted(fitted, "action", chunks(arrays["action"], first=first))
        assert set(fitted.summaries) == set(axes)
        if fits_state:
            assert_fitted(fitted, "state", arrays["state"].astype(np.float64))

    def test_by_the_command(self, arrays, capsys):
        given = ["--horizon", "action=4", "--relative", "action=state", "--absolute", "action=0,2"]
        pattern = ["--pattern", "action=[n] step f"]
        assert main(["set", *pattern, *given, "--quantiles", "0.01,0.99"]) == 0
        fitted = Normalizer.load("stats.safetensors")
        first = arrays["state"][:, :3] * np.float64([0, 1, 0])
        assert_fitted(fitted, "action", chunks(arrays["action"], first=first), ranks=(0.01, 0.99))
        said = "Written: stats.safetensors, of action: 12 features, up to 48 elements each\n"
        assert capsys.readouterr().out == said

    def test_a_state_goes_on_to_the_bit(self, arrays, monkeypatch):
        monkeypatch.setattr(sources, "PIECE", 200)
        options = {"horizon": {"action": STEPS}, "relative": {"action": "state"}}
        options |= {"quantiles": RANKS, "axes": {"action": "[n] step f"}}
        whole = Normalizer.fit_files("set", **options)
        assert whole.batches > 8
        read, left = sources.Piece.read, iter(range(5))

        def reading(piece):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return read(piece)

        monkeypatch.setattr(sources.Piece, "read", reading)
        with pytest.raises(KeyboardInterrupt):
            Normalizer.fit_files("set", **options, state="state.json")
        assert Normalizer.load("state.json").batches == 5
        monkeypatch.setattr(sources.Piece, "read", read)
        resumed = Normalizer.fit_files("set", **options, state="state.json")
        assert len(np.unique([each.std["action"] for each in (whole, resumed)], axis=0)) == 1
        for rank in RANKS:
            np.testing.assert_array_equal(*(r.quantile(rank)["action"] for r in (whole, resumed)))
        others = options | {"horizon": {"action": 3}, "state": "state.json"}
        with pytest.raises(SourceError, match="a state must be of the same files, axes and option"):
            Normalizer.fit_files("set", **others)

    @pytest.mark.parametrize("size", [300, 10**6])
    def test_missing_rows_mask_the_steps_that_need_them(self, size, rng, monkeypatch):
        monkeypatch.setattr(sources, "PIECE", size)
        state, action = rng.standard_normal((2, ROWS, 2))
        lost, pad = rng.random((2, ROWS)) < 0.2
        columns = {"state": [None if gone else x for x, gone in zip(state, lost, strict=True)]}
        columns |= {"action": list(action), "action_is_pad": pad}
        features = {"state": feature("float64", 2), "action": feature("float64", 2)}
        write("v3.0", columns, features)
        action[pad] = np.nan
        for absolute, first in (([], state), ([1], state * [1, 0])):
            options = {"relative": {"action": "state"}, "absolute": {"action": absolute}}
            fitted = Normalizer.fit_files(
                "set", {"action": "[n] step f"}, horizon={"action": STEPS}, **options
            )
            first[lost] = np.where(np.isin([0, 1], absolute), 0, np.nan)
            assert_fitted(fitted, "action", chunks(action, first=first))


@pytest.mark.parametrize("size", [1, 700, 10**6])
def test_demonstrations_of_hdf5(size, rng, monkeypatch):
    h5py = pytest.importorskip("h5py")
    monkeypatch.setattr(sources, "PIECE", size)
    x, goal = rng.standard_normal((ROWS, 2, 3)), rng.standard_normal((ROWS, 2))
    with h5py.File("a.h5", "w") as file:
        for number, end in enumerate(np.cumsum(LENGTHS)):
            rows = slice(end - LENGTHS[number], end)
            file[f"data/demo_{number}/actions"] = x[rows]
            file[f"data/demo_{number}/goal"] = goal[rows]
    name, other = "data/demo_*/actions", "data/demo_*/goal"
    axes, horizon = {name: "[n] step arm f", other: "[n] step f"}, {name: 9, other: 2}
    fitted = Normalizer.fit_files("a.h5", axes, horizon=horizon)
    assert_fitted(fitted, name, chunks(x, steps=9))
    assert_fitted(fitted, other, chunks(goal, steps=2))


class TestMasks:
    @pytest.fixture
    def arrays(self, rng):
        x, keep = rng.standard_normal((60, 2)), rng.random(60) < 0.8
        weights = rng.random(60)
        np.savez("a.npz", x=x, keep=keep, weights=weights, short=x[:9])
        return {"x": x, "keep": keep, "weights": weights}

    def test_a_masked_row_is_masked_at_every_step(self, arrays):
        axes, horizon = {"x": "[n] step f", "short": 0}, {"x": STEPS}
        masked = Normalizer.fit_files("a.npz", axes, where={"x": "keep"}, horizon=horizon)
        expected = chunks(np.where(arrays["keep"][:, None], arrays["x"], np.nan), (60,))
        assert masked.batches > 3
        assert_fitted(masked, "x", expected)
        # another leaf, which ends earlier, is fitted as it is
        assert_fitted(masked, "short", arrays["x"][:9])

    def test_rows_have_their_weights_at_every_step(self, arrays):
        axes = {"x": "[n] step f"}
        fitted = Normalizer.fit_files("a.npz", axes, where={"x": "weights"}, horizon={"x": 3})
        x, w = (np.nan_to_num(chunks(arrays[name], (60,), 3)) for name in ("x", "weights"))
        mean = (w[..., None] * x).sum(0) / w.sum(0)[:, None]
        np.testing.assert_allclose(fitted.mean["x"][0], mean, rtol=1e-12)

    def test_nan_is_left_out_of_both(self, arrays):
        x, state = arrays["x"].copy(), arrays["x"][::-1].copy()
        x[::7, 0] = state[::5, 1] = np.nan
        np.savez("b.npz", x=x, state=state)
        options = {"horizon": {"x": STEPS}, "relative": {"x": "state"}, "skip_nan": True}
        fitted = Normalizer.fit_files("b.npz", {"x": "[n] step f"}, **options)
        assert_fitted(fitted, "x", chunks(x, (60,), first=state))


def test_memory_is_two_pieces_at_most(monkeypatch):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = pa.FixedSizeListArray.from_arrays(np.zeros(400_000, np.float32), 4)
    parquet.write_table(pa.table({"x": x, "state": x}), "a.parquet")  # one row group, 3 MB
    monkeypatch.setattr(sources, "PIECE", 8 << 20)
    options = {"horizon": {"x": 50}, "relative": {"x": "state"}, "threads": 1}
    Normalizer.fit_files("a.parquet", {"x": "[n] step f"}, **options)  # imports and caches
    tracemalloc.start()
    fitted = Normalizer.fit_files("a.parquet", {"x": "[n] step f"}, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fitted.batches == 20  # of 160 MB of chunks
    assert peak < 2 * (8 << 20)


REFUSED = {
    "horizon must name what is fitted: got 'z', fitted are 'x'.": {"horizon": {"z": 2}},
    "horizon must be at least 1, for 'x': got 0.": {"horizon": {"x": 0}},
    "relative must name leaves with a horizon: 'x' has none.": {"relative": {"x": "y"}},
    "absolute must name leaves that are relative: 'x' is not.": {
        "horizon": {"x": 2},
        "absolute": {"x": [0]},
    },
    "horizon must be left out with diff: got both. Fit one by one.": {
        "horizon": {"x": 2},
        "diff": 0,
    },
    "a.npz must hold a row of 'z' for each row of 'x': there are 5 for 6.": {
        "horizon": {"x": 2},
        "relative": {"x": "z"},
    },
    "a.npz must hold 'v': it holds 'x', 'y', 'z'.": {"horizon": {"x": 2}, "relative": {"x": "v"}},
    "absolute must name features of 'x', which has 2: got 2.": {
        "horizon": {"x": 2},
        "relative": {"x": "y"},
        "absolute": {"x": [2]},
    },
    "a.npz must hold each feature of 'x' in 'y', or it is absolute: there are 2 and 1. Name [1] "
    "absolute.": {"horizon": {"x": 2}, "relative": {"x": "y"}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_does_not_fit(said):
    np.savez("a.npz", x=np.ones((6, 2)), y=np.ones((6, 1)), z=np.ones((5, 2)))
    with pytest.raises(SourceError) as caught:
        Normalizer.fit_files("a.npz", {"x": "[n] step f"}, **REFUSED[said])
    assert str(caught.value) == said


def test_patterns_and_options_that_do_not_fit(capsys):
    np.save("a.npy", np.ones((6, 2)))
    assert main(["a.npy", "--horizon", "3", "--pattern", "n step [f]"]) == 2
    assert main(["a.npy", "--horizon", "3", "--pattern", "[n] f"]) == 2
    assert main(["a.npy", "--horizon", "x=3"]) == 2
    first, second, *_, hint, third = capsys.readouterr().err.splitlines()
    assert first == (
        "jaxnorm: a.npy: the rows must be reduced, for a horizon. Write a pattern that begins with "
        "[n]."
    )
    said = "jaxnorm: a.npy: the pattern must name every axis: it names 2, the array has rank 3."
    assert second == said
    assert hint == "The horizon adds the second axis, of steps: '[n] step f'."
    assert third == "jaxnorm: --horizon must name what is fitted: got 'x', fitted are ''."
    with pytest.raises(SystemExit):
        main(["a.npy", "--horizon", "x=0"])
    assert "must be KEY=STEPS, such as action=16: got 'x=0'." in capsys.readouterr().err
    assert main(["a.npy", "--horizon", "3"]) == 0
    assert Normalizer.load("stats.safetensors").mean.shape == (1, 3, 2)


@pytest.mark.slow
def test_an_engine_gives_the_same(rng):
    pytest.importorskip("dask")
    x, y = rng.standard_normal((2, 300, 2))
    np.savez("a.npz", x=x, y=y)
    options = {"horizon": {"x": 5}, "relative": {"x": "y"}, "engine": "dask"}
    found = Normalizer.fit_files(f"{Path.cwd()}/a.npz", {"x": "[n] step f"}, **options)
    assert_fitted(found, "x", chunks(x, (300,), 5, y))
