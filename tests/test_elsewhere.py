"""What other back-ends than a CPU's are given: the same numbers, of fewer passes over x."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, SIX
from oracle import worst
from test_accuracy import B32, HALF, HARD, check
from test_accuracy import test_an_outlier_among_65536 as outlier_among_65536
from test_accuracy import test_full_range_is_right_beyond_the_range_of_squares as full_range
from test_accuracy import test_half_precision_is_rounded_once as half_precision
from test_accuracy import test_subnormal_numbers_give_finite_results as subnormal_numbers
from test_derivatives import test_hessian_jacobians_and_gradients_of_gradients_agree as derivatives_agree

import jaxnorm as jn
from jaxnorm import loops


@pytest.fixture(scope="class")
def elsewhere():
    """A CPU, made to compute as other back-ends do."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXNORM_IMPLEMENTATION", "xla")
        patch.setattr(jax.lax, "platform_dependent", lambda *args, default, **others: default(*args))
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(loops, "_only_on", lambda platform, function: lambda *arrays: arrays)
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("elsewhere")
class TestNumbers:
    @pytest.mark.parametrize("hard", HARD, ids=str)
    @pytest.mark.parametrize("case", SIX, ids=str)
    def test_hard_inputs(self, case, hard, rng):
        """To twice the bounds: a CPU adds up in one run what it is given at once."""
        check(case, hard, rng, slack=2)

    @pytest.mark.parametrize(("dtype", "name", "make"), HALF, ids=[f"{dtype}-{name}" for dtype, name, _ in HALF])
    @pytest.mark.parametrize("case", SIX, ids=str)
    def test_half_precision(self, case, dtype, name, make, rng):
        half_precision(case, dtype, name, make, rng)

    @pytest.mark.parametrize("size", [1e-30, 1e-14, 1e-13, 1.0, 3e13, 4e13, 1e18, 1e20, 1e30, 3.4e38])
    def test_full_range(self, size, rng):
        full_range(BY_NAME["layer"], size, rng)
        x = (rng.uniform(-1, 1, (6, 77)) * size).astype(np.float32)
        y = jn.standardize(x, 1, centered=False, full_range=True, epsilon=0.0)
        truth = x.astype(np.float64) / np.sqrt(np.square(x, dtype=np.float64).mean(1, keepdims=True))
        np.testing.assert_allclose(y, truth, rtol=4e-7)

    @pytest.mark.parametrize("mean", [0.0, 1e3])
    @pytest.mark.parametrize("size", [1e-33, 1e-20, 1e20, 1e34])
    def test_offsets_of_any_size(self, size, mean, rng):
        x = ((mean + rng.standard_normal((6, 1000))) * size).astype(np.float32)
        y = jn.standardize(x, 1, full_range=True, epsilon=0.0)
        exact = x.astype(np.float64)
        truth = (exact - exact.mean(1, keepdims=True)) / exact.std(1, keepdims=True)
        assert np.abs(y - truth).max() <= 4e-7 * np.abs(truth).max()

    @pytest.mark.parametrize("case", SIX, ids=str)
    def test_subnormal_numbers(self, case, rng):
        subnormal_numbers(case, rng)

    @pytest.mark.parametrize("place", ["first", "last"])
    @pytest.mark.parametrize("axes", [0, 1])
    def test_an_outlier_among_65536(self, axes, place, rng):
        outlier_among_65536(axes, place, rng)

    @pytest.mark.parametrize("case", SIX, ids=str)
    def test_derivatives(self, case, rng, x64):
        derivatives_agree(case, rng, x64)

    @pytest.mark.parametrize("far", [1.0, 10.0, 1e3, 1e5])
    @pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2)])
    def test_numbers_unlike_the_rest_where_the_pivot_comes_from(self, axes, far, rng):
        """One row in eight is far from the others: the pivot is as far from the mean as it can be, 2.6 standard deviations.

        The variance is then the difference of numbers 8 and 7 times as large: 8 times the bound.
        """
        x = rng.standard_normal((16, 56, 56, 8)) + 1e4
        x[:, ::8] += far
        exact = x.astype(np.float32).astype(np.float64)
        y = jn.standardize(jnp.asarray(x, jnp.float32), axes, epsilon=1e-20)
        truth = (exact - exact.mean(axes, keepdims=True)) / exact.std(axes, keepdims=True)
        assert worst(y, truth, axes) <= 8 * B32[0]

    def test_very_many(self):
        x = jnp.full((20, 70, 70, 2), 0.1).at[3, 3, 3, 1].set(jnp.inf)
        batch = jn.moments(x, (0, 1, 2))
        np.testing.assert_array_equal(batch.mean[..., 0], np.float32(0.1))
        np.testing.assert_allclose(batch.var[..., 0], 0.0, atol=1e-16)
        assert not np.isfinite(batch.var[..., 1]).any()


