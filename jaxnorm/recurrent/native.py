"""The LSTM's loop over time by the CPU kernels of lstm.cc: the states of all steps, and the transpose of their tangent.

The first is one call. The second goes back in chunks, whose gradients of x and of both kernels are products for JAX. Where
there is no norm it keeps the gates of wide networks: 4 H floats a step, which spare it the forward pass's products.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.kernels.native import like
from jaxnorm.kernels.placement import WHOLE, sharded
from jaxnorm.primitives import differentiable, linear, transposed_by_jax
from jaxnorm.recurrent.cells import LSTM, Cell, State, Steps, Weights
from jaxnorm.recurrent.scan import Chunks, chunk_length, chunked, varying_alike

WIDE = 256  # features, from which on gates are made in more time than they are read
PANEL = 32  # columns of a kernel that lie together
# Fewer and longer than in plain JAX: a step costs less, what XLA does between chunks does not.
CHUNKS = Chunks(intermediates=5, fewest=5, smallest=10)


def obstacle(x: jax.Array, cell: Cell, params: Weights, *others) -> str | None:
    """Why the kernels cannot take a network with these parameters and other facts, each None if absent; None if they can."""
    if cell.name != "lstm" or cell.norm == "batch" or "projection" in params:
        return "takes an LSTM without batch norm and projection"
    if any(other is not None for other in others):
        return "takes no segment_ids and no zoneout"
    if any(map(sharded, (x, *params.values()))):
        return WHOLE
    dtype = params["recurrent_kernel"].dtype
    return None if dtype == jnp.float32 else f"computes in float32: got {dtype}"


class Facts(NamedTuple):
    """What the primitives depend on beside the shapes."""

    cell: LSTM
    time_axis: int  # of arrays as the kernels take them: what is transposed for the rest is transposed back for nothing
    axes: int = 0  # in front, which vmap adds

    def lying(self, a: jax.Array) -> jax.Array:
        """Time first as the kernels take it, and the inverse."""
        return jnp.moveaxis(a, 0, self.time_axis)

    def rows(self, steps: int, batch: int) -> tuple[int, int]:
        """The axes in front of features, lying so."""
        return (batch, steps) if self.time_axis else (steps, batch)


def whole(time_major: bool, cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State) -> tuple[State, State]:
    """All steps in one call, of arrays that are best read with time first, or with sequences first."""
    assert isinstance(cell, LSTM)
    kernels = [jax.lax.stop_gradient(weights[name]) for name in ("input_kernel", "recurrent_kernel")]
    facts = Facts(cell, 0 if time_major else 1)
    hs, c = _whole(facts, ([_panels(kernel) for kernel in (*kernels, kernels[1].T)], weights, x, steps, state))
    return (hs[-1], c), (hs,)


def _panels(kernel: jax.Array) -> jax.Array:
    columns = -(-kernel.shape[1] // PANEL)
    kernel = jnp.pad(kernel, ((0, 0), (0, columns * PANEL - kernel.shape[1])))
    return kernel.reshape(len(kernel), columns, PANEL).transpose(1, 0, 2).reshape(-1)


def _attributes(facts: Facts, state: State) -> dict:
    cell = facts.cell
    batch, hidden = state[0].shape
    sets = 0 if cell.norm is None else len(cell.sets)
    flags = {"joint": cell.joint, "cell": cell.normalizes_cell, "centered": cell.norm == "layer", "carried": cell.carries}
    flags["time_major"] = facts.time_axis == 0
    return {"hidden": np.int64(hidden), "batch": np.int64(batch), "sets": np.int64(sets), "epsilon": np.float64(cell.epsilon), **flags}


def _kept_shapes(kept: bool, facts: Facts, weights: Weights, x: jax.Array, state: State) -> list[tuple[int, ...]]:
    """Of what is kept for the transpose beside the states: c after every step, and gates."""
    (batch, hidden), packed, nothing = state[1].shape, weights["recurrent_kernel"].shape[-1], (0,)
    rows = facts.rows(len(x), batch)
    gates = (*rows, packed) if facts.cell.norm is None and hidden >= WIDE else nothing
    return [(*rows, hidden), gates] if kept else [nothing, nothing]


def _names(cell: LSTM) -> tuple[str, ...]:
    """Of the vectors that kernels take, in their order."""
    return "recurrent_scale" if cell.separate else "scale", "input_scale", "bias", "cell_scale", "cell_bias"


def _arguments(facts: Facts, panels, weights: Weights, x: jax.Array, steps: Steps, state: State) -> list[jax.Array]:
    """What both kernels take; what a cell has no use for, and a gain or shift that is left out, is filled up."""
    cell, hidden, packed = facts.cell, state[0].shape[-1], weights["recurrent_kernel"].shape[-1]
    absent = (1, packed), (1, packed), (0, packed), (1, hidden), (0, hidden)
    vectors = [
        weights[name] if name in weights else jnp.full(size, value, x.dtype)
        for name, (value, size) in zip(_names(cell), absent, strict=True)
    ]
    taken = jnp.ones(x.shape[:2], bool) if steps.mask is None else steps.mask[..., 0]
    return [facts.lying(x), *vectors, facts.lying(taken), *panels[:2], *state]


def _forward(kept: bool, facts: Facts, arguments):
    if facts.axes:
        return jax.vmap(partial(_forward, kept, facts._replace(axes=facts.axes - 1)))(arguments)
    given = _arguments(facts, *arguments)
    weights, x, _, state = arguments[1:]
    batch, hidden = state[1].shape
    shapes = [(*facts.rows(len(x), batch), hidden), (batch, hidden), *_kept_shapes(kept, facts, weights, x, state)]
    hs, c, *rest = _call("JaxnormLstmForward", shapes, given, _attributes(facts, state))
    return facts.lying(hs), c, *(rest if kept else ())


def _plain(kept: bool, facts: Facts, arguments):
    """The same for other platforms, where the transpose is JAX's own and takes nothing that is kept."""
    if facts.axes:
        return jax.vmap(partial(_plain, kept, facts._replace(axes=facts.axes - 1)))(arguments)
    _, weights, x, steps, state = arguments
    (_, c), (hs, _) = chunked(facts.cell, weights, x, steps, state)
    rest = [jnp.zeros(shape, jnp.float32) for shape in _kept_shapes(kept, facts, weights, x, state)]
    return hs, c, *(rest if kept else ())


