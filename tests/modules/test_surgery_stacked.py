"""Test that norms are replaced and frozen in layers that transformations of Flax stack."""

from collections.abc import Callable
from functools import partial

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as fnx

import jaxnorm as jn

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 3, 8)) + 3


def stacked(axis=0):
    """Return three layer norms of nnx with their variables along an axis, and no default values."""
    make = fnx.vmap(lambda key: fnx.LayerNorm(8, rngs=fnx.Rngs(key)), in_axes=0, out_axes=axis)
    norm = make(jax.random.split(KEY, 3))
    for variable in (norm.scale, norm.bias):
        variable[...] += jax.random.uniform(KEY, variable.shape)
    return norm


def test_nnx_swaps_norms_of_stacked_layers():
    @fnx.scan(in_axes=(fnx.Carry, 0), out_axes=fnx.Carry)
    def run(x, norm):
        return norm(x)

    norm = stacked()
    swapped, report = jn.nnx.swap(norm, to="rms")
    assert (report.rows[0].kept, report.rows[0].dropped) == (("scale", "epsilon=1e-06"), ("bias",))
    expected = X
    for scale in norm.scale[...]:
        expected = jn.rms_norm(expected, scale=scale)
    np.testing.assert_allclose(run(X, swapped), expected, rtol=1e-6)
    with_alpha, report = jn.nnx.swap(norm, to="dynamic_tanh")
    assert (report.rows[0].added, with_alpha.alpha.shape) == (("alpha",), (3, 1))
    assert run(X, with_alpha).shape == X.shape
    with pytest.raises(ValueError, match=r"before 8 features: got .*scale \(8, 3\)"):
        jn.nnx.swap(stacked(axis=1), to="rms")


def test_nnx_keeps_the_metadata_of_parameters():
    norm = stacked()
    norm.scale = fnx.Param(norm.scale[...], of_axes=("layers", "embed"))
    swapped, _ = jn.nnx.swap(norm, to="rms")
    assert swapped.scale.get_metadata()["of_axes"] == ("layers", "embed")
    assert swapped.scale is not norm.scale
    same, _ = jn.nnx.swap(norm, to="rms", copy=False)
    assert same is norm
    np.testing.assert_array_equal(norm.scale[...], swapped.scale[...])


class Looped(fnn.Module):
    """Two batch norms in a loop, with their variables along an axis."""

    axis: int = 0

    @fnn.compact
    def __call__(self, x, train=False):
        block = fnn.scan(
            lambda own, x, _: (2 * own(x, use_running_average=not train), None),
            variable_axes={"params": self.axis, "batch_stats": self.axis},
            split_rngs={"params": True},
            length=2,
        )
        return block(fnn.BatchNorm(name="norm"), x, None)[0]


def test_norms_that_nn_scan_stacks_are_swapped_layer_by_layer():
    model = Looped()
    variables = jax.tree.map(
        lambda a: a + jnp.arange(a.size).reshape(a.shape) / 9, model.init(KEY, X)
    )
    scale = variables["params"]["norm"]["scale"] * jnp.array([[1.0], [3.0]])
    variables["params"]["norm"]["scale"] = scale
    swapped, new, report = jn.linen.swap(model, variables, X, to="rms")
    assert report.rows[0].kept == ("scale", "epsilon=1e-05")
    expected = X
    for row in scale:
        expected = 2 * jn.rms_norm(expected, epsilon=1e-5, scale=row)
    np.testing.assert_allclose(swapped.apply(new, X), expected, rtol=1e-5)
    shapes = jax.tree.map(jnp.shape, swapped.init(KEY, X))
    assert shapes == jax.tree.map(jnp.shape, new) == {"params": {"norm": {"scale": (2, 8)}}}
    _, new, report = jn.linen.swap(model, variables, X, to="dynamic_tanh")
    assert report.rows[0].added == ("alpha",)
    assert new["params"]["norm"]["alpha"].shape == (2, 1)
    frozen, _ = jn.linen.freeze(model, variables, X)
    given = {"train": True, "mutable": ["batch_stats"]}
    y, updated = frozen.apply(variables, X, **given)
    np.testing.assert_array_equal(y, model.apply(variables, X))
    jax.tree.map(np.testing.assert_array_equal, updated["batch_stats"], variables["batch_stats"])


class LoopedWith(fnn.Module):
    """Norms in a loop that lifts parameters alone, along an axis; axes have names."""

    make: Callable[..., fnn.Module]
    axis: int = 0
    length: int = 2

    @fnn.compact
    def __call__(self, x):
        block = fnn.scan(
            lambda own, x, _: (2 * own(x), None),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.length,
            metadata_params={fnn.PARTITION_NAME: "layers"},
        )
        return block(self.make(name="norm"), x, None)[0]


@pytest.mark.parametrize("length", [2, 8])  # 8 features
def test_norms_that_are_stacked_behind_their_features_are_swapped(length):
    model = LoopedWith(fnn.LayerNorm, axis=1, length=length)
    scale = jnp.arange(1.0, 8 * length + 1).reshape(8, length)
    variables = {"params": {"norm": {"scale": scale, "bias": scale}}}
    swapped, new, _ = jn.linen.swap(model, variables, X, to="rms")
    expected = X
    for row in scale.T:
        expected = 2 * jn.rms_norm(expected, scale=row)
    np.testing.assert_allclose(swapped.apply(new, X), expected, rtol=1e-5)
    swapped, new, _ = jn.linen.swap(model, variables, X, to="dynamic_tanh")
    assert new["params"]["norm"]["alpha"].shape == (1, length)
    assert jax.eval_shape(swapped.apply, new, X).shape == X.shape


@pytest.mark.parametrize("rngs", [None, KEY, jax.random.PRNGKey(0), {"dropout": KEY}])
def test_stacked_norms_without_parameters_get_those_of_each_layer(rngs):
    model = LoopedWith(partial(fnn.LayerNorm, use_scale=False, use_bias=False))
    swapped, new, _ = jn.linen.swap(model, {}, X, to="dynamic_tanh", rngs=rngs)
    assert jax.tree.map(jnp.shape, new) == {"params": {"norm": {"alpha": (2, 1)}}}
    expected = X
    for alpha in new["params"]["norm"]["alpha"]:
        expected = 2 * jnp.tanh(alpha[0] * expected)
    np.testing.assert_allclose(swapped.apply(new, X), expected, rtol=1e-5)


@pytest.mark.parametrize("looped", [False, True])
def test_swapped_norms_keep_the_names_of_axes(looped):
    init = fnn.with_partitioning(fnn.initializers.ones_init(), ("embed",))
    make = partial(fnn.LayerNorm, scale_init=init)
    model = LoopedWith(make) if looped else fnn.Sequential([make()])
    path = "norm" if looped else "layers_0"
    variables = model.init(KEY, X)
    _, new, report = jn.linen.swap(model, variables, X, to="rms")
    found, expected = new["params"][path]["scale"], variables["params"][path]["scale"]
    assert found.names == expected.names == ("layers", "embed")[not looped :]
    np.testing.assert_array_equal(found.value, expected.value)
    assert report.rows[0].kept == ("scale", "epsilon=1e-06")


def test_state_that_a_loop_does_not_lift_is_refused():
    model = LoopedWith(fnn.LayerNorm)
    options = {"use_running_average": False}
    with pytest.raises(ValueError, match=r"within nn.scan or nn.vmap: .*mean.* lift"):
        jn.linen.swap(model, model.init(KEY, X), X, to="batch", options=options)
