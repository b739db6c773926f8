"""The loop over time, and its derivative.

Forward, the input's term is one product for a chunk of steps, and only ``h @ recurrent_kernel``
stays in the loop. The histories of the state are the only residuals. The tangent of the state obeys
a linear recurrence

    d state' = step'(d h @ recurrent_kernel, d state) + s

in which the coefficients of step' and everything that parameters and inputs contribute, s, are
known for a whole chunk before the loop. Its transpose, which is JAX's own, is therefore a loop
without transcendental functions and without sums of weight gradients: those are products of whole
chunks after it. One chunk is rematerialized at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.axes import is_static
from jaxnorm.engine.collectives import vary, varying_axes
from jaxnorm.recurrent.cells import Cell, State, Steps, Weights, product

# Gives the state after the last step, and h after every step; what more of the state it gives of
# them need have no derivative.
Loop = Callable[[Cell, Weights, jax.Array, Steps, State], tuple[State, State]]
# of intermediates: larger chunks leave the cache of a CPU, smaller ones make small products
CHUNK_BYTES = 13 << 19
SHORT = 8  # steps, up to which a sequence need not be cut


class Chunks(NamedTuple):
    """How long chunks are."""

    intermediates: int  # arrays of the size of the pre-activations that are alive at a time
    fewest: int  # chunks of a long sequence, so that intermediates weigh less than states
    # steps, whatever they weigh: a sum of weight gradients for every step is what chunks are to
    # spare
    smallest: int


PLAIN = Chunks(intermediates=6, fewest=6, smallest=4)


def chunk_length(chunks: Chunks, weights: Weights, x: jax.Array) -> int:
    """Steps per chunk: as many as the budget allows, few of a symbolic batch.

    A chunk costs what a step costs, and so does every step it is filled up with; then all states
    are copied as well.
    """
    if not is_static(x.shape):
        return min(x.shape[0], chunks.smallest)
    time, batch, packed = *x.shape[:2], weights["recurrent_kernel"].shape[-1]
    most = max(
        chunks.smallest,
        CHUNK_BYTES // max(1, batch * packed * x.dtype.itemsize * chunks.intermediates),
    )
    most = min(time, most, max(time // chunks.fewest, SHORT))
    return min(
        range(max(1, most // 2), most + 1),
        key=lambda k: (-(-time // k) * (k + 1) + bool(time % k) * time / 10, -k),
    )


def run(
    cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State, loop: Loop | None
) -> tuple[State, State]:
    """The state after the last step and after every step.

    Args:
      x: ``(time, batch, features)``, floating.
      steps: facts about steps, of leading axis ``time``.
      state: ``(batch, features)`` each.
      loop: computes them; None is a plain scan, whose derivative is left to JAX, as is that of a
        symbolic number of steps.
    """
    weights, x, state = vary_alike((weights, x, state), steps)
    time, batch = x.shape[:2]
    if loop is None or not is_static((time,)):
        step = partial(advance, cell, weights)
        return lax.scan(
            lambda s, xs: (step(*xs, s),) * 2,
            state,
            (cell.input_terms(weights, x, steps), with_zero_input(steps, x)),
        )
    if time * batch == 0:
        return state, jax.tree.map(lambda s: jnp.zeros((time, *s.shape), s.dtype), state)
    return loop(cell, weights, x, steps, state)


def chunked(
    cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State
) -> tuple[State, State]:
    """A chunk of steps at a time."""

    def chunk(state, xs):
        states = _run_chunk(cell, weights, *xs, state)
        return jax.tree.map(lambda h: h[-1], states), states

    _, chunks = lax.scan(
        chunk, state, split_into_chunks(chunk_length(PLAIN, weights, x), (x, steps))
    )
    histories = join_chunks(len(x), chunks)
    return jax.tree.map(lambda h: h[-1], histories), histories


def split_into_chunks(length: int, values):
    """Arrays of steps in chunks, the last filled up with zeros."""

    def split_one(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, [(0, -len(a) % length)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(len(a) // length, length, *a.shape[1:])

    return jax.tree.map(split_one, values)


def join_chunks(time: int, chunks):
    """Chunks joined to steps. Those that fill up the last chunk come after all others: nothing
    depends on them.
    """
    return jax.tree.map(lambda h: h.reshape(h.shape[0] * h.shape[1], *h.shape[2:])[:time], chunks)


def vary_alike(values, others):
    """The arrays, in shard_map all varying over devices where any does: a carry must, and weights
    then have one sum of gradients.
    """
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((values, others))))
    return jax.tree.map(lambda leaf: vary(leaf, axes), values)


def advance(
    cell: Cell, weights: Weights, input_term: jax.Array, steps: Steps, state: State
) -> State:
    state = _restart(steps, state)
    new = cell.step(
        weights, product(state[0], weights["recurrent_kernel"]), input_term, state, steps
    )
    return _hold(steps, _projected(weights, new), state)


def _restart(steps: Steps, state: State) -> State:
    return state if steps.reset is None else tuple(jnp.where(steps.reset, 0, s) for s in state)


def _projected(weights: Weights, new: State) -> State:
    return (product(new[0], weights["projection"]), *new[1:]) if "projection" in weights else new


def _hold(steps: Steps, new: State, old: State) -> State:
    """Zoneout and masks. Linear in the states, so that it is its own tangent."""
    if steps.keep is not None:
        new = tuple(_blend(keep, o, n) for keep, o, n in zip(steps.keep, old, new, strict=True))
    if steps.mask is not None:
        new = tuple(jnp.where(steps.mask, n, o) for n, o in zip(new, old, strict=True))
    return new


def _blend(keep: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.where(keep, old, new) if keep.dtype == jnp.bool_ else new + keep * (old - new)


def with_zero_input(steps: Steps, x: jax.Array) -> Steps:
    return steps._replace(zero_input=jnp.all(x == 0, -1, keepdims=True))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_chunk(cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State) -> State:
    """The states after each of the steps of a chunk."""
    input_term = cell.input_terms(weights, x, steps)
    return lax.scan(
        lambda s, xs: (advance(cell, weights, *xs, s),) * 2, state, (input_term, steps)
    )[1]


@_run_chunk.defjvp
def _run_chunk_jvp(cell, primals, tangents):
    weights, x, steps, state = primals
    dweights, dx, _, dstate = tangents
    states = _run_chunk(cell, weights, x, steps, state)

    return states, _chunk_tangent(cell, weights, dweights, x, dx, steps, state, dstate, states)


@partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.nothing_saveable,
    prevent_cse=False,
    static_argnums=0,
)
def _chunk_tangent(
    cell: Cell,
    weights: Weights,
    dweights: Weights,
    x,
    dx,
    steps: Steps,
    state: State,
    dstate: State,
    states: State,
) -> State:
    """The tangent of a chunk's states, from which everything else that it needs is recomputed."""
    linear_step, source = _linearize_steps(
        cell, weights, dweights, x, dx, steps, states_before(steps, state, states)
    )

    def step(d, xs):
        linear_step, source, steps = xs
        d = _restart(steps, d)
        new = _projected(weights, linear_step(product(d[0], weights["recurrent_kernel"]), d))
        d = _hold(steps, jax.tree.map(jnp.add, new, source), d)
        return d, d

    # Linear, and so its own tangent anywhere. Written as a jvp, which shows scan which of its
    # arguments are tangents: before 0.10 JAX cannot transpose it otherwise.
    linear = lambda dstate, source: lax.scan(step, dstate, (linear_step, source, steps))[1]
    return jax.jvp(linear, (state, states), (dstate, source))[1]


def states_before(steps: Steps, start: State, histories: State) -> State:
    """The state before each step."""
    return _restart(
        steps, jax.tree.map(lambda s, h: jnp.concatenate([s[None], h[:-1]]), start, histories)
    )


def _linearize_steps(
    cell: Cell, weights: Weights, dweights: Weights, x, dx, steps: Steps, states: State
):
    """The linearized steps of a chunk: the tangent of each as a function of (d a, d state), and
    what weights and x add to it.
    """
    steps = with_zero_input(steps, x)
    a, da = jax.jvp(
        lambda weight: product(states[0], weight),
        (weights["recurrent_kernel"],),
        (dweights["recurrent_kernel"],),
    )
    input_term, dinput_term = jax.jvp(
        partial(cell.input_terms, steps=steps), (weights, x), (dweights, dx)
    )

    def step_of_weights(weights, a, input_term):
        return _projected(weights, cell.step(weights, a, input_term, states, steps))

    def linear(a, input_term, states, steps):
        return jax.linearize(
            lambda a, state: cell.step(weights, a, input_term, state, steps), a, states
        )[1]

    _, source = jax.jvp(step_of_weights, (weights, a, input_term), (dweights, da, dinput_term))
    return jax.vmap(linear)(a, input_term, states, steps), source
