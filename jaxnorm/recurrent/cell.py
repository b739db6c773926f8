"""Define what all cells share, for any norm and any position of the norm.

A cell turns its parameters into *weights* once (:meth:`Cell.weights`). The inputs of
all steps give one product before the loop, and each step adds one product with the
state::

    input_term = cell.input_terms(weights, x, ...)       of all steps at once
    a = h @ recurrent_kernel                             the only product in the loop
    state = cell.step(weights, a, input_term, ...)

A cell whose step has a second product, after its gates are known, has a stage for each
(:attr:`Cell.stages`). What a stage returns is the state that the next one starts from.

Pre-activations are packed: the blocks of all gates lie side by side along the last
axis. Layer norm subtracts the mean of a group of blocks. Since ``a - mean(a) = h @ (W -
mean of each row of W)``, the weights are centered instead, and each step only needs the
variance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.recurrent.pointwise import (
    expand_like,
    make_gate_factors,
    normalize,
    split,
)

NORMS = ("layer", "rms", "batch", None)
Weights = dict[str, Any]
State = tuple[jax.Array, ...]


class Steps(NamedTuple):
    """The arrays besides x that differ from step to step.

    Stacked steps have time as the first axis of every array. None has no effect.

    Attributes:
      mask: boolean ``(batch, 1)``. False leaves the state as it is.
      reset: boolean ``(batch, 1)``. True starts from a state of zeros.
      keep: for each part of the state boolean ``(batch, features)``, where True keeps
        the old value, or the fraction of the old value in the new one.
      running: for each term the mean and ``1 / sqrt(var + epsilon)`` with which batch
        norm normalizes, ``(1, features)`` each.
      zero_input: boolean ``(batch, 1)``. True where x is 0 in all features: norms of a
        state of zeros then pass no gradient.
    """

    mask: jax.Array | None = None
    reset: jax.Array | None = None
    keep: tuple[jax.Array, ...] | None = None
    running: dict[str, tuple[jax.Array, jax.Array]] | None = None
    zero_input: jax.Array | None = None


class Stage(NamedTuple):
    """A part of a step: one product, and what follows it.

    Attributes:
      kernel: the name of the matrix among the weights, by which the first part of the
        stage's state is multiplied.
      run: takes the arguments of :meth:`Cell.step`, and returns the stage's result.
    """

    kernel: str
    run: Callable[..., State]


@dataclass(frozen=True)
class Cell:
    """The static arguments of a step.

    Attributes:
      norm: one of :data:`NORMS`.
      position: position of the norm, as the option ``placement`` names it.
      epsilon: added to the variance.
      name: name of the function that runs the cell.
      sigmoids: for each block of the pre-activations whether its gate is a sigmoid, or
        else a tanh.
      state: the names of the parts of the state.
      positions: the positions that the cell knows.
      variant: the option that chose this cell among cells of one name, for an error.
    """

    norm: str | None = "layer"
    position: str = "ba2016"
    epsilon: float = 1e-6

    name: ClassVar[str]
    sigmoids: ClassVar[tuple[bool, ...]]
    state: ClassVar[tuple[str, ...]] = ("h",)
    positions: ClassVar[tuple[str, ...]]
    variant: ClassVar[str] = ""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of a step, of which the last returns the new state."""
        return (Stage("recurrent_kernel", self.step),)

    @property
    def normalizes_each_term(self) -> bool:
        """Return whether the input's and the recurrent term have a norm each."""
        return self.norm is not None and self.position in ("ba2016", "carried_cell")

    @property
    def normalizes_sum(self) -> bool:
        """Return whether the sum of both terms has one norm."""
        return self.norm is not None and not self.normalizes_each_term

    @property
    def gains(self) -> tuple[str, ...]:
        """Return the names of the packed gains among the parameters."""
        return (
            ("input_scale", "recurrent_scale")
            if self.normalizes_each_term
            else ("scale",)
            if self.normalizes_sum
            else ()
        )

    @property
    def blocks_per_group(self) -> tuple[int, ...]:
        """Return how many blocks each group of features spans."""
        return (1,) * len(self.sigmoids) if self.position == "gate" else (len(self.sigmoids),)

    def weights(self, params: Weights) -> Weights:
        """Return the parameters as steps use them.

        For layer norm the matrices are centered. For gates that are sigmoids gains and
        bias are halved, or without a norm matrices and bias. Gains and bias are never
        absent.
        """
        # sigmoid(v) = tanh(v / 2) / 2 + 1 / 2. Under a norm the halves are in gain and
        # bias, since the norm would undo them in the matrices.
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
        """Subtract the mean of each group of blocks from each row."""
        return jnp.concatenate(
            [center_rows(part) for part in split(weight, self.blocks_per_group)], -1
        )

    def input_terms(self, weights: Weights, x: jax.Array, steps: Steps) -> jax.Array:
        """Return the input's term of the pre-activations, with the bias if possible."""
        a = input_product(steps, x, weights["input_kernel"])
        if self.normalizes_sum:
            # the norm comes after the recurrent term, and the bias after the norm
            return a
        return self.normalize_term(weights, "input", a, steps) + expand_like(weights["bias"], a)

    def normalize_term(
        self,
        weights: Weights,
        name: str,
        a: jax.Array,
        steps: Steps,
        blocks: tuple[int, ...] | None = None,
    ) -> jax.Array:
        """Normalize and scale one term, if each term has a norm of its own."""
        return (
            expand_like(weights[f"{name}_scale"], a)
            * self.normalized(a, name, steps, blocks or self.blocks_per_group)
            if self.normalizes_each_term
            else a
        )

    def preactivations(
        self,
        weights: Weights,
        a: jax.Array,
        input_term: jax.Array,
        steps: Steps,
        blocks: tuple[int, ...] | None = None,
    ) -> jax.Array:
        """Return the packed pre-activations of all gates.

        ``blocks`` is the number of blocks of each group; None for all of the cell.
        """
        if self.normalizes_sum:
            return expand_like(weights["scale"], a) * self.normalized(
                a + input_term, "gates", steps, blocks or self.blocks_per_group
            ) + expand_like(weights["bias"], a)
        return self.normalize_term(weights, "recurrent", a, steps, blocks) + input_term

    def normalized(
        self,
        a: jax.Array,
        name: str,
        steps: Steps,
        blocks: tuple[int, ...] = (1,),
        centered: bool = False,
    ) -> jax.Array:
        """Normalize ``a``, over groups of features or over the batch.

        Args:
          a: the values.
          name: the name of the term, under which ``steps.running`` has its statistics.
          steps: mask, running statistics and zero inputs of the steps.
          blocks: the number of blocks that each group of features spans.
          centered: whether layer norm subtracts the mean here, since the weights are
            not centered.
        """
        # Zeros make variance 0 and the derivative 1 / sqrt(epsilon). Along the state
        # these factors multiply, step by step. On its way to x a gradient meets only
        # one of them, so the input's term keeps its derivative.
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
        # centered weights have given a mean of 0
        normalize_features = partial(normalize, -1, centered and self.norm == "layer", self.epsilon)
        if len(set(blocks)) > 1:
            return jnp.concatenate(
                [normalize_features(part, None, zero_input) for part in split(a, blocks)], -1
            )
        if len(blocks) == 1:
            return normalize_features(a, None, zero_input)
        # groups of one size are one reduction over the last axis
        parts = a.reshape(*a.shape[:-1], len(blocks), a.shape[-1] // len(blocks))
        return normalize_features(
            parts, None, None if zero_input is None else zero_input[..., None]
        ).reshape(a.shape)

    def step(
        self, weights: Weights, a: jax.Array, input_term: jax.Array, state: State, steps: Steps
    ) -> State:
        """Return the state after a step, with h before its projection.

        Args:
          weights: as :meth:`weights` returns them.
          a: the product of h and the recurrent matrix.
          input_term: as :meth:`input_terms` returns it.
          state: the state before the step.
          steps: the other arrays of the step.
        """
        raise NotImplementedError

    def shapes(
        self, in_features: int, features: int, projection: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by name.

        Both matrices are required. A gain that is absent is 1, a bias 0.
        """
        packed = len(self.sigmoids) * features
        matrices = {
            "input_kernel": (in_features, packed),
            "recurrent_kernel": (projection or features, packed),
        }
        return {**matrices, **dict.fromkeys((*self.gains, "bias"), (packed,))}


def center_rows(weight: jax.Array) -> jax.Array:
    """Subtract the mean of each row."""
    # twice: after the first time the rounding error of a large mean is left
    for _ in range(2):
        weight = weight - jnp.mean(weight, -1, keepdims=True)
    return weight


def input_product(steps: Steps, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply x by the input matrix, with 0 for the inputs of masked steps."""
    # masked inputs may hold NaN, which times a zero cotangent is NaN in the gradient
    return product(x if steps.mask is None else jnp.where(steps.mask, x, 0), weight)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``x @ weight``."""
    # as one product of two matrices: with more axes in front the transpose copies
    # arrays
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ weight).reshape(*x.shape[:-1], weight.shape[-1])
