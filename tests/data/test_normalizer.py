"""Test jaxnorm.data.Normalizer.

It is fitted in one pass, exact and resumable, applied on the host and within jit, and
saved to the bit.
"""

import pickle
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxnorm import host
from jaxnorm.data import Normalizer
from jaxnorm.data.host import tiles

Step = namedtuple("Step", "state action")
AXES = {"image": "[n h w] c", "state": "[n t] f"}


@dataclass
class Observation:
    image: np.ndarray
    state: np.ndarray


def batches(rng, count=7):
    for size in range(1, count + 1):
        yield {
            "image": rng.integers(0, 256, (size, 4, 5, 3), np.uint8),
            "state": rng.standard_normal((size, 6, 2)).astype(np.float32) * 3 + 1e3,
            "label": rng.integers(0, 10, size),
        }


def arrays(fitted):
    moments = jax.tree.leaves(fitted.moments, is_leaf=lambda leaf: isinstance(leaf, host.Moments))
    return jax.tree.leaves([list(map(vars, moments)), fitted.min, fitted.max])


def rounded(fitted):
    """As :func:`arrays`, without the low parts of the mean, which say how the high ones were
    rounded.
    """
    found = fitted.summaries.values()
    return [leaf for (m, low, high) in found for leaf in (m.count, m.mean, m.var, low, high)]


def assert_equal(a, b):
    """To the bit."""
    assert (a.axes, a.sizes, a.batches) == (b.axes, b.sizes, b.batches)
    assert jax.tree.structure(a.min) == jax.tree.structure(b.min)
    for one, other in zip(arrays(a), arrays(b), strict=True):
        assert one.dtype == other.dtype == np.float64
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.view(np.int64), other.view(np.int64))


def whole(parts, leaf):
    return np.concatenate([part[leaf] for part in parts]).astype(np.float64)


def test_statistics_are_those_of_all_batches(rng):
    parts = list(batches(rng))
    fitted = Normalizer.fit(iter(parts), AXES)
    for leaf, axes in {"image": (0, 1, 2), "state": (0, 1)}.items():
        x = whole(parts, leaf)
        np.testing.assert_array_equal(
            fitted.moments[leaf].count, np.full_like(fitted.min[leaf], x.size / x.shape[-1])
        )
        np.testing.assert_allclose(
            fitted.moments[leaf].mean, x.mean(axes, keepdims=True), rtol=1e-14
        )
        np.testing.assert_allclose(fitted.std[leaf], x.std(axes, keepdims=True), rtol=1e-12)
        np.testing.assert_array_equal(fitted.min[leaf], x.min(axes, keepdims=True))
        np.testing.assert_array_equal(fitted.max[leaf], x.max(axes, keepdims=True))
    assert set(fitted.moments) == {"image", "state", "label"}
    assert fitted.moments["label"] is None
    assert fitted.batches == 7


@pytest.mark.parametrize("offset", [0, 1e3, 1e6])
@pytest.mark.parametrize("order", ["as drawn", "sorted", "outlier first"])
def test_offsets_cost_no_accuracy(offset, order, rng):
    x = rng.standard_normal((20_000, 3)) + offset
    x = np.sort(x, 0) if order == "sorted" else x
    x[0] += 1e4 if order == "outlier first" else 0
    exact = x.astype(np.longdouble)
    fitted = Normalizer.fit(np.array_split(x, 61))
    deviation = ((exact - exact.mean(0)) ** 2).mean(0) ** 0.5
    assert np.all(np.abs(fitted.moments.mean[0] - exact.mean(0)) <= 1e-8 * deviation)
    np.testing.assert_allclose(fitted.std[0], deviation.astype(np.float64), rtol=1e-8)


