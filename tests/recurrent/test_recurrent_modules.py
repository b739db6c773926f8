"""Test recurrent modules: cells and layers that share parameters, linen and nnx twins."""

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
    PLACEMENTS,
    applied,
    close,
    made,
    sequences,
)

import jaxnorm as jn
from jaxnorm import linen as jn_nn
from jaxnorm import nnx as jn_nnx

KEY = jax.random.key(0)
PLACED = [
    (kind, norm, placement)
    for kind in CELLS
    for norm in ("layer", "rms")
    for placement in PLACEMENTS[kind]
]


@pytest.mark.parametrize(("kind", "norm", "placement"), long_sweep(PLACED, quick=PLACED[:1]))
def test_cell_layer_function_and_twin_agree(kind, norm, placement, rng):
    """RNN(cell), the layer and the function, in linen; nnx to the bit."""
    x, options = sequences(rng, 4, 6), {"norm": norm, "placement": placement}
    layer = getattr(jn_nn, LAYERS[kind])(HIDDEN, return_carry=True, **options)
    variables = made(layer.init, KEY, x)
    looped = flax_nn.RNN(getattr(jn_nn, CELLS[kind])(HIDDEN, **options), return_carry=True)
    assert jax.tree.map(jnp.shape, jax.eval_shape(looped.init, KEY, x)) == jax.tree.map(
        jnp.shape, variables
    )
    found = layer.apply(variables, x)
    close(applied(looped, variables, x), found)
    twin = getattr(jn_nnx, LAYERS[kind])(
        FEATURES, HIDDEN, return_carry=True, rngs=flax_nnx.Rngs(0), **options
    )
    assert set(flax_nnx.to_pure_dict(flax_nnx.state(twin.cell, flax_nnx.Param))) == set(
        variables["params"]["cell"]
    )
    for name, leaf in variables["params"]["cell"].items():
        getattr(twin.cell, name)[...] = leaf
    jax.tree.map(np.testing.assert_array_equal, twin(x), found)
    close(flax_nnx.RNN(twin.cell, return_carry=True)(x), found)
    np.testing.assert_array_equal(
        getattr(jn.recurrent, kind)(x, variables["params"]["cell"], **options)[1], found[1]
    )


def test_both_directions_as_flax_bidirectional(rng):
    x, lengths = sequences(rng, 3, 5), jnp.array([5, 2, 4])
    layer = jn_nn.LSTM(HIDDEN, bidirectional=True, return_carry=True)
    variables = made(layer.init, KEY, x)
    rnns = [flax_nn.RNN(jn_nn.LayerNormLSTMCell(HIDDEN)) for _ in range(2)]
    theirs = flax_nn.Bidirectional(*rnns, return_carry=True)
    names = {"forward_rnn": "cell_0", "backward_rnn": "backward_cell_0"}
    renamed = {
        "params": {flax: {"cell": variables["params"][ours]} for flax, ours in names.items()}
    }
    assert jax.tree.map(jnp.shape, jax.eval_shape(theirs.init, KEY, x)) == jax.tree.map(
        jnp.shape, renamed
    )
    (carry, y), (flax_carry, flax_y) = (
        applied(m, v, x, seq_lengths=lengths) for m, v in ((layer, variables), (theirs, renamed))
    )
    close(carry, flax_carry)
    close(y, jnp.where((jnp.arange(5)[None] < lengths[:, None])[..., None], flax_y, 0))
    with pytest.raises(ValueError, match="bidirectional layer must not be reversed"):
        layer.apply(variables, x, reverse=True)


