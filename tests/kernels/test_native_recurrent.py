"""Compare the CPU kernel of the LSTM with the papers' equations and with plain JAX.

Plain JAX is tested by the other files.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from jax.sharding import PartitionSpec
from recurrent_cases import CASES, FEATURES, Case, loss, sequences, weights_for
from wide import close as close_to

import jaxnorm as jn
from jaxnorm.recurrent import native

OURS = [
    case
    for case in CASES
    if case.cell == "lstm" and case.norm != "batch" and case.projection is None
]
FEW = [Case("lstm"), Case("lstm", "rms", "sum"), Case("lstm", "layer", "gate"), Case("lstm", None)]
close = partial(close_to, least=1)
by_few = pytest.mark.parametrize("case", FEW, ids=str)

pytestmark = pytest.mark.usefixtures("library", "several_chunks")


@pytest.fixture(autouse=True)
def _kernels(use):
    use("native")


@pytest.fixture
def gates_from(monkeypatch):
    """``gates_from(features)``: networks without a norm keep gates from so many features on."""

    def choose(features):
        monkeypatch.setattr(native, "WIDE", features)
        jax.clear_caches()  # else what was traced before stays

    yield choose
    jax.clear_caches()


def gradient(case, weights, implementation=None, **options):
    return jax.jit(
        jax.value_and_grad(
            partial(loss, case, weights, implementation=implementation, **options), argnums=(0, 1)
        )
    )


def wide(rng, case, hidden=37):
    """Parameters of so many features, which fill no vector and no panel."""
    params = jn.recurrent.init_lstm(jax.random.key(0), FEATURES, hidden, **case.options)
    return {
        name: leaf + jnp.asarray(0.1 * rng.standard_normal(leaf.shape).astype(np.float32))
        for name, leaf in params.items()
    }


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
@pytest.mark.parametrize("case", OURS, ids=str)
def test_values_are_those_of_the_equations(case, epsilon, rng):
    x, params = sequences(rng, 3, 7), case.params()
    initial = tuple(jnp.asarray(rng.standard_normal((3, 4)).astype(np.float32)) for _ in range(2))
    state, outputs = case.call(x, params, epsilon=epsilon, initial=initial, implementation="native")
    truth = case.oracle(
        np.asarray(x, np.float64),
        params,
        epsilon=epsilon,
        initial=tuple(np.asarray(part, np.float64) for part in initial),
    )
    close((state, outputs), truth, 2e-6)


@pytest.mark.parametrize("case", long_sweep(OURS, quick=OURS[:1]), ids=str)
def test_gradients_are_those_of_plain_jax(case, rng):
    """Of blocks of sequences that are full and not, and of a batch that several threads share; in
    plain JAX the last are left out.
    """
    x, params = sequences(rng, 40, 7), wide(rng, case)
    initial = tuple(rng.standard_normal((40, 37)).astype(np.float32) for _ in range(2))
    weights = [np.asarray(weight) for weight in weights_for(case, rng, x, params)]

    @partial(jax.jit, static_argnums=0)
    def run(implementation, x, params, initial, weights):
        of = lambda x, params: loss(
            case, weights, x, params, implementation=implementation, initial=initial
        )
        return jax.value_and_grad(of, argnums=(0, 1))(x, params)

    for batch in (1, 13, 40):
        first = jax.tree.map(
            lambda leaf, batch=batch: np.asarray(leaf)[:batch], (x, initial, weights)
        )
        given = first[0], params, *first[1:]
        found, again = run("native", *given), run("native", *given)
        counted = [
            np.where(np.arange(40).reshape(-1, *(1,) * (weight.ndim - 1)) < batch, weight, 0)
            for weight in weights
        ]
        _, (dx, dparams) = run("xla", x, params, initial, counted)
        close(found[1], (dx[:batch], dparams), 2e-5)
        jax.tree.map(np.testing.assert_array_equal, found, again)


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=str)
def test_zeros_are_harmless_for_any_epsilon(case, rng):
    """A norm of nothing: finite, and no gradient passes."""
    x = sequences(rng, 2, 6).at[0].set(0)
    params = {
        name: 0 * leaf if name.endswith("bias") else leaf for name, leaf in case.params().items()
    }
    weights = weights_for(case, rng, x, params)
    for epsilon in (0.0, 1e-6):
        found, plain = (
            gradient(case, weights, i, epsilon=epsilon)(x, params) for i in ("native", "xla")
        )
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
        close(found, plain, 2e-5)


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[1:2]), ids=str)
def test_lengths_and_gaps_hide_what_is_there(case, rng):
    """NaN where steps are not taken; zeros, which pass no gradient through a norm of nothing."""
    x, params = sequences(rng, 9, 8), wide(rng, case)
    where, lengths = jnp.asarray(rng.random((9, 8)) < 0.8), jnp.asarray(rng.integers(0, 9, 9))
    taken = where & (jnp.arange(8)[None] < lengths[:, None])
    x = jnp.where(taken[..., None], x, jnp.nan).at[0, :3].set(0)
    weights = weights_for(case, rng, x, params)
    found, plain = (
        gradient(case, weights, implementation, where=where, lengths=lengths)(x, params)
        for implementation in ("native", "xla")
    )
    close(found, plain, 2e-5)
    assert (np.asarray(found[1][0])[~np.asarray(taken)] == 0).all()


@pytest.mark.parametrize("case", long_sweep(FEW, quick=()), ids=str)
def test_transformations(case, rng, gates_from):
    """Forward mode, second order, vmap over x and parameters, remat: of plain JAX."""
    if case.norm is None:
        gates_from(1)
    x, params = sequences(rng, 2, 3, 5), [case.params(seed=seed) for seed in range(2)]
    weights = weights_for(case, rng, x[0], params[0])
    stacked, at = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), (x[0], params[0])
    along = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape).astype(np.float32)), at
    )

    @partial(jax.jit, static_argnums=0)  # in one program, which compiles sooner than many
    def transformed(implementation):
        value = partial(loss, case, weights, implementation=implementation)
        of = jax.value_and_grad(value, argnums=(0, 1))
        slope = jax.jvp(value, at, along)[1]
        second = jax.jvp(lambda *at: of(*at)[1], at, along)[1]
        return (
            (jax.vmap(of)(x, stacked), jax.vmap(of, (0, None))(x, params[0])),
            slope,
            of(*at)[1],
            second,
        )

    found, plain = transformed("native"), transformed("xla")
    close(found[0], plain[0], 2e-5)
    for _, slope, gradients, _ in (found, plain):
        close(slope, sum(map(jnp.vdot, *map(jax.tree.leaves, (gradients, along)))), 2e-5)
    close(found[-1], plain[-1], 1e-4)
    remade = jax.jit(
        jax.grad(
            jax.checkpoint(partial(loss, case, weights, implementation="native")), argnums=(0, 1)
        )
    )
    close(remade(*at), found[2], 1e-6)


@pytest.mark.slow
def test_shard_map(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    case, rows = Case("lstm"), PartitionSpec("data")
    x, params, lengths = sequences(rng, 16, 5), case.params(), jnp.asarray(rng.integers(0, 6, 16))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(rows, PartitionSpec(), rows),
        out_specs=(rows, PartitionSpec()),
    )
    def sharded(x, params, lengths):
        call = lambda x, p: jax.lax.psum(
            (case.call(x, p, lengths=lengths, implementation="native")[1] ** 2).sum(), "data"
        )
        return jax.grad(call, argnums=(0, 1))(x, params)

    whole = jax.grad(
        lambda x, p: (case.call(x, p, lengths=lengths, implementation="native")[1] ** 2).sum(),
        argnums=(0, 1),
    )
    close(jax.jit(sharded)(x, params, lengths), whole(x, params), 2e-5)


def test_saturated_gates_and_tiny_numbers(rng):
    """tanh to the last bits: from 1e-30 to numbers that it is 1 of, and NaN."""
    x = jnp.asarray(np.geomspace(1e-30, 1e30, 121).astype(np.float32))[:, None, None]
    # c' = tanh(x), h' = tanh(c')
    kernel, bias = jnp.array([[0, 0, 1.0, 0]]), jnp.array([50.0, -50, 0, 50])
    params = {"input_kernel": kernel, "recurrent_kernel": jnp.zeros((1, 4)), "bias": bias}
    (h, c), _ = jn.recurrent.lstm(
        jnp.concatenate([x, -x]), params, norm=None, implementation="native"
    )
    truth = np.tanh(np.concatenate([x, -x]).astype(np.float64))[:, 0]
    np.testing.assert_allclose(c, truth, rtol=3e-7)
    np.testing.assert_allclose(h, np.tanh(truth), rtol=5e-7)
    (_, c), _ = jn.recurrent.lstm(
        jnp.full((1, 1, 1), jnp.nan), params, norm=None, implementation="native"
    )
    assert np.isnan(c).all()


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[:1]), ids=str)
def test_either_order_of_axes_gives_the_same(case, rng):
    """Outputs to the bit; sums of gradients have another order. Sequences that are not cut evenly,
    with steps that are not taken.
    """
    x, params, where = (
        sequences(rng, 13, 7),
        wide(rng, case),
        jnp.asarray(rng.random((13, 7)) < 0.8),
    )
    weight = jnp.asarray(rng.standard_normal((13, 7, 37)).astype(np.float32))

    def found(turn):
        def total(x, params):
            (h, c), y = case.call(
                x,
                params,
                where=turn(where),
                time_major=turn is not jnp.asarray,
                implementation="native",
            )
            return (turn(weight) * y).sum() + (h * c).sum(), turn(y)

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(turn(x), params)

    ((dx, dparams), y), ((dx_by_time, dparams_by_time), y_by_time) = (
        found(jnp.asarray),
        found(lambda a: jnp.swapaxes(a, 0, 1)),
    )
    np.testing.assert_array_equal(y_by_time, y)
    close((jnp.swapaxes(dx_by_time, 0, 1), dparams_by_time), (dx, dparams), 2e-6)


@pytest.mark.parametrize("time_major", [False, True])
def test_sequences_are_read_as_they_lie(time_major, rng):
    """Outputs need no memory beside them but for kernels: nothing as large as x is transposed."""
    case, shape = Case("lstm"), (64, 64, FEATURES)
    run = jax.jit(
        lambda x, params: case.call(x, params, time_major=time_major, implementation="native")[1]
    )
    needed = (
        run.lower(sequences(rng, 64, 64), case.params())
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    assert needed < 4 * np.prod(shape) / 2


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_gives_the_initial_state(shape, rng):
    case = Case("lstm")
    x, params, initial = sequences(rng, *shape), case.params(), (jnp.ones((shape[0], 4)),) * 2
    state, outputs = case.call(x, params, initial=initial, implementation="native")
    jax.tree.map(np.testing.assert_array_equal, state, initial)
    assert outputs.shape == (*shape, 4)


@pytest.mark.parametrize(
    ("cell", "options", "message"),
    [
        ("gru", {}, "takes an LSTM without batch norm and projection: got gru, norm='layer'"),
        (
            "lstm",
            {"norm": "batch"},
            "takes an LSTM without batch norm and projection: got lstm, norm='batch'",
        ),
        ("lstm", {"zoneout": 0.1}, "takes no segments and no zoneout"),
        ("lstm", {"segment_ids": np.zeros((2, 5), int)}, "takes no segments and no zoneout"),
    ],
)
def test_what_it_cannot_take_is_said(cell, options, message, rng):
    norm = {name: value for name, value in options.items() if name == "norm"}
    params = getattr(jn.recurrent, f"init_{cell}")(jax.random.key(0), FEATURES, 4, **norm)
    call = partial(getattr(jn.recurrent, cell), sequences(rng, 2, 5), params, **options)
    with pytest.raises(
        ValueError, match=f"^implementation='native' {message}. Leave implementation out.$"
    ):
        call(implementation="native")
    call()  # plain JAX


def test_float64_is_left_to_plain_jax(rng, x64):
    case = Case("lstm")
    x, params = sequences(rng, 2, 5, dtype=np.float64), case.params(np.float64)
    with pytest.raises(ValueError, match="computes in float32: got float64"):
        case.call(x, params, implementation="native")
    assert case.call(x, params)[1].dtype == jnp.float64


def residuals_of(case, features, rng):
    """How many numbers for each feature and step the backward pass keeps, found by making sequences
    four times as long.
    """
    params = jn.recurrent.init_lstm(jax.random.key(0), FEATURES, features, **case.options)
    call = partial(case.call, implementation="native")
    kept = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))
        for steps in (80, 320)
        for pull in [jax.vjp(lambda p, x: call(x, p)[1], params, sequences(rng, 4, steps))[1]]
    ]
    return (kept[1] - kept[0]) / (240 * 4 * features * 4)


@by_few
def test_the_backward_pass_keeps_states_alone(case, rng):
    """As in plain JAX: of every step h, c and x."""
    assert residuals_of(case, 64, rng) == 2 + FEATURES / 64


@pytest.mark.slow
def test_without_a_norm_wide_networks_keep_their_gates(rng, gates_from):
    gates_from(64)
    assert residuals_of(Case("lstm", None), 64, rng) == 6 + FEATURES / 64
    assert residuals_of(Case("lstm", None), 63, rng) == 2 + FEATURES / 63


@pytest.mark.parametrize("steps", long_sweep([5, 7], quick=()))
def test_gates_that_were_kept_give_the_same_gradients(steps, rng, gates_from):
    """To the bit, of sequences cut evenly and not, with steps that are not taken."""
    case = Case("lstm", None)
    x, params, where = (
        sequences(rng, 13, steps),
        wide(rng, case),
        jnp.asarray(rng.random((13, steps)) < 0.8),
    )
    weights, found, kept = weights_for(case, rng, x, params), [], []
    for features in (1, 256):
        gates_from(features)
        kept.append(residuals_of(case, 37, rng))
        found.append(gradient(case, weights, where=where)(x, params))
    assert kept[0] > kept[1]
    jax.tree.map(np.testing.assert_array_equal, *found)
