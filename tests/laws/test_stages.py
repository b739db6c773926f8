"""Run a model over microbatches with the results of the whole batch.

Statistics, outputs and gradients are those of the batch, and its memory is the memory
of a microbatch.
"""

from itertools import pairwise

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

SIZES = [4, 6, 6, 5, 3]  # the input, three layers with norms, the output
BATCH = 24
MESH = Mesh(np.array(HOST), ("data",))


def weights(rng, sizes=SIZES):
    """Weights, scale and bias of each layer; scale and bias are applied behind its norm, by the
    stage after it.
    """
    dims = pairwise(sizes)
    return [
        {
            "w": jnp.asarray(rng.standard_normal((i, o)) / np.sqrt(i), jnp.float32),
            "scale": jnp.asarray(rng.uniform(0.5, 1.5, o), jnp.float32),
            "bias": jnp.asarray(rng.standard_normal(o), jnp.float32),
        }
        for i, o in dims
    ]


def draw(rng, size=BATCH, sizes=SIZES):
    return {
        "x": jnp.asarray(rng.standard_normal((size, sizes[0])) + 3, jnp.float32),
        "target": jnp.asarray(rng.standard_normal((size, sizes[-1])), jnp.float32),
        "taken": jnp.ones(size, bool),
    }


def affine(p, h):
    return jnp.tanh(h * p["scale"][None] + p["bias"][None])


def first(params, h, batch):
    return batch["x"] @ params[0]["w"]


def layer(number):
    return lambda params, h, batch: affine(params[number - 1], h) @ params[number]["w"]


def last(params, h, batch):
    """The loss of each example."""
    error = affine(params[-2], h) @ params[-1]["w"] - batch["target"]
    return jnp.where(batch["taken"], (error**2).sum(1), 0)


STAGES = [first, layer(1), layer(2), last]
whole = online.stages(STAGES, where=lambda batch: batch["taken"])


def at_once(params, batch, where=None):
    """The whole batch through batch norms."""
    h, found = first(params, None, batch), []
    for stage in STAGES[1:]:
        h, moments = jn.batch_norm(h, where=where)
        found.append(moments)
        h = stage(params, h, batch)
    return h.sum() / batch["taken"].sum().astype(jnp.float32), found


def over(microbatches):
    """The loss of the whole batch from the outputs of its microbatches."""

    def loss(params, batch):
        outputs, found = whole(params, microbatches(batch))
        taken = batch["taken"].sum().astype(jnp.float32)
        return sum(output.sum() for output in jax.tree.leaves(outputs)) / taken, found

    return loss


def cut(bounds):
    bounds = [0, *bounds, BATCH]
    return over(
        lambda batch: [
            jax.tree.map(lambda leaf: leaf[i:j], batch)  # noqa: B023
            for i, j in pairwise(bounds)
        ]
    )


def with_gradients(loss, params, batch):
    """Value, statistics, and the gradients of all parameters and of x."""

    def of(params, x):
        return loss(params, {**batch, "x": x})

    return jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))(params, batch["x"])


