"""Recurrent modules: Flax's without a norm, cells and layers that share parameters, linen and nnx twins."""

import re
from functools import partial

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from recurrent_cases import FEATURES, HIDDEN, PLACEMENTS, sequences

import jaxnorm as jn
from jaxnorm import linen as jn_nn
from jaxnorm import nnx as jn_nnx

pytestmark = pytest.mark.usefixtures("quick_compile")

KEY = jax.random.key(0)
LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn": "SimpleRNN"}
CELLS = {"lstm": "LayerNormLSTMCell", "gru": "LayerNormGRUCell", "rnn": "LayerNormSimpleCell"}
FLAX = {"lstm": "OptimizedLSTMCell", "gru": "GRUCell", "rnn": "SimpleCell"}
PLACED = [(kind, norm, placement) for kind in CELLS for norm in ("layer", "rms") for placement in PLACEMENTS[kind]]
close = partial(jax.tree.map, partial(np.testing.assert_allclose, atol=2e-6))


def disturbed(params):
    return jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(KEY, leaf.shape, leaf.dtype), params)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"reverse": True, "keep_order": True}, {"time_major": True}, {"time_major": True, "reverse": True}],
    ids=str,
)
def test_without_a_norm_the_layer_is_flax_rnn(kind, options, rng):
    x = sequences(rng, 4, 6)
    x = x.swapaxes(0, 1) if options.get("time_major") else x
    theirs = flax_nn.RNN(getattr(flax_nn, FLAX[kind])(HIDDEN), return_carry=True, **options)
    ours = getattr(jn_nn, LAYERS[kind])(HIDDEN, norm=None, return_carry=True, **options)
    variables = disturbed(theirs.init(KEY, x))
    assert jax.tree.map(jnp.shape, ours.init(KEY, x)) == jax.tree.map(jnp.shape, variables)
    close(ours.apply(variables, x), theirs.apply(variables, x))
    if "time_major" not in options:
        lengths = jnp.array([6, 3, 1, 5])
        (carry, y), (flax_carry, flax_y) = (module.apply(variables, x, seq_lengths=lengths) for module in (ours, theirs))
        taken = (np.arange(6) < np.asarray(lengths)[:, None])[..., None]
        close((carry, y), (flax_carry, jnp.where(taken, flax_y, 0)))
    started = disturbed(jax.tree.map(jnp.zeros_like, ours.apply(variables, x)[0]))
    close(ours.apply(variables, x, initial_carry=started), theirs.apply(variables, x, initial_carry=started))


@pytest.mark.parametrize("kind", CELLS)
def test_without_a_norm_the_nnx_layer_is_flax_rnn(kind, rng):
    x = sequences(rng, 4, 6)
    theirs = flax_nnx.RNN(getattr(flax_nnx, FLAX[kind])(FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0)), return_carry=True)
    ours = getattr(jn_nnx, LAYERS[kind])(FEATURES, HIDDEN, norm=None, return_carry=True, rngs=flax_nnx.Rngs(1))
    state = flax_nnx.state(theirs, flax_nnx.Param)
    assert jax.tree.map(jnp.shape, flax_nnx.state(ours, flax_nnx.Param)) == jax.tree.map(jnp.shape, state)
    flax_nnx.update(ours, state)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_without_a_norm_is_flax_cell(kind, rng):
    x = sequences(rng, 4)
    theirs, ours = getattr(flax_nn, FLAX[kind])(HIDDEN), getattr(jn_nn, CELLS[kind])(HIDDEN, norm=None)
    carry = theirs.initialize_carry(KEY, x.shape)
    assert jax.tree.map(jnp.shape, ours.initialize_carry(KEY, x.shape)) == jax.tree.map(jnp.shape, carry)
    variables = disturbed(theirs.init(KEY, carry, x))
    carry = disturbed(carry)
    close(ours.apply(variables, carry, x), theirs.apply(variables, carry, x))


@pytest.mark.parametrize(("kind", "norm"), [("lstm", None), ("gru", None), ("rnn", None), ("lstm", "layer")])
def test_the_carry_gives_the_width(kind, norm, rng):
    """As in Flax's cells: a decoder's cell is built of the features of its outputs and runs on the encoder's carry."""
    x, h = sequences(rng, 2, 4), jnp.full((2, HIDDEN), 0.5)
    carry = (-h, h) if kind == "lstm" else h
    layer, cell = getattr(jn_nn, LAYERS[kind]), getattr(jn_nn, CELLS[kind])
    exact = flax_nn.RNN(getattr(flax_nn, FLAX[kind])(1) if norm is None else cell(HIDDEN, norm=norm), return_carry=True)
    variables = disturbed(exact.init(KEY, x, initial_carry=carry))
    for ours in (layer(1, norm=norm, return_carry=True), flax_nn.RNN(cell(1, norm=norm), return_carry=True)):
        made = jax.eval_shape(partial(ours.init, KEY), x, initial_carry=carry)
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, variables)
        close(ours.apply(variables, x, initial_carry=carry), exact.apply(variables, x, initial_carry=carry))


