"""List the cases of the recurrent tests: every cell, norm and position of the norm."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_oracle
from cases import long_sweep

import jaxnorm as jn
from jaxnorm.recurrent import native, scan

FEATURES, HIDDEN = 3, 4
# The modules by the names of their functions, and Flax's.
LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn": "SimpleRNN"}
CELLS = {"lstm": "LayerNormLSTMCell", "gru": "LayerNormGRUCell", "rnn": "LayerNormSimpleCell"}
FLAX = {"lstm": "OptimizedLSTMCell", "gru": "GRUCell", "rnn": "SimpleCell"}
close = partial(jax.tree.map, partial(np.testing.assert_allclose, atol=2e-6))


@dataclass(frozen=True)
class Case:
    cell: str
    norm: str | None = "layer"
    placement: str = "ba2016"
    projection: int | None = None
    reset_after: bool = True
    activation: str = "tanh"

    def __str__(self):
        parts = (
            self.cell,
            self.norm or "none",
            self.placement if self.norm else "",
            "projected" if self.projection else "",
            "" if self.reset_after else "reset_first",
            "" if self.activation == "tanh" else self.activation,
        )
        return "-".join(part for part in parts if part)

    @property
    def options(self):
        return {"norm": self.norm, "placement": self.placement}

    @property
    def variant(self):
        """The options that one kind of cell takes alone, without defaults."""
        given = {"reset_after": self.reset_after, "activation": self.activation}
        return {name: value for name, value in given.items() if value not in (True, "tanh")}

    @property
    def network(self):
        return getattr(jn.recurrent, self.cell)

    def call(self, x, params, **options):
        """``(state as a tuple, outputs)``."""
        state, outputs = self.network(x, params, **self.options, **self.variant, **options)
        return (state if isinstance(state, tuple) else (state,)), outputs

    def params(self, dtype=np.float32, seed=0):
        """Every leaf random: ones and zeros hide what is swapped or left out."""
        extra = {} if self.projection is None else {"projection": self.projection}
        extra |= {} if self.reset_after else {"reset_after": False}
        init = partial(
            getattr(jn.recurrent, f"init_{self.cell}"),
            in_features=FEATURES,
            features=HIDDEN,
            **self.options,
            **extra,
        )
        made = {}
        # for its names, in order, and shapes: nothing is compiled
        jax.eval_shape(lambda: made.update(init(jax.random.key(0))))
        rng = np.random.default_rng(seed)
        draws = {name: rng.standard_normal(leaf.shape) for name, leaf in made.items()}
        for name in draws:
            draws[name] = draws[name] * 0.2 + 1 if name.endswith("scale") else draws[name] * 0.7
        if "cell_bias" not in draws and "cell_scale" in draws:
            draws["cell_bias"] = rng.standard_normal(HIDDEN) * 0.5
        return {name: jnp.asarray(draw.astype(dtype)) for name, draw in draws.items()}

    def oracle(self, x, params, epsilon=1e-6, initial=None):
        return recurrent_oracle.network(
            self.cell,
            x,
            params,
            epsilon=epsilon,
            initial=initial,
            **self.options,
            **self.variant,
        )


PLACEMENTS = {
    "rnn": ("ba2016", "sum"),
    "gru": ("ba2016", "sum", "gate"),
    "lstm": ("ba2016", "sum", "gate", "carried_cell"),
}
CASES = [
    *(
        Case(cell, norm, placement)
        for cell in PLACEMENTS
        for norm in ("layer", "rms")
        for placement in PLACEMENTS[cell]
    ),
    *(Case(cell, norm) for cell in PLACEMENTS for norm in ("batch", None)),
    Case("lstm", "layer", projection=2),
    Case("lstm", None, projection=3),
    *(
        Case("gru", norm, placement, reset_after=False)
        for norm in ("layer", "rms")
        for placement in PLACEMENTS["gru"]
    ),
    *(Case("gru", norm, reset_after=False) for norm in ("batch", None)),
    *(
        Case("rnn", norm, placement, activation="relu")
        for norm, placement in (("layer", "ba2016"), ("rms", "sum"), ("batch", "ba2016"))
    ),
    Case("rnn", None, activation="relu"),
]
RESET_FIRST, RELU = Case("gru", reset_after=False), Case("rnn", "layer", activation="relu")
FEW = [
    Case("lstm"),
    Case("lstm", "rms", "gate"),
    Case("gru"),
    Case("rnn", "layer", "sum"),
    Case("lstm", None, projection=3),
    RELU,
    RESET_FIRST,
]
by_few = pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[1:3]), ids=str)
OF_ONE = [case for case in CASES if case.norm != "batch"]  # sequences that do not see each other


def sequences(rng, *shape, dtype=np.float32):
    return jnp.asarray(rng.standard_normal((*shape, FEATURES)).astype(dtype))


def disturbed(params):
    """Return random values, by NumPy: JAX would compile programs for each shape."""
    draw = lambda leaf: (0.3 * np.random.default_rng(0).standard_normal(leaf.shape)).astype(
        leaf.dtype
    )
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + draw(leaf)), params)


def made(init, *arguments, **options):
    """Return variables of the shapes that ``init`` returns, which is not compiled for them.

    Scales are about 1, all others about 0.
    """
    like = jax.eval_shape(partial(init, **options), *arguments)
    start = lambda path, leaf: np.full(
        leaf.shape, "scale" in jax.tree_util.keystr(path), leaf.dtype
    )
    return disturbed(jax.tree_util.tree_map_with_path(start, like))


def applied(module, *arguments, **options):
    """Return the results of a module, by one program.

    Flax's loop makes a dozen where its steps are called one by one.
    """
    return jax.jit(module.apply)(*arguments, **options)


def small_chunks(monkeypatch, steps):
    """Set the number of steps in a chunk, so that short sequences have several chunks."""
    for module in (scan, native):
        monkeypatch.setattr(module, "chunk_length", lambda *_: steps)


def loss(case, weights, x, params, **options):
    state, outputs = case.call(x, params, **options)
    return sum(jnp.vdot(w, value) for w, value in zip(weights, (*state, outputs), strict=True))


def weights_for(case, rng, x, params, dtype=np.float32):
    shapes = jax.eval_shape(case.call, x, params)
    return [
        jnp.asarray(rng.standard_normal(leaf.shape).astype(dtype))
        for leaf in jax.tree.leaves(shapes)
    ]
