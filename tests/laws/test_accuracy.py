"""Compare every norm with the float64 oracle on hard inputs.

Both get the same rounded input. Output and gradients are compared.
"""

import os
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES, DISTINCT, KERNELS, KINDS, laws, long_sweep
from hard import B32, HALF, HARD, check, normal, outlier, runs
from oracle import worst

import jaxnorm as jn
from jaxnorm.core import plan

pytestmark = pytest.mark.usefixtures("usual_compile")

# each with an epsilon, and so programs, of its own
OF_UNITS = [hard for hard in HARD if hard.unit != 1]


@pytest.mark.parametrize("hard", [hard for hard in HARD if hard.unit == 1], ids=str)
@laws(DISTINCT, native=KERNELS, quick=KINDS[:3])
def test_hard_inputs(case, implementation, hard, rng):
    check(case, hard, rng)


@pytest.mark.parametrize("way", long_sweep([0, 1], quick=[1]), ids=["called", "compiled"])
@pytest.mark.parametrize("hard", [hard for hard in HARD if hard.unit == 1], ids=str)
@laws(DISTINCT, quick=KINDS[:2])
def test_hard_inputs_beside_a_mask_that_hides_nothing(case, implementation, hard, way, rng):
    check(case, hard, rng, np.ones(case.shape, bool), ways=slice(way, way + 1))


@pytest.mark.parametrize("hard", long_sweep(OF_UNITS, quick=OF_UNITS[-1:]), ids=str)
@laws(DISTINCT, native=KERNELS, quick=KINDS[:1])
def test_hard_inputs_of_other_units(case, implementation, hard, rng):
    """Without a mask, and plain JAX compiled alone: in every way it takes long."""
    check(case, hard, rng, ways=slice(0 if implementation == "native" else 1, None))


@pytest.mark.slow
@pytest.mark.parametrize("hard", OF_UNITS, ids=str)
@laws(DISTINCT)
def test_hard_inputs_of_other_units_in_every_way(case, implementation, hard, rng, quick_compile):
    check(case, hard, rng, ways=slice(0, 1))
    check(case, hard, rng, np.ones(case.shape, bool))


@pytest.mark.parametrize("hard", long_sweep(HARD, quick=HARD[::10]), ids=str)
@pytest.mark.parametrize("name", long_sweep(["layer", "rms"], quick=["layer"]))
def test_hard_inputs_of_so_many_rows_that_a_cpu_takes_them_in_one_loop(name, hard, rng):
    check(replace(BY_NAME[name], shape=(4096, 256), param=(256,), param_split=(1, 256)), hard, rng)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("axes", [0, 1])
def test_an_outlier_among_65536(axes, place, rng):
    rows = outlier(1e6, place)(rng, 3, 65536).astype(np.float32)
    y = np.asarray(jn.standardize(rows.T if axes == 0 else rows, axes))
    truth = (rows - rows.mean(1, keepdims=True, dtype=np.float64)) / np.sqrt(
        rows.astype(np.float64).var(1, keepdims=True) + 1e-5
    )
    assert worst(y.T if axes == 0 else y, truth, 1) <= B32[0]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e18, 1e20, 1e30, 3.4e38])
@laws(DISTINCT, native=KERNELS, quick=KINDS[:2])
def test_full_range_is_right_beyond_the_range_of_squares(case, implementation, size, rng):
    x = case.arrange(rng.uniform(-1, 1, case.groups) * size).astype(np.float32)
    y, truth = case(x, full_range=True), case.truth(x).y
    assert (
        worst(np.reshape(y, case.split_shape), truth.reshape(case.split_shape), case.group_axes)
        <= B32[0]
    )


