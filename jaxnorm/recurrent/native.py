"""Run the LSTM's loop over time by the CPU kernels of lstm.cc.

One call of the forward kernel computes the states of all steps. The backward kernel is
the transpose of their tangent. It goes back chunk by chunk, and JAX multiplies its
results to the gradients of x and of both matrices. Without a norm, wide networks store
their gates as residuals, 4 H floats a step, instead of recomputing the products.

The tangent itself is plain JAX, from scan.py.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm.engine.primitives import differentiable, linear, zeros
from jaxnorm.engine.xla import barrier_on_cpu
from jaxnorm.kernels.placement import WHOLE, sharded
from jaxnorm.recurrent.cell import Cell, State, Steps, Weights
from jaxnorm.recurrent.cells import LSTM
from jaxnorm.recurrent.native_call import (
    Static,
    attributes,
    call_kernel,
    cotangent_shapes,
    kernel_arguments,
    panels_of,
    vector_names,
)
from jaxnorm.recurrent.scan import Chunks, chunk_length, chunked, vary_alike

# Features, from which on recomputing the gates takes longer than reading them.
# Gradients took 0.82 to 0.83 of the time with stored gates, at 256 and at 512 features.
WIDE = 256
# Fewer and longer chunks than in plain JAX: a step costs less here, and the work of XLA
# between two chunks costs as much. Gradients took 0.94 of the time with fewer chunks,
# and 0.90 to 0.95 of that with chunks of ten steps that divide the sequence.
CHUNKS = Chunks(intermediates=5, fewest=5, smallest=10)


def obstacle(x: jax.Array, cell: Cell, params: Weights, *others) -> str | None:
    """Return why the kernels cannot run a network, or None if they can.

    Args:
      x: the input sequences.
      cell: the static arguments of a step.
      params: the parameters.
      *others: segments and zoneout, each None if absent.
    """
    if cell.name != "lstm" or cell.norm == "batch" or "projection" in params:
        projection = ", a projection" if "projection" in params else ""
        return (
            f"takes an LSTM without batch norm and projection: got {cell.name}, "
            f"norm={cell.norm!r}{projection}"
        )
    if any(other is not None for other in others):
        return "takes no segments and no zoneout"
    if any(map(sharded, (x, *params.values()))):
        return WHOLE
    dtype = params["recurrent_kernel"].dtype
    return None if dtype == jnp.float32 else f"computes in float32: got {dtype}"


def whole(
    time_major: bool, cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State
) -> tuple[State, State]:
    """Run all steps in one call. This is a :data:`jaxnorm.recurrent.scan.Loop`.

    ``time_major`` says whether the caller's arrays have time as their first axis.
    """
    assert isinstance(cell, LSTM)
    # The panels hold the matrices in another order. They pass no gradients on: these
    # reach the matrices through the weights.
    matrices = [
        jax.lax.stop_gradient(weights[name]) for name in ("input_kernel", "recurrent_kernel")
    ]
    static = Static(cell, 0 if time_major else 1)
    hs, c = _loop(
        static,
        ([panels_of(weight) for weight in (*matrices, matrices[1].T)], weights, x, steps, state),
    )
    return (hs[-1], c), (hs,)


def _residual_shapes(
    with_residuals: bool, static: Static, weights: Weights, x: jax.Array, state: State
) -> list[tuple[int, ...]]:
    """Return the shapes of the residuals besides h: c after every step, and the gates.

    A shape of (0,) tells the kernel not to write the array.
    """
    (batch, hidden), packed, nothing = state[1].shape, weights["recurrent_kernel"].shape[-1], (0,)
    rows = static.rows(len(x), batch)
    gates = (*rows, packed) if static.cell.norm is None and hidden >= WIDE else nothing
    return [(*rows, hidden), gates] if with_residuals else [nothing, nothing]


def _forward(with_residuals: bool, static: Static, arguments):
    """Call the forward kernel, once for each element of axes that vmap has added."""
    if static.axes:
        return jax.vmap(partial(_forward, with_residuals, static._replace(axes=static.axes - 1)))(
            arguments
        )
    weights, x, _, state = arguments[1:]
    batch, hidden = state[1].shape
    shapes = [
        (*static.rows(len(x), batch), hidden),
        (batch, hidden),
        *_residual_shapes(with_residuals, static, weights, x, state),
    ]
    hs, c, *rest = call_kernel(
        "JaxnormLstmForward",
        shapes,
        kernel_arguments(static, *arguments),
        attributes(static, state),
    )
    return static.arranged(hs), c, *(rest if with_residuals else ())


def _results_like(with_residuals: bool, static: Static, arguments):
    """Return arrays of the shapes and dtypes that :func:`_forward` returns."""
    if static.axes:
        inner = partial(_results_like, with_residuals, static._replace(axes=static.axes - 1))
        return jax.vmap(inner)(arguments)
    weights, x, _, state = arguments[1:]
    shapes = [(len(x), *state[1].shape), state[1].shape]
    if with_residuals:
        shapes += _residual_shapes(True, static, weights, x, state)
    leaves = jax.tree.leaves(arguments)
    return tuple(zeros(shape, jnp.float32, *leaves) for shape in shapes)


def _plain(with_residuals: bool, static: Static, arguments):
    """Run the loop in plain JAX, on platforms that have no kernel."""
    # The transpose is then JAX's own. It uses none of the residuals besides h, so that
    # zeros of their shapes will do.
    if static.axes:
        return jax.vmap(partial(_plain, with_residuals, static._replace(axes=static.axes - 1)))(
            arguments
        )
    _, weights, x, steps, state = arguments
    (_, c), (hs, _) = chunked(static.cell, weights, x, steps, state)
    rest = [
        jnp.zeros(shape, jnp.float32)
        for shape in _residual_shapes(with_residuals, static, weights, x, state)
    ]
    return hs, c, *(rest if with_residuals else ())


def _jvp(with_residuals: bool, static, arguments, tangents):
    """Return the states, their tangents, and zero tangents for the residuals."""
    # The tangent is a function of the arguments alone, even where it is given
    # residuals. So derivatives of higher order find the way to the arguments without
    # these.
    _, dweights, dx, _, dstate = tangents
    hs, c, *rest = _loop_with_residuals(static, arguments)
    dhs, dc = _apply_tangent(static, (*arguments, (hs, *rest)), (dweights, dx, dstate))
    return (
        ((hs, c, *rest), (dhs, dc, *map(jnp.zeros_like, rest)))
        if with_residuals
        else ((hs, c), (dhs, dc))
    )


def _tangent(static: Static, residuals, arguments):
    """Return the tangents of the loop's results, in plain JAX."""
    if static.axes:
        return jax.vmap(partial(_tangent, static._replace(axes=static.axes - 1)))(
            residuals, arguments
        )
    _, weights, x, steps, state, _ = residuals
    loop = lambda weights, x, state: chunked(static.cell, weights, x, steps, state)
    (_, dc), (dhs, _) = jax.jvp(loop, (weights, x, state), arguments)[1]
    return dhs, dc