def test_each_carry_gives_the_width_of_its_cell(rng):
    """In both directions of two layers; with a projection, which Flax has not, the arguments do."""
    x, (a, b, c, d) = sequences(rng, 2, 4), (jnp.full((2, width), 0.5) for width in (2, 3, 4, 5))
    carries = ((a, b), (c, d))
    layer = jn_nn.GRU(1, norm=None, num_layers=2, bidirectional=True, return_carry=True)
    (found, y), variables = jax.eval_shape(partial(layer.init_with_output, KEY), x, initial_carry=carries)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, carries)
    cells = [variables["params"][f"{name}cell_{i}"] for i in (0, 1) for name in ("", "backward_")]
    assert [(cell["ir"]["kernel"].shape, cell["hr"]["kernel"].shape) for cell in cells] == [
        ((FEATURES, 2), (2, 2)),
        ((FEATURES, 3), (3, 3)),
        ((5, 4), (4, 4)),
        ((5, 5), (5, 5)),
    ]
    assert y.shape == (2, 4, 9)
    with pytest.raises(ValueError, match=re.escape("initial h must have shape (2, 2): got (2, 5).")):
        jn_nn.LSTM(4, norm=None, projection=2).init(KEY, x, initial_carry=(c, d))
    with pytest.raises(TypeError, match=re.escape("initial must be the pair (h, c)")):
        jn_nn.LSTM(4, norm=None).init(KEY, x, initial_carry=c)
    with pytest.raises(ValueError, match=re.escape("initial c must have shape (2, 5): got (2, 4).")):
        jn_nn.LSTM(4, norm=None).init(KEY, x, initial_carry=(c, d))


@pytest.mark.parametrize("kind", CELLS)
def test_without_a_norm_parameters_start_as_flax(kind):
    """To the bit, of the same keys: kernels in nnx are drawn whole, as Flax's are."""
    x = jnp.ones((2, 4, FEATURES))
    same = partial(jax.tree.map, np.testing.assert_array_equal)
    theirs = flax_nn.RNN(getattr(flax_nn, FLAX[kind])(HIDDEN)).init(KEY, x)
    same(getattr(jn_nn, LAYERS[kind])(HIDDEN, norm=None).init(KEY, x), theirs)
    same(flax_nn.RNN(getattr(jn_nn, CELLS[kind])(HIDDEN, norm=None)).init(KEY, x), theirs)
    state = lambda module: flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))  # noqa: E731
    rngs = partial(flax_nnx.Rngs, params=0, dropout=1)
    theirs = state(getattr(flax_nnx, FLAX[kind])(FEATURES, HIDDEN, rngs=rngs()))
    same(state(getattr(jn_nnx, CELLS[kind])(FEATURES, HIDDEN, norm=None, rngs=rngs())), theirs)
    same(state(getattr(jn_nnx, LAYERS[kind])(FEATURES, HIDDEN, norm=None, rngs=rngs()).cell), theirs)


@pytest.mark.parametrize("name", ["LSTM", "LayerNormLSTMCell"])
@pytest.mark.parametrize(
    ("norm", "asked", "start"), [(None, {}, 0), (None, {"forget_bias": 0.5}, 0.5), ("rms", {}, 1), ("rms", {"forget_bias": 0}, 0)]
)
def test_the_forget_gate_starts_at_1_under_a_norm(name, norm, asked, start):
    layer = jn_nnx.LSTM if name == "LSTM" else getattr(jn_nnx, name)
    module = layer(FEATURES, 2, norm=norm, rngs=flax_nnx.Rngs(0), **asked)
    np.testing.assert_array_equal((module.cell if name == "LSTM" else module).parameters()["bias"], [0, 0, start, start, 0, 0, 0, 0])
    module = getattr(jn_nn, name)(2, norm=norm, **asked)
    carry, x = (jnp.zeros(2), jnp.zeros(2)), jnp.ones(FEATURES)
    params = (module.init(KEY, x[None]) if name == "LSTM" else module.init(KEY, carry, x))["params"]
    params = params["cell"] if name == "LSTM" else params
    bias = params["bias"] if norm else jnp.concatenate([params[f"h{gate}"]["bias"] for gate in "ifgo"])
    np.testing.assert_array_equal(bias, [0, 0, start, start, 0, 0, 0, 0])


