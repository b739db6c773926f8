"""Test that masked elements count as if they were absent.

This holds for values, gradients, statistics and state.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES, DISTINCT, KERNELS, KINDS, laws, long_sweep
from oracle import Part, oracle, worst

import jaxnorm as jn
from jaxnorm.core import plan

JUNK = [np.nan, np.inf, -np.inf, 1e30]
X_TO_WEIGH = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2


def masked_input(case, rng, junk, keep=0.7):
    x = rng.standard_normal(case.shape).astype(np.float32)
    mask = rng.random(case.shape) < keep
    return np.where(mask, x, np.float32(junk)), mask


def value_and_gradients(case, *arrays):
    """Compiled once for each case, implementation, and mask or weights."""
    return compiled(case, os.environ.get(plan.VARIABLE), *arrays)


@partial(jax.jit, static_argnums=(0, 1))
def compiled(case, implementation, x, where, scale, bias, cotangent):
    y, pullback = jax.vjp(lambda *a: case(a[0], scale=a[1], bias=a[2], where=where), x, scale, bias)
    return y, *pullback(cotangent)


def check_what_is_left(case, x, where, rng):
    """Values and gradients are the oracle's, and 0 in what is masked out."""
    scale, bias = case.params(rng)
    cotangent = rng.standard_normal(case.shape).astype(np.float32)
    truth = case.truth(x, where=where, scale=scale, bias=bias, cotangent=cotangent)
    y, dx, dscale, dbias = value_and_gradients(case, x, where, scale, bias, cotangent)
    split = case.split_shape
    assert worst(np.reshape(y, split), truth.y.reshape(split), case.axes) <= 4e-7
    assert worst(np.reshape(dx, split), truth.dx.reshape(split), case.axes) <= 1e-6
    assert (np.asarray(y)[~np.broadcast_to(where, y.shape)] == 0).all()
    assert (np.asarray(dx)[~np.broadcast_to(where, y.shape)] == 0).all()
    np.testing.assert_allclose(dscale, truth.dscale, atol=1e-6 * truth.dscale_size.max())
    np.testing.assert_allclose(dbias, truth.dbias, atol=1e-6 * truth.dbias_size.max())


@pytest.mark.parametrize("junk", JUNK, ids=str)
@laws(CASES)
def test_values_and_gradients_equal_those_of_the_compacted_data(case, implementation, junk, rng):
    x, mask = masked_input(case, rng, junk)
    check_what_is_left(case, x, mask, rng)


@pytest.mark.parametrize("weighted", [False, True], ids=["mask", "weights"])
@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {}), ("float32", {"full_range": True})]
)
def test_what_is_hidden_does_not_scale_the_others(dtype, options, weighted, rng):
    """1e38 under a mask: a group is divided by a power of two next to the largest of the elements
    that count.
    """
    x = jnp.asarray(rng.integers(-8, 8, (6, 32)), dtype)
    where = rng.uniform(size=x.shape) < 0.7
    given = jnp.asarray(where, jnp.float32) if weighted else where
    for junk in (1e38, -1e38):
        y = jn.standardize(
            jnp.where(where, x, jnp.asarray(junk, dtype)), "n [c]", where=given, **options
        )
        np.testing.assert_array_equal(y, jn.standardize(x, "n [c]", where=given, **options))
    truth = oracle(np.asarray(x).astype(np.float64), (Part((1,)),), epsilon=1e-5, where=where).y
    assert worst(y, truth, 1) <= {"bfloat16": 2.0**-8, "float32": 4e-7}[dtype]


def test_rounding_makes_no_variance_negative(rng):
    """Weighted constants, the mean of whose squares may come out below the square of their mean."""
    x = np.repeat(10 ** rng.uniform(-3, 7, (2000, 1)), 28, 1).astype(np.float32)
    weights = rng.uniform(size=x.shape).astype(np.float32)
    assert (np.asarray(jn.moments(x, 1, where=weights).var) >= 0).all()
    y, pullback = jax.vjp(lambda x: jn.standardize(x, 1, where=weights, epsilon=0.0), x)
    assert np.isfinite(y).all()
    assert np.isfinite(pullback(jnp.ones_like(y))[0]).all()


