"""Define one step of each cell: the simple cell, the LSTM and the GRU."""

import jax.numpy as jnp

from jaxnorm.recurrent.cell import Cell, center_rows
from jaxnorm.recurrent.pointwise import LSTM_SIGMOIDS, expand_like, lstm_gates, split, tanh


class RNN(Cell):
    """The simple cell, ``h' = tanh(a)`` with the pre-activation a."""

    name = "rnn"
    sigmoids = (False,)
    positions = ("ba2016", "sum")

    def step(self, weights, a, input_term, state, steps):
        return (tanh(self.preactivations(weights, a, input_term, steps)),)


class LSTM(Cell):
    """The long short-term memory, ``c' = f c + i g`` and ``h' = o tanh(c')``.

    Each position but "sum" normalizes c' before the tanh, too.
    """

    name = "lstm"
    sigmoids = LSTM_SIGMOIDS
    state = ("h", "c")
    positions = ("ba2016", "sum", "gate", "carried_cell")

    @property
    def normalizes_cell(self) -> bool:
        """Return whether c has a norm."""
        return self.norm is not None and self.position != "sum"

    @property
    def carries(self) -> bool:
        """Return whether the next step starts from the normalized c."""
        return self.normalizes_cell and self.position != "ba2016"

    def shapes(self, in_features, features, projection=None):
        cell = dict.fromkeys(
            ("cell_scale", "cell_bias") if self.normalizes_cell else (), (features,)
        )
        project = {} if projection is None else {"projection": (features, projection)}
        return {**super().shapes(in_features, features, projection), **cell, **project}

    def step(self, weights, a, input_term, state, steps):
        c, o = lstm_gates(self.preactivations(weights, a, input_term, steps), state[1])
        if not self.normalizes_cell:
            return o * tanh(c), c
        # c is no product, so that no weights have centered it
        s = self.normalized(c, "cell", steps, centered=True)
        s = s * expand_like(weights["cell_scale"], c) if "cell_scale" in weights else s
        s = s + expand_like(weights["cell_bias"], c) if "cell_bias" in weights else s
        return o * tanh(s), s if self.carries else c


class GRU(Cell):
    """The gated recurrent unit, ``h' = (1 - z) n + z h``.

    The candidate is ``n = tanh(input's term + r (recurrent term + recurrent_bias))``.
    """

    name = "gru"
    # the order of blocks is r, z, n
    sigmoids = (True, True, False)
    positions = ("ba2016", "sum", "gate")

    @property
    def blocks_per_group(self):
        return (1, 1, 1) if self.position == "gate" else (2, 1)

    def shapes(self, in_features, features, projection=None):
        inner = {} if self.normalizes_sum else {"recurrent_bias": (features,)}
        return {**super().shapes(in_features, features, projection), **inner}

    def center(self, weight):
        if not self.normalizes_sum:
            return super().center(weight)
        # the candidate is normalized after r has scaled its recurrent term: step
        # centers it
        gates, candidate = split(weight, (2, 1))
        parts = split(gates, self.blocks_per_group[:-1])
        return jnp.concatenate([*map(center_rows, parts), candidate], -1)

    def step(self, weights, a, input_term, state, steps):
        a_rz, a_n = split(self.normalize_term(weights, "recurrent", a, steps), (2, 1))
        x_rz, x_n = split(input_term, (2, 1))
        a_rz = a_rz + x_rz
        if self.normalizes_sum:
            (scale_rz, scale_n), (bias_rz, bias_n) = (
                split(expand_like(weights[name], a), (2, 1)) for name in ("scale", "bias")
            )
            a_rz = (
                scale_rz * self.normalized(a_rz, "gates", steps, self.blocks_per_group[:-1])
                + bias_rz
            )
        r, z = split(0.5 * tanh(a_rz) + 0.5, (1, 1))
        a_n = x_n + r * (
            a_n + expand_like(weights["recurrent_bias"], a) if "recurrent_bias" in weights else a_n
        )
        if self.normalizes_sum:
            a_n = scale_n * self.normalized(a_n, "candidate", steps, centered=True) + bias_n
        n = tanh(a_n)
        # (1 - z) n + z h with one product
        return (n + z * (state[0] - n),)


CELLS: dict[str, type[Cell]] = {cell.name: cell for cell in (RNN, LSTM, GRU)}
