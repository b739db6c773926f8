"""Define one step of each cell: the simple cell, the LSTM and both kinds of GRU."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxnorm.arguments import validation
from jaxnorm.recurrent.cell import NORMS, Cell, Stage, State, Steps, Weights, center_rows
from jaxnorm.recurrent.pointwise import LSTM_SIGMOIDS, expand_like, lstm_gates, split, tanh

# at 0 the derivative of a ReLU is 0
ACTIVATIONS = {"tanh": tanh, "relu": jax.nn.relu}


@dataclass(frozen=True)
class RNN(Cell):
    """The simple cell, ``h' = tanh(a)`` or ``max(a, 0)`` with the pre-activation a.

    Attributes:
      activation: one of :data:`ACTIVATIONS`.
    """

    activation: str = "tanh"

    name = "rnn"
    sigmoids = (False,)
    positions = ("ba2016", "sum")

    def step(self, weights, a, input_term, state, steps):
        activation = ACTIVATIONS[self.activation]
        return (activation(self.preactivations(weights, a, input_term, steps)),)


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


class GatedUnit(Cell):
    """The gated recurrent unit, ``h' = (1 - z) n + z h``, with any candidate n."""

    name = "gru"
    # the order of blocks is r, z, n
    sigmoids = (True, True, False)
    positions = ("ba2016", "sum", "gate")

    @property
    def blocks_per_group(self):
        return (1, 1, 1) if self.position == "gate" else (2, 1)


class GRU(GatedUnit):
    """The gated recurrent unit whose gate r comes after the product with the matrix.

    The candidate is ``n = tanh(input's term + r (recurrent term + recurrent_bias))``.
    """

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


class ResetFirstGRU(GatedUnit):
    """The gated recurrent unit whose gate r comes before the product with the matrix.

    The candidate is ``n = tanh(input's term + (r h) @ candidate_kernel)``. So a step
    has two products, and :meth:`reset` stands between them.
    """

    variant = ", reset_after=False"

    @property
    def stages(self):
        return (Stage("recurrent_kernel", self.reset), Stage("candidate_kernel", self.step))

    def weights(self, params):
        weights = super().weights(params)
        gates, candidate = split(weights["recurrent_kernel"], (2, 1))
        return {**weights, "recurrent_kernel": gates, "candidate_kernel": candidate}

    def reset(
        self, weights: Weights, a: jax.Array, input_term: jax.Array, state: State, steps: Steps
    ) -> State:
        """Return ``(r h, z, h)``, from the product of h and the matrix of r and z."""
        a_rz = self._preactivations_of(0, weights, a, input_term, steps)
        r, z = split(0.5 * tanh(a_rz) + 0.5, (1, 1))
        return r * state[0], z, state[0]

    def step(self, weights, a, input_term, state, steps):
        _, z, h = state
        n = tanh(self._preactivations_of(1, weights, a, input_term, steps))
        return (n + z * (h - n),)

    def _preactivations_of(
        self, part: int, weights: Weights, a: jax.Array, input_term: jax.Array, steps: Steps
    ) -> jax.Array:
        """Return the pre-activations of r and z, part 0, or of n, part 1.

        ``a`` has this part alone, and all else is packed.
        """
        own = lambda packed: split(packed, (2, 1))[part]
        weights = {name: own(weights[name]) for name in (*self.gains, "bias")}
        if steps.running is not None:
            mean, rstd = steps.running["recurrent"]
            steps = steps._replace(running={"recurrent": (own(mean), own(rstd))})
        blocks = self.blocks_per_group[:-1] if part == 0 else self.blocks_per_group[-1:]
        return self.preactivations(weights, a, own(input_term), steps, blocks)


CELLS: dict[str, type[Cell]] = {cell.name: cell for cell in (RNN, LSTM, GRU)}


def make_cell(
    name: str,
    norm: str | None,
    placement: str,
    epsilon: float,
    *,
    reset_after: bool = True,
    activation: str = "tanh",
) -> Cell:
    """Check the arguments of a cell, and return the cell.

    Args:
      name: name of the function that runs the cell.
      norm: the norm.
      placement: the option of that name, the position of the norm.
      epsilon: added to the variance.
      reset_after: for a GRU whether r comes after the product with the matrix.
      activation: for a simple cell the name of its function.
    """
    cell_type = CELLS[name]
    if norm not in NORMS:
        raise ValueError(f"norm must be 'layer', 'rms', 'batch' or None: got {norm!r}.")
    if placement not in cell_type.positions:
        raise ValueError(
            f"placement of {name} must be one of {', '.join(map(repr, cell_type.positions))}: got "
            f"{placement!r}."
        )
    if norm == "batch" and placement != "ba2016":
        raise ValueError(
            "recurrent batch norm must have placement 'ba2016', where Cooijmans et al. put it: "
            f"got {placement!r}."
        )
    if not validation.flag("reset_after", reset_after) and name != "gru":
        raise ValueError(
            f"reset_after is for the GRU, which has a reset gate: got {reset_after} for {name}."
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation of rnn must be {' or '.join(map(repr, ACTIVATIONS))}: got {activation!r}."
        )
    if activation != "tanh" and name != "rnn":
        raise ValueError(
            f"activation is for the simple RNN: got {activation!r} for {name}, whose functions are "
            "fixed."
        )
    epsilon = validation.number("epsilon", epsilon)
    if name == "rnn":
        return RNN(norm, placement, epsilon, activation)
    return (cell_type if reset_after else ResetFirstGRU)(norm, placement, epsilon)