def _call(name: str, shapes: list[tuple[int, ...]], given: list[jax.Array], attributes: dict) -> list[jax.Array]:
    flat = [like((math.prod(shape),), jnp.float32, *given) for shape in shapes]
    found = jax.ffi.ffi_call(name, flat, vmap_method="sequential")(*(a.reshape(-1) for a in given), **attributes)
    return [a.reshape(shape) for a, shape in zip(found, shapes, strict=True)]


def _jvp(kept: bool, facts, arguments, tangents):
    """What is kept for the transpose has itself no derivative: it is made of the arguments, which have."""
    _, dweights, dx, _, dstate = tangents
    hs, c, *rest = _kept(facts, arguments)
    dhs, dc = _apply_tangent(facts, (*arguments, (hs, *rest)), (dweights, dx, dstate))
    return ((hs, c, *rest), (dhs, dc, *map(jnp.zeros_like, rest))) if kept else ((hs, c), (dhs, dc))


def _tangent(facts: Facts, residuals, arguments):
    """In plain JAX."""
    if facts.axes:
        return jax.vmap(partial(_tangent, facts._replace(axes=facts.axes - 1)))(residuals, arguments)
    _, weights, x, steps, state, _ = residuals
    loop = lambda weights, x, state: chunked(facts.cell, weights, x, steps, state)  # noqa: E731
    (_, dc), (dhs, _) = jax.jvp(loop, (weights, x, state), arguments)[1]
    return dhs, dc


