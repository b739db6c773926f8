"""Test the GRU whose reset comes before the product, and the simple network with a ReLU.

The equations, derivatives and ragged sequences of both are tested with all other cells. Here are
their modules, what else they can be compared with, and what is refused.
"""

import re
from functools import partial

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from flax import nnx as flax_nnx
from recurrent_cases import (
    CELLS,
    FEATURES,
    HIDDEN,
    LAYERS,
    RELU,
    RESET_FIRST,
    Case,
    applied,
    close,
    made,
    sequences,
)

import jaxnorm as jn
from jaxnorm import linen as jn_nn
from jaxnorm import nnx as jn_nnx
from jaxnorm.recurrent import native, scan
from jaxnorm.recurrent.cells import make_cell

KEY = jax.random.key(0)
MODULES = [
    RESET_FIRST,
    Case("gru", "rms", "gate", reset_after=False),
    Case("gru", None, reset_after=False),
    RELU,
    Case("rnn", None, activation="relu"),
]


def options_of(case):
    return {**case.options, **case.variant}


@pytest.mark.parametrize("case", long_sweep(MODULES, quick=MODULES[2:4]), ids=str)
def test_cell_layer_function_and_twin_agree(case, rng):
    """Two layers in both directions against the equations; RNN(cell); nnx to the bit."""
    x, lengths, options = sequences(rng, 3, 5), jnp.array([5, 2, 4]), options_of(case)
    layer = getattr(jn_nn, LAYERS[case.cell])(HIDDEN, return_carry=True, **options)
    variables = made(layer.init, KEY, x)
    found = layer.apply(variables, x, seq_lengths=lengths)
    looped = flax_nn.RNN(getattr(jn_nn, CELLS[case.cell])(HIDDEN, **options), return_carry=True)
    assert jax.tree.map(jnp.shape, jax.eval_shape(looped.init, KEY, x)) == jax.tree.map(
        jnp.shape, variables
    )
    close(applied(looped, variables, x), layer.apply(variables, x))
    twin = getattr(jn_nnx, LAYERS[case.cell])(
        FEATURES, HIDDEN, return_carry=True, rngs=flax_nnx.Rngs(0), **options
    )
    if case.norm is None:
        params = bound_parameters(case, variables, x)
        for name, linear in (("input", twin.cell.dense_i), ("recurrent", twin.cell.dense_h)):
            linear.kernel[...] = params[f"{name}_kernel"]
        twin.cell.dense_i.bias[...] = params["bias"]
        assert set(params) == {"input_kernel", "recurrent_kernel", "bias"}
    else:
        params = variables["params"]["cell"]
        assert set(twin.cell.leaves) == set(params)
        for name, leaf in params.items():
            getattr(twin.cell, name)[...] = leaf
    jax.tree.map(np.testing.assert_array_equal, twin(x, seq_lengths=lengths), found)
    state, outputs = case.oracle(x, params)
    close(twin(x), (state[0], outputs))


def bound_parameters(case, variables, x):
    """The parameters of linen's cell in the form of the functions."""
    cell = getattr(jn_nn, CELLS[case.cell])(HIDDEN, **options_of(case))
    cell = cell.bind({"params": variables["params"]["cell"]})
    return cell.parameters(x.shape[-1])


STACKS = [(family, case) for family in ("linen", "nnx") for case in MODULES[1:5:2]]


@pytest.mark.parametrize(("flavour", "case"), long_sweep(STACKS, quick=STACKS[::3]), ids=str)
def test_stacks_and_directions_hand_the_option_on(flavour, case, rng):
    x, options = sequences(rng, 3, 5), options_of(case)
    options |= {"num_layers": 2, "bidirectional": True}
    names = [[f"{way}cell_{i}" for way in ("", "backward_")] for i in range(2)]
    if flavour == "linen":
        layer = getattr(jn_nn, LAYERS[case.cell])(HIDDEN, **options)
        variables = made(layer.init, KEY, x)
        found, cells = applied(layer, variables, x), variables["params"]
    else:
        layer = getattr(jn_nnx, LAYERS[case.cell])(
            FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0), **options
        )
        found = layer(x)
        cells = {name: getattr(layer, name).parameters() for pair in names for name in pair}
    truth = x
    for there, back in names:
        first, second = case.oracle(truth, cells[there]), case.oracle(truth[:, ::-1], cells[back])
        truth = np.concatenate([first[1], second[1][:, ::-1]], -1)
    np.testing.assert_allclose(found, truth, atol=4e-6)


def test_a_relu_is_flax_activation_fn(rng):
    """Without a norm, by the same parameters."""
    x = sequences(rng, 3, 5)
    theirs = flax_nn.RNN(flax_nn.SimpleCell(HIDDEN, activation_fn=jax.nn.relu), return_carry=True)
    ours = jn_nn.SimpleRNN(HIDDEN, norm=None, activation="relu", return_carry=True)
    variables = made(theirs.init, KEY, x)
    close(ours.apply(variables, x), applied(theirs, variables, x))


def test_a_relu_passes_no_gradient_at_0():
    """Of states that start from zeros, where nothing has moved them."""
    params = {"input_kernel": jnp.ones((1, 1)), "recurrent_kernel": jnp.ones((1, 1))}
    x = jnp.array([[0.0], [0.0], [2.0], [-1.0], [-5.0]])
    run = lambda x: jn.recurrent.rnn(x, params, norm=None, activation="relu")[1].ravel()
    np.testing.assert_array_equal(run(x), [0, 0, 2, 1, 0])
    np.testing.assert_array_equal(
        jax.jacobian(run)(x)[..., 0],
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]],
    )


