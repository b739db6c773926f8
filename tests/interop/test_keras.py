"""Test weights of Keras's own layers and files: their outputs, and their bits on the way back."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")


import jax
import numpy as np
import pytest
from flax import linen
from interop_values import OF_SEQUENCES, close, in_float64, inputs, same_bits

from jaxnorm import interop, recurrent
from jaxnorm import linen as jnn

keras, h5py = pytest.importorskip("keras"), pytest.importorskip("h5py")
# users' code and the peers' own warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY, layers = jax.random.key(0), keras.layers


def drawn(model, seed=0):
    """The model with random weights and statistics."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        value = 0.4 * rng.standard_normal(weight.shape)
        positive = any(word in weight.name for word in ("variance", "stddev"))
        weight.assign(np.abs(value) + 0.5 if positive else value)
    return model


def sequential(*given, shape):
    return drawn(keras.Sequential([layers.Input(shape), *given]))


def arrays(model):
    """The arrays by their paths, which in a Sequential begin with its own name."""
    start = f"{model.name}/"
    return {weight.path.removeprefix(start): np.asarray(weight) for weight in model.weights}


def loaded(model, source, x, **options):
    shapes = jax.eval_shape(lambda: model.init(KEY, x))
    return interop.load(shapes, source, framework="keras", **options)


EVAL = {"use_running_average": True, "epsilon": 1e-3}
CASES = {
    "batch": (layers.BatchNormalization, {}, jnn.BatchNorm(**EVAL), (6,)),
    "batch, only scale": (
        layers.BatchNormalization,
        {"center": False},
        jnn.BatchNorm(**EVAL, use_bias=False),
        (6,),
    ),
    "batch, only center": (
        layers.BatchNormalization,
        {"scale": False},
        jnn.BatchNorm(**EVAL, use_scale=False),
        (3, 6),
    ),
    "batch, neither": (
        layers.BatchNormalization,
        {"scale": False, "center": False},
        jnn.BatchNorm(**EVAL, use_scale=False, use_bias=False),
        (6,),
    ),
    "layer": (layers.LayerNormalization, {}, jnn.LayerNorm(epsilon=1e-3), (6,)),
    "layer, only center": (
        layers.LayerNormalization,
        {"scale": False},
        jnn.LayerNorm(epsilon=1e-3, use_scale=False),
        (6,),
    ),
    "layer, two axes": (
        layers.LayerNormalization,
        {"axis": (1, 2)},
        jnn.LayerNorm(epsilon=1e-3, reduction_axes=(1, 2), feature_axes=(1, 2)),
        (4, 6),
    ),
    "group": (layers.GroupNormalization, {"groups": 2}, jnn.GroupNorm(2, epsilon=1e-3), (4, 6)),
    "rms": (layers.RMSNormalization, {}, jnn.RMSNorm(epsilon=1e-6), (6,)),
    "dense": (layers.Dense, {"units": 4}, linen.Dense(4), (6,)),
    "dense without bias": (
        layers.Dense,
        {"units": 4, "use_bias": False},
        linen.Dense(4, use_bias=False),
        (6,),
    ),
    "einsum": (
        layers.EinsumDense,
        {"equation": "abc,cde->abde", "output_shape": (5, 2, 3), "bias_axes": "de"},
        linen.DenseGeneral((2, 3)),
        (5, 6),
    ),
    "einsum without bias": (
        layers.EinsumDense,
        {"equation": "abc,bd->acd", "output_shape": (5, 4)},
        linen.DenseGeneral(4, axis=-2, use_bias=False),
        (6, 5),
    ),
    "conv 1d": (layers.Conv1D, {"filters": 4, "kernel_size": 3}, ("Conv", 4, (3,)), (7, 6)),
    "conv 2d": (layers.Conv2D, {"filters": 4, "kernel_size": 3}, ("Conv", 4, (3, 3)), (5, 5, 6)),
    "conv 3d": (
        layers.Conv3D,
        {"filters": 4, "kernel_size": 2},
        ("Conv", 4, (2, 2, 2)),
        (3, 3, 3, 2),
    ),
    "transposed 1d": (
        layers.Conv1DTranspose,
        {"filters": 6, "kernel_size": 3},
        ("ConvTranspose", 6, (3,)),
        (7, 6),
    ),
    "transposed 2d": (
        layers.Conv2DTranspose,
        {"filters": 4, "kernel_size": (3, 2)},
        ("ConvTranspose", 4, (3, 2)),
        (4, 5, 6),
    ),
    "depthwise": (
        layers.DepthwiseConv2D,
        {"kernel_size": 3, "depth_multiplier": 2},
        linen.Conv(12, (3, 3), feature_group_count=6, padding="VALID"),
        (5, 5, 6),
    ),
}


