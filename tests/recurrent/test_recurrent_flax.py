"""Compare recurrent modules without a norm with Flax's.

Values, parameters and how they start, dtypes, and the width of the carry are equal.
"""

import re
from functools import partial
from itertools import product

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
    FLAX,
    HIDDEN,
    LAYERS,
    applied,
    close,
    disturbed,
    made,
    sequences,
)

from jaxnorm import linen as jn_nn
from jaxnorm import nnx as jn_nnx

KEY = jax.random.key(0)
ORDERS = [
    {},
    {"reverse": True},
    {"time_major": True},
    {"reverse": True, "keep_order": True},
    {"time_major": True, "reverse": True},
]


OF_RNN = [*product(CELLS, ORDERS)]
SOME = [("lstm", {}), ("rnn", {}), ("gru", ORDERS[4])]


@pytest.mark.parametrize(("kind", "options"), long_sweep(OF_RNN, quick=SOME), ids=str)
def test_without_a_norm_the_layer_is_flax_rnn(kind, options, rng):
    x = sequences(rng, 4, 6)
    x = x.swapaxes(0, 1) if options.get("time_major") else x
    theirs = flax_nn.RNN(getattr(flax_nn, FLAX[kind])(HIDDEN), return_carry=True, **options)
    ours = getattr(jn_nn, LAYERS[kind])(HIDDEN, norm=None, return_carry=True, **options)
    variables = made(theirs.init, KEY, x)
    assert jax.tree.map(jnp.shape, jax.eval_shape(ours.init, KEY, x)) == jax.tree.map(
        jnp.shape, variables
    )
    close(ours.apply(variables, x), applied(theirs, variables, x))
    if "time_major" not in options:
        lengths = jnp.array([6, 3, 1, 5])
        (carry, y), (flax_carry, flax_y) = (
            applied(module, variables, x, seq_lengths=lengths) for module in (ours, theirs)
        )
        taken = (np.arange(6) < np.asarray(lengths)[:, None])[..., None]
        close((carry, y), (flax_carry, jnp.where(taken, flax_y, 0)))
    started = disturbed(jax.tree.map(jnp.zeros_like, ours.apply(variables, x)[0]))
    close(
        ours.apply(variables, x, initial_carry=started),
        applied(theirs, variables, x, initial_carry=started),
    )


@pytest.mark.parametrize("kind", CELLS)
def test_without_a_norm_the_nnx_layer_is_flax_rnn(kind, rng):
    x = sequences(rng, 4, 6)
    theirs = flax_nnx.RNN(
        getattr(flax_nnx, FLAX[kind])(FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0)), return_carry=True
    )
    ours = getattr(jn_nnx, LAYERS[kind])(
        FEATURES, HIDDEN, norm=None, return_carry=True, rngs=flax_nnx.Rngs(1)
    )
    state = flax_nnx.state(theirs, flax_nnx.Param)
    found, truth = (
        flax_nnx.to_pure_dict(flax_nnx.state(layer, flax_nnx.Param)) for layer in (ours, theirs)
    )
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, truth)
    flax_nnx.update(ours, state)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_without_a_norm_is_flax_cell(kind, rng):
    x = sequences(rng, 4)
    theirs, ours = (
        getattr(flax_nn, FLAX[kind])(HIDDEN),
        getattr(jn_nn, CELLS[kind])(HIDDEN, norm=None),
    )
    carry = theirs.initialize_carry(KEY, x.shape)
    assert jax.tree.map(jnp.shape, ours.initialize_carry(KEY, x.shape)) == jax.tree.map(
        jnp.shape, carry
    )
    variables = made(theirs.init, KEY, carry, x)
    carry = disturbed(carry)
    close(ours.apply(variables, carry, x), applied(theirs, variables, carry, x))


WIDTHS = [("lstm", None), ("gru", None), ("rnn", None), ("lstm", "layer")]


@pytest.mark.parametrize(("kind", "norm"), long_sweep(WIDTHS, quick=WIDTHS[2:]))
def test_the_carry_gives_the_width(kind, norm, rng):
    """As in Flax's cells: a decoder's cell is built of the features of its outputs and runs on the
    encoder's carry.
    """
    x, h = sequences(rng, 2, 4), jnp.full((2, HIDDEN), 0.5)
    carry = (-h, h) if kind == "lstm" else h
    layer, cell = getattr(jn_nn, LAYERS[kind]), getattr(jn_nn, CELLS[kind])
    exact = flax_nn.RNN(
        getattr(flax_nn, FLAX[kind])(1) if norm is None else cell(HIDDEN, norm=norm),
        return_carry=True,
    )
    variables = made(exact.init, KEY, x, initial_carry=carry)
    truth = applied(exact, variables, x, initial_carry=carry)
    for ours in (
        layer(1, norm=norm, return_carry=True),
        flax_nn.RNN(cell(1, norm=norm), return_carry=True),
    ):
        like = jax.eval_shape(partial(ours.init, KEY), x, initial_carry=carry)
        assert jax.tree.map(jnp.shape, like) == jax.tree.map(jnp.shape, variables)
        close(applied(ours, variables, x, initial_carry=carry), truth)


