"""Test that jaxnorm.host obeys the laws of jaxnorm's Moments, in float64 and without JAX."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import long_sweep

import jaxnorm as jn
from jaxnorm import host
from jaxnorm.arguments.axes import resolve
from jaxnorm.data.host import tiles
from jaxnorm.data.host.statistics import summarize

pytestmark = pytest.mark.usefixtures("usual_compile")
EXACT = {jn: 2e-6, host: 1e-13}
BOTH = pytest.mark.parametrize(
    "home", long_sweep([jn, host], quick=[host]), ids=["jaxnorm", "host"]
)


def leaves(found):
    return found.count, found.mean, found.var


def assert_close(home, found, count, mean, var, scale=1.0):
    """Of the mean relative to the size of the data, of the variance to its own."""
    np.testing.assert_array_equal(
        np.asarray(found.count), np.broadcast_to(count, np.shape(found.count))
    )
    np.testing.assert_allclose(found.mean, mean, rtol=EXACT[home], atol=EXACT[home] * scale)
    np.testing.assert_allclose(found.var, var, rtol=10 * EXACT[home], atol=EXACT[home] * scale**2)


def assert_same(found, expected):
    for got, same in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(got, same)


def empty(home):
    return home.moments(np.ones((2, 3), np.float32), 0, where=False)


@BOTH
@pytest.mark.parametrize("seed", long_sweep(range(10), quick=range(3)))
def test_merge_is_associative_commutative_and_has_an_identity(home, seed):
    rng = np.random.default_rng(seed)
    lists = [rng.integers(-1000, 1000, rng.integers(1, 10)) for _ in range(3)]
    a, b, c = (home.moments(np.array(values, np.float32) / 8, 0) for values in lists)
    exact = np.concatenate(lists) / 8
    for merged in (
        home.merge(a, home.merge(b, c)),
        home.merge(home.merge(a, b), c),
        home.merge(c, a, b),
        home.merge(a, b, c),
    ):
        assert_close(
            home, merged, len(exact), exact.mean(), exact.var(), scale=max(1, np.abs(exact).max())
        )
    nothing = home.Moments(*(leaf[0, :1] for leaf in leaves(empty(home))))
    for merged in (home.merge(a, nothing), home.merge(nothing, a), home.merge(nothing, a, nothing)):
        assert_same(merged, a)


@BOTH
@pytest.mark.parametrize("cut", [1, 5, 50, 99])
def test_the_whole_equals_its_parts(home, cut, rng):
    x = rng.standard_normal((100, 3)).astype(np.float32) * 3 + 7
    exact = x.astype(np.float64)
    for found in (
        home.moments(x, 0),
        home.merge(home.moments(x[:cut], 0), home.moments(x[cut:], 0)),
    ):
        assert_close(
            home, found, 100, exact.mean(0, keepdims=True), exact.var(0, keepdims=True), scale=0.1
        )


@BOTH
def test_merging_axes_equals_reducing_them(home, rng):
    x = rng.standard_normal((4, 5, 6, 3)).astype(np.float32) + 100
    instance, mask = home.moments(x, "n [h w] c"), rng.random(x.shape) < 0.5
    pairs = [
        (instance.merge(0), home.moments(x, "[n h w] c")),
        (instance.merge("n h w [c]"), home.moments(x, "n [h w c]")),
        (instance.merge("n h w (g [c])", g=1), home.moments(x, "n [h w] (g [c])", g=1)),
        (
            home.moments(x, "n [h w] c", where=mask).merge(0),
            home.moments(x, "[n h w] c", where=mask),
        ),
    ]
    for found, truth in pairs:
        assert_close(home, found, *leaves(truth), scale=0.1)


@BOTH
def test_merge_ignores_what_empty_parts_hold(home):
    broken = home.Moments(
        np.zeros((1,), np.float32),
        np.full((1,), np.nan, np.float32),
        np.full((1,), np.inf, np.float32),
    )
    merged = home.merge(home.moments(np.float32([1, 3]), 0), broken)
    assert tuple(float(leaf[0]) for leaf in leaves(merged)) == (2.0, 2.0, 1.0)


@BOTH
def test_without_centering_the_variance_is_the_mean_square(home, rng):
    x = rng.standard_normal((5, 7)).astype(np.float32) + 2
    found = home.moments(x, 1, centered=False)
    assert_close(
        home, found, 7, np.zeros((5, 1)), (x.astype(np.float64) ** 2).mean(1, keepdims=True)
    )
    assert_close(home, found.merge(0), 35, 0, (x.astype(np.float64) ** 2).mean())


@BOTH
@pytest.mark.parametrize("weights", [False, True], ids=["mask", "weights"])
def test_what_is_masked_out_counts_for_nothing(home, weights, rng):
    x = rng.standard_normal((6, 40, 3)).astype(np.float32) * 2 + 5
    where = rng.random((6, 40, 1)) < 0.7
    where[0] = False
    weight = (where * (rng.random(where.shape) + 0.5)).astype(np.float32) if weights else where
    w = np.broadcast_to(weight, x.shape).astype(np.float64)
    count = w.sum(1, keepdims=True)
    mean = (w * x).sum(1, keepdims=True) / np.maximum(count, 1e-300)
    var = (w * (x - mean) ** 2).sum(1, keepdims=True) / np.maximum(count, 1e-300)
    found = home.moments(np.where(w > 0, x, np.nan).astype(np.float32), "n [t] c", where=weight)
    np.testing.assert_allclose(found.count, count, rtol=1e-6 if home is jn else 1e-14)
    assert_close(home, home.Moments(count, *leaves(found)[1:]), count, mean, var)
    assert not np.any([leaf[0] for leaf in leaves(found)])


@BOTH
def test_what_is_not_finite_shows(home):
    found = home.moments(np.float32([[1, np.nan], [2, 3]]), 0)
    np.testing.assert_array_equal(np.isnan(found.mean), [[False, True]])
    assert np.isnan(found.var[0, 1])


@BOTH
def test_of_complex_numbers_the_variance_is_that_of_the_absolute_value(home, rng):
    x = (rng.standard_normal((5, 6)) + 1j * rng.standard_normal((5, 6)) + 3).astype(np.complex64)
    mean = x.astype(np.complex128).mean(1, keepdims=True)
    found = home.moments(x, 1)
    assert_close(home, found, 6, mean, (np.abs(x - mean) ** 2).mean(1, keepdims=True))
    assert_close(home, found.merge(0), 30, mean.mean(), (np.abs(x - mean.mean()) ** 2).mean())


def message(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return caught.type, str(caught.value)


X = np.ones((4, 3), np.float32)
WRONG = {
    "axis": lambda home: home.moments(X, 2),
    "pattern": lambda home: home.moments(X, "[n] c d"),
    "size": lambda home: home.moments(X, "[n] (g [c])", g=2),
    "mask": lambda home: home.moments(X, 0, where=np.ones((5, 3), bool)),
    "mask's rank": lambda home: home.moments(X, 0, where=np.ones((1, 4, 3), bool)),
    "mask's dtype": lambda home: home.moments(X, 0, where=np.ones((4, 3), np.int32)),
    "weights": lambda home: home.moments(X, 0, where=np.full((4, 3), -1, np.float32)),
    "merged shapes": lambda home: home.merge(home.moments(X, 0), home.moments(X[:, :2], 0)),
    "merged axes": lambda home: home.moments(X, 0).merge(5),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_messages_are_the_same(wrong):
    assert message(lambda: WRONG[wrong](host)) == message(lambda: WRONG[wrong](jn))


def test_merge_says_what_it_takes():
    own = "merge takes Moments of jaxnorm.host: got "
    with pytest.raises(
        TypeError,
        match=re.escape(
            f"{own}those of jaxnorm.core.statistics. Make them with jaxnorm.host.moments."
        ),
    ):
        host.merge(jn.Moments(1.0, 0.0, 0.0))
    with pytest.raises(
        TypeError, match=re.escape(f"{own}int. Make them with jaxnorm.host.moments.")
    ):
        host.merge(host.moments(X, 0), 3)


@pytest.mark.parametrize(
    "dtype",
    ["uint8", "int16", "int32", "int64", "float16", "float32", "float64", ml_dtypes.bfloat16],
)
def test_numbers_of_any_dtype_are_computed_in_float64(dtype, rng):
    x = rng.integers(0, 100, (50, 3)).astype(dtype)
    found, exact = host.moments(x, 0), x.astype(np.float64)
    assert {leaf.dtype for leaf in leaves(found)} == {np.dtype(np.float64)}
    assert_close(host, found, 50, exact.mean(0, keepdims=True), exact.var(0, keepdims=True))


@pytest.mark.parametrize(
    "x",
    [X > 0, np.array(["a"]), np.array([None]), np.array(["2020-01-01"], "datetime64[D]")],
    ids=lambda x: str(x.dtype),
)
def test_what_holds_no_numbers_is_refused_by_its_dtype(x):
    with pytest.raises(
        TypeError,
        match=re.escape(f"x must be floating point or integer: got {x.dtype}. Cast it first"),
    ):
        host.moments(x, 0)


@pytest.mark.parametrize("offset", [0, 1e3, 1e6, 1e7])
@pytest.mark.parametrize("order", ["as drawn", "sorted", "outlier first"])
def test_no_offset_costs_accuracy(offset, order, rng, monkeypatch):
    """Against twice the precision, in several tiles and parts, and merged from small batches."""
    monkeypatch.setattr(tiles, "TILE", 1 << 13)
    x = rng.standard_normal((200_000, 2)) + offset
    x = np.sort(x, 0) if order == "sorted" else x
    x[0] += 1e4 if order == "outlier first" else 0
    exact = x.astype(np.longdouble)
    mean, var = exact.mean(0), ((exact - exact.mean(0)) ** 2).mean(0)
    streamed = host.moments(x[:0], 0)
    for start in range(0, len(x), 999):
        streamed = host.merge(streamed, host.moments(x[start : start + 999], 0))
    for found in (host.moments(x, 0), streamed):
        assert np.all(np.abs(found.mean[0] - mean) <= 1e-15 * (offset + 1) * 10)
        # a mean is rounded so
        np.testing.assert_allclose(
            found.var[0], var.astype(np.float64), rtol=1e-12 + 1e-15 * offset
        )


LAYOUTS = [
    ((30_000, 70), "[n] c", {}),
    ((70, 30_000), "n [c]", {}),
    ((3, 50_000, 5), "n [t] c", {}),
    ((40, 50, 9, 12), "[n h w] c", {}),
    ((40, 50, 9, 12), "n [h w] (g [c])", {"g": 3}),
    ((40, 50, 9, 12), "(k [n]) h [w c]", {"k": 4}),
    ((2, 300_000), "[n] c", {}),
    ((20, 60, 50, 3), "[n] h w c", {}),
    ((6, 7), "[a b]", {}),
]


@pytest.mark.parametrize(
    ("shape", "pattern", "sizes"),
    LAYOUTS,
    ids=[f"{shape} {pattern}" for shape, pattern, _ in LAYOUTS],
)
@pytest.mark.parametrize("masked", long_sweep([False, True], quick=[True]))
@pytest.mark.parametrize("tile", long_sweep([1 << 12, 1 << 18], quick=[1 << 12]))
def test_tiles_of_any_layout_give_the_same(shape, pattern, sizes, masked, tile, rng, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", tile)
    x = rng.standard_normal(shape, np.float32) * 3 + 50
    reduction = resolve(pattern, shape, sizes)
    where = rng.random(shape) < 0.6 if masked else None
    split, w = (
        x.reshape(reduction.split_shape).astype(np.float64),
        np.ones(shape) if where is None else where,
    )
    w = w.reshape(reduction.split_shape).astype(np.float64)
    count = w.sum(reduction.axes, keepdims=True)
    mean = (w * split).sum(reduction.axes, keepdims=True) / np.maximum(count, 1)
    var = (w * (split - mean) ** 2).sum(reduction.axes, keepdims=True) / np.maximum(count, 1)
    found, threaded = (summarize(x, reduction, where, threads=threads) for threads in (1, 2))
    assert found.moments.mean.shape == reduction.stats_shape
    assert_close(
        host, found.moments, *(leaf.reshape(reduction.stats_shape) for leaf in (count, mean, var))
    )
    assert_same(threaded.moments, found.moments)
    for got, extreme in (
        (found.min, np.where(w > 0, split, np.inf).min(reduction.axes)),
        (found.max, np.where(w > 0, split, -np.inf).max(reduction.axes)),
    ):
        np.testing.assert_array_equal(got.ravel(), extreme.ravel())


def test_it_equals_jaxnorm_in_float64(rng, x64):
    x = rng.standard_normal((7, 5, 4)) + 1e5
    for axes in (0, (0, 2), "n [h] (g [c])"):
        sizes = {"g": 2} if isinstance(axes, str) else {}
        ours, theirs = host.moments(x, axes, **sizes), jn.moments(jnp.asarray(x), axes, **sizes)
        for got, same in zip(leaves(ours), leaves(theirs), strict=True):
            np.testing.assert_allclose(got, same, rtol=1e-12)


def test_jax_arrays_and_memory_maps_are_read(tmp_path, rng):
    x = rng.standard_normal((300, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    for same in (
        jnp.asarray(x),
        np.load(tmp_path / "x.npy", mmap_mode="r"),
        np.asfortranarray(x),
        x[::-1][::-1],
    ):
        np.testing.assert_allclose(host.moments(same, 0).var, host.moments(x, 0).var, rtol=1e-15)
    assert isinstance(host.moments(jax.device_put(x), 0).mean, np.ndarray)


def test_counts_are_exact_to_the_last_integer_of_float64():
    big = host.Moments(np.array([2.0**53 - 1]), np.array([1.0]), np.array([0.0]))
    assert host.merge(big, host.moments(np.array([1.0]), 0)).count[0] == 2.0**53


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_no_elements(shape):
    found = host.moments(np.ones(shape), 0)
    assert found.mean.shape == (1, shape[1])
    assert not any(leaf.any() for leaf in leaves(found))


def test_it_needs_no_jax():
    code = """
import sys
sys.modules["jax"] = sys.modules["flax"] = None
import numpy as np
from jaxnorm import host
from jaxnorm.data import Normalizer
one, other = np.array([[1.0, 2.0], [3.0, 6.0]]), np.array([[2, 4]])
found = host.merge(host.moments(one, "[n] c"), host.moments(other, 0)).merge("n [c]")
assert (found.count.item(), found.mean.item()) == (6, 3), found
assert Normalizer.fit([np.array([[1.0], [3.0]])]).normalize(np.array([[3.0]])).item() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
