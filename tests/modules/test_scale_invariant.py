"""Test which weights are found to have no scale that any output depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxnorm as jn
from jaxnorm.training import labels, scale_invariant, weight_decay_mask

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
KEY = jax.random.key(0)
IMAGES = np.random.default_rng(0).standard_normal((4, 6, 6, 3)).astype("f4")
ROWS = np.random.default_rng(1).standard_normal((8, 6)).astype("f4")


def answers(report):
    return {leaf.path: leaf.answer for leaf in report.leaves}


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.relu(jn.linen.BatchNorm(use_running_average=not train)(x))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x)))
        return nn.Dense(4)(x.mean((1, 2)))


def test_convolutions_before_batch_norm():
    variables = Convolutional().init(KEY, IMAGES, train=False)
    report = scale_invariant(Convolutional(), variables, IMAGES, train=True)
    found = answers(report)
    assert found == {
        # a ReLU passes the scale of both on, to a norm that takes the next bias away
        "BatchNorm_0/bias": "with its layer",
        "BatchNorm_0/scale": "with its layer",
        "BatchNorm_1/bias": "depends",
        "BatchNorm_1/scale": "depends",
        "Conv_0/bias": "no effect",  # the mean takes it away
        "Conv_0/kernel": "scale-invariant",
        "Conv_1/bias": "no effect",
        "Conv_1/kernel": "scale-invariant",
        "Dense_0/bias": "depends",
        "Dense_0/kernel": "depends",
    }
    assert report.invariant["Conv_0"] == {"bias": True, "kernel": True}
    assert jax.tree.structure(report.invariant) == jax.tree.structure(variables["params"])
    roles = labels(variables["params"], before_norm=report)
    assert roles["Conv_1"] == {"bias": "bias", "kernel": "weight_before_norm"}
    assert roles["Dense_0"]["kernel"] == "weight"
    assert weight_decay_mask(variables["params"], before_norm=report)["Conv_1"]["kernel"]
    # each channel by itself, too, but the next convolution mixes those of the first norm
    channels = scale_invariant(Convolutional(), variables, IMAGES, axis=-1, train=True)
    mixed = dict.fromkeys(("BatchNorm_0/bias", "BatchNorm_0/scale"), "depends")
    assert answers(channels) == found | mixed


def test_running_statistics_normalize_by_numbers_of_their_own():
    variables = Convolutional().init(KEY, IMAGES, train=False)
    found = answers(scale_invariant(Convolutional(), variables, IMAGES, train=False))
    assert set(found.values()) == {"depends"}


def test_the_report_says_how_near():
    variables = Convolutional().init(KEY, IMAGES, train=False)
    report = scale_invariant(Convolutional(), variables, IMAGES, train=True)
    rows = {leaf.path: leaf for leaf in report.leaves}
    kernel, last = rows["Conv_0/kernel"], rows["Dense_0/kernel"]
    assert 0 < max(kernel.slope, kernel.change) < 1e-3  # epsilon / var
    assert min(last.slope, last.change, last.effect) > 0.1
    assert rows["Conv_0/bias"].effect < 1e-5
    lines = str(report).splitlines()
    assert lines[0].split() == ["leaf", "answer", "slope", "change", "together", "effect"]
    assert lines[6].split()[:2] == ["Conv_0/kernel", "scale-invariant"]
    assert repr(report) == str(report)


def dense(first, last, norm, between=lambda x: x, bias=True):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = between(nn.Dense(first, use_bias=bias)(x))
            return nn.Dense(3, name="head")(norm()(nn.Dense(last, use_bias=bias)(x)))

    return Model()


@pytest.mark.parametrize("norm", [jn.linen.LayerNorm, jn.linen.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("between", [nn.relu, nn.gelu])
def test_dense_layers(norm, between):
    """Without biases, scale passes through a ReLU; through a GELU it does not."""
    model = dense(16, 16, norm, between, bias=False)
    found = scale_invariant(model, model.init(KEY, ROWS), ROWS).invariant
    assert found["Dense_1"] == {"kernel": True}
    assert found["Dense_0"] == {"kernel": between is nn.relu}
    assert found["head"] == {"bias": False, "kernel": False}


def test_a_kernel_with_its_bias():
    """Layer norm does not take the bias away, so that both scale together, if at all."""
    model = dense(16, 16, jn.linen.RMSNorm, nn.relu)
    report = scale_invariant(model, model.init(KEY, ROWS), ROWS)
    found = answers(report)
    assert found["Dense_1/kernel"] == found["Dense_1/bias"] == "with its layer"
    assert found["Dense_0/kernel"] == found["Dense_0/bias"] == "depends"
    assert not any(jax.tree.leaves(report.invariant))


def test_a_residual_stream_is_no_norm_of_one_branch():
    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6, use_bias=False)(x) * 3
            x = x + 0.1 * nn.Dense(6, use_bias=False)(jn.linen.RMSNorm()(x))
            return jn.linen.RMSNorm()(x)

    found = scale_invariant(Residual(), Residual().init(KEY, ROWS), ROWS).invariant
    assert not any(jax.tree.leaves(found))


def test_norms_of_weights():
    """Their direction alone counts; the length is a parameter of its own."""
    model = jn.linen.WeightNorm(nn.Dense(5))
    found = scale_invariant(model, model.init(KEY, ROWS), ROWS, axis=-1).invariant
    assert found["layer_instance"] == {"bias": False, "kernel": True}
    assert not found["layer_instance/kernel/scale"]


def test_what_starts_at_zero_hides_nothing():
    """A gain at zero has outputs that depend on nothing before it."""

    class Zero(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(6, use_bias=False)(jn.linen.RMSNorm()(nn.Dense(6, use_bias=False)(x)))
            return x + jn.linen.LayerNorm(scale_init=nn.initializers.zeros)(y)

    variables = Zero().init(KEY, ROWS)
    np.testing.assert_array_equal(Zero().apply(variables, ROWS), ROWS)
    found = scale_invariant(Zero(), variables, ROWS).invariant
    assert found["Dense_0"] == found["Dense_1"] == {"kernel": True}
    assert found["LayerNorm_0"] == {"bias": False, "scale": False}


def test_a_large_epsilon_is_seen():
    model = lambda params, x: jn.layer_norm(x @ params["w"], epsilon=0.1)
    params = {"w": jnp.asarray(np.random.default_rng(2).standard_normal((6, 6)) * 0.1, "float32")}
    report = scale_invariant(model, params, ROWS)
    assert not report.invariant["w"]
    assert scale_invariant(model, {"w": params["w"] * 1e4}, ROWS).invariant["w"]
    assert scale_invariant(model, params, ROWS, tolerance=2.0).invariant["w"]


def test_channels_of_a_kernel():
    """Layer norm needs one scale for all of them, and group norm one for each group."""
    params = {"w": jnp.asarray(np.random.default_rng(2).standard_normal((6, 8)), "float32")}
    layer = lambda params, x: jn.layer_norm(x @ params["w"])
    batch = lambda params, x: jn.batch_norm(x @ params["w"])[0]
    for model, by_channel in ((layer, False), (batch, True)):
        assert scale_invariant(model, params, ROWS).invariant["w"]
        assert scale_invariant(model, params, ROWS, axis=-1).invariant["w"] == by_channel


def test_modules_of_nnx():
    model = nnx.Sequential(
        nnx.Linear(6, 8, rngs=nnx.Rngs(0)),
        jn.nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
        nnx.Linear(8, 2, rngs=nnx.Rngs(0)),
    )
    params = nnx.state(model, nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    report = scale_invariant(model, params, ROWS)
    assert jax.tree.structure(report.invariant) == jax.tree.structure(params)
    found = [leaf.answer for leaf in report.leaves]
    assert found == ["no effect", "scale-invariant", *["depends"] * 4]
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    jax.tree.map(np.testing.assert_array_equal, after, before)  # the model is not changed
    assert "weight_before_norm" in jax.tree.leaves(labels(params, before_norm=report))
    for wrong, got in ((ROWS, "ArrayImpl|ndarray"), (model, "Sequential"), ({}, "0 leaves")):
        with pytest.raises(ValueError, match=rf"with 6 leaves: got ({got})\. Call scale_inv"):
            scale_invariant(model, wrong, ROWS)


def test_boxes_have_no_part_in_paths():
    init = nn.with_partitioning(nn.initializers.ones_init(), (None, "model"))
    model = nn.Dense(3, kernel_init=init)
    report = scale_invariant(model, model.init(jax.random.key(0), ROWS), ROWS)
    assert [leaf.path for leaf in report.leaves] == ["bias", "kernel"]


def test_half_precision():
    model = lambda params, x: jn.rms_norm(x @ params["w"]) @ params["v"]
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    params = {"w": draw(0, 6, 8), "v": draw(1, 8, 2)}
    found = scale_invariant(model, params, ROWS.astype(jnp.bfloat16), tolerance=0.05).invariant
    assert found == {"w": True, "v": False}


@pytest.mark.parametrize(
    ("model", "params", "error", "said"),
    [
        (3, {"w": jnp.ones(2)}, TypeError, "got int"),
        (lambda p: p["w"], {}, ValueError, "must have leaves"),
        (lambda p: jnp.arange(3), {"w": jnp.ones(2)}, TypeError, "floating numbers: got none"),
    ],
)
def test_errors(model, params, error, said):
    with pytest.raises(error, match=said):
        scale_invariant(model, params)
