"""Test sequences of several lengths in one batch.

Outputs, last states and gradients equal those of each sequence alone.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from recurrent_cases import FEATURES, FEW, HIDDEN, RESET_FIRST, Case, sequences

import jaxnorm as jn

pytestmark = pytest.mark.usefixtures("several_chunks")

LENGTHS = (5, 0, 2, 5)  # few different ones, here and below: each is compiled for itself
FURTHER = [Case("rnn"), Case("gru", "rms", "sum"), Case("lstm", "layer", "carried_cell")]


def total(case, x, params, coefficients, **options):
    state, outputs = case.call(x, params, **options)
    return sum(
        jnp.vdot(c, value) for c, value in zip(coefficients, (outputs, *state), strict=True)
    ), (state, outputs)


@cache
def of_one(case):
    return jax.jit(jax.value_and_grad(partial(total, case), argnums=(0, 1), has_aux=True))


def alone(case, x, params, coefficients, places):
    """Each sequence for itself, of its own steps: what everything else is compared with, put back
    where it stood.
    """
    value = of_one(case)
    x, coefficients = np.asarray(x), [np.asarray(part) for part in coefficients]
    outputs, states, dx, dparams = (
        np.zeros(coefficients[0].shape, np.float32),
        [],
        np.zeros(x.shape, np.float32),
        None,
    )
    for row, at in enumerate(places):
        ours = [coefficients[0][row][at], *(c[row] for c in coefficients[1:])]
        (_, (state, y)), (gx, gp) = value(x[row][at], params, ours)
        outputs[row, at], dx[row, at] = y, gx
        states.append([np.asarray(part) for part in state])
        dparams = gp if dparams is None else jax.tree.map(np.add, dparams, gp)
    return outputs, [np.stack(parts) for parts in zip(*states, strict=True)], dx, dparams


def coefficients_for(case, rng, x, params):
    state, outputs = jax.eval_shape(case.call, x, params)
    return [
        jnp.asarray(rng.standard_normal(part.shape).astype(np.float32))
        for part in (outputs, *state)
    ]


def compare(case, x, params, coefficients, places, **options):
    outputs, states, dx, dparams = alone(case, x, params, coefficients, places)
    taken = np.zeros(x.shape[:2], bool)
    for row, at in enumerate(places):
        taken[row, at] = True
    x = np.where(taken[..., None], x, np.float32(np.nan))  # what is masked out is NaN
    value = jax.jit(
        jax.value_and_grad(partial(total, case, **options), argnums=(0, 1), has_aux=True)
    )
    (_, (state, y)), (gx, gp) = value(x, params, coefficients)
    np.testing.assert_allclose(y, outputs, atol=2e-6)
    assert (np.asarray(y)[~taken] == 0).all()
    for part, expected in zip(state, states, strict=True):
        np.testing.assert_allclose(part, expected, atol=2e-6)
    assert (np.asarray(gx)[~taken] == 0).all()
    for found, expected in ((gx, dx), *((gp[name], dparams[name]) for name in gp)):
        np.testing.assert_allclose(
            found, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max()))
        )


@pytest.mark.parametrize("case", long_sweep([*FEW, *FURTHER], quick=FEW[:1]), ids=str)
def test_lengths(case, rng):
    x, params = sequences(rng, 4, 6), case.params()
    places = [np.arange(n) for n in LENGTHS]
    compare(
        case, x, params, coefficients_for(case, rng, x, params), places, lengths=jnp.array(LENGTHS)
    )


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[:1]), ids=str)
def test_left_padding_and_gaps(case, rng):
    """With lengths that hide the last step too."""
    x, params = sequences(rng, 4, 8), case.params()
    where = np.array(
        [
            [0, 1, 1, 0, 1, 1, 1, 1],
            [1, 0, 0, 1, 0, 0, 0, 1],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
        ],
        bool,
    )
    lengths = np.array([7, 7, 8, 4])
    places = [np.flatnonzero(row[:n]) for row, n in zip(where, lengths, strict=True)]
    compare(
        case,
        x,
        params,
        coefficients_for(case, rng, x, params),
        places,
        where=jnp.asarray(where),
        lengths=jnp.asarray(lengths),
    )


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[:1]), ids=str)
def test_lengths_in_reverse(case, rng):
    x, params = sequences(rng, 4, 6), case.params()
    places = [np.arange(n)[::-1] for n in LENGTHS]
    compare(
        case,
        x,
        params,
        coefficients_for(case, rng, x, params),
        places,
        lengths=jnp.array(LENGTHS),
        reverse=True,
    )


PACKED = [(case, reverse) for case in [*FEW[:3], RESET_FIRST] for reverse in (False, True)]


@pytest.mark.parametrize(("case", "reverse"), long_sweep(PACKED, quick=PACKED[1:2]), ids=str)
def test_packed_segments(case, reverse, rng):
    """Three sequences, of the lengths above, and padding in one row; padding may be any number."""
    x, params = sequences(rng, 1, 14), case.params()
    ids = np.array([4, 4, 4, 4, 4, 0, 2, 0, 2, 7, 7, 7, 7, 7])
    taken = ids > 0
    pieces = [np.flatnonzero(ids == i) for i in (4, 2, 7)]
    state, outputs = jax.eval_shape(case.call, x, params)
    c = rng.standard_normal(outputs.shape).astype(np.float32)

    def packed(x, params):
        y = case.call(
            x,
            params,
            segment_ids=jnp.asarray(ids)[None],
            where=jnp.asarray(taken)[None],
            reverse=reverse,
        )[1]
        return jnp.vdot(c, y), y

    broken = np.where(taken[None, :, None], x, np.float32(np.nan))
    (_, y), found = jax.jit(jax.value_and_grad(packed, argnums=(0, 1), has_aux=True))(
        broken, params
    )
    rows = [np.repeat(part, 3, 0) for part in (x, c)]
    # no last state is asked for
    nothing = [np.zeros((3, *part.shape[1:]), np.float32) for part in state]
    expected, _, dx, dparams = alone(
        case, rows[0], params, [rows[1], *nothing], [at[::-1] if reverse else at for at in pieces]
    )
    np.testing.assert_allclose(y, expected.sum(0, keepdims=True), atol=2e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=3e-5), found, (dx.sum(0, keepdims=True), dparams)
    )


def test_the_first_segment_starts_from_initial(rng):
    x, params = sequences(rng, 2, 4), jn.recurrent.init_gru(jax.random.key(0), FEATURES, HIDDEN)
    initial = jnp.ones((2, HIDDEN))
    _, y = jn.recurrent.gru(x, params, initial=initial, segment_ids=jnp.array([[5, 5, 6, 6]] * 2))
    np.testing.assert_allclose(
        y[:, :2], jn.recurrent.gru(x[:, :2], params, initial=initial)[1], atol=1e-6
    )
    np.testing.assert_allclose(y[:, 2:], jn.recurrent.gru(x[:, 2:], params)[1], atol=1e-6)


@pytest.mark.slow
def test_three_and_three_thousand_steps(rng, monkeypatch):
    monkeypatch.undo()
    x, params = sequences(rng, 2, 3000), jn.recurrent.init_lstm(jax.random.key(0), FEATURES, 32)
    # gains of 1 make a chaotic map of it
    params["recurrent_scale"] = 0.1 * params["recurrent_scale"]
    lengths = jnp.array([3, 3000])
    (h, _), y = jn.recurrent.lstm(x.at[0, 3:].set(jnp.nan), params, lengths=lengths)
    (short, _), short_y = jn.recurrent.lstm(x[0, :3], params)
    (long, _), long_y = jn.recurrent.lstm(x[1], params)
    np.testing.assert_allclose(h, jnp.stack([short, long]), atol=2e-6)
    np.testing.assert_allclose(y[1], long_y, atol=1e-5)
    np.testing.assert_allclose(y[0, :3], short_y, atol=2e-6)

    def of_short(params):
        return jn.recurrent.lstm(x.at[0, 3:].set(jnp.nan), params, lengths=lengths)[0][0][0].sum()

    found, truth = (
        jax.grad(of_short)(params),
        jax.grad(lambda p: jn.recurrent.lstm(x[0, :3], p)[0][0].sum())(params),
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, truth)


def gradient_norm(params, x, **options):
    gradient = jax.jit(jax.grad(lambda p: jn.recurrent.lstm(x, p, **options)[1][:, -1].sum()))(
        params
    )
    return float(np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(gradient))))


OF_ZEROS = [("layer", "ba2016"), ("layer", "gate"), ("rms", "sum"), ("batch", "ba2016")]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "placement"), OF_ZEROS)
def test_runs_of_zeros_are_harmless(norm, placement):
    """Steps not taken do nothing; zeros that are taken, from a zero state, multiply no gradient by
    1 / sqrt(epsilon).
    """
    options = {"norm": norm, "placement": placement}
    params = jn.recurrent.init_lstm(jax.random.key(0), FEATURES, HIDDEN, **options)
    end = jax.random.normal(jax.random.key(1), (2, 4, FEATURES))
    x = jnp.concatenate([jnp.zeros((2, 40, FEATURES)), end], 1)
    bare = gradient_norm(params, end, **options)
    assert gradient_norm(params, x, where=jnp.any(x != 0, -1), **options) == pytest.approx(
        bare, rel=1e-5
    )
    chunked, plain = (
        gradient_norm(params, x, implementation=implementation, **options)
        for implementation in ("xla", "reference")
    )
    assert chunked == pytest.approx(plain, rel=1e-5)
    assert chunked < 1e3 * bare  # 1 / sqrt(epsilon) once, where the zeros end, not 40 times


def test_a_zero_first_step_after_a_learned_state_has_its_gradient(rng):
    """Only what is exactly 0 passes nothing: a state that is not, or an input that is not, has the
    true derivative.
    """
    params, x = Case("lstm").params(), sequences(rng, 1, 2)
    zero = jnp.zeros((1, HIDDEN))
    of_h = jax.grad(lambda h, x: jn.recurrent.lstm(x, params, initial=(h, zero + 0.5))[1].sum())
    assert float(np.abs(of_h(zero, x)).max()) > 1
    assert (
        float(np.abs(of_h(zero + jnp.arange(HIDDEN, dtype=float)[None], jnp.zeros_like(x))).max())
        > 0
    )
    assert float(np.abs(of_h(zero, jnp.zeros_like(x))).max()) == 0


def test_recurrent_batch_norm_counts_what_is_there(rng):
    """The statistics of a step are those of the sequences that still run."""
    case = Case("lstm", "batch")
    x, params = sequences(rng, 5, 6), case.params()
    lengths = np.array([6, 6, 6, 3, 2])
    broken = jnp.where((np.arange(6) < lengths[:, None])[..., None], x, jnp.nan)
    state, y, found = jn.recurrent.lstm(
        broken, params, norm="batch", lengths=jnp.asarray(lengths), return_moments=True
    )
    first = case.oracle(x[:, :2], params)
    np.testing.assert_allclose(y[:, :2], first[1], atol=3e-6)
    np.testing.assert_allclose(state[0][4], first[0][0][4], atol=3e-6)
    third = case.oracle(x[:4, 2:3], params, initial=tuple(part[:4] for part in first[0]))
    np.testing.assert_allclose(y[:4, 2:3], third[1], atol=1e-5)
    assert found["input"].count[:, 0].tolist() == [5, 5, 4, 3, 3, 3]
    products = np.einsum(
        "bd,dk->bk",
        np.asarray(x[:4, 2], np.float64),
        np.asarray(params["input_kernel"], np.float64),
    )
    np.testing.assert_allclose(found["input"].mean[2], products.mean(0), atol=1e-6)
    np.testing.assert_allclose(found["input"].var[2], products.var(0), rtol=1e-5)
    np.testing.assert_allclose(found["recurrent"].var[0], 0, atol=0)


@pytest.mark.slow
def test_running_statistics_of_each_step(rng):
    """With the statistics of the batch itself nothing changes; later steps use the last one that
    was seen.
    """
    case = Case("lstm", "batch")
    x, params = sequences(rng, 5, 6), case.params()
    call = partial(jn.recurrent.lstm, params=params, norm="batch")
    state, y, found = call(x, return_moments=True)
    (h, _), again = call(x, running=found)
    np.testing.assert_allclose(again, y, atol=1e-5)
    np.testing.assert_allclose(h, state[0], atol=1e-5)
    shorter = jax.tree.map(lambda leaf: leaf[:4], found)
    repeated = jax.tree.map(lambda leaf: leaf[jnp.array([0, 1, 2, 3, 3, 3])], found)
    np.testing.assert_array_equal(call(x, running=shorter)[1], call(x, running=repeated)[1])
    never = {name: replace(value, count=value.count.at[4:].set(0)) for name, value in found.items()}
    np.testing.assert_array_equal(call(x, running=never)[1], call(x, running=repeated)[1])
    with pytest.raises(ValueError, match="at most the 4 steps of running: got 6"):
        call(x, running=shorter, longer="raise")
    with pytest.raises(ValueError, match="at most the 4 steps of running: found 5"):
        call(x, running=shorter, longer="raise", lengths=jnp.array([1, 2, 3, 4, 5]))
    call(x, running=shorter, longer="raise", lengths=jnp.array([1, 2, 3, 4, 4]))
    alone = call(x[:1], running=found)[1]  # in evaluation sequences do not see each other
    np.testing.assert_allclose(alone, again[:1], atol=1e-6)


def test_equal_sequences_with_epsilon_0_are_finite_in_evaluation(rng):
    """Recurrent batch norm of equal sequences has variance 0: with running statistics it is what
    training gives, not NaN.
    """
    x, params = sequences(rng, 1, 3), Case("lstm", "batch").params()
    call = partial(jn.recurrent.lstm, jnp.repeat(x, 4, 0), params, norm="batch", epsilon=0.0)
    (h, c), y, found = call(return_moments=True)
    assert float(jnp.abs(y).max()) > 0.01
    (again_h, again_c), again = call(running=found)
    for one, other in ((again, y), (again_h, h), (again_c, c)):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_zoneout_keeps_units(rng):
    x, params = sequences(rng, 3, 6), Case("lstm").params()
    call = partial(jn.recurrent.lstm, x, params)
    initial = tuple(sequences(rng, 2, 3)[i][:, :1] * jnp.ones((1, HIDDEN)) for i in range(2))
    (h, c), y = call(zoneout=1.0, key=jax.random.key(0), initial=initial)
    np.testing.assert_array_equal(h, initial[0])
    np.testing.assert_array_equal(c, initial[1])
    np.testing.assert_array_equal(y, jnp.broadcast_to(initial[0][:, None], y.shape))
    np.testing.assert_array_equal(call(zoneout=0.0, key=jax.random.key(0))[1], call()[1])
    _, y = call(zoneout=(0.5, 0.0), key=jax.random.key(1))
    kept = np.asarray(y[:, 1:] == y[:, :-1])
    assert 0.3 < kept.mean() < 0.7
    # Without a key the expected value: one step from a given state.
    (h0, c0), _ = jn.recurrent.lstm(x[:, :1], params, initial=initial)
    (h, c), _ = jn.recurrent.lstm(x[:, :1], params, initial=initial, zoneout=(0.25, 0.5))
    np.testing.assert_allclose(h, 0.25 * initial[0] + 0.75 * h0, atol=1e-6)
    np.testing.assert_allclose(c, 0.5 * initial[1] + 0.5 * c0, atol=1e-6)