@laws(CASES, quick=KINDS[:3])
def test_float_weights_equal_repeated_elements(case, implementation, rng):
    x = rng.standard_normal(case.shape).astype(np.float32)
    weights = rng.integers(0, 4, case.shape).astype(np.float32)
    cotangent = rng.standard_normal(case.shape).astype(np.float32)
    truth = case.truth(x, where=weights, cotangent=cotangent)
    y, dx, *_ = value_and_gradients(case, x, weights, None, None, cotangent)
    split = case.split_shape
    assert worst(np.reshape(y, split), truth.y.reshape(split), case.axes) <= 4e-7
    assert worst(np.reshape(dx, split), truth.dx.reshape(split), case.axes) <= 1e-6


@pytest.mark.parametrize("junk", [0.0, np.nan, np.inf], ids=str)
@laws(CASES)
def test_a_fully_masked_input_is_finite_everywhere(case, implementation, junk, rng):
    x = np.full(case.shape, junk, np.float32)
    scale, bias = case.params(rng)
    found = value_and_gradients(
        case, x, np.zeros(case.shape, bool), scale, bias, np.ones(case.shape, np.float32)
    )
    for array in found:
        assert (np.asarray(array) == 0).all()


@laws(DISTINCT, quick=KINDS[:3])
def test_a_fully_masked_example_leaves_the_others_alone(case, implementation, rng):
    x = rng.standard_normal(case.shape).astype(np.float32)
    x[1] = np.nan
    where = (np.arange(case.shape[0]) != 1).reshape(-1, *(1,) * (len(case.shape) - 1))
    y, dx = map(
        np.asarray,
        value_and_gradients(case, x, where, None, None, np.ones(case.shape, np.float32))[:2],
    )
    truth = case.truth(x, where=where).y
    np.testing.assert_allclose(y, truth, atol=2e-6)
    assert np.isfinite(dx).all()
    assert (dx[1] == 0).all()


@pytest.mark.parametrize("hidden", ["groups", "positions"])
@laws(KERNELS, native=KERNELS, quick=KINDS[:3])
def test_groups_and_positions_that_are_hidden_as_wholes_leave_the_others_alone(
    case, implementation, hidden, rng
):
    """By a mask that is one for all elements of a group, such as that of padding tokens, or for all
    channels: kernels take it too.
    """
    of_groups = case.axes if case.split is None else range(1, len(case.shape))
    along = of_groups if hidden == "groups" else (len(case.shape) - 1,)
    where = rng.random([1 if axis in along else size for axis, size in enumerate(case.shape)]) < 0.6
    where.flat[:2] = False, True
    x = np.where(where, rng.standard_normal(case.shape).astype(np.float32), np.float32(np.nan))
    check_what_is_left(case, x, where, rng)


@pytest.mark.parametrize(
    "statistic",
    [
        lambda m: m.count,
        lambda m: m.mean,
        lambda m: m.var,
        lambda m: jn.normalize(X_TO_WEIGH, m, correction=1),
    ],
)
def test_weights_are_constants_under_differentiation(statistic, rng):
    weights = jnp.asarray(rng.random((4, 3)), jnp.float32)
    gradient = jax.grad(lambda w: jnp.sum(statistic(jn.moments(X_TO_WEIGH, 0, where=w)) ** 2))(
        weights
    )
    np.testing.assert_array_equal(gradient, np.zeros((4, 3)))


def test_a_mask_may_hide_all_that_a_device_has(rng):
    """Groups that it hides as wholes there are those of the other devices, whose mean is not 0."""
    x, where = rng.normal(5, 1, (2, 4, 3)).astype(np.float32), np.array([[[True]], [[False]]])
    of_all = jax.vmap(
        lambda x, where: jn.batch_norm(x, where=where, axis_name="devices")[0], axis_name="devices"
    )
    y, pullback = jax.vjp(lambda x: of_all(x, where), x)
    alone, of_alone = jax.vjp(lambda x: jn.batch_norm(x)[0], x[0])
    np.testing.assert_allclose(y, [alone, 0 * alone], atol=1e-6)
    np.testing.assert_allclose(pullback(y**2)[0], [of_alone(alone**2)[0], 0 * alone], atol=1e-6)


