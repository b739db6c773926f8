"""What is done for the sake of XLA's loops on a CPU, and changes no result."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_accuracy import B32, HARD, check

import jaxnorm as jn
from jaxnorm import normalization
from jaxnorm.loops import add_up

pytestmark = pytest.mark.usefixtures("usual_compile")


@pytest.fixture(scope="class")
def one_device():
    """As for arrays that are known to lie on one."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXNORM_IMPLEMENTATION", "xla")
        patch.setattr(normalization, "known", lambda x: True)
        yield
    jax.clear_caches()


def images(x, params, axes=(1, 2, 3), **options):
    return jn.standardize(x, axes, **{name: params[name] for name in ("scale", "bias", "where") if name in params}, **options)


NORMS = {  # shapes of what is given beside x, and the pooled axes as they are then seen
    "of nothing": (images, {}, "(1,)"),
    "each its own": (images, {"scale": (4, 5, 6), "bias": (4, 5, 6)}, "(1,)"),
    "of examples": (images, {"scale": (3, 1, 1, 1), "bias": (3, 4, 5, 6)}, "(1,)"),
    "masked": (images, {"scale": (4, 5, 6), "where": (3, 4, 5, 6)}, "(1, 2, 3)"),
    "unbiased": (partial(images, correction=1), {"bias": (4, 5, 6)}, "(1,)"),
    "not centered": (partial(images, centered=False), {"scale": (4, 5, 6)}, "(1,)"),
    "the last two": (partial(images, axes=(2, 3), full_range=True), {"scale": (5, 6)}, "(2,)"),
    "of channels": (images, {"scale": (6,)}, "(1, 2, 3)"),
    "batch": (lambda x, params: jn.batch_norm(x, feature_axes=0, **params), {"scale": (3,), "bias": (3,)}, "(1,)"),
}


@pytest.fixture
def given(rng):
    def make(shapes):
        masks = {name: jnp.asarray(rng.uniform(size=shape) < 0.7).at[0].set(True) for name, shape in shapes.items() if name == "where"}
        return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items() if name != "where"} | masks

    return jnp.asarray(5 + rng.standard_normal((3, 4, 5, 6)), jnp.float32), make


@pytest.mark.parametrize("name", NORMS)
def test_the_last_axes_are_pooled_as_one(name, given, one_device, monkeypatch):
    norm, shapes, axes = NORMS[name]
    x, make = given
    params = make(shapes)
    factors = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def loss(x, scale_and_bias):
        y, *moments = jax.tree.leaves(norm(x, params | scale_and_bias))
        return (y * factors).sum() + sum((m * m).sum() for m in moments), (y, moments)

    learned = {key: value for key, value in params.items() if key != "where"}
    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    assert f"reduce_sum[axes={axes} " in str(jax.make_jaxpr(step)(x, learned))
    found = step(x, learned)
    monkeypatch.setattr(normalization, "known", lambda x: False)
    jax.clear_caches()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(step(x, learned)), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("shape", [(2, 0, 3, 4), (0, 2, 3, 4), (2, 3, 4, 0), (2, 1, 1, 5), (2, 3, 1, 1), (2, 1, 1, 1)])
def test_sizes_of_none_and_one(shape, one_device):
    x = jnp.ones(shape)
    y, batch = jn.batch_norm(x, feature_axes=0)
    np.testing.assert_array_equal(y, np.zeros(shape))
    np.testing.assert_array_equal(batch.mean, np.full((shape[0], 1, 1, 1), float(x.size > 0)))
    np.testing.assert_array_equal(jn.standardize(x, (1, 2, 3)), np.zeros(shape))


@pytest.mark.usefixtures("one_device")
class TestInLine:
    @pytest.mark.parametrize("hard", HARD, ids=str)
    def test_hard_inputs(self, hard, rng):
        check(BY_NAME["layer_hwc"], hard, rng)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 128, 1000])
def test_long_rows_are_added_up(count, rng):
    """Exactly, as far as float32 can, and otherwise to what is rounded in 64 sums."""
    whole = rng.integers(-99, 99, (1, count, 5, 3300)).astype(np.float32)
    assert "dot_general" in str(jax.make_jaxpr(partial(add_up, axis=1))(whole))
    np.testing.assert_array_equal(add_up(jnp.asarray(whole), 1), whole.sum(1, keepdims=True))
    tenths = add_up(jnp.full((count, 16400), 0.1, jnp.float32), 0)
    np.testing.assert_allclose(np.asarray(tenths, np.float64), count * np.float64(np.float32(0.1)), rtol=7e-7)


@pytest.mark.parametrize("shape", [(2, 70, 16400), (70, 16384), (1025, 16400)])
def test_other_sums_are_sums(shape):
    axis = len(shape) - 2
    jaxpr = str(jax.make_jaxpr(partial(add_up, axis=axis))(jax.ShapeDtypeStruct(shape, jnp.float32)))
    assert "dot_general" not in jaxpr
    assert f"reduce_sum[axes=({axis},)" in jaxpr


@pytest.mark.usefixtures("one_device")
def test_gradients_of_gains_of_many_elements(rng):
    """Layer norm over (H, W, C), of which each element has a gain, against float64 NumPy."""
    x, by_y = (rng.standard_normal((70, 3, 11, 512)) for _ in range(2))
    params = [jnp.asarray(rng.standard_normal(x.shape[1:]), jnp.float32) for _ in range(2)]
    norm = lambda scale, bias: jn.layer_norm(jnp.asarray(x, jnp.float32), axes=(1, 2, 3), scale=scale, bias=bias)  # noqa: E731
    _, pullback = jax.vjp(norm, *params)
    by_y = by_y.astype(np.float32)
    assert jax.jit(pullback).lower(by_y).as_text().count("dot_general") == 4  # two sums of two parts
    by_scale, by_bias = pullback(jnp.asarray(by_y))
    axes = (1, 2, 3)
    normalized = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-6)
    for found, truth in ((by_scale, (by_y * normalized).sum(0)), (by_bias, by_y.sum(0, dtype=np.float64))):
        np.testing.assert_allclose(found, truth, rtol=0, atol=B32[1] * np.abs(truth).max())


@pytest.mark.parametrize("axis", [0, 3])
def test_what_is_explicitly_sharded_is_left_in_place(axis, rng, monkeypatch):
    monkeypatch.setenv("JAXNORM_IMPLEMENTATION", "xla")
    x = jnp.asarray(rng.standard_normal((8, 3, 11, 512)), jnp.float32)
    scale = jnp.asarray(rng.standard_normal(x.shape[1:]), jnp.float32)
    step = jax.jit(jax.grad(lambda scale, x: jnp.square(jn.layer_norm(x, axes=(1, 2, 3), scale=scale)).sum()))
    truth = step(scale, x)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    spec = [None] * 4
    spec[axis] = "d"
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, P(*at))) for a, at in ((scale, spec[1:] if axis else []), (x, spec))]
        found = step(*placed)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-6 * np.abs(truth).max())
