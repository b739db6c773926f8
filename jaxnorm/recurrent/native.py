"""The LSTM's loop over time by the CPU kernels of lstm.cc: the states of all steps, and the transpose of their tangent.

The first is one call. The second goes back in chunks, whose gradients of x and of both kernels are products for JAX. Where
there is no norm it keeps the gates of wide networks: 4 H floats a step, which spare it the forward pass's products.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.kernels.native import like
from jaxnorm.kernels.placement import WHOLE, sharded
from jaxnorm.primitives import differentiable, linear
from jaxnorm.recurrent.cells import LSTM, Cell, State, Steps, Weights, masked, read
from jaxnorm.recurrent.scan import Chunks, before, chunk_length, chunked, varying_alike

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


def whole(cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State) -> tuple[State, State]:
    """All steps in one call."""
    assert isinstance(cell, LSTM)
    kernels = [jax.lax.stop_gradient(weights[name]) for name in ("input_kernel", "recurrent_kernel")]
    hs, c = _whole((cell, 0), ([_panels(kernel) for kernel in (*kernels, kernels[1].T)], weights, x, steps, state))
    return (hs[-1], c), (hs,)


def _panels(kernel: jax.Array) -> jax.Array:
    columns = -(-kernel.shape[1] // PANEL)
    kernel = jnp.pad(kernel, ((0, 0), (0, columns * PANEL - kernel.shape[1])))
    return kernel.reshape(len(kernel), columns, PANEL).transpose(1, 0, 2).reshape(-1)


def _attributes(cell: LSTM, state: State) -> dict:
    batch, hidden = state[0].shape
    sets = 0 if cell.norm is None else len(cell.sets)
    flags = {"joint": cell.joint, "cell": cell.normalizes_cell, "centered": cell.norm == "layer", "carried": cell.carries}
    return {"hidden": np.int64(hidden), "batch": np.int64(batch), "sets": np.int64(sets), "epsilon": np.float64(cell.epsilon), **flags}


def _names(cell: LSTM) -> tuple[str, ...]:
    """Of the vectors that kernels take, in their order."""
    return "recurrent_scale" if cell.separate else "scale", "input_scale", "bias", "cell_scale", "cell_bias"


def _arguments(cell: LSTM, panels, weights: Weights, x: jax.Array, steps: Steps, state: State) -> list[jax.Array]:
    """What both kernels take; what a cell has no use for, and a gain or shift that is left out, is filled up."""
    hidden, packed = state[0].shape[-1], weights["recurrent_kernel"].shape[-1]
    absent = (1, packed), (1, packed), (0, packed), (1, hidden), (0, hidden)
    vectors = [
        weights[name] if name in weights else jnp.full(size, value, x.dtype)
        for name, (value, size) in zip(_names(cell), absent, strict=True)
    ]
    taken = jnp.ones(x.shape[:2], bool) if steps.mask is None else steps.mask[..., 0]
    return [x, *vectors, taken, *panels[:2], *state]


def _forward(kept: bool, facts, arguments):
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_forward, kept, (cell, axes - 1)))(arguments)
    given = _arguments(cell, *arguments)
    weights, x, _, state = arguments[1:]
    nothing, shape, (hidden, packed) = (0,), (len(x), *state[1].shape), weights["recurrent_kernel"].shape
    gates = (*x.shape[:2], packed) if cell.norm is None and hidden >= WIDE else nothing
    shapes = [shape, state[1].shape, *((shape, gates) if kept else (nothing, nothing))]
    return _call("JaxnormLstmForward", shapes, given, _attributes(cell, state))[: 4 if kept else 2]


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


def _tangent(facts, residuals, arguments):
    """In plain JAX."""
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_tangent, (cell, axes - 1)))(residuals, arguments)
    _, weights, x, steps, state, _ = residuals
    (_, dc), (dhs, _) = jax.jvp(lambda weights, x, state: chunked(cell, weights, x, steps, state), (weights, x, state), arguments)[1]
    return dhs, dc


def _backward(facts, residuals, cotangents):
    """Its transpose, chunk by chunk."""
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_backward, (cell, axes - 1)))(residuals, cotangents)
    panels, weights, x, steps, state, states = residuals
    by, dc = cotangents
    arguments = jax.lax.optimization_barrier(_arguments(cell, panels, weights, x, steps, state))  # else constants are made by chunk
    given = [*arguments, panels[2], *states, by]
    length = chunk_length(CHUNKS, weights, x)
    count, first = divmod(len(x), length)

    def chunk(carry, start, length=length):
        later, sums = carry
        dweights, dx, dstate = _backward_chunk(cell, given, start, length, residuals, later)
        return (dstate, jax.tree.map(jnp.add, sums, dweights)), dx

    dh, sums = varying_alike(jax.tree.map(jnp.zeros_like, (state[0], weights)), x)
    starts = first + length * jnp.arange(count, dtype=jnp.int32)
    carry, dx = jax.lax.scan(chunk, ((dh, dc), sums), starts, reverse=True)
    dx = dx.reshape(count * length, *x.shape[1:])
    if first:
        carry, dx_first = chunk(carry, jnp.int32(0), first)
        dx = jnp.concatenate([dx_first, dx])
    dstate, dweights = carry
    return dweights, dx, dstate


def _backward_chunk(cell: LSTM, given: list[jax.Array], start: jax.Array, length: int, residuals, later: State):
    """The cotangents of weights, x and the state before some steps, from what the kernel takes of all and those of the state after.

    Barriers keep the order: in any other XLA's copies and products push what they share out of the cache.
    """
    _, weights, x, steps, state, (hs, *_) = residuals
    (batch, hidden), width = state[0].shape, weights["recurrent_kernel"].shape[-1]
    h = jnp.where(start > 0, hs[jnp.maximum(start - 1, 0)], state[0])
    x, steps, hs = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, length), (x, steps, hs))
    rows = before(steps, (h,), (hs,))[0].reshape(-1, hidden)
    x, rows, start = jax.lax.optimization_barrier((x, rows, start))
    apart = (length, batch, width) if cell.separate else (1,)  # else both terms have one cotangent
    shapes = [(length, batch, width), apart, *(part.shape for part in state), *[(width,)] * 3, *[(hidden,)] * 2]
    da, da_x, dh, dc, *sums = _call("JaxnormLstmBackward", shapes, [*given, *later, start], _attributes(cell, state))
    dx, by_input = jax.vjp(partial(read, steps), x, weights["input_kernel"])[1](da_x if cell.separate else da)
    if cell.separate:
        by_input, rows, da = jax.lax.optimization_barrier((by_input, rows, da))
        by_recurrent = rows.T @ da.reshape(-1, width)
    else:  # one product of both
        rows = jnp.concatenate([rows, masked(steps, x).reshape(-1, x.shape[-1])], -1)
        by_recurrent, by_input = jnp.split(rows.T @ da.reshape(-1, width), [hidden])
    found = {**dict(zip(_names(cell), sums, strict=True)), "input_kernel": by_input, "recurrent_kernel": by_recurrent}
    return {name: found[name] for name in weights}, dx, (dh, dc)


def _batched(facts, size):
    return facts[0], facts[1] + 1


_whole = differentiable("jaxnorm_native_lstm", partial(_forward, False), partial(_jvp, False), _batched, results=2)
_kept = differentiable("jaxnorm_native_lstm_kept", partial(_forward, True), partial(_jvp, True), _batched, results=4)
_apply_tangent = linear(
    "jaxnorm_native_lstm_tangent",
    _tangent,
    _backward,
    like=lambda residuals: (residuals[1], residuals[2], residuals[4]),
    batched=_batched,
    results=2,
)
