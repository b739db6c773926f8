"""One step of each cell: the pointwise part, with the norm and its placement as arguments.

A cell turns parameters into *weights* once (:meth:`Cell.weights`), then for each step

    a = h @ recurrent_kernel                the driver, the only product in the loop
    state = cell.step(weights, a, xg, ...)  what follows it; xg = cell.inputs(weights, x), for all
                                            steps at once

Centering is part of the weights where it can be: a - mean(a) = h (W - row means of W), so that the
statistics of a layer norm are one reduction.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.recurrent.pointwise import (
    LSTM_SIGMOIDS,
    expand_like,
    lstm_gates,
    make_gate_factors,
    normalize,
    split,
    tanh,
)

NORMS = ("layer", "rms", "batch", None)
Weights = dict[str, Any]
State = tuple[jax.Array, ...]


class Steps(NamedTuple):
    """What steps differ in beside x; every leaf has time first where steps are stacked, and None
    has no effect.
    """

    mask: jax.Array | None = None  # (batch, 1): False carries the state through
    reset: jax.Array | None = None  # (batch, 1): True starts from zero
    # (batch, features) for each part of the state: True keeps the old value
    keep: tuple[jax.Array, ...] | None = None
    # mean and 1 / deviation, (1, features), of batch norm
    running: dict[str, tuple[jax.Array, jax.Array]] | None = None
    # (batch, 1): x is 0, so that norms of a zero state have no gradient
    zero_input: jax.Array | None = None


@dataclass(frozen=True)
class Cell:
    """The static facts about a step."""

    norm: str | None = "layer"
    position: str = "ba2016"
    epsilon: float = 1e-6

    name: ClassVar[str]
    sigmoids: ClassVar[tuple[bool, ...]]  # one for each block of the packed pre-activations
    state: ClassVar[tuple[str, ...]] = ("h",)
    positions: ClassVar[tuple[str, ...]]

    @property
    def normalizes_each_term(self) -> bool:
        """Whether input and recurrent term have statistics of their own."""
        return self.norm is not None and self.position in ("ba2016", "carried_cell")

    @property
    def normalizes_sum(self) -> bool:
        return self.norm is not None and not self.normalizes_each_term

    @property
    def gains(self) -> tuple[str, ...]:
        """The packed gains."""
        return (
            ("input_scale", "recurrent_scale")
            if self.normalizes_each_term
            else ("scale",)
            if self.normalizes_sum
            else ()
        )

    @property
    def blocks_per_group(self) -> tuple[int, ...]:
        """How many blocks of the pre-activations share statistics, for each normalization group."""
        return (1,) * len(self.sigmoids) if self.position == "gate" else (len(self.sigmoids),)

    def weights(self, params: Weights) -> Weights:
        """The parameters as steps use them: kernels centered, the arguments of sigmoids halved,
        gains never absent.
        """
        features = params["recurrent_kernel"].shape[-1] // len(self.sigmoids)
        factors = make_gate_factors(features, self.sigmoids, params["recurrent_kernel"].dtype)
        matrices = {name: params[name] for name in ("input_kernel", "recurrent_kernel")}
        if self.norm is None:
            matrices = {
                name: weight * expand_like(factors, weight) for name, weight in matrices.items()
            }
        elif self.norm == "layer":
            matrices = {name: self.center(weight) for name, weight in matrices.items()}
        scales = {
            name: factors * params[name] if name in params else factors for name in self.gains
        }
        bias = factors * params["bias"] if "bias" in params else jnp.zeros_like(factors)
        rest: Weights = {
            name: params[name]
            for name in ("cell_scale", "cell_bias", "recurrent_bias", "projection")
            if name in params
        }
        return {**matrices, **scales, **rest, "bias": bias}

    def center(self, weight: jax.Array) -> jax.Array:
        return jnp.concatenate(
            [center_rows(part) for part in split(weight, self.blocks_per_group)], -1
        )

    def input_terms(self, weights: Weights, x: jax.Array, steps: Steps) -> jax.Array:
        """The input's term of the pre-activations, for stacked steps."""
        a = input_product(steps, x, weights["input_kernel"])
        if self.normalizes_sum:
            return a
        return self.normalize_term(weights, "input", a, steps) + expand_like(weights["bias"], a)

    def normalize_term(self, weights: Weights, name: str, a: jax.Array, steps: Steps) -> jax.Array:
        """The input's or the recurrent term with its own gain and statistics, if it has any."""
        return (
            expand_like(weights[f"{name}_scale"], a)
            * self.normalized(a, name, steps, self.blocks_per_group)
            if self.normalizes_each_term
            else a
        )

    def preactivations(
        self, weights: Weights, a: jax.Array, input_term: jax.Array, steps: Steps
    ) -> jax.Array:
        """The packed pre-activations of all gates."""
        if self.normalizes_sum:
            return expand_like(weights["scale"], a) * self.normalized(
                a + input_term, "gates", steps, self.blocks_per_group
            ) + expand_like(weights["bias"], a)
        return self.normalize_term(weights, "recurrent", a, steps) + input_term

    def normalized(
        self,
        a: jax.Array,
        name: str,
        steps: Steps,
        blocks: tuple[int, ...] = (1,),
        centered: bool = False,
    ) -> jax.Array:
        """``a`` normalized over groups of so many blocks of features, or over the batch;
        ``centered`` where the kernel is not.
        """
        # the gradient of x is multiplied once, not at every step
        zero_input = None if name == "input" else steps.zero_input
        if self.norm == "batch":
            if steps.running is None:
                return normalize(
                    -2,
                    True,
                    self.epsilon,
                    a,
                    steps.mask,
                    None if zero_input is None else jnp.all(zero_input, -2, keepdims=True),
                )
            mean, rstd = steps.running[name]
            return (a - mean) * rstd
        normalize_features = partial(normalize, -1, centered and self.norm == "layer", self.epsilon)
        if len(set(blocks)) > 1:
            return jnp.concatenate(
                [normalize_features(part, None, zero_input) for part in split(a, blocks)], -1
            )
        if len(blocks) == 1:
            return normalize_features(a, None, zero_input)
        parts = a.reshape(*a.shape[:-1], len(blocks), a.shape[-1] // len(blocks))
        return normalize_features(
            parts, None, None if zero_input is None else zero_input[..., None]
        ).reshape(a.shape)

    def step(
        self, weights: Weights, a: jax.Array, input_term: jax.Array, state: State, steps: Steps
    ) -> State:
        """The state after a step, h before its projection."""
        raise NotImplementedError

    def shapes(
        self, in_features: int, features: int, projection: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """The parameters and their shapes. All but the kernels may be left out: a gain is then 1, a
        bias 0.
        """
        packed = len(self.sigmoids) * features
        matrices = {
            "input_kernel": (in_features, packed),
            "recurrent_kernel": (projection or features, packed),
        }
        return {**matrices, **dict.fromkeys((*self.gains, "bias"), (packed,))}


class RNN(Cell):
    """h' = tanh(pre-activation)"""

    name = "rnn"
    sigmoids = (False,)
    positions = ("ba2016", "sum")

    def step(self, weights, a, input_term, state, steps):
        return (tanh(self.preactivations(weights, a, input_term, steps)),)


class LSTM(Cell):
    """c' = f c + i g,  h' = o tanh(c')"""

    name = "lstm"
    sigmoids = LSTM_SIGMOIDS
    state = ("h", "c")
    positions = ("ba2016", "sum", "gate", "carried_cell")

    @property
    def normalizes_cell(self) -> bool:
        return self.norm is not None and self.position != "sum"

    @property
    def carries(self) -> bool:
        """Whether the normalized c is carried on."""
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
        s = self.normalized(c, "cell", steps, centered=True)
        s = s * expand_like(weights["cell_scale"], c) if "cell_scale" in weights else s
        s = s + expand_like(weights["cell_bias"], c) if "cell_bias" in weights else s
        return o * tanh(s), s if self.carries else c


class GRU(Cell):
    """h' = (1 - z) n + z h,  n = tanh(input's term + r (recurrent term + recurrent_bias))"""

    name = "gru"
    sigmoids = (True, True, False)  # r, z, n
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
        gates, candidate = split(weight, (2, 1))  # the candidate's sum is known only when r is
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
        return (n + z * (state[0] - n),)


CELLS: dict[str, type[Cell]] = {cell.name: cell for cell in (RNN, LSTM, GRU)}


def center_rows(weight: jax.Array) -> jax.Array:
    """Rows without their mean; twice, for what the rounding of a large mean leaves over."""
    for _ in range(2):
        weight = weight - jnp.mean(weight, -1, keepdims=True)
    return weight


def input_product(steps: Steps, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The products of x with the input kernel, of nothing that is masked out."""
    return product(x if steps.mask is None else jnp.where(steps.mask, x, 0), weight)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x @ kernel`` as one product of matrices: with several rows of axes its transpose copies."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ weight).reshape(*x.shape[:-1], weight.shape[-1])
