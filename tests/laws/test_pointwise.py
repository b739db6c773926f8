"""Test the bounded functions that take the place of norms."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.nnx import Rngs

import jaxnorm as jn
from jaxnorm import linen, nnx

FUNCTIONS = {
    "tanh": (np.tanh, lambda u: 1 - np.tanh(u) ** 2),
    "erf": (np.vectorize(math.erf), lambda u: 2 / np.sqrt(np.pi) * np.exp(-(u**2))),
}
KINDS = pytest.mark.parametrize("name", FUNCTIONS)
ALPHA, SHIFT = 0.7, -0.3


def drawn(rng, dtype="float32", shape=(4, 5, 6)):
    """x, scale, bias and the gradient of the output."""
    x, dy = rng.normal(0, 3, (2, *shape))
    scale, bias = rng.uniform(0.5, 1.5, (2, shape[-1]))
    return [jnp.asarray(a, dtype) for a in (x, scale, bias, dy)]


def call(name, x, alpha, shift, **options):
    given = (alpha,) if name == "tanh" else (alpha, shift)
    return getattr(jn, f"dynamic_{name}")(x, *given, **options)


def truth(name, x, alpha, shift, scale, bias, dy, where):
    """The output, and the gradients of x, alpha, shift, scale and bias, in float64."""
    x, alpha, shift, scale, bias, dy = (
        np.asarray(a, np.float64) for a in (x, alpha, shift, scale, bias, dy)
    )
    counts = np.broadcast_to(where, x.shape) > 0
    x, dy = np.where(counts, x, 0), np.where(counts, dy, 0)
    u = alpha * x + (shift if name == "erf" else 0)
    function, slope = FUNCTIONS[name]
    du = dy * scale * slope(u)
    y = np.where(counts, function(u) * scale + bias, 0)
    rows = lambda a: a.sum((0, 1))
    of = lambda a, like: a.sum() if like.ndim == 0 else rows(a)
    return y, du * alpha, of(du * x, alpha), of(du, shift), rows(dy * function(u)), rows(dy)


@KINDS
@pytest.mark.parametrize("per_feature", [False, True], ids=["one number", "of features"])
def test_output_and_gradients_with_nan_under_a_mask(per_feature, name, rng):
    x, scale, bias, dy = drawn(rng)
    alpha, shift = (jnp.full(6 if per_feature else (), a) for a in (ALPHA, SHIFT))
    where = rng.random((5, 1)) < 0.7
    dirty = jnp.where(where[None], x, jnp.nan)
    given = (dirty, alpha, shift, scale, bias)
    y, vjp = jax.vjp(
        lambda x, a, s, scale, bias: call(
            name, x, a, s, scale=scale, bias=bias, where=where[None] * 2.0
        ),
        *given,
    )
    found = y, *vjp(dy)
    true = truth(name, x, *given[1:], dy, where)
    for at, (a, b) in enumerate(zip(found, true, strict=True)):
        if at == 3 and name == "tanh":  # there is no shift
            assert np.all(a == 0)
            continue
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    assert np.all(np.asarray(found[1])[:, ~where[:, 0]] == 0)


@KINDS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype, name, rng):
    x, scale, bias, _ = drawn(rng, dtype, (64, 96))
    y = call(name, x, ALPHA, SHIFT, scale=scale, bias=bias)
    assert y.dtype == dtype
    u = ALPHA * np.asarray(x, np.float64) + (SHIFT if name == "erf" else 0)
    true = FUNCTIONS[name][0](u) * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    spacing = np.spacing(np.abs(true.astype(kind))).astype(np.float64)
    assert (np.abs(np.asarray(y, np.float64) - true) <= 0.501 * spacing + 1e-6).all()
    wide = call(name, x, ALPHA, SHIFT, scale=scale, bias=bias, dtype=jnp.float32)
    np.testing.assert_allclose(wide, true, rtol=1e-6, atol=1e-6)


@KINDS
def test_large_elements_saturate(name):
    x = jnp.array([3e38, -3e38, jnp.inf, 60.0])
    y, dx = jax.vmap(jax.value_and_grad(lambda x: call(name, x[None], 2.0, 0.5)[0]))(x)
    np.testing.assert_array_equal(y, [1, -1, 1, 1])
    assert not dx.any()


@KINDS
def test_other_axes(name, rng):
    x, *_ = drawn(rng)
    scale = jnp.arange(20.0).reshape(4, 5)
    found = call(name, x, ALPHA, SHIFT, scale=scale, feature_axes=(1, 0))
    true = call(name, x, ALPHA, SHIFT) * scale[..., None]
    np.testing.assert_allclose(found, true, rtol=1e-6)
    of_examples = jnp.arange(4.0).reshape(4, 1, 1) + jnp.ones((1, 1, 6))
    found = call(name, x, of_examples, SHIFT)
    np.testing.assert_allclose(found[2], call(name, x[2], 3.0, SHIFT), rtol=1e-6)


@KINDS
def test_transforms(name, rng):
    x, scale, bias, _ = drawn(rng)
    f = lambda x, a: call(name, x, a, SHIFT, scale=scale, bias=bias)
    y, dy = jax.jvp(f, (x, jnp.asarray(ALPHA)), (jnp.cos(x), jnp.asarray(0.5)))
    numbers = (np.asarray(a, np.float64) for a in (x, scale, bias))
    wide, s, b = numbers
    u = ALPHA * wide + (SHIFT if name == "erf" else 0)
    slope = FUNCTIONS[name][1](u) * s
    np.testing.assert_allclose(y, FUNCTIONS[name][0](u) * s + b, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        dy, slope * (ALPHA * np.cos(wide) + 0.5 * wide), rtol=2e-5, atol=2e-5
    )
    np.testing.assert_array_equal(jax.jit(f)(x, ALPHA), y)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, ALPHA), y)
    again = jax.jit(jax.grad(lambda x: (jax.checkpoint(f)(x, ALPHA) ** 2).sum()))(x)
    np.testing.assert_allclose(again, 2 * np.asarray(y) * slope * ALPHA, rtol=2e-4, atol=2e-5)


@KINDS
@pytest.mark.usefixtures("x64")
def test_float64(name, rng):
    x, *_ = drawn(rng, "float64")
    y = call(name, x, np.float64(ALPHA), np.float64(SHIFT))
    u = ALPHA * np.asarray(x) + (SHIFT if name == "erf" else 0)
    np.testing.assert_allclose(y, FUNCTIONS[name][0](u), rtol=1e-14)


@KINDS
def test_modules_start_as_the_papers_say(name, rng):
    title = f"Dynamic{name.title()}"
    x, *_ = drawn(rng)
    params = getattr(linen, title)().init(jax.random.key(0), x)["params"]
    shapes = {"alpha": (1,), "scale": (6,), "bias": (6,)} | (
        {"shift": (1,)} if name == "erf" else {}
    )
    assert {key: leaf.shape for key, leaf in params.items()} == shapes
    starts = {"alpha": 0.5, "scale": 1, "bias": 0, "shift": 0}
    twin = getattr(nnx, title)(6, rngs=Rngs(0))
    for key, leaf in params.items():
        assert np.all(leaf == starts[key])
        np.testing.assert_array_equal(getattr(twin, key)[...], leaf)
    y = getattr(linen, title)(use_scale=False, use_bias=False, dtype="bfloat16").apply(
        {"params": {key: params[key] for key in ("alpha", "shift") if key in params}}, x
    )
    np.testing.assert_array_equal(y, call(name, x, 0.5, 0.0, dtype="bfloat16"))
    several = getattr(nnx, title)(30, feature_axes=(1, 2), rngs=Rngs(0))
    np.testing.assert_array_equal(several(x), call(name, x, 0.5, 0.0))
    with pytest.raises(ValueError, match=f"x must have the features that {title} was made for, 6"):
        twin(x[..., :4])


@pytest.mark.parametrize("name", ["DynamicTanh", "Dynamic_erf"])
def test_values_are_those_of_the_papers_code(name, rng):
    torch = pytest.importorskip("torch")
    x, scale, bias, _ = drawn(rng)
    as_tensor = lambda a: torch.tensor(np.asarray(a))
    u = torch.tensor([ALPHA]) * as_tensor(x)  # alpha and shift have the shape (1,)
    z = torch.tanh(u) if name == "DynamicTanh" else torch.erf(u + torch.tensor([SHIFT]))
    kind = "tanh" if name == "DynamicTanh" else "erf"
    found = call(kind, x, jnp.array([ALPHA]), jnp.array([SHIFT]), scale=scale, bias=bias)
    np.testing.assert_allclose(
        found, (z * as_tensor(scale) + as_tensor(bias)).numpy(), rtol=1e-6, atol=1e-6
    )


X = np.ones((2, 6), np.float32)


@pytest.mark.parametrize(
    ("x", "alpha", "options", "error", "said"),
    [
        (X.astype(int), 0.5, {}, TypeError, "x must be floating point: got int"),
        (X + 0j, 0.5, {}, TypeError, "x must be real: got complex64."),
        (X, np.ones(1, int), {}, TypeError, "alpha must be floating point: got int"),
        (X, X[0, :3], {}, ValueError, "alpha must have the shape of the feature axes, (6,)"),
        (X, 0.5, {"scale": X[0, :3]}, ValueError, "scale must have the shape of the feature axes"),
        (X, 0.5, {"where": X[:, :5]}, ValueError, "where must broadcast against x without"),
        (X, 0.5, {"where": -X}, ValueError, "must be finite and >= 0: found -1.0."),
        (X, 0.5, {"feature_axes": 2}, ValueError, "feature_axes must lie in [-2, 2)"),
        (X, 0.5, {"dtype": int}, TypeError, "dtype, that of the output, must be floating point"),
        (X, 0.5, {"gamma": X[0]}, TypeError, "Did you mean scale?"),
    ],
)
@KINDS
def test_wrong_arguments(x, alpha, options, error, said, name):
    norm = partial(getattr(jn, f"dynamic_{name}"), x, alpha)
    with pytest.raises(error, match=re.escape(said)):
        norm(**options)
