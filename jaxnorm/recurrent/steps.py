"""Take steps of any cell, and linearize them, in plain JAX.

:func:`advance` is a step as scan.py's loop takes it. :func:`linearize_steps` returns the
``linear_step`` and the ``source`` of many steps, as scan.py defines them.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp

from jaxnorm.recurrent.cell import Cell, State, Steps, Weights, product


def advance(
    cell: Cell, weights: Weights, input_term: jax.Array, steps: Steps, state: State
) -> State:
    """Take one step, with reset, projection, zoneout and mask."""
    state = restart(steps, state)
    new = state
    for stage in cell.stages:
        a = product(new[0], weights[stage.kernel])
        new = stage.run(weights, a, input_term, new, steps)
    return hold(steps, projected(weights, new), state)


def restart(steps: Steps, state):
    """Return zeros where a step starts anew, and the state elsewhere."""
    reset = steps.reset
    return state if reset is None else jax.tree.map(lambda s: jnp.where(reset, 0, s), state)


def projected(weights: Weights, new: State) -> State:
    """Project h if the cell has a projection."""
    return (product(new[0], weights["projection"]), *new[1:]) if "projection" in weights else new


def hold(steps: Steps, new: State, old: State) -> State:
    """Keep old values by zoneout and for masked steps."""
    # linear in both states, so that the loop over tangents calls it as it is
    if steps.keep is not None:
        new = tuple(_blend(keep, o, n) for keep, o, n in zip(steps.keep, old, new, strict=True))
    if steps.mask is not None:
        new = tuple(jnp.where(steps.mask, n, o) for n, o in zip(new, old, strict=True))
    return new


def _blend(keep: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Choose the old or new values by a boolean ``keep``, or mix them by a rate."""
    return jnp.where(keep, old, new) if keep.dtype == jnp.bool_ else new + keep * (old - new)


def with_zero_input(steps: Steps, x: jax.Array) -> Steps:
    """Say of each step whether its inputs are all 0."""
    return steps._replace(zero_input=is_zero(x))


def is_zero(x: jax.Array) -> jax.Array:
    """Return whether all features are 0, with an axis of size one for them."""
    return jnp.all(x == 0, -1, keepdims=True)


def states_before(steps: Steps, start: State, histories: State) -> State:
    """Return the state before each step, zeros where the step starts anew."""
    return restart(
        steps, jax.tree.map(lambda s, h: jnp.concatenate([s[None], h[:-1]]), start, histories)
    )


def linearize_steps(
    cell: Cell, weights: Weights, dweights: Weights, x, dx, steps: Steps, states: State
):
    """Linearize all steps of a chunk, given the states before them.

    Returns:
      ``(linear_step, source)`` of scan.py's docstring, stacked over time.
      ``linear_step`` has a function for each stage of the cell, which is a pytree of
      its coefficients.
    """
    steps = with_zero_input(steps, x)
    first, *further = cell.stages
    # d(h W) = dh W + h dW: the loop adds the first term, and source has the second
    a, da = jax.jvp(
        lambda weight: product(states[0], weight),
        (weights[first.kernel],),
        (dweights[first.kernel],),
    )
    input_term, dinput_term = jax.jvp(
        partial(cell.input_terms, steps=steps), (weights, x), (dweights, dx)
    )

    def first_of_weights(weights, a, input_term):
        return projected(weights, first.run(weights, a, input_term, states, steps))

    def linear(stage, a, input_term, states, steps):
        return jax.linearize(
            lambda a, state: stage.run(weights, a, input_term, state, steps), a, states
        )[1]

    states_between, source = jax.jvp(
        first_of_weights, (weights, a, input_term), (dweights, da, dinput_term)
    )
    linear_step = [jax.vmap(partial(linear, first))(a, input_term, states, steps)]
    # what the first stage adds runs through the others, which add their own
    for stage in further:

        def of_weights(weights, input_term, states, stage=stage):
            a = product(states[0], weights[stage.kernel])
            return stage.run(weights, a, input_term, states, steps), a

        states = states_between
        states_between, source, a = jax.jvp(
            of_weights, (weights, input_term, states), (dweights, dinput_term, source), has_aux=True
        )
        linear_step.append(jax.vmap(partial(linear, stage))(a, input_term, states, steps))
    return tuple(linear_step), source


def recurrent_products(
    cell: Cell, weights: Weights, x: jax.Array, steps: Steps, states: State
) -> jax.Array:
    """Return the products of the state, packed, of all steps, given the states before them."""
    products = [product(states[0], weights[cell.stages[0].kernel])]
    for before, stage in pairwise(cell.stages):
        input_term = cell.input_terms(weights, x, steps)
        states = before.run(weights, products[-1], input_term, states, steps)
        products.append(product(states[0], weights[stage.kernel]))
    return jnp.concatenate(products, -1) if len(products) > 1 else products[0]