@pytest.mark.parametrize(("kind", "norm", "placement"), PLACED)
def test_cell_layer_function_and_twin_agree(kind, norm, placement, rng):
    """RNN(cell), the layer and the function, in linen; nnx to the bit."""
    x, options = sequences(rng, 4, 6), {"norm": norm, "placement": placement}
    layer = getattr(jn_nn, LAYERS[kind])(HIDDEN, return_carry=True, **options)
    variables = disturbed(layer.init(KEY, x))
    looped = flax_nn.RNN(getattr(jn_nn, CELLS[kind])(HIDDEN, **options), return_carry=True)
    assert jax.tree.map(jnp.shape, looped.init(KEY, x)) == jax.tree.map(jnp.shape, variables)
    found = layer.apply(variables, x)
    close(looped.apply(variables, x), found)
    twin = getattr(jn_nnx, LAYERS[kind])(FEATURES, HIDDEN, return_carry=True, rngs=flax_nnx.Rngs(0), **options)
    assert set(flax_nnx.to_pure_dict(flax_nnx.state(twin.cell, flax_nnx.Param))) == set(variables["params"]["cell"])
    for name, leaf in variables["params"]["cell"].items():
        getattr(twin.cell, name)[...] = leaf
    jax.tree.map(np.testing.assert_array_equal, twin(x), found)
    close(flax_nnx.RNN(twin.cell, return_carry=True)(x), found)
    np.testing.assert_array_equal(getattr(jn.recurrent, kind)(x, variables["params"]["cell"], **options)[1], found[1])


def test_both_directions_as_flax_bidirectional(rng):
    x, lengths = sequences(rng, 3, 5), jnp.array([5, 2, 4])
    layer = jn_nn.LSTM(HIDDEN, bidirectional=True, return_carry=True)
    variables = disturbed(layer.init(KEY, x))
    rnns = [flax_nn.RNN(jn_nn.LayerNormLSTMCell(HIDDEN)) for _ in range(2)]
    theirs = flax_nn.Bidirectional(*rnns, return_carry=True)
    names = {"forward_rnn": "cell_0", "backward_rnn": "backward_cell_0"}
    renamed = {"params": {flax: {"cell": variables["params"][ours]} for flax, ours in names.items()}}
    assert jax.tree.map(jnp.shape, theirs.init(KEY, x)) == jax.tree.map(jnp.shape, renamed)
    (carry, y), (flax_carry, flax_y) = (m.apply(v, x, seq_lengths=lengths) for m, v in ((layer, variables), (theirs, renamed)))
    close(carry, flax_carry)
    close(y, jnp.where((jnp.arange(5)[None] < lengths[:, None])[..., None], flax_y, 0))
    with pytest.raises(ValueError, match="bidirectional layer must not be reversed"):
        layer.apply(variables, x, reverse=True)


def test_layers_are_one_after_the_other(rng):
    x = sequences(rng, 3, 5)
    layer = jn_nn.LSTM(HIDDEN, num_layers=2, projection=2, return_carry=True)
    variables = disturbed(layer.init(KEY, x))
    carries, y = layer.apply(variables, x)
    first = jn.recurrent.lstm(x, variables["params"]["cell_0"])
    second = jn.recurrent.lstm(first[1], variables["params"]["cell_1"])
    np.testing.assert_array_equal(y, second[1])
    jax.tree.map(np.testing.assert_array_equal, carries, (first[0][::-1], second[0][::-1]))
    assert y.shape == (3, 5, 2)
    again = layer.apply(variables, x[:, 3:], initial_carry=layer.apply(variables, x[:, :3])[0])
    close(again, (carries, y[:, 3:]))


