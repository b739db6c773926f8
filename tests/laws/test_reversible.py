"""Test that reversible instance norm is instance norm with constant statistics, and its inverse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import worst

import jaxnorm as jn

SHAPE = (3, 16, 5)
EPSILON = 1e-5


def drawn(rng, mean=0.0):
    return (mean + rng.standard_normal(SHAPE) * rng.uniform(0.3, 3, 5)).astype(np.float32)


@pytest.fixture
def params(rng):
    return {name: rng.uniform(0.5, 1.5, 5).astype(np.float32) for name in ("scale", "bias")}


def truth(x, scale, bias, where=None):
    """Return the output, mean and deviation in float64."""
    x, w = x.astype(np.float64), np.ones(x.shape) if where is None else where * 1.0
    average = lambda a: (w * a).sum(1, keepdims=True) / np.maximum(w.sum(1, keepdims=True), 1)
    mean = average(x)
    root = np.sqrt(average((x - mean) ** 2) + EPSILON)
    return np.where(w > 0, (x - mean) / root * scale + bias, 0), mean, root


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4, 1e6])
def test_the_inverse_returns_the_series(mean, params, rng):
    """To the last bits: a mean of one float32 number would be wrong by 0.03 at 1e6."""
    x = drawn(rng, mean)
    y, moments = jn.reversible_instance_norm(x, **params)
    assert worst(y, truth(x, **params)[0], 1) <= 5e-7
    back = jn.reverse_instance_norm(y, moments, **params)
    spacing = np.spacing(np.abs(x).max((1,), keepdims=True))
    assert (np.abs(np.asarray(back) - x) <= spacing + 2e-6).all()
    assert moments.mean.shape == (3, 1, 5)


def test_a_forecast_has_another_length(params, rng):
    x, forecast = drawn(rng, 20.0), rng.standard_normal((3, 4, 5)).astype(np.float32)
    _, mean, root = truth(x, **params)
    _, moments = jn.reversible_instance_norm(x, **params)
    scale, bias = (params[name].astype(np.float64) for name in ("scale", "bias"))
    exact = (forecast - bias) / (scale + EPSILON**2) * root + mean
    assert worst(jn.reverse_instance_norm(forecast, moments, **params), exact, 1) <= 5e-7
    zero = jn.reverse_instance_norm(forecast, moments, scale=0 * params["scale"])
    assert np.isfinite(zero).all()


def test_no_gradient_flows_through_the_statistics(params, rng):
    x, dy = drawn(rng), rng.standard_normal(SHAPE).astype(np.float32)
    norm = lambda x, **given: jn.reversible_instance_norm(x, **{**params, **given})
    dx, dscale, dbias = jax.grad(
        lambda x, scale, bias: (dy * norm(x, scale=scale, bias=bias)[0]).sum(), (0, 1, 2)
    )(x, params["scale"], params["bias"])
    _, mean, root = truth(x, **params)
    np.testing.assert_allclose(dx, dy * params["scale"] / root, rtol=1e-6)
    np.testing.assert_allclose(dscale, (dy * (x - mean) / root).sum((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(dbias, dy.sum((0, 1)), rtol=1e-5)
    of_moments = jax.grad(lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(norm(x)[1])))(x)
    assert (np.asarray(of_moments) == 0).all()
    # back and forth, each step of the series changes itself alone
    there = lambda x: jn.reverse_instance_norm(*norm(x), **params)
    np.testing.assert_allclose(jax.jvp(there, (x,), (dy,))[1], dy, rtol=1e-5, atol=1e-6)


def test_masked_steps_do_not_count(params, rng):
    x, where = drawn(rng, 1e4), rng.random((3, 16, 1)) < 0.6
    where[2] = False
    given = np.where(where, x, np.nan)
    full = np.broadcast_to(where, SHAPE)

    @jax.jit
    def both(x):
        y, moments = jn.reversible_instance_norm(x, where=where, **params)
        return y, jn.reverse_instance_norm(y, moments, where=where, **params)

    y, back = both(given)
    assert worst(y, truth(np.where(where, x, 0), **params, where=full)[0], 1) <= 5e-7
    np.testing.assert_allclose(back, np.where(where, x, 0), rtol=3e-7)
    for of in (0, 1):
        dx = jax.grad(lambda x, of=of: both(x)[of].sum())(given)
        assert np.isfinite(dx).all()
        assert (np.asarray(dx)[~full] == 0).all()
    _, moments = jn.reversible_instance_norm(given, where=where)
    hidden = jn.reverse_instance_norm(np.full(SHAPE, np.nan, np.float32), moments, where=~full[:1])
    assert not np.isnan(np.asarray(hidden)[:, full[0, :, 0]]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype, params, rng):
    x = jnp.asarray(drawn(rng, 30.0), dtype)
    y, moments = jn.reversible_instance_norm(x, **params)
    back = jn.reverse_instance_norm(y, moments, **params)
    assert (y.dtype, moments.mean.dtype, back.dtype) == (dtype, "float32", dtype)
    exact, mean, root = truth(np.asarray(x).astype(np.float64), **params)
    eps = float(jnp.finfo(dtype).eps)
    assert (np.abs(np.asarray(y) - exact) <= 0.51 * eps * np.maximum(np.abs(exact), 0.1)).all()
    wide = jn.reversible_instance_norm(x, dtype="float32", **params)[0]
    assert worst(wide, exact, 1) <= 5e-7
    again = (np.asarray(y).astype(np.float64) - params["bias"]) / params["scale"] * root + mean
    assert (np.abs(np.asarray(back) - again) <= 0.51 * eps * np.abs(again)).all()


def test_axes_say_what_time_is(params, rng):
    x = drawn(rng)
    y, _ = jn.reversible_instance_norm(x, **params)
    for move, axes in (((1, 2), -1), ((0, 0), "b [t] c")):
        moved = np.swapaxes(x, *move)
        found, own = jn.reversible_instance_norm(moved, axes=axes, **params)
        np.testing.assert_allclose(np.swapaxes(found, *move), y, atol=1e-6)
        back = jn.reverse_instance_norm(found, own, axes=axes, **params)
        np.testing.assert_allclose(back, moved, atol=1e-5)
    one = jax.vmap(lambda x: jn.reversible_instance_norm(x, axes=0)[0])(x)
    np.testing.assert_allclose(one, jn.reversible_instance_norm(x)[0], atol=1e-6)
    image = x.reshape(3, 4, 4, 5)
    both = jn.reversible_instance_norm(image, axes=(1, 2), **params)[0]
    np.testing.assert_allclose(both.reshape(SHAPE), y, atol=1e-6)


X, M = np.ones(SHAPE, np.float32), jn.moments(np.ones(SHAPE, np.float32), 1)
ERRORS = [
    (lambda: jn.reversible_instance_norm(X.astype(int)), TypeError, "x must be floating point"),
    (lambda: jn.reversible_instance_norm(X, axes=3), ValueError, "axes must lie in [-3, 3)"),
    (
        lambda: jn.reversible_instance_norm(X, scale=X[0, 0, :2]),
        ValueError,
        "scale must have the shape of the feature axes, (5,)",
    ),
    (lambda: jn.reverse_instance_norm(X, X), TypeError, "moments must be Moments: got ndarray"),
    (
        lambda: jn.reverse_instance_norm(X[:2], M),
        ValueError,
        "moments must broadcast against x without growing it",
    ),
    (lambda: jn.reverse_instance_norm(X.astype(int), M), TypeError, "x must be floating point"),
    (lambda: jn.reverse_instance_norm(X, M, eps=1), TypeError, "Did you mean epsilon?"),
    (
        lambda: jn.reverse_instance_norm(X, M, where=X[0, 0, :2] > 0),
        ValueError,
        "where must broadcast against x",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[row[2] for row in ERRORS])
def test_what_does_not_fit_is_said_in_words(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
