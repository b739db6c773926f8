"""Test derivatives of every order and mode, and what reverse mode stores."""

from functools import partial
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DISTINCT, HOST, KINDS, laws, long_sweep
from derivatives import check_derivatives

import jaxnorm as jn
from jaxnorm.engine.primitives import linear


@pytest.mark.parametrize(
    "options", long_sweep([{}, {"masked": True}], quick=[{}]), ids=["plain", "masked"]
)
@laws(DISTINCT, quick=KINDS[:2])
def test_derivatives_of_both_modes_and_two_orders(case, implementation, options, rng, x64):
    shape = tuple(min(size, 6) for size in case.shape) if case.split is None else case.shape
    x = jnp.asarray(rng.standard_normal(shape))
    where = jnp.asarray(rng.random(shape) < 0.7) if options else None
    weights = jnp.asarray(rng.standard_normal(shape))
    check_derivatives(lambda x: jnp.sin(case(x, where=where)) * weights, (x,))


VARIED = [
    {"correction": 1},
    {"epsilon_in": "std"},
    {"correction": 1, "epsilon_in": "std"},
    {"epsilon": 0.0},
    {"correction": 1, "epsilon_in": "max", "epsilon": 0.9},  # more than some deviations
]


@pytest.mark.parametrize("options", long_sweep(VARIED, quick=VARIED[2::2]), ids=str)
def test_derivatives_of_the_variants(options, rng, x64):
    x = jnp.asarray(rng.standard_normal((3, 5)))
    scale, bias = jnp.asarray(rng.standard_normal((2, 5)))
    call = lambda x, s, b: jnp.sin(jn.standardize(x, 1, scale=s[None], bias=b[None], **options))
    check_derivatives(call, (x, scale, bias))