@pytest.mark.parametrize("given", [bool, jnp.float32])
def test_beside_what_is_not_finite_a_mask_has_gradient_0(given, rng):
    x = jnp.asarray(rng.standard_normal((2, 5, 3)), jnp.float32).at[0, 1].set(jnp.nan)
    where = jnp.asarray(rng.random(x.shape) < 0.6).at[0, 1].set(True)
    for norm in (
        jn.layer_norm,
        jn.instance_norm,
        lambda x, where: jn.batch_norm(x, where=where)[0],
        lambda x, where: jn.moments(x, -1, where=where).var,
    ):
        dx = jax.grad(lambda x, norm=norm: (norm(x, where=where.astype(given)) * 0.3).sum())(x)
        assert (np.asarray(dx)[~np.asarray(where)] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", [(8, 64, 1), (8, 64, 128)], ids=["tokens", "elements"])
@pytest.mark.parametrize("name", ["layer", "batch_conv", "graph", "switchable"])
def test_x_and_the_mask_are_residuals_once(name, mask, dtype):
    norm = BY_NAME[name].call
    x, where = jnp.ones((8, 64, 128), dtype), jnp.ones(mask, bool)
    residuals = jax.tree.leaves(jax.vjp(lambda x: norm(x, where=where), x)[1])
    stored = sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in residuals}.values())
    assert stored <= 1.2 * x.nbytes + where.nbytes


@pytest.mark.parametrize("given", [bool, jnp.float32])
@pytest.mark.parametrize("jit", [True, False])
def test_a_mean_beyond_the_range_of_squares_goes_with_a_mask(jit, given):
    x = jnp.linspace(3e19, 3.1e19, 12, dtype=jnp.float32).reshape(1, 12, 1) * jnp.ones((1, 1, 2))
    where = (jnp.arange(12) < 8)[None, :, None].astype(given)
    with jax.disable_jit(not jit):
        y, found = jn.batch_norm(x, where=where)
        whole, truth = jn.batch_norm(x[:, :8])
    np.testing.assert_allclose(y[:, :8], whole, atol=1e-6)
    np.testing.assert_allclose(found.var, truth.var, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "native"], indirect=True)
def test_groups_that_are_hidden_as_wholes_are_empty(implementation, rng):
    x = jnp.asarray(rng.standard_normal((4, 5, 6)), jnp.float32)
    where = jnp.asarray(rng.random((4, 5, 1)) < 0.6)
    assert jn.plan(x, "n t [c]", where=where).implementation == implementation
    _, found = jn.positional_norm(jnp.where(where, x, jnp.nan), where=where)
    truth = jn.moments(x, "n t [c]", where=where)
    np.testing.assert_array_equal(found.count, 6.0 * np.asarray(where))
    np.testing.assert_allclose(found.mean, truth.mean, atol=1e-7)
    np.testing.assert_allclose(found.var, truth.var, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "switchable"], ids=str)
def test_a_set_that_is_not_finite_keeps_that_to_itself(case, bad, rng):
    x = rng.standard_normal(case.shape).astype(np.float32)
    clean = x.copy()
    x.flat[0] = bad
    of = lambda x: map(np.asarray, value_and_gradients(case, x, None, None, None, cotangent)[:2])
    cotangent = rng.standard_normal(case.shape).astype(np.float32)
    (y, dx), (whole, _) = of(x), of(clean)
    touched = np.zeros(case.shape, bool)
    touched.flat[0] = True
    split = touched.reshape(case.split_shape)
    touched = np.broadcast_to(split.any(case.axes, keepdims=True), case.split_shape).reshape(
        case.shape
    )
    np.testing.assert_array_equal(y[~touched], whole[~touched])
    assert np.isfinite(dx[~touched]).all()
    assert not np.isfinite(y[touched]).all()


@pytest.mark.parametrize("where", ["weights", "traced"])
def test_float_weights_under_control_flow_and_rematerialization(where, rng):
    x, weights = (
        jnp.asarray(rng.standard_normal((4, 3)), jnp.float32),
        jnp.asarray(rng.random((4, 1)), jnp.float32),
    )

    def twice(x, w):
        w = w if where == "traced" else weights
        return jax.lax.fori_loop(0, 2, lambda _, x: jn.standardize(x, 0, where=w), x)

    def norm(x, w):
        return jn.standardize(x, 0, where=w if where == "traced" else weights)

    truth = jn.standardize(jn.standardize(x, 0, where=weights), 0, where=weights)
    np.testing.assert_allclose(jax.jit(twice)(x, weights), truth, atol=1e-6)
    gradient = jax.grad(lambda x, w: jnp.sin(jax.checkpoint(norm)(x, w)).sum())
    np.testing.assert_allclose(
        jax.jit(gradient)(x, weights),
        jax.grad(lambda x: jnp.sin(norm(x, weights)).sum())(x),
        atol=1e-6,
    )


