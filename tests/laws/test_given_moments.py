"""Test normalizing by given Moments: constants of a program, arguments, and Moments of nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import Rngs

import jaxnorm as jn
from jaxnorm import linen, nnx, online

# A mean that is no float32 number: 1e7 + 0.5, and 101325.37 beside a deviation of 1.
PAIR = np.array([1e7, 1e7 + 1], np.float32)
PRESSURE = (101325.37 + np.random.default_rng(0).standard_normal(1000)).astype(np.float32)
IDS = np.arange(1000) % 2


def whole(x):
    return jn.moments(x, 0)


def of_segments(x):
    return jn.moments(x, "[n]", segments=IDS[: len(x)], num_segments=2)


def stream(x):
    return online.update(online.init(jnp.zeros(())), x)


def apply_segments(x, m):
    return jn.normalize(x, m, segments=IDS[: len(x)], axes="[n]")


WAYS = {  # statistics of x, and a function of x and these
    "normalize": (whole, jn.normalize),
    "blocks": (lambda x: jn.moments(x, "(g [n])", g=2), jn.normalize),
    "mask": (whole, lambda x, m: jn.normalize(x, m, where=x > 0)),
    "segments": (of_segments, apply_segments),
    "online": (stream, online.normalize),
    "vmap over x": (whole, lambda x, m: jax.vmap(jn.normalize, (0, None))(x[None], m)[0]),
    "vmap over the Moments": (
        whole,
        lambda x, m: jax.vmap(jn.normalize, (None, 0))(x, jax.tree.map(lambda a: a[None], m))[0],
    ),
    "scan": (
        whole,
        lambda x, m: jax.lax.scan(lambda c, x: (c, jn.normalize(x, m)), 0, x[None])[1][0],
    ),
    "checkpoint": (whole, lambda x, m: jax.checkpoint(jn.normalize)(x, m)),
    "scale's gradient": (
        whole,
        lambda x, m: jax.grad(lambda s: (jn.normalize(x, m, scale=s)[::7] ** 2).mean())(1.0),
    ),
    "back again": (stream, lambda x, m: online.denormalize(online.normalize(x, m), m)),
    "merge": (whole, lambda x, m: jn.merge(m, jn.moments(x + 1, 0)).low.mean),
    "merge by ids": (
        lambda x: jn.moments(x.reshape(-1, 2), "n [h]"),
        lambda x, m: m.merge("[n] h", segments=(x[::2] > 0).astype(int), num_segments=2).low.mean,
    ),
    "follow": (stream, lambda x, m: online.update(m, x + 1).low.mean),
}


@pytest.mark.parametrize("data", [PAIR, PRESSURE], ids=["pair", "pressure"])
@pytest.mark.parametrize("way", WAYS)
def test_constants_of_a_program_are_as_exact_as_arguments(way, data):
    """XLA adds two constants that are subtracted in turn, and loses the low part of the mean: 0 and
    2 for -1 and 1.
    """
    fit, apply = WAYS[way]
    x = jnp.asarray(data)
    given = fit(x)
    in_numpy = jax.tree.map(np.asarray, given)
    truth = apply(x, given)
    for found in (
        jax.jit(apply)(x, given),
        jax.jit(lambda x: apply(x, given))(x),
        jax.jit(lambda x: apply(x, in_numpy))(x),
    ):
        np.testing.assert_allclose(found, truth, rtol=4e-7, atol=4e-7)


def test_constants_give_the_numbers_of_float64():
    pair = whole(PAIR)
    assert jax.jit(lambda x: jn.normalize(x, pair, epsilon=0.0))(PAIR).tolist() == [-1.0, 1.0]
    exact = PRESSURE.astype(np.float64)
    truth = (exact - exact.mean()) / np.sqrt(exact.var() + 1e-5)
    given = whole(PRESSURE)
    np.testing.assert_allclose(
        jax.jit(lambda x: jn.normalize(x, given))(PRESSURE), truth, rtol=4e-7, atol=4e-7
    )
    half = PRESSURE.astype(jnp.bfloat16)
    truth = (half.astype(np.float64) - exact.mean()) / np.sqrt(exact.var() + 1e-5)
    found = jax.jit(lambda x: jn.normalize(x, given))(half)
    np.testing.assert_allclose(np.asarray(found, np.float64), truth, rtol=2**-8)


def test_evaluation_by_constants_is_that_by_arguments(rng):
    """Modules whose variables a program closes over."""
    x = (rng.standard_normal((64, 8)) + 1e4).astype(np.float32)
    norm = linen.BatchNorm(momentum=0.0)
    variables = norm.init(jax.random.key(0), x, use_running_average=False)
    variables |= norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])[1]
    evaluate = lambda variables, x: norm.apply(variables, x, use_running_average=True)
    np.testing.assert_allclose(
        jax.jit(partial(evaluate, variables))(x), evaluate(variables, x), rtol=4e-7, atol=4e-7
    )
    images = x.reshape(4, 4, 4, 8)
    running, logits = jn.moments(images, "[n h w] c"), np.array([0.3, 0.1, 0.2], np.float32)
    switch = lambda x, m: jn.switchable_norm(x, logits, logits, running=m)[0]
    np.testing.assert_allclose(
        jax.jit(lambda x: switch(x, running))(images), switch(images, running), rtol=2e-6, atol=2e-6
    )


NOTHING = {
    "an empty segment": (
        lambda x: jn.moments(x, "[n] c", segments=np.zeros(3, int), num_segments=2),
        True,
    ),
    "masked out": (lambda x: jn.moments(x, 0, where=np.zeros((3, 1), bool)), False),
    "weights of 0": (lambda x: jn.moments(x, 0, where=np.zeros((3, 1), np.float32)), False),
    "two that are empty": (lambda x: jn.merge(jn.moments(x[:0], 0), jn.moments(x[:0], 0)), False),
    "no rows": (lambda x: jn.moments(x[:0], 0), False),
    "by hand": (
        lambda x: jn.Moments(jnp.zeros((1, 1)), jnp.zeros((1, 2)), jnp.zeros((1, 2))),
        False,
    ),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"correction": 1}, {"epsilon_in": "std"}, {"epsilon_in": "max"}, {"epsilon": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("name", NOTHING)
def test_moments_of_nothing_give_0_and_gradient_0(name, options):
    """As standardize gives: not the data times 1 / sqrt(epsilon)."""
    fit, segments = NOTHING[name]
    x = jnp.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]])
    given = fit(x)
    more = {"segments": np.ones(3, int), "axes": "[n] c"} if segments else {}
    for run in (lambda f: f, jax.jit):
        y, pullback = jax.vjp(
            run(lambda x, s, b: jn.normalize(x, given, scale=s, bias=b, **options, **more)),
            x,
            jnp.ones(2),
            jnp.ones(2),
        )
        assert y.tolist() == [[1.0, 1.0]] * 3  # bias
        dx, dscale, dbias = pullback(jnp.ones((3, 2)))
        assert not np.any(dx)
        assert not np.any(dscale)
        assert dbias.tolist() == [3.0, 3.0]
    if not options:
        traced = jax.jit(lambda x, e: jn.normalize(x, given, epsilon=e, **more))(x, 1e-5)
        assert not np.any(traced)


def test_a_fresh_running_average_is_the_identity():
    x = jnp.array([[1.0, -2.0], [3.0, 4.0]])
    fresh = jn.Moments(jnp.zeros(()), jnp.zeros((1, 2)), jnp.ones((1, 2)))
    np.testing.assert_array_equal(jn.normalize(x, fresh, epsilon=0.0), x)
    np.testing.assert_array_equal(
        jax.jit(lambda x, e: jn.normalize(x, fresh, epsilon=e))(x, 0.0), x
    )
    for epsilon_in in ("var", "std", "max"):  # nothing was counted, so that no correction is known
        np.testing.assert_array_equal(
            jn.normalize(x, fresh, epsilon=0.0, correction=1, epsilon_in=epsilon_in), x
        )
    state = nnx.BatchNorm(2, use_running_average=True, epsilon=0.0, rngs=Rngs(0))
    np.testing.assert_array_equal(state(x), x)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, int])
def test_counts_beyond_32_bits_are_kept(kind):
    """JAX takes integers of 64 bits as 32: 2**33 + 3 would be 3, and 2**32 would be nothing."""
    large = jn.Moments(kind(2**33 + 3), np.float32(1.0), np.float32(2.0))
    both = jn.merge(large, large)
    assert int(both.count) + sum(int(word) for word in both.low.count) == 2**34 + 6
    assert float(jn.normalize(jnp.float32(3.0), large, correction=1, epsilon=0.0)) == pytest.approx(
        2 / 2**0.5, rel=1e-7
    )
    assert (
        int(
            jn.ema(
                large, jn.Moments(kind(2**32), np.float32(0.0), np.float32(1.0)), momentum=0.0
            ).count
        )
        == 2**32
    )