def _backward(facts: Facts, residuals, cotangents):
    """Its transpose, chunk by chunk."""
    if facts.axes:
        return jax.vmap(partial(_backward, facts._replace(axes=facts.axes - 1)))(residuals, cotangents)
    panels, weights, x, steps, state, (hs, *rest) = residuals
    by, dc = cotangents[0], jnp.zeros_like(state[1]) if cotangents[1] is None else cotangents[1]
    arguments = jax.lax.optimization_barrier(_arguments(facts, panels, weights, x, steps, state))  # else constants are made by chunk
    length = chunk_length(CHUNKS, weights, x)
    count, first = divmod(len(x), length)
    given = [*arguments, panels[2], facts.lying(hs), *rest, facts.lying(by)]

    def chunk(carry, start, length=length):
        later, sums, dx = carry
        dweights, of_chunk, dstate = _backward_chunk(facts, given, start, length, weights, later)
        dx = jax.lax.dynamic_update_slice_in_dim(dx, of_chunk, start, facts.time_axis)
        return (dstate, jax.tree.map(jnp.add, sums, dweights), dx), None

    x = arguments[0]
    dh, sums, dx = varying_alike(jax.tree.map(jnp.zeros_like, (state[0], weights, x)), x)
    starts = first + length * jnp.arange(count, dtype=jnp.int32)
    carry, _ = jax.lax.scan(chunk, ((dh, dc), sums, dx), starts, reverse=True)
    if first:
        carry, _ = chunk(carry, jnp.int32(0), first)
    dstate, dweights, dx = carry
    return dweights, facts.lying(dx), dstate


def _backward_chunk(facts: Facts, given: list[jax.Array], start: jax.Array, length: int, weights: Weights, later: State):
    """The cotangents of weights, x and the state before some steps, from what the kernel takes of all and those of the state after."""
    cell, (batch, hidden), (inputs, packed) = facts.cell, later[0].shape, weights["input_kernel"].shape
    count = length * batch
    widths = (packed, packed, hidden, inputs) if cell.separate else (packed, 0, hidden + inputs, 0)
    vectors = packed, packed, packed, hidden, hidden
    shapes = [*((count, width) for width in widths), *[later[0].shape] * 2, *((width,) for width in vectors)]
    da, da_x, rows, x, dh, dc, *sums = _call("JaxnormLstmBackward", shapes, [*given, *later, start], _attributes(facts, later))
    if cell.separate:
        by_recurrent, da_x = jax.lax.optimization_barrier((rows.T @ da, da_x))  # in any other order caches are left too early
        by_input = x.T @ da_x
    else:  # one product of both
        by_recurrent, by_input = jnp.split(rows.T @ da, [hidden])
    dx = (da_x if cell.separate else da) @ weights["input_kernel"].T
    found = {**dict(zip(_names(cell), sums, strict=True)), "input_kernel": by_input, "recurrent_kernel": by_recurrent}
    return {name: found[name] for name in weights}, dx.reshape(*facts.rows(length, batch), inputs), (dh, dc)


def _batched(facts, size):
    return facts._replace(axes=facts.axes + 1)


_whole = differentiable(
    "jaxnorm_native_lstm", partial(_forward, False), partial(_jvp, False), _batched, results=2, elsewhere=partial(_plain, False)
)
_kept = differentiable(
    "jaxnorm_native_lstm_kept", partial(_forward, True), partial(_jvp, True), _batched, results=4, elsewhere=partial(_plain, True)
)


def _arguments_like(residuals):
    return residuals[1], residuals[2], residuals[4]


_apply_tangent = linear(
    "jaxnorm_native_lstm_tangent",
    _tangent,
    _backward,
    like=_arguments_like,
    batched=_batched,
    results=2,
    elsewhere=transposed_by_jax(_tangent, _arguments_like),
)
