"""Call the CPU kernels of lstm.cc: their arguments, attributes and results."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.kernels.placement import like
from jaxnorm.recurrent.cell import State, Steps, Weights
from jaxnorm.recurrent.cells import LSTM

# columns of a matrix that lie together, kPanel of matmul.h
PANEL = 32


class Static(NamedTuple):
    """The static arguments of the primitives.

    Attributes:
      cell: the static arguments of a step.
      time_axis: the axis of time, 0 or 1, in the arrays that the kernels take. It is
        the axis of the caller's arrays, so that XLA cancels the transposes to time
        first and back.
      axes: how many axes vmap has added in front.
    """

    cell: LSTM
    time_axis: int
    axes: int = 0

    def arranged(self, a: jax.Array) -> jax.Array:
        """Move the axis of time from the front to where kernels expect it, or back."""
        return jnp.moveaxis(a, 0, self.time_axis)

    def rows(self, steps: int, batch: int) -> tuple[int, int]:
        """Return the sizes of the axes of time and batch, in the order of the kernels."""
        return (batch, steps) if self.time_axis else (steps, batch)


def panels_of(weight: jax.Array) -> jax.Array:
    """Cut a matrix into contiguous panels of columns; zeros fill up the last one."""
    columns = -(-weight.shape[1] // PANEL)
    weight = jnp.pad(weight, ((0, 0), (0, columns * PANEL - weight.shape[1])))
    return weight.reshape(len(weight), columns, PANEL).transpose(1, 0, 2).reshape(-1)


def attributes(static: Static, state: State) -> dict:
    """Return the attributes of both kernels, struct LstmOptions in lstm_step.h."""
    cell = static.cell
    batch, hidden = state[0].shape
    groups = 0 if cell.norm is None else len(cell.blocks_per_group)
    return {
        "hidden": np.int64(hidden),
        "batch": np.int64(batch),
        "groups": np.int64(groups),
        "joint": cell.normalizes_sum,
        "normalizes_cell": cell.normalizes_cell,
        "centered": cell.norm == "layer",
        "carries": cell.carries,
        "time_major": static.time_axis == 0,
        "epsilon": np.float64(cell.epsilon),
    }


def vector_names(cell: LSTM) -> tuple[str, ...]:
    """Return the names of the vectors that the kernels take, in their order."""
    return (
        "recurrent_scale" if cell.normalizes_each_term else "scale",
        "input_scale",
        "bias",
        "cell_scale",
        "cell_bias",
    )


def kernel_arguments(
    static: Static, panels, weights: Weights, x: jax.Array, steps: Steps, state: State
) -> list[jax.Array]:
    """Return the arguments that both kernels take, in their order.

    A gain that the cell does not use, or that is absent, is 1. Such a bias is 0.
    """
    cell, hidden, packed = static.cell, state[0].shape[-1], weights["recurrent_kernel"].shape[-1]
    absent = (1, packed), (1, packed), (0, packed), (1, hidden), (0, hidden)
    vectors = [
        weights[name] if name in weights else jnp.full(size, value, x.dtype)
        for name, (value, size) in zip(vector_names(cell), absent, strict=True)
    ]
    mask = jnp.ones(x.shape[:2], bool) if steps.mask is None else steps.mask[..., 0]
    return [static.arranged(x), *vectors, static.arranged(mask), *panels[:2], *state]


def cotangent_shapes(
    cell: LSTM, rows: int, weights: Weights, state: State
) -> list[tuple[int, ...]]:
    """Return the shapes of the backward kernel's results, for so many rows of x."""
    hidden, (inputs, packed) = state[0].shape[-1], weights["input_kernel"].shape
    widths = (
        (packed, packed, hidden, inputs)
        if cell.normalizes_each_term
        else (packed, 0, hidden + inputs, 0)
    )
    # the vectors in the order of vector_names
    vectors = packed, packed, packed, hidden, hidden
    return [
        *((rows, width) for width in widths),
        *[state[0].shape] * 2,
        *((width,) for width in vectors),
    ]


def call_kernel(
    name: str, shapes: list[tuple[int, ...]], arguments: list[jax.Array], attributes: dict
) -> list[jax.Array]:
    """Call a kernel, whose results have these shapes."""
    # the kernels take flat arrays, and sizes from the attributes
    flat = [like((math.prod(shape),), jnp.float32, *arguments) for shape in shapes]
    results = jax.ffi.ffi_call(name, flat, vmap_method="sequential")(
        *(a.reshape(-1) for a in arguments), **attributes
    )
    return [a.reshape(shape) for a, shape in zip(results, shapes, strict=True)]