@pytest.mark.parametrize("weights", [False, True])
def test_masks_and_weights_of_leaves(weights, rng):
    def batch():
        lengths = rng.integers(0, 7, 5)
        mask = (np.arange(6) < lengths[:, None])[..., None]
        x = np.where(mask, rng.standard_normal((5, 6, 2)) + 4, np.nan)
        return {
            "state": x,
            "mask": mask * rng.uniform(0.5, 2, mask.shape) if weights else mask,
            "all": rng.standard_normal((5, 2)),
        }

    parts = [batch() for _ in range(4)]
    fitted = Normalizer.fit(
        parts, {"state": "[n t] f", "all": 0}, where=lambda batch: {"state": batch["mask"]}
    )
    x, w = np.nan_to_num(whole(parts, "state")), whole(parts, "mask")
    mean = (x * w).sum((0, 1)) / w.sum()
    np.testing.assert_allclose(
        fitted.moments["state"].count, np.full((1, 1, 2), w.sum()), rtol=1e-14
    )
    np.testing.assert_allclose(fitted.moments["state"].mean[0, 0], mean, rtol=1e-13)
    np.testing.assert_allclose(
        fitted.moments["state"].var[0, 0], (w * (x - mean) ** 2).sum((0, 1)) / w.sum(), rtol=1e-13
    )
    np.testing.assert_array_equal(fitted.min["state"][0, 0], np.where(w > 0, x, np.inf).min((0, 1)))
    assert fitted.moments["all"].count.tolist() == [[20, 20]]
    one = Normalizer().update(
        np.array([[1.0], [5.0], [np.nan]]), where=np.array([[True], [True], [False]])
    )
    assert (one.moments.mean.item(), one.max.item()) == (3, 5)


def test_merge_is_that_of_all_data_and_an_empty_one_its_identity(rng):
    parts = list(batches(rng))
    a, b, all_of_it = (Normalizer.fit(some, AXES) for some in (parts[:2], parts[2:], parts))
    empty = Normalizer(AXES)
    for merged in (a.merge(b), b.merge(a)):
        assert merged.batches == 7
        for found, same in zip(rounded(merged), rounded(all_of_it), strict=True):
            np.testing.assert_allclose(found, same, rtol=1e-11)
    assert_equal(a.merge(empty), a)
    assert_equal(empty.merge(a), a)
    assert a.batches == 2
    assert_equal(pickle.loads(pickle.dumps(a)), a)


def test_going_on_with_new_data_gives_the_same(rng):
    parts = list(batches(rng))
    fitted = Normalizer.fit(parts[:3], AXES)
    assert fitted.extend(parts[3:]) is fitted
    assert_equal(fitted, Normalizer.fit(parts, AXES))


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_fit_goes_on_and_gives_the_same(suffix, error, tmp_path, rng):
    parts, state = list(batches(rng)), tmp_path / f"state{suffix}"

    def failing():
        yield from parts[:4]
        raise error

    with pytest.raises(error):
        Normalizer.fit(failing(), AXES, state=state)
    assert Normalizer.load(state).batches == 4
    read = []
    resumed = Normalizer.fit(
        (read.append(part["label"]) or part for part in parts), AXES, state=state
    )
    assert_equal(resumed, Normalizer.fit(parts, AXES))
    assert_equal(Normalizer.load(state), resumed)
    assert_equal(Normalizer.fit(parts, AXES, state=state), resumed)  # all of it was there


def test_a_fit_that_was_killed_goes_on_from_what_was_saved(tmp_path, rng):
    parts, saved = list(batches(rng)), []
    Normalizer.fit(
        (saved.append((tmp_path / "state.json").exists()) or part for part in parts),
        AXES,
        state=tmp_path / "state.json",
        every=3,
    )
    assert saved == [False] * 3 + [True] * 4


def test_batches_that_can_skip_do_so(tmp_path, rng):
    class Batches(list):
        def skip(self, count):
            skipped.append(count)
            return self[count:]

    skipped, parts = [], list(batches(rng))
    Normalizer.fit(parts[:5], AXES, state=tmp_path / "state.json")
    assert_equal(
        Normalizer.fit(Batches(parts), AXES, state=tmp_path / "state.json"),
        Normalizer.fit(parts, AXES),
    )
    assert skipped == [5]


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_files_are_read_back_equal_to_the_bit(suffix, tmp_path, rng):
    fitted = Normalizer.fit(batches(rng), {"image": "[n h w] (g [c])", "state": (0, -2)}, g=3)
    fitted.update(next(batches(rng)), where=False)
    hard = (
        Normalizer()
        .update(np.array([[1e-320, 1e300, np.nan, -0.0, np.inf, 0.1]]))
        .update(np.ones((0, 6)))
    )
    masked = Normalizer((0, 1)).update(np.ones((2, 2)), where=False)
    nested = Normalizer({"a": {"b": 0}}).update(
        {"a": {"b": (np.ones((3, 2)), [np.ones(3), None])}, "c": np.ones(3)}
    )
    for number, one in enumerate((fitted, nested)):
        one.save(tmp_path / f"{number}{suffix}")
        assert_equal(Normalizer.load(tmp_path / f"{number}{suffix}"), one)
    for one in (hard, masked, Normalizer(1)):
        one.save(tmp_path / f"x{suffix}")
        found = Normalizer.load(tmp_path / f"x{suffix}")
        assert (found.axes, found.batches) == (one.axes, one.batches)
        for same, array in (
            zip(
                (*vars(found.moments).values(), found.min, found.max),
                (*vars(one.moments).values(), one.min, one.max),
                strict=True,
            )
            if one.batches
            else ()
        ):
            np.testing.assert_array_equal(same, array)
            np.testing.assert_array_equal(
                np.signbit(same[~np.isnan(same)]), np.signbit(array[~np.isnan(array)])
            )
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [suffix] * 3


