"""Test the running statistics of brax and Acme: states in memory, and Orbax checkpoints."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from jaxnorm.data import formats
from jaxnorm.data.formats import FormatError, Statistics, brax

# A batch of 4 and one of 2, by brax 0.14.2 in float32.
DATA = np.array([[1, 0], [3, 0], [2, 0], [6, 0], [4, 0], [2, 0]], np.float32)
WELFORD = {
    "mean": np.float32([3, 0]),
    "std": np.float32([1.6329931, 1e-6]),
    "summed_variance": np.float32([16, 0]),
    "count": {"hi": 0, "lo": 6},
    "std_eps": 0.0,
}
EMA = WELFORD | {
    "std": np.float32([1.6330236, 0.01]),
    "summed_variance": np.float32([16 / 6, 0]),
    "std_eps": 1e-4,
}


@pytest.fixture
def running_statistics(ordinary_promotion):
    # brax says what else it would import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("brax.training.acme.running_statistics")


def deviation(contents, leaf=""):
    found = contents.leaves[leaf]
    return contents.formula.standard(found.count, found.mean, found.var)


@pytest.mark.parametrize("kind", [dict, lambda **state: SimpleNamespace(**state)])
def test_a_state_is_a_mapping_or_has_attributes(kind):
    read = brax.contents(kind(**WELFORD, mode=0))
    (leaf,) = read.leaves.values()
    np.testing.assert_array_equal(leaf.mean, [3, 0])
    np.testing.assert_allclose(leaf.var, [16 / 6, 0], rtol=1e-15)
    np.testing.assert_array_equal(leaf.count, [6, 6])
    # the smallest deviation that brax divides by is 1e-6
    np.testing.assert_allclose(deviation(read), WELFORD["std"], rtol=1e-7)


@pytest.mark.parametrize("mode", [1, None])
def test_the_variance_of_ema_is_no_sum(mode):
    read = brax.contents(EMA | {"mode": mode})
    np.testing.assert_allclose(read.leaves[""].var, [16 / 6, 0], rtol=1e-7)
    np.testing.assert_allclose(deviation(read), EMA["std"], rtol=1e-6)
    assert any("mode" in note for note in read.notes) == (mode is None)


@pytest.mark.parametrize("mode", ["welford", "ema"])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_brax_divides_by_these_deviations(running_statistics, mode, eps):
    import jax.numpy as jnp

    nest = {"state": jnp.zeros(2), "pixels": {"left": jnp.zeros((2, 1))}}
    state = running_statistics.init_state(nest, std_eps=eps, mode=mode)
    empty = brax.contents(state)
    np.testing.assert_array_equal(deviation(empty, "state"), [1, 1])
    for part in (DATA[:4], DATA[4:]):
        batch = {"state": jnp.asarray(part), "pixels": {"left": jnp.asarray(part)[..., None]}}
        state = running_statistics.update(state, batch)
    read = brax.contents(state)
    assert set(read.leaves) == {"state", "pixels/left"}
    x = np.array([0.5, 2e-6], np.float32)
    true = running_statistics.normalize(
        {"state": jnp.asarray(x), "pixels": {"left": jnp.asarray(x)[:, None]}}, state
    )
    found = read.leaves["state"]
    np.testing.assert_allclose(
        (x - found.mean) / deviation(read, "state"), true["state"], rtol=1e-6
    )
    # what we write, brax reads: the same deviations
    ours = brax.state(read.leaves, std_eps=eps)["std"]
    np.testing.assert_allclose(ours["state"], state.std["state"], rtol=1e-6)
    np.testing.assert_allclose(ours["pixels"]["left"], state.std["pixels"]["left"], rtol=1e-6)


@pytest.mark.parametrize(
    ("count", "true"),
    [(6, 6), (np.int32(6), 6), ({"hi": np.uint32(2), "lo": np.uint32(5)}, 2**33 + 5)],
)
def test_counts_are_numbers_or_two_words(count, true):
    state = WELFORD | {"summed_variance": WELFORD["std"] ** 2 * true, "count": count}
    assert brax.contents(state).leaves[""].count.tolist() == [true, true]


def test_other_deviations_are_taken_since_brax_divides_by_them():
    """As of a state whose deviations were clipped to other bounds."""
    read = brax.contents(WELFORD | {"std": np.float32([1.5, 0.1]), "mode": 0})
    np.testing.assert_array_equal(deviation(read), np.float32([1.5, 0.1]).astype(float))
    assert brax.OTHER_STD in read.notes


def test_mean_and_deviation_alone_are_a_state():
    read = brax.contents({"mean": {"a": np.array([1.0])}, "std": {"a": np.array([2.0])}})
    assert read.leaves["a"].count is None
    assert read.leaves["a"].var.tolist() == [4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"std": None}, "must have mean and std: dict has no std. Pass a RunningStatisticsState"),
        ({"std": {"a": np.ones(2)}}, r"the leaves of mean in std: got \{'a': \(2,\)\}"),
        ({"summed_variance": np.ones(3)}, r"the leaves of mean in summed_variance: got .*\(3,\)"),
        ({"count": np.ones(8)}, r"one number as count, .* got shape \(8,\). Take the state of one"),
        ({"count": [[1], [1, 2]]}, r"one number as count, .* got \[\[1\], \[1, 2\]\]. Take"),
        ({"count": np.inf}, "count must be finite: got inf"),
        ({"mode": [[1], [1, 2]]}, r"mode 0 .* got \[\[1\], \[1, 2\]\]"),
        ({"count": {"hi": 1}}, "or the words hi and lo"),
        ({"count": {"hi": 1, "lo": np.inf}}, "or the words hi and lo"),
        ({"std_eps": [0.0]}, r"a number >= 0 as std_eps: got \[0\.0\]"),
        ({"mode": 2}, r"mode 0 \('welford'\) or 1 \('ema'\): got 2"),
        ({"count": np.int32(-5)}, "a count >= 0: got -5, an int32 that overran"),
        ({"mean": ["a", "b"]}, "must hold numbers in mean of '0': it holds 'a'"),
    ],
)
def test_what_is_no_state_is_refused(change, said):
    with pytest.raises(FormatError, match=said):
        brax.contents(WELFORD | change)


def test_a_state_is_written_in_float32():
    count = np.full(2, 2.0**33 + 6)
    leaf = Statistics(mean=np.array([0.1, 5.0]), var=np.array([4.0, 0.0]), count=count)
    state = brax.state({"obs": leaf, "deep/er": leaf})
    assert (state["count"]["hi"], state["count"]["lo"]) == (2, 6)
    assert state["mean"]["deep"]["er"].dtype == np.float32
    np.testing.assert_array_equal(state["std"]["obs"], np.float32([2, 1e-6]))
    back = brax.contents(state).leaves
    np.testing.assert_array_equal(back["deep/er"].mean, np.float32([0.1, 5.0]).astype(float))
    np.testing.assert_allclose(back["obs"].var, [4, 0], rtol=1e-7)
    np.testing.assert_array_equal(back["obs"].count, count)
    for wrong, said in [
        ({"a": leaf, "b": Statistics(leaf.mean, leaf.var, count + 1)}, "one whole count"),
        ({"a": Statistics(leaf.mean, leaf.var)}, "needs count: 'a' has no count"),
        ({"a": Statistics(leaf.mean * 1e40, leaf.var, count)}, "those of 'a' are too large"),
    ]:
        with pytest.raises(FormatError, match=said):
            brax.state(wrong)


@pytest.mark.parametrize("rest", [(), ({"params": {"w": np.ones(3)}},)])
def test_checkpoints_of_orbax_are_read(tmp_path, rest):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    path = tmp_path / "000000000010"
    state = {name: value for name, value in EMA.items() if name != "count"}
    checkpoint.PyTreeCheckpointer().save(
        path, (state | {"count": {"hi": np.uint32(0), "lo": np.uint32(6)}}, *rest)
    )
    assert formats.recognize(path) == "brax"
    read = formats.read(path, "brax")
    np.testing.assert_allclose(deviation(read), EMA["std"], rtol=1e-6)
    assert brax.INFERRED.format("'ema'") in read.notes
    assert formats.recognize(tmp_path) == "brax"
    with pytest.raises(FormatError, match=r"it is none. Name one of its steps: 000000000010"):
        brax.read(tmp_path)
    metadata = path / "_METADATA"
    metadata.write_text(metadata.read_text()[:-50])
    with pytest.raises(FormatError, match="cannot be read, it may be damaged"):
        brax.read(path)


def test_checkpoints_are_written_for_brax(tmp_path, running_statistics):
    pytest.importorskip("orbax.checkpoint")
    from brax.training import checkpoint

    leaf = Statistics(mean=np.array([0.5, 5.0]), var=np.array([4.0, 0.25]), count=np.full(2, 9.0))
    brax.write(tmp_path / "new", {"": leaf})
    (state,) = checkpoint.load(tmp_path / "new")
    assert int(state.count) == 9
    true = running_statistics.normalize(np.float32([2.5, 5.5]), state)
    np.testing.assert_array_equal(true, [1, 1])
    with pytest.raises(FileExistsError, match=r"must not exist: it does. Name another folder"):
        brax.write(tmp_path / "new", {"": leaf})


def test_folders_that_are_no_checkpoint(tmp_path):
    (tmp_path / "_METADATA").write_text('{"tree_metadata": {"params": 1}}')
    assert formats.recognize(tmp_path) is None
    with pytest.raises(FormatError, match="must be the folder of an Orbax checkpoint: it is none"):
        brax.read(tmp_path / "none")