@laws(DISTINCT, quick=KINDS[:1])
def test_hessian_jacobians_and_gradients_of_gradients_agree(case, implementation, rng, x64):
    shape = case.shape if case.split else tuple(min(size, 4) for size in case.shape)
    x = jnp.asarray(rng.standard_normal(shape))
    direction = jnp.asarray(rng.standard_normal(shape))

    def loss(x):
        return jnp.sin(case(x)).sum()

    @jax.jit
    def ways(x):
        gradient = jax.grad(loss)
        reverse_over_forward = jax.grad(lambda x: jax.jvp(loss, (x,), (direction,))[1])(x)
        reverse_over_reverse = jax.grad(lambda x: (gradient(x) * direction).sum())(x)
        return (
            jax.jvp(gradient, (x,), (direction,))[1],
            reverse_over_forward,
            reverse_over_reverse,
            gradient(x),
            jax.jacfwd(loss)(x),
        )

    forward_over_reverse, reverse_over_forward, reverse_over_reverse, gradient, by_jvp = ways(x)
    np.testing.assert_allclose(reverse_over_forward, forward_over_reverse, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(reverse_over_reverse, forward_over_reverse, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(by_jvp, gradient, rtol=1e-9, atol=1e-9)
    one = (
        jnp.asarray(rng.standard_normal((2, 3, 2, 2)))
        if case.name not in ("layer", "rms")
        else x[:2]
    )
    if case.name != "group":
        hessian = jax.jit(jax.hessian(loss))(one)
        transposed = jnp.transpose(hessian, (*range(one.ndim, 2 * one.ndim), *range(one.ndim)))
        np.testing.assert_allclose(hessian, transposed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("implementation", long_sweep(["xla", "reference"], quick=["xla"]))
@pytest.mark.parametrize(
    ("dtype", "given"), [("float64", "float32"), ("float32", "float64"), ("float16", "float64")]
)
@pytest.mark.parametrize("axes", [0, 1])
def test_gradients_of_an_output_of_another_dtype(axes, given, dtype, implementation, rng, x64):
    """They are computed in the dtype of the statistics, that of x and at least float32, and have
    that of x.
    """
    x, dy = jnp.asarray(rng.standard_normal((4, 5)), given), rng.standard_normal((4, 5))
    options = {"scale": jnp.ones((1, 5), given), "implementation": implementation}

    @jax.jit
    def run(x, dy):
        y, pullback = jax.vjp(lambda x: jn.standardize(x, axes, dtype=dtype, **options), x)
        _, truth = jax.vjp(lambda x: jn.standardize(x, axes, **options), x.astype(jnp.float64))
        return y, pullback(dy)[0], truth(dy.astype(jnp.float64))[0]

    y, dx, exact = run(x, dy.astype(dtype))
    assert (y.dtype, dx.dtype) == (dtype, given)
    np.testing.assert_allclose(
        dx, exact, rtol=0, atol=4 * float(jnp.finfo(given).eps) * np.abs(exact).max()
    )


def test_the_moments_of_batch_norm_are_differentiable(rng, x64):
    x = jnp.asarray(rng.standard_normal((5, 3)))

    def both(x):
        y, found = jn.batch_norm(x)
        return jnp.sin(y).sum() + (found.mean**2).sum() + (found.var**3).sum()

    check_derivatives(both, (x,))
    truth = jax.grad(lambda x: (x.mean(0) ** 2).sum() + (x.var(0) ** 3).sum())(x)
    alone = jax.grad(lambda x: (lambda m: (m.mean**2).sum() + (m.var**3).sum())(jn.moments(x, 0)))(
        x
    )
    np.testing.assert_allclose(alone, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shown", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)], ids=str)
def test_what_a_loss_leaves_out_of_batch_norm_has_no_part_in_its_gradient(shown, rng, x64):
    x = jnp.asarray(rng.standard_normal((5, 3)))

    def loss(x):
        y, found = jn.batch_norm(x)
        parts = jnp.sin(y).sum(), (found.mean**2).sum(), (found.var**3).sum()
        return sum(compress(parts, shown))

    check_derivatives(loss, (x,))


def test_merging_is_differentiable(rng, x64):
    x = jnp.asarray(rng.standard_normal((4, 3)))
    check_derivatives(
        lambda x: (lambda m: jnp.sin(m.mean) + m.var**2)(jn.moments(x, 0).merge(1)), (x,)
    )


def test_normalize_is_differentiable_in_everything(rng, x64):
    x, scale = jnp.asarray(rng.standard_normal((4, 3))), jnp.asarray(rng.standard_normal((1, 3)))

    def call(x, mean, var, scale):
        return jn.normalize(x, jn.Moments(jnp.ones(()), mean, var), scale=scale)

    check_derivatives(call, (x, scale * 2, scale**2 + 0.1, scale))


NORMS = {
    "layer": (lambda x, s, b: jn.layer_norm(x, scale=s, bias=b), (256, 64)),
    "layer_wide": (lambda x, s, b: jn.layer_norm(x, scale=s, bias=b), (64, 1024)),
    "rms": (lambda x, s, b: jn.rms_norm(x, scale=s), (256, 64)),
    "batch": (lambda x, s, b: jn.batch_norm(x, scale=s, bias=b), (256, 64)),
    "batch_conv": (lambda x, s, b: jn.batch_norm(x, scale=s, bias=b)[0], (8, 16, 16, 64)),
    "instance": (lambda x, s, b: jn.instance_norm(x, scale=s, bias=b), (8, 16, 16, 64)),
    "group": (lambda x, s, b: jn.group_norm(x, 32, scale=s, bias=b), (8, 16, 16, 64)),
}


KEPT = [("float32", 4.2), ("bfloat16", 2.2)]  # bytes for each element, and a little


@pytest.mark.parametrize(("dtype", "bound"), long_sweep(KEPT, quick=KEPT[1:]))
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("jitted", long_sweep([False, True], quick=[False]), ids=["eager", "jit"])
def test_reverse_mode_keeps_the_input_and_little_else(name, dtype, bound, jitted, rng):
    norm, shape = NORMS[name]
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    scale, bias = jnp.ones(shape[-1]), jnp.zeros(shape[-1])
    _, pullback = jax.vjp(jax.jit(norm) if jitted else norm, x, scale, bias)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "nbytes"))
    assert kept / x.size <= bound


@pytest.mark.parametrize("case", long_sweep(CASES, quick=KINDS), ids=str)
def test_a_single_element_gives_the_bias_and_no_gradient(case, rng):
    if case.name in ("rms", "switchable"):
        pytest.skip("not centered; a blend of several groups")
    shape = tuple(1 if axis in case.axes else size for axis, size in enumerate(case.split_shape))
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    y, pullback = jax.vjp(
        lambda x: jn.standardize(x, case.axes, bias=jnp.full((1,) * len(shape), 0.5)), x
    )
    assert (np.asarray(y) == 0.5).all()
    assert (np.asarray(pullback(jnp.ones_like(y))[0]) == 0).all()


@pytest.mark.parametrize("epsilon_in", ["var", "std", "max"])
def test_gradients_of_gradients_of_a_constant_are_finite_in_a_loop(epsilon_in):
    """Where JAX before 0.12 differentiates what has a derivative of its own by itself."""
    x, direction = jnp.full((6, 4), 1.5), jnp.cos(jnp.arange(24.0)).reshape(6, 4)
    norm = partial(jn.standardize, axes=0, epsilon_in=epsilon_in)
    loss = lambda x: jax.lax.scan(lambda h, _: (norm(h), None), x, None, length=1)[0].sum()
    assert np.isfinite(jax.grad(lambda x: (jax.grad(loss)(x) * direction).sum())(x)).all()


@pytest.mark.parametrize("epsilon_in", ["std", "max"])
def test_a_variance_of_nan_shows_where_epsilon_meets_its_root(epsilon_in):
    unknown = jn.Moments(jnp.ones(()), jnp.zeros(()), jnp.asarray(jnp.nan))
    assert np.isnan(jn.normalize(jnp.ones((1, 2)), unknown, epsilon_in=epsilon_in)).all()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_transpose_is_traced_once(by_kernel):
    """Not once more for the program that it becomes part of, nor where a kernel computes it."""
    traced = []

    def doubled(name):
        def function(static, residuals, arguments):
            traced.append(name)
            return (2 * arguments[0],)

        return function

    twice = linear(
        f"twice_{by_kernel}",
        doubled("function"),
        doubled("transpose"),
        like=lambda _: (jnp.zeros(3),),
        batched=lambda static, size: static,
        results=1,
        kernels={"cpu": doubled("kernel")} if by_kernel else {},
    )
    with jax.default_device(HOST[0]):
        slope = jax.jit(jax.grad(lambda x: twice(None, (), (x,))[0].sum()))(jnp.arange(3.0))
    np.testing.assert_array_equal(slope, [2.0, 2.0, 2.0])
    assert traced.count("transpose") == (not by_kernel)
    assert traced.count("kernel") == by_kernel