def test_a_mask_may_have_any_shape_that_broadcasts(rng):
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    masks = [
        np.asarray(rng.random(shape) < 0.6)
        for shape in [(3, 4, 5), (3, 4, 1), (4, 1), (5,), (1, 1, 1), ()]
    ]
    run = lambda mask: (jn.standardize(x, (1, 2), where=mask), jn.moments(x, "[n] h c", where=mask))
    truth = jax.jit(run)
    for mask, (y, found) in zip(
        masks, jax.jit(lambda masks: list(map(run, masks)))(masks), strict=True
    ):
        full = np.broadcast_to(mask, x.shape)
        whole_y, whole = truth(full)
        np.testing.assert_allclose(y, whole_y, atol=1e-6)
        np.testing.assert_allclose(found.mean, whole.mean, atol=1e-7)
        np.testing.assert_array_equal(found.count, full.sum(0, keepdims=True))


@laws(DISTINCT, quick=KINDS[:1])
def test_debug_nans_and_infs_raise_nowhere(case, implementation, rng):
    # made outside: to make a NaN is an error within
    x, mask = map(jnp.asarray, masked_input(case, rng, np.nan))
    constant, nothing = jnp.full(case.shape, 3.3), jnp.zeros(case.shape, bool)
    gradient = jax.grad(
        lambda x, where, epsilon: (case(x, where=where, epsilon=epsilon) ** 2).sum()
    )
    with jax.debug_nans(True), jax.debug_infs(True):
        for epsilon in (case.epsilon, 0.0):
            jax.block_until_ready(gradient(x, mask, epsilon))
            jax.block_until_ready(gradient(x, nothing, epsilon))
            jax.block_until_ready(gradient(constant, mask, epsilon))


@laws(KERNELS, native=KERNELS, quick=KINDS[:3])
def test_debug_nans_and_infs_raise_nowhere_beside_hidden_positions(case, implementation, rng):
    """Which kernels leave in x as they are."""
    where = jnp.asarray(np.arange(case.shape[0]) % 3 != 1).reshape(
        -1, *(1,) * (len(case.shape) - 1)
    )
    x = jnp.where(where, rng.standard_normal(case.shape).astype(np.float32), jnp.nan)
    gradient = jax.grad(lambda x: (case(x, where=where) ** 2).sum())
    # plain JAX, which also takes the mask of a unit norm, reshapes x, a step of its own
    by_kernel = implementation == "native" and case.name != "unit"
    for without_jit in (False, True)[: 2 if by_kernel else 1]:
        with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit(without_jit):
            jax.block_until_ready(gradient(x))


@pytest.mark.parametrize("epsilon_in", ["var", "std", "max"])
def test_no_step_of_a_constant_is_infinite_without_jit(epsilon_in):
    x, constant = (
        jnp.full((3, 5), 3.3),
        jn.Moments(jnp.full((1, 5), 3.0), jnp.full((1, 5), 3.3), jnp.zeros((1, 5))),
    )
    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit():
        y, back = jax.vjp(
            partial(jn.normalize, moments=constant, epsilon=0.0, epsilon_in=epsilon_in), x
        )
        np.testing.assert_array_equal([y, *back(jnp.ones_like(y))], jnp.zeros((2, 3, 5)))


WITHOUT_JIT = {
    "plain": partial(jn.standardize, axes=1, implementation="xla"),
    "masked": lambda x: jn.layer_norm(x, where=x > 0),
    "segments": lambda x: jn.layer_norm(
        x, axes=(0, 1), segments=jnp.array([0, 1, 1, 0]), num_segments=2
    ),
    "switchable": lambda x: jn.switchable_norm(x, jnp.zeros(3), jnp.zeros(3))[0],
}


@pytest.mark.parametrize("name", long_sweep(WITHOUT_JIT, quick=["masked"]))
def test_without_jit_all_is_as_with_it(name, rng):
    norm = WITHOUT_JIT[name]
    x = jnp.asarray(rng.standard_normal((4, 3, 6)), jnp.float32)
    loss = lambda x: jnp.sin(norm(x)).sum()
    truth, gradient = jax.jit(norm)(x), jax.jit(jax.grad(loss))(x)
    with jax.disable_jit():
        np.testing.assert_allclose(norm(x), truth, atol=2e-6)
        np.testing.assert_allclose(jax.grad(loss)(x), gradient, atol=2e-6)
