"""Test jaxnorm.host and the Normalizer beyond 2**53.

From there on float64 does not hold every integer.
"""

import json
from fractions import Fraction

import jax
import numpy as np
import pytest

from jaxnorm import host
from jaxnorm.data import Normalizer
from jaxnorm.data.host import tiles

EXTREMES = {
    "int64": [-(2**63), -(2**63) + 1, 0, 2**63 - 1],
    "uint64": [0, 1, 2**63, 2**64 - 1],
}


def exact(values, weights=None):
    """Mean and variance as fractions."""
    weights = [1] * len(values) if weights is None else weights
    total = sum(map(Fraction, weights))
    mean = sum(Fraction(w) * v for w, v in zip(weights, values, strict=True)) / total
    var = sum(Fraction(w) * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / total
    return mean, var


def assert_exact(found, values, weights=None):
    """The mean in both parts as in one of 106 bits, the variance to the last digits of float64."""
    mean, var = exact(values, weights)
    scale = max(1, *map(abs, values))
    assert float(found.mean.item()) == pytest.approx(float(mean), rel=2.3e-16)
    both = Fraction(found.mean.item()) + Fraction(found.low_mean.item())
    assert abs(both - mean) <= Fraction(2) ** -50 * Fraction(
        max(float(var) ** 0.5, scale * 2.0**-52)
    )
    np.testing.assert_allclose(found.var.item(), float(var), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("power", [52, 53, 60, 62])
@pytest.mark.parametrize(
    "fit",
    [lambda x: host.moments(x, 0), lambda x: Normalizer.fit([x]).moments],
    ids=["host", "Normalizer"],
)
def test_neighbours_have_the_variance_of_their_difference(fit, dtype, power):
    found = fit(np.array([2**power + 1, 2**power + 3], dtype)[:, None])
    assert found.var.item() == 1
    assert int(found.mean.item()) + int(found.low_mean.item()) == 2**power + 2


@pytest.mark.parametrize("dtype", EXTREMES)
def test_differences_over_the_whole_range_do_not_overflow(dtype):
    for order in (1, -1):
        fitted = Normalizer.fit([np.array(EXTREMES[dtype], dtype)[::order, None]])
        assert_exact(fitted.moments, EXTREMES[dtype])
        assert (fitted.min.item(), fitted.max.item()) == (
            float(EXTREMES[dtype][0]),
            float(EXTREMES[dtype][-1]),
        )


@pytest.mark.parametrize("dtype", EXTREMES)
@pytest.mark.parametrize("kind", ["mask", "weights"])
def test_what_is_masked_out_costs_no_digit(dtype, kind):
    values = [2**60 + 1, 2**60 + 3, 2**60 + 9]
    x = np.array([EXTREMES[dtype][0], *values, EXTREMES[dtype][-1]], dtype)[:, None]
    w = np.array([0, 1, 1, 1, 0] if kind == "mask" else [0, 2, 1, 0.5, 0])[:, None]
    fitted = Normalizer().update(x, where=w.astype(bool) if kind == "mask" else w)
    assert_exact(fitted.moments, values, w[1:4, 0].tolist())
    assert (fitted.min.item(), fitted.max.item()) == (2.0**60, float(2**60 + 9))
    nothing = Normalizer().update(x, where=False)
    assert (nothing.moments.mean.item(), nothing.moments.var.item(), nothing.min.item()) == (
        0,
        0,
        np.inf,
    )


@pytest.mark.parametrize("layout", ["[n] c", "c [n]"])
@pytest.mark.parametrize("channels", [2, 100])
def test_tiles_and_layouts_give_the_same(layout, channels, rng, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 1 << 10)
    x = rng.integers(0, 1000, (3000, channels)) + 2**61
    truth = (x - 2**61).astype(np.float64)
    x = x if layout == "[n] c" else x.T
    found = host.moments(x, layout)
    np.testing.assert_allclose(found.var.ravel(), truth.var(0), rtol=1e-13)
    np.testing.assert_allclose(
        (found.mean.ravel() - 2.0**61) + found.low_mean.ravel(), truth.mean(0), rtol=1e-13
    )


def test_parts_that_are_merged_or_follow_each_other_give_the_whole(rng, tmp_path):
    values = (rng.integers(0, 1000, 2000) + 2**60).tolist()
    parts = [np.array(values[start : start + 37])[:, None] for start in range(0, 2000, 37)]
    fitted = Normalizer.fit(parts)
    first, second = Normalizer.fit(parts[:20]), Normalizer.fit(parts[20:])
    for name in ("a.json", "b.safetensors"):
        first.save(tmp_path / name)
        assert_exact(Normalizer.load(tmp_path / name).merge(second).moments, values)
        assert_exact(Normalizer.load(tmp_path / name).extend(parts[20:]).moments, values)
    assert_exact(fitted.moments, values)
    assert_exact(host.merge(*(host.moments(part, 0) for part in parts)), values)
    rows = host.moments(np.array(values).reshape(40, 50), 1)
    assert_exact(rows.merge(0), values)
    assert_exact(Normalizer.fit([np.array(values).reshape(40, 50)], "[n t]").moments, values)


def test_a_file_without_low_parts_is_read(tmp_path):
    """As files were before there were any."""
    fitted = Normalizer.fit([np.array([[0.1], [0.2]])])
    fitted.save(tmp_path / "stats.json")
    saved = json.loads((tmp_path / "stats.json").read_text())
    del saved["arrays"]["low_mean"]
    (tmp_path / "old.json").write_text(json.dumps(saved))
    old = Normalizer.load(tmp_path / "old.json")
    assert old.moments.low_mean.tolist() == [[0.0]]
    assert old.moments.mean.tolist() == fitted.moments.mean.tolist()


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("base", [2**53, 2**60, 2**62 + 12345])
def test_normalizing_integers_beyond_2_to_the_53_is_exact_and_comes_back(dtype, base):
    x = np.array([[base + 1], [base + 3]], dtype)
    fitted = Normalizer.fit([x])
    y = fitted.normalize(x)
    assert y.ravel().tolist() == [-1, 1]
    assert fitted.denormalize(y, dtype=dtype).ravel().tolist() == [base + 1, base + 3]


def test_the_mean_of_floats_has_two_parts_too():
    x = np.array([[1e16], [1e16 + 2], [1e16 + 6]])
    found = Normalizer.fit([x[:1], x[1:]]).moments
    assert abs(
        Fraction(found.mean.item()) + Fraction(found.low_mean.item()) - (10**16 + Fraction(8, 3))
    ) < Fraction(1, 10**12)
    np.testing.assert_allclose(found.var.item(), 56 / 9, rtol=1e-14)


def test_numbers_beyond_the_square_root_of_the_range_have_a_variance():
    assert host.moments(np.full((4, 1), 1e200), 0).var.item() == 0


def test_moments_of_jax_integers_are_those_of_numpy(x64):
    x = jax.numpy.array([2**60 + 1, 2**60 + 3])[:, None]
    assert host.moments(x, 0).var.item() == 1
    assert Normalizer.fit([x]).normalize(x).ravel().tolist() == [-1, 1]