def test_layers_are_one_after_the_other(rng):
    x = sequences(rng, 3, 5)
    layer = jn_nn.LSTM(HIDDEN, num_layers=2, projection=2, return_carry=True)
    variables = made(layer.init, KEY, x)
    carries, y = layer.apply(variables, x)
    first = jn.recurrent.lstm(x, variables["params"]["cell_0"])
    second = jn.recurrent.lstm(first[1], variables["params"]["cell_1"])
    np.testing.assert_array_equal(y, second[1])
    jax.tree.map(np.testing.assert_array_equal, carries, (first[0][::-1], second[0][::-1]))
    assert y.shape == (3, 5, 2)
    again = layer.apply(variables, x[:, 3:], initial_carry=layer.apply(variables, x[:, :3])[0])
    close(again, (carries, y[:, 3:]))


@pytest.mark.parametrize("norm", ["layer", None])
def test_layers_with_a_projection_agree_with_their_twin(norm, rng):
    x = sequences(rng, 3, 5)
    layer = jn_nnx.LSTM(
        FEATURES,
        HIDDEN,
        norm=norm,
        num_layers=2,
        projection=2,
        return_carry=True,
        rngs=flax_nnx.Rngs(0),
    )
    carries, y = layer(x)
    assert [[part.shape for part in carry] for carry in carries] == [[(3, HIDDEN), (3, 2)]] * 2
    assert [part.shape for part in layer.cell_0.initialize_carry((3, FEATURES))] == [
        (3, HIDDEN),
        (3, 2),
    ]
    expected = x
    for cell in (layer.cell_0, layer.cell_1):
        expected = jn.recurrent.lstm(expected, cell.parameters(), norm=norm)[1]
    np.testing.assert_array_equal(y, expected)


def test_both_directions_of_two_layers_in_nnx(rng):
    x = sequences(rng, 3, 5)
    layer = jn_nnx.GRU(
        FEATURES, HIDDEN, num_layers=2, bidirectional=True, return_carry=True, rngs=flax_nnx.Rngs(0)
    )
    (first, second), y = layer(x)
    assert (len(first), len(second), y.shape) == (2, 2, (3, 5, 2 * HIDDEN))
    np.testing.assert_array_equal(second[1], y[:, 0, HIDDEN:])
    np.testing.assert_array_equal(
        layer(x, initial_carry=jax.tree.map(jnp.zeros_like, (first, second)))[1], y
    )


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_dropout_and_zoneout_are_random_in_training_alone(flavour, rng):
    x = sequences(rng, 3, 5)
    options = {"num_layers": 2, "dropout": 0.5, "zoneout": 0.25}
    if flavour == "linen":
        layer = jn_nn.LSTM(HIDDEN, **options)
        variables = layer.init(KEY, x, deterministic=True)
        call = lambda seed, deterministic: layer.apply(
            variables, x, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)}
        )
        cells = [variables["params"][f"cell_{i}"] for i in range(2)]
        with pytest.raises(ValueError, match="deterministic"):
            layer.apply(variables, x)
    else:
        layer = jn_nnx.LSTM(FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0), **options)
        call = lambda seed, deterministic: layer(
            x, deterministic=deterministic, rngs=flax_nnx.Rngs(seed)
        )
        cells = [getattr(layer, f"cell_{i}").parameters() for i in range(2)]
    np.testing.assert_array_equal(call(1, False), call(1, False))
    assert np.abs(np.asarray(call(1, False)) - call(2, False)).max() > 0.1
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
            z = flax_nn.RNN(jn_nn.LayerNormLSTMCell(HIDDEN, dtype=dtype)).init_with_output(KEY, x)[
                0
            ]
        else:
            layer = jn_nnx.LSTM(FEATURES, HIDDEN, dtype=dtype, rngs=flax_nnx.Rngs(0))
            y, z = layer(x), flax_nnx.RNN(layer.cell)(x)
        assert (y.dtype, z.dtype) == (wanted, wanted)
        np.testing.assert_allclose(*(np.asarray(a).astype(np.float32) for a in (y, z)), atol=0.02)