def assert_same(found, truth, rtol=1e-5):
    """Relative to the largest value of each array."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(
            one, other, rtol=0, atol=rtol * max(float(jnp.abs(other).max()), 1e-6)
        )


def statistics(found):
    (value, moments), gradients = found
    return value, [(m.count, m.mean, m.var) for m in moments], gradients


def running(found):
    start = [
        jn.Moments(jnp.zeros(()), jnp.zeros(m.mean.shape), jnp.ones(m.mean.shape))
        for m in found[0][1]
    ]
    return [jn.ema(old, new, momentum=0.9) for old, new in zip(start, found[0][1], strict=True)]


# six of three, then four and two; in the last of MORE all sizes differ
EIGHT = [3, 6, 9, 12, 15, 18, 22]
MORE = ([], [11], EIGHT, [1, 3, 6, 10, 15, 16, 22])


@pytest.mark.parametrize("bounds", [[5, 6, 20], *MORE], ids=str)
@pytest.mark.slow
def test_lists_of_unequal_microbatches(bounds, rng):
    params, batch = weights(rng), draw(rng)
    found, truth = (with_gradients(loss, params, batch) for loss in (cut(bounds), at_once))
    assert_same(statistics(found), statistics(truth))
    assert_same(
        [(m.mean, m.var) for m in running(found)], [(m.mean, m.var) for m in running(truth)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_stacked_microbatches_with_masks(parts, rng):
    """Microbatches of 24 / parts examples, of which each has another number; the rest is NaN."""
    params, batch = weights(rng), draw(rng)
    taken = np.arange(BATCH) % (BATCH // parts) <= np.arange(BATCH) // (BATCH // parts) * 3 // parts
    batch["taken"] = jnp.asarray(taken)
    apart = {
        name: jnp.where(taken.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.nan)
        for name, leaf in batch.items()
        if name != "taken"
    }
    apart["taken"] = batch["taken"]
    found = with_gradients(
        over(lambda b: jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), b)),
        params,
        batch,
    )
    small = jax.tree.map(lambda leaf: leaf[taken], batch)
    truth = with_gradients(at_once, params, small)
    assert_same(statistics(found)[:2], statistics(truth)[:2])
    assert_same(found[1][0], truth[1][0])
    assert_same(found[1][1][taken], truth[1][1])
    assert float(jnp.abs(found[1][1][~taken]).max(initial=0)) == 0
    masked, _ = jax.jit(
        over(lambda b: jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), b))
    )(params, apart)
    np.testing.assert_allclose(masked, truth[0][0], rtol=1e-5)


def oracle(params, batch):
    """The loss and the statistics in float64 NumPy."""
    h, found = np.asarray(batch["x"], np.float64), []
    params = [{name: np.asarray(value, np.float64) for name, value in p.items()} for p in params]
    for p in params[:-1]:
        h = h @ p["w"]
        found.append((h.mean(0), h.var(0)))
        h = np.tanh((h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * p["scale"] + p["bias"])
    return ((h @ params[-1]["w"] - np.asarray(batch["target"])) ** 2).sum(1).mean(), found


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, BATCH - 1), unique=True, max_size=3).map(sorted), st.integers(0, 9))
def test_however_the_batch_is_cut(bounds, seed):
    rng = np.random.default_rng(seed)
    params, batch = weights(rng), draw(rng)
    value, found = jax.jit(cut(bounds))(params, batch)
    loss, exact = oracle(params, batch)
    np.testing.assert_allclose(value, loss, rtol=3e-6)
    for moments, (mean, var) in zip(found, exact, strict=True):
        assert moments.count.tolist() == [[float(BATCH)] * mean.size]
        np.testing.assert_allclose(moments.mean[0], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(moments.var[0], var, rtol=1e-5)


@pytest.mark.slow
def test_memory_is_that_of_a_microbatch(rng, usual_compile_of_class):
    """Temporaries of value and gradient: with 8 microbatches a quarter at most of those of the
    whole batch.
    """
    sizes = [32] * 5
    params, batch = weights(rng, sizes), draw(rng, 2048, sizes)

    def temporaries(loss):
        with jax.default_device(HOST[0]):  # an accelerator's compiler counts otherwise
            compiled = (
                jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch).compile()
            )
        return compiled.memory_analysis().temp_size_in_bytes

    full = temporaries(at_once)
    taken = [
        temporaries(
            over(lambda b: jax.tree.map(lambda a: a.reshape(k, -1, *a.shape[1:]), b))  # noqa: B023
        )
        for k in (2, 8)
    ]
    assert [size / full < bound for size, bound in zip(taken, (0.65, 0.25), strict=True)] == [
        True
    ] * 2, (taken, full)


def test_passes_are_what_is_stated():
    """The first of k stages runs k times forwards, the last once."""
    calls = [0, 0, 0]

    def counting(number):
        def stage(params, h, batch):
            calls[number] += 1
            return batch if h is None else h

        return stage

    online.stages([counting(number) for number in range(3)])(
        None, [jnp.ones((2, 3)), jnp.zeros((1, 3))]
    )
    assert calls == [3 * 2, 2 * 2, 1 * 2]  # two shapes, each traced once in each pass


def test_images_features_in_front_and_outputs_of_each_example(rng):
    x = jnp.asarray(rng.standard_normal((6, 3, 4, 4)) + 2, jnp.float32)
    run = online.stages([lambda w, h, x: x * w, lambda w, h, x: h], feature_axes=1, epsilon=1e-3)
    outputs, (moments,) = run(jnp.float32(2), [x[:1], x[1:]])
    y, truth = jn.batch_norm(x * 2, feature_axes=1, epsilon=1e-3)
    np.testing.assert_allclose(jnp.concatenate(outputs), y, atol=1e-6)
    np.testing.assert_allclose(moments.mean, truth.mean, rtol=1e-6)


@pytest.mark.slow
def test_over_devices_too(rng):
    """Eight devices with three examples each, in microbatches of 2 and 1."""
    params, batch = weights(rng), draw(rng)
    run = online.stages(STAGES, axis_name="data")

    def loss(params, batch):
        outputs, found = run(
            params,
            [
                jax.tree.map(lambda leaf: leaf[:2], batch),
                jax.tree.map(lambda leaf: leaf[2:], batch),
            ],
        )
        return jax.lax.psum(sum(output.sum() for output in outputs), "data") / BATCH, found

    sharded = jax.shard_map(loss, mesh=MESH, in_specs=(P(), P("data")), out_specs=(P(), P()))
    found, truth = with_gradients(sharded, params, batch), with_gradients(at_once, params, batch)
    assert_same(statistics(found), statistics(truth))


@pytest.mark.slow
def test_jvp_and_second_order_agree_with_the_whole_batch(rng):
    params, batch = weights(rng), draw(rng)
    loss, truth = (
        lambda x, run=run: run(params, {**batch, "x": x})[0] for run in (cut([5]), at_once)
    )
    x, direction = batch["x"], jnp.ones_like(batch["x"]).at[3].set(-2.0)
    for derivative in (
        lambda f: jax.jvp(f, (x,), (direction,))[1],
        lambda f: jax.jvp(jax.grad(f), (x,), (direction,))[1],
    ):
        found, exact = (jax.jit(lambda f=f, d=derivative: d(f))() for f in (loss, truth))
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=3e-5 * float(jnp.abs(exact).max()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: online.stages([]), TypeError, "one at least"),
        (lambda: online.stages([1]), TypeError, "stages takes functions, one at least"),
        (
            lambda: online.stages(len),
            TypeError,
            "stages takes functions in a list: got <built-in function len> alone.",
        ),
        (
            lambda: online.stages([len], where=[True]),
            TypeError,
            "where must be a function, from a microbatch to its mask: got list.",
        ),
        (lambda: online.stages([first], epsilon=-1), ValueError, "epsilon must be finite and >= 0"),
        (lambda: online.stages([first])(None, []), ValueError, "one at least: got none"),
        (
            lambda: online.stages([first, last])(None, jnp.ones((0, 4, 3))),
            ValueError,
            "one at least: got none",
        ),
        (
            lambda: online.stages([lambda p, h, x: x, last])(None, [jnp.ones(3, int)]),
            TypeError,
            "what a stage before a norm returns",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
