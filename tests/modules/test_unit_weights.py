"""Test the transformation of optax that keeps weights at length 1."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxnorm as jn
from jaxnorm.training import unit_weights

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
SHAPES = {"query": (6, 2, 3), "up": (6, 8), "out": (2, 3, 6), "alpha": (6,)}
READ, WRITE = ("query", "up"), ("out",)
KEEP = (unit_weights(axes=0, match=READ), unit_weights(axes=-1, match=WRITE))


def drawn(rng, dtype="float32", size=1.0):
    return {
        name: jnp.asarray(rng.standard_normal(shape) * size, dtype)
        for name, shape in SHAPES.items()
    }


def by_hand(params):
    params = jn.map_kernels(partial(jn.unit_norm, axes=0), params, match=READ)
    return jn.map_kernels(partial(jn.unit_norm, axes=-1), params, match=WRITE)


def lengths(params):
    axes = {"query": 0, "up": 0, "out": -1}
    return np.concatenate(
        [
            np.linalg.norm(np.asarray(params[name], "f8"), axis=axis).ravel()
            for name, axis in axes.items()
        ]
    )


def trained(optimizer, params, gradients, project=lambda params: params):
    """The parameters after each gradient."""

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        params = project(optax.apply_updates(params, updates))
        return (params, state), params

    return jax.jit(lambda p, g: jax.lax.scan(step, (p, optimizer.init(p)), g)[1])(params, gradients)


def several(rng, steps, dtype="float32"):
    every = [drawn(rng, dtype) for _ in range(steps)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)


def last_place(*arrays):
    """The distance of floats near the greatest of some arrays, element by element."""
    greatest = np.max([np.abs(np.asarray(array, "f4")) for array in arrays], axis=0)
    return np.spacing(greatest).astype("f8")


def test_steps_are_those_of_projecting_by_hand(rng):
    """One step from the same parameters: equal but for elements that change much."""
    params, gradient = by_hand(drawn(rng)), drawn(rng)
    optimizer = optax.chain(optax.sgd(1e-3), *KEEP)
    moved = optax.apply_updates(params, jax.tree.map(lambda g: -1e-3 * g, gradient))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    found, truth = optax.apply_updates(params, updates), by_hand(moved)
    np.testing.assert_array_equal(found["alpha"], moved["alpha"])
    for name in (*READ, *WRITE):
        old, new, goal = (np.asarray(each[name]) for each in (params, found, truth))
        near = (goal / old > 0.5) & (goal / old < 2)
        assert near.mean() > 0.9
        np.testing.assert_array_equal(new[near], goal[near])
        assert (abs(new.astype("f8") - goal) <= last_place(old, goal)).all()


@pytest.mark.parametrize("learning_rate", [1e-3, 1.0])
def test_training_is_that_of_projecting_by_hand(learning_rate, rng):
    params, gradients = by_hand(drawn(rng)), several(rng, 20)
    optimizer = optax.adam(learning_rate)
    found = trained(optax.chain(optimizer, *KEEP), params, gradients)
    truth = trained(optimizer, params, gradients, by_hand)
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, truth[name], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lengths(jax.tree.map(lambda a: a[-1], found)), 1, rtol=3e-7)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_any_weights_end_at_length_one(size, rng):
    """The second step undoes the rounding of the first, as coarse as the weights before it."""
    params, gradients = drawn(rng, size=size), several(rng, 2)
    found = trained(optax.chain(optax.sgd(1e-3), *KEEP), params, gradients)
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(2))
    np.testing.assert_allclose(lengths(first), 1, atol=max(1e-6, 3e-7 * size))
    np.testing.assert_allclose(lengths(second), 1, atol=5e-7)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_half_precision_is_as_good_as_its_rounding(dtype, bits, rng):
    params, gradients = by_hand(drawn(rng, dtype)), several(rng, 10, dtype)
    optimizer = optax.chain(optax.adam(0.01), *KEEP)
    found = jax.tree.map(lambda leaf: leaf[-1], trained(optimizer, params, gradients))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    np.testing.assert_allclose(
        lengths(jax.tree.map(lambda a: a.astype("f4"), found)), 1, atol=2.0**-bits
    )


def test_strict_promotion(rng):
    """Updates have the dtype of the weights, so that no sum mixes dtypes."""
    params = by_hand(drawn(rng, "bfloat16"))
    with jax.numpy_dtype_promotion("strict"):
        for transformation in KEEP:
            updates, _ = transformation.update(params, transformation.init(params), params)
            assert jax.tree.map(lambda p, u: (p + u).dtype == p.dtype, params, updates)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multi_steps(dtype, rng):
    """Between two steps nothing moves, and each step is that of the mean gradient."""
    params, gradients = by_hand(drawn(rng, dtype)), several(rng, 4, dtype)
    inner = optax.chain(optax.sgd(0.25), *KEEP)
    found = trained(optax.MultiSteps(inner, 2), params, gradients)
    halves = jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]).mean(1), gradients)
    truth = trained(inner, params, halves)
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-6 if dtype == "float32" else 0.02)
    for name, leaf in found.items():
        leaf, start = leaf.astype("f4"), params[name].astype("f4")
        np.testing.assert_array_equal(leaf[0], start)
        np.testing.assert_array_equal(leaf[2], leaf[1])
        close(leaf[1::2], truth[name].astype("f4"))


def test_one_group_of_several(rng):
    params, gradient = by_hand(drawn(rng)), drawn(rng)
    groups = {
        "read": optax.chain(optax.sgd(0.1), unit_weights(axes=0, match=READ)),
        "rest": optax.sgd(0.1),
    }
    optimizer = optax.multi_transform(
        groups, {name: "read" if name in READ else "rest" for name in SHAPES}
    )
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    moved = optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, gradient))
    found = optax.apply_updates(params, updates)
    for name in SHAPES:
        truth = by_hand(moved)[name] if name in READ else moved[name]
        np.testing.assert_allclose(found[name], truth, atol=5e-7)


def test_boxes_and_states(rng):
    kernel = jnp.asarray(rng.standard_normal((3, 2)), "float32")
    boxed = {"up": {"kernel": nn.Partitioned(kernel, names=(None, "model"))}}
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    for params in (boxed, state):
        keep = unit_weights(axes=0)
        updates, _ = keep.update(params, keep.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        new = optax.apply_updates(params, updates)
        (found,) = jn.kernels_by_path(new).values()
        np.testing.assert_allclose(np.linalg.norm(found, axis=0), 1, rtol=1e-6)


def test_zeros_stay_zeros_and_nan_stays_nan():
    params = {"kernel": jnp.array([[0.0, 1.0], [0.0, 0.0]])}
    keep = unit_weights(axes=0)
    none = {"kernel": jnp.zeros((2, 2))}
    found = keep.update(none, keep.init(params), params)[0]["kernel"]
    np.testing.assert_allclose(found, 0, atol=1e-7)
    np.testing.assert_array_equal(found[:, 0], 0)
    bad = {"kernel": jnp.array([[jnp.nan, 0.0], [0.0, 0.0]])}
    found = keep.update(bad, keep.init(params), params)[0]["kernel"]
    assert np.isnan(found[:, 0]).all()
    np.testing.assert_allclose(found[:, 1], 0, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda p: unit_weights(axes=0, match="w").init(p),
            ValueError,
            "got 'w' for fc/bias, fc/kernel",
        ),
        (
            lambda p: unit_weights(axes=2).init(p),
            ValueError,
            r"got \(2,\) for shape \(3, 2\) at fc/kernel",
        ),
        (
            lambda p: unit_weights(axes=0).update(p, optax.EmptyState()),
            ValueError,
            "must know the parameters: got None",
        ),
        (lambda p: unit_weights(axis=0), TypeError, "axes"),
        (lambda p: unit_weights(axes=1.5), TypeError, "axes must be an int or ints: got 1.5"),
    ],
)
def test_errors(call, error, said):
    with pytest.raises(error, match=said):
        call({"fc": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}})