@pytest.mark.parametrize("case", long_sweep(DISTINCT, quick=KINDS[:2]), ids=str)
def test_subnormal_numbers_give_finite_results(case, rng):
    x = case.arrange(1e-40 * rng.standard_normal(case.groups)).astype(np.float32)
    y, dx, *_ = runs(case, os.environ.get(plan.VARIABLE), epsilon=1e-85)[1](
        x, None, None, np.ones(case.shape, np.float32), None
    )
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("full_range", long_sweep([False, True], quick=[False]))
def test_gradients_of_a_set_without_spread_down_to_the_smallest_epsilon(full_range):
    """The factor 1 / sqrt(epsilon), bounded by that of 1.2e-38 times the square of the elements,
    give or take a power of two.
    """

    usual, tiny = (1e-5, 1e-20, 1e-30, 1e-36), (1e-40, 1e-80)

    @jax.jit
    def factors(x):
        norms = [
            partial(jn.standardize, axes=0, epsilon=epsilon, full_range=full_range)
            for epsilon in (*usual, *tiny, 0.0)
        ]
        return [jax.grad(lambda x, norm=norm: norm(x)[0])(x)[0] * 64 / 63 for norm in norms]

    for value in (0.0, 3.3, 1e-10):
        *found, smaller, smallest, none = map(float, factors(np.full(64, value, np.float32)))
        for factor, epsilon in zip(found, usual, strict=True):
            np.testing.assert_allclose(factor, epsilon**-0.5, rtol=1e-6)
        assert none == 0
        least = 1.2e-38 * max(1, value**2)
        for factor in (smaller, smallest):
            assert value == 1e-10 or 0.25 * least**-0.5 <= factor <= 1.01 * least**-0.5


@pytest.mark.parametrize(
    ("dtype", "name", "make"), HALF, ids=[f"{dtype}-{name}" for dtype, name, _ in HALF]
)
@pytest.mark.parametrize("case", long_sweep(DISTINCT, quick=KINDS[:2]), ids=str)
def test_half_precision_is_rounded_once(case, dtype, name, make, rng):
    """At most 0.51 units in the last place of the output away from the truth."""
    x = jnp.asarray(make(rng, case.shape), dtype)
    y = case(x)
    assert y.dtype == x.dtype
    truth = case.truth(np.asarray(x).astype(np.float64)).y
    spacing = 2.0 ** np.floor(
        np.log2(np.maximum(np.abs(truth), float(jnp.finfo(dtype).tiny)))
    ) * float(jnp.finfo(dtype).eps)
    big = np.abs(truth) > 1e-3  # near zero an absolute error of 1e-7 is many of its units
    assert (np.abs(np.asarray(y).astype(np.float64) - truth) / spacing)[big].max() <= 0.51


GRADIENTS = [(case, half) for case in DISTINCT for half in HALF[:3]]
FEWER = [(case, half) for case, half in GRADIENTS if half[0] == "bfloat16" and case in KINDS[:2]]


@pytest.mark.parametrize(
    "masked", long_sweep([False, True], quick=[False]), ids=["plain", "masked"]
)
@pytest.mark.parametrize(
    ("case", "half"),
    long_sweep(GRADIENTS, quick=FEWER),
    ids=lambda value: str(value) if value in DISTINCT else "-".join(value[:2]),
)
def test_gradients_of_half_precision_are_rounded_once(case, half, masked, rng):
    """Half a unit in the last place, beside the error of float32."""
    dtype, _, make = half
    x, cotangent = (
        jnp.asarray(make(rng, case.shape), dtype),
        jnp.asarray(rng.standard_normal(case.shape), dtype),
    )
    where = rng.uniform(size=case.shape) < 0.7 if masked else None
    scale, bias = case.params(rng)
    y, found, *_ = runs(case, os.environ.get(plan.VARIABLE))[1](x, scale, bias, cotangent, where)
    wide, wide_cotangent = (np.asarray(a).astype(np.float64) for a in (x, cotangent))
    assert y.dtype == found.dtype == x.dtype
    truth = np.asarray(
        case.truth(wide, scale=scale, bias=bias, where=where, cotangent=wide_cotangent).dx,
        np.float64,
    )
    spacing = 2.0 ** np.floor(
        np.log2(np.maximum(np.abs(truth), float(jnp.finfo(dtype).tiny)))
    ) * float(jnp.finfo(dtype).eps)
    assert (np.abs(np.asarray(found).astype(np.float64) - truth) - spacing / 2).max() <= B32[
        1
    ] * np.abs(truth).max()


