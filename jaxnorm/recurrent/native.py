"""The LSTM's loop over time by the CPU kernels of lstm.cc: the states of all steps, and the transpose of their tangent.

The first is one call. The second goes back in chunks, whose gradients of x and of both kernels are products for JAX.
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
from jaxnorm.recurrent.scan import Chunks, before, chunk_length, chunked, cut, joined, varying_alike

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
    hs, cs, c = _whole((cell, 0), ([_panels(kernel) for kernel in (*kernels, kernels[1].T)], weights, x, steps, state))
    return (hs[-1], c), (hs, cs)


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


def _forward(facts, arguments):
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_forward, (cell, axes - 1)))(arguments)
    given = _arguments(cell, *arguments)
    state, x = arguments[-1], arguments[2]
    hs, cs = _call("JaxnormLstmForward", [(len(x), *part.shape) for part in state], given, _attributes(cell, state))
    return hs, cs, cs[-1]


def _call(name: str, shapes: list[tuple[int, ...]], given: list[jax.Array], attributes: dict) -> list[jax.Array]:
    flat = [like((math.prod(shape),), jnp.float32, *given) for shape in shapes]
    found = jax.ffi.ffi_call(name, flat, vmap_method="sequential")(*(a.reshape(-1) for a in given), **attributes)
    return [a.reshape(shape) for a, shape in zip(found, shapes, strict=True)]


def _jvp(facts, arguments, tangents):
    _, dweights, dx, _, dstate = tangents
    hs, cs, c = _whole(facts, arguments)
    dhs, dc = _apply_tangent(facts, (*arguments, (hs, cs)), (dweights, dx, dstate))
    return (hs, cs, c), (dhs, jnp.zeros_like(cs), dc)  # cs is kept for the transpose


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
    length = chunk_length(CHUNKS, weights, x)
    if len(x) % length and steps.mask is None:
        steps = steps._replace(mask=jnp.ones((*x.shape[:2], 1), bool))  # steps that fill up the last chunk are not taken
    (by, dc), pieces = cotangents, cut(length, (x, steps, states))
    starts = jax.tree.map(lambda s, h: jnp.concatenate([s[None], h[:-1, -1]]), state, pieces[2])

    def chunk(carry, xs):
        later, sums = carry
        x, steps, states, start, by = xs
        dweights, dx, dstate = _backward_chunk(cell, panels, weights, x, steps, start, states, by, later)
        return (dstate, jax.tree.map(jnp.add, sums, dweights)), dx

    dh, sums = varying_alike(jax.tree.map(jnp.zeros_like, (state[0], weights)), x)
    (dstate, dweights), dx = jax.lax.scan(chunk, ((dh, dc), sums), (*pieces, starts, cut(length, by)), reverse=True)
    return dweights, joined(len(x), dx), dstate


def _backward_chunk(cell: LSTM, panels, weights: Weights, x, steps: Steps, state: State, states: State, by, later: State):
    """The cotangents of weights, x and the state before a chunk, given those of h after each of its steps, and of the last state."""
    given = [*_arguments(cell, panels, weights, x, steps, state), panels[2], *states, by, *later]
    hidden, width = state[0].shape[-1], weights["recurrent_kernel"].shape[-1]
    shape = *x.shape[:2], width
    apart = shape if cell.separate else (1,)  # else both terms have one cotangent
    shapes = [shape, apart, *(part.shape for part in state), *[(width,)] * 3, *[(hidden,)] * 2]
    da, da_x, dh, dc, *sums = _call("JaxnormLstmBackward", shapes, given, _attributes(cell, state))
    dx, by_input = jax.vjp(partial(read, steps), x, weights["input_kernel"])[1](da_x if cell.separate else da)
    rows = before(steps, state, states)[0].reshape(-1, hidden)
    if cell.separate:
        by_recurrent = rows.T @ da.reshape(-1, width)
    else:  # one product of both
        rows = jnp.concatenate([rows, masked(steps, x).reshape(-1, x.shape[-1])], -1)
        by_recurrent, by_input = jnp.split(rows.T @ da.reshape(-1, width), [hidden])
    found = {**dict(zip(_names(cell), sums, strict=True)), "input_kernel": by_input, "recurrent_kernel": by_recurrent}
    return {name: found[name] for name in weights}, dx, (dh, dc)


def _batched(facts, size):
    return facts[0], facts[1] + 1


_whole = differentiable("jaxnorm_native_lstm", _forward, _jvp, _batched, results=3)
_apply_tangent = linear(
    "jaxnorm_native_lstm_tangent",
    _tangent,
    _backward,
    like=lambda residuals: (residuals[1], residuals[2], residuals[4]),
    batched=_batched,
    results=2,
)
