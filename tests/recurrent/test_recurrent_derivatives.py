"""Test derivatives of recurrent networks.

They equal the derivatives of the equations, of both orders, under every transformation.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from recurrent_cases import (
    CASES,
    FEW,
    HIDDEN,
    RESET_FIRST,
    Case,
    loss,
    sequences,
    small_chunks,
    weights_for,
)

import jaxnorm as jn

pytestmark = pytest.mark.usefixtures("several_chunks")

IMPLEMENTATIONS = ("xla", "reference")
# Of all cells, norms and placements some; each is compared with the equations, and those with the
# layers.
SOME = [Case("gru", "layer", "gate", reset_after=False), Case("rnn", None, activation="relu")]
OFTEN = [*FEW, Case("lstm", "batch"), Case("lstm", "layer", "carried_cell")]


@pytest.mark.parametrize("case", long_sweep(CASES, quick=[*OFTEN[:3:2], *SOME]), ids=str)
def test_gradients_are_differences_of_the_equations(case, rng, x64):
    x, params = sequences(rng, 4, 5, dtype=np.float64), case.params(np.float64)
    weights = weights_for(case, rng, x, params, np.float64)
    found = jax.jit(jax.grad(partial(loss, case, weights), argnums=(0, 1)))(x, params)

    def truth(x, params):
        state, outputs = case.oracle(x, params)
        return sum(np.vdot(w, value) for w, value in zip(weights, (*state, outputs), strict=True))

    leaves, tree = jax.tree.flatten(
        (np.asarray(x), {name: np.asarray(p) for name, p in params.items()})
    )
    for index, gradient in enumerate(jax.tree.leaves(found)):
        for _ in range(2):
            direction = rng.standard_normal(leaves[index].shape)
            at = [
                truth(
                    *tree.unflatten(
                        [
                            *leaves[:index],
                            leaves[index] + h * 1e-5 * direction,
                            *leaves[index + 1 :],
                        ]
                    )
                )
                for h in (1, -1, 2, -2)
            ]
            slope = (8 * (at[0] - at[1]) - (at[2] - at[3])) / 12e-5
            assert abs(np.vdot(gradient, direction) - slope) <= 1e-8 * max(1, abs(slope)), list(
                params
            )[index - 1]


@pytest.mark.parametrize("case", [Case("lstm"), Case("lstm", "batch")], ids=str)
def test_an_input_of_zeros_has_its_gradient(case, rng, x64):
    """That of the equations: only states get none through a norm of zeros, where it would be
    multiplied at every step.
    """
    x, params = sequences(rng, 4, 5, dtype=np.float64), case.params(np.float64)
    x = x.at[:, 3].set(0) if case.norm == "batch" else x.at[2, 0].set(0).at[1, 3].set(0)
    weights = weights_for(case, rng, x, params, np.float64)
    gradient = jax.jit(jax.grad(partial(loss, case, weights, epsilon=1e-2, implementation="xla")))(
        x, params
    )

    def truth(x):
        state, outputs = case.oracle(x, params, epsilon=1e-2)
        return sum(np.vdot(w, value) for w, value in zip(weights, (*state, outputs), strict=True))

    for at in ((2, 0), (1, 3)):
        direction = np.zeros(x.shape)
        direction[at] = rng.standard_normal(x.shape[-1])
        steps = [truth(np.asarray(x) + h * 1e-4 * direction) for h in (1, -1, 2, -2)]
        slope = (8 * (steps[0] - steps[1]) - (steps[2] - steps[3])) / 12e-4
        assert abs(np.vdot(gradient, direction) - slope) <= 1e-7 * abs(slope)
        assert abs(slope) > 0.1


@pytest.mark.parametrize("case", long_sweep(FEW, quick=FEW[:1]), ids=str)
def test_both_implementations_are_the_same(case, rng):
    x, params = sequences(rng, 4, 8), case.params()
    weights = weights_for(case, rng, x, params)
    found, plain = (
        jax.jit(
            jax.value_and_grad(
                partial(loss, case, weights, implementation=implementation), argnums=(0, 1)
            )
        )(x, params)
        for implementation in IMPLEMENTATIONS
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.parametrize("case", long_sweep([FEW[0], FEW[2], RESET_FIRST], quick=()), ids=str)
def test_second_order(case, rng, x64):
    """Forward over reverse and reverse over reverse are the difference of two gradients."""
    at = sequences(rng, 3, 5, dtype=np.float64), case.params(np.float64)
    weights = weights_for(case, rng, *at, np.float64)
    f = lambda at: loss(case, weights, *at)
    v = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), at)
    inner = lambda a: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, v)))
    gradient = jax.jit(jax.grad(f))
    shifted = [
        gradient(jax.tree.map(lambda leaf, d, h=h: np.asarray(leaf) + h * 1e-6 * d, at, v))
        for h in (1, -1)
    ]
    difference = jax.tree.map(lambda a, b: (np.asarray(a) - b) / 2e-6, *shifted)
    ways = [
        jax.jit(lambda at: jax.jvp(jax.grad(f), (at,), (v,))[1])(at),
        jax.jit(jax.grad(lambda at: inner(jax.grad(f)(at))))(at),
    ]
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(difference))
    for way in ways:
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-11 * largest), way, ways[0])
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6 * largest), way, difference)


@pytest.mark.parametrize("case", long_sweep(FEW[::2], quick=()), ids=str)
def test_transformations_are_a_loop(case, rng):
    """vmap over x and over parameters, jit, checkpoint and scan."""
    x, params = sequences(rng, 3, 2, 5), [case.params(seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
    weights = weights_for(case, rng, x[0], params[0])
    gradient = jax.jit(jax.grad(partial(loss, case, weights), argnums=(0, 1)))
    close = partial(jax.tree.map, partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-5))
    pile = lambda each: jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    of_x = pile([gradient(xi, params[0]) for xi in x])
    close(jax.vmap(gradient, (0, None))(x, params[0]), of_x)
    close(
        jax.vmap(gradient)(x, stacked),
        pile([gradient(xi, p) for xi, p in zip(x, params, strict=True)]),
    )
    close(jax.lax.scan(lambda carry, xi: (carry, gradient(xi, params[0])), 0, x)[1], of_x)
    remade = jax.jit(jax.grad(jax.checkpoint(partial(loss, case, weights)), argnums=(0, 1)))
    close(remade(x[0], params[0]), jax.tree.map(lambda leaf: leaf[0], of_x))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cell", long_sweep(["lstm", "gru", "rnn"], quick=["lstm"]))
def test_vmap_over_many_directions_is_a_loop(cell, norm, rng):
    # many, as of a Jacobian: XLA in jaxlib 0.10.2 then adds up wrong products of what all share
    gates, features, units, some = {"lstm": 4, "gru": 3, "rnn": 1}[cell], 6, 32, [0, 40, 239, 479]
    shapes = {"input_kernel": (features,), "recurrent_kernel": (units,), "bias": ()}
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    params = {name: 0.3 * draw(*shape, gates * units) for name, shape in shapes.items()}
    x, d, dh = draw(5, 3, features), draw(480, 5, 3, features), draw(480, 5, units)
    run = lambda x: jax.tree.leaves(getattr(jn.recurrent, cell)(x, params, norm=norm))[0]
    both = jax.jit(lambda d, dh: (jax.jvp(run, (x,), (d,))[1], *jax.vjp(run, x)[1](dh)))
    each = zip(*(both(d[i], dh[i]) for i in some), strict=True)
    for found, truth in zip(jax.jit(jax.vmap(both))(d, dh), map(np.stack, each), strict=True):
        np.testing.assert_allclose(found[np.array(some)], truth, atol=1e-5 * np.abs(truth).max())


@pytest.mark.parametrize("time", long_sweep([0, 1, 3, 5], quick=[0]))
def test_any_number_of_steps(time, rng, monkeypatch):
    """Divisible by the chunk or not, one, none: values, the last state and gradients."""
    case = Case("lstm")
    x, params = sequences(rng, 2, time), case.params()
    initial = tuple(sequences(rng, 2, 2)[i][:, :1] * jnp.ones((1, HIDDEN)) for i in range(2))
    weights = weights_for(case, rng, x, params)
    results = []
    for steps in (3, 100):
        small_chunks(monkeypatch, steps)
        jax.clear_caches()
        value = jax.jit(jax.value_and_grad(partial(loss, case, weights), argnums=(0, 1)))
        results.append(value(x, params, initial=initial))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), *results)
    if time:
        state, outputs = case.oracle(
            x, params, initial=tuple(np.asarray(part, np.float64) for part in initial)
        )
        (h, c), y = jn.recurrent.lstm(x, params, initial=initial)
        for found, truth in ((h, state[0]), (c, state[1]), (y, outputs)):
            np.testing.assert_allclose(found, truth, atol=2e-6)
