"""Recurrent networks over eight devices: shard_map and sharded jit are the single device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from jax.sharding import NamedSharding, PartitionSpec
from recurrent_cases import FEW, sequences

pytestmark = pytest.mark.usefixtures("several_chunks")

MESH = jax.make_mesh((8,), ("data",), devices=HOST, axis_types=(jax.sharding.AxisType.Auto,))
ROWS = PartitionSpec("data")


def loss(case, lengths, x, params):
    """Squares alone: where terms cancel, the order of their sum, which is the CPU's, shows beyond its tolerance."""
    state, outputs = case.call(x, params, lengths=lengths)
    return (outputs**2).sum() + (state[-1] ** 2).sum()


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[:1]), ids=str)
def test_shard_map(case, rng):
    x, params, lengths = sequences(rng, 16, 5), case.params(), jnp.asarray(rng.integers(0, 6, 16))

    @partial(jax.shard_map, mesh=MESH, in_specs=(ROWS, PartitionSpec(), ROWS), out_specs=(PartitionSpec(), (ROWS, PartitionSpec())))
    def sharded(x, params, lengths):
        value, gradient = jax.value_and_grad(lambda x, p: jax.lax.psum(loss(case, lengths, x, p), "data"), argnums=(0, 1))(x, params)
        return value, gradient

    value, gradient = jax.jit(sharded)(x, params, lengths)
    expected, truth = jax.jit(jax.value_and_grad(partial(loss, case, lengths), argnums=(0, 1)))(x, params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), gradient, truth)


@pytest.mark.parametrize("case", long_sweep(FEW[:2], quick=FEW[1:2]), ids=str)
def test_sharded_jit(case, rng):
    x, params, lengths = sequences(rng, 16, 5), case.params(), jnp.asarray(rng.integers(0, 6, 16))
    call = jax.jit(jax.value_and_grad(partial(loss, case), argnums=(1, 2)))
    place = partial(jax.device_put, device=NamedSharding(MESH, ROWS))
    value, gradient = call(place(lengths), place(x), params)
    expected, truth = call(lengths, x, params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), gradient, truth)
    assert gradient[0].sharding.is_equivalent_to(NamedSharding(MESH, ROWS), 3)