TREES = [
    lambda image, state: {"image": image, "state": state},
    lambda image, state: OrderedDict(image=image, state=state),
    lambda image, state: Observation(image, state),
    lambda image, state: namedtuple("Observation", "image state")(image, state),
]


@pytest.mark.parametrize("tree", TREES, ids=["dict", "OrderedDict", "dataclass", "namedtuple"])
def test_trees_of_any_kind(tree, rng, tmp_path):
    part = list(batches(rng))[-1]
    batch = tree(part["image"], part["state"])
    fitted = Normalizer.fit([batch], AXES)
    normalized = fitted.normalize(batch)
    assert type(normalized) is type(batch)
    assert_equal(fitted, Normalizer.fit([{"image": part["image"], "state": part["state"]}], AXES))
    fitted.save(tmp_path / "stats.json")
    assert_equal(Normalizer.load(tmp_path / "stats.json"), fitted)


def test_tuples_and_bare_arrays(rng):
    x, y = rng.standard_normal((2, 5, 3))
    fitted = Normalizer.fit([(x, [y, None])])
    assert isinstance(fitted.moments, tuple)
    np.testing.assert_allclose(fitted.normalize((x, [y, None]))[1][0].std(0), np.ones(3))
    named = Normalizer.fit([(x, [y])], {"1/0": 0})
    assert named.moments[0] is None
    np.testing.assert_array_equal(named.normalize((x, [y]))[0], x)
    np.testing.assert_allclose(Normalizer.fit([x], "n [c]").normalize(x).std(1), np.ones(5))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("offset", [0, 1e6])
def test_normalizing_is_exact_and_denormalizing_undoes_it(kind, offset, rng):
    x = (rng.standard_normal((500, 3)) * [1, 30, 0.5] + offset).astype(np.float32)
    fitted = Normalizer.fit([x])
    y = fitted.normalize(kind(x))
    assert type(y) is type(kind(x))
    assert y.dtype == np.float32
    exact = x.astype(np.float64)
    np.testing.assert_allclose(y, (exact - exact.mean(0)) / exact.std(0), rtol=3e-7, atol=3e-7)
    np.testing.assert_allclose(fitted.denormalize(y), x, rtol=2e-7, atol=1e-5 if not offset else 0)


def test_within_jit_and_grad_it_is_a_pure_function(rng):
    part = list(batches(rng))[-1]
    fitted = Normalizer.fit([part], AXES)
    here, there = fitted.normalize(part), jax.jit(fitted.normalize)(part)
    assert isinstance(there["image"], jax.Array)
    for leaf in AXES:
        np.testing.assert_allclose(here[leaf], there[leaf], rtol=3e-7, atol=3e-7)
    np.testing.assert_array_equal(there["label"], part["label"])
    back = jax.jit(fitted.denormalize)(there)
    np.testing.assert_allclose(back["image"], part["image"], rtol=1e-6, atol=1e-4)
    slope = jax.grad(lambda x: fitted.normalize({"state": x})["state"].sum())(
        jnp.asarray(part["state"])
    )
    np.testing.assert_allclose(
        slope, np.broadcast_to(1 / fitted.std["state"], slope.shape), rtol=1e-6
    )
    one = jax.vmap(lambda x: fitted.normalize({"state": x})["state"])(jnp.asarray(part["state"]))
    np.testing.assert_array_equal(
        one, fitted.normalize({"state": jnp.asarray(part["state"])})["state"]
    )


