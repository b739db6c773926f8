"""Test the norms whose output has a formula of its own: GRN, FRN with a threshold, EvoNorm, RevIN.

The truth is each paper's formula in NumPy, in float64, and gradients are its differences.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from derivatives import check_derivatives
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import worst

import jaxnorm as jn

SHAPE, SPATIAL = (3, 4, 5, 8), (1, 2)


def average(values, w, axes):
    total = w.sum(axes, keepdims=True)
    return (w * values).sum(axes, keepdims=True) / np.where(total > 0, total, 1)


def variance(x, w, axes):
    return average((x - average(x, w, axes)) ** 2, w, axes)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def true_grn(x, w, epsilon, held):
    g = np.sqrt((w * x**2).sum(SPATIAL, keepdims=True))
    present = w.max(SPATIAL, keepdims=True) > 0
    channels = np.maximum(present.sum(-1, keepdims=True), 1)
    return x * g / (g.sum(-1, keepdims=True) / channels + epsilon)


def true_frn(x, w, epsilon, held):
    return x / np.sqrt(average(x**2, w, SPATIAL) + epsilon)


def true_s0(x, w, epsilon, v):
    split = (*x.shape[:-1], 4, -1)
    var = variance(x.reshape(split), w.reshape(split), (1, 2, 4)) + np.zeros((1, 1, 1, 1, 2))
    return x * sigmoid(v * x) / np.sqrt(var.reshape(-1, 1, 1, 8) + epsilon)


def true_b0(x, w, epsilon, v, running=None):
    batch = variance(x, w, (0, 1, 2)) if running is None else running
    instance = variance(x, w, SPATIAL)
    return x / np.maximum(np.sqrt(batch + epsilon), v * x + np.sqrt(instance + epsilon))


@dataclass(frozen=True)
class Own:
    """A norm as ``call(x, v, scale, bias, **options) -> y``, and its formula before the scale.

    Attributes:
      name: the name of the row.
      call: the norm.
      formula: ``formula(x, w, epsilon, v)`` in NumPy, for x that is 0 where it has no weight.
      axes: a group within which an error is measured.
      residual: whether x is added in the end.
      least: whether v is the least output.
    """

    name: str
    call: Callable
    formula: Callable
    axes: tuple[int, ...] = SPATIAL
    residual: bool = False
    least: bool = False

    def __str__(self):
        return self.name

    def truth(self, x, v, scale, bias, where=None, epsilon=1e-5):
        x, v, scale, bias = (np.asarray(a).astype(np.float64) for a in (x, v, scale, bias))
        w = np.ones(x.shape) if where is None else np.broadcast_to(where, x.shape) * 1.0
        x = np.where(w > 0, x, 0)
        y = self.formula(x, w, epsilon, v) * scale + bias + x * self.residual
        y = np.maximum(y, v) if self.least else y
        return np.where(w > 0, y, 0)


RUNNING = np.linspace(0.5, 2, 8).astype(np.float32)
MOMENTS = jn.Moments(np.float32(1), np.zeros(8, np.float32), RUNNING)
CASES = [
    Own(
        "global_response",
        lambda x, v, scale, bias, **o: jn.global_response_norm(x, scale=scale, bias=bias, **o),
        true_grn,
        axes=(1, 2, 3),
        residual=True,
    ),
    Own(
        "filter_response",
        lambda x, v, scale, bias, **o: jn.filter_response_norm(
            x, threshold=v, scale=scale, bias=bias, **o
        ),
        true_frn,
        least=True,
    ),
    Own(
        "evonorm_s0",
        lambda x, v, scale, bias, **o: jn.evonorm_s0(x, v, 4, scale=scale, bias=bias, **o),
        true_s0,
    ),
    Own(
        "evonorm_b0",
        lambda x, v, scale, bias, **o: jn.evonorm_b0(x, v, scale=scale, bias=bias, **o)[0],
        true_b0,
    ),
    Own(
        "evonorm_b0, running",
        lambda x, v, scale, bias, **o: jn.evonorm_b0(
            x, v, running=MOMENTS, scale=scale, bias=bias, **o
        )[0],
        partial(true_b0, running=RUNNING),
    ),
]
each = pytest.mark.parametrize("case", CASES, ids=str)


def quickly(*names):
    """Run a law for the cases of these names at once, and for the others in the long sweeps."""
    quick = [case for case in CASES if case.name in names]
    return pytest.mark.parametrize("case", long_sweep(CASES, quick=quick), ids=str)


@pytest.fixture
def params(rng):
    """Return v, scale and bias; the scale of some channels is negative."""
    draw = lambda low, high: rng.uniform(low, high, 8).astype(np.float32)
    return draw(-0.5, 1.5), draw(-1.5, 1.5), draw(-1, 1)


def drawn(rng, shape=SHAPE):
    return (rng.standard_normal(shape) * rng.uniform(0.3, 3, shape[-1])).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(case, x, params, where, dy):
    y, pullback = jax.vjp(lambda *a: case.call(*a, epsilon=1e-5, where=where), x, *params)
    return y, pullback(dy)


def slope_of_truth(case, arrays, steps, where, dy, h=1e-5):
    """Return the derivative of ``sum(dy * y)`` along steps, by central differences in float64."""
    at = lambda t: (
        dy * case.truth(*(a + t * step for a, step in zip(arrays, steps, strict=True)), where)
    ).sum()
    return (at(h) - at(-h)) / (2 * h)


@each
@pytest.mark.parametrize("kind", long_sweep(["mask", "weights"], quick=["mask"]))
def test_values_and_gradients_are_those_of_the_paper(case, kind, params, rng):
    x, dy = drawn(rng), rng.standard_normal(SHAPE)
    where = rng.random(SHAPE) < 0.7 if kind == "mask" else rng.integers(0, 3, SHAPE) / 2
    where = where.astype(bool if kind == "mask" else np.float32)
    given = np.where(where > 0, x, np.nan).astype(np.float32)
    y, gradients = value_and_gradients(case, given, params, where, dy.astype(np.float32))
    assert worst(y, case.truth(x, *params, where), case.axes) <= 1e-6
    assert (np.asarray(y)[where == 0] == 0).all()
    assert (np.asarray(gradients[0])[where == 0] == 0).all()
    arrays = [a.astype(np.float64) for a in (np.where(where > 0, x, 0), *params)]
    found = [np.asarray(a, np.float64) for a in gradients]
    for _ in range(4):
        for i, array in enumerate(arrays):
            steps = [0 * a for a in arrays]
            steps[i] = rng.standard_normal(array.shape)
            slope = slope_of_truth(case, arrays, steps, where, dy)
            along = found[i] * steps[i]
            assert abs(along.sum() - slope) <= 2e-6 * np.abs(along).sum() + 1e-8


@quickly("evonorm_s0", "evonorm_b0")
@pytest.mark.parametrize("mean", [1e2, 1e6])
def test_large_means_cost_no_digits(case, mean, params, rng):
    """With a bias of 0, next to which no output cancels."""
    v, scale, _ = params
    given = (mean + rng.standard_normal(SHAPE)).astype(np.float32), abs(v), scale, 0 * v
    y = case.call(*given, epsilon=1e-5)
    assert worst(y, case.truth(*given), case.axes) <= 5e-7


@pytest.mark.parametrize("dtype", long_sweep(["bfloat16", "float16"], quick=["bfloat16"]))
@quickly("evonorm_b0")
def test_half_precision_is_rounded_once(case, dtype, params, rng):
    x, dy = jnp.asarray(drawn(rng), dtype), rng.standard_normal(SHAPE).astype(np.float32)
    truth, finfo = case.truth(x, *params), jnp.finfo(dtype)
    y = case.call(x, *params, epsilon=1e-5)
    assert y.dtype == dtype
    # 2**-8: of what cancels next to the bias, float32 keeps as much
    spacing = float(finfo.eps) * 2.0 ** np.floor(np.log2(np.maximum(np.abs(truth), 2.0**-8)))
    assert (np.abs(np.asarray(y).astype(np.float64) - truth) <= 0.51 * spacing).all()
    gradient = jax.grad(lambda x: (dy * case.call(x, *params, dtype="float32")).sum())
    dx, exact = gradient(x), gradient(x.astype(jnp.float32))
    assert dx.dtype == dtype
    # XLA may add up in another order
    close = np.abs(dx.astype(np.float32) - exact) <= 0.51 * float(finfo.eps) * abs(exact) + 1e-5
    assert close.all()


@pytest.mark.parametrize("size", long_sweep([1e-30, 1e30], quick=[1e30]))
@pytest.mark.parametrize("dtype", long_sweep(["bfloat16", "float32"], quick=["bfloat16"]))
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=str)
def test_elements_may_have_any_size(case, dtype, size, params, rng):
    """By powers of two, with v in its unit, values are those of elements of size 1."""
    v, scale, bias = (jnp.asarray(a) for a in params)
    unit, x = 2.0 ** round(np.log2(size)), jnp.asarray(drawn(rng), dtype)
    # B0 has v * x next to a deviation, which grows with x
    own_v = v if case.name == "evonorm_b0" else v * np.float32(1 / unit)
    options = {"scale": scale, "bias": 0 * bias, "epsilon": 0.0, "dtype": "float32"}
    like = partial(case.call, v=v, **options)
    call = partial(case.call, v=own_v, full_range=dtype == "float32", **options)
    factor = unit if case.residual else 1
    big = x * jnp.asarray(unit, dtype)
    assert worst(call(big), np.float64(like(x)) * factor, case.axes) <= 4e-7
    dx, wanted = (jax.grad(lambda x, f=f: f(x).sum())(a) for f, a in ((call, big), (like, x)))
    dx, wanted = (np.asarray(a).astype(np.float64) for a in (dx, wanted))
    bound = {"bfloat16": 1e-2, "float32": 1e-5}[dtype]
    assert worst(dx, wanted * factor / unit, case.axes) <= bound


@each
def test_a_group_may_be_empty_or_have_one_element(case, params, rng):
    """Values and gradients are finite, and those of the paper, also without an epsilon."""
    x, where = drawn(rng), rng.random(SHAPE) < 0.7
    where[0], where[1, ..., :2], where[2, ..., 3] = False, False, False
    where[2, 1, 1, 3] = True
    dy = np.ones(SHAPE, np.float32)
    y, gradients = value_and_gradients(case, np.where(where, x, np.inf), params, where, dy)
    assert worst(y, case.truth(x, *params, where), case.axes) <= 1e-6
    assert all(np.isfinite(a).all() for a in gradients)
    constant = np.full((2, 1, 1, 8), 3, np.float32)
    both = jax.jit(jax.value_and_grad(lambda x: case.call(x, *params, epsilon=0.0).sum()))
    for given in (constant, 0 * constant):
        assert all(np.isfinite(a).all() for a in both(given))


@quickly("evonorm_b0")
def test_nothing_changes_under_jit_vmap_and_checkpoint(case, params, rng):
    x = np.stack([drawn(rng) for _ in range(3)])
    call = lambda x: case.call(x, *params, epsilon=1e-5)
    loop = np.stack([call(a) for a in x])
    for found in (jax.vmap(call)(x), jax.jit(jax.vmap(call))(x), jax.lax.map(call, x)):
        assert worst(found, loop, (2, 3)) <= 5e-7
    slope = jax.vmap(jax.grad(lambda x: jax.checkpoint(call)(x).sum()))(x)
    alone = np.stack([jax.grad(lambda x: call(x).sum())(a) for a in x])
    assert worst(slope, alone, (2, 3)) <= 1e-6


@quickly("global_response")
@pytest.mark.usefixtures("x64")
def test_derivatives_of_both_modes_and_orders_agree(case, params, rng):
    where = rng.random((2, 3, 2, 8)) < 0.8
    call = lambda x, *params: case.call(x, *params, where=where)
    check_derivatives(call, (drawn(rng, where.shape).astype(float), *map(np.float64, params)))


@pytest.mark.parametrize("axis", [0, 1])
@quickly("evonorm_b0")
def test_sharded_arrays_give_what_whole_ones_give(case, axis, params, rng):
    x = drawn(rng, (4, 8, 3, 8))
    mesh = Mesh(np.array(HOST[:4]), ("d",))
    spread = jax.device_put(x, NamedSharding(mesh, P(*[None] * axis, "d")))
    norm = jax.jit(lambda x: case.call(x, *params))
    assert worst(norm(spread), norm(x), (1, 2)) <= 1e-6


def test_the_batch_of_b0_extends_over_devices(params, rng):
    """An example does not: the deviation of each stays its own."""
    x, (v, scale, bias) = drawn(rng, (4, 3, 5, 8)), params
    x[2:] = 100 + 5 * x[2:]
    norm = partial(jn.evonorm_b0, v=v, scale=scale, bias=bias)
    options = {"axis_name": "d", "full_range": True}
    y, batch = jax.vmap(partial(norm, **options), axis_name="d")(x.reshape(2, 2, 3, 5, 8))
    whole, moments = norm(x)
    assert worst(y.reshape(x.shape), whole, SPATIAL) <= 1e-6
    np.testing.assert_allclose(batch.var[0], moments.var, rtol=1e-6)
    assert moments.var.shape == (1, 1, 1, 8)
    truth = variance(x.astype(np.float64), np.ones(x.shape), (0, 1, 2))
    np.testing.assert_allclose(moments.var, truth, rtol=1e-6)


def test_channels_may_be_any_axis(params, rng):
    x, (v, scale, bias) = drawn(rng), params
    for case, call in (
        (CASES[0], jn.global_response_norm),
        (CASES[1], partial(jn.filter_response_norm, threshold=v)),
        (CASES[2], partial(jn.evonorm_s0, v=v, num_groups=4)),
        (CASES[3], lambda *a, **o: jn.evonorm_b0(*a, v=v, **o)[0]),
    ):
        first = call(np.moveaxis(x, -1, 1), feature_axes=1, scale=scale, bias=bias, epsilon=1e-5)
        assert worst(np.moveaxis(first, 1, -1), case.truth(x, *params), case.axes) <= 1e-6


def test_a_channel_of_zeros_has_a_finite_response_and_gradient():
    """JAX's own norm has gradient NaN there, and the length of a strong channel no effect."""
    x = np.zeros((1, 4, 3), np.float32)
    x[..., 1:] = [[[3, 1e-25]]]
    twice = np.full(3, 2, np.float32)
    call = lambda x: jn.global_response_norm(x, scale=twice, full_range=True, epsilon=0.0)
    np.testing.assert_allclose(call(x)[0, 0], [0, 3 * (1 + 2 * 3), 1e-25], rtol=1e-6)
    dx = jax.grad(lambda x: call(x).sum())(x)[0, 0]
    # of the weak channel, by the mean: -(sum of 2 x g) / (3 mean**2) x / g, with g = 6
    np.testing.assert_allclose(dx, [1, 7, 1 - 2 * 12 * 6 / (3 * 2**2) / 2], rtol=1e-6)


