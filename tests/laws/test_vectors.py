"""Test unit norm and scale norm against NumPy, PyTorch and Keras. The laws run on unit norm too."""

import math
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST
from flax.nnx import Rngs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from jaxnorm import linen, nnx

ORDERS = [1, 2, 3, math.inf]
OTHERS = [1, 3, math.inf]  # the laws of all norms run on order 2


def length(x, ord, axes=-1):
    """In float64, of the largest element as the unit."""
    x = np.abs(np.asarray(x, np.float64))
    unit = x.max(axes, keepdims=True, initial=0)
    if ord == math.inf:
        return unit
    return unit * ((x / np.where(unit, unit, 1)) ** ord).sum(axes, keepdims=True) ** (1 / ord)


def drawn(rng):
    """Vectors of several sizes, one shorter than epsilon and one of zeros."""
    x = rng.standard_normal((6, 33)) * np.array([1, 1e-14, 0, 1e-3, 1e30, 1e-30])[:, None]
    return x.astype(np.float32)


@pytest.mark.parametrize("ord", ORDERS)
def test_of_any_size(ord, rng):
    x, epsilon = drawn(rng), 1e-13
    truth = x / np.maximum(length(x, ord), epsilon)
    for where in (None, np.ones((6, 33), bool)):
        y = jn.unit_norm(x, ord=ord, epsilon=epsilon, where=where)
        assert (np.abs(y - truth) <= 4e-7 * np.abs(truth).max(1, keepdims=True)).all()
    assert jn.unit_norm(x, ord=ord, dtype="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("ord", ORDERS)
def test_largest_numbers_and_half_precision(ord):
    for dtype, largest in (("float32", 3e38), ("bfloat16", 3e38)):
        x = jnp.full((1, 16), largest, dtype)
        one = 1 if ord == math.inf else 16 ** (-1 / ord)
        np.testing.assert_allclose(np.float32(jn.unit_norm(x, ord=ord)), one, rtol=4e-3)


@pytest.mark.parametrize("ord", OTHERS)
def test_hidden_elements_are_as_if_they_were_not_there(ord, rng):
    """Even NaN, under a mask and under weights; these count an element as often as they say."""
    x, dy = rng.standard_normal((2, 4, 12)).astype(np.float32)
    where = np.arange(12) % 3 != 1
    hidden = np.where(where, x, np.nan)
    norm = partial(jn.unit_norm, ord=ord)
    truth, back = jax.vjp(norm, x[:, where])
    y, vjp = jax.vjp(partial(norm, where=where), hidden)
    np.testing.assert_allclose(y[:, where], truth, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(vjp(dy)[0][:, where], back(dy[:, where])[0], atol=1e-6)
    assert not np.any(y[:, ~where])
    assert not np.any(vjp(dy)[0][:, ~where])
    twice = norm(hidden, where=2 * where.astype(np.float32))[:, where]
    np.testing.assert_allclose(twice, truth * 2 ** (-1 / ord), rtol=1e-6)


@pytest.mark.parametrize("ord", OTHERS)
def test_empty_and_zero_vectors_have_finite_gradients(ord):
    norm = partial(jn.unit_norm, ord=ord)
    hidden = jnp.full((2, 5), jnp.nan)
    for x, where in ((jnp.zeros((2, 5)), None), (hidden, np.zeros(5, bool))):
        y, vjp = jax.vjp(partial(norm, where=where, epsilon=0.0), x)
        assert not np.any(y)
        assert np.isfinite(vjp(jnp.ones_like(y))[0]).all()
    assert norm(jnp.ones((2, 0))).shape == (2, 0)
    x = jnp.array([[1.0, jnp.nan], [1.0, 2.0]])
    assert np.isnan(norm(x)).tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("ord", [3])
def test_derivatives_of_other_orders(ord, rng, x64):
    """The slope along a direction is a difference, in both modes, and for a traced epsilon."""
    x, direction, weights = rng.uniform(0.5, 2, (3, 3, 5))

    def loss(x, epsilon=1e-12):
        return (jn.unit_norm(x, ord=ord, epsilon=epsilon) * weights).sum()

    step = 1e-6 * direction
    slope = (loss(x + step) - loss(x - step)) / 2e-6
    gradient = jax.jit(jax.grad(loss))(x, 1e-12)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(loss, (x,), (direction,))[1], slope, rtol=1e-6)
    by_rows = jax.vmap(jax.grad(lambda x, w: (jn.unit_norm(x, ord=ord) * w).sum()))(x, weights)
    np.testing.assert_allclose(by_rows, gradient, rtol=1e-9)
    np.testing.assert_allclose(loss(x, 100.0), (x / 100 * weights).sum(), rtol=1e-9)


@pytest.mark.parametrize("ord", [2, 3, math.inf])
def test_vectors_may_lie_on_several_devices(ord, rng):
    x, dy = rng.standard_normal((2, 4, 16)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("d",), devices=HOST[:2], axis_types=(AxisType.Auto,))
    norm = jax.shard_map(
        partial(jn.unit_norm, ord=ord, axis_name="d"),
        mesh=mesh,
        in_specs=P(None, "d"),
        out_specs=P(None, "d"),
    )
    both = jax.jit(lambda norm, x: (y := jax.vjp(norm, x))[0:1] + y[1](dy), static_argnums=0)
    for found, truth in zip(both(norm, x), both(partial(jn.unit_norm, ord=ord), x), strict=True):
        np.testing.assert_allclose(found, truth, atol=1e-6)


def test_scale_and_bias_of_other_orders():
    x, scale, bias = jnp.array([[1.0, 3.0]]), jnp.array([2.0, 4.0]), jnp.array([1.0, -1.0])
    np.testing.assert_allclose(jn.unit_norm(x, ord=1, scale=scale, bias=bias), [[1.5, 2.0]])
    np.testing.assert_allclose(jn.unit_norm(x.T, ord=1, axes="[c] n"), [[0.25], [0.75]])


def test_scale_norm_is_unit_norm_times_a_number(rng):
    x = rng.standard_normal((4, 5, 16)).astype(np.float32)
    for scale in (np.full(1, 3, np.float32), jnp.full((), 3, jnp.bfloat16)):
        y, vjp = jax.vjp(jn.scale_norm, jnp.asarray(x), jnp.asarray(scale))
        np.testing.assert_allclose(y, 3 * x / length(x, 2), rtol=1e-6)
        dx, dscale = vjp(jnp.asarray(x))
        np.testing.assert_allclose(dx, np.zeros_like(x), atol=2e-6)
        bound = 1e-6 if dscale.dtype == jnp.float32 else 4e-3
        np.testing.assert_allclose(np.float64(dscale).sum(), length(x, 2).sum(), rtol=bound)
    where = np.arange(16) < 9
    np.testing.assert_allclose(
        jn.scale_norm(x, 3.0, where=where)[..., :9], jn.scale_norm(x[..., :9], 3.0), rtol=1e-6
    )
    np.testing.assert_allclose(jn.scale_norm(x / 1e9, 3.0, epsilon=1.0), 3e-9 * x, rtol=1e-6)


def test_modules_start_as_the_papers_do(rng):
    x = jnp.asarray(rng.standard_normal((4, 16)), jnp.float32)
    y, variables = linen.ScaleNorm().init_with_output(jax.random.key(0), x)
    assert variables["params"]["scale"].shape == ()
    np.testing.assert_allclose((y**2).mean(-1), np.ones(4), rtol=1e-6)
    assert linen.UnitNorm().init(jax.random.key(0), x) == {}
    assert linen.UnitNorm(ord=1).apply({}, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    module = nnx.ScaleNorm(32, reduction_axes=[-2, -1], rngs=Rngs(0))
    np.testing.assert_allclose((module(x.reshape(2, 2, 16)) ** 2).mean((1, 2)), np.ones(2), 1e-6)


X = np.ones((2, 3), np.float32)
MISTAKES = [
    (lambda: jn.unit_norm(X, ord=0.5), ValueError, "ord must be at least 1, or infinity: got 0.5."),
    (lambda: jn.unit_norm(X, ord="fro"), TypeError, "ord must be a static number: got 'fro'."),
    (lambda: jn.unit_norm(X, ord=1, where=X[:, :2]), ValueError, "where has shape (2, 2)"),
    (lambda: jn.unit_norm(X, ord=1, scale=X[0, :2]), ValueError, "scale must have the shape"),
    (lambda: jn.unit_norm(X, ord=1, epsilon=-1.0), ValueError, "epsilon must be finite and >= 0"),
    (lambda: jn.unit_norm(X, ord=1, dtype=int), TypeError, "must be floating point: got int"),
    (
        lambda: jn.unit_norm(X, ord=1, implementation="native"),
        ValueError,
        "implementation='native' has no kernel for this norm.",
    ),
    (lambda: jn.unit_norm(X.astype(int)), TypeError, "x must be floating"),
    (
        lambda: jn.scale_norm(X, X[0]),
        ValueError,
        "scale must be one number: got shape (3,). Use unit_norm for a gain of each feature.",
    ),
    (
        lambda: nnx.ScaleNorm(4, rngs=Rngs(0))(X),
        ValueError,
        "x must have vectors of the 4 elements that ScaleNorm was made for: got 3 of an x of shape",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES)
def test_mistakes(call, kind, message):
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("ord", [*ORDERS, 1.5])
def test_pytorch(ord, rng):
    """torch.nn.functional.normalize, with its gradient, and ties of the largest."""
    torch = pytest.importorskip("torch")
    x, dy = drawn(rng), rng.standard_normal((6, 33)).astype(np.float32)
    x[4:] = np.round(x[0])  # with ties and zeros
    given = torch.tensor(x, requires_grad=True)
    theirs = torch.nn.functional.normalize(given, p=ord, dim=-1)
    theirs.backward(torch.tensor(dy))
    y, vjp = jax.vjp(partial(jn.unit_norm, ord=ord), x)
    np.testing.assert_allclose(y, theirs.detach().numpy(), atol=1e-6)
    dx, truth = np.asarray(vjp(dy)[0]), given.grad.numpy()
    assert (np.abs(dx - truth).max(1) <= 1e-5 * np.abs(truth).max(1)).all()


def test_keras(rng, monkeypatch):
    """UnitNormalization, but for its gradient at 0, which is NaN."""
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "jax"))
    keras = pytest.importorskip("keras")
    x = rng.standard_normal((4, 5, 16)).astype(np.float32)
    x[0, 0] *= 1e-14
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = np.asarray(keras.layers.UnitNormalization()(x))
        of_two = np.asarray(keras.layers.UnitNormalization(axis=[1, 2])(x))
    np.testing.assert_allclose(jn.unit_norm(x), theirs, atol=1e-6)
    np.testing.assert_allclose(jn.unit_norm(x, axes=(1, 2)), of_two, atol=1e-6)
