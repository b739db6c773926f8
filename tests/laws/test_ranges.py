"""Test minimum, maximum and quantiles of a stream.

They equal those of everything seen, in float64 NumPy, while the sample holds all of it. Afterwards
the ranks of quantiles have the error that the docstring states, in any order of the data.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST
from flax import serialization
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from jaxnorm import online
from jaxnorm.data import Normalizer
from jaxnorm.online import ranges

SPECS = {"position": jax.ShapeDtypeStruct((3,), jnp.float32), "speed": jnp.zeros(())}
RANKS = (0, 0.01, 0.1, 0.25, 0.5, 0.7, 0.99, 1)
MESH = Mesh(np.array(HOST), ("data",))


def draw(rng, *lead):
    return {
        "position": jnp.asarray(rng.standard_normal((*lead, 3)) * 5 + 100, jnp.float32),
        "speed": jnp.asarray(rng.exponential(size=lead), jnp.float32),
    }


def assert_is(state, values, rtol=3e-7):
    """The state is that of all values along the first axis, which its sample holds."""
    values = np.asarray(values, np.float64)
    np.testing.assert_array_equal(state.count, np.full(values.shape[1:], len(values)))
    np.testing.assert_array_equal(state.min, values.min(0))
    np.testing.assert_array_equal(state.max, values.max(0))
    for rank in RANKS:
        np.testing.assert_allclose(
            ranges.quantile(state, rank), np.quantile(values, rank, axis=0), rtol=rtol, atol=1e-7
        )


@jax.jit
def stream(state, batches, keys):
    """The state after batches along the first axis."""
    return jax.lax.scan(
        lambda state, step: (ranges.update(state, *step), None), state, (batches, keys)
    )[0]


def rank_errors(state, values, rank):
    """By how much the rank of a quantile is off, for each feature."""
    found = np.asarray(ranges.quantile(state, rank))
    below, upto = (values < found).mean(0), (values <= found).mean(0)
    return np.clip(rank, below, upto) - rank


@pytest.mark.parametrize(
    "lead",
    [(2,), (4, 6), *(pytest.param(lead, marks=pytest.mark.slow) for lead in ((), (1,), (3, 1, 2)))],
    ids=str,
)
def test_quantiles_of_few_elements_are_those_of_numpy(lead, rng):
    """A sample of 24 holds them all."""
    data = draw(rng, *lead)
    state = ranges.update(ranges.init(SPECS, size=24), data, jax.random.key(0))
    for name, leaf in data.items():
        assert_is(state[name], np.reshape(leaf, (-1, *state[name].min.shape)))


def test_however_a_stream_is_cut_it_is_merged_to_the_same_bits(rng):
    """Of four batches, whose 96 elements are more than the sample; and in any order."""
    data, start = draw(rng, 4, 4, 6), ranges.init(SPECS, size=24)
    keys = jax.random.split(jax.random.key(0), 4)
    cut = lambda at: jax.tree.map(lambda leaf: leaf[at], data)
    whole, alone = start, []
    for at in range(4):
        whole = ranges.update(whole, cut(at), keys[at])
        alone.append(ranges.update(start, cut(at), keys[at]))
    a, b, c, d = alone
    for same in (
        stream(start, data, keys),
        serialization.from_bytes(start, serialization.to_bytes(whole)),
        ranges.merge(a, b, c, d),
        ranges.merge(ranges.merge(d, b), ranges.merge(a, start, c)),
    ):
        jax.tree.map(np.testing.assert_array_equal, same, whole)
    assert whole["speed"].count == 96
    assert set(whole["speed"].values.tolist()) < set(np.ravel(data["speed"]).tolist())
    assert len(set(whole["position"].values[0].tolist())) == 24


ORDERS = {
    "sorted": np.sort,
    "reversed": lambda x: np.sort(x)[::-1],
    "blocks": lambda x: np.concatenate([np.sort(x)[1::2], np.sort(x)[::2]]),
    "drifting": lambda x: x + np.linspace(0, 5, x.size, dtype=np.float32),
}


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_are_off_by_the_standard_error_in_any_order(order, rng):
    """400 features with the same stream, each with its own sample: mean 0 within 4 standard errors,
    and the deviation that of the docstring within 4 of its own, 1 / sqrt(2 * 400).
    """
    size, number, features = 64, 6000, 400
    values = ORDERS[order](rng.standard_normal(number).astype(np.float32))
    x = jnp.broadcast_to(values.reshape(6, -1, 1), (6, number // 6, features))
    state = stream(
        ranges.init(jnp.zeros(features), size=size), x, jax.random.split(jax.random.key(1), 6)
    )
    assert state.count.tolist() == [number] * features
    assert float(ranges.quantile(state, 0)[0]) == values.min()
    assert float(ranges.quantile(state, 1)[0]) == values.max()
    for rank in (0.05, 0.5, 0.9):
        errors = rank_errors(state, values[:, None], rank)
        expected = math.sqrt(rank * (1 - rank) / size)
        assert abs(errors.mean()) < 4 * expected / math.sqrt(features)
        assert errors.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * features))


@pytest.mark.slow
def test_every_element_is_in_the_sample_with_the_same_probability():
    """3000 features, 12 elements in batches of 5, 1 and 6, a sample of 4: each is in a third."""
    x = jnp.broadcast_to(jnp.arange(12.0)[:, None], (12, 3000))
    state = ranges.init(jnp.zeros(3000), size=4)
    for number, part in enumerate(jnp.split(x, [5, 6])):
        state = ranges.update(state, part, jax.random.key(number))
    held = np.bincount(np.asarray(state.values, int).ravel(), minlength=12)
    assert held.sum() == 12000
    deviation = math.sqrt(3000 * (1 / 3) * (2 / 3))
    np.testing.assert_allclose(held, 1000, atol=4 * deviation)


def test_the_default_has_the_errors_of_its_docstring(rng):
    """1.6 % at the median and 0.3 % at 0.01, of 100,000 elements: within 3.5 of these."""
    x = rng.lognormal(size=(100_000, 8)).astype(np.float32)
    state = ranges.update(ranges.init(jnp.zeros(8)), x, jax.random.key(0))
    for rank, error in ((0.5, 0.016), (0.01, 0.0031)):
        assert np.abs(rank_errors(state, x, rank)).max() < 3.5 * error
    y = ranges.normalize(x, state)
    assert np.abs((np.abs(y) <= 1).mean(0) - 0.98).max() < 3.5 * 0.0031 * math.sqrt(2)
    fitted = Normalizer.fit([x], quantiles=(0.01, 0.99))
    np.testing.assert_allclose(
        np.median(np.asarray(y), 0), np.median(fitted.normalize(x, mode="quantile"), 0), atol=0.15
    )


def test_quantiles_beyond_the_sample_end_at_the_extremes():
    """Of a sample of 1 all quantiles are still in order, from the minimum to the maximum."""
    state = ranges.update(ranges.init(0.0, size=1), jnp.arange(7.0), jax.random.key(2))
    found = [float(ranges.quantile(state, rank)) for rank in np.linspace(0, 1, 41)]
    assert (found[0], found[-1]) == (0.0, 6.0)
    assert found == sorted(found)
    assert float(state.values[0]) in found


@pytest.mark.parametrize("kind", [bool, np.float32])
def test_masked_elements_count_for_nothing(kind, rng):
    data, weights = draw(rng, 4, 6), (rng.random((4, 6)) < 0.5).astype(kind)
    kept = weights.astype(bool)
    hidden = jax.tree.map(
        lambda leaf: np.where(kept.reshape(4, 6, *(1,) * (leaf.ndim - 2)), leaf, np.nan), data
    )
    state = ranges.update(ranges.init(SPECS, size=24), hidden, jax.random.key(0), weights=weights)
    state = ranges.update(state, hidden, jax.random.key(1), weights=weights * kind(0))
    for name, leaf in data.items():
        assert_is(state[name], np.asarray(leaf)[kept])
    rows = ranges.update(
        ranges.init(SPECS, size=24), data, jax.random.key(0), weights=np.array([1, 0, 0, 1], kind)
    )
    assert rows["speed"].count == 12


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_batch_that_is_not_finite_leaves_the_feature_as_it_was(wrong, rng):
    before = ranges.update(ranges.init(SPECS, size=24), draw(rng, 4, 6), jax.random.key(0))
    bad = draw(rng, 4, 6)
    after = ranges.update(
        before, {**bad, "position": bad["position"].at[2, 3, 1].set(wrong)}, jax.random.key(1)
    )
    whole = ranges.update(before, bad, jax.random.key(1))
    kept = jax.tree.map(lambda leaf: leaf[1], before["position"])
    jax.tree.map(
        lambda *leaves: np.testing.assert_array_equal(leaves[0][1], leaves[1]),
        after["position"],
        kept,
    )
    assert after["position"].count.tolist() == [48, 24, 48]
    jax.tree.map(np.testing.assert_array_equal, after["speed"], whole["speed"])
    for leaf, same in zip(after["position"], whole["position"], strict=True):
        np.testing.assert_array_equal(leaf[0], same[0])


def spread(state, batch, key, weights, axis_name="data"):
    def update(state, batch, key, weights):
        return ranges.update(state, batch, key, weights=weights, axis_name=axis_name)

    return jax.shard_map(
        update, mesh=MESH, in_specs=(P(), P("data"), P(), P("data")), out_specs=P()
    )(state, batch, key, weights)


def test_several_devices_take_one_collective(rng):
    """Each has another number of elements, and one has none. All elements fit into the sample."""
    batch, key = draw(rng, 16, 5), jax.random.key(3)
    weights = np.arange(80).reshape(16, 5) % 7 < np.arange(16)[:, None] // 2
    batch["position"] = jnp.where(weights[..., None], batch["position"], jnp.nan)
    start = ranges.init(SPECS, size=80)
    program = jax.jit(spread).lower(start, batch, key, weights).compile()
    collectives = re.findall(r" (?:all-|collective-|reduce-scatter)[\w-]*\(", program.as_text())
    assert len(collectives) == 1
    found = program(start, batch, key, weights)
    for name, leaf in batch.items():
        assert_is(found[name], np.asarray(leaf)[weights])
        keys = np.asarray(found[name].keys).ravel()
        keys = keys[keys != keys.max()]
        assert len(set(keys.tolist())) == keys.size  # no two devices draw the same


@pytest.mark.slow
def test_samples_of_several_devices_are_fair():
    """Each device has its own number, 12 times; a quarter of all elements is in the sample. A NaN
    on one of them leaves the feature alone everywhere.
    """
    x = jnp.broadcast_to(jnp.arange(8.0).repeat(12)[:, None], (96, 1000))
    start, ones = ranges.init(jnp.zeros(1000), size=24), np.ones(96, bool)
    found = jax.jit(spread)(start, x, jax.random.key(0), ones)
    assert found.count.tolist() == [96] * 1000
    held = np.bincount(np.asarray(found.values, int).ravel(), minlength=8)
    # 24 draws of 96 without replacement
    deviation = math.sqrt(1000 * 24 * (1 / 8) * (7 / 8) * (72 / 95))
    np.testing.assert_allclose(held, 3000, atol=4 * deviation)
    after = jax.jit(spread)(found, x.at[50, 7].set(jnp.nan), jax.random.key(1), ones)
    assert after.count[6:9].tolist() == [192, 96, 192]
    np.testing.assert_array_equal(after.values[7], found.values[7])


@pytest.mark.slow
def test_groups_of_devices_and_named_axes_of_vmap(rng):
    """Each device has the ranges of its own group, bit for bit like the others in it."""
    x, groups = rng.standard_normal((8, 6, 3)).astype(np.float32) + 9, [[0, 3, 5], [1, 2, 4, 6, 7]]
    update = lambda x, name: ranges.update(
        ranges.init(jnp.zeros(3), size=64), x, jax.random.key(0), axis_name=name
    )
    found = jax.pmap(
        partial(update, name=jn.AxisGroups("data", groups)), axis_name="data", devices=HOST
    )(x)
    for group in groups:
        for device in group:
            one = jax.tree.map(lambda leaf, device=device: np.asarray(leaf[device]), found)
            assert_is(one, x[group].reshape(-1, 3))
    named = jax.vmap(partial(update, name=["data"]), axis_name="data")(x)
    for leaf in jax.tree.leaves(named):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    assert_is(jax.tree.map(lambda leaf: leaf[0], named), x.reshape(-1, 3))


@pytest.mark.slow
def test_agents_under_vmap_have_a_state_each(rng):
    data = draw(rng, 4, 6)
    states = jax.vmap(ranges.update)(
        jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), ranges.init(SPECS, size=8)),
        data,
        jax.random.split(jax.random.key(0), 4),
    )
    y = jax.vmap(partial(ranges.normalize, mode="min_max"))(data, states)
    for agent in range(4):
        for name, leaf in data.items():
            one = jax.tree.map(lambda a, agent=agent: a[agent], states[name])
            assert_is(one, leaf[agent])
            ends = [float(y[name][agent].min()), float(y[name][agent].max())]
            np.testing.assert_allclose(ends, [-1, 1], rtol=3e-7)


def test_a_state_keeps_its_sharding_whatever_the_batch_has(rng):
    """In explicit sharding, over features and not at all."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = rng.standard_normal((16, 8)).astype(np.float32)
    with (jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh)(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        for spec in (P(), P("data")):
            start = jax.tree.map(
                lambda leaf, spec=spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
                ranges.init(jnp.zeros(8), size=16),
            )
            state = jax.jit(ranges.update)(start, rows, jax.random.key(0))
            for leaf, old in zip(state, start, strict=True):
                assert jax.typeof(leaf).sharding.spec == jax.typeof(old).sharding.spec
            assert_is(jax.tree.map(np.asarray, state), x)


@pytest.mark.parametrize("mode", ["min_max", "quantile"])
def test_normalize_is_that_of_the_host_and_back(mode, rng):
    """In float64 to the bits that float32 has."""
    data = draw(rng, 4, 6)
    data["position"] = data["position"].at[..., 1].set(7.0)  # constant
    state = ranges.update(ranges.init(SPECS, size=24), data, jax.random.key(0))
    options = {"mode": mode, "ranks": (0.05, 0.9)}
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).reshape(24, -1), data)
    host = Normalizer.fit([exact], quantiles=(0.05, 0.9))
    y = ranges.normalize(data, state, **options)
    for name, expected in host.normalize(exact, **options).items():
        np.testing.assert_allclose(np.reshape(y[name], expected.shape), expected, atol=2e-5)
    assert not np.any(y["position"][..., 1])
    back = ranges.denormalize(y, state, **options)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=3e-7, atol=1e-6), back, data)
    clipped = ranges.normalize(data, state, clip=0.5, **options)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(clipped)) == 0.5
    wide = ranges.normalize(data, state, floor=1e4, **options)
    low, high = (ranges.quantile(state, r) for r in ((0, 1) if mode == "min_max" else (0.05, 0.9)))
    for name, leaf in data.items():
        np.testing.assert_allclose(
            wide[name],
            np.asarray(2 * np.asarray(leaf) - np.asarray(low[name] + high[name])) / 1e4,
            atol=1e-8,
        )