def test_each_carry_gives_the_width_of_its_cell(rng):
    """In both directions of two layers; with a projection, which Flax has not, the arguments do."""
    x, (a, b, c, d) = sequences(rng, 2, 4), (jnp.full((2, width), 0.5) for width in (2, 3, 4, 5))
    carries = ((a, b), (c, d))
    layer = jn_nn.GRU(1, norm=None, num_layers=2, bidirectional=True, return_carry=True)
    (found, y), variables = jax.eval_shape(
        partial(layer.init_with_output, KEY), x, initial_carry=carries
    )
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, carries)
    cells = [variables["params"][f"{name}cell_{i}"] for i in (0, 1) for name in ("", "backward_")]
    assert [(cell["ir"]["kernel"].shape, cell["hr"]["kernel"].shape) for cell in cells] == [
        ((FEATURES, 2), (2, 2)),
        ((FEATURES, 3), (3, 3)),
        ((5, 4), (4, 4)),
        ((5, 5), (5, 5)),
    ]
    assert y.shape == (2, 4, 9)
    with pytest.raises(
        ValueError, match=re.escape("initial h must have shape (2, 2): got (2, 5).")
    ):
        jn_nn.LSTM(4, norm=None, projection=2).init(KEY, x, initial_carry=(c, d))
    with pytest.raises(TypeError, match=re.escape("a carry must be the pair (c, h), as in Flax")):
        jn_nn.LSTM(4, norm=None).init(KEY, x, initial_carry=c)
    with pytest.raises(
        ValueError, match=re.escape("initial c must have shape (2, 5): got (2, 4).")
    ):
        jn_nn.LSTM(4, norm=None).init(KEY, x, initial_carry=(c, d))


@pytest.mark.parametrize("kind", long_sweep(list(CELLS), quick=["gru"]))
def test_without_a_norm_parameters_start_as_flax(kind):
    """To the bit, of the same keys: kernels in nnx are drawn whole, as Flax's are."""
    x = jnp.ones((2, 4, FEATURES))
    same = partial(jax.tree.map, np.testing.assert_array_equal)
    theirs = flax_nn.RNN(getattr(flax_nn, FLAX[kind])(HIDDEN)).init(KEY, x)
    same(getattr(jn_nn, LAYERS[kind])(HIDDEN, norm=None).init(KEY, x), theirs)
    same(flax_nn.RNN(getattr(jn_nn, CELLS[kind])(HIDDEN, norm=None)).init(KEY, x), theirs)
    state = lambda module: flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))
    for rngs in (
        partial(flax_nnx.Rngs, 0),
        partial(flax_nnx.Rngs, params=0),
        partial(flax_nnx.Rngs, params=0, dropout=1),
    ):
        theirs = state(getattr(flax_nnx, FLAX[kind])(FEATURES, HIDDEN, rngs=rngs()))
        same(state(getattr(jn_nnx, CELLS[kind])(FEATURES, HIDDEN, norm=None, rngs=rngs())), theirs)
        same(
            state(getattr(jn_nnx, LAYERS[kind])(FEATURES, HIDDEN, norm=None, rngs=rngs()).cell),
            theirs,
        )
    random = getattr(jn_nnx, LAYERS[kind])(
        FEATURES, HIDDEN, num_layers=2, dropout=0.5, norm=None, rngs=flax_nnx.Rngs(0)
    )
    same(
        state(random.cell_0),
        state(getattr(flax_nnx, FLAX[kind])(FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0))),
    )


@pytest.mark.parametrize("name", ["LSTM", "LayerNormLSTMCell"])
@pytest.mark.parametrize(
    ("norm", "asked", "start"),
    [
        (None, {}, 0),
        (None, {"forget_bias": 0.5}, 0.5),
        ("rms", {}, 1),
        ("rms", {"forget_bias": 0}, 0),
    ],
)
def test_the_forget_gate_starts_at_1_under_a_norm(name, norm, asked, start):
    layer = jn_nnx.LSTM if name == "LSTM" else getattr(jn_nnx, name)
    module = layer(FEATURES, 2, norm=norm, rngs=flax_nnx.Rngs(0), **asked)
    np.testing.assert_array_equal(
        (module.cell if name == "LSTM" else module).parameters()["bias"],
        [0, 0, start, start, 0, 0, 0, 0],
    )
    module = getattr(jn_nn, name)(2, norm=norm, **asked)
    carry, x = (jnp.zeros(2), jnp.zeros(2)), jnp.ones(FEATURES)
    params = (module.init(KEY, x[None]) if name == "LSTM" else module.init(KEY, carry, x))["params"]
    params = params["cell"] if name == "LSTM" else params
    bias = (
        params["bias"] if norm else jnp.concatenate([params[f"h{gate}"]["bias"] for gate in "ifgo"])
    )
    np.testing.assert_array_equal(bias, [0, 0, start, start, 0, 0, 0, 0])


