"""Test the laws of Moments.

Merge is a monoid, the whole equals its parts however it is cut, and ema is a blend.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxnorm as jn

pytestmark = pytest.mark.usefixtures("usual_compile")

EMPTY = jn.Moments(jnp.zeros((1,)), jnp.zeros((1,)), jnp.zeros((1,)))


def of(values):
    return jn.moments(jnp.asarray(values, jnp.float32), 0)


def of_some(values):
    """As :func:`of`, by one program for up to nine."""
    padded = np.resize(values, 9).astype(np.float32)
    return jn.moments(padded, 0, where=np.arange(9) < len(values))


def assert_close(found, truth, rtol=2e-6, scale=1.0):
    np.testing.assert_allclose(found.count, truth.count, rtol=1e-6)
    np.testing.assert_allclose(found.mean, truth.mean, rtol=rtol, atol=rtol * scale)
    np.testing.assert_allclose(found.var, truth.var, rtol=10 * rtol, atol=rtol * scale**2)


parts = st.lists(st.lists(st.integers(-1000, 1000), min_size=1, max_size=9), min_size=3, max_size=3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(parts, st.sampled_from([0, 1000, 1_000_000]))
def test_merge_is_associative_commutative_and_has_an_identity(lists, offset):
    a, b, c = (of_some(np.array(values) / 8 + offset) for values in lists)
    scale = max(1.0, max(abs(v) for values in lists for v in values) / 8)
    exact = np.concatenate(lists) / 8 + offset
    truth = jn.Moments(np.array([len(exact)]), np.array([exact.mean()]), np.array([exact.var()]))
    for merged in (
        jn.merge(a, jn.merge(b, c)),
        jn.merge(jn.merge(a, b), c),
        jn.merge(c, a, b),
        jn.merge(a, b, c),
    ):
        # each mean is rounded to float32 once: half a unit in the last place of the offset
        slack = scale + (offset * 6e-8 * np.sqrt(float(truth.var[0]) + 1) / 2e-6 if offset else 0)
        assert_close(merged, truth, scale=slack)
    for merged in (jn.merge(a, EMPTY), jn.merge(EMPTY, a), jn.merge(EMPTY, a, EMPTY)):
        for found, same in zip(jax.tree.leaves(merged), jax.tree.leaves(a), strict=True):
            np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize("cut", long_sweep([1, 5, 50, 99], quick=[1]))
def test_the_whole_equals_its_parts(cut, rng):
    x = rng.standard_normal((100, 3)).astype(np.float32) * 3 + 7
    whole = jn.moments(x, 0)
    assert_close(jn.merge(jn.moments(x[:cut], 0), jn.moments(x[cut:], 0)), whole)
    np.testing.assert_allclose(whole.mean[0], x.mean(0, dtype=np.float64), rtol=1e-7)
    np.testing.assert_allclose(whole.var[0], x.astype(np.float64).var(0), rtol=3e-7)


@pytest.mark.slow
def test_merging_axes_equals_pooling_them(rng):
    x = rng.standard_normal((4, 5, 6, 3)).astype(np.float32) + 100
    instance = jn.moments(x, "n [h w] c")
    assert_close(instance.merge(0), jn.moments(x, "[n h w] c"), scale=0.1)
    assert_close(instance.merge("n h w [c]"), jn.moments(x, "n [h w c]"), scale=0.1)
    assert_close(
        instance.merge("n h w (g [c])", g=1), jn.moments(x, "n [h w] (g [c])", g=1), scale=0.1
    )
    mask = rng.random(x.shape) < 0.5
    assert_close(
        jn.moments(x, "n [h w] c", where=mask).merge(0),
        jn.moments(x, "[n h w] c", where=mask),
        scale=0.1,
    )


@pytest.mark.parametrize("disabled", [False, True], ids=["jit", "disable_jit"])
def test_moments_of_numbers_are_merged(disabled):
    with jax.disable_jit(disabled):
        found = jn.merge(jn.Moments(1.0, 2.0, 3.0), jn.Moments(1.0, 4.0, 3.0))
    assert (found.count, found.mean, found.var) == (2, 3, 4)


def test_merge_ignores_what_empty_parts_hold():
    broken = jn.Moments(jnp.zeros((1,)), jnp.full((1,), jnp.nan), jnp.full((1,), jnp.inf))
    merged = jn.merge(of([1.0, 3.0]), broken)
    assert (float(merged.count[0]), float(merged.mean[0]), float(merged.var[0])) == (2.0, 2.0, 1.0)


@pytest.mark.parametrize("where", [[True, False], [2.0, 0.0]])
def test_an_empty_channel_of_switchable_norm_has_mean_0(where):
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2) + 100
    found = jn.switchable_norm(
        x, np.zeros(3, np.float32), np.zeros(3, np.float32), where=jnp.asarray(where)
    )[1]
    assert (
        float(found.count.ravel()[1]),
        float(found.mean.ravel()[1]),
        float(found.var.ravel()[1]),
    ) == (0, 0, 0)
    assert float(found.mean.ravel()[0]) == 105


@pytest.mark.parametrize("element", [np.nan, np.inf])
def test_the_gradient_of_a_mean_needs_no_finite_elements(element):
    found = jax.grad(lambda x: jn.moments(x, 0).mean.sum())(jnp.asarray([element, 1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(found, np.full(4, 0.25))


def test_without_centering_the_variance_is_the_mean_square(rng):
    x = rng.standard_normal((5, 7)).astype(np.float32) + 2
    found = jn.moments(x, 1, centered=False)
    np.testing.assert_array_equal(found.mean, np.zeros((5, 1)))
    np.testing.assert_allclose(found.var[:, 0], (x.astype(np.float64) ** 2).mean(1), rtol=3e-7)


def test_moments_are_at_least_float32(rng, x64):
    for dtype, expected in (
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.float64, jnp.float64),
    ):
        found = jn.moments(jnp.asarray(rng.standard_normal((4, 3)), dtype), 0)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(expected)}


def test_float8_is_computed_in_float32(rng):
    x = jnp.asarray(rng.standard_normal((4, 64)), jnp.float8_e4m3fn)
    y = jn.layer_norm(x)
    assert y.dtype == x.dtype
    truth = jn.layer_norm(x.astype(jnp.float32)).astype(x.dtype)
    np.testing.assert_array_equal(*(np.asarray(a).astype(np.float32) for a in (y, truth)))
    assert jn.layer_norm(x, dtype=jnp.float32).dtype == jnp.float32


def test_of_complex_numbers_the_variance_is_that_of_the_absolute_value(rng):
    x = (rng.standard_normal((5, 6)) + 1j * rng.standard_normal((5, 6)) + 3).astype(np.complex64)
    found = jn.moments(x, 1)
    np.testing.assert_allclose(found.mean[:, 0], x.mean(1), rtol=1e-6)
    np.testing.assert_allclose(
        found.var[:, 0], (np.abs(x - x.mean(1, keepdims=True)) ** 2).mean(1), rtol=1e-6
    )
    truth = (x - x.mean(1, keepdims=True)) / np.sqrt(np.asarray(found.var) + 1e-6)
    np.testing.assert_allclose(jn.layer_norm(x), truth, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: jnp.abs(jn.layer_norm(x) ** 2).sum().real))(x)

    def plain(x):
        root = jnp.sqrt(x.var(1, keepdims=True) + 1e-6).astype(x.dtype)
        return jnp.abs(((x - x.mean(1, keepdims=True)) / root) ** 2).sum()

    np.testing.assert_allclose(gradient, jax.jit(jax.grad(plain))(x), atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e30, 3e38])
def test_complex_numbers_of_any_size(size):
    z = jnp.asarray([1 + 1j, -1, 1j, 0], jnp.complex64)
    truth = jn.standardize(z, 0, epsilon=0.0)
    np.testing.assert_allclose(
        truth, np.array([1 + 0.5j, -1 - 0.5j, 0.5j, -0.5j]) / np.sqrt(0.75), rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        jn.standardize(z * size, 0, epsilon=0.0), truth, rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        jn.standardize(z * size, 0, epsilon=1e-8 * size, epsilon_in="std", full_range=True),
        truth,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_complex_scale_and_bias(dtype, rng):
    x, (scale, bias) = (
        jnp.asarray(rng.standard_normal((2, 5, 3)), dtype),
        jnp.asarray(rng.standard_normal((2, 3)) + 1j, jnp.complex64),
    )
    plain = jn.instance_norm(x)
    truth = np.asarray(plain) * np.asarray(scale) + np.asarray(bias)
    only = jnp.array([50.0, 0, 0])
    np.testing.assert_allclose(
        jn.instance_norm(x, scale=scale, bias=bias, dtype=jnp.complex64),
        truth,
        rtol=1e-5,
        atol=1e-5,
    )
    y, _ = jn.switchable_norm(
        x, only, only, scale=scale, bias=bias, epsilon=1e-6, dtype=jnp.complex64
    )
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_moments_of_complex_numbers_merge(rng):
    x = (rng.standard_normal((8, 6)) + 1j * rng.standard_normal((8, 6)) + 3).astype(np.complex64)
    found = jn.merge(jn.moments(x[:3], 0), jn.moments(x[3:], 0))
    np.testing.assert_allclose(found.mean[0], x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.var[0], (np.abs(x - x.mean(0)) ** 2).mean(0), rtol=1e-6)


def running(mean, var, count=1.0):
    return jn.Moments(
        jnp.float32(count), jnp.asarray(mean, jnp.float32), jnp.asarray(var, jnp.float32)
    )


def test_one_mean_and_several_variances_merge_and_follow(rng):
    x, parts = (
        rng.standard_normal((4, 3, 5)).astype(np.float32),
        jn.Moments(2.0, jnp.float32(1), jnp.arange(3.0)),
    )
    np.testing.assert_array_equal(jn.merge(parts, parts).var, np.arange(3.0))
    np.testing.assert_array_equal(parts.merge(0).var, [1.0])
    of_features = jn.Moments(jnp.float32(8), jnp.ones((1, 3, 1)), jnp.arange(3.0))
    only, options = jnp.array([0.0, 0, 50]), {"feature_axes": 1, "epsilon": 1.0}
    y, _ = jn.switchable_norm(x, only, only, running=of_features, **options)
    np.testing.assert_allclose(
        y, (x - 1) / np.sqrt(np.arange(3.0) + 1)[:, None], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.3, 1e10])
@pytest.mark.parametrize("n", long_sweep([40, 49, 169, 216], quick=[49]))
def test_of_a_constant_the_variance_is_0(n, value, usual_compile_of_class):
    """So that the gradient through Moments of it is that of no spread, too."""
    x = jnp.full((n, 3), value)
    found = jn.moments(x, 0)
    np.testing.assert_array_equal(found.var, np.zeros((1, 3)))
    np.testing.assert_array_equal(found.mean + found.low.mean, x[:1])


@pytest.mark.parametrize("n", long_sweep(range(2, 11), quick=(2, 3, 10)))
@pytest.mark.parametrize("unbiased", [False, True])
def test_ema_of_biased_and_unbiased_variances(n, unbiased, rng):
    x = rng.standard_normal((n, 3)).astype(np.float32)
    found = jn.ema(
        running(np.zeros(3), np.ones(3)), jn.moments(x, 0), momentum=0.9, unbiased=unbiased
    )
    exact = x.astype(np.float64)
    np.testing.assert_allclose(found.mean, 0.1 * exact.mean(0), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found.var, 0.9 + 0.1 * exact.var(0, ddof=int(unbiased)), rtol=3e-7)


def test_ema_at_the_ends_of_its_range_is_exact(rng):
    batch = jn.moments(rng.standard_normal((5, 3)).astype(np.float32) * 1e3 + 0.1, 0)
    old = running(np.full(3, 12345.678), np.full(3, 0.1))
    for momentum, expected in ((0.0, batch), (1.0, old), (0, batch), (1, old)):
        found = jn.ema(old, batch, momentum=momentum)
        np.testing.assert_array_equal(found.mean, np.ravel(expected.mean))
        np.testing.assert_array_equal(found.var, np.ravel(expected.var))
    traced = jax.jit(lambda m: jn.ema(old, batch, momentum=m))(jnp.float32(0.9))
    np.testing.assert_allclose(traced.mean, jn.ema(old, batch, momentum=0.9).mean, rtol=1e-6)


@pytest.mark.parametrize("start", [0.0, 1e6])
def test_ema_does_not_drift(start, rng):
    """10,000 steps at mean 1e6: within 1e-6 of the average in float64, where float32 alone would
    stop 3e-6 short.
    """
    batches = (rng.standard_normal((10_000, 8, 4)) + 1e6).astype(np.float32)
    state = running(np.full(4, start), np.ones(4))
    found = jax.lax.scan(lambda s, x: (jn.ema(s, jn.moments(x, 0)), None), state, batches)[0]
    truth = np.full(4, start)
    for mean in batches.astype(np.float64).mean(1):
        truth = 0.99 * truth + 0.01 * mean
    np.testing.assert_allclose(found.mean, truth, rtol=1e-6)
    constant = jn.Moments(jnp.float32(8), jnp.full((4,), 1e6), jnp.ones(4))
    still = jax.lax.scan(lambda s, _: (jn.ema(s, constant), None), state, length=10_000)[0]
    np.testing.assert_array_equal(still.mean, np.full(4, 1e6, np.float32))


BAD = [
    jn.Moments(jnp.zeros(2), jnp.ones(2), jnp.ones(2)),
    jn.Moments(jnp.ones(2), jnp.full(2, jnp.nan), jnp.ones(2)),
    jn.Moments(jnp.ones(2), jnp.ones(2), jnp.full(2, jnp.inf)),
]


@pytest.mark.parametrize("batch", BAD, ids=["empty", "nan", "inf"])
def test_ema_of_an_empty_or_broken_batch_leaves_the_state(batch):
    old = running([1.0, 2.0], [3.0, 4.0])
    for found in (
        jn.ema(old, batch),
        jn.ema(old, batch, unbiased=True),
        jn.ema(old, batch, momentum=0.0),
    ):
        for after, before in zip(jax.tree.leaves(found), jax.tree.leaves(old), strict=True):
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(("old", "new"), [(-3e38, 3e38), (3e38, -3e38), (3e38, 3e38), (0.0, 3e38)])
def test_ema_of_what_is_finite_is_finite(old, new):
    for momentum in (0.0, 0.25, 0.75, 1.0):
        state, step = jax.value_and_grad(
            lambda new, m=momentum: jn.ema(running(old, 1.0), running(new, 1.0), momentum=m).mean
        )(new)
        np.testing.assert_allclose(
            state, momentum * old + (1 - momentum) * new, rtol=3e-7, atol=1e32
        )
        np.testing.assert_allclose(step, 1 - momentum)


def test_ema_with_one_count_and_a_channel_that_is_broken():
    old, batch = running([1.0, 2.0], [3.0, 4.0], 8.0), running([jnp.nan, 4.0], [3.0, 8.0], 4.0)
    found = jn.ema(old, batch, momentum=0.5)
    np.testing.assert_array_equal(found.mean, [1.0, 3.0])
    np.testing.assert_array_equal(found.var, [3.0, 6.0])
    np.testing.assert_array_equal(found.count, 6.0)


def test_ema_of_one_count_for_all_whatever_its_rank():
    batch = jn.moments(jnp.array([[1.0, 2.0], [3.0, 6.0]]), 0)
    for shape in ((), (1,), (1, 1)):
        found = jn.ema(
            jn.Moments(jnp.ones(shape), jnp.zeros((1, 2)), jnp.ones((1, 2))), batch, momentum=0.5
        )
        np.testing.assert_array_equal(found.count, np.full(shape, 1.5))
        np.testing.assert_array_equal(found.mean, [[1.0, 2.0]])
    with pytest.raises(
        ValueError, match=r"one number or of the shape of its mean, \(1, 2\): got \(3,\)"
    ):
        jn.ema(jn.Moments(jnp.ones(3), jnp.zeros((1, 2)), jnp.ones((1, 2))), batch)


def test_ema_of_one_element_has_no_unbiased_variance():
    old = running([1.0], [3.0])
    np.testing.assert_array_equal(jn.ema(old, of([[7.0]]), unbiased=True).var, old.var)
    np.testing.assert_allclose(jn.ema(old, of([[7.0]]), momentum=0.5).var, [1.5])


def test_ema_can_be_differentiated(rng):
    x = jnp.asarray(rng.standard_normal((5, 2)), jnp.float32)
    gradient = jax.grad(
        lambda x: jn.ema(
            running([0.0, 0.0], [1.0, 1.0]), jn.moments(x, 0), momentum=0.75
        ).mean.sum()
    )(x)
    np.testing.assert_allclose(gradient, np.full((5, 2), 0.05), rtol=1e-6)


def exact(parts):
    """The number that parts add up to, as a Python integer or fraction."""
    return sum(Fraction(float(np.asarray(part).ravel()[0])) for part in parts)


def count_of(m):
    return exact((m.count, *m.low.count))


def counted(n):
    return jn.Moments(
        jnp.full((1,), n, jnp.asarray(n).dtype if isinstance(n, int) else jnp.float32),
        jnp.zeros(1),
        jnp.zeros(1),
    )


def test_counts_do_not_stall():
    assert count_of(jn.merge(counted(2.0**31), counted(64.0))) == 2**31 + 64
    total, step = counted(2.0**24), jax.jit(jn.merge)
    for _ in range(10):
        total = step(total, counted(1.0))
    assert count_of(total) == 2**24 + 10
    assert count_of(jn.merge(counted(2**24 + 1))) == 2**24 + 1  # of an integer dtype
    assert count_of(jn.merge(counted(2**31 - 1), counted(2**31 - 1))) == 2**32 - 2


def test_counts_are_exact_to_two_to_the_53():
    total, step = counted(1.0), jax.jit(jn.merge)
    for _ in range(53):
        total = step(total, total)
    total = step(step(total, counted(1.0)), counted(1.0))
    assert count_of(total) == 2**53 + 2
    assert float(total.count[0]) == 2.0**53  # reads as a number
    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (1000, 1)), total)
    assert count_of(stacked.merge(0)) == 1000 * (2**53 + 2)


def test_counts_of_wider_dtypes_than_the_mean_are_exact(x64):
    for dtype in (np.int64, np.uint64, np.float64):
        counts = np.array([2**37 + 4097, 2**52 + 2**26 + 1, 3], dtype)
        merged = jn.Moments(
            jnp.asarray(counts), jnp.zeros(3, np.float32), jnp.zeros(3, np.float32)
        ).merge(0)
        assert count_of(merged) == sum(map(int, counts))


def test_a_count_of_booleans_is_one_of_integers():
    one = jn.Moments(jnp.array([True, False]), jnp.array([1.0, 2.0]), jnp.zeros(2))
    merged = one.merge(0)
    assert (float(merged.count[0]), float(merged.mean[0])) == (1, 1)
    np.testing.assert_array_equal(jn.merge(one, one).count, [2, 0])


def test_a_count_of_integers_goes_with_low_parts():
    two, zero = jnp.full(2, 2.0), jnp.zeros(2)
    merged = jn.Moments(jnp.array([5, 5]), zero, zero, jn.Low((two, zero), zero, zero)).merge(0)
    assert count_of(merged) == 14


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_moments_of_half_precision_merge_in_float32(dtype):
    merged = jn.Moments(
        jnp.array([10, 5]), jnp.array([1, 4], dtype), jnp.array([1, 2], dtype)
    ).merge(0)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {np.dtype("float32")}
    assert count_of(merged) == 15
    np.testing.assert_allclose([merged.mean[0], merged.var[0]], [2, 4 / 3 + 2], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_explicitly_sharded_moments_merge(dtype):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        count, mean = (
            jax.device_put(a, P("d")) for a in (jnp.full((8, 4), 3, dtype), jnp.ones((8, 4)))
        )
        for merged in (
            jn.Moments(count, mean, mean).merge(0),
            jax.jit(lambda m: m.merge(0))(jn.Moments(count, mean, mean)),
        ):
            np.testing.assert_array_equal(
                [merged.count, merged.mean, merged.var],
                np.broadcast_to([[[24.0]], [[1]], [[1]]], (3, 1, 4)),
            )


def test_weights_that_are_no_integers_do_not_stall():
    total = jax.lax.fori_loop(0, 1000, lambda _, m: jn.merge(m, counted(0.25)), counted(2.0**25))
    assert count_of(total) == 2**25 + 250


@pytest.mark.slow
def test_counts_of_masks_and_devices_are_exact():
    x, whole = jnp.zeros((1, 1), jnp.bfloat16), 1 << 13
    counted_by_shape = jax.eval_shape(
        lambda x: jn.moments(jnp.broadcast_to(x, (whole, whole + 1)), (0, 1)), x
    )
    assert counted_by_shape.count.shape == (1, 1)
    found = jax.jit(lambda x: jn.moments(jnp.broadcast_to(x, (whole, whole + 1)), (0, 1)))(x)
    assert count_of(found) == whole * (whole + 1)
    masked = jax.vmap(lambda x, m: jn.moments(x, 0, where=m, axis_name="i"), axis_name="i")
    rows, mask = jnp.zeros((4, 5)), jnp.arange(20).reshape(4, 5) < 13
    assert count_of(masked(rows, mask)) == 13
    assert count_of(jn.merge(counted(2**24 + 1), counted(1.0))) == 2**24 + 2
    few = (jnp.arange(2**24 + 1) < 5)[:, None]
    assert (
        count_of(
            jax.jit(jn.switchable_norm)(
                jnp.zeros((1, 2**24 + 1, 1)), jnp.zeros(3), jnp.zeros(3), where=few
            )[1]
        )
        == 5
    )
    parts = jn.Moments(
        jnp.full((4, 1), 2.0**24),
        jnp.zeros((4, 1)),
        jnp.zeros((4, 1)),
        jn.Low((jnp.ones((4, 1)),) * 2, *jnp.zeros((2, 4, 1))),
    )
    synced = jax.vmap(lambda m: m.merge(0, axis_name="i"), axis_name="i")(parts)
    assert count_of(synced) == 4 * (2**24 + 2)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_merging_in_turn_loses_nothing(offset, rng):
    x = (rng.standard_normal((4096, 16)) + offset).astype(np.float32)
    parts = jax.vmap(lambda row: jn.moments(row, 0))(x)
    empty = jn.Moments(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1))
    found = jax.jit(
        lambda parts: jax.lax.scan(lambda total, part: (jn.merge(total, part), None), empty, parts)[
            0
        ]
    )(parts)
    truth = x.astype(np.float64)
    assert count_of(found) == x.size
    # of the deviation, which is 1
    assert abs(float(exact((found.mean, found.low.mean))) - truth.mean()) < 2e-7
    assert abs(float(exact((found.var, found.low.var))) / truth.var() - 1) < 2e-7


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_normalizing_by_moments_is_as_accurate_as_standardizing(offset, rng):
    x = (rng.standard_normal(4096) + offset).astype(np.float32)
    deviation = x.astype(np.float64) - x.mean(dtype=np.float64)
    found = jn.normalize(x, jn.moments(x, 0), epsilon=0.0)
    np.testing.assert_allclose(
        found,
        deviation / np.sqrt((deviation**2).mean()),
        rtol=0,
        atol=4e-7 * np.abs(deviation).max(),
    )


def test_moments_may_hold_what_stands_for_their_leaves():
    """Axes of vmap, shapes, shardings."""
    x = jnp.arange(12.0).reshape(3, 4)
    rows = jax.vmap(lambda row: jn.moments(row, 0))(x)
    again = jax.vmap(lambda m: jn.merge(m, m), in_axes=(jn.Moments(0, 0, 0),))(rows)
    assert again.count[:, 0].tolist() == [8.0] * 3
    spec = jax.sharding.PartitionSpec()
    assert jn.Moments(spec, spec, spec).low == jn.Low((spec, spec), spec, spec)


def test_running_statistics_are_one_word_each(rng):
    """Their leaves, and so their checkpoints, hold what is blended and zeros."""
    old = running(np.zeros(3), np.ones(3))
    new = jn.ema(old, jn.moments(rng.standard_normal((5, 3)).astype(np.float32) + 1e6, 0))
    assert jax.tree.structure(new) == jax.tree.structure(old)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(new.low))


def test_complex_moments_of_the_full_range():
    """Powers of two are put back in the dtype of the mean, without promotion."""
    x = jnp.array([[1 + 2j], [3 - 1j]], jnp.complex64)
    for scale in (1.0, 2.0**100, 2.0**-100):
        _, found = jn.batch_norm(x * np.complex64(scale), full_range=True)
        np.testing.assert_allclose(found.mean / np.complex64(scale), [[2 + 0.5j]], rtol=1e-7)
    np.testing.assert_allclose(jn.batch_norm(x, full_range=True)[1].var, [[3.25]], rtol=1e-7)