@pytest.mark.parametrize("mean", [0, 1e4, 1e8])
@pytest.mark.parametrize("case", long_sweep(DISTINCT, quick=KINDS[:3]), ids=str)
def test_float64(case, mean, rng, x64):
    x = case.arrange(normal(mean)(rng, *case.groups))
    cotangent = rng.standard_normal(case.shape)
    y, dx, *_ = runs(case, os.environ.get(plan.VARIABLE))[1](x, None, None, cotangent, None)
    assert y.dtype == dx.dtype == jnp.float64
    truth = case.truth(x, cotangent=cotangent)
    split = case.split_shape
    assert worst(np.reshape(y, split), truth.y.reshape(split), case.group_axes) <= 1e-15
    assert worst(np.reshape(dx, split), truth.dx.reshape(split), case.group_axes) <= 2e-15


SIZES = [*product([30, 64, 77, 105, 1000], [False, True])]  # 1 / 105 times 105 is not 1


@pytest.mark.parametrize(("n", "masked"), long_sweep(SIZES, quick=[(105, True)]))
@pytest.mark.parametrize("value", [0, 0.1, 3.3, 1e6 + 0.3])
@pytest.mark.parametrize("axis", long_sweep([0, 1], quick=[1]))
def test_a_constant_set_gives_the_bias(value, n, masked, axis):
    shape = (n, 3) if axis == 0 else (3, n)
    x, bias = np.full(shape, value, np.float32), np.float32(0.7)
    where = np.ones(shape, bool) if masked else None
    for y, dx in of_two_epsilons(x, where, axis):
        assert (np.asarray(y) == bias).all()
        assert np.isfinite(dx).all()


@partial(jax.jit, static_argnums=2)
def of_two_epsilons(x, where, axis):
    """Output and gradient, whose cotangent is x + 1, with a bias of 0.7; compiled once for each
    shape.
    """
    of = lambda epsilon: jax.vjp(
        lambda x: jn.standardize(x, axis, bias=jnp.full((1, 1), 0.7), where=where, epsilon=epsilon),
        x,
    )
    return [(y, pullback(x + 1)[0]) for y, pullback in map(of, (1e-5, 0.0))]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_constant_behind_a_mask_that_the_compiler_knows(axis, rng):
    """Division by a number of elements that it knows would be multiplication by a rounded inverse.
    The gradient of the scale is 0.
    """
    where, cotangent = (
        rng.random((105, 77)) < 0.4,
        rng.standard_normal((105, 77)).astype(np.float32),
    )

    @jax.jit
    def run(x):
        norm = lambda scale: jn.standardize(
            x, axis, scale=scale, bias=jnp.full((1, 1), 0.7), where=where
        )
        y, pullback = jax.vjp(norm, jnp.ones((1, 77)))
        return y, *pullback(cotangent)

    for value in (0.1, 3.3, 1e6 + 0.3, 1e10):
        y, dscale = run(np.full(where.shape, value, np.float32))
        np.testing.assert_array_equal(y, np.where(where, np.float32(0.7), 0))
        assert not np.asarray(dscale).any()


@pytest.mark.parametrize("value", [0, 0.1, 3.3, 1e6 + 0.3])
@pytest.mark.parametrize(
    "case", long_sweep([case for case in CASES if case.centered], quick=KINDS[:2]), ids=str
)
def test_every_norm_of_a_constant_gives_the_bias(case, value, rng):
    x, (scale, bias) = np.full(case.shape, value, np.float32), case.params(rng)
    for where in (None, np.ones(case.shape, bool)):
        y = np.asarray(case(x, scale=scale, bias=bias, where=where)).reshape(case.split_shape)
        np.testing.assert_array_equal(
            y, np.broadcast_to(bias.reshape(case.param_split), case.split_shape)
        )