@pytest.mark.parametrize(
    "dtype", ["uint8", "int32", "int64", "float16", "float32", "float64", ml_dtypes.bfloat16]
)
def test_the_dtype_of_the_result(dtype, rng):
    x = rng.integers(0, 200, (20, 3)).astype(dtype)
    fitted = Normalizer.fit([x])
    expected = np.dtype(np.float32) if x.dtype.kind in "iu" else x.dtype
    assert fitted.normalize(x).dtype == expected
    assert fitted.normalize(x, dtype=np.float64).dtype == np.float64
    exact = x.astype(np.float64)
    truth = (exact - exact.mean(0)) / exact.std(0)
    tolerance = {2: 5e-3, 4: 1e-6, 8: 1e-12}[expected.itemsize]
    np.testing.assert_allclose(
        fitted.normalize(x).astype(np.float64), truth, rtol=tolerance, atol=tolerance
    )
    if x.dtype.itemsize < 8:
        assert fitted.normalize(jnp.asarray(x)).dtype == expected


def test_large_integers_keep_their_digits():
    x = np.array([[2**40], [2**40 + 2]])
    assert Normalizer.fit([x]).normalize(x).ravel().tolist() == [-1, 1]


def test_clipping_and_constant_features():
    x = np.array([[0.1, 1.0, 5.0], [0.1, 3.0, 9.0]], np.float32)
    fitted = Normalizer.fit([x])
    assert fitted.normalize(x).tolist() == [[0, -1, -1], [0, 1, 1]]
    assert fitted.normalize(x, clip=0.5).tolist() == [[0, -0.5, -0.5], [0, 0.5, 0.5]]
    assert fitted.normalize(x, floor=2.0).tolist() == [[0, -0.5, -1], [0, 0.5, 1]]
    np.testing.assert_array_equal(fitted.denormalize(fitted.normalize(x)), x)
    never = Normalizer().update(x, where=np.array([True, True, False]))
    np.testing.assert_array_equal(never.normalize(x)[:, 2], x[:, 2])


def test_one_example_without_its_batch(rng):
    part = list(batches(rng))[-1]
    fitted = Normalizer.fit([part], AXES)
    for leaf, index in (("image", 0), ("state", (0, 0))):
        np.testing.assert_array_equal(
            fitted.normalize({leaf: part[leaf][index]})[leaf], fitted.normalize(part)[leaf][index]
        )
    groups = Normalizer.fit([part["image"].astype(np.float64)], "[n] h w (g [c])", g=1)
    assert groups.normalize(part["image"]).shape == part["image"].shape


X = np.ones((4, 3))
FITTED = Normalizer.fit([{"a": X, "b": X}])
WRONG = {
    "axes must name leaves of the batch: ['image'] is not among them.": lambda: Normalizer(
        {"image": 0}
    ).update({"a": X}),
    "a batch must hold an array": lambda: Normalizer().update({}),
    "every batch must have the same leaves: ['b'] is not in all.": lambda: FITTED.update({"a": X}),
    (
        "leaf 'b' must keep its shape but for the reduction axes: "
        "got statistics of shape (1, 2) after (1, 3)."
    ): lambda: FITTED.update({"a": X, "b": X[:, :2]}),
    "leaf 'a': axes must lie in [-1, 1) for an array of rank 1": lambda: Normalizer(1).update(
        {"a": X[0]}
    ),
    (
        "a': x must be floating point or integer: got <U1. Leave it out: name the leaves to fit, "
        "axes={'b': 0}."
    ): lambda: FITTED.update({"a": np.array(["x"]), "b": X}),
    "got datetime64[D]. Cast it to numbers, or leave it out: name the leaves to fit": lambda: (
        FITTED.update({"a": X.astype("datetime64[D]"), "b": X})
    ),
    "x must be real: got complex128.": lambda: Normalizer().update(X + 1j),
    "leaf 'b': where must broadcast against x": lambda: FITTED.update(
        {"a": X, "b": X}, where={"b": np.ones(2, bool)}
    ),
    "where must name leaves that are fitted: got ['c'], fitted are ['a', 'b'].": lambda: (
        FITTED.update({"a": X, "b": X}, where={"c": True})
    ),
    "a Normalizer must have been fitted: no batch was taken in.": lambda: Normalizer().normalize(X),
    "the tree must hold a leaf that was fitted: got [''], fitted ['a', 'b'].": lambda: (
        FITTED.normalize(X)
    ),
    (
        "leaf 'a': the statistics must broadcast against x without growing it: "
        "they have shape (1, 3), x has shape (4, 2)."
    ): lambda: FITTED.normalize({"a": X[:, :2]}),
    "clip must be a finite number > 0: got 0.": lambda: FITTED.normalize({"a": X}, clip=0),
    "floor must be a finite number > 0: got -1.": lambda: FITTED.normalize({"a": X}, floor=-1),
    "merge takes a Normalizer: got int.": lambda: FITTED.merge(3),
    "merged Normalizers must have the same axes: got 0 and 1.": lambda: FITTED.merge(Normalizer(1)),
    "'h' is neither an argument nor a name in a pattern": lambda: Normalizer("[n] (g c)", h=3),
    "must end in .safetensors or .json: got 'stats.txt'.": lambda: FITTED.save("stats.txt"),
    "every leaf must have a path of its own: 'a/b' stands twice. Rename one of the keys.": lambda: (
        Normalizer().update({"a/b": X, "a": {"b": X}})
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_errors_say_what_must_hold_and_change_nothing(text):
    before = FITTED.batches
    with pytest.raises((TypeError, ValueError)) as caught:
        WRONG[text]()
    assert text in str(caught.value)
    assert FITTED.batches == before


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-30], lambda data: b"{}", lambda data: b"\0" * 64],
)
def test_damaged_files_are_named(suffix, damage, tmp_path):
    path = tmp_path / f"stats{suffix}"
    FITTED.save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="must be a Normalizer's file"):
        Normalizer.load(path)
    with pytest.raises(FileNotFoundError):
        Normalizer.load(tmp_path / f"none{suffix}")


