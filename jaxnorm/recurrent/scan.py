"""Run the loop over time, with a derivative that stores only the states.

Forward, one product gives the input's term of a whole chunk of steps. Only the product
of h and the recurrent matrix W stays in the loop. The states after each step are the
only residuals. With s and s' for the state before and after a step::

    a   = h W
    s'  = step(a, s, weights, input_term)
    ds' = linear_step(dh W, ds) + source
    source = step's tangent by (h dW, dweights, dinput_term), with ds = 0

The residuals determine ``linear_step``, the tangent of step by (a, s), and ``source``
for all steps of a chunk at once, before the loop. What remains in the loop is linear in
ds, so JAX transposes it. The transposed loop has no transcendental functions and no
sums of weight gradients. After it, products over the whole chunk give these gradients.
Backward recomputes one chunk at a time.

A cell with several stages has a product, a linear function and a source for each. A
source is the tangent of a stage by its matrix, too, and passes through the next one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.axes import is_static
from jaxnorm.engine.collectives import vary, varying_axes
from jaxnorm.recurrent.cell import Cell, State, Steps, Weights, product
from jaxnorm.recurrent.steps import (
    advance,
    hold,
    linearize_steps,
    projected,
    restart,
    states_before,
    with_zero_input,
)

# Returns the state after the last step, and the parts of the state after every step.
# Of the parts after every step only h is needed, and only h needs a derivative.
Loop = Callable[[Cell, Weights, jax.Array, Steps, State], tuple[State, State]]
# Of intermediates in a chunk: larger chunks leave the cache of a CPU, smaller ones make
# small products. When this was chosen, batch 32 with 100 steps and 128 features took
# 11.5 MiB of temporaries, and 61.7 MiB in a loop that stores what each step computes.
CHUNK_BYTES = 13 << 19
# a sequence of so many steps need not be cut
SHORT = 8


class Chunks(NamedTuple):
    """How a sequence is cut into chunks.

    Attributes:
      intermediates: how many arrays of the size of the pre-activations are alive at a
        time.
      fewest: the least number of chunks of a long sequence, so that intermediates take
        less memory than the states.
      smallest: the least number of steps of a chunk, whatever their size.
      bytes: the memory that intermediates may take.
    """

    intermediates: int
    fewest: int
    smallest: int
    bytes: int = CHUNK_BYTES


# Chunks of one step add up weight gradients at every step, as plain autodiff does. For
# a layer-normalized LSTM of batch 128 and 512 features, gradients took 1331 ms then,
# and 819 ms with at least four steps.
PLAIN = Chunks(intermediates=6, fewest=6, smallest=4)


def chunk_length(chunks: Chunks, weights: Weights, x: jax.Array) -> int:
    """Return the number of steps in a chunk: as many as the memory budget allows.

    If a size is symbolic, the number is small.
    """
    if not is_static(x.shape):
        return min(x.shape[0], chunks.smallest)
    time, batch = x.shape[:2]
    packed = sum(
        weights[name].shape[-1]
        for name in ("recurrent_kernel", "candidate_kernel")
        if name in weights
    )
    most = max(
        chunks.smallest,
        chunks.bytes // max(1, batch * packed * x.dtype.itemsize * chunks.intermediates),
    )
    most = min(time, most, max(time // chunks.fewest, SHORT))
    # In units of a step: each chunk costs its k steps and one step more. A last chunk
    # that is filled up makes JAX copy all states as well, which counts as a tenth of
    # the sequence. Among equals the longest chunk is taken.
    return min(
        range(max(1, most // 2), most + 1),
        key=lambda k: (-(-time // k) * (k + 1) + bool(time % k) * time / 10, -k),
    )


def run(
    cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State, loop: Loop | None
) -> tuple[State, State]:
    """Return the state after the last step and the states after every step.

    Args:
      cell: the static arguments of a step.
      weights: the parameters as steps use them.
      x: floating ``(time, batch, features)``.
      steps: the other arrays of the steps, with time first.
      state: the state before the first step, ``(batch, features)`` for each part.
      loop: the function that computes the states. None, or a symbolic number of steps,
        takes a plain scan, and JAX derives its derivative.
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