def test_without_data_a_feature_stays_as_it_is():
    state = ranges.init(jnp.zeros(2))
    assert np.isnan(ranges.quantile(state, 0.5)).all()
    state = ranges.update(state, jnp.array([[0.0, jnp.nan], [4.0, 1.0]]), jax.random.key(0))
    x = jnp.array([[1.0, 2.5]])
    assert state.count.tolist() == [2, 0]
    assert ranges.normalize(x, state, mode="min_max").tolist() == [[-0.5, 2.5]]
    assert ranges.denormalize(x, state, mode="min_max").tolist() == [[4.0, 2.5]]
    empty = ranges.update(state, jnp.zeros((0, 2)), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, empty, state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_half_precision_has_statistics_in_float32(dtype, rng):
    x = jnp.asarray(rng.standard_normal((40, 3)) * 100, dtype)
    state = ranges.update(ranges.init(x[0]), x, jax.random.key(0))
    assert {leaf.dtype for leaf in state} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.uint32)}
    assert_is(state, x.astype(jnp.float32))
    y = ranges.normalize(x, state)
    assert y.dtype == ranges.denormalize(y, state).dtype == dtype
    exact = ranges.normalize(x.astype(jnp.float32), state)
    np.testing.assert_array_equal(y, exact.astype(dtype))


