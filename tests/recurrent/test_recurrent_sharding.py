"""Test recurrent networks over eight devices: shard_map and sharded jit equal one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from recurrent_cases import FEW, sequences

import jaxnorm as jn

pytestmark = pytest.mark.usefixtures("several_chunks")

MESH = jax.make_mesh((8,), ("data",), devices=HOST, axis_types=(AxisType.Auto,))
ROWS = PartitionSpec("data")


def loss(case, lengths, x, params):
    """Squares alone: where terms cancel, the order of their sum, which is the CPU's, shows beyond
    its tolerance.
    """
    state, outputs = case.call(x, params, lengths=lengths)
    return (outputs**2).sum() + (state[-1] ** 2).sum()


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[:1]), ids=str)
def test_shard_map(case, rng):
    x, params, lengths = sequences(rng, 16, 5), case.params(), jnp.asarray(rng.integers(0, 6, 16))

    @partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(ROWS, PartitionSpec(), ROWS),
        out_specs=(PartitionSpec(), (ROWS, PartitionSpec())),
    )
    def sharded(x, params, lengths):
        value, gradient = jax.value_and_grad(
            lambda x, p: jax.lax.psum(loss(case, lengths, x, p), "data"), argnums=(0, 1)
        )(x, params)
        return value, gradient

    value, gradient = jax.jit(sharded)(x, params, lengths)
    expected, truth = jax.jit(jax.value_and_grad(partial(loss, case, lengths), argnums=(0, 1)))(
        x, params
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), gradient, truth)


KINDS = [(case, kind) for case in FEW[:2] for kind in AxisType if kind != AxisType.Manual]


@pytest.mark.parametrize(("case", "kind"), long_sweep(KINDS, quick=KINDS[3:]), ids=str)
def test_sharded_jit(case, kind, rng):
    """By XLA, or by the types of arrays."""
    x, params, lengths = sequences(rng, 16, 5), case.params(), jnp.asarray(rng.integers(0, 6, 16))
    call = jax.jit(jax.value_and_grad(partial(loss, case), argnums=(1, 2)))
    rows = NamedSharding(jax.make_mesh((8,), ("data",), devices=HOST, axis_types=(kind,)), ROWS)
    place = partial(jax.device_put, device=rows)
    value, gradient = call(place(lengths), place(x), params)
    expected, truth = call(lengths, x, params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), gradient, truth)
    assert gradient[0].sharding.is_equivalent_to(rows, 3)


@pytest.mark.slow
@pytest.mark.parametrize("time_major", [True, False])
def test_outputs_and_states_are_explicitly_sharded_as_x(time_major, rng):
    """Along batch and time; parameters may be whole or sharded over features, and a state that is
    given as well.
    """
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), devices=HOST, axis_types=(AxisType.Explicit,) * 2
    )
    x, where = rng.standard_normal((8, 5, 6)).astype(np.float32), rng.random((8, 5)) < 0.8
    params, start = (
        jn.recurrent.init_lstm(jax.random.key(0), 6, 4),
        rng.standard_normal((2, 8, 4)).astype(np.float32),
    )
    run = lambda x, params, start, where: jn.recurrent.lstm(
        x, params, initial=tuple(start), where=where, time_major=time_major
    )
    of_x, own = (
        (PartitionSpec(None, "data"), (1, 0, 2))
        if time_major
        else (PartitionSpec("data"), (0, 1, 2))
    )
    x, where = x.transpose(own), where.transpose(own[:2])
    specs = (
        of_x,
        {name: PartitionSpec(*[None] * (a.ndim - 1), "model") for name, a in params.items()},
        PartitionSpec(),
        of_x,
    )
    given = x, params, start, where
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda spec, a: jax.device_put(a, NamedSharding(mesh, spec)), specs, given
        )
        (h, c), outputs = jax.jit(run)(*placed)
    assert jax.typeof(h).sharding.spec == PartitionSpec("data", None)
    assert outputs.sharding.is_equivalent_to(NamedSharding(mesh, of_x), 3)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=2e-6), ((h, c), outputs), jax.jit(run)(*given)
    )


@pytest.mark.slow
def test_statistics_of_an_explicitly_sharded_batch(rng):
    mesh = jax.make_mesh((8,), ("data",), devices=HOST, axis_types=(AxisType.Explicit,))
    x, params = (
        rng.standard_normal((16, 5, 6)).astype(np.float32),
        jn.recurrent.init_lstm(jax.random.key(0), 6, 4, norm="batch"),
    )
    run = jax.jit(lambda x: jn.recurrent.lstm(x, params, norm="batch", return_moments=True))
    found = run(jax.device_put(x, NamedSharding(mesh, ROWS)))
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), found, run(x))