def test_tokens_are_positions_of_global_response_norm(params, rng):
    x, (_, scale, bias) = drawn(rng), params
    tokens = jn.global_response_norm(x.reshape(3, 20, 8), scale=scale, bias=bias)
    whole = jn.global_response_norm(x, scale=scale, bias=bias)
    np.testing.assert_allclose(tokens.reshape(SHAPE), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(jn.global_response_norm(x, scale=0 * scale), x)


def test_epsilon_of_filter_response_norm_may_be_learned(rng):
    x = drawn(rng, (2, 1, 1, 8))
    norm = lambda e: jn.filter_response_norm(x, epsilon=1e-6 + abs(e)).sum()
    slope = jax.grad(norm)(np.float32(0.25))
    truth = -0.5 * (x / (x.astype(np.float64) ** 2 + 0.250001) ** 1.5).sum()
    np.testing.assert_allclose(slope, truth, rtol=1e-5)


X, V = np.ones((2, 3, 8), np.float32), np.ones(8, np.float32)
ERRORS = [
    (lambda: jn.global_response_norm(X[0]), ValueError, "global response norm must have an axis"),
    (
        lambda: jn.global_response_norm(X, scale=V[:3]),
        ValueError,
        "scale must have the shape of the feature axes, (8,)",
    ),
    (
        lambda: jax.jit(lambda e: jn.global_response_norm(X, epsilon=e))(1e-6),
        TypeError,
        "epsilon must be a static number: got a traced value",
    ),
    (
        lambda: jn.filter_response_norm(X, threshold=V[:3]),
        ValueError,
        "threshold must have the shape of the feature axes, (8,)",
    ),
    (
        lambda: jn.filter_response_norm(X.astype(complex), threshold=V),
        TypeError,
        "x must be real: got complex",
    ),
    (lambda: jn.filter_response_norm(X, tau=V), TypeError, "tau must be an argument of"),
    (lambda: jn.evonorm_s0(X, V), ValueError, "num_groups must be positive and divide the"),
    (lambda: jn.evonorm_s0(X, V[:3], 4), ValueError, "v must have the shape of the feature axes"),
    (lambda: jn.evonorm_s0(X, V, 4, feature_axes=0), ValueError, "evonorm_s0 must have one axis"),
    (lambda: jn.evonorm_b0(X.astype(int), V), TypeError, "x must be floating point: got int"),
    (lambda: jn.evonorm_b0(X[0], V), ValueError, "evonorm_b0 must have an axis to reduce"),
    (lambda: jn.evonorm_b0(X, V, running=V), TypeError, "running must be Moments: got ndarray"),
    (
        lambda: jn.evonorm_b0(X, V, implementation="native"),
        ValueError,
        "implementation='native' has no kernel for this norm",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[row[2] for row in ERRORS])
def test_what_does_not_fit_is_said_in_words(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_plans_say_how_gradients_are_computed():
    """Kernels take what is an RMS norm over positions, and no formula of its own."""
    from jaxnorm.norms import response

    call = response.prepare(X, response.unsplit(X.shape, (1,)), (2,), formula=lambda *_: None)
    plan = call.plan()
    assert plan.implementation == "xla"
    assert plan.derivative.endswith("since the output has a formula of its own")