@pytest.mark.slow
def test_float64(rng, x64):
    x = rng.standard_normal((8, 10, 3)) + 1e9
    state = jax.jit(spread)(ranges.init(x[0, 0]), x, jax.random.key(0), np.ones(8, bool))
    assert_is(state, x.reshape(-1, 3), rtol=1e-15)
    y = ranges.normalize(x, state, mode="min_max")
    np.testing.assert_allclose(ranges.denormalize(y, state, mode="min_max"), x, rtol=1e-15)


def test_widths_beyond_the_dtype():
    """The difference of the extremes overflows; the width of a constant is not 0."""
    x = jnp.array([-3e38, 0.0, 3e38])
    state = ranges.update(ranges.init(0.0), x, jax.random.key(0))
    assert ranges.normalize(x, state, mode="min_max").tolist() == [-1, 0, 1]
    assert ranges.denormalize(jnp.array([-1.0, 0, 1]), state, mode="min_max").tolist() == [*x]
    np.testing.assert_allclose(ranges.quantile(state, 0.75), 1.5e38, rtol=1e-6)
    state = ranges.update(ranges.init(0.0), jnp.full(3, 5.0), jax.random.key(0))
    assert ranges.normalize(jnp.array([5.0]), state, floor=1e-300).tolist() == [0]