class Form(NamedTuple):
    """The functions that run a chunk.

    Attributes:
      states: returns the states after each step, as :func:`_states` does.
      tangent: returns their tangents, as :func:`_tangent` does.
    """

    states: Callable[..., State]
    tangent: Callable[..., State]


def chunked(
    cell: Cell,
    weights: Weights,
    x: jax.Array,
    steps: Steps,
    state: State,
    chunks: Chunks = PLAIN,
    form: Form | None = None,
) -> tuple[State, State]:
    """Run the steps in plain JAX, chunk by chunk. This is a :data:`Loop`.

    Args:
      cell: the static arguments of a step.
      weights: the parameters as the form uses them, by default as steps do.
      x: floating ``(time, batch, features)``.
      steps: the other arrays of the steps.
      state: the state before the first step.
      chunks: how the sequence is cut.
      form: the functions that run a chunk; None for those of any cell.
    """
    form = form or Form(_states, _tangent)

    def chunk(state, xs):
        states = _run_chunk(form, cell, weights, *xs, state)
        return jax.tree.map(lambda h: h[-1], states), states

    length = chunk_length(chunks, weights, x)
    _, states = lax.scan(chunk, state, split_into_chunks(length, (x, steps)))
    histories = join_chunks(len(x), states)
    return jax.tree.map(lambda h: h[-1], histories), histories


def split_into_chunks(length: int, values):
    """Split arrays of steps into chunks, and fill up the last chunk with zeros."""

    def split_one(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, [(0, -len(a) % length)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(len(a) // length, length, *a.shape[1:])

    return jax.tree.map(split_one, values)


def join_chunks(time: int, chunks):
    """Join the chunks of each array, without the steps that fill up the last one."""
    # these come after all other steps, so that no other state depends on them
    return jax.tree.map(lambda h: h.reshape(h.shape[0] * h.shape[1], *h.shape[2:])[:time], chunks)


def vary_alike(values, others):
    """Let all values vary over the devices over which any value or other array varies.

    It matters in shard_map alone.
    """
    # lax.scan needs it of a carry. Weights that vary have their gradients summed over
    # devices once, after the loop, and not at every step.
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((values, others))))
    return jax.tree.map(lambda leaf: vary(leaf, axes), values)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_chunk(
    form: Form, cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State
) -> State:
    """Return the states after each step of a chunk."""
    return form.states(cell, weights, x, steps, state)


@_run_chunk.defjvp
def _run_chunk_jvp(form, cell, primals, tangents):
    """Return the states of a chunk and their tangents."""
    weights, x, steps, state = primals
    dweights, dx, _, dstate = tangents
    states = _run_chunk(form, cell, weights, x, steps, state)
    # the checkpoint stores the arguments alone; coefficients and sources are recomputed
    tangent = jax.checkpoint(
        partial(form.tangent, cell),
        policy=jax.checkpoint_policies.nothing_saveable,
        prevent_cse=False,
    )
    return states, tangent(weights, dweights, x, dx, steps, state, dstate, states)


def _states(cell: Cell, weights: Weights, x: jax.Array, steps: Steps, state: State) -> State:
    """Return the states after each step of a chunk."""
    input_term = cell.input_terms(weights, x, steps)
    return lax.scan(
        lambda s, xs: (advance(cell, weights, *xs, s),) * 2, state, (input_term, steps)
    )[1]


def _tangent(
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
    """Return the tangent of a chunk's states, derived in the module's docstring."""
    linear_step, source = linearize_steps(
        cell, weights, dweights, x, dx, steps, states_before(steps, state, states)
    )

    def step(d, xs):
        linear_step, source, steps = xs
        # As in advance: restart, projection and hold are linear in the state, so that
        # each is its own tangent.
        d = restart(steps, d)
        new = d
        for stage, linear in zip(cell.stages, linear_step, strict=True):
            new = linear(product(new[0], weights[stage.kernel]), new)
        d = hold(steps, jax.tree.map(jnp.add, projected(weights, new), source), d)
        return d, d

    # The scan is linear, so that it is its own tangent at any point, here at the
    # states. Written as a jvp, which shows scan which of its arguments are tangents:
    # JAX before 0.10 cannot transpose it otherwise.
    linear = lambda dstate, source: lax.scan(step, dstate, (linear_step, source, steps))[1]
    return jax.jvp(linear, (state, states), (dstate, source))[1]
