"""Test groups of channels in all their forms, by the laws and in every dtype."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from derivatives import check_derivatives
from jax.sharding import PartitionSpec as P
from test_transforms import shard_map, ulps

import jaxnorm as jn

SHAPE = (3, 5, 4, 12)
NORMS = {
    "group": lambda x, s, b, **o: jn.group_norm(x, 4, scale=s, bias=b, **o),
    "group alone": lambda x, s, b, **o: jn.group_norm(x, 4, **o),
    "group by std": lambda x, s, b, **o: jn.standardize(
        x, "n [h w] (g [c])", g=4, scale=s, correction=1, epsilon_in="std", **o
    ),
    "not centered": lambda x, s, b, **o: jn.standardize(
        x, "n [h w] (g [c])", g=4, scale=s, bias=b, centered=False, **o
    ),
    "of two names": lambda x, s, b, **o: jn.standardize(
        x, "n [h w] (a b [c])", a=2, b=2, scale=s, bias=b, **o
    ),
    "all channels": lambda x, s, b, **o: jn.standardize(x, "n [h w c]", scale=s, bias=b, **o),
    "of a batch": lambda x, s, b, **o: jn.standardize(
        x, "[n h w] (g [c])", g=4, scale=s, bias=b, **o
    ),
}


def given(rng, shape=SHAPE):
    return [jnp.asarray(rng.standard_normal(size)) for size in (shape, shape[-1:], shape[-1:])]


def mask(rng):
    return jnp.asarray(rng.random(SHAPE) < 0.7).at[1, ..., :3].set(False)


@pytest.mark.parametrize(
    "masked", long_sweep([False, True], quick=[False]), ids=["plain", "masked"]
)
@pytest.mark.parametrize("name", long_sweep(NORMS, quick=list(NORMS)[::3]))
def test_values_and_gradients_are_those_of_the_reference(name, masked, rng, x64):
    arguments, where = given(rng), mask(rng) if masked else None

    @partial(jax.jit, static_argnums=0)
    def both(implementation, *a):
        y, pullback = jax.vjp(partial(NORMS[name], where=where, implementation=implementation), *a)
        return y, *pullback(jnp.cos(y))

    for one, other in zip(both("xla", *arguments), both("reference", *arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "masked", long_sweep([False, True], quick=[False]), ids=["plain", "masked"]
)
@pytest.mark.parametrize("name", long_sweep(NORMS, quick=list(NORMS)[:1]))
def test_derivatives_of_both_modes_and_two_orders(name, masked, rng, x64):
    where = mask(rng) if masked else None
    check_derivatives(lambda *a: jnp.sin(NORMS[name](*a, where=where)), given(rng))


@pytest.mark.parametrize(
    "name", long_sweep([name for name in NORMS if name != "of a batch"], quick=list(NORMS)[::3])
)
def test_vmap_and_shard_map_and_scan_equal_a_loop(name, rng):
    x, scale, bias = given(rng, (2, *SHAPE))
    gradients = jax.jit(jax.grad(lambda *a: jnp.sin(NORMS[name](*a)).sum(), (0, 1, 2)))
    expected = jax.tree.map(
        lambda *leaves: np.stack(leaves), *(gradients(one, scale, bias) for one in x)
    )
    same(jax.vmap(gradients, (0, None, None))(x, scale, bias), expected)
    same(jax.lax.scan(lambda c, one: (c, gradients(one, scale, bias)), 0, x)[1], expected)
    mesh = jax.make_mesh((2,), ("n",), devices=HOST[:2], axis_types=(jax.sharding.AxisType.Auto,))
    both = jax.jit(
        shard_map(gradients, mesh=mesh, in_specs=(P("n"), P(), P()), out_specs=(P("n"), P(), P()))
    )
    whole = x.reshape(-1, *SHAPE[1:])
    same(both(whole, scale, bias), gradients(whole, scale, bias))


def test_positions_over_devices_are_pooled(rng):
    x, scale, bias = given(rng, (2, 8, 4, 12))
    mesh = jax.make_mesh((2,), ("h",), devices=HOST[:2], axis_types=(jax.sharding.AxisType.Auto,))
    norm = partial(NORMS["group"], axis_name="h")
    whole = shard_map(norm, mesh=mesh, in_specs=(P(None, "h"), P(), P()), out_specs=P(None, "h"))
    np.testing.assert_allclose(whole(x, scale, bias), NORMS["group"](x, scale, bias), atol=1e-6)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert ulps(one, other) <= 8 if other.any() else not one.any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_half_precision_are_those_of_float32_rounded(dtype, rng):
    rounded = [np.asarray(a).astype(dtype).astype(np.float32) for a in given(rng)]
    cotangent = jnp.ones(SHAPE)
    want = jax.vjp(NORMS["group"], *rounded)[1](cotangent)
    found = jax.vjp(NORMS["group"], rounded[0].astype(dtype), *rounded[1:])[1](
        cotangent.astype(dtype)
    )
    for one, other in zip(found, want, strict=True):
        bound = float(jnp.finfo(dtype).eps) if one.dtype == dtype else 1e-6
        assert (
            np.abs(np.asarray(one).astype(np.float32) - other).max()
            <= bound * np.abs(other).max() + 1e-6
        )


@pytest.mark.parametrize("value", [0.0, 0.1, 3.3, 1e6 + 0.3, 1e10])
def test_constant_groups_give_the_bias_and_finite_gradients(value):
    x, bias = jnp.full(SHAPE, value, jnp.float32), jnp.linspace(0, 1, SHAPE[-1])
    one = lambda x: jn.group_norm(x, 4, bias=bias)
    for norm in (one, jax.vmap(lambda x: one(x[None])[0])):
        y, pullback = jax.vjp(norm, x)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
        assert np.isfinite(pullback(jnp.ones_like(y))[0]).all()


def test_a_norm_without_channels_or_examples_is_empty():
    for shape in ((0, 4, 4, 8), (2, 4, 4, 0)):
        assert jn.group_norm(jnp.zeros(shape), 4).shape == shape
