"""Test statistics of a stream and of returns.

They equal the statistics of everything seen, in float64 NumPy, whatever the batches.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from jaxnorm import online
from jaxnorm.online import returns

SPECS = {
    "position": jax.ShapeDtypeStruct((3,), jnp.float32),
    "image": jax.ShapeDtypeStruct((2, 2), jnp.float32),
    "speed": 0.0,
}


def draw(rng, *lead, offset=1e3):
    return {
        "position": jnp.asarray(rng.standard_normal((*lead, 3)) + offset, jnp.float32),
        "image": jnp.asarray(rng.standard_normal((*lead, 2, 2)) * 5, jnp.float32),
        "speed": jnp.asarray(rng.standard_normal(lead) - 7, jnp.float32),
    }


def truth(values, weights=None):
    """Count, mean and variance over the first axis, in float64."""
    values = np.asarray(values).astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    share = (weights / weights.sum()).reshape(-1, *(1,) * (values.ndim - 1))
    mean = (share * values).sum(0)
    return weights.sum(), mean, (share * np.abs(values - mean) ** 2).sum(0)


def assert_is(moments, values, weights=None, rtol=3e-7):
    count, mean, var = truth(values, weights)
    np.testing.assert_allclose(moments.count, np.full(mean.shape, count), rtol=rtol)
    np.testing.assert_allclose(moments.mean, mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(moments.var, var, rtol=3 * rtol)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 24), max_size=4), st.integers(0, 9))
def test_however_a_stream_is_cut(cuts, seed):
    data = draw(np.random.default_rng(seed), 24)
    state = online.init(SPECS)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 24], strict=True):
        state = online.update(state, jax.tree.map(lambda leaf: leaf[start:end], data))  # noqa: B023
    for name, leaf in data.items():
        assert_is(state[name], leaf)


@pytest.mark.parametrize(
    "lead",
    [(), (2, 3), *(pytest.param(lead, marks=pytest.mark.slow) for lead in ((1,), (4,), (2, 3, 2)))],
    ids=str,
)
def test_any_batch_axes(lead, rng):
    data = draw(rng, *lead)
    state = online.update(online.init(SPECS), data)
    for name, leaf in data.items():
        assert (
            state[name].mean.shape == jnp.shape(SPECS[name])
            if name == "speed"
            else SPECS[name].shape
        )
        assert_is(state[name], np.reshape(leaf, (-1, *state[name].mean.shape)))


@pytest.mark.slow
def test_a_hundred_thousand_updates_lose_nothing(rng, usual_compile_of_class):
    """Mean 1e3, 25.6 million elements, which float32 cannot count: the mean to its last bit, where
    a plain sum is off by 1e-3.
    """
    table = jnp.asarray(rng.standard_normal((4096, 256)) * 3 + 1e3, jnp.float32)
    steps = 100_000

    @jax.jit
    def follow(state):
        return jax.lax.scan(
            lambda state, i: (online.update(state, table[i % 4096]), None), state, jnp.arange(steps)
        )[0]

    found = follow(online.init(0.0))
    exact, times = np.asarray(table, np.float64), np.bincount(np.arange(steps) % 4096)
    mean = (exact.mean(1) * times).sum() / steps
    var = (((exact - mean) ** 2).mean(1) * times).sum() / steps
    assert float(found.count) + sum(map(float, found.low.count)) == steps * 256
    np.testing.assert_allclose(found.mean, mean, rtol=6e-8)
    np.testing.assert_allclose(float(found.mean) + float(found.low.mean), mean, rtol=2e-11)
    np.testing.assert_allclose(found.var, var, rtol=3e-7)


def test_single_elements_are_counted_beyond_2_to_the_24():
    """Each update adds one to a count that float32 cannot increase by one."""
    start = online.init(0.0)
    full = jn.Moments(jnp.float32(2**24), jnp.float32(5), jnp.float32(1), start.low)
    found = jax.lax.scan(
        lambda state, _: (online.update(state, jnp.float32(5)), None), full, length=7
    )[0]
    assert int(found.count) + sum(map(int, found.low.count)) == 2**24 + 7


def test_float_weights_are_how_much_an_element_counts(rng):
    data, weights = (
        draw(rng, 5, 4),
        rng.random((5, 4)).astype(np.float32) * (rng.random((5, 4)) < 0.7),
    )
    data["position"] = jnp.where(weights[..., None] > 0, data["position"], jnp.nan)
    state = online.update(online.init(SPECS), data, weights=weights)
    state = online.update(state, draw(rng, 5, 4), weights=np.zeros((5, 4), np.float32))
    for name, leaf in data.items():
        flat = np.where(np.isnan(leaf), 0, leaf).reshape(20, *state[name].mean.shape)
        assert_is(state[name], flat, weights.ravel())
    of_rows = online.update(
        online.init(SPECS), draw(rng, 5, 4), weights=np.array([1, 0, 0, 1, 1], bool)
    )
    assert of_rows["speed"].count == 12


def test_a_batch_that_is_not_finite_leaves_the_state_as_it_was(rng):
    before = online.update(online.init(SPECS), draw(rng, 6))
    bad = draw(rng, 6)
    bad["position"] = bad["position"].at[2, 1].set(jnp.nan)
    after = online.update(before, bad)
    assert after["position"].count.tolist() == [12, 6, 12]
    assert after["position"].mean[1] == before["position"].mean[1]
    assert after["speed"].count == 12


def test_complex_and_half_precision(rng):
    specs = [jax.ShapeDtypeStruct((2,), jnp.complex64), jax.ShapeDtypeStruct((2,), jnp.bfloat16)]
    data = [
        jnp.asarray(rng.standard_normal((9, 2)) + 1j * rng.standard_normal((9, 2)), jnp.complex64),
        jnp.asarray(rng.standard_normal((9, 2)), jnp.bfloat16),
    ]
    state = online.update(online.init(specs), data)
    assert_is(state[0], data[0])
    assert_is(state[1], data[1].astype(jnp.float32))
    assert state[1].mean.dtype == jnp.float32
    assert [y.dtype for y in online.normalize(data, state)] == [jnp.complex64, jnp.bfloat16]


MESH = Mesh(np.array(HOST), ("data",))


def spread(state, batch, weights):
    def update(state, batch, weights):
        return online.update(state, batch, weights=weights, axis_name="data")

    return jax.shard_map(update, mesh=MESH, in_specs=(P(), P("data"), P("data")), out_specs=P())(
        state, batch, weights
    )


@pytest.mark.slow
def test_several_devices_take_one_collective(rng, x64):
    """Of leaves of several dtypes; each device has another number of elements, one has none and one
    has NaN.
    """
    specs = {
        **SPECS,
        "wide": jax.ShapeDtypeStruct((2,), jnp.float64),
        "wave": jax.ShapeDtypeStruct((2,), jnp.complex64),
    }
    batch = {
        **draw(rng, 16, 5),
        "wide": rng.standard_normal((16, 5, 2)) + 1e6,
        "wave": rng.standard_normal((16, 5, 2)).astype(np.complex64),
    }
    weights = np.arange(80).reshape(16, 5) % 7 < np.arange(16)[:, None] // 2
    batch["position"] = jnp.where(weights[..., None], batch["position"], jnp.nan)
    start = online.update(
        online.init(specs),
        jax.tree.map(lambda leaf: leaf[:3], {**batch, "position": jnp.ones((3, 5, 3))}),
    )
    program = jax.jit(spread).lower(start, batch, weights).compile().as_text()
    assert len(re.findall(r" (?:all-|collective-|reduce-scatter)[\w-]*\(", program)) == 1
    found, whole = (
        jax.jit(spread)(start, batch, weights),
        online.update(start, batch, weights=weights),
    )
    for name, one in found.items():
        # in x64 0.0 is a float64
        other, rtol = whole[name], 1e-14 if name in ("wide", "speed") else 3e-7
        np.testing.assert_array_equal(one.count, other.count)
        np.testing.assert_allclose(one.mean, other.mean, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(one.var, other.var, rtol=3 * rtol, atol=rtol)


@pytest.mark.slow
def test_under_vmap(rng):
    """A state for each of several agents; and one state of all of them, over a named axis."""
    data = draw(rng, 4, 6)
    apart = jax.vmap(online.update)(
        jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), online.init(SPECS)), data
    )
    together = jax.vmap(
        lambda state, x: online.update(state, x, axis_name="i"), (None, 0), axis_name="i"
    )(online.init(SPECS), data)
    for name, leaf in data.items():
        for i in range(4):
            assert_is(jax.tree.map(lambda a: a[i], apart[name]), leaf[i])  # noqa: B023
            assert_is(
                jax.tree.map(lambda a: a[i], together[name]),  # noqa: B023
                np.reshape(leaf, (24, *leaf.shape[2:])),
            )


def test_normalize_and_back(rng):
    state = online.init(SPECS)
    data = draw(rng, 50, offset=1e5)
    for same, leaf in zip(
        jax.tree.leaves(online.normalize(data, state)), jax.tree.leaves(data), strict=True
    ):
        np.testing.assert_allclose(same, leaf, rtol=1e-6)
    state = online.update(state, data)
    y = online.normalize(data, state, epsilon=0.01)
    for name, leaf in data.items():
        exact = np.asarray(leaf, np.float64)
        np.testing.assert_allclose(
            y[name], (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 0.01), atol=1e-6
        )
    back = online.denormalize(y, state, epsilon=0.01)
    for same, leaf in zip(jax.tree.leaves(back), jax.tree.leaves(data), strict=True):
        np.testing.assert_allclose(same, leaf, rtol=2e-7, atol=2e-6)
    clipped = online.normalize(data, state, clip=0.5)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(clipped)) == 0.5


def test_of_complex_numbers_the_absolute_value_is_clipped(rng):
    x = (rng.standard_normal((50, 3)) + 1j * rng.standard_normal((50, 3))).astype(np.complex64)
    x[0] = x.mean(0)  # nearly 0
    state = online.update(online.init(jax.ShapeDtypeStruct((3,), np.complex64)), x)
    whole, clipped = (np.asarray(online.normalize(x, state, clip=clip)) for clip in (None, 0.5))
    size = np.abs(whole)
    np.testing.assert_allclose(
        clipped, np.where(size > 0.5, whole / np.maximum(size, 1e-6) / 2, whole), atol=1e-6
    )


def test_clipping_complex_numbers_has_gradients_at_0_and_an_end_beyond_the_range():
    state = online.update(online.init(jnp.zeros((), jnp.complex64)), jnp.array([1 + 0j, 3 + 0j]))
    of = lambda z, clip: jax.grad(lambda z: online.normalize(z, state, clip=clip).real.sum())(z)
    at = jnp.array([2 + 0j, 2.5 + 0j])
    np.testing.assert_array_equal(of(at, 5.0), of(at, None))
    np.testing.assert_allclose(
        online.normalize(jnp.array([3e38 + 3e38j]), state, clip=5.0),
        [(5 + 5j) / np.sqrt(2)],
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda s: online.init({"a": jnp.zeros(3, jnp.uint8)}),
            TypeError,
            r"specs\['a'\] must be floating point: got uint8",
        ),
        (lambda s: online.update(3, s), TypeError, "every leaf of state must be Moments: got int."),
        (
            lambda s: online.update(s, {"b": jnp.zeros(3)}),
            ValueError,
            "batch must have the structure of the state",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((3, 2))}),
            ValueError,
            r"batch\['a'\] must end in the shape of one element, \(3,\)",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros(3, complex)}),
            TypeError,
            r"batch\['a'\] must be real, as in the specs",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((5, 3), int)}),
            TypeError,
            r"batch\['a'\] must be floating point",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((5, 3))}, weights=jnp.ones(4)),
            ValueError,
            r"first batch axes, \(5,\): got \(4,\)",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((5, 3))}, weights=jnp.ones((5, 3))),
            ValueError,
            "first batch axes",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((5, 3))}, weights=-jnp.ones(5)),
            ValueError,
            r"^weights, for x of shape \(5, 3\), must be finite and >= 0",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((5, 3))}, weights=jnp.ones(5, int)),
            TypeError,
            "^weights must be boolean or float",
        ),
        (
            lambda s: online.normalize({"a": jnp.zeros((5, 3))}, s, clip=-1),
            ValueError,
            "clip must be finite and >= 0",
        ),
        (
            lambda s: online.normalize({"a": jnp.zeros((5, 6))}, s),
            ValueError,
            "must end in the shape",
        ),
        (lambda s: online.debiased(1.5, 1), ValueError, "momentum must lie in"),
        (
            lambda s: online.debiased(0.9, "first"),
            TypeError,
            "step must be an array of numbers: got str",
        ),
        (
            lambda s: online.debiased(0.9, 0),
            ValueError,
            r"^step must be at least 1, that of the first batch: found 0\.$",
        ),
        (
            lambda s: online.init((3,)),
            TypeError,
            r"For a shape pass jax.ShapeDtypeStruct\(shape, jnp.float32\)\.",
        ),
        (
            lambda s: online.update(s, {"a": jnp.zeros((5, 3))}, axis_name="i"),
            NameError,
            "^axis_name must be bound .* got the unbound 'i'",
        ),
        (
            lambda s: returns.update(returns.init(jnp.zeros(2)), jnp.zeros(3), jnp.zeros(3, bool)),
            ValueError,
            "shape of one step",
        ),
        (
            lambda s: returns.update(returns.init(jnp.zeros(2)), jnp.zeros(2), jnp.zeros(2)),
            TypeError,
            r"done must be booleans: got float32\. Cast it, \.astype\(bool\)\.",
        ),
        (
            lambda s: returns.update(
                returns.init(jnp.zeros(3)), jnp.zeros((7, 3)), jnp.zeros(3, bool)
            ),
            ValueError,
            r"done must have the shape of the rewards, \(7, 3\): got \(3,\)\.",
        ),
        (
            lambda s: returns.update(returns.init(0.0), 0.0, True, gamma=2),
            ValueError,
            "gamma must lie in",
        ),
    ],
)
def test_errors_name_the_leaf(call, error, message):
    with pytest.raises(error, match=message):
        call(online.init({"a": jnp.zeros(3)}))


def follow(rewards, done, gamma):
    """All discounted returns, and the last ones, step by step in float64."""
    current, seen = np.zeros(rewards.shape[1:]), []
    for reward, ended in zip(np.asarray(rewards, np.float64), done, strict=True):
        current = gamma * current + reward
        seen.append(current)
        current = np.where(ended, 0, current)
    return current, np.array(seen)


@pytest.mark.parametrize(
    "cut", [7, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (1, 19))]
)
def test_returns_are_those_of_a_loop(cut, rng):
    rewards, done = rng.standard_normal((20, 4)).astype(np.float32) + 5, rng.random((20, 4)) < 0.2
    state = returns.init(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert returns.normalize(rewards, state)[0, 0] == pytest.approx(rewards[0, 0], rel=1e-6)
    state = returns.update(state, rewards[:cut], done[:cut], gamma=0.9)
    for reward, ended in zip(rewards[cut:], done[cut:], strict=True):
        state = returns.update(state, reward, ended, gamma=0.9)
    current, seen = follow(rewards, done, 0.9)
    np.testing.assert_allclose(state.current, current, rtol=1e-6)
    assert_is(state.moments, seen.reshape(-1), rtol=2e-6)
    np.testing.assert_allclose(
        returns.normalize(rewards, state, epsilon=0.0), rewards / seen.std(), rtol=3e-6
    )
    assert float(jnp.abs(returns.normalize(rewards, state, clip=0.1)).max()) == pytest.approx(0.1)


def test_returns_of_several_devices_and_of_nan(rng):
    rewards, done = rng.standard_normal((6, 16)).astype(np.float32), rng.random((6, 16)) < 0.2

    def update(state, rewards, done):
        return returns.update(state, rewards, done, axis_name="data")

    specs = (returns.Returns(P("data"), P()), P(None, "data"), P(None, "data"))
    found = jax.jit(jax.shard_map(update, mesh=MESH, in_specs=specs, out_specs=specs[0]))(
        returns.init(jnp.zeros(16)), rewards, done
    )
    assert_is(found.moments, follow(rewards, done, 0.99)[1].reshape(-1), rtol=2e-6)
    broken = returns.update(found, np.full(16, np.nan, np.float32), np.zeros(16, bool))
    assert broken.current.tolist() == [0.0] * 16
    assert broken.moments.count == found.moments.count == 96


@pytest.mark.parametrize("kind", [bool, np.float32])
def test_steps_that_are_no_transitions_count_for_nothing(kind):
    """Gymnasium's vector environments give one after each episode; with gamma 0.5 the returns are
    1, 2.5, 3, 8 and 5, 3.5.
    """
    rewards = np.array([[1, 5], [2, 1], [100, np.nan], [3, 7], [6.5, 0]], np.float32)
    done = np.array([[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]], bool)
    weights = np.array([[1, 1], [1, 1], [0, 0], [1, 0], [1, 0]], kind)
    for cut in (0, 2, 3):
        state = returns.init(jnp.zeros(2))
        for part in (slice(0, cut), slice(cut, 5)):
            state = returns.update(
                state, rewards[part], done[part], weights=weights[part], gamma=0.5
            )
        assert state.current.tolist() == [8.0, 0.0]
        assert_is(state.moments, np.array([1, 2.5, 3, 8, 5, 3.5]))
    halves = returns.update(
        returns.init(jnp.zeros(2)),
        rewards[:2],
        done[:2],
        weights=np.float32([[0.5, 1], [1, 0]]),
        gamma=0.5,
    )
    assert float(halves.moments.count) == 2.5
    assert float(halves.moments.mean) == pytest.approx((0.5 * 1 + 5 + 2.5) / 2.5, rel=1e-7)
    for wrong, error in (
        (np.ones(2, bool), ValueError),
        (np.ones((5, 2), int), TypeError),
        (-weights.astype(np.float32), ValueError),
    ):
        with pytest.raises(error, match="weights"):
            returns.update(returns.init(jnp.zeros(2)), rewards, done, weights=wrong)


def test_nan_of_one_environment_leaves_out_no_other(rng):
    """59 of 60 returns count, and the broken environment starts again at 0."""
    rewards, done = rng.standard_normal((15, 4)).astype(np.float32), np.zeros((15, 4), bool)
    broken = rewards.copy()
    broken[7, 2] = np.nan
    state = returns.update(returns.init(jnp.zeros(4)), broken, done)
    ended = done.copy()
    ended[7, 2] = True
    current, seen = follow(np.where(np.isnan(broken), 0, broken), ended, 0.99)
    assert state.moments.count == 59
    assert_is(state.moments, np.delete(seen.reshape(-1), 7 * 4 + 2), rtol=2e-6)
    np.testing.assert_allclose(state.current, current, rtol=1e-6)


def test_groups_of_devices_of_unequal_sizes(rng):
    """Each has the statistics of its own rows."""
    x, groups = rng.standard_normal((8, 6, 3)).astype(np.float32), [[0, 3, 5], [1, 2], [4], [6, 7]]
    update = lambda x: online.update(
        online.init(jnp.zeros(3)), x, axis_name=jn.AxisGroups("data", groups)
    )
    found = jax.pmap(update, axis_name="data", devices=HOST)(x)
    for group in groups:
        for device in group:
            assert_is(
                jax.tree.map(lambda leaf, device=device: leaf[device], found),
                x[group].reshape(-1, 3),
            )
    listed = jax.vmap(
        lambda x: online.update(online.init(jnp.zeros(3)), x, axis_name=["data"]), axis_name="data"
    )(x)
    assert_is(jax.tree.map(lambda leaf: leaf[0], listed), x.reshape(-1, 3))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
def test_debiased_averages_are_those_of_adam(momentum, rng):
    parts = rng.standard_normal((12, 8, 3)).astype(np.float32) + 4
    running, biased = jn.Moments(jnp.zeros(()), jnp.zeros(3), jnp.ones(3)), np.zeros((2, 3))
    for step, part in enumerate(parts, 1):
        running = jn.ema(running, jn.moments(part, 0), momentum=online.debiased(momentum, step))
        exact = part.astype(np.float64)
        biased = momentum * biased + (1 - momentum) * np.stack([exact.mean(0), exact.var(0)])
        np.testing.assert_allclose(
            [running.mean, running.var], biased / (1 - momentum**step), rtol=2e-6
        )
    # of loops that count from 0
    assert jax.jit(online.debiased)(momentum, 0) == online.debiased(momentum, 1)
    traced = jax.jit(online.debiased)(jnp.float32(momentum), 3)
    np.testing.assert_allclose(traced, online.debiased(momentum, 3), rtol=1e-6)


def test_with_momentum_one_all_batches_count_alike(rng):
    parts = rng.standard_normal((7, 8, 3)).astype(np.float32)
    running = jn.Moments(jnp.zeros(()), jnp.zeros(3), jnp.ones(3))
    for step, part in enumerate(parts, 1):
        running = jn.ema(running, jn.moments(part, 0), momentum=online.debiased(1.0, step))
    np.testing.assert_allclose(running.mean, parts.mean((0, 1), dtype=np.float64), atol=1e-7)
    np.testing.assert_allclose(running.var, parts.astype(np.float64).var(1).mean(0), rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 4.0])
def test_before_the_first_update_all_stays_as_it_is(epsilon):
    x, state = jnp.array([[2.0, 4.0]]), online.init(jnp.zeros(2))
    np.testing.assert_array_equal(online.normalize(x, state, epsilon=epsilon), x)
    np.testing.assert_array_equal(online.denormalize(x, state, epsilon=epsilon), x)
    np.testing.assert_array_equal(
        online.returns.normalize(x[0], online.returns.init(0.0), epsilon=epsilon), x[0]
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_denormalized_without_promotion(dtype):
    state = online.update(online.init(jnp.zeros(2, dtype)), jnp.array([[1, 2], [3, 6]], dtype))
    with jax.numpy_dtype_promotion("strict"):
        y = online.denormalize(jnp.ones(2, dtype), state)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(jnp.float32), [3, 6])