def _tangent_like(_, residuals, arguments):
    """Return arrays of the shapes and dtypes that :func:`_tangent` returns."""
    return residuals[-1][0], arguments[-1][1]


def _backward(static: Static, residuals, cotangents):
    """Return the cotangents of weights, x and the first state, chunk by chunk."""
    if static.axes:
        return jax.vmap(partial(_backward, static._replace(axes=static.axes - 1)))(
            residuals, cotangents
        )
    panels, weights, x, steps, state, (hs, *rest) = residuals
    dhs, dc = cotangents[0], jnp.zeros_like(state[1]) if cotangents[1] is None else cotangents[1]
    # a barrier, since XLA moves constants such as an absent mask into the loop over
    # chunks, where each chunk would compute them anew
    arguments = barrier_on_cpu(*kernel_arguments(static, panels, weights, x, steps, state))
    length = chunk_length(CHUNKS, weights, x)
    count, first = divmod(len(x), length)
    arrays = [*arguments, panels[2], static.arranged(hs), *rest, static.arranged(dhs)]

    def chunk(carry, start, length=length):
        dstate_after, sums, dx = carry
        dweights, dx_chunk, dstate = _backward_chunk(
            static, arrays, start, length, weights, dstate_after
        )
        dx = jax.lax.dynamic_update_slice_in_dim(dx, dx_chunk, start, static.time_axis)
        return (dstate, jax.tree.map(jnp.add, sums, dweights), dx), None

    x = arguments[0]
    dh, sums, dx = vary_alike(jax.tree.map(jnp.zeros_like, (state[0], weights, x)), x)
    # the first steps that fill no chunk are a shorter one, which comes last here
    starts = first + length * jnp.arange(count, dtype=jnp.int32)
    carry, _ = jax.lax.scan(chunk, ((dh, dc), sums, dx), starts, reverse=True)
    if first:
        carry, _ = chunk(carry, jnp.int32(0), first)
    dstate, dweights, dx = carry
    return dweights, static.arranged(dx), dstate


