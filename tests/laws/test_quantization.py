"""Test float8 with scales against NumPy and ml_dtypes in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxnorm as jn

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# axes, sizes, and the same groups as the last axis of a reshaped array
GROUPS = [(-1, {}, (4, 256)), ("[n c]", {}, (1, 1024)), ("n (b [k])", {"k": 64}, (4, 4, 64))]


def oracle(x, most, *, power_of_two=False):
    """The values before they are rounded, and the scales, of groups along the last axis."""
    scale = np.abs(x).max(-1, keepdims=True) / most
    if power_of_two:
        scale = 2.0 ** np.ceil(np.log2(scale))
    return x / scale, scale


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize(("axes", "sizes", "shape"), GROUPS)
def test_values_and_scales(axes, sizes, shape, dtype, power_of_two, rng):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    most = float(ml_dtypes.finfo(dtype).max)
    found = jn.quantize(x, axes, dtype=dtype, power_of_two=power_of_two, **sizes)
    true, scale = oracle(x.astype(np.float64).reshape(shape), most, power_of_two=power_of_two)
    np.testing.assert_allclose(found.scale.ravel(), scale.ravel(), rtol=2e-7)
    values = np.asarray(found.values).astype(np.float64).reshape(shape)
    assert found.values.dtype == dtype
    # rounded to the nearest: 4 significant bits, or 3
    rounding = 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1) * (1 + 1e-6)
    normal = np.abs(true) >= float(ml_dtypes.finfo(dtype).smallest_normal)
    assert (np.abs(values - true) <= rounding * np.abs(true))[normal].all()
    largest = np.abs(values).max(-1)
    assert (largest == most).all() if not power_of_two else (largest > most * 0.46).all()
    np.testing.assert_allclose(jn.dequantize(found).reshape(shape), values * scale, rtol=2e-7)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_dividing_by_powers_of_two_is_exact(dtype, rng):
    x = rng.integers(-4, 5, (8, 32)).astype(np.float32) * 2.0**-20
    found = jn.quantize(x, dtype=dtype, power_of_two=True)
    np.testing.assert_array_equal(jn.dequantize(found), x)


def test_zeros_have_scale_one():
    found = jn.quantize(jnp.zeros((3, 4)).at[1, 2].set(-448))
    assert found.scale.tolist() == [[1], [1], [1]]
    assert found.values.astype(jnp.float32).tolist() == [[0] * 4, [0, 0, -448, 0], [0] * 4]
    empty = jn.quantize(jnp.zeros((2, 0)))
    assert (empty.values.shape, empty.scale.tolist()) == ((2, 0), [[1], [1]])


def test_masked_elements_do_not_count():
    x = jnp.array([[1.0, jnp.nan, 2.0, 1e30], [3.0, 3.0, 3.0, 3.0]])
    where = jnp.array([[True, False, True, False], [False] * 4])
    found = jn.quantize(x, where=where)
    assert found.values.astype(jnp.float32).tolist() == [[224, 0, 448, 0], [0] * 4]
    np.testing.assert_allclose(found.scale.ravel(), [2 / 448, 1], rtol=1e-7)
    with pytest.raises(TypeError, match="where must be a boolean mask: got float32"):
        jn.quantize(x, where=where.astype(jnp.float32))


def test_groups_with_inf_or_nan_have_scale_one():
    """The largest numbers stand for Inf, and the elements of other groups are as ever."""
    x = jnp.array([[7.0, jnp.inf, -500.0], [7.0, jnp.nan, -1.0], [7.0, 3.5, -1.0]])
    values, scale = jn.quantize(x)
    true = [[7, 448, -448], [7, np.nan, -1], [448, 224, -64]]
    np.testing.assert_array_equal(values.astype(jnp.float32), true)
    assert scale.tolist() == [[1], [1], [7 / 448]]
    assert jn.quantize(x, dtype=jnp.float8_e5m2).values[0, 1] == 57344


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [3e38, 1e30, 1e-30, 4e-38])
def test_elements_of_any_size(size, power_of_two):
    x = jnp.array([size, -size / 2], jnp.float32)
    found = jn.quantize(x, power_of_two=power_of_two)
    assert jnp.isfinite(found.scale).all()
    np.testing.assert_allclose(jn.dequantize(found), x, rtol=2**-4)


@pytest.mark.parametrize(
    ("dtype", "least"), [(jnp.float8_e4m3fn, 5.3e-36), (jnp.float8_e5m2, 6.75e-34)]
)
def test_the_least_scale_is_a_normal_number(dtype, least):
    """Below 448 or 57344 times that, the largest element is no longer the largest number."""
    tiny, most = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(dtype).max)
    reaches = jn.quantize(jnp.array([least]), dtype=dtype)
    assert (float(reaches.values[0]), float(reaches.scale[0]) >= tiny) == (most, True)
    less = jn.quantize(jnp.array([least / 4]), dtype=dtype)
    assert float(less.scale[0]) == tiny
    assert float(less.values[0]) == pytest.approx(most / 4, rel=2**-3)


def test_half_precision_and_float64(rng, x64):
    x = rng.standard_normal((4, 64))
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = jnp.asarray(x, dtype)
        found, wide = jn.quantize(narrow), jn.quantize(narrow.astype(jnp.float32))
        assert found.scale.dtype == jnp.float32
        for ours, other in zip(found, wide, strict=True):
            np.testing.assert_array_equal(ours, other)
    found = jn.quantize(jnp.asarray(x))
    np.testing.assert_allclose(found.scale, np.abs(x).max(-1, keepdims=True) / 448, rtol=2e-16)


def test_the_same_within_transformations(rng):
    x = jnp.asarray(rng.standard_normal((4, 16)).astype(np.float32))
    whole, rows = jn.quantize(x, "[n c]"), jn.quantize(x)
    for each, other in [
        (jax.jit(jn.quantize)(x), rows),
        (jax.vmap(jn.quantize)(x), rows._replace(scale=rows.scale[:, 0][:, None])),
        (
            jax.vmap(lambda row: jn.quantize(row, axis_name="rows"), axis_name="rows")(x),
            whole._replace(scale=jnp.broadcast_to(whole.scale, (4, 1))),
        ),
    ]:
        for ours, true in zip(each, other, strict=True):
            np.testing.assert_array_equal(ours, true)


def test_explicit_sharding(rng):
    x = rng.standard_normal((8, 16)).astype(np.float32)
    alone = jn.quantize(x, "n (b [k])", k=8)
    mesh = jax.make_mesh((4,), ("chips",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_mesh(mesh) if hasattr(jax.sharding, "use_mesh") else jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("chips", None)))
        found = jax.jit(lambda x: jn.quantize(x, "n (b [k])", k=8))(sharded)
        back = jax.jit(jn.dequantize)(found)
    for ours, true in zip((*found, back), (*alone, jn.dequantize(alone)), strict=True):
        np.testing.assert_array_equal(ours, true)


def test_the_gradient_past_float8(rng):
    """The scale is a constant; what is trained goes around the rounding."""
    x = jnp.asarray(rng.standard_normal((2, 8)).astype(np.float32))
    assert not jnp.any(jax.grad(lambda x: jn.quantize(x).scale.sum())(x))
    past = lambda x: x + jax.lax.stop_gradient(jn.dequantize(jn.quantize(x)) - x)
    np.testing.assert_array_equal(jax.grad(lambda x: (past(x) * x[::-1]).sum())(x) != 0, True)
    np.testing.assert_array_equal(jax.grad(lambda x: past(x).sum())(x), 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jn.quantize(jnp.arange(3)), TypeError, "x must be floating point: got int32"),
        (lambda: jn.quantize(jnp.ones(3, jnp.complex64)), TypeError, "x must be real"),
        (lambda: jn.quantize(jnp.ones(3), dtype="int8"), TypeError, "a float8 with a sign: got"),
        (lambda: jn.quantize(jnp.ones(3), power_of_two=1), TypeError, "True or False: got 1"),
        (lambda: jn.quantize(jnp.ones(3), 1), ValueError, "axes"),
        (lambda: jn.quantize(jnp.ones((2, 3)), "n (b [k])", k=2), ValueError, "3"),
        (lambda: jn.dequantize(jnp.ones(3)), TypeError, "must have values and scales"),
        (
            lambda: jn.dequantize((jnp.ones(3, jnp.float8_e5m2), jnp.ones(2))),
            ValueError,
            "must broadcast",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