def test_the_count_ends_at_its_largest_number():
    full = ranges.update(ranges.init(0.0), jnp.ones(3), jax.random.key(0))
    for before, after in ((5, 2), (4, 1), (3, 1), (1, 1)):
        old = full._replace(count=jnp.uint32(2**32 - before))
        new = ranges.update(old, jnp.ones(3), jax.random.key(1))
        assert int(new.count) == 2**32 - after


def test_the_state_is_a_constant_under_differentiation(rng):
    x = jnp.asarray(rng.standard_normal(30), jnp.float32)

    def loss(x):
        state = ranges.update(ranges.init(0.0, size=16), x, jax.random.key(0))
        return jnp.sum(ranges.normalize(x, state, mode="min_max"))

    width = float(x.max() - x.min())
    np.testing.assert_allclose(jax.grad(loss)(x), np.full(30, 2 / width), rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(loss, (x,), (jnp.ones(30),))[1], 60 / width, rtol=1e-6)


STATE = ranges.init({"a": jnp.zeros(3)}, size=4)
KEY = jax.random.key(0)
ROWS = {"a": np.zeros((5, 3), np.float32)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ranges.init({"a": jnp.zeros(3, int)}),
            TypeError,
            r"specs\['a'\] must be floating point: got int32",
        ),
        (
            lambda: ranges.init({"a": jnp.zeros(3, complex)}),
            TypeError,
            r"specs\['a'\] must be real: got complex64, which has no order",
        ),
        (lambda: ranges.init(0.0, size=0), ValueError, r"size must be at least 1, .*: got 0\."),
        (lambda: ranges.init(0.0, size=1e3), TypeError, r"size must be an integer, .*: got 1000.0"),
        (lambda: ranges.init(0.0, size=True), TypeError, "size must be an integer"),
        (
            lambda: ranges.update(online.init({"a": jnp.zeros(3)}), ROWS, KEY),
            TypeError,
            "every leaf of state must be a Range: got Array",
        ),
        (
            lambda: ranges.update(STATE, {"b": ROWS["a"]}, KEY),
            ValueError,
            "batch must have the structure of the state",
        ),
        (
            lambda: ranges.update(STATE, {"a": np.zeros((3, 2), np.float32)}, KEY),
            ValueError,
            r"batch\['a'\] must end in the shape of one element, \(3,\): got \(3, 2\)",
        ),
        (
            lambda: ranges.update(STATE, {"a": np.zeros((5, 3), int)}, KEY),
            TypeError,
            r"batch\['a'\] must be floating point",
        ),
        (
            lambda: ranges.update(STATE, {"a": np.zeros(3, np.complex64)}, KEY),
            TypeError,
            r"batch\['a'\] must be real",
        ),
        (
            lambda: ranges.update(STATE, ROWS, 0),
            TypeError,
            r"key must be one key of jax.random: got 0\. Pass jax.random.key\(0\)",
        ),
        (lambda: ranges.update(STATE, ROWS, None), TypeError, "key must be one key"),
        (
            lambda: ranges.update(STATE, ROWS, jax.random.split(KEY)),
            TypeError,
            r"key must be one key of jax.random: got shape \(2,\), key<fry>",
        ),
        (
            lambda: ranges.update(STATE, ROWS, KEY, weights=np.ones(4, bool)),
            ValueError,
            r"first batch axes, \(5,\): got \(4,\)",
        ),
        (
            lambda: ranges.update(STATE, ROWS, KEY, weights=np.full(5, 0.5)),
            ValueError,
            r"weights must be 0 or 1, since a sample has an element or has it not: found 0\.5\.",
        ),
        (
            lambda: ranges.update(STATE, ROWS, KEY, weights=np.ones(5, int)),
            TypeError,
            "^weights must be boolean or float",
        ),
        (
            lambda: ranges.update(STATE, ROWS, KEY, axis_name="i"),
            NameError,
            "^axis_name must be bound .* got the unbound 'i'",
        ),
        (lambda: ranges.merge(), TypeError, "merge takes states, one at least: got none"),
        (
            lambda: ranges.merge(STATE, {"b": STATE["a"]}),
            ValueError,
            "states must have one structure",
        ),
        (
            lambda: ranges.merge(STATE, ranges.init({"a": jnp.zeros(3)}, size=5)),
            ValueError,
            r"samples of the same shapes and dtypes: got .*\(3, 4\).*\(3, 5\).* in number 2",
        ),
        (lambda: ranges.quantile(STATE, 1.5), ValueError, r"rank must lie in \[0, 1\]: got 1.5"),
        (lambda: ranges.quantile(STATE, "low"), TypeError, "rank must be a number"),
        (
            lambda: ranges.normalize(ROWS, STATE, mode="standard"),
            ValueError,
            r"mode must be 'quantile' or 'min_max': got 'standard'\. .* online.normalize",
        ),
        (
            lambda: ranges.normalize(ROWS, STATE, ranks=(0.9, 0.1)),
            ValueError,
            r"ranks must be two, the lower one first: got \(0.9, 0.1\)",
        ),
        (
            lambda: ranges.normalize(ROWS, STATE, ranks=(1, 99)),
            ValueError,
            r"ranks must be two numbers from 0 to 1: got \(1, 99\)",
        ),
        (lambda: ranges.denormalize(ROWS, STATE, ranks=0.5), ValueError, "ranks must be two"),
        (lambda: ranges.normalize(ROWS, STATE, floor=0), ValueError, "floor must be above 0"),
        (lambda: ranges.normalize(ROWS, STATE, clip=-1), ValueError, "clip must be finite"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()