def _backward_chunk(
    static: Static,
    arrays: list[jax.Array],
    start: jax.Array,
    length: int,
    weights: Weights,
    dstate_after: State,
):
    """Return the cotangents of weights, x and the state before a chunk of steps.

    Args:
      static: the static arguments.
      arrays: the first arguments of the kernel, which span all steps.
      start: the first step of the chunk.
      length: the number of its steps.
      weights: the parameters as steps use them.
      dstate_after: the cotangent of the state after the chunk.
    """
    # With the cotangents da of h W and da_x of x U at each step, row by row:
    #     dW = h^T da,    dU = x^T da_x,    dx = da_x U^T
    # Unless each term has a norm, da_x is da, and one product [h, x]^T da gives dW and
    # dU. The kernel writes the rows of h, or of [h, x]. At masked steps, where x may
    # hold NaN, the rows have 0 for it, and da is 0.
    cell, (batch, hidden) = static.cell, dstate_after[0].shape
    da, da_x, rows, x, dh, dc, *dvectors = call_kernel(
        "JaxnormLstmBackward",
        cotangent_shapes(cell, length * batch, weights, dstate_after),
        [*arrays, *dstate_after, start],
        attributes(static, dstate_after),
    )
    if cell.normalizes_each_term:
        # the barrier orders the products: the kernel has just written da, which is in
        # the cache
        drecurrent, da_x = barrier_on_cpu(rows.T @ da, da_x)
        dinput = x.T @ da_x
    else:
        drecurrent, dinput = jnp.split(rows.T @ da, [hidden])
    dx = (da_x if cell.normalizes_each_term else da) @ weights["input_kernel"].T
    dweights = {
        **dict(zip(vector_names(cell), dvectors, strict=True)),
        "input_kernel": dinput,
        "recurrent_kernel": drecurrent,
    }
    return (
        {name: dweights[name] for name in weights},
        dx.reshape(*static.rows(length, batch), dx.shape[-1]),
        (dh, dc),
    )


def _batched(static, size):
    """Return the static arguments for arrays with one more axis in front."""
    return static._replace(axes=static.axes + 1)


def _primitive(name: str, with_residuals: bool, results: int):
    """Make a primitive of the loop, whose results may include the residuals."""
    return differentiable(
        name,
        partial(_plain, with_residuals),
        partial(_jvp, with_residuals),
        batched=_batched,
        results=results,
        results_like=partial(_results_like, with_residuals),
        kernels={"cpu": partial(_forward, with_residuals)},
    )


# two primitives, so that a call that nobody differentiates writes no residuals
_loop = _primitive("jaxnorm_native_lstm", False, 2)
_loop_with_residuals = _primitive("jaxnorm_native_lstm_with_residuals", True, 4)


def _arguments_like(residuals):
    """Return weights, x and state, which are like the arguments of the tangent."""
    return residuals[1], residuals[2], residuals[4]


_apply_tangent = linear(
    "jaxnorm_native_lstm_tangent",
    _tangent,
    like=_arguments_like,
    batched=_batched,
    results=2,
    results_like=_tangent_like,
    kernels={"cpu": _backward},
)
