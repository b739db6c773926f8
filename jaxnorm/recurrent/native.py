"""The LSTM's loop over time by the CPU kernels of lstm.cc: the states of a chunk of steps, and the transpose of their tangent.

Kernels do what steps must do one after the other, and what is done to each of their numbers. Products of a whole chunk
stay JAX's: those of x with the input kernel, and the gradients of x and of both kernels.
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
from jaxnorm.recurrent.scan import Chunk, Chunks, before, tangent, with_idle

PANEL = 32  # columns of a kernel that lie together


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


def _prepare(cell: Cell, weights: Weights) -> Chunk:
    assert isinstance(cell, LSTM)
    kernel = jax.lax.stop_gradient(weights["recurrent_kernel"])
    packed = _panels(kernel), _panels(kernel.T)
    return lambda *arguments: _chunk((cell, 0), (packed, *arguments))


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


def _arguments(cell: LSTM, weights: Weights, products: jax.Array, steps: Steps, state: State) -> list[jax.Array]:
    """What both kernels take; what a cell has no use for, and a gain or shift that is left out, is filled up."""
    hidden, (*shape, packed) = state[0].shape[-1], products.shape
    absent = (1, packed), (1, packed), (0, packed), (1, hidden), (0, hidden)
    vectors = [
        weights[name] if name in weights else jnp.full(size, value, products.dtype)
        for name, (value, size) in zip(_names(cell), absent, strict=True)
    ]
    flags = (jnp.ones(shape, bool) if flag is None else jnp.broadcast_to(flag[..., 0], shape) for flag in (steps.mask, steps.idle))
    return [products, *vectors, *flags]


def _forward(facts, arguments):
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_forward, (cell, axes - 1)))(arguments)
    packed, weights, x, steps, state = arguments
    products = read(steps, x, weights["input_kernel"])
    given = [*_arguments(cell, weights, products, steps, state), packed[0], *state]
    return _call("JaxnormLstmForward", [(len(x), *part.shape) for part in state], given, _attributes(cell, state))


def _call(name: str, shapes: list[tuple[int, ...]], given: list[jax.Array], attributes: dict) -> list[jax.Array]:
    flat = [like((math.prod(shape),), jnp.float32, *given) for shape in shapes]
    found = jax.ffi.ffi_call(name, flat, vmap_method="sequential")(*(a.reshape(-1) for a in given), **attributes)
    return [a.reshape(shape) for a, shape in zip(found, shapes, strict=True)]


def _jvp(facts, arguments, tangents):
    _, dweights, dx, _, dstate = tangents
    states = _chunk(facts, arguments)
    return states, _apply_tangent(facts, (*arguments, states), (dweights, dx, dstate))


def _tangent(facts, residuals, arguments):
    """In plain JAX."""
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_tangent, (cell, axes - 1)))(residuals, arguments)
    (_, weights, x, steps, state, states), (dweights, dx, dstate) = residuals, arguments
    return tangent(cell, weights, dweights, x, dx, steps, state, dstate, states)


def _backward(facts, residuals, cotangents):
    """Its transpose, by the kernel."""
    cell, axes = facts
    if axes:
        return jax.vmap(partial(_backward, (cell, axes - 1)))(residuals, cotangents)
    packed, weights, x, steps, state, states = residuals
    steps = with_idle(steps, x)
    products, pull = jax.vjp(partial(read, steps), x, weights["input_kernel"])
    given = [*_arguments(cell, weights, products, steps, state), packed[0], *state, packed[1], *states, *cotangents]
    hidden, width = state[0].shape[-1], products.shape[-1]
    apart = products.shape if cell.separate else (1,)  # else both terms have one cotangent
    shapes = [products.shape, apart, *(part.shape for part in state), *[(width,)] * 3, *[(hidden,)] * 2]
    da, da_x, dh, dc, *sums = _call("JaxnormLstmBackward", shapes, given, _attributes(cell, state))
    dx, by_input = pull(da_x if cell.separate else da)
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


_chunk = differentiable("jaxnorm_native_lstm", _forward, _jvp, _batched, results=2)
_apply_tangent = linear(
    "jaxnorm_native_lstm_tangent",
    _tangent,
    _backward,
    like=lambda residuals: (residuals[1], residuals[2], residuals[4]),
    batched=_batched,
    results=2,
)

# Fewer and longer chunks than in plain JAX: a step costs less, what XLA does between chunks does not.
CHUNKS = Chunks(_prepare, intermediates=5, fewest=5, smallest=10)
