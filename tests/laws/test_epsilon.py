"""Test epsilon_in="max": an epsilon that is the least root of a variance that divides."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Part, oracle, worst

import jaxnorm as jn

AT_LEAST = partial(jn.standardize, axes=1, epsilon_in="max")
IMPLEMENTATIONS = ["reference", "xla", "native"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("offset", [0, 1e4])
@pytest.mark.usefixtures("use")
def test_output_and_gradient_are_those_of_the_oracle(offset, centered, implementation, rng):
    """Of rows whose deviation is below epsilon, and above it."""
    x = (rng.standard_normal((6, 40)) * np.logspace(-1, 1, 6)[:, None] + offset).astype(np.float32)
    dy, where = rng.standard_normal((6, 40)).astype(np.float32), rng.random((6, 40)) < 0.7
    options = {"epsilon": 1.0, "centered": centered}
    for mask in (None, where, 2.0 * where)[: 1 if implementation == "native" else 3]:
        true = oracle(x, (Part((1,)),), epsilon_in="max", cotangent=dy, where=mask, **options)
        norm = lambda x, mask=mask: AT_LEAST(
            x, where=mask, implementation=implementation, **options
        )
        y, vjp = jax.vjp(norm, x)
        assert worst(y, true.y, 1) <= 4e-7
        assert worst(vjp(dy)[0], true.dx, 1) <= 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("use")
def test_where_both_are_equal_the_gradient_goes_to_the_deviation(implementation):
    """As torch.clamp has it: of [-1, 1], of deviation 1, nothing is left of dy."""
    x = jnp.array([[-1.0, 1.0]])
    norm = partial(AT_LEAST, epsilon=1.0, implementation=implementation)
    y, vjp = jax.vjp(norm, x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_allclose(vjp(jnp.array([[0.0, 1.0]]))[0], [[0.0, 0.0]], atol=1e-7)
    (below,) = jax.vjp(norm, x / 2)[1](jnp.array([[0.0, 1.0]]))
    np.testing.assert_array_equal(below, [[-0.5, 0.5]])


@pytest.mark.parametrize("epsilon_in", ["var", "std", "max"])
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-10, 1e20, 3e38])
def test_an_epsilon_far_below_the_data_changes_nothing(size, epsilon_in, rng):
    """Of elements whose squares leave the range of float32, too."""
    x = (rng.uniform(-1, 1, (3, 16)) * size).astype(np.float32)
    power = 2 if epsilon_in == "var" else 1
    norm = partial(jn.standardize, axes=1, epsilon_in=epsilon_in)
    exact = x.astype(np.float64)
    true = (exact - exact.mean(1, keepdims=True)) / exact.std(1, keepdims=True)
    y = norm(x, epsilon=(1e-9 * size) ** power, full_range=size > 1)
    np.testing.assert_allclose(y, true, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e10])
def test_an_epsilon_far_above_the_data_is_the_divisor(size, rng):
    x = (rng.uniform(-1, 1, (3, 16)) * size).astype(np.float32)
    epsilon = 1e6 * size
    y, vjp = jax.vjp(partial(AT_LEAST, epsilon=epsilon, centered=False), x)
    np.testing.assert_allclose(y, x.astype(np.float64) / epsilon, rtol=1e-6)
    np.testing.assert_allclose(vjp(jnp.ones_like(y))[0], np.full((3, 16), 1 / epsilon), rtol=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_a_traced_epsilon_equals_a_static_one(size, rng):
    x = jnp.asarray(rng.standard_normal((6, 8)) * np.logspace(-1, 1, 6)[:, None] * size, "float32")
    loss = lambda x, epsilon: jnp.sin(AT_LEAST(x, epsilon=epsilon, full_range=True)).sum()
    static = partial(loss, epsilon=size)
    value, (dx, depsilon) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, size)
    np.testing.assert_allclose(value, static(x), rtol=1e-5)
    np.testing.assert_allclose(dx * size, jax.grad(static)(x) * size, rtol=1e-5, atol=1e-6)
    by = 1e-2 * size
    slope = (loss(x, size + by) - loss(x, size - by)) / (2e-2)
    np.testing.assert_allclose(depsilon * size, slope, rtol=2e-2)


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("use")
def test_without_a_deviation_the_output_is_the_bias(implementation, epsilon):
    """Of equal elements, of one element, of none, and where a mask hides all."""
    norm = partial(AT_LEAST, epsilon=epsilon, implementation=implementation, bias=np.float32(0.5))
    hidden = np.zeros((2, 1), bool)
    rows = [(jnp.full((2, 7), 3.3), None), (jnp.ones((2, 1)), None), (jnp.ones((2, 7)), hidden)]
    if implementation != "native":
        rows += [(jnp.ones((2, 0)), None), (jnp.ones((0, 7)), None)]
    for x, where in rows:
        y, vjp = jax.vjp(lambda x, where=where: norm(x, where=where), x)
        np.testing.assert_array_equal(y, jnp.full_like(x, 0.5 * (where is None)))
        assert np.isfinite(vjp(jnp.ones_like(y))[0]).all()


def test_nan_shows(rng):
    x = jnp.asarray(rng.standard_normal((2, 7)), jnp.float32).at[0, 0].set(jnp.nan)
    y = AT_LEAST(x, epsilon=1e-5)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_rms_norm_has_every_form():
    """Of [3, -3], whose root mean square is 3."""
    x = jnp.array([[3.0, -3.0]])
    found = {e: jn.rms_norm(x, epsilon=1.0, epsilon_in=e)[0, 0] for e in ("var", "std", "max")}
    assert found == {"var": pytest.approx(3 / 10**0.5), "std": 0.75, "max": 1}
    assert jn.rms_norm(x, epsilon=6.0, epsilon_in="max").tolist() == [[0.5, -0.5]]
