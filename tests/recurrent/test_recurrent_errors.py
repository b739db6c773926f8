"""Test which calls are refused, in words that help, and what odd input gives."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import Rngs
from jax.experimental import checkify
from recurrent_cases import FEATURES, HIDDEN, Case, sequences

import jaxnorm as jn
from jaxnorm import linen, nnx

DRAW = partial(np.random.default_rng(0).uniform, -1, 1)
X = np.ones((2, 5, FEATURES), np.float32)  # nothing is compiled while tests are collected
PARAMS = {
    **{
        name: DRAW(size=(size, 4 * HIDDEN)).astype(np.float32)
        for name, size in (("input_kernel", FEATURES), ("recurrent_kernel", HIDDEN))
    },
    **{f"{name}_scale": np.ones(4 * HIDDEN, np.float32) for name in ("input", "recurrent")},
    "bias": np.zeros(4 * HIDDEN, np.float32),
    **{f"cell_{name}": np.full(HIDDEN, name == "scale", np.float32) for name in ("scale", "bias")},
}
without = lambda *names: {name: leaf for name, leaf in PARAMS.items() if name not in names}

REFUSED = [
    ({"x": np.ones((2, 5, 3), np.int32)}, TypeError, "x must be floating point: got int32"),
    ({"x": X.astype(np.complex64)}, TypeError, "x must be real: got complex64"),
    (
        {"x": np.ones(3, np.float32)},
        ValueError,
        "x must have an axis of time and one of features, (..., batch, time, features): got shape "
        "(3,)",
    ),
    (
        {"x": np.ones((2, 5, 7), np.float32)},
        ValueError,
        "input_kernel must have shape (7, 16) for x of 7 features and recurrent_kernel (4, 16)",
    ),
    ({"params": [1]}, TypeError, "params must be a dict, as init_lstm makes it: got list"),
    (
        {"params": {}},
        ValueError,
        "params must hold a matrix input_kernel: got nothing. Make them with init_lstm",
    ),
    (
        {"params": without("recurrent_kernel", "bias")},
        ValueError,
        "params must hold a matrix recurrent_kernel: got input_kernel (3, 16), ",
    ),
    (
        {"params": PARAMS | {"bias": np.ones(4, np.float32)}},
        ValueError,
        "bias must have shape (16,) for x of 3 features",
    ),
    (
        {"params": PARAMS | {"scale": np.ones(16, np.float32)}},
        ValueError,
        "got scale too. Make them with init_lstm and the same norm and placement",
    ),
    (
        {"params": PARAMS | {"bias": np.ones(16, np.int32)}},
        TypeError,
        "bias must be floating point: got int32",
    ),
    (
        {"placement": "sum"},
        ValueError,
        "got cell_bias, cell_scale, input_scale, recurrent_scale too",
    ),
    (
        {"norm": None},
        ValueError,
        "params of lstm with norm=None, placement='ba2016' are input_kernel, recurrent_kernel, "
        "bias: got",
    ),
    (
        {"placement": "post"},
        ValueError,
        "placement of lstm must be one of 'ba2016', 'sum', 'gate', 'carried_cell': got 'post'",
    ),
    ({"norm": "group"}, ValueError, "norm must be 'layer', 'rms', 'batch' or None: got 'group'"),
    (
        {"norm": "batch", "placement": "sum"},
        ValueError,
        "recurrent batch norm must have placement 'ba2016'",
    ),
    ({"epsilon": -1.0}, ValueError, "epsilon must be finite and >= 0: got -1.0"),
    (
        {"implementation": "cudnn"},
        ValueError,
        "implementation must be None, 'reference', 'xla', 'native' or 'pallas': got 'cudnn'",
    ),
    ({"lengths": np.float32([1, 2])}, TypeError, "lengths must be integers: got float32"),
    (
        {"lengths": np.int32([1, 2, 3])},
        ValueError,
        "lengths must have the shape of the batch, (2,): got (3,)",
    ),
    (
        {"lengths": np.int32([1, 6])},
        ValueError,
        "lengths must lie between 0 and the 5 steps of x: found 6",
    ),
    ({"lengths": [-1, 2]}, ValueError, "lengths must lie between 0 and the 5 steps of x: found -1"),
    (
        {"where": np.ones((2, 5), np.float32)},
        TypeError,
        "where must be boolean: got float32. Cast it first, for example with .astype(bool)",
    ),
    (
        {"where": np.ones((5, 2), bool)},
        ValueError,
        "where must have the shape of x without its features, (2, 5): got (5, 2)",
    ),
    (
        {"segment_ids": np.ones((2, 5), np.float32)},
        TypeError,
        "segments must be integers: got float32",
    ),
    (
        {"segment_ids": np.ones((2, 4), np.int32)},
        ValueError,
        "segments must have the shape of x without its features, (2, 5): got (2, 4)",
    ),
    ({"initial": np.zeros((2, 4), np.float32)}, TypeError, "initial must be the pair (h, c)"),
    ({"initial": (np.zeros((2, 4), np.float32),)}, TypeError, "initial must be the pair (h, c)"),
    (
        {"initial": (np.zeros((2, 4), np.float32), np.zeros((2, 5), np.float32))},
        ValueError,
        "initial c must have shape (2, 4): got (2, 5)",
    ),
    ({"x": PARAMS}, TypeError, "x must be an array of numbers: got dict."),
    (
        {"params": {"params": {"cell": PARAMS}}},
        TypeError,
        "params must be an array of numbers: got dict.",
    ),
    ({"zoneout": 1.5}, ValueError, "zoneout must lie in [0, 1]: got 1.5"),
    ({"zoneout": (0.1, 0.1, 0.1)}, ValueError, "zoneout must be one rate, or one for each of h, c"),
    (
        {"running": {}},
        ValueError,
        "running and return_moments are for norm='batch': got norm='layer'",
    ),
    ({"return_moments": True}, ValueError, "running and return_moments are for norm='batch'"),
    (
        {"norm": "batch", "running": 3},
        TypeError,
        "running must be a dict of Moments, as return_moments gives it: got int",
    ),
    (
        {"norm": "batch", "running": {}},
        ValueError,
        "running must hold Moments of input, recurrent, cell",
    ),
    ({"longer": "wrap"}, ValueError, "longer must be 'last' or 'raise': got 'wrap'"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), REFUSED, ids=[row[2][:50] for row in REFUSED]
)
def test_refused(change, error, message):
    arguments = {"x": X, "params": PARAMS} | change
    for call in (
        jn.recurrent.lstm,
        lambda **kwargs: jax.eval_shape(lambda: jn.recurrent.lstm(**kwargs)),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call(**arguments)


def test_making_parameters_refuses_sizes():
    for bad, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"features must be a positive integer: got {bad}"):
            jn.recurrent.init_lstm(jax.random.key(0), 3, bad)
    for make, option in (
        ("init_lstm", "forget"),
        ("init_gru", "forget_bias"),
        ("init_gru", "projection"),
        ("init_rnn", "projection"),
    ):
        with pytest.raises(
            TypeError, match=f"^{option} must be an argument of {make}, which takes key, "
        ):
            getattr(jn.recurrent, make)(jax.random.key(0), 3, 4, **{option: 2})


def test_lengths_inside_jit_are_checked_by_checkify():
    call = checkify.checkify(
        jax.jit(lambda n: jn.recurrent.lstm(X, PARAMS, lengths=n)[1]), errors=checkify.user_checks
    )
    call(jnp.array([1, 5]))[0].throw()
    with pytest.raises(
        checkify.JaxRuntimeError, match="lengths must lie between 0 and the 5 steps of x"
    ):
        call(jnp.array([1, 6]))[0].throw()


def test_lengths_of_few_bits_beside_many_steps():
    call = checkify.checkify(
        jax.jit(lambda x, n: jn.recurrent.lstm(x, PARAMS, lengths=n)[0]),
        errors=checkify.user_checks,
    )
    call(np.zeros((1, 256, FEATURES), np.float32), jnp.array([9], jnp.uint8))[0].throw()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lengths_and_segments_where_integers_have_64_bits(kind, x64):
    """Under strict promotion, which refuses to compare integers of 32 and 64 bits."""
    ids = np.broadcast_to(np.arange(5) // 3, (2, 5)).astype(kind)
    found, wanted = (
        jn.recurrent.lstm(X, PARAMS, lengths=n, segment_ids=ids)[1]
        for n in (kind([2, 5]), kind([2, 5]).astype(np.int8))
    )
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_no_sequences_or_no_steps(shape):
    x = jnp.ones((*shape, FEATURES))
    (h, c), y = jn.recurrent.lstm(x, PARAMS)
    assert (h.shape, c.shape, y.shape) == ((shape[0], HIDDEN), (shape[0], HIDDEN), (*shape, HIDDEN))
    gradient = jax.grad(lambda p: jn.recurrent.lstm(x, p)[1].sum())(PARAMS)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_parameters_here_are_those_that_are_made():
    made = jax.eval_shape(
        partial(jn.recurrent.init_lstm, in_features=FEATURES, features=HIDDEN), jax.random.key(0)
    )
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, PARAMS)


def test_a_mask_of_nothing_gives_the_initial_state():
    initial = (jnp.full((2, HIDDEN), 0.5), jnp.full((2, HIDDEN), -0.5))
    x = jnp.full((2, 5, FEATURES), jnp.nan)
    (h, c), y = jn.recurrent.lstm(x, PARAMS, initial=initial, where=jnp.zeros((2, 5), bool))
    assert (h == initial[0]).all()
    assert (c == initial[1]).all()
    assert (y == 0).all()
    gradient = jax.grad(lambda p: jn.recurrent.lstm(x, p, lengths=jnp.zeros(2, int))[1].sum())(
        PARAMS
    )
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_a_broken_sequence_stays_alone(rng):
    """NaN and Inf in one sequence change no other, in values and in gradients."""
    x = sequences(rng, 3, 5)
    for bad in (jnp.nan, jnp.inf):
        broken = x.at[1, 2].set(bad)
        y, clean = (jn.recurrent.lstm(value, PARAMS)[1] for value in (broken, x))
        np.testing.assert_array_equal(y[jnp.array([0, 2])], clean[jnp.array([0, 2])])
        assert not np.isfinite(y[1, 2:]).all()
        gx = jax.grad(lambda x: jn.recurrent.lstm(x, PARAMS)[1][jnp.array([0, 2])].sum())(broken)
        assert np.isfinite(gx[jnp.array([0, 2])]).all()


def test_large_offsets_of_the_input_kernel(rng):
    """Rows of the kernel with an offset of 1e4: centered before the product, nothing is lost."""
    case = Case("lstm")
    x, params = sequences(rng, 3, 4), case.params()
    shifted = params | {"input_kernel": params["input_kernel"] + 1e4}
    truth = case.oracle(x, shifted)[1]
    np.testing.assert_allclose(jn.recurrent.lstm(x, shifted)[1], truth, atol=2e-5)


def test_debug_nans_finds_nothing_in_zeros():
    with jax.debug_nans(True), jax.debug_infs(True):
        value, _ = jax.value_and_grad(
            lambda p: jn.recurrent.lstm(jnp.zeros((2, 30, FEATURES)), p)[1].sum()
        )(PARAMS)
    assert value == 0


MADE = [
    lambda layers: linen.LSTM(4, num_layers=layers).init(jax.random.key(0), X),
    lambda layers: nnx.GRU(3, 4, num_layers=layers, rngs=Rngs(0)),
]


@pytest.mark.parametrize("layers", [0, -1])
@pytest.mark.parametrize("make", MADE, ids=["linen", "nnx"])
def test_a_network_has_a_layer(make, layers):
    with pytest.raises(ValueError, match=f"num_layers must be at least 1: got {layers}"):
        make(layers)


@pytest.mark.parametrize("rate", [2.0, -0.1])
@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_a_rate_of_dropout_that_cannot_be(family, rate):
    """Of 2 the survivors would be divided by -1."""
    make = {
        "linen": lambda: linen.LSTM(4, num_layers=2, dropout=rate, deterministic=True).init(
            jax.random.key(0), X
        ),
        "nnx": lambda: nnx.GRU(3, 4, num_layers=2, dropout=rate, rngs=Rngs(0)),
    }
    with pytest.raises(ValueError, match=rf"dropout must lie in \[0, 1\]: got {rate}"):
        make[family]()


OF_MODULES = [
    (
        {"seq_lengths": np.int32([1, 6])},
        ValueError,
        "seq_lengths must lie between 0 and the 5 steps of x: found 6",
    ),
    ({"seq_lengths": np.float32([1, 2])}, TypeError, "seq_lengths must be integers: got float32"),
    (
        {"seq_lengths": np.int32([1])},
        ValueError,
        "seq_lengths must have the shape of the batch, (2,): got (1,)",
    ),
    (
        {"mask": np.ones((2, 5), np.float32)},
        TypeError,
        "mask must be boolean: got float32. Cast it first",
    ),
    (
        {"mask": np.ones((5, 2), bool)},
        ValueError,
        "mask must have the shape of x without its features, (2, 5): got (5, 2)",
    ),
    (
        {"initial_carry": np.zeros((2, 4), np.float32)},
        TypeError,
        "a carry must be the pair (c, h), as in Flax: got ndarray",
    ),
    (
        {"initial_carry": (np.zeros((2, 4), np.float32),)},
        TypeError,
        "a carry must be the pair (c, h), as in Flax: got tuple",
    ),
]


@pytest.mark.parametrize(
    ("given", "error", "message"), OF_MODULES, ids=[row[2][:40] for row in OF_MODULES]
)
def test_modules_call_their_arguments_by_their_names(given, error, message):
    made = nnx.LSTM(X.shape[-1], 4, rngs=Rngs(0))
    for run in (
        lambda **given: linen.LSTM(4).init(jax.random.key(0), X, **given),
        lambda **given: made(X, **given),
    ):
        with pytest.raises(error, match=re.escape(message)):
            run(**given)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_modules_name_the_norms_that_they_take(norm):
    for make in (
        lambda: linen.GRU(4, norm=norm).init(jax.random.key(0), X),
        lambda: nnx.GRU(3, 4, norm=norm, rngs=Rngs(0)),
    ):
        with pytest.raises(
            ValueError, match=f"norm of a module must be 'layer', 'rms' or None: got '{norm}'"
        ):
            make()


@pytest.mark.parametrize("carry", ["array", "one layer", "no directions"])
def test_a_carry_of_another_structure(carry):
    part = np.zeros((2, 4), np.float32)
    given = {"array": part, "one layer": ((part, part),), "no directions": (part, part)}[carry]
    made = nnx.GRU(X.shape[-1], 4, num_layers=2, bidirectional=True, rngs=Rngs(0))
    network = linen.GRU(4, num_layers=2, bidirectional=True)
    wanted = (
        "initial_carry must be a tuple of 2 layers, for each a pair, of both directions: "
        "got PyTreeDef"
    )
    for run in (
        lambda: network.init(jax.random.key(0), X, initial_carry=given),
        lambda: made(X, initial_carry=given),
    ):
        with pytest.raises(ValueError, match=re.escape(wanted)):
            run()


def test_a_carry_of_several_layers_is_one_for_each():
    """(c, h), given for two layers, is not taken for the carries of both."""
    given = (np.zeros((2, 4), np.float32),) * 2
    made = nnx.LSTM(X.shape[-1], 4, num_layers=2, rngs=Rngs(0))
    wanted = "initial_carry must be a tuple of 2 layers, for each one carry (c, h): got PyTreeDef"
    for run in (
        lambda: linen.LSTM(4, num_layers=2).init(jax.random.key(0), X, initial_carry=given),
        lambda: made(X, initial_carry=given),
    ):
        with pytest.raises(ValueError, match=re.escape(wanted)):
            run()


PART = np.zeros((2, 4), np.float32)
OF_CELLS = [
    (
        "GRU",
        (PART, PART),
        "a carry of gru must be an array for each part of the state: got PyTreeDef",
    ),
    ("LSTM", PART, "a carry must be the pair (c, h), as in Flax: got ndarray"),
    ("LSTM", (PART,), "a carry must be the pair (c, h), as in Flax: got tuple"),
    (
        "LSTM",
        ((PART, PART), PART),
        "a carry of lstm must be an array for each part of the state: got PyTreeDef",
    ),
]


@pytest.mark.parametrize(
    ("kind", "carry", "message"), OF_CELLS, ids=[row[2][:40] for row in OF_CELLS]
)
def test_cells_say_what_a_carry_is(kind, carry, message):
    name, x = f"LayerNorm{kind}Cell", X[:, 0]
    made = getattr(nnx, name)(X.shape[-1], 4, rngs=Rngs(0))
    for run in (
        lambda: getattr(linen, name)(4).init(jax.random.key(0), carry, x),
        lambda: made(carry, x),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            run()


def test_cells_take_a_carry_in_a_list():
    made = nnx.LayerNormLSTMCell(X.shape[-1], 4, rngs=Rngs(0))
    found, wanted = (made(carry, X[:, 0])[1] for carry in ([PART, PART + 1], (PART, PART + 1)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["GRU", "SimpleRNN", "LayerNormGRUCell", "LayerNormSimpleCell"])
def test_a_forget_gate_is_of_the_lstm(name):
    with pytest.raises(
        ValueError, match="forget_bias is for the LSTM, which has a forget gate: got 5"
    ):
        getattr(nnx, name)(3, 4, forget_bias=5, rngs=Rngs(0))


@pytest.mark.parametrize("layers", [2.0, "2", True])
def test_layers_are_counted(layers):
    for make in MADE:
        with pytest.raises(TypeError, match=f"num_layers must be an integer: got {layers!r}"):
            make(layers)
