"""Run the loops of a layer-normalized LSTM on TPUs.

The chunks, residuals and derivation are those of scan.py. Chunks are longer, and both
loops take fewer and larger operations: forward by gates.py, backward by linear.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.recurrent import gates, linear
from jaxnorm.recurrent.cell import Cell, State, Steps, Weights, product
from jaxnorm.recurrent.cells import LSTM
from jaxnorm.recurrent.scan import Chunks, Form, Loop, chunked
from jaxnorm.recurrent.steps import hold, is_zero, restart, states_before

# Compiled for a TPU v5e, output and gradients of batch 64 with 256 steps and 512 features take
# 18.1 million cycles with 24 MiB, 17.0 with 64 and 19.0 with 128, of which less lies beside
# the cores.
CHUNKS = Chunks(intermediates=6, fewest=1, smallest=4, bytes=64 << 20)


def find_loop(cell: Cell, weights: Weights) -> Loop:
    """Return the loop of a network on TPUs.

    An LSTM has loops of its own if it normalizes all gates at once, and projects nothing.
    """
    known = (
        cell.name == "lstm"
        and cell.norm in ("layer", "rms")
        and cell.position != "gate"
        and "projection" not in weights
    )
    return chunked_by_gates if known else partial(chunked, chunks=CHUNKS)


def chunked_by_gates(
    cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State
) -> tuple[State, State]:
    """Run the steps of an LSTM with one norm for all gates. This is a :data:`Loop`."""
    form = Form(_states, _tangent)
    return chunked(cell, gates.with_gates(weights), x, steps, state, CHUNKS, form)


def _states(cell: LSTM, weights: Weights, x: jax.Array, steps: Steps, state: State) -> State:
    """Return the states after each step of a chunk."""
    terms = gates.input_terms(cell, weights, x, steps)
    ones = gates.make_ones(weights, x.dtype)

    def step(state, xs):
        term, steps = xs
        state = restart(steps, state)
        a = product(state[0], weights["recurrent_kernel"])
        new = hold(steps, gates.step(cell, weights, ones, a, term, state[1]), state)
        return new, new

    return lax.scan(step, state, (terms, steps))[1]


def _tangent(
    cell: LSTM,
    weights: Weights,
    dweights: Weights,
    x,
    dx,
    steps: Steps,
    state: State,
    dstate: State,
    states: State,
) -> State:
    """Return the tangent of a chunk's states, derived in linear.py."""
    by, source = _linearize(
        cell, weights, dweights, x, dx, steps, states_before(steps, state, states)
    )
    multiply = lambda h: tuple(product(h, weight) for weight in weights["recurrent_kernels"])
    # The loop carries the products in place of h: the transposed loop then begins with the
    # product, with which XLA fuses the sums over its result. Of h only what is held is needed.
    held = steps.mask is not None or steps.keep is not None

    def step(carry, xs):
        by, source, steps = xs
        da, dh, dc = restart(steps, carry)
        new = hold(steps, linear.apply(cell, by, source, da, dc), (dh, dc))
        return (multiply(new[0]), new[0] if held else None, new[1]), new

    def linear_loop(dstate, source):
        start = (multiply(dstate[0]), dstate[0] if held else None, dstate[1])
        return lax.scan(step, start, (by, source, steps))[1]

    # written as a jvp at any point, as in scan.py
    tangents = (dstate, source)
    return jax.jvp(linear_loop, jax.tree.map(jnp.zeros_like, tangents), tangents)[1]


def _linearize(
    cell: LSTM, weights: Weights, dweights: Weights, x, dx, steps: Steps, states: State
) -> tuple[linear.Coefficients, linear.Source]:
    """Linearize all steps of a chunk, given the states before them."""
    h, c = states
    a, da = jax.jvp(
        lambda matrices: tuple(product(h, matrix) for matrix in matrices),
        (weights["recurrent_kernels"],),
        (dweights["recurrent_kernels"],),
    )
    term, dterm = jax.jvp(
        lambda weights, x: gates.input_terms(cell, weights, x, steps), (weights, x), (dweights, dx)
    )
    at = linear.evaluate(cell, weights, linear.Point(a, term, c, is_zero(x)))
    return linear.make_coefficients(cell, at), linear.make_source(cell, dweights, at, da, dterm)
