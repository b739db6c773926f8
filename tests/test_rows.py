"""Gradients of large rows, each result in a loop of its own, held to the laws on rows small enough for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME
from derivatives import check_derivatives
from jax.sharding import PartitionSpec as P
from test_accuracy import HARD, check
from test_transforms import shard_map, ulps

import jaxnorm as jn
from jaxnorm import loops, sets
from jaxnorm.engine import derivatives

NORMS = {
    "layer": lambda x, s, b: jn.layer_norm(x, scale=s, bias=b),
    "layer alone": lambda x, s, b: jn.layer_norm(x),
    "layer by std": lambda x, s, b: jn.layer_norm(x, scale=s, bias=b, correction=1, epsilon_in="std"),
    "rms": lambda x, s, b: jn.rms_norm(x, scale=s),
    "layer of images": lambda x, s, b: jn.standardize(x, (-2, -1), scale=jnp.cos(x), bias=b[0]),
    "layer over the middle": lambda x, s, b: jn.standardize(x, -2, scale=s[:3, None], bias=b[:3, None]),
    "gain per row": lambda x, s, b: jn.standardize(x, -1, scale=x[..., :1], bias=b),
}


@pytest.fixture(autouse=True, scope="module", params=["cpu", pytest.param("default", marks=pytest.mark.slow)])
def as_if_large(request):
    """Rows of any size are taken for large ones, and computed as on a CPU, or as elsewhere."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXNORM_IMPLEMENTATION", "xla")
        for module, name in ((derivatives, "SMALL"), (derivatives, "WIDE"), (loops, "SMALL"), (sets, "MANY"), (loops, "MANY")):
            patch.setattr(module, name, 0)
        patch.setattr(jax.lax, "platform_dependent", lambda *arrays, **branches: branches[request.param](*arrays))
        yield
    jax.clear_caches()


@pytest.fixture
def arguments(rng):
    return [jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 3, 6), (6,), (6,))]


@pytest.mark.parametrize("name", NORMS)
def test_they_are_computed_as_large_ones(name, arguments):
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda *a: NORMS[name](*a).sum()))(*arguments))
    assert "jaxnorm_standardize_rows_transpose" in jaxpr


@pytest.mark.parametrize("name", NORMS)
def test_derivatives_of_both_modes_and_two_orders(name, x64, rng):
    arguments = [jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 3, 6), (6,), (6,))]
    check_derivatives(lambda *a: jnp.sin(NORMS[name](*a)), arguments)


@pytest.mark.parametrize("name", NORMS)
def test_vmap_and_shard_map_and_scan_equal_a_loop(name, arguments):
    x, scale, bias = arguments
    gradients = jax.jit(jax.grad(lambda *a: jnp.sin(NORMS[name](*a)).sum(), (0, 1, 2)))
    alone = [gradients(one, scale, bias) for one in x]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    mesh = jax.make_mesh((2,), ("n",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.jit(shard_map(gradients, mesh=mesh, in_specs=(P("n"), P(), P()), out_specs=(P("n"), P(), P())))
    same(jax.vmap(gradients, (0, None, None))(x, scale, bias), expected)
    same(jax.lax.scan(lambda c, one: (c, gradients(one, scale, bias)), 0, x)[1], expected)
    same(sharded(x, scale, bias), gradients(x, scale, bias))


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert ulps(one, other) <= 4 if other.any() else not one.any()


@pytest.mark.parametrize("hard", HARD, ids=str)
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_hard_inputs(name, hard, rng):
    check(BY_NAME[name], hard, rng)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_bfloat16_are_those_of_float32_rounded(name, arguments):
    rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in arguments]
    cotangent = jnp.ones_like(rounded[0])
    gradients = jax.jit(lambda arguments, cotangent: jax.vjp(NORMS[name], *arguments)[1](cotangent))
    want = gradients(rounded, cotangent)
    found = gradients([rounded[0].astype(jnp.bfloat16), *rounded[1:]], cotangent.astype(jnp.bfloat16))
    for one, other in zip(found, want, strict=True):
        bound = 2**-8 if one.dtype == jnp.bfloat16 else 1e-6
        assert jnp.abs(one.astype(jnp.float32) - other).max() <= bound * jnp.abs(other).max() + 1e-6


@pytest.mark.parametrize("value", [0.0, 0.1, 3.3, 1e6 + 0.3, 1e10])
def test_constant_rows_give_the_bias_and_finite_gradients(value):
    x, bias = jnp.full((4, 77), value, jnp.float32), jnp.linspace(0, 1, 77)
    one = lambda x: jn.layer_norm(x, bias=bias)  # noqa: E731
    for norm in (one, jax.vmap(one)):
        y, pullback = jax.vjp(norm, x)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
        assert jnp.isfinite(pullback(jnp.ones_like(y))[0]).all()
