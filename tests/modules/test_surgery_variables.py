"""Test that variables come back as they went in: as a FrozenDict, or with one in a dict."""

import chex
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest
from flax.core import FrozenDict, freeze

import jaxnorm as jn

X = jnp.arange(12.0).reshape(4, 3)
CALLS = {
    "fold": lambda variables: jn.linen.fold(evaluated(), variables, X)[1],
    "swap": lambda variables: jn.linen.swap(evaluated(), variables, X, to="instance")[1],
    "accumulate": lambda variables: jn.linen.accumulate(jn.linen.accumulate(variables)),
    "stop_accumulating": lambda v: jn.linen.stop_accumulating(jn.linen.accumulate(v)),
    "recalibrate": lambda variables: jn.linen.recalibrate(trained(), variables, [X]),
}


def evaluated():
    return fnn.Sequential([fnn.Dense(2), jn.linen.BatchNorm(True), fnn.relu])


def trained():
    return fnn.Sequential([fnn.Dense(2), jn.linen.BatchNorm(False), fnn.relu])


@pytest.fixture(scope="module", name="variables")
def _variables():
    return evaluated().init(jax.random.key(0), X)


@pytest.mark.parametrize("name", CALLS)
def test_types_stay(name, variables):
    expected = CALLS[name](variables)
    assert type(expected) is dict
    assert {type(value) for value in expected.values()} == {dict}
    frozen = CALLS[name](freeze(variables))
    assert type(frozen) is FrozenDict
    half = CALLS[name](variables | {"params": freeze(variables["params"])})
    assert type(half) is dict
    assert type(half["params"]) is FrozenDict
    assert all(type(value) is dict for key, value in half.items() if key != "params")
    for found in (frozen, half):
        chex.assert_trees_all_equal(freeze(found), freeze(expected))


def test_a_loop_carries_frozen_variables(variables):
    """The carry of a scan must keep its type."""
    start = jn.linen.accumulate(freeze(variables))
    end, _ = jax.lax.scan(lambda v, _: (jn.linen.accumulate(v), None), start, None, length=2)
    assert type(end) is FrozenDict
