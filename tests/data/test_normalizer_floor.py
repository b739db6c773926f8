"""Test floors of the deviation, boolean leaves, and programs with constant statistics.

They are tests of jaxnorm.data.Normalizer.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxnorm.data import Normalizer

# constants of compiled programs ------------------------------------------------------------------

BIG = np.array([[1e7], [1e7 + 1]], np.float32)
ATMOSPHERE = 101325.37


def atmosphere(rng, dtype=np.float32):
    x = rng.standard_normal((400, 1)) + ATMOSPHERE
    return ((x - x.mean()) / x.std() + ATMOSPHERE).astype(dtype)


CALLS = {
    "argument": lambda function, x: jax.jit(function)(x),
    "closure": lambda function, x: jax.jit(lambda: function(jnp.asarray(x)))(),
    "vmap": lambda function, x: jax.jit(jax.vmap(function))(x),
    "vmap outside": lambda function, x: jax.vmap(jax.jit(function))(x),
    "scan": lambda function, x: jax.lax.scan(
        lambda _, row: (None, function(row)), None, jnp.asarray(x)
    )[1],
    "checkpoint": lambda function, x: jax.jit(jax.checkpoint(function))(x),
    "value of grad": lambda function, x: jax.jit(jax.vjp, static_argnums=0)(
        function, jnp.asarray(x)
    )[0],
    "jvp": lambda function, x: jax.jit(lambda x: jax.jvp(function, (x,), (x,))[0])(x),
}


@pytest.mark.parametrize("call", CALLS)
def test_neighbours_about_a_large_mean_stay_apart(call):
    fitted = Normalizer.fit([BIG])
    assert np.asarray(CALLS[call](fitted.normalize, BIG)).ravel().tolist() == [-1, 1]


@pytest.mark.parametrize("call", CALLS)
def test_a_mean_that_is_no_float32_number_costs_nothing(call, rng):
    x = atmosphere(rng)
    fitted = Normalizer.fit([x])
    exact = (x.astype(np.float64) - x.mean(dtype=np.float64)) / x.std(dtype=np.float64)
    y = np.asarray(CALLS[call](fitted.normalize, x))
    np.testing.assert_allclose(y, exact, rtol=4e-7, atol=4e-7)
    np.testing.assert_array_equal(np.asarray(CALLS[call](fitted.denormalize, y)), x)


def test_denormalize_rounds_once_within_jit():
    """1 + 0.5 ulp of the mean and 0.6 ulp of it: without the low part the sum is one unit lower."""
    unit = 2.0**-3  # of float32 at 2**20
    fitted = Normalizer.fit([np.array([[2.0**20 + 0.45 * unit - 1], [2.0**20 + 0.45 * unit + 1]])])
    y = np.float32([[0.1 * unit], [-0.1 * unit]])
    expected = [2.0**20 + unit, 2.0**20]
    assert np.asarray(jax.jit(fitted.denormalize)(y)).ravel().tolist() == expected
    assert fitted.denormalize(y).ravel().tolist() == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_within_jit_is_as_outside(dtype, rng):
    x = (rng.standard_normal((64, 3)) + np.array([3, 300, 0.01])).astype(dtype)
    fitted = Normalizer.fit([x])
    outside = fitted.normalize(x)
    for call in CALLS.values():
        np.testing.assert_array_equal(np.asarray(call(fitted.normalize, x)), outside)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_integers_within_jit_keep_their_digits(dtype):
    x = np.array([[20_000_001], [20_000_002], [20_000_004]], dtype)
    fitted = Normalizer.fit([x])
    exact = (x - 20_000_000 - 7 / 3) / np.sqrt(14 / 9)
    for call in ("argument", "closure", "vmap", "scan", "checkpoint"):
        y = np.asarray(CALLS[call](fitted.normalize, x))
        np.testing.assert_allclose(y, exact, rtol=3e-7)
        back = CALLS[call](lambda y: fitted.denormalize(y, dtype=dtype), y)
        np.testing.assert_array_equal(np.asarray(back), x)


def test_the_gradient_is_one_over_the_deviation(rng):
    fitted = Normalizer.fit([BIG])
    slope = jax.jit(jax.grad(lambda x: fitted.normalize(x).sum()))(BIG)
    assert np.asarray(slope).tolist() == [[2], [2]]
    assert (
        np.asarray(jax.jit(jax.hessian(lambda x: fitted.normalize(x).sum()))(BIG)).tolist()
        == np.zeros((2, 1, 2, 1)).tolist()
    )


# floors ------------------------------------------------------------------------------------------

# a constant but for the last bit of float32
NOISY = np.float32([[1000, 1.0], [1000 + 2**-13, 3.0]])


def test_a_relative_floor_takes_rounding_for_none():
    fitted = Normalizer.fit([NOISY])
    assert np.abs(fitted.normalize(NOISY)).tolist() == [[1, 1], [1, 1]]
    y = fitted.normalize(NOISY, floor_relative=1e-6)
    np.testing.assert_allclose(y[:, 0], [-(2**-14) / 1e-3, 2**-14 / 1e-3], rtol=1e-6)
    assert y[:, 1].tolist() == [-1, 1]
    np.testing.assert_array_equal(fitted.denormalize(y, floor_relative=1e-6), NOISY)
    back = jax.jit(lambda y: fitted.denormalize(y, floor_relative=1e-6))(y)
    np.testing.assert_array_equal(np.asarray(back), NOISY)


def test_the_larger_floor_holds():
    x = np.array([[-1000.0], [-1000.0]])
    fitted = Normalizer.fit([x])
    for floor, relative, deviation in ((2.0, 1e-3, 2.0), (0.5, 1e-3, 1.0), (3e-6, 0.0, 3e-6)):
        y = fitted.normalize(x + 4, floor=floor, floor_relative=relative)
        np.testing.assert_allclose(y, np.full((2, 1), 4 / deviation), rtol=1e-12)
        np.testing.assert_allclose(
            fitted.denormalize(y, floor=floor, floor_relative=relative), x + 4
        )


def test_each_leaf_has_its_own_floor():
    x = np.full((2, 1), 10.0)
    tree = {"observation": {"a": x, "b": x}, "reward": x, "action": x}
    fitted = Normalizer.fit([tree])
    given = {
        "floor": {"observation": 2.0, "observation/b": 4.0, "action": 0.5},
        "floor_relative": {"reward": 0.1},
    }
    away = jax.tree.map(lambda x: x + 1, tree)
    for normalize, denormalize in (
        (fitted.normalize, fitted.denormalize),
        (jax.jit(lambda t: fitted.normalize(t, **given)), None),
    ):
        y = normalize(away, **given) if denormalize else normalize(away)
        assert [float(leaf[0, 0]) for leaf in jax.tree.leaves(y)] == [2.0, 0.5, 0.25, 1.0]
    assert jax.tree.map(
        np.ndarray.tolist, fitted.denormalize(fitted.normalize(away, **given), **given)
    ) == jax.tree.map(np.ndarray.tolist, away)
    nested = {"observation": {"a": 2.0, "b": 4.0}}
    assert fitted.normalize(away, floor=nested)["observation"]["b"].tolist() == [[0.25], [0.25]]
    assert fitted.normalize(away, floor=nested)["reward"].tolist() == [[1e6], [1e6]]


WRONG = {
    "floor must name leaves that are fitted: got ['z'], fitted are ['x'].": {"floor": {"z": 1.0}},
    "floor of 'x' must be a finite number > 0: got 0.": {"floor": {"x": 0}},
    "floor must be a finite number > 0: got nan.": {"floor": np.nan},
    "floor_relative must be a finite number >= 0: got -1.": {"floor_relative": -1},
    "floor_relative of 'x' must be a finite number >= 0: got True.": {
        "floor_relative": {"x": True}
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_errors_name_the_floor(text):
    x = {"x": np.ones((2, 1))}
    fitted = Normalizer.fit([x])
    for apply in (fitted.normalize, fitted.denormalize):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 its text is compared
            apply(x, **WRONG[text])
        assert str(caught.value) == text


# booleans ----------------------------------------------------------------------------------------


def test_booleans_are_fitted_as_0_and_1():
    x = np.array([[True], [False], [False], [False]])
    for given in (x, jnp.asarray(x)):
        fitted = Normalizer.fit([{"done": given}])
        assert fitted.moments["done"].mean.item() == 0.25
        assert fitted.moments["done"].var.item() == 0.1875
        assert (fitted.min["done"].item(), fitted.max["done"].item()) == (0, 1)
        y = fitted.normalize({"done": given})["done"]
        assert y.dtype == np.float32
        np.testing.assert_allclose(
            y.ravel(), np.array([0.75, -0.25, -0.25, -0.25]) / 0.1875**0.5, rtol=1e-7
        )
        assert fitted.denormalize({"done": y}, dtype=np.uint8)["done"].ravel().tolist() == [
            1,
            0,
            0,
            0,
        ]
    masked = Normalizer().update(x, where=np.array([[True], [True], [False], [False]]))
    assert masked.moments.mean.item() == 0.5


def test_masked_arrays_of_booleans_are_refused_as_others_are():
    with pytest.raises(TypeError, match=r"must not be a masked array"):
        Normalizer().update(np.ma.array([[True]], mask=[[True]]))
