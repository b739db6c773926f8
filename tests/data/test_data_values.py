"""Test the values that jaxnorm.data takes and returns.

These are integers of every size, to the last digit, single examples, and trees of any
kind.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxnorm as jn
from jaxnorm import host
from jaxnorm.data import Normalizer

# of integers whose neighbours float32 does not tell apart, at the ends of their range too
RANGES = {
    "int32": [
        (20_000_001, 20_000_008),
        (-(2**31), -(2**31) + 9),
        (2**31 - 9, 2**31 - 1),
        (-(2**31), 2**31 - 1),
        (-70_000, 70_000),
    ],
    "uint32": [(2**32 - 9, 2**32 - 1), (0, 2**32 - 1), (65_530, 65_540)],
    "int16": [(-(2**15), 2**15 - 1)],
    "uint8": [(0, 255)],
    "int64": [(2**52, 2**52 + 9), (-(2**52), 2**52)],
}
CASES = [(dtype, *span) for dtype, spans in RANGES.items() for span in spans]


def integers(dtype, low, high):
    x = np.random.default_rng(0).integers(low, high, (50, 1), np.int64, endpoint=True)
    x[:2, 0] = low, high
    return x.astype(dtype)


@pytest.mark.parametrize("jitted", [False, True], ids=["numpy", "jit"])
@pytest.mark.parametrize(("dtype", "low", "high"), CASES)
def test_integers_to_their_last_digit(dtype, low, high, jitted):
    if jitted and dtype == "int64":
        pytest.skip("JAX has none without x64")
    x = integers(dtype, low, high)
    fitted, exact = Normalizer.fit([x]), x.astype(np.float64)
    mean, deviation = fitted.moments.mean, np.maximum(fitted.std, 1e-6)
    wide = np.float64 if dtype == "int64" else np.float32
    run = jax.jit(fitted.normalize) if jitted else lambda x: fitted.normalize(x, dtype=wide)
    y = run(x)
    # of which float64 alone would lose a fraction
    from_mean = (exact - mean) - fitted.moments.low_mean
    np.testing.assert_allclose(y, from_mean / deviation, rtol=3e-7, atol=3e-7)
    back = (
        jax.jit(lambda y: fitted.denormalize(y, dtype=x.dtype))(y)
        if jitted
        else fitted.denormalize(y, dtype=x.dtype)
    )
    assert back.dtype == x.dtype
    error = np.abs(np.asarray(back).astype(object) - x.astype(object)).max()
    # the last digits of y
    assert error <= (high - low) * 2.0**-22 / (1 if wide == np.float32 else 2**29)


def test_integers_of_jax_in_float64(x64):
    x = integers("int64", 2**52, 2**52 + 9)
    fitted = Normalizer.fit([x])
    for given in (x, jnp.asarray(x)):
        y = fitted.normalize(given, dtype=np.float64)
        assert y.dtype == np.float64
        np.testing.assert_allclose(
            y, ((x - fitted.moments.mean) - fitted.moments.low_mean) / fitted.std, rtol=1e-15
        )
        np.testing.assert_allclose(
            y, ((x - 2**52) - (x - 2**52).mean()) / (x - 2**52).std(), rtol=1e-14
        )
        np.testing.assert_array_equal(fitted.denormalize(y, dtype=np.int64), x)


def test_what_float32_cannot_hold_comes_back_in_float64():
    x = np.array([[20_000_001.0], [20_000_003.0], [20_000_008.0]])
    fitted = Normalizer.fit([x])
    np.testing.assert_allclose(
        fitted.denormalize(fitted.normalize(x.astype(np.int32)), dtype=np.float64), x, atol=1e-5
    )


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_beyond_the_range_of_integers_is_its_end(make):
    fitted = Normalizer.fit([np.array([[0], [255]], np.uint8)])
    assert fitted.denormalize(
        make(np.float32([[1.01], [-3], [1]])), dtype=np.uint8
    ).ravel().tolist() == [255, 0, 255]
    wide = Normalizer.fit([np.array([[2**31 - 1], [-(2**31)]], np.int32)])
    found = wide.denormalize(make(np.float32([[9], [-9]])), dtype=np.int32).ravel().tolist()
    assert found[1] == -(2**31)
    assert 0 <= 2**31 - 1 - found[0] <= 256  # the largest number of steps that float32 holds


PATTERNS = [
    ("[n] (g [c])", (4, 6), {"g": 2}),
    ("[n h w] (g [c])", (4, 3, 5, 6), {"g": 3}),
    ("[n] (c)", (4, 6), {}),
    ("[n] h (g [c])", (4, 3, 6), {"g": 1}),
]


@pytest.mark.parametrize(("pattern", "shape", "sizes"), PATTERNS)
def test_a_single_example_under_any_pattern(pattern, shape, sizes, rng):
    x = rng.standard_normal(shape)
    fitted = Normalizer.fit([x], pattern, **sizes)
    y = fitted.normalize(x)
    np.testing.assert_array_equal(fitted.normalize(x[1]), y[1])
    np.testing.assert_allclose(fitted.denormalize(y[1]), x[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_axes_and_sizes_of_numpy_are_saved(suffix, tmp_path, rng):
    x, path = rng.standard_normal((4, 6)), tmp_path / f"s{suffix}"
    for made in (
        Normalizer(np.int64(0)),
        Normalizer(np.array([0, 1])),
        Normalizer("[n] (g [c])", g=np.int64(2)),
    ):
        made.update(x).save(path)
        assert Normalizer.load(path).axes == made.axes
        assert Normalizer.load(path).sizes == made.sizes


@dataclass(frozen=True)
class Derived:
    a: np.ndarray
    b: np.ndarray = field(init=False, default=None)


def test_dicts_with_defaults_and_fields_that_are_not_given(rng):
    x = rng.standard_normal((4, 3))
    batch = defaultdict(list, a=x)
    normalized = Normalizer.fit([batch]).normalize(batch)
    assert type(normalized) is defaultdict
    assert normalized["none"] == []
    found = Normalizer.fit([Derived(x)]).normalize(Derived(x))
    np.testing.assert_array_equal(found.a, normalized["a"])
    assert found.b is None


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("floor", [1e-46, 1e-40])
def test_a_floor_below_what_float32_holds(floor, make):
    x = np.float32([[0.1], [0.1]])
    assert Normalizer.fit([x]).normalize(make(x), floor=floor).tolist() == [[0], [0]]


def test_weights_of_bfloat16():
    x, weights = np.float32([[1, 2], [3, 4]]), np.array([[1, 0], [3, 1]], ml_dtypes.bfloat16)
    found, truth = host.moments(x, 0, where=weights), jn.moments(x, 0, where=jnp.asarray(weights))
    np.testing.assert_array_equal(found.mean, truth.mean)
    np.testing.assert_array_equal(Normalizer().update(x, where=weights).moments.var, found.var)


@pytest.mark.parametrize(
    "damage",
    [
        {"axes": None},
        {"sizes": None},
        {"batches": None},
        {"structure": None},
        {"structure": {"foo": 3}},
    ],
)
def test_facts_that_are_missing_or_other(damage, tmp_path, rng):
    path = tmp_path / "s.json"
    Normalizer.fit([{"a": rng.standard_normal((4, 3))}]).save(path)
    read = json.loads(path.read_text())
    ((name, value),) = damage.items()
    read["jaxnorm"][name] = value
    if value is None:
        del read["jaxnorm"][name]
    path.write_text(json.dumps(read))
    with pytest.raises(ValueError, match=r"s\.json must be a Normalizer's file: "):
        Normalizer.load(path)


def test_arrays_of_different_shapes(tmp_path, rng):
    path = tmp_path / "s.json"
    Normalizer.fit([rng.standard_normal((4, 3))]).save(path)
    read = json.loads(path.read_text())
    read["arrays"]["mean"] = {"shape": [1, 2], "values": [0, 0]}
    path.write_text(json.dumps(read))
    with pytest.raises(ValueError, match=r"different shapes: \(1, 2\) and \(1, 3\)"):
        Normalizer.load(path)


FITTED = Normalizer.fit([np.arange(12.0).reshape(4, 3)])
MASKED = np.ma.array([[1.0], [1e9]], mask=[[False], [True]])
REFUSED = {
    "x must not be a masked array: pass x.data, and where=~x.mask.": lambda: Normalizer().update(
        MASKED
    ),
    "dtype must be floating point or integer: got |S5.": lambda: FITTED.normalize(
        np.ones((4, 3)), dtype="S5"
    ),
    "dtype must be floating point or integer: got complex128.": lambda: FITTED.normalize(
        np.ones((4, 3)), dtype=complex
    ),
    "dtype must be floating point or integer: got bool.": lambda: FITTED.denormalize(
        np.ones((4, 3)), dtype=bool
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    with pytest.raises(TypeError) as caught:
        REFUSED[text]()
    assert str(caught.value) == text


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_at_the_end_of_their_range_come_back(dtype):
    """Their mean rounds to the power of two beyond."""
    most = np.iinfo(dtype).max
    x = np.array([most - i for i in range(4)], dtype)
    fitted = Normalizer.fit([x])
    np.testing.assert_array_equal(fitted.denormalize(fitted.normalize(x), dtype=dtype), x)


@pytest.mark.parametrize(
    "dtype", [bool, np.uint8, np.int8, np.uint16, np.int16, np.int32, np.float16, np.float32]
)
def test_what_is_asked_for_in_float64_is_computed_in_it(dtype, rng):
    x = rng.integers(0, 2 if dtype is bool else 100, (500, 3)).astype(dtype)
    fitted = Normalizer.fit([x])
    wide = x.astype(np.float64)
    found = fitted.normalize(x, dtype=np.float64)
    np.testing.assert_allclose(found, (wide - wide.mean(0)) / wide.std(0), rtol=1e-13, atol=1e-14)
    restored = fitted.denormalize(found.astype(np.float32), dtype=np.float64)
    exact = found.astype(np.float32) * wide.std(0) + wide.mean(0)
    np.testing.assert_allclose(restored, exact, rtol=1e-13, atol=1e-12)
