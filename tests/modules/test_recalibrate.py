"""Test running statistics over microbatches and over a population.

They equal the statistics of all elements together, in linen and nnx alike.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxnorm as jn
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx
from jaxnorm import online
from jaxnorm.nnx.flax_versions import get_value


class Net(linen.Module):
    momentum: float = 0.9

    @linen.compact
    def __call__(self, x, train: bool):
        x = jnn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
        x = jnp.tanh(linen.Dense(5)(x))
        x = jnn.SwitchableNorm(use_running_average=not train, momentum=self.momentum)(x[:, None])[
            :, 0
        ]
        return linen.Dense(2)(x)


class Twin(nnx.Module):
    def __init__(self, momentum=0.9):
        self.first = jnnx.BatchNorm(4, momentum=momentum, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(4, 5, rngs=nnx.Rngs(1))
        self.block = getattr(nnx, "List", list)(
            [jnnx.SwitchableNorm(5, momentum=momentum, rngs=nnx.Rngs(0))]
        )

    def __call__(self, x):
        return self.block[0](jnp.tanh(self.dense(self.first(x)))[:, None])[:, 0]


def batches(rng, sizes=(8, 8, 3)):
    return [jnp.asarray(rng.standard_normal((size, 4)) * 2 + 5, jnp.float32) for size in sizes]


def exact(parts):
    whole = np.concatenate(parts).astype(np.float64)
    return whole.mean(0), whole.var(0)


def variables_of(x, **options):
    return Net(**options).init(jax.random.key(0), x, train=True)


def assert_close(found, truth, rtol=1e-6):
    for one, other in zip(found, truth, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def of(stats, name="BatchNorm_0"):
    return stats["batch_stats"][name]["mean"], stats["batch_stats"][name]["var"]


def nnx_of(norm):
    return norm.mean[...], norm.var[...]


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 15), max_size=3).map(sorted), st.integers(0, 9))
def test_microbatches_blend_once_however_they_are_cut(cuts, seed):
    """Old values 0 and 1, momentum 0.9: 0.9 old + 0.1 of all sixteen, in both families, and then
    the same for a second batch.
    """
    data = np.random.default_rng(seed).standard_normal((2, 16, 1)).astype(np.float32) + 2
    norm, twin = (
        jnn.BatchNorm(use_running_average=False, momentum=0.9),
        jnnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0)),
    )
    variables, mean, var = norm.init(jax.random.key(0), data[0]), 0.0, 1.0
    for batch in data:
        variables = jnn.accumulate(variables)
        jnnx.accumulate(twin)
        for part in np.split(batch, cuts):  # some are empty
            variables |= norm.apply(variables, part, mutable=["batch_stats", "batch_moments"])[1]
            twin(jnp.asarray(part))
        mean, var = (
            0.9 * old + 0.1 * new for old, new in zip((mean, var), exact([batch]), strict=True)
        )
        stats = variables["batch_stats"]
        assert_close((stats["mean"], stats["var"]), (mean, var))
        np.testing.assert_array_equal(stats["mean"], twin.mean[...])
        np.testing.assert_array_equal(stats["var"], twin.var[...])


def test_without_the_collection_nothing_changes(rng):
    parts = batches(rng)
    variables = variables_of(parts[0])
    assert set(variables) == {"params", "batch_stats"}
    _, updated = Net().apply(variables, parts[0], train=True, mutable=True)
    assert set(updated) == {"params", "batch_stats"}
    assert set(jnn.accumulate(variables)) == {"params", "batch_stats", "batch_moments"}
    assert set(jnn.stop_accumulating(jnn.accumulate(variables))) == {"params", "batch_stats"}
    twin = Twin()
    before = jax.tree.structure(nnx.state(twin))
    jnnx.accumulate(twin)
    assert jax.tree.structure(nnx.state(twin)) != before
    jnnx.stop_accumulating(twin)
    assert jax.tree.structure(nnx.state(twin)) == before


@pytest.mark.slow
def test_momentum_zero_and_one_batch_for_all_is_cumulative(rng):
    parts = batches(rng, (8, 1, 5, 8))
    variables, twin = jnn.accumulate(variables_of(parts[0], momentum=0.0)), Twin(momentum=0.0)
    jnnx.accumulate(twin)
    for part in parts:
        variables |= Net(momentum=0.0).apply(
            variables, part, train=True, mutable=["batch_stats", "batch_moments"]
        )[1]
        twin(part)
    assert_close(of(variables), exact(parts))
    assert_close(nnx_of(twin.first), exact(parts))


@pytest.mark.slow
def test_within_scan_and_multisteps(rng, ordinary_promotion):
    """Three microbatches a step: begun where the optimizer steps, which is traced."""
    data = np.stack(batches(rng, (4,) * 6))
    variables = variables_of(data[0])
    optimizer = optax.MultiSteps(optax.sgd(1e-2), 3)
    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}

    def step(carry, x):
        params, state, rest = carry
        rest = jnn.accumulate(
            rest, optimizer.has_updated(state) | (state.gradient_step + state.mini_step == 0)
        )

        def loss(params):
            y, updated = Net().apply({"params": params, **rest}, x, train=True, mutable=list(rest))
            return (y**2).mean(), updated

        gradient, rest = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state, rest), None

    (_, _, rest), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, data))(
        (params, optimizer.init(params), jnn.accumulate(rest))
    )
    mean, var = 0.0, 1.0
    for three in data.reshape(2, 12, 4):
        mean, var = (
            0.9 * old + 0.1 * new for old, new in zip((mean, var), exact([three]), strict=True)
        )
    assert_close(of(rest), (mean, var))


@pytest.mark.slow
def test_within_nnx_grad_and_jit(rng, ordinary_promotion):
    parts, twin = batches(rng), Twin()
    jnnx.accumulate(twin)
    step = nnx.jit(nnx.grad(lambda model, x: (model(x) ** 2).mean()))
    for part in parts:
        step(twin, part)
    mean, var = exact(parts)
    assert_close(nnx_of(twin.first), (0.1 * mean, 0.9 + 0.1 * var))
    nnx.jit(jnnx.accumulate)(twin, jnp.array(False))  # goes on
    step(twin, parts[0])
    mean, var = exact([*parts, parts[0]])
    assert_close(nnx_of(twin.first), (0.1 * mean, 0.9 + 0.1 * var))


def test_recalibrate_linen(rng, ordinary_promotion):
    parts = batches(rng)
    before = variables_of(parts[0])
    after = jnn.recalibrate(Net(), before, iter(parts), train=True)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert_close(of(after), exact(parts))
    hidden = [
        np.tanh(np.asarray(jn.batch_norm(x)[0] @ before["params"]["Dense_0"]["kernel"], np.float64))
        for x in parts
    ]
    assert_close(of(after, "SwitchableNorm_0"), exact(hidden), rtol=3e-6)
    assert_close(of(before), (np.zeros(4), np.ones(4)))


def test_recalibrate_nnx_leaves_all_else_as_it_was(rng, ordinary_promotion):
    parts, model = batches(rng), Twin()
    model.eval()
    structure, dense = jax.tree.structure(nnx.state(model)), model.dense.kernel[...]
    hidden = [np.tanh(np.asarray(jn.batch_norm(x)[0] @ dense, np.float64)) for x in parts]
    jnnx.recalibrate(model, parts)
    assert_close(nnx_of(model.first), exact(parts))
    assert_close(nnx_of(model.block[0]), exact(hidden), rtol=3e-6)
    assert jax.tree.structure(nnx.state(model)) == structure
    assert (model.first.use_running_average, model.block[0].use_running_average) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_interrupted_and_resumed(family, rng, ordinary_promotion):
    """``progress`` gets what is needed to go on: the result is that of one go."""
    parts, calls = batches(rng), []
    variables, model = variables_of(parts[0]), Twin()

    def stop(number, seen):
        calls.append((number, seen))
        if number == 2:
            raise KeyboardInterrupt

    run = (
        partial(jnn.population, Net(), variables, train=True)
        if family == "linen"
        else partial(jnnx.population, model)
    )
    with pytest.raises(KeyboardInterrupt):
        run(parts, progress=stop)
    seen = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, calls[-1][1]))  # through a file
    assert [number for number, _ in calls] == [1, 2]
    if family == "linen":
        seen = run(parts[2:], seen=seen)
        assert sorted(seen) == ["BatchNorm_0", "SwitchableNorm_0"]
        found = of(jnn.recalibrate(Net(), variables, (), seen=seen))
    else:
        assert_close(nnx_of(model.first), (np.zeros(4), np.ones(4)), rtol=0)
        seen = run(parts[2:], seen=seen)
        assert sorted(seen) == ["block/0", "first"]
        jnnx.recalibrate(model, (), seen=seen)
        found = nnx_of(model.first)
    assert_close(found, exact(parts))


def test_a_bar_shows_progress(rng, capsys, ordinary_promotion):
    jnnx.recalibrate(Twin(), batches(rng), progress=True)
    assert "batches" in capsys.readouterr().out


def test_errors(rng, ordinary_promotion):
    parts, model = batches(rng), Twin()
    variables = variables_of(parts[0])
    with pytest.raises(ValueError, match="must use the statistics of its batch: none has seen any"):
        jnn.recalibrate(Net(), variables, parts, train=False)
    for nothing in ([], iter(())):
        with pytest.raises(ValueError, match=r"batches must hold at least one batch: got none\."):
            jnnx.recalibrate(model, nothing)
        with pytest.raises(ValueError, match=r"batches must hold at least one batch: got none\."):
            jnn.recalibrate(Net(), variables, nothing, train=True)
    for call in (partial(jnn.recalibrate, Net(), variables), partial(jnnx.recalibrate, model)):
        with pytest.raises(
            TypeError,
            match=(
                r"batches must be an iterable of batches: got one array, "
                r"of shape .* Put it in a list\."
            ),
        ):
            call(parts[0])
    with pytest.raises(ValueError, match="variables must have running statistics"):
        jnn.accumulate({"params": variables["params"]})
    with pytest.raises(ValueError, match="found none in Linear"):
        jnnx.accumulate(model.dense)
    with pytest.raises(
        ValueError, match="seen must be of the norms of this model, block/0, first: got other"
    ):
        jnnx.recalibrate(model, parts, seen={"other": jn.moments(parts[0], 0)})


def test_of_complex_batches_the_means_are_complex():
    """As those of a plain step."""
    z, more = jnp.array([[1 + 1j], [3 + 1j]], jnp.complex64), jnp.array([[5 + 4j]], jnp.complex64)
    model = jnn.BatchNorm(use_running_average=False, momentum=0.0)
    variables = model.init(jax.random.key(0), z)
    accumulated = jnn.accumulate(variables)
    for batch in (z, more):
        _, state = model.apply(accumulated, batch, mutable=["batch_stats", "batch_moments"])
        accumulated = {**accumulated, **state}
    found = [accumulated, jnn.recalibrate(model, variables, [z, more])]
    means = [state["batch_stats"]["mean"] for state in found]
    for use in ("accumulate", "recalibrate"):
        twin = jnnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
        if use == "accumulate":
            jnnx.accumulate(twin)
            twin(z), twin(more)
        else:
            jnnx.recalibrate(twin, [z, more])
        means.append(twin.mean[...])
    np.testing.assert_allclose(means, np.full((4, 1), 3 + 2j), rtol=1e-6)


HARD = {
    "one row": ([[5.0, 7.0]], None),
    "one row in the mask": ([[5.0, 7.0], [9.0, 9.0]], [[True], [False]]),
    "equal rows": ([[5.0, 7.0]] * 3, None),
}


@pytest.mark.parametrize("name", HARD)
def test_batches_without_spread_leave_running_statistics_alone_where_asked(
    name, ordinary_promotion
):
    """Thirty of them wear the variance down from 3.75 to 0.16; skip_constant keeps it, unbiased
    does where one row counts.
    """
    x, mask = HARD[name]
    x = jnp.array(x)
    for options, var in (
        ({}, 3.75 * 0.9**30),
        ({"unbiased": True}, 3.75 * 0.9**30 if name == "equal rows" else 3.75),
        ({"skip_constant": True}, 3.75),
    ):
        norm = jnn.BatchNorm(use_running_average=False, momentum=0.9, **options)
        stats = {"mean": jnp.zeros(2), "var": jnp.full(2, 3.75)}
        variables = {**norm.init(jax.random.key(0), x), "batch_stats": stats}
        twin = jnnx.BatchNorm(2, momentum=0.9, rngs=nnx.Rngs(0), **options)
        twin.var[...] = jnp.full(2, 3.75)
        for _ in range(30):
            variables |= norm.apply(
                variables,
                x,
                mask=None if mask is None else jnp.array(mask),
                mutable=["batch_stats"],
            )[1]
            twin(x, mask=None if mask is None else jnp.array(mask))
        np.testing.assert_allclose(variables["batch_stats"]["var"], [var] * 2, rtol=1e-5)
        moved = 0 if var == 3.75 else 1 - 0.9**30
        np.testing.assert_allclose(
            variables["batch_stats"]["mean"], [5 * moved, 7 * moved], rtol=1e-5
        )
        np.testing.assert_array_equal(twin.mean[...], variables["batch_stats"]["mean"])
        np.testing.assert_array_equal(twin.var[...], variables["batch_stats"]["var"])


def test_unbiased_running_variances_are_those_of_pytorch(ordinary_promotion):
    """Of 1, 3 and 5 the unbiased variance is 4; microbatches of one batch count as one."""
    parts = [jnp.array([[1.0], [3.0]]), jnp.array([[5.0]])]
    norm, twin = (
        jnn.BatchNorm(use_running_average=False, momentum=0.75, unbiased=True),
        jnnx.BatchNorm(1, momentum=0.75, unbiased=True, rngs=nnx.Rngs(0)),
    )
    variables = jnn.accumulate(norm.init(jax.random.key(0), parts[0]))
    jnnx.accumulate(twin)
    for part in parts:
        variables |= norm.apply(variables, part, mutable=["batch_stats", "batch_moments"])[1]
        twin(part)
    assert (variables["batch_stats"]["var"].tolist(), twin.var[...].tolist()) == ([1.75], [1.75])


class Pair(linen.Module):
    """A norm that is frozen, and two that are not."""

    @linen.compact
    def __call__(self, x, train):
        x = jnn.BatchNorm(use_running_average=True, name="frozen")(x)
        x = jnn.BatchNorm(use_running_average=not train, name="early")(x)
        return jnn.BatchNorm(use_running_average=not train, name="late")(2 * x)


class PairTwin(nnx.Module):
    def __init__(self):
        for name in ("frozen", "early", "late"):
            setattr(self, name, jnnx.BatchNorm(1, rngs=nnx.Rngs(0)))
        self.frozen.use_running_average = True

    def __call__(self, x):
        return self.late(2 * self.early(self.frozen(x)))


@pytest.mark.parametrize(
    "only",
    [None, "late", ["/late/"], lambda path: path == "late"],
    ids=["all", "path", "paths", "function"],
)
def test_only_some_norms_are_recalibrated(only, ordinary_promotion):
    """The frozen one keeps 0 and 1; of 1, 3 and 8 the mean is 4, and each batch of ``early`` is
    normalized to mean 0.
    """
    parts = [jnp.array([[1.0], [3.0]]), jnp.array([[8.0]])]
    variables = Pair().init(jax.random.key(0), parts[0], train=True)
    stats = jnn.recalibrate(Pair(), variables, parts, only=only, train=True)["batch_stats"]
    model = PairTwin()
    jnnx.recalibrate(model, parts, only=only)
    for name, mean in (("frozen", 0), ("early", 0 if only else 4), ("late", 0)):
        np.testing.assert_allclose(stats[name]["mean"], [mean], atol=1e-4)
        np.testing.assert_allclose(getattr(model, name).mean[...], [mean], atol=1e-4)
    assert (stats["frozen"]["var"].tolist(), model.frozen.var[...].tolist()) == ([1.0], [1.0])
    assert model.frozen.use_running_average is True
    assert float(stats["late"]["var"][0]) == pytest.approx(4 * 2 / 3, rel=1e-3)
    assert float(model.late.var[...][0]) == pytest.approx(4 * 2 / 3, rel=1e-3)


def test_frozen_norms_are_recalibrated_where_all_are_or_they_are_named(ordinary_promotion):
    parts, model = [jnp.array([[1.0], [3.0]])], PairTwin()
    model.eval()
    jnnx.recalibrate(model, parts)
    assert model.frozen.mean[...].tolist() == [2.0]
    other = PairTwin()
    jnnx.recalibrate(other, parts, only="frozen")
    assert (other.frozen.mean[...].tolist(), other.early.mean[...].tolist()) == ([2.0], [0.0])
    with pytest.raises(
        ValueError,
        match=(
            r"only must name norms with running statistics by their paths from the top: "
            r"got 'block'; there are 'early', 'frozen', 'late'\."
        ),
    ):
        jnnx.recalibrate(other, parts, only="block")
    with pytest.raises(
        ValueError,
        match=r"only must leave norms to calibrate: it takes none of early, frozen, late\.",
    ):
        jnnx.population(other, parts, only=lambda path: False)


class Switch(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnn.SwitchableNorm(use_running_average=False)(
            jnn.BatchNorm(use_running_average=False)(x)
        )


class SwitchTwin(nnx.Module):
    def __init__(self):
        self.norm, self.switch = (
            jnnx.BatchNorm(3, rngs=nnx.Rngs(0)),
            jnnx.SwitchableNorm(3, rngs=nnx.Rngs(0)),
        )


def test_abstract_models_accumulate():
    """The first step of restoring a checkpoint: the same tree, shapes and dtypes as of arrays,
    without any array.
    """
    x = jnp.ones((2, 4, 4, 3))
    variables = jnn.accumulate(Switch().init(jax.random.key(0), x))
    abstract = jax.eval_shape(Switch().init, jax.random.key(0), x)
    for again in (jnn.accumulate(abstract), jnn.accumulate(jnn.accumulate(abstract))):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), again) == jax.tree.map(
            lambda a: (a.shape, a.dtype), variables
        )
        assert all(
            isinstance(leaf, jax.ShapeDtypeStruct)
            for leaf in jax.tree.leaves(again["batch_moments"])
        )
    model, twin = SwitchTwin(), nnx.eval_shape(SwitchTwin)
    jnnx.accumulate(model)
    for _ in range(2):
        jnnx.accumulate(twin)
        described = [
            [(a.shape, a.dtype) for a in jax.tree.leaves(nnx.state(each))] for each in (model, twin)
        ]
        assert described[0] == described[1]
    jnnx.stop_accumulating(twin)
    with pytest.raises(
        TypeError,
        match="running statistics must be arrays: the statistics of 'norm', 'switch' are abstract",
    ):
        jnnx.recalibrate(twin, [x])
    with pytest.raises(TypeError, match=r"are abstract\. Initialize or restore the model first"):
        jnn.recalibrate(Switch(), abstract, [x])


def test_buffers_may_be_donated():
    """No array of a state that collects is there twice."""
    x, norm = jnp.ones((4, 3)), jnn.BatchNorm(use_running_average=False)
    variables = jnn.accumulate(norm.init(jax.random.key(0), x))
    step = jax.jit(
        lambda v: v | norm.apply(v, x, mutable=["batch_stats", "batch_moments"])[1],
        donate_argnums=0,
    )
    np.testing.assert_array_equal(
        step(step(variables))["batch_moments"]["seen"].moments.count, [8, 8, 8]
    )
    module = jnnx.BatchNorm(3, rngs=nnx.Rngs(0))
    jnnx.accumulate(module)
    nnx.jit(lambda module, x: module(x), donate_argnums=0)(module, x)
    np.testing.assert_array_equal(get_value(module.batch_moments).moments.count, [4, 4, 4])


def test_moments_are_saved_by_flax():
    """Those of a stream, with all their parts."""
    state = online.update(
        online.init({"a": jnp.zeros(3)}), {"a": jnp.arange(6.0).reshape(2, 3) + 1e7}
    )
    restored = serialization.from_bytes(
        online.init({"a": jnp.zeros(3)}), serialization.to_bytes(state)
    )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
