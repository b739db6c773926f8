"""Test the formulas with plain loops, which run where a platform has none of its own."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

import jaxnorm as jn
from jaxnorm.arguments.axes import resolve
from jaxnorm.core import plan
from jaxnorm.engine import scaling
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import XlaCpuLoops, XlaTpuLoops
from jaxnorm.kernels import placement

EPSILON = 1.25e-5


@pytest.fixture(params=["gpu", "tpu"])
def elsewhere(monkeypatch, request):
    """As on another platform, for which nothing has been traced, with samples of short axes."""
    jax.clear_caches()
    monkeypatch.setattr(placement, "platform", lambda: request.param)
    monkeypatch.setattr(scaling, "LANES", 1)
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_the_oracle(case, masked, elsewhere, rng):
    x = rng.normal(100, 2, case.shape).astype(np.float32)
    dy = rng.normal(size=case.shape).astype(np.float32)
    scale, bias = case.params(rng)
    where = rng.random(case.shape) < 0.7 if masked else None
    norm = lambda *a: case(a[0], scale=a[1], bias=a[2], where=where, epsilon=EPSILON)
    program = str(jax.make_jaxpr(norm)(x, scale, bias))
    assert "jaxnorm_optimization_barrier" not in program
    y, vjp = jax.vjp(norm, *map(jnp.asarray, (x, scale, bias)))
    options = {} if where is None else {"where": where}
    truth = case.truth(x, scale=scale, bias=bias, cotangent=dy, epsilon=EPSILON, **options)
    found = (y, *vjp(jnp.asarray(dy)))
    for a, b in zip(found, (truth.y, truth.dx, truth.dscale, truth.dbias), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def test_loops_are_those_of_the_platform(monkeypatch):
    spec = Spec(resolve("n [h] (g [c])", (4, 6, 8), {"g": 2}))
    assert plan.usual_loops(spec) == XlaCpuLoops(spec)
    fast = plan.loops_for(spec, "xla", None)
    assert fast == XlaCpuLoops(spec, keep_low_mean=False, barriers=True, merge_last_axis=True)
    assert plan.loops_for(spec, "reference", None) == XlaCpuLoops(spec)
    monkeypatch.setattr(placement, "platform", lambda: "tpu")
    assert plan.usual_loops(spec) == XlaTpuLoops(spec, coarse="squares", sample=8)
    assert plan.loops_for(spec, "xla", None) == XlaTpuLoops(spec, coarse="squares", sample=8)
    monkeypatch.setattr(placement, "platform", lambda: "gpu")
    rows = Spec(resolve("n [c]", (4, 8)))
    alone, kept = plan.usual_loops(rows), PlainLoops(rows, coarse="squares", sample=8)
    assert alone == PlainLoops(rows, coarse="largest", derivatives=kept)
    assert (alone.for_derivatives(None), kept.for_derivatives(None)) == (kept, kept)
    assert alone.for_derivatives(jnp.ones(8, bool)) == alone
    monkeypatch.setattr(placement, "platform", lambda: "tpu")
    over_examples = Spec(resolve("[n h] c", (4, 6, 8)))
    assert plan.usual_loops(over_examples).near_zero == (jax.__version_info__ >= (0, 10))


@pytest.mark.parametrize(
    ("options", "said", "transposes"),
    [
        ({}, "a formula in plain JAX, which recomputes the statistics", "normalize_rows"),
        ({"axes": "[n] c"}, "a formula in plain JAX", "normalize"),
        (
            {"axis_name": "i"},
            "JAX's transpose of the formulas, since groups extend over devices",
            "",
        ),
        ({"dtype": complex}, "JAX's transpose of the formulas, since the output is complex", ""),
        (
            {"axes": "[n] c", "segments": np.zeros(4, int), "num_segments": 2},
            "JAX's transpose of the formulas, since groups are segments",
            "",
        ),
    ],
)
def test_the_plan_says_which_derivative_runs(options, said, transposes):
    """By the primitive that the program of the gradient has, or has not."""
    options = {"axes": "n [c]", **options}
    options |= {} if "segments" in options else {"implementation": "xla"}
    x = jnp.ones((4, 6), complex if options.pop("dtype", None) else jnp.float32)
    plan = jn.plan(x, **options)
    assert (plan.derivative, repr(plan).splitlines()[1]) == (said, f"  gradients: {said}")

    @partial(jax.vmap, axis_name="i")
    def gradient(x):
        return jax.grad(lambda x: abs(jn.standardize(x, **options)).sum(), holomorphic=False)(x)

    program = str(jax.make_jaxpr(gradient)(x[None]))
    found = {name for name in ("normalize", "normalize_rows") if f"jaxnorm_{name}_tr" in program}
    assert found == ({transposes} if transposes else set())


def test_a_traced_epsilon_leaves_the_derivative_to_jax():
    def said(epsilon):
        return jn.plan(jnp.ones((4, 6)), 1, epsilon=epsilon).derivative

    found = []
    jax.jit(lambda epsilon: found.append(said(epsilon)))(1e-5)
    assert found == ["JAX's transpose of the formulas, since epsilon is traced"]


def alone_and_for_gradients(norm, x):
    """Return the output twice: other loops may keep the statistics for gradients."""
    return norm(x), jax.vjp(norm, x)[0]


# the largest elements around the steps of the scale exponents, and the largest number there is
SIZES = [1e-30, 1.0, 2.0**49, 2.0**51, 2.0**75, 2.0**77, 2.0**101, 2.0**103, 3e38]


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2, 1e-35])
@pytest.mark.parametrize("axes", ["n [c]", "[n] c"])
@pytest.mark.parametrize("centered", [True, False])
def test_bfloat16_of_any_size(epsilon, axes, centered, elsewhere, rng):
    """Elements that differ from the largest by a factor of 1e3 at most, a row alike, and NaN."""
    options = {"centered": centered, "epsilon": epsilon, "dtype": jnp.float32}
    norm = jax.jit(lambda x: jn.standardize(x, axes, **options))
    both, axis = jax.jit(partial(alone_and_for_gradients, norm)), 1 if axes == "n [c]" else 0
    for size in SIZES:
        x = rng.uniform(-1, 1, (6, 512)) * np.float32(size)
        x[1] = size  # alike, in a group of rows
        x[2] = size * (1 - 2.0**-8 * (np.arange(512) == 7))  # but for one element's last bit
        x = jnp.asarray(x, jnp.bfloat16)
        exact = np.asarray(x, np.float64)
        mean = exact.mean(axis, keepdims=True) * centered
        var = ((exact - mean) ** 2).mean(axis, keepdims=True)
        truth = (exact - mean) / np.sqrt(var + epsilon)
        for found in both(x):
            assert np.abs(found - truth).max() <= 2e-6 * max(1, np.abs(truth).max()), size
            if centered and axis == 1:
                assert np.all(found[1] == 0), size
        wrong = norm(x.at[0, 0].set(jnp.nan))
        assert np.isnan(wrong[0]).all() if axis == 1 else np.isnan(wrong[:, 0]).all(), size


def test_gradients_of_bfloat16_of_any_size(elsewhere, rng):
    x, dy = (jnp.asarray(rng.uniform(-1, 1, (4, 64)), jnp.bfloat16) for _ in range(2))
    loss = lambda x: (jn.layer_norm(x, epsilon=1e-25) * dy).astype(jnp.float32).sum()
    gradient = jax.jit(jax.grad(loss))
    expected = gradient(x).astype(jnp.float32)
    for size in SIZES[1:-1]:
        found = gradient(x * jnp.bfloat16(size)).astype(jnp.float32) * jnp.float32(size)
        assert np.abs(found - expected).max() <= 2**-6 * np.abs(expected).max(), size


N = 4096
NOISE = np.random.default_rng(7).standard_normal(N)
FEW = np.arange(N) < N // 8  # what a sample takes
# The error relative to the largest element, of data that are hard for a shift from a sample.
HARD_FOR_SAMPLES = {
    "mean 1e2": (NOISE + 1e2, 1e-6),
    "mean 1e6": (NOISE + 1e6, 1e-6),
    "mean 1e7": (NOISE + 1e7, 1e-6),
    "scale 1e15": (NOISE * 1e15, 1e-6),
    "sorted": (np.sort(NOISE) + 1e4, 1e-6),
    "ramp": (np.linspace(0, 1e6, N), 1e-6),
    "outlier in the sample": (NOISE + 1e6 * (np.arange(N) == 0), 2e-6),
    "outlier beyond it": (NOISE + 1e6 * (np.arange(N) == N - 1), 2e-6),
    # the worst: the sample alike, and all else alike elsewhere
    "sample alike": (np.where(FEW, 3.3e5, 1e6 + 0.01 * NOISE), 4e-6),
    "sample alike, all else near": (np.where(FEW, 1e6, 1e6 + 10 + 1e-2 * NOISE), 4e-6),
}


def error_of(x, where=None):
    """The largest error of layer norm, relative to the largest element of its output."""
    x = x.astype(np.float32)
    norm = lambda x: jn.layer_norm(x, epsilon=1e-6, where=where)
    found = np.stack(alone_and_for_gradients(norm, jnp.asarray(x)[None]))
    weights = np.ones(len(x)) if where is None else np.asarray(where, np.float64)
    exact = x.astype(np.float64)
    mean = np.average(exact, weights=weights)
    deviation = np.where(weights > 0, exact - mean, 0)
    truth = deviation / np.sqrt(np.average(deviation**2, weights=weights) + 1e-6)
    return np.abs(found - truth).max() / np.abs(truth).max()


@pytest.mark.parametrize("name", HARD_FOR_SAMPLES)
def test_a_shift_from_a_sample_is_near_enough(name, elsewhere):
    x, bound = HARD_FOR_SAMPLES[name]
    assert error_of(x) <= bound


@pytest.mark.parametrize("value", [0.1, 77, 1000, 1003, 1e15])
def test_constants_are_exact(value, elsewhere):
    x = jnp.full((2, N), value, jnp.float32).at[1, -1].add(jnp.float32(value))
    for y in alone_and_for_gradients(jn.layer_norm, x):
        assert np.all(y[0] == 0)


@pytest.mark.parametrize("kept", ["few", "none", "one"])
@pytest.mark.parametrize("kind", ["bool", "weights"])
def test_a_sample_that_a_mask_hides_is_not_taken(kept, kind, elsewhere, monkeypatch):
    """With few, none or one of its elements left; no NaN behind the mask comes out.

    A CPU adds up weighted squares one after the other, which costs digits whatever the shift is.
    """
    where = ~FEW | (np.arange(N) % 100 == 0 if kept == "few" else np.arange(N) < (kept == "one"))
    x = np.where(where, NOISE + 1e5 * ~FEW, np.nan)
    where = where if kind == "bool" else np.where(where, 0.25 + 0.5 * (NOISE > 0), 0)
    where = jnp.asarray(where, bool if kind == "bool" else jnp.float32)
    y = jn.layer_norm(jnp.asarray(x, jnp.float32)[None], where=where[None])
    assert np.all(np.isfinite(y))
    filled = np.where(np.isnan(x), 0, x)
    found = error_of(filled, where)
    monkeypatch.setattr(plan, "SAMPLE", 0)
    jax.clear_caches()
    assert found <= error_of(filled, where) + 4e-6
    assert kind == "weights" or found <= 4e-6


def test_one_read_of_the_data(elsewhere):
    """But for a sample: the sum and the sum of squares are of the same elements, at once."""
    x = jax.ShapeDtypeStruct((64, N), jnp.float32)
    program = jax.jit(lambda x: jn.moments(x, 1)).lower(x).as_text()
    reduced = re.findall(r"stablehlo.reduce.*?tensor<64x(\d+)xf32>", program)
    whole = [size for size in reduced if size == str(N)]
    sampled = elsewhere == "tpu"
    assert len(whole) == 3 - sampled
    assert (str(N // 8) in reduced) == sampled


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_that_are_kept_take_one_read(masked, elsewhere):
    """On a GPU each read is a kernel then; but a mask would take a branch, for which it waits."""
    x = jax.ShapeDtypeStruct((64, N), jnp.float32)
    where = jnp.arange(N) % 3 > 0 if masked else None
    keep = jax.jit(lambda x: jax.vjp(partial(jn.layer_norm, where=where), x))
    program = keep.lower(x).as_text()
    reduced = re.findall(r"stablehlo.reduce.*?tensor<64x(\d+)xf32>", program)
    passes = masked and elsewhere == "gpu"
    assert (str(N // 8) in reduced) != passes
    assert ("stablehlo.case" in program) == (masked and elsewhere == "tpu")
    assert masked or reduced.count(str(N)) == 2


class TestNearZero:
    """Sums around 0, and around a sample where some mean is far from 0."""

    @pytest.fixture(autouse=True)
    def on_a_tpu(self, monkeypatch):
        jax.clear_caches()
        monkeypatch.setattr(plan, "BRANCHES", (0,))  # with every version of JAX
        monkeypatch.setattr(placement, "platform", lambda: "tpu")
        monkeypatch.setattr(scaling, "LANES", 1)
        yield
        jax.clear_caches()

    @staticmethod
    def errors(x):
        """The errors of output, mean and variance, relative to the largest, and to deviations."""
        y, moments = jax.jit(partial(jn.batch_norm, epsilon=EPSILON))(x)
        double = np.asarray(x, np.float64)
        mean, var = double.mean((0, 1)), double.var((0, 1))
        z = (double - mean) / np.sqrt(var + EPSILON)
        return (
            np.abs(np.asarray(y, np.float64) - z).max() / np.abs(z).max(),
            (np.abs(np.asarray(moments.mean, np.float64) - mean) / np.sqrt(var)).max(),
            (np.abs(np.asarray(moments.var, np.float64) - var) / var).max(),
        )

    # 2.64 is the root of 7, up to which sums around 0 stay
    @pytest.mark.parametrize("mean", [0.0, 1.0, 2.6, 2.7, 30.0, 1e4])
    def test_any_mean_costs_few_digits(self, mean, rng):
        x = jnp.asarray(rng.normal(mean, 1, (16, 256, 3)), jnp.float32)
        y, of_mean, of_var = self.errors(x)
        assert y <= 1e-6
        assert of_mean <= max(1e-6, mean * 2**-23)
        assert of_var <= 4e-6

    def test_one_channel_far_from_zero_moves_all(self, rng):
        x = jnp.asarray(rng.normal([0, 1e5, 0], 1, (16, 256, 3)), jnp.float32)
        assert self.errors(x)[0] <= 1e-6

    def test_bfloat16_of_any_size(self, rng):
        sizes = np.array([1, 1e20, 3e38, 1e-3])
        x = jnp.asarray(rng.uniform(-1, 1, (16, 256, 4)) * sizes, jnp.bfloat16)
        assert self.errors(x)[0] <= 2**-8

    def test_equal_elements_are_the_bias(self, rng):
        x = jnp.broadcast_to(jnp.asarray([0.0, 0.1, 1e10, 77.3]), (6, 11, 4))
        y, _ = jn.batch_norm(x, bias=jnp.full(4, 0.5))
        np.testing.assert_array_equal(y, np.full(x.shape, 0.5, np.float32))

    def test_masked_elements_do_not_count(self, rng):
        x = jnp.asarray(rng.normal([0, 100, -3], 1, (16, 64, 3)), jnp.float32)
        where = rng.random((16, 64, 1)) < 0.5
        y, _ = jn.batch_norm(jnp.where(where, x, jnp.nan), where=where, epsilon=EPSILON)
        own = np.asarray(x, np.float64)[np.broadcast_to(where, x.shape)].reshape(-1, 3)
        z = (own - own.mean(0)) / np.sqrt(own.var(0) + EPSILON)
        found = np.asarray(y)[np.broadcast_to(where, x.shape)].reshape(-1, 3)
        assert np.abs(found - z).max() <= 1e-5

    def test_batches_that_are_mapped_over_agree_on_one_branch(self, rng):
        x = jnp.asarray(rng.normal([0, 100, -3], 1, (4, 16, 3)), jnp.float32)
        norm = lambda x: jn.batch_norm(x, epsilon=EPSILON)[0]
        assert " cond[" in str(jax.make_jaxpr(jax.vmap(norm))(x))
        for a, b in zip(jax.vmap(norm)(x), map(norm, x), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
        gradient = lambda f: jax.grad(lambda x: (f(x) ** 3).sum())(x)
        apart = gradient(lambda x: jnp.stack([norm(a) for a in x]))
        np.testing.assert_allclose(gradient(jax.vmap(norm)), apart, atol=2e-4)

    def test_devices_agree_on_a_branch(self, rng):
        """Some of them have channels far from 0, others have none."""
        x = jnp.asarray(rng.normal(0, 1, (16, 8, 3)), jnp.float32).at[:2].add(1e3)
        mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        norm = lambda x: jn.batch_norm(x, axis_name="d", epsilon=EPSILON)[0]
        spec = jax.sharding.PartitionSpec("d")
        y = jax.jit(jax.shard_map(norm, mesh=mesh, in_specs=spec, out_specs=spec))(x)
        np.testing.assert_allclose(y, jn.batch_norm(x, epsilon=EPSILON)[0], atol=1e-5)
