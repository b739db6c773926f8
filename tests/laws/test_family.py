"""Test what users of the family of norms got wrong, or it did: numbers first, then words."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import jaxnorm as jn
from jaxnorm import linen, nnx

X = jnp.array([[3.0, -3.0, 3.0, -3.0]])
P = {"a": {"kernel": jnp.ones((2, 2))}}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_operation_rounded_without_an_epsilon_or_with_a_traced_one(dtype):
    x, unit = X.astype(dtype), [[1.0, -1.0, 1.0, -1.0]]
    norm = partial(jn.rms_norm, rounding="input")
    assert norm(x, epsilon=0.0).tolist() == unit
    assert jax.jit(lambda e: norm(x, epsilon=e))(1e-6).tolist() == unit
    layer = partial(jn.layer_norm, rounding="input")
    assert layer(x + 16, epsilon=0.0).tolist() == unit
    assert jax.jit(lambda e: layer(x + 16, epsilon=e))(1e-6).tolist() == unit
    assert layer(jnp.full((1, 4), 3.25, dtype), epsilon=0.0).tolist() == [[0.0] * 4]
    open_gate = jnp.full_like(x, 20)
    gated = jn.gated_rms_norm(
        x, open_gate, gate_first=False, activation="sigmoid", epsilon=0.0, rounding="input"
    )
    assert gated.tolist() == unit
    first = jn.gated_rms_norm(x, open_gate, gate_first=True, epsilon=0.0, rounding="input")
    assert first.tolist() == unit


def test_squares_beyond_the_range_give_what_the_formula_gives():
    x = jnp.array([[300.0, 100.0]], jnp.float16)
    assert jn.rms_norm(x, rounding="input").tolist() == [[0.0, 0.0]]


def test_a_constant_channel_without_an_epsilon_is_0():
    for value in (3.0, 5.0, 7.0):
        y, _ = jn.evonorm_b0(jnp.full((2, 2, 1), value), jnp.zeros(1), epsilon=0.0)
        assert y.tolist() == [[[0.0]] * 2] * 2


def test_running_statistics_of_float32_correct_float64():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x = jnp.array([[1.0], [3.0], [7.0]])
        running = jn.Moments(jnp.ones(1, "f4"), jnp.full(1, 0.1, "f4"), jnp.full(1, 1.7, "f4"))
        y, _ = jn.batch_renorm(x, running)
        np.testing.assert_allclose(y, jn.normalize(x, running, epsilon=1e-3), rtol=1e-14)


def test_lengths_of_any_number_as_order():
    for order in (np.float32("inf"), jnp.asarray(jnp.inf), jnp.inf):
        assert jn.unit_norm(X, ord=order).tolist() == [[1.0, -1.0, 1.0, -1.0]]
    assert jn.scale_norm(X, 6).tolist() == [[3.0, -3.0, 3.0, -3.0]]
    assert jn.dynamic_tanh(X, 0).tolist() == [[0.0, 0.0, 0.0, 0.0]]


ALIKE = {"a/b": P["a"], "a": {"b": P["a"]}}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: nnx.BatchRenorm(4, r_max=0.5, rngs=flax_nnx.Rngs(0)),
            ValueError,
            "r_max must be 1 or more",
        ),
        (
            lambda: linen.BatchRenorm(True, d_max=-1.0).init(jax.random.key(0), X),
            ValueError,
            "d_max must be finite and >= 0: got -1",
        ),
        (
            lambda: nnx.BatchRenorm(4, warmup_steps=-1, rngs=flax_nnx.Rngs(0)),
            ValueError,
            "warmup_steps must be an integer of at least 0: got -1.",
        ),
        (
            lambda: linen.KerasBatchRenorm(True, renorm_momentum=2.0).init(jax.random.key(0), X),
            ValueError,
            "renorm_momentum must",
        ),
        (
            lambda: nnx.KerasBatchRenorm(4, renorm_clipping={"r_max": 3}, rngs=flax_nnx.Rngs(0)),
            ValueError,
            "renorm_clipping must have the keys rmax, rmin, dmax",
        ),
        (lambda: jn.map_kernels(jnp.sin, ALIKE), ValueError, "two are at 'a/b/kernel'"),
        (lambda: jn.map_kernels(P, jnp.sin), TypeError, "fn must be a function of a kernel"),
        (lambda: jn.map_kernels(jn.weight_norm, P, X), TypeError, "by_path must be dicts"),
        (
            lambda: jn.unit_norm(X, ord=1, batch_invariant=True),
            ValueError,
            "batch_invariant=True must have ord=2: got 1.0",
        ),
        (lambda: jn.unit_norm(X, ord=-1), ValueError, "ord must be at least 1, or infinity: got"),
        (
            lambda: jax.jit(lambda order: jn.unit_norm(X, ord=order))(3.0),
            TypeError,
            "ord must be a static number",
        ),
        (lambda: jn.scale_norm(X, None), TypeError, "scale must be one number: got None"),
        (lambda: jn.dynamic_tanh(X, None), TypeError, "alpha must"),
        (
            lambda: linen.AdaLayerNorm().init(jax.random.key(0), X, jnp.array([0])),
            TypeError,
            "condition must be vectors of floats: got int32 of shape (1,)",
        ),
        (
            lambda: nnx.FiLM(4, 3, rngs=flax_nnx.Rngs(0))(X, jnp.array([[0, 1, 2]])),
            TypeError,
            "Make vectors of labels by an embedding.",
        ),
    ],
)
def test_wrong_arguments(call, error, said):
    with pytest.raises(error, match=re.escape(said)):
        call()
