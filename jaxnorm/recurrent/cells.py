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
    along,
    lstm_gates,
    make_gate_factors,
    split,
    tanh,
    unit,
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
    idle: jax.Array | None = None


@dataclass(frozen=True)
class Cell:
    """The static facts about a step."""

    norm: str | None = "layer"
    placement: str = "ba2016"
    epsilon: float = 1e-6

    name: ClassVar[str]
    sigmoids: ClassVar[tuple[bool, ...]]  # one for each block of the packed pre-activations
    state: ClassVar[tuple[str, ...]] = ("h",)
    placements: ClassVar[tuple[str, ...]]

    @property
    def separate(self) -> bool:
        """Whether input and recurrent term have statistics of their own."""
        return self.norm is not None and self.placement in ("ba2016", "carried_cell")

    @property
    def joint(self) -> bool:
        return self.norm is not None and not self.separate

    @property
    def gains(self) -> tuple[str, ...]:
        """The packed gains."""
        return (
            ("input_scale", "recurrent_scale")
            if self.separate
            else ("scale",)
            if self.joint
            else ()
        )

    @property
    def blocks_per_group(self) -> tuple[int, ...]:
        """How many blocks of the pre-activations share statistics, for each normalization group."""
        return (1,) * len(self.sigmoids) if self.placement == "gate" else (len(self.sigmoids),)

    def weights(self, params: Weights) -> Weights:
        """The parameters as steps use them: kernels centered, the arguments of sigmoids halved,
        gains never absent.
        """
        features = params["recurrent_kernel"].shape[-1] // len(self.sigmoids)
        factors = make_gate_factors(features, self.sigmoids, params["recurrent_kernel"].dtype)
        kernels = {name: params[name] for name in ("input_kernel", "recurrent_kernel")}
        if self.norm is None:
            kernels = {name: kernel * along(factors, kernel) for name, kernel in kernels.items()}
        elif self.norm == "layer":
            kernels = {name: self.center(kernel) for name, kernel in kernels.items()}
        scales = {
            name: factors * params[name] if name in params else factors for name in self.gains
        }
        bias = factors * params["bias"] if "bias" in params else jnp.zeros_like(factors)
        rest: Weights = {
            name: params[name]
            for name in ("cell_scale", "cell_bias", "recurrent_bias", "projection")
            if name in params
        }
        return {**kernels, **scales, **rest, "bias": bias}

    def center(self, kernel: jax.Array) -> jax.Array:
        return jnp.concatenate(
            [center_rows(part) for part in split(kernel, self.blocks_per_group)], -1
        )

    def inputs(self, weights: Weights, x: jax.Array, steps: Steps) -> jax.Array:
        """The input's term of the pre-activations, for stacked steps."""
        a = read(steps, x, weights["input_kernel"])
        if self.joint:
            return a
        return self.own(weights, "input", a, steps) + along(weights["bias"], a)

    def own(self, weights: Weights, name: str, a: jax.Array, steps: Steps) -> jax.Array:
        """The input's or the recurrent term with its own gain and statistics, if it has any."""
        return (
            along(weights[f"{name}_scale"], a)
            * self.normalized(a, name, steps, self.blocks_per_group)
            if self.separate
            else a
        )

    def together(self, weights: Weights, a: jax.Array, xg: jax.Array, steps: Steps) -> jax.Array:
        """The packed pre-activations of all gates."""
        if self.joint:
            return along(weights["scale"], a) * self.normalized(
                a + xg, "gates", steps, self.blocks_per_group
            ) + along(weights["bias"], a)
        return self.own(weights, "recurrent", a, steps) + xg

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
        idle = None if name == "input" else steps.idle
        if self.norm == "batch":
            if steps.running is None:
                return unit(
                    -2,
                    True,
                    self.epsilon,
                    a,
                    steps.mask,
                    None if idle is None else jnp.all(idle, -2, keepdims=True),
                )
            mean, rstd = steps.running[name]
            return (a - mean) * rstd
        over = partial(unit, -1, centered and self.norm == "layer", self.epsilon)
        if len(set(blocks)) > 1:
            return jnp.concatenate([over(part, None, idle) for part in split(a, blocks)], -1)
        if len(blocks) == 1:
            return over(a, None, idle)
        parts = a.reshape(*a.shape[:-1], len(blocks), a.shape[-1] // len(blocks))
        return over(parts, None, None if idle is None else idle[..., None]).reshape(a.shape)

    def step(
        self, weights: Weights, a: jax.Array, xg: jax.Array, state: State, steps: Steps
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
        kernels = {
            "input_kernel": (in_features, packed),
            "recurrent_kernel": (projection or features, packed),
        }
        return {**kernels, **dict.fromkeys((*self.gains, "bias"), (packed,))}


class RNN(Cell):
    """h' = tanh(pre-activation)"""

    name = "rnn"
    sigmoids = (False,)
    placements = ("ba2016", "sum")

    def step(self, weights, a, xg, state, steps):
        return (tanh(self.together(weights, a, xg, steps)),)


class LSTM(Cell):
    """c' = f c + i g,  h' = o tanh(c')"""

    name = "lstm"
    sigmoids = LSTM_SIGMOIDS
    state = ("h", "c")
    placements = ("ba2016", "sum", "gate", "carried_cell")

    @property
    def normalizes_cell(self) -> bool:
        return self.norm is not None and self.placement != "sum"

    @property
    def carries(self) -> bool:
        """Whether the normalized c is carried on."""
        return self.normalizes_cell and self.placement != "ba2016"

    def shapes(self, in_features, features, projection=None):
        cell = dict.fromkeys(
            ("cell_scale", "cell_bias") if self.normalizes_cell else (), (features,)
        )
        project = {} if projection is None else {"projection": (features, projection)}
        return {**super().shapes(in_features, features, projection), **cell, **project}

    def step(self, weights, a, xg, state, steps):
        c, o = lstm_gates(self.together(weights, a, xg, steps), state[1])
        if not self.normalizes_cell:
            return o * tanh(c), c
        shown = self.normalized(c, "cell", steps, centered=True)
        shown = shown * along(weights["cell_scale"], c) if "cell_scale" in weights else shown
        shown = shown + along(weights["cell_bias"], c) if "cell_bias" in weights else shown
        return o * tanh(shown), shown if self.carries else c


class GRU(Cell):
    """h' = (1 - z) n + z h,  n = tanh(input's term + r (recurrent term + recurrent_bias))"""

    name = "gru"
    sigmoids = (True, True, False)  # r, z, n
    placements = ("ba2016", "sum", "gate")

    @property
    def blocks_per_group(self):
        return (1, 1, 1) if self.placement == "gate" else (2, 1)

    def shapes(self, in_features, features, projection=None):
        inner = {} if self.joint else {"recurrent_bias": (features,)}
        return {**super().shapes(in_features, features, projection), **inner}

    def center(self, kernel):
        if not self.joint:
            return super().center(kernel)
        gates, candidate = split(kernel, (2, 1))  # the candidate's sum is known only when r is
        parts = split(gates, self.blocks_per_group[:-1])
        return jnp.concatenate([*map(center_rows, parts), candidate], -1)

    def step(self, weights, a, xg, state, steps):
        a_rz, a_n = split(self.own(weights, "recurrent", a, steps), (2, 1))
        x_rz, x_n = split(xg, (2, 1))
        a_rz = a_rz + x_rz
        if self.joint:
            (scale_rz, scale_n), (bias_rz, bias_n) = (
                split(along(weights[name], a), (2, 1)) for name in ("scale", "bias")
            )
            a_rz = (
                scale_rz * self.normalized(a_rz, "gates", steps, self.blocks_per_group[:-1])
                + bias_rz
            )
        r, z = split(0.5 * tanh(a_rz) + 0.5, (1, 1))
        a_n = x_n + r * (
            a_n + along(weights["recurrent_bias"], a) if "recurrent_bias" in weights else a_n
        )
        if self.joint:
            a_n = scale_n * self.normalized(a_n, "candidate", steps, centered=True) + bias_n
        n = tanh(a_n)
        return (n + z * (state[0] - n),)


CELLS: dict[str, type[Cell]] = {cell.name: cell for cell in (RNN, LSTM, GRU)}


def center_rows(kernel: jax.Array) -> jax.Array:
    """Rows without their mean; twice, for what the rounding of a large mean leaves over."""
    for _ in range(2):
        kernel = kernel - jnp.mean(kernel, -1, keepdims=True)
    return kernel


def read(steps: Steps, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The products of x with the input kernel, of nothing that is masked out."""
    return product(masked(steps, x), kernel)


def masked(steps: Steps, x: jax.Array) -> jax.Array:
    return x if steps.mask is None else jnp.where(steps.mask, x, 0)


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel`` as one product of matrices: with several rows of axes its transpose copies."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])