def test_modules_train_under_jit(rng):
    """nnx.grad and linen's apply, lengths and NaN in the padding."""
    lengths = jnp.array([5, 2, 1])
    x = jnp.where(
        (jnp.arange(5)[None] < lengths[:, None])[..., None], sequences(rng, 3, 5), jnp.nan
    )
    layer = jn_nnx.LSTM(FEATURES, HIDDEN, num_layers=2, bidirectional=True, rngs=flax_nnx.Rngs(0))
    gradient = flax_nnx.jit(
        flax_nnx.grad(lambda layer: (layer(x, seq_lengths=lengths) ** 2).sum())
    )(layer)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_a_random_carry_is_drawn(rng):
    x = sequences(rng, 3, 5)
    layer = jn_nn.LSTM(HIDDEN, carry_init=jax.nn.initializers.normal(1.0))
    variables = layer.init(KEY, x)
    ys = [layer.apply(variables, x, init_key=jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(ys[0], ys[1])
    assert np.abs(np.asarray(ys[0]) - ys[2]).max() > 0.1


def test_modules_say_what_is_wrong(rng):
    x = sequences(rng, 2, 4)
    with pytest.raises(
        ValueError, match="norm of a module must be 'layer', 'rms' or None: got 'batch'"
    ):
        jn_nn.LSTM(HIDDEN, norm="batch").init(KEY, x)
    with pytest.raises(ValueError, match="norm of a module must be"):
        jn_nnx.GRU(FEATURES, HIDDEN, norm="batch", rngs=flax_nnx.Rngs(0))
    with pytest.raises(
        ValueError,
        match="placement of gru must be one of 'ba2016', 'sum', 'gate': got 'carried_cell'",
    ):
        jn_nn.GRU(HIDDEN, placement="carried_cell").init(KEY, x)
    with pytest.raises(ValueError, match="projection is for the LSTM"):
        jn_nnx.GRU(FEATURES, HIDDEN, projection=2, rngs=flax_nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="initial_carry must be a tuple of 2 layers, for each one carry: got"
    ):
        jn_nnx.GRU(FEATURES, HIDDEN, num_layers=2, rngs=flax_nnx.Rngs(0))(
            x, initial_carry=(jnp.zeros((2, HIDDEN)),)
        )


@pytest.mark.parametrize("kind", CELLS)
def test_kernels_keep_the_sharding_that_their_initializers_name(kind):
    """Boxes of linen's and nnx's partitioned initializers, around each block of gates, become one
    around the kernel.
    """
    names, draw = ("data", "model"), jax.nn.initializers.lecun_normal()
    options = lambda box: {
        "kernel_init": box(draw, names),
        "recurrent_kernel_init": box(draw, names),
    }
    x = jnp.ones((2, 5, FEATURES))
    plain = getattr(jn_nn, LAYERS[kind])(HIDDEN, recurrent_kernel_init=draw).init(KEY, x)
    for box in (flax_nn.with_partitioning, flax_nn.with_logical_partitioning):
        found = getattr(jn_nn, LAYERS[kind])(HIDDEN, **options(box)).init(KEY, x)
        specs = flax_nn.get_partition_spec(found)["params"]["cell"]
        assert [specs[name] for name in ("input_kernel", "recurrent_kernel")] == [
            jax.sharding.PartitionSpec(*names)
        ] * 2
        jax.tree.map(np.testing.assert_array_equal, flax_nn.unbox(found), plain)
    mesh = jax.make_mesh((1, 1), names, (jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        cell = getattr(jn_nnx, CELLS[kind])(
            FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0), **options(flax_nnx.with_partitioning)
        )
        theirs = flax_nnx.Linear(
            3,
            3,
            kernel_init=options(flax_nnx.with_partitioning)["kernel_init"],
            rngs=flax_nnx.Rngs(0),
        ).kernel
    bare = getattr(jn_nnx, CELLS[kind])(
        FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0), recurrent_kernel_init=draw
    )
    for name in ("input_kernel", "recurrent_kernel"):
        assert getattr(cell, name).get_metadata() == theirs.get_metadata()
        np.testing.assert_array_equal(getattr(cell, name)[...], getattr(bare, name)[...])