def lowered(function, *types, platform="tpu"):
    return jax.jit(function).trace(*types).lower(lowering_platforms=(platform,)).as_text()


def users(program: str, name: str) -> list[str]:
    """The lines in which the norm takes what has this name."""
    lines = program[program.index("func.func private @_fused") :].split("\n")
    return [line for line in lines if re.search(rf"= .*{name}\b", line)]


def test_a_gpu_can_make_one_kernel_of_a_row(monkeypatch):
    """It does if each step from a sum over a row to x takes only the one before it: to the pivot, or for the mean square, to the root."""
    monkeypatch.setenv("JAXNORM_IMPLEMENTATION", "xla")
    x, param = jax.ShapeDtypeStruct((4096, 256), "float32"), jax.ShapeDtypeStruct((256,), "float32")
    layer = lowered(lambda x, s, b: jn.layer_norm(x, scale=s, bias=b), x, param, param, platform="cuda")
    (pivot,) = re.findall(r"(%\d+) = .stablehlo.case[^%]*%\d+\) \({(?:(?!}\)).)*}\) : .*-> tensor<4096x1xf32>", layer, re.S)
    assert len(users(layer, pivot)) == 3
    for line in users(layer, pivot):
        assert re.search(r"broadcast_in_dim.*-> tensor<4096x256xf32>$", line), line
    rms = lowered(lambda x, s: jn.rms_norm(x, scale=s), x, param, platform="cuda")
    (step,) = re.findall(r"(%\d+) = stablehlo.reduce", rms)
    while "tensor<4096x256xf32>" not in step:
        (line,) = users(rms, step)
        step = line if line.endswith("tensor<4096x256xf32>") else line.split()[0]


def test_very_many_are_added_up_in_two_steps():
    x = jax.ShapeDtypeStruct((20, 70, 70, 2), "float32")
    found = re.findall(r"stablehlo.(reduce|optimization_barrier)\b", lowered(lambda x: loops.add_in_turn(x, [2, 1, 0], False), x))
    assert found == ["reduce", "reduce", "optimization_barrier", "reduce"]


PASSES = {  # and how many sums over arrays as large as x there are, of float32 and of bfloat16
    "layer": (lambda x, s, b: jn.layer_norm(x, scale=s, bias=b), 7, 8),
    "rms": (lambda x, s, b: jn.rms_norm(x, scale=s), 4, 7),
    "batch": (lambda x, s, b: jn.batch_norm(x, scale=s, bias=b)[0], 4, 6),
    "instance": (lambda x, s, b: jn.instance_norm(x, scale=s, bias=b), 4, 6),
    "group": (lambda x, s, b: jn.group_norm(x, 4, scale=s, bias=b), 4, 6),
    "switchable": (lambda x, s, b: jn.switchable_norm(x, jnp.zeros(3), jnp.zeros(3), scale=s, bias=b)[0], 4, 6),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PASSES)
def test_nothing_stands_between_sums_over_x(name, dtype, monkeypatch):
    """Lowered for a TPU: no barrier before an array as large as x, and no more sums over such arrays than need be."""
    monkeypatch.setenv("JAXNORM_IMPLEMENTATION", "xla")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.clear_caches()
    norm, *sums = PASSES[name]
    x, param = jax.ShapeDtypeStruct((8, 16, 16, 256), dtype), jax.ShapeDtypeStruct((256,), dtype)

    def step(x, scale, bias, by_y):
        y, pullback = jax.vjp(norm, x, scale, bias)
        return y, pullback(by_y)

    text = lowered(step, x, param, param, x)
    size = lambda type_: prod(map(int, re.findall(r"(\d+)x", type_)))  # noqa: E731
    barriers = re.findall(r"optimization_barrier.*: (.*)", text)
    assert max(map(size, re.findall(r"tensor<[^>]*>", " ".join(barriers))), default=0) < 8 * 16 * 16 * 256 // 64
    reduced = [types for types in re.findall(r"stablehlo.reduce\(.*: \((tensor<[^>]*>)", text) if size(types) == 8 * 16 * 16 * 256]
    assert len(reduced) == sums[dtype == "bfloat16"]