def test_both_directions_of_two_layers_in_nnx(rng):
    x = sequences(rng, 3, 5)
    layer = jn_nnx.GRU(FEATURES, HIDDEN, num_layers=2, bidirectional=True, return_carry=True, rngs=flax_nnx.Rngs(0))
    (first, second), y = layer(x)
    assert (len(first), len(second), y.shape) == (2, 2, (3, 5, 2 * HIDDEN))
    np.testing.assert_array_equal(second[1], y[:, 0, HIDDEN:])
    np.testing.assert_array_equal(layer(x, initial_carry=jax.tree.map(jnp.zeros_like, (first, second)))[1], y)


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_dropout_and_zoneout_are_random_in_training_alone(flavour, rng):
    x = sequences(rng, 3, 5)
    options = {"num_layers": 2, "dropout": 0.5, "zoneout": 0.25}
    if flavour == "linen":
        layer = jn_nn.LSTM(HIDDEN, **options)
        variables = layer.init(KEY, x, deterministic=True)
        call = lambda seed, deterministic: layer.apply(variables, x, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)})  # noqa: E731
        cells = [variables["params"][f"cell_{i}"] for i in range(2)]
        with pytest.raises(ValueError, match="deterministic"):
            layer.apply(variables, x)
    else:
        layer = jn_nnx.LSTM(FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0), **options)
        call = lambda seed, deterministic: layer(x, deterministic=deterministic, rngs=flax_nnx.Rngs(seed))  # noqa: E731
        cells = [getattr(layer, f"cell_{i}").parameters() for i in range(2)]
    np.testing.assert_array_equal(call(1, False), call(1, False))
    assert float(jnp.abs(call(1, False) - call(2, False)).max()) > 0.1
    expected = x
    for params in cells:
        expected = jn.recurrent.lstm(expected, params, zoneout=0.25)[1]
    np.testing.assert_array_equal(call(1, True), expected)
    if flavour == "nnx":
        layer.eval()
        np.testing.assert_array_equal(layer(x), expected)


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_the_output_has_the_dtype_that_flax_gives(flavour, rng):
    x = sequences(rng, 2, 4).astype(jnp.bfloat16)
    for dtype, wanted in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        if flavour == "linen":
            y = jn_nn.LSTM(HIDDEN, dtype=dtype).init_with_output(KEY, x)[0]
            z = flax_nn.RNN(jn_nn.LayerNormLSTMCell(HIDDEN, dtype=dtype)).init_with_output(KEY, x)[0]
        else:
            layer = jn_nnx.LSTM(FEATURES, HIDDEN, dtype=dtype, rngs=flax_nnx.Rngs(0))
            y, z = layer(x), flax_nnx.RNN(layer.cell)(x)
        assert (y.dtype, z.dtype) == (wanted, wanted)
        np.testing.assert_allclose(y.astype(jnp.float32), z.astype(jnp.float32), atol=0.02)


def test_modules_train_under_jit(rng):
    """nnx.grad and linen's apply, lengths and NaN in the padding."""
    lengths = jnp.array([5, 2, 1])
    x = jnp.where((jnp.arange(5)[None] < lengths[:, None])[..., None], sequences(rng, 3, 5), jnp.nan)
    layer = jn_nnx.LSTM(FEATURES, HIDDEN, num_layers=2, bidirectional=True, rngs=flax_nnx.Rngs(0))
    gradient = flax_nnx.jit(flax_nnx.grad(lambda layer: (layer(x, seq_lengths=lengths) ** 2).sum()))(layer)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))


def test_a_random_carry_is_drawn(rng):
    x = sequences(rng, 3, 5)
    layer = jn_nn.LSTM(HIDDEN, carry_init=jax.nn.initializers.normal(1.0))
    variables = layer.init(KEY, x)
    ys = [layer.apply(variables, x, init_key=jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(ys[0], ys[1])
    assert float(jnp.abs(ys[0] - ys[2]).max()) > 0.1


def test_modules_say_what_is_wrong(rng):
    x = sequences(rng, 2, 4)
    with pytest.raises(ValueError, match="norm of a module must be 'layer', 'rms' or None: got 'batch'"):
        jn_nn.LSTM(HIDDEN, norm="batch").init(KEY, x)
    with pytest.raises(ValueError, match="norm of a module must be"):
        jn_nnx.GRU(FEATURES, HIDDEN, norm="batch", rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match="placement of gru must be one of 'ba2016', 'sum', 'gate': got 'carried_cell'"):
        jn_nn.GRU(HIDDEN, placement="carried_cell").init(KEY, x)
    with pytest.raises(ValueError, match="projection is for the LSTM"):
        jn_nnx.GRU(FEATURES, HIDDEN, projection=2, rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match="initial_carry must have one part per layer"):
        jn_nnx.GRU(FEATURES, HIDDEN, num_layers=2, rngs=flax_nnx.Rngs(0))(x, initial_carry=(jnp.zeros((2, HIDDEN)),))