OF_ONE_MEAN = [case for case in CASES if case.centered and case.name != "switchable"]


@pytest.mark.parametrize("case", long_sweep(OF_ONE_MEAN, quick=KINDS), ids=str)
# each with an epsilon, and so programs, of its own
@pytest.mark.parametrize("power", long_sweep([-8, 5, 12], quick=[12]))
def test_scaling_and_shifting_the_input_changes_only_the_sign(case, power, rng):
    """y(a x + b) = sign(a) y(x) for a = ±2^k and epsilon scaled by a^2."""
    x = rng.standard_normal(case.shape).astype(np.float32)
    truth = case.truth(x).y
    for a in (2.0**power, -(2.0**power)):
        y = np.asarray(case(np.float32(a) * x, epsilon=case.epsilon * a * a))
        split = case.split_shape
        assert (
            worst(np.reshape(np.sign(a) * y, split), truth.reshape(split), case.group_axes)
            <= B32[0]
        )
    y = np.asarray(case(x), np.float64).reshape(case.split_shape)
    var = x.astype(np.float64).reshape(case.split_shape).var(case.axes)
    assert np.abs(y.mean(case.axes)).max() <= 1e-7
    if case.name != "pair":  # of which that is said of the sum over the channels
        # twice the bound of the output
        np.testing.assert_allclose((y**2).mean(case.axes), var / (var + case.epsilon), rtol=8e-7)


@pytest.mark.parametrize("name", long_sweep(["layer", "rms"], quick=["layer"]))
def test_a_row_depends_on_the_batch_in_its_last_bits_only(name, rng):
    """XLA orders sums by shape, so equal bits are not promised; 4 units in the last place of the
    largest value are.
    """
    x = rng.standard_normal((257, 77)).astype(np.float32)
    one = np.concatenate([np.asarray(BY_NAME[name](x[i : i + 1])) for i in range(8)])
    for size in (1, 2, 3, 8, 64, 257):
        y = np.asarray(BY_NAME[name](x[:size]))[:8]
        assert worst(y, one[:size], 1) <= 4 * np.finfo(np.float32).eps


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("size", [1e-33, 1e-20, 1e20, 1e34])
def test_offsets_of_any_size(size, mean, rng):
    x = ((mean + rng.standard_normal((6, 1000))) * size).astype(np.float32)
    y = jn.standardize(x, 1, full_range=True, epsilon=0.0)
    exact = x.astype(np.float64)
    truth = (exact - exact.mean(1, keepdims=True)) / exact.std(1, keepdims=True)
    assert np.abs(y - truth).max() <= 4e-7 * np.abs(truth).max()


def test_very_many():
    x = jnp.full((20, 70, 70, 2), 0.1).at[3, 3, 3, 1].set(jnp.inf)
    batch = jn.moments(x, (0, 1, 2))
    np.testing.assert_array_equal(batch.mean[..., 0], np.float32(0.1))
    np.testing.assert_allclose(batch.var[..., 0], 0.0, atol=1e-16)
    assert not np.isfinite(batch.var[..., 1]).any()


@pytest.mark.parametrize("far", [1.0, 10.0, 1e3, 1e5])
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2)])
def test_one_row_in_eight_far_from_the_others(axes, far, rng):
    x = rng.standard_normal((16, 56, 56, 8)) + 1e4
    x[:, ::8] += far
    exact = x.astype(np.float32).astype(np.float64)
    y = jn.standardize(jnp.asarray(x, jnp.float32), axes, epsilon=1e-20)
    truth = (exact - exact.mean(axes, keepdims=True)) / exact.std(axes, keepdims=True)
    assert worst(y, truth, axes) <= B32[0]
