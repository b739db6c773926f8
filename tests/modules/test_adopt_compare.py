"""Test what the comparison of Flax's norms and ours says, against numbers that are known."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as fnn
from flax import nnx as fnx

import jaxnorm as jn
from jaxnorm.flax_common.float64 import coarsest, in_float64

X = (np.random.default_rng(0).standard_normal((4, 8)) + 300).astype(np.float32)
pytestmark = pytest.mark.usefixtures("ordinary_promotion")


class Model(fnn.Module):
    dtype: object = None

    @fnn.compact
    def __call__(self, x, train=True, shift=None):
        x = fnn.BatchNorm(use_running_average=not train, dtype=self.dtype, name="batch")(x)
        x = fnn.Dropout(0.5, deterministic=not train)(x) + (0 if shift is None else shift)
        return fnn.LayerNorm(name="layer")(x + 300)


class NnxModel(fnx.Module):
    def __init__(self, rngs):
        self.batch, self.layer = fnx.BatchNorm(8, rngs=rngs), fnx.LayerNorm(8, rngs=rngs)
        self.drop = fnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.drop(self.batch(x)) + 300)


def truth(x, epsilon, axis):
    x = x.astype(np.float64)
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)


@pytest.fixture(scope="module", name="norm")
def _norm():
    return jn.linen.compare(fnn.LayerNorm(), None, X, rounds=3)


def test_errors_are_distances_from_float64(norm):
    true = truth(X, 1e-6, -1)
    y, _ = jax.jit(fnn.LayerNorm().init_with_output)(jax.random.key(0), X)
    outputs, _, gradient = norm.differences
    assert [found.part for found in norm.differences] == [
        "outputs",
        "gradients of parameters",
        "gradients of inputs",
    ]
    assert outputs.largest == pytest.approx(np.abs(true).max())
    assert outputs.flax_error == pytest.approx(np.abs(y - true).max() / np.abs(true).max(), rel=0.1)
    assert outputs.our_error < 2e-7 < 1e-4 < outputs.flax_error
    assert outputs.between == pytest.approx(outputs.flax_error, rel=0.01)
    assert gradient.our_error < 1e-6


def test_a_difference_is_agreed_to_where_ours_is_nearer_to_float64(norm):
    assert norm.agrees(1e-9)  # ours is nearer
    worse = [replace(found, our_error=2 * found.flax_error) for found in norm.differences]
    assert not replace(norm, differences=tuple(worse)).agrees(1e-9)
    assert not replace(norm, differences=tuple(worse)).agrees()
    assert replace(norm, differences=tuple(worse)).agrees(0.1)
    unknown = [replace(found, our_error=None, flax_error=None) for found in norm.differences]
    assert not replace(norm, differences=tuple(unknown)).agrees(1e-9)
    assert norm.tolerance == pytest.approx(2**-11.5)


def test_it_prints_itself_and_is_json(norm):
    shown, read = repr(norm), json.loads(norm.to_json())
    assert max(map(len, shown.splitlines())) <= 100
    assert all(word in shown for word in ("flax - float64", "residuals, MB", "LayerNorm", "of 3 "))
    assert read["norms"][0]["shape"] == [4, 8]
    assert read["norms"][0]["implementation"] in ("native", "xla")
    assert read["differences"][0]["part"] == "outputs"
    assert read["versions"]["jax"] == jax.__version__
    infinite = replace(norm, differences=(replace(norm.differences[0], between=np.inf),))
    assert json.loads(infinite.to_json())["differences"][0]["between"] is None
    low, median, high = norm.ours.step_seconds
    assert 0 < low <= median <= high


def test_residuals_do_not_count_arguments():
    """Statistics of each row, and for Flax arrays of the size of x."""
    x = np.ones((64, 1024), np.float32)
    norm = fnn.LayerNorm(use_scale=False, use_bias=False)
    found = jn.linen.compare(norm, {}, x, rounds=1, float64=False)
    assert found.ours.residual_bytes <= 64 * 4 * 4 < x.nbytes <= found.flax.residual_bytes
    assert found.differences[0].our_error is None


def test_the_same_model_in_both_families_and_modes():
    rngs = {"dropout": jax.random.key(1)}
    trained = jn.linen.compare(Model(), None, X, rngs=rngs, rounds=1)
    assert [found.part for found in trained.differences] == [
        "outputs",
        "state",
        "gradients of parameters",
        "gradients of inputs",
    ]
    # dropout drops the same elements in float64
    assert all(found.our_error < 3e-4 for found in trained.differences)
    assert [row.path for row in trained.norms] == ["batch", "layer"]
    assert all(row.implementation for row in trained.norms)
    model = NnxModel(fnx.Rngs(0))
    before = fnx.clone(model)
    nnx = jn.nnx.compare(model, X, rounds=1)
    assert [row.path for row in nnx.norms] == ["batch", "layer"]
    assert nnx.differences[0].our_error < 3e-4
    assert nnx.differences[1].part == "state"
    assert fnx.graphdef(model) == fnx.graphdef(before)
    jax.tree.map(np.testing.assert_array_equal, model.batch.mean[...], before.batch.mean[...])


def test_options_reach_the_model():
    found = jn.linen.compare(
        Model(jnp.bfloat16),
        None,
        X,
        train=False,
        shift=np.ones(8, np.float32),
        loss=lambda y: y[0].sum(),
        without="layer",
        rounds=1,
        float64=False,
    )
    assert [(row.path, row.implementation, row.why) for row in found.norms] == [
        ("batch", "", "by running statistics: nothing is reduced"),
        ("layer", "", "stays Flax's"),
    ]
    assert found.coarsest == "bfloat16"
    assert found.tolerance == pytest.approx(2**-3.5)
    assert {part.part for part in found.differences} >= {"gradients of inputs"}


def test_wrong_arguments_are_refused():
    for rounds, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        said = rf"rounds must be a positive integer: got {rounds}"
        with pytest.raises(error, match=said):
            jn.linen.compare(Refusing(), None, X, rounds=rounds)
        with pytest.raises(error, match=said):
            jn.nnx.compare(NnxRefusing(), X, rounds=rounds)
    with pytest.raises(TypeError, match=r"must be a module of flax.linen: got NnxModel\. For nnx"):
        jn.linen.compare(NnxModel(fnx.Rngs(0)), {}, X)
    with pytest.raises(TypeError, match=r"must be a module of flax.nnx: got Model\. For linen"):
        jn.nnx.compare(Model(), X)
    with pytest.raises(ValueError, match="without must name norms"):
        jn.nnx.compare(NnxModel(fnx.Rngs(0)), X, without="head")


class Refusing(fnn.Module):
    """It must not run."""

    def __call__(self, x):
        raise AssertionError


class NnxRefusing(fnx.Module):
    def __call__(self, x):
        raise AssertionError


def of_linen(*inputs, **keywords):
    return lambda: jn.linen.compare(Model(), None, *inputs, rounds=1, **keywords)


def of_nnx(*inputs, **keywords):
    return lambda: jn.nnx.compare(NnxModel(fnx.Rngs(0)), *inputs, rounds=1, **keywords)


class Wrong(fnn.Module):
    """Its own call of a layer is wrong, not the call of the model."""

    @fnn.compact
    def __call__(self, x):
        return fnn.LayerNorm()(x, x, x)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            of_linen(),
            TypeError,
            r"inputs must fit Model\.__call__\(x, train=True, shift=None\): got 0 by position, "
            r"missing a required argument: 'x'\.$",
        ),
        (of_linen(X, True, None, X), TypeError, "got 4 by position, too many positional arguments"),
        (of_linen(X, trian=True), TypeError, r"1 by position and trian by keyword, .*mean train\?"),
        (of_linen(X, round=3), TypeError, r"keyword argument 'round'\. Did you mean rounds\?"),
        (
            lambda: jn.linen.compare(Model(), {"params": {}}, X, True, None, X),
            TypeError,
            "inputs must fit Model",
        ),
        (
            lambda: jn.linen.compare(Model(), X),
            TypeError,
            "variables must be what init returns, .* got ndarray",
        ),
        (of_nnx(), TypeError, r"inputs must fit NnxModel\.__call__\(x\): got 0 by position"),
        (of_nnx(X, X), TypeError, "got 2 by position, too many"),
        (of_nnx(X, method=lambda model, x, y: x), TypeError, "missing a required argument: 'y'"),
        (
            lambda: jn.linen.compare(Wrong(), None, X),
            TypeError,
            r"^inputs and model .*: Wrong raises TypeError .*: LayerNorm\.__call__\(\) takes",
        ),
    ],
)
def test_inputs_that_the_model_does_not_take(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_float64_follows_loops_branches_and_random_bits():
    def function(x, key):
        low = x.astype(jnp.bfloat16)
        total, parts = jax.lax.scan(lambda c, x: (c + jnp.exp(x), c * x), low[0], low)
        total = jax.lax.while_loop(lambda c: c < 30, lambda c: c * 1.5, total)
        total = jax.lax.cond(total > 0, jnp.sqrt, jnp.negative, total)
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jax.jit(jax.checkpoint(lambda p: jnp.where(kept, p, 0)))(parts), total, kept

    x, key = np.array([0.1, 0.7, 0.3], np.float32), jax.random.key(3)
    traced = jax.make_jaxpr(function)(x, key)
    assert coarsest(traced) == jnp.bfloat16
    wide = x.astype(np.float64)
    sums = wide[0] + np.cumsum([0, *np.exp(wide)])
    total = sums[-1]
    while total < 30:
        total *= 1.5
    kept = np.asarray(function(x, key)[2])
    parts, root, same = in_float64(traced, [x, key])
    np.testing.assert_array_equal(same, kept)
    np.testing.assert_allclose(parts, np.where(kept, sums[:-1] * wide, 0), rtol=1e-14)
    np.testing.assert_allclose(root, np.sqrt(total), rtol=1e-14)


def test_what_float64_cannot_do_is_noted():
    def callback(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    class Host(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            y = fnn.LayerNorm()(x)
            return y + callback(jax.lax.stop_gradient(y).astype(jnp.float32))

    found = jn.linen.compare(Host(), None, X, rounds=1)
    assert found.differences[0].our_error is None
    assert "float64 was not computed" in found.notes[0]
    assert "float64 was not computed" in repr(found)


def test_float64_follows_the_gradient_of_an_embedding():
    """Rows that are read twice get the sum of both gradients."""
    ids, rows = jnp.array([2, 0, 2]), np.float32([[0.1], [0.2], [0.3]])
    traced = jax.make_jaxpr(jax.grad(lambda rows: (rows[ids] ** 3).sum()))(rows)
    (found,) = in_float64(traced, [rows])
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, 3 * np.float64([[1], [0], [2]]) * np.float64(rows) ** 2)