def flax(model):
    if not isinstance(model, tuple):
        return model
    name, features, window = model
    return getattr(linen, name)(features, window, padding="VALID")


@pytest.mark.parametrize("case", CASES)
def test_layers(case, tmp_path):
    layer, options, model, shape = CASES[case]
    theirs, model = sequential(layer(**options), shape=shape), flax(model)
    x = inputs(2, *shape)
    theirs.save(path := tmp_path / "m.keras")
    variables = loaded(model, path, x)
    # a convolution of Flax's sums up to 54 products in float32
    close(model.apply(variables, x), in_float64(theirs, x), 4e-7 if "conv" in case else 2e-7)
    found = interop.save(variables, framework="keras", like=path)
    same_bits(found, arrays(theirs))
    again = loaded(model, found, x)
    jax.tree.map(np.testing.assert_array_equal, again, variables)
    theirs.save_weights(weights := tmp_path / "m.weights.h5")
    for given in ([(layer.__name__, options)], theirs.get_config(), path):
        again = loaded(model, weights, x, layers=given)
        jax.tree.map(np.testing.assert_array_equal, again, variables)


@pytest.mark.parametrize("model", [jnn.LayerNorm(use_bias=False), jnn.RMSNorm()])
def test_rms_scaling_is_warned_of(model, tmp_path):
    """It divides by the deviation, and subtracts nothing."""
    with pytest.warns(UserWarning, match="rms_scaling"):  # of Keras
        layer = layers.LayerNormalization(rms_scaling=True)
    theirs, x = sequential(layer, shape=(6,)), inputs(2, 6) + 3
    theirs.save(path := tmp_path / "m.keras")
    said = r"the layer: LayerNormalization\(rms_scaling=True\) of Keras is x \* scale / sqrt\(var"
    with pytest.warns(UserWarning, match=said) as seen:
        variables = loaded(model, path, x)
    assert [warning.filename for warning in seen] == [__file__]
    wide, scale = (np.asarray(a, float) for a in (x, variables["params"]["scale"]))
    expected = wide * scale / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    close(in_float64(theirs, x), expected, 1e-9)  # epsilon is a float32
    assert np.abs(model.apply(variables, x) - theirs(x)).max() > 0.1
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))
    loaded(model, arrays(theirs), x)  # arrays alone do not tell


def test_an_einsum_of_another_order_fits_nothing(tmp_path):
    """Its kernel (out, in) has the shape of one of a Dense where it is square."""
    layer = layers.EinsumDense("abc,dc->abd", (None, 4))
    sequential(layer, shape=(5, 4)).save(path := tmp_path / "m.keras")
    model, x = linen.Dense(4, use_bias=False), inputs(2, 5, 4)
    with pytest.raises(ValueError, match="nothing in the file fits it"):
        loaded(model, path, x)
    like = jax.eval_shape(lambda: model.init(KEY, x))
    assert "equation=abc,dc->abd" in str(interop.match(like, path, framework="keras"))


RENORM = {"renorm": True, "momentum": 0.9}