def test_a_relu_from_the_identity_adds_its_inputs(rng):
    """Le, Jaitly & Hinton 2015, whose matrix starts at the identity."""
    identity = lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype)
    params = jn.recurrent.init_rnn(KEY, 4, 4, norm=None, recurrent_kernel_init=identity)
    params["input_kernel"] = jnp.eye(4)
    x = jnp.asarray(rng.random((2, 6, 4)), jnp.float32)
    _, y = jn.recurrent.rnn(x, params, norm=None, activation="relu")
    np.testing.assert_allclose(y, np.cumsum(x, 1), rtol=1e-6)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_reset_of_1_is_the_same_on_both_sides(norm, rng):
    """Where r is 1 everywhere, r (U h) and U (r h) are one, norm included."""
    x, params = sequences(rng, 4, 5), Case("gru", norm, reset_after=False).params()
    params["bias"] = params["bias"].at[:HIDDEN].set(100)
    run = partial(jn.recurrent.gru, x, params, norm=norm)
    close(run(reset_after=False), run(reset_after=True))


def test_batch_statistics_of_each_step_are_those_of_both_products(rng):
    """What return_moments gives makes evaluation equal training, masks included."""
    case = Case("gru", "batch", reset_after=False)
    x, params, lengths = sequences(rng, 5, 6), case.params(), jnp.array([6, 6, 6, 3, 6])
    run = partial(jn.recurrent.gru, x, params, norm="batch", lengths=lengths, **case.variant)
    h, y, found = run(return_moments=True)
    assert {name: value.mean.shape for name, value in found.items()} == {
        "input": (6, 3 * HIDDEN),
        "recurrent": (6, 3 * HIDDEN),
    }
    again = run(running=found)
    np.testing.assert_allclose(again[1], y, atol=1e-5)
    np.testing.assert_allclose(again[0], h, atol=1e-5)


@pytest.mark.parametrize("case", [RESET_FIRST, RELU], ids=str)
def test_the_cpu_kernels_say_why_they_do_not_run(case):
    cell = make_cell(case.cell, case.norm, case.placement, 1e-6, **case.variant)
    why = native.obstacle(jnp.ones((2, 3, FEATURES)), cell, case.params(), None, None)
    assert why == (
        f"takes an LSTM without batch norm and projection: got {case.cell}, norm='layer'"
    )


def test_chunks_count_the_columns_of_both_matrices(rng):
    params, x = Case("gru").params(), sequences(rng, 100, 4)
    lengths = {
        scan.chunk_length(scan.PLAIN, make_cell("gru", "layer", "sum", 0, **how).weights(params), x)
        for how in ({}, {"reset_after": False})
    }
    assert len(lengths) == 1


def test_half_precision(rng):
    """The state stays in float32; float16 and other cells are in the long sweeps."""
    x, params = sequences(rng, 3, 5), RESET_FIRST.params()
    exact = RESET_FIRST.oracle(x, params)[1]
    low = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), (x, params))
    (h,), outputs = RESET_FIRST.call(*low)
    assert (h.dtype, outputs.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(outputs).astype(np.float32), exact, atol=0.03)


@pytest.mark.parametrize("case", long_sweep([RESET_FIRST, RELU], quick=[RESET_FIRST]), ids=str)
def test_tangents_batches_of_calls_and_checkpoints(case, rng):
    """jvp, and vmap of gradients, against a plain scan."""
    x, params = sequences(rng, 2, 3, 7), case.params()
    dx = sequences(rng, 2, 3, 7)

    def both(implementation, x, dx):
        run = lambda x: case.call(x, params, implementation=implementation)[1]
        y, tangent = jax.jvp(run, (x,), (dx,))
        gradient = jax.grad(jax.checkpoint(lambda x: jnp.vdot(jnp.cos(run(x)), y)))(x)
        return y, tangent, gradient

    found, plain = (jax.jit(jax.vmap(partial(both, name)))(x, dx) for name in ("xla", "reference"))
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


GIVEN = Case("gru").params()
REFUSED = [
    (
        lambda x: jn.recurrent.gru(x, GIVEN, reset_after=False),
        ValueError,
        "params of gru with norm='layer', placement='ba2016', reset_after=False are input_kernel, "
        "recurrent_kernel, input_scale, recurrent_scale, bias: got recurrent_bias too. Make them "
        "with init_gru and the same norm, placement and reset_after.",
    ),
    (
        lambda x: jn.recurrent.gru(x, GIVEN, reset_after="before"),
        TypeError,
        "reset_after must be True or False: got 'before'.",
    ),
    (
        lambda x: jn.recurrent.rnn(x, RELU.params(), activation="gelu"),
        ValueError,
        "activation of rnn must be 'tanh' or 'relu': got 'gelu'.",
    ),
    (
        lambda x: jn.recurrent.rnn(x, RELU.params(), nonlinearity="relu"),
        TypeError,
        "Did you mean activation?",
    ),
    (
        lambda x: jn.recurrent.lstm(x, {}, reset_after=False),
        TypeError,
        "reset_after must be an argument of lstm, which takes",
    ),
    (
        lambda x: jn_nnx.SimpleRNN(FEATURES, 4, reset_after=False, rngs=flax_nnx.Rngs(0)),
        ValueError,
        "reset_after is for the GRU, which has a reset gate: got False for rnn.",
    ),
    (
        lambda x: jn_nnx.LayerNormGRUCell(FEATURES, 4, activation="relu", rngs=flax_nnx.Rngs(0)),
        ValueError,
        "activation is for the simple RNN: got 'relu' for gru, whose functions are fixed.",
    ),
    (
        lambda x: jn_nn.SimpleRNN(4, activation="selu").init(KEY, x),
        ValueError,
        "activation of rnn must be 'tanh' or 'relu': got 'selu'.",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED]
)
def test_refused(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(jnp.ones((2, 3, FEATURES)))