def cell_and_layer(flavour, cell, layer, **options):
    """One step and whole sequences, each from x and a carry or None."""
    # JAX makes no orthogonal bfloat16
    options = {"recurrent_kernel_init": jax.nn.initializers.lecun_normal(), **options}

    def step(x, carry):
        if flavour == "linen":
            module = getattr(*cell)(HIDDEN, **options)
            carry = module.initialize_carry(KEY, x[:, 0].shape) if carry is None else carry
            return module.init_with_output(KEY, carry, x[:, 0])[0]
        module = getattr(*cell)(FEATURES, HIDDEN, rngs=flax_nnx.Rngs(0), **options)
        return module(
            module.initialize_carry(x[:, 0].shape, flax_nnx.Rngs(0)) if carry is None else carry,
            x[:, 0],
        )

    def whole(x, carry):
        if flavour == "linen":
            return getattr(*layer)(HIDDEN, return_carry=True, **options).init_with_output(
                KEY, x, initial_carry=carry
            )[0]
        return getattr(*layer)(
            FEATURES, HIDDEN, return_carry=True, rngs=flax_nnx.Rngs(0), **options
        )(x, initial_carry=carry)

    return step, whole


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
@pytest.mark.parametrize("kind", CELLS)
def test_without_a_norm_dtypes_are_those_of_flax(kind, flavour):
    """Of the state and the output after one step, and so after all: Flax's loop refuses a step that
    changes a dtype.
    """
    ours, theirs = (jn_nn, flax_nn) if flavour == "linen" else (jn_nnx, flax_nnx)
    both = jnp.bfloat16, jnp.float32
    for dtype, param_dtype in product((None, *both), both):
        options = {"dtype": dtype, "param_dtype": param_dtype}
        step, whole = cell_and_layer(
            flavour, (ours, CELLS[kind]), (ours, LAYERS[kind]), norm=None, **options
        )
        wanted = cell_and_layer(flavour, (theirs, FLAX[kind]), None, **options)[0]
        for of_x, of_h, of_c in product(both, (None, *both), both if kind == "lstm" else (None,)):
            x, h, c = (
                None if d is None else jax.ShapeDtypeStruct(s, d)
                for s, d in (((2, 5, 3), of_x), ((2, 4), of_h), ((2, 4), of_c))
            )
            carry = (c, h) if kind == "lstm" and h is not None else h
            with jax.numpy_dtype_promotion("standard"):
                truth = [leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(wanted, x, carry))]
            for way in (step, whole):
                assert [
                    leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(way, x, carry))
                ] == truth, (way, options, of_x, of_h, of_c)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("lstm", jnp.float32), ("gru", jnp.float32), ("rnn", jnp.bfloat16)]
)
def test_without_a_norm_values_of_bfloat16_are_flax(kind, wanted, rng):
    """A float32 state of an LSTM or GRU stays one, and so do outputs; nothing but x is rounded."""
    x = sequences(rng, 2, 6)
    carry = jax.tree.map(
        lambda part: part.astype(wanted),
        disturbed((jnp.zeros((2, HIDDEN)),) * (1 + (kind == "lstm"))),
    )
    carry = carry if kind == "lstm" else carry[0]
    theirs = flax_nn.RNN(
        getattr(flax_nn, FLAX[kind])(HIDDEN, dtype=jnp.bfloat16), return_carry=True
    )
    layer = partial(getattr(jn_nn, LAYERS[kind]), HIDDEN, norm=None, return_carry=True)
    variables = made(layer().init, KEY, x)
    with jax.numpy_dtype_promotion("standard"):
        truth = applied(theirs, variables, x, initial_carry=carry)
    cell = flax_nn.RNN(
        getattr(jn_nn, CELLS[kind])(HIDDEN, norm=None, dtype=jnp.bfloat16), return_carry=True
    )
    wide = partial(jax.tree.map, lambda part: part.astype(jnp.float32))
    exact = applied(layer(), variables, wide(x.astype(jnp.bfloat16)), initial_carry=wide(carry))
    for ours in (layer(dtype=jnp.bfloat16), cell):
        found = applied(ours, variables, x, initial_carry=carry)
        assert {leaf.dtype for leaf in jax.tree.leaves((found, truth))} == {jnp.dtype(wanted)}
        jax.tree.map(partial(np.testing.assert_allclose, atol=0.02), wide(found), wide(truth))
        jax.tree.map(
            partial(np.testing.assert_allclose, atol=2e-6 if wanted == jnp.float32 else 0.01),
            wide(found),
            exact,
        )