def test_batch_renorm(tmp_path):
    """Its averages come along, so that the next step in training is Keras's."""
    theirs, x = sequential(layers.BatchNormalization(**RENORM), shape=(6,)), inputs(5, 6)
    theirs.save(path := tmp_path / "m.keras")
    model = jnn.KerasBatchRenorm(use_running_average=True, momentum=0.9)
    variables = loaded(model, path, x)
    assert {"renorm_mean", "renorm_stddev"} <= variables["batch_stats"].keys()
    close(model.apply(variables, x), in_float64(theirs, x))
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))
    # a plain batch norm has no place for them
    plain = jnn.BatchNorm(**EVAL)
    with pytest.raises(ValueError, match=r"renorm_mean \(6,\): the model has no parameter"):
        loaded(plain, path, x)
    found = loaded(plain, path, x, allow_unused=["*/renorm_*"])
    close(plain.apply(found, x), in_float64(theirs, x))


def test_a_separable_convolution_is_two(tmp_path):
    theirs = sequential(layers.SeparableConv2D(4, 3, depth_multiplier=2, name="s"), shape=(5, 5, 3))
    theirs.save(path := tmp_path / "m.keras")
    x = inputs(2, 5, 5, 3)

    class Separable(linen.Module):
        @linen.compact
        def __call__(self, x):
            options = {"padding": "VALID", "use_bias": False}
            x = linen.Conv(6, (3, 3), feature_group_count=3, name="s_depthwise", **options)(x)
            return linen.Conv(4, (1, 1), name="s_pointwise")(x)

    variables = loaded(model := Separable(), path, x)
    close(model.apply(variables, x), in_float64(theirs, x))
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))


RECURRENT = {
    "LSTM": (layers.LSTM, {}, jnn.LSTM),
    "LSTM without bias": (layers.LSTM, {"use_bias": False}, jnn.LSTM),
    "GRU": (layers.GRU, {}, jnn.GRU),
    "GRU, reset_after=False": (layers.GRU, {"reset_after": False}, jnn.GRU),
    "GRU without bias": (layers.GRU, {"use_bias": False}, jnn.GRU),
    "SimpleRNN": (layers.SimpleRNN, {}, jnn.SimpleRNN),
}


@pytest.mark.parametrize("case", RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(case, bidirectional, tmp_path):
    layer, options, model = RECURRENT[case]
    theirs = layer(3, return_sequences=True, **options)
    theirs = sequential(layers.Bidirectional(theirs) if bidirectional else theirs, shape=(6, 4))
    ours = {"reset_after": False} if "reset_after" in options else {}
    model, x = model(3, norm=None, bidirectional=bidirectional, **ours), inputs(2, 6, 4)
    theirs.save(path := tmp_path / "m.keras")
    variables = loaded(model, path, x, show=False)
    close(model.apply(variables, x), in_float64(theirs, x), OF_SEQUENCES)
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))
    if bidirectional:
        return
    by_name = {weight.name: np.asarray(weight) for weight in theirs.weights}
    kind = layer.__name__.lower().removeprefix("simple")
    like = getattr(recurrent, f"init_{kind}")(KEY, 4, 3, norm=None, **ours)
    params = interop.load(like, by_name, framework="keras")
    run = getattr(recurrent, kind)
    close(run(x, params, norm=None, **ours)[1], in_float64(theirs, x), OF_SEQUENCES)


def test_stacked_cells(tmp_path):
    theirs = layers.RNN([layers.LSTMCell(3), layers.LSTMCell(3)], return_sequences=True)
    theirs = sequential(theirs, shape=(6, 4))
    model, x = jnn.LSTM(3, norm=None, num_layers=2), inputs(2, 6, 4)
    theirs.save(path := tmp_path / "m.keras")
    variables = loaded(model, path, x)
    close(model.apply(variables, x), in_float64(theirs, x), OF_SEQUENCES)
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))


def test_attention(tmp_path):
    i = layers.Input((3, 6))
    theirs = drawn(keras.Model(i, layers.MultiHeadAttention(2, 3)(i, i)))
    theirs.save(path := tmp_path / "m.keras")
    model, x = linen.MultiHeadDotProductAttention(num_heads=2), inputs(2, 3, 6)
    variables = loaded(model, path, x)
    close(model.apply(variables, x), in_float64(theirs, x), OF_SEQUENCES)
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))
