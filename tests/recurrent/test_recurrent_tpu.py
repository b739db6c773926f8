"""Test the loops for TPUs, which any platform can run.

The outputs are compared with the papers' equations in float64, the gradients with those
of a plain scan.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from recurrent_cases import HIDDEN, RELU, RESET_FIRST, Case, loss, sequences, weights_for

from jaxnorm.kernels import placement
from jaxnorm.recurrent import gates, tpu
from jaxnorm.recurrent.cells import LSTM, make_cell

pytestmark = pytest.mark.usefixtures("elsewhere", "several_chunks")

OWN_LOOPS = [
    Case("lstm", norm, placement)
    for placement in ("ba2016", "sum", "carried_cell")
    for norm in ("layer", "rms")
]
OTHERS = [Case("lstm", "layer", "gate"), Case("lstm", "layer", projection=2), Case("gru")]
OTHERS += [RESET_FIRST, RELU]
CASES = [*OWN_LOOPS, *OTHERS]


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(placement, "platform", lambda: "tpu")


def options_of(kind, rng):
    """Return options of a call with batch 3 and 7 steps."""
    return {
        "plain": {},
        "lengths": {"lengths": jnp.array([7, 0, 4])},
        "where": {"where": jnp.asarray(rng.random((3, 7)) < 0.6)},
        "segments": {"segments": jnp.asarray(rng.random((3, 7)) < 0.4).cumsum(1)},
        "zoneout": {"zoneout": (0.1, 0.3), "key": jax.random.key(0)},
        "expected zoneout": {"zoneout": (0.1, 0.3), "lengths": jnp.array([7, 2, 4])},
    }[kind]


KINDS = ("plain", "lengths", "where", "segments", "zoneout", "expected zoneout")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_an_lstm_with_one_norm_of_all_gates_has_loops_of_its_own(case):
    make = partial(make_cell, case.cell, case.norm, case.placement)
    cell = make(1e-6, **case.variant)
    own = tpu.find_loop(cell, case.params()) is tpu.chunked_by_gates
    assert own == (case in OWN_LOOPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_the_equations(case, rng):
    x, params = sequences(rng, 5, 7), case.params()
    state, outputs = case.call(x, params)
    truth_state, truth = case.oracle(x, params)
    # the worst of 30 seeds was 2.7e-6 here, and 2.8e-6 on a CPU
    np.testing.assert_allclose(outputs, truth, atol=4e-6)
    for part, expected in zip(state, truth_state, strict=True):
        np.testing.assert_allclose(part, expected, atol=4e-6)


@pytest.mark.parametrize("kind", long_sweep(KINDS, quick=KINDS[1:5:3]))
@pytest.mark.parametrize("case", long_sweep(OWN_LOOPS, quick=OWN_LOOPS[:1]), ids=str)
def test_gradients_are_those_of_a_plain_scan(case, kind, rng, x64):
    """To the last digits, with an input of zeros at the start and NaN in masked steps."""
    options = options_of(kind, rng)
    x, params = sequences(rng, 3, 7, dtype=np.float64), case.params(np.float64)
    weights = weights_for(case, rng, x, params, np.float64)
    x = x.at[0, :2].set(0)
    if "lengths" in options:
        x = x.at[2, 4:].set(jnp.nan)
    found, plain = (
        jax.jit(
            jax.value_and_grad(
                partial(loss, case, weights, implementation=implementation, **options),
                argnums=(0, 1),
            )
        )(x, params)
        for implementation in ("xla", "reference")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * float(np.abs(b).max()))


@pytest.mark.parametrize("case", long_sweep(OWN_LOOPS, quick=OWN_LOOPS[:1]), ids=str)
def test_tangents_and_second_derivatives_are_those_of_a_plain_scan(case, rng, x64):
    at = sequences(rng, 3, 5, dtype=np.float64), case.params(np.float64)
    weights = weights_for(case, rng, *at, np.float64)
    v = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), at)
    results = []
    for implementation in ("xla", "reference"):
        f = lambda at, name=implementation: loss(case, weights, *at, implementation=name)
        results.append(jax.jit(lambda at, f=f: jax.jvp(jax.value_and_grad(f), (at,), (v,)))(at))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * float(np.abs(b).max()))


@pytest.mark.parametrize("case", OWN_LOOPS[::2], ids=str)
def test_a_large_mean_of_the_kernels_rows_costs_no_digits(case, rng):
    """Rows whose mean is 1e4 deviations, as on a CPU."""
    x, params = sequences(rng, 5, 7), case.params()
    shifted = {
        name: leaf + 1e4 if name in ("input_kernel", "recurrent_kernel") else leaf
        for name, leaf in params.items()
    }
    for found, truth in zip(case.call(x, shifted)[1], case.oracle(x, shifted)[1], strict=True):
        np.testing.assert_allclose(found, truth, atol=2e-5)


@pytest.mark.parametrize("offset", [0, 1e2, 1e4, 1e6])
def test_a_large_mean_of_the_cell_state_costs_no_digits(offset, rng):
    """With gates that keep c as it is, so that each step normalizes the same c."""
    case = Case("lstm")
    x, params = sequences(rng, 3, 4), case.params()
    bias = np.repeat(np.float32([-100, 100, 0, 0]), HIDDEN)
    params = {**params, "bias": jnp.asarray(bias)}
    c = (offset + rng.standard_normal((3, HIDDEN))).astype(np.float32)
    initial = (np.zeros_like(c), c)
    _, truth = case.oracle(x, params, initial=tuple(part.astype(np.float64) for part in initial))
    _, found = case.call(x, params, initial=initial)
    np.testing.assert_allclose(found, truth, atol=2e-6)


@pytest.mark.parametrize("offset", [0, 1, 1e2, 1e4, 1e5])
def test_the_shift_of_the_cell_state_may_be_rounded(offset, rng):
    """By 2**-17 of the mean, as a product of two bfloat16 for each element may be."""
    c = (offset + rng.standard_normal((8, 512))).astype(np.float32)
    ones = jnp.ones(512), jnp.full((512, 512), 1 + 2.0**-17, jnp.float32)
    found = gates._normalize_cell(LSTM("layer"), ones, jnp.asarray(c))
    d = c.astype(np.float64) - c.mean(-1, keepdims=True, dtype=np.float64)
    truth = d / np.sqrt((d**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found, truth, atol=2e-6)


def test_equal_cell_states_are_zeros_when_normalized():
    ones = jnp.ones(8), jnp.ones((8, 8))
    c = jnp.broadcast_to(jnp.float32([[0.1], [1e4], [-3.3e7]]), (3, 8))
    assert not gates._normalize_cell(LSTM("layer"), ones, c).any()