def test_a_state_of_other_axes_is_refused(tmp_path):
    Normalizer.fit([X], state=tmp_path / "state.json")
    with pytest.raises(ValueError, match=r"must have the same axes: .*state.json has 0, not 1"):
        Normalizer.fit([X], 1, state=tmp_path / "state.json")


def test_a_state_of_more_batches_than_there_are_is_refused(tmp_path):
    Normalizer.fit([X, X, X], state=tmp_path / "state.json")
    assert Normalizer.fit([X, X, X], state=tmp_path / "state.json").batches == 3
    with pytest.raises(ValueError, match="must be of these batches: it holds 3, and there are 2"):
        Normalizer.fit(iter([X, X]), state=tmp_path / "state.json")


def test_threads_change_no_bit(rng, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 1 << 15)
    x = rng.standard_normal((60_000, 64)).astype(np.float32)
    results = [Normalizer().update(x, threads=threads).moments for threads in (1, 2, 5)]
    for other in results[1:]:
        for a, b in zip(vars(results[0]).values(), vars(other).values(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_moments_are_mergeable_values(rng):
    fitted = Normalizer.fit([rng.standard_normal((5, 3)) for _ in range(3)])
    assert isinstance(fitted.moments, host.Moments)
    assert fitted.moments.merge(1).count.item() == 45
    assert repr(fitted) == "Normalizer(0: 3 batches, leaves [''])"
    given = Normalizer.from_statistics(mean=np.zeros(2), std=np.ones(2))
    assert repr(given) == "Normalizer(given statistics, leaves [''])"


def test_progress_is_shown_on_terminals_only(capsys, rng):
    Normalizer.fit(list(batches(rng)), AXES, show_progress=True)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_bar_says_how_far_it_is(rng, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    Normalizer.fit(list(batches(rng)), AXES, show_progress=True)
    assert "7/7" in capsys.readouterr().err


def test_mean_stands_beside_the_others():
    x = np.array([[1.0, 2.0], [3.0, 6.0]])
    fitted = Normalizer.fit([{"x": x}])
    assert fitted.mean["x"].tolist() == [[2.0, 4.0]]
    assert fitted.mean["x"].shape == fitted.std["x"].shape


def test_fit_without_a_batch_is_refused(tmp_path):
    words = "batches must hold one batch at least: there was none"
    with pytest.raises(ValueError, match=words):
        Normalizer.fit([])
    batches = iter([np.ones((2, 3))])
    state = tmp_path / "state.json"
    Normalizer.fit(batches, state=state)
    with pytest.raises(ValueError, match=words):
        Normalizer.fit(batches)
    assert Normalizer().extend([]).batches == 0
