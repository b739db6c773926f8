"""Test that patterns and integer axes give the same results."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DISTINCT, KINDS, long_sweep

import jaxnorm as jn
from jaxnorm.arguments.axes import resolve

SAME = [
    ("[n h w] c", {}, (0, 1, 2)),
    ("n [h w] c", {}, (1, 2)),
    ("n h w [c]", {}, 3),
    ("n [h w c]", {}, (-3, -2, -1)),
    ("[...] c", {}, (0, 1, 2)),
    ("n [...] c", {}, (1, 2)),
    ("... [c]", {}, -1),
    ("n [h] w [c]", {}, (1, 3)),
    ("  [ n ]h w c ", {}, 0),
    ("[n] ... c", {"c": 6}, 0),
    ("n h w ([c])", {}, 3),
]


@pytest.mark.parametrize(("pattern", "sizes", "axes"), SAME, ids=[row[0] for row in SAME])
def test_a_pattern_pools_the_axes_in_brackets(pattern, sizes, axes, rng):
    x = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    assert resolve(pattern, x.shape, sizes) == resolve(axes, x.shape)
    np.testing.assert_array_equal(jn.standardize(x, pattern, **sizes), jn.standardize(x, axes))


SPLIT = [
    ("n [h w] (g [c])", {"g": 3}, (2, 4, 5, 3, 2), (1, 2, 4), (2, 1, 1, 3)),
    ("n [h w] (g [c])", {"c": 2}, (2, 4, 5, 3, 2), (1, 2, 4), (2, 1, 1, 3)),
    ("n [h w] (g [c])", {"g": 3, "c": 2}, (2, 4, 5, 3, 2), (1, 2, 4), (2, 1, 1, 3)),
    ("(k [n]) [h w] c", {"k": 2}, (2, 1, 4, 5, 6), (1, 2, 3), (2, 1, 1, 6)),
    ("n (a [h]) (b [w]) c", {"a": 2, "b": 5}, (2, 2, 2, 5, 1, 6), (2, 4), (2, 2, 5, 6)),
    ("n [(a h)] w c", {"a": 2}, (2, 2, 2, 5, 6), (1, 2), (2, 1, 5, 6)),
]


@pytest.mark.parametrize(
    ("pattern", "sizes", "split", "axes", "stats_shape"),
    SPLIT,
    ids=[f"{row[0]} {row[1]}" for row in SPLIT],
)
def test_a_split_axis_equals_a_reshape(pattern, sizes, split, axes, stats_shape, rng):
    x = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    found = jn.moments(x, pattern, **sizes)
    assert found.mean.shape == stats_shape
    truth = jn.moments(x.reshape(split), axes)
    np.testing.assert_array_equal(found.mean, truth.mean.reshape(stats_shape))
    np.testing.assert_array_equal(found.var, truth.var.reshape(stats_shape))
    y = jn.standardize(x, pattern, **sizes)
    np.testing.assert_array_equal(y, jn.standardize(x.reshape(split), axes).reshape(x.shape))
    # the mean is rounded, the groups are small
    np.testing.assert_allclose(jn.normalize(x, found), y, atol=1e-5)


@pytest.mark.parametrize("pattern", ["... [c]", "[c]", "[...]", "[... c]"])
def test_an_ellipsis_may_stand_for_no_axis(pattern):
    assert resolve(pattern, (4,)) == resolve(0, (4,))
    np.testing.assert_allclose(
        jn.standardize(jnp.array([1.0, 3.0]), pattern, epsilon=0.0), [-1.0, 1.0]
    )


def test_masks_and_parameters_follow_the_split(rng):
    x = rng.standard_normal((2, 4, 6)).astype(np.float32)
    scale, mask = rng.standard_normal(6).astype(np.float32), rng.random((4, 1)) < 0.7
    y = jn.standardize(x, "n [h] (g [c])", g=2, scale=scale.reshape(1, 1, 6), where=mask)
    full = np.broadcast_to(mask, x.shape).reshape(2, 4, 2, 3)
    truth = jn.standardize(
        x.reshape(2, 4, 2, 3), (1, 3), scale=scale.reshape(1, 1, 2, 3), where=full
    )
    np.testing.assert_allclose(y, truth.reshape(x.shape), atol=1e-6)


def test_ghost_batches_are_normalized_by_themselves(rng):
    x = rng.standard_normal((8, 3)).astype(np.float32)
    y = jn.standardize(x, "(k [n]) c", k=4)
    np.testing.assert_allclose(
        y, jnp.concatenate([jn.batch_norm(part)[0] for part in np.split(x, 4)]), atol=1e-6
    )


def test_one_group_is_layer_norm_and_one_channel_per_group_instance_norm(rng):
    x = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    np.testing.assert_allclose(jn.group_norm(x, 1), jn.layer_norm(x, axes="n [h w c]"), atol=1e-6)
    np.testing.assert_allclose(jn.group_norm(x, 6), jn.instance_norm(x), atol=1e-6)


def test_feature_axes_may_stand_anywhere(rng):
    x = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    scale, bias = rng.standard_normal((2, 6)).astype(np.float32)
    first, last = (0, 3, 1, 2), (0, 2, 3, 1)
    y = jn.batch_norm(x.transpose(first), scale=scale, bias=bias, feature_axes=1)[0].transpose(last)
    np.testing.assert_allclose(y, jn.batch_norm(x, scale=scale, bias=bias)[0], atol=1e-6)
    y = jn.group_norm(x.transpose(first), 3, scale=scale, bias=bias, feature_axes=1).transpose(last)
    np.testing.assert_allclose(y, jn.group_norm(x, 3, scale=scale, bias=bias), atol=1e-6)
    two = rng.standard_normal((4, 6)).astype(np.float32)
    y = jn.batch_norm(x, scale=two, feature_axes=(1, -1))[0]
    np.testing.assert_allclose(
        y, jn.standardize(x, (0, 2), scale=two.reshape(1, 4, 1, 6)), atol=1e-6
    )


def test_parameters_may_have_the_rank_of_x(rng):
    """Adaptive norms: a gain for each example, which broadcasts against x as in standardize."""
    x = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    scale = rng.standard_normal((2, 6)).astype(np.float32)[:, None, None]
    truth = jn.instance_norm(x) * scale
    np.testing.assert_allclose(jn.instance_norm(x, scale=scale), truth, atol=1e-6)
    first = (0, 3, 1, 2)
    y = jn.instance_norm(x.transpose(first), scale=scale.transpose(first), feature_axes=1)
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1), truth, atol=1e-6)
    np.testing.assert_allclose(jn.layer_norm(x, scale=scale), jn.layer_norm(x) * scale, atol=1e-6)
    heads = rng.standard_normal((1, 4, 1, 6)).astype(np.float32)
    np.testing.assert_allclose(jn.rms_norm(x, scale=heads), jn.rms_norm(x) * heads, atol=1e-6)


@pytest.mark.parametrize(
    "norm", [jn.layer_norm, jn.rms_norm, jn.instance_norm, lambda x, **o: jn.batch_norm(x, **o)[0]]
)
@pytest.mark.parametrize("shape", [(4, 8), (3, 8), (4, 4, 8), (3, 4, 4), (1, 1, 8), (1, 8)])
def test_parameters_of_another_rank_are_refused_whatever_the_sizes(norm, shape):
    """A scale (heads, d) is not one of examples where there are as many heads as examples."""
    message = (
        r"scale must have the shape of the feature axes, \(8,\), .* "
        r"such as \(4, 1, 1, 8\) for one scale for each example"
    )
    with pytest.raises(ValueError, match=message):
        norm(jnp.ones((4, 3, 4, 8)), scale=jnp.ones(shape))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_empty_arrays_keep_their_shape_and_state(shape):
    x = jnp.zeros(shape)
    y, found = jn.batch_norm(x)
    assert y.shape == shape
    assert (np.asarray(found.count) == shape[0]).all()
    assert np.isfinite(found.mean).all()
    assert np.isfinite(found.var).all()
    assert jn.layer_norm(x).shape == shape
    running = jn.Moments(jnp.ones(()), jnp.full((1, shape[1]), 2.0), jnp.full((1, shape[1]), 3.0))
    after = jn.ema(running, found)
    if shape[0] == 0:
        np.testing.assert_array_equal(after.mean, running.mean)
        np.testing.assert_array_equal(after.var, running.var)


@pytest.mark.parametrize("shape", [(0, 4, 4, 6), (2, 0, 4, 6)])
@pytest.mark.parametrize(
    "case",
    long_sweep([case for case in DISTINCT if len(case.shape) == 4], quick=KINDS[:3]),
    ids=str,
)
def test_empty_images_keep_their_shape(case, shape):
    group = {"groups": 2} if case.name == "group" else {}
    x = jnp.zeros(shape)
    call = partial(case.call.func, **group) if group else case.call
    y, pullback = jax.vjp(lambda x: call(x, epsilon=case.epsilon), x)
    assert y.shape == shape
    assert pullback(y)[0].shape == shape


def test_everything_but_the_operand_may_be_named(rng):
    x = jnp.asarray(rng.standard_normal((2, 4, 4, 6)), jnp.float32)
    found = jn.moments(x, axes=(1, 2))
    np.testing.assert_array_equal(jn.standardize(x, axes=(1, 2)), jn.standardize(x, (1, 2)))
    np.testing.assert_array_equal(jn.normalize(x, moments=found), jn.normalize(x, found))
    np.testing.assert_array_equal(jn.group_norm(x, num_groups=3), jn.group_norm(x, 3))
    logits = jnp.zeros(3)
    np.testing.assert_array_equal(
        jn.switchable_norm(x, mean_logits=logits, var_logits=logits)[0],
        jn.switchable_norm(x, logits, logits)[0],
    )
    np.testing.assert_array_equal(jn.ema(found, batch=found).mean, found.mean)
    for function in (jn.layer_norm, jn.rms_norm, jn.instance_norm, jn.batch_norm):
        with pytest.raises(TypeError):
            function(x=x)


def test_a_size_that_is_no_integer_is_refused_after_one_that_is():
    x = jnp.ones((4, 6))
    for right, wrong in ((2, 2.0), (1, True)):
        jn.moments(x, "n (g [c])", g=right)
        with pytest.raises(TypeError, match=f"the size of 'g' must be an integer: got {wrong}"):
            jn.moments(x, "n (g [c])", g=wrong)
