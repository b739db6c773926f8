"""Test Keras's files of whole models, what has to be said of them, and what is refused."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import json
import zipfile

import jax
import numpy as np
import pytest
from flax import linen, nnx
from interop_values import close, inputs, same_bits

from jaxnorm import interop, recurrent
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx
from jaxnorm.interop import keras_files

keras, h5py = pytest.importorskip("keras"), pytest.importorskip("h5py")
from test_keras import arrays, drawn, loaded  # noqa: E402

# users' code and the peers' own warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY, layers, SLIM = jax.random.key(0), keras.layers, {"epsilon": 1e-3}


def convolutional():
    """A small network with a Sequential inside, whose layers' names are not those of the file."""
    i = layers.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False, name="stem")(i)
    x = layers.BatchNormalization(name="stem_bn")(x)
    x = keras.ops.relu(x)
    x = layers.Conv2D(4, 3, padding="same", name="second")(x)
    x = layers.BatchNormalization(name="second_bn", scale=False)(x)
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(x))
    head = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(5, name="hidden"),
            layers.LayerNormalization(name="norm"),
        ],
        name="head",
    )
    model = keras.Model(i, layers.Dense(2, name="logits")(head(x)), name="net")
    model.compile("adam", "mse")
    return drawn(model)


class Head(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnn.LayerNorm(**SLIM, name="norm")(linen.Dense(5, name="hidden")(x))


class Convolutional(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (3, 3), use_bias=False, name="stem")(x)
        x = linen.relu(jnn.BatchNorm(True, **SLIM, name="stem_bn")(x))
        x = linen.Conv(4, (3, 3), name="second")(x)
        x = jnn.BatchNorm(True, **SLIM, use_scale=False, name="second_bn")(x)
        return linen.Dense(2, name="logits")(Head(name="head")(x.mean((1, 2))))


class Net(nnx.Module):
    def __init__(self, rngs, epsilon=1e-3):
        self.stem = nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs)
        self.stem_bn = jnnx.BatchNorm(4, epsilon=epsilon, rngs=rngs)
        self.second = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.second_bn = jnnx.BatchNorm(4, epsilon=1e-3, use_scale=False, rngs=rngs)
        self.head_hidden = nnx.Linear(4, 5, rngs=rngs)
        self.head_norm = jnnx.LayerNorm(5, epsilon=1e-3, rngs=rngs)
        self.logits = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem_bn(self.stem(x)))
        x = self.second_bn(self.second(x)).mean((1, 2))
        return self.logits(self.head_norm(self.head_hidden(x)))


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("net"), convolutional()
    model.save(folder / "net.keras")
    model.save_weights(folder / "net.weights.h5")
    model.save(folder / "net.h5")
    with zipfile.ZipFile(folder / "net.keras") as archive:
        archive.extract("config.json", folder)
    return folder, model


def test_a_convolutional_network(net):
    folder, theirs = net
    x = inputs(2, 6, 6, 3)
    variables = loaded(model := Convolutional(), folder / "net.keras", x)
    close(model.apply(variables, x), np.asarray(theirs(x)), 1e-6)
    same_bits(interop.save(variables, framework="keras", like=folder / "net.keras"), arrays(theirs))
    model = Net(nnx.Rngs(0))
    interop.load(model, folder / "net.keras", framework="keras")
    model.eval()
    close(model(x), np.asarray(theirs(x)), 1e-6)


def test_the_way_back_into_keras(net):
    folder, _ = net
    x = inputs(2, 6, 6, 3)
    other = convolutional()
    drawn(other, seed=1)
    variables = loaded(model := Convolutional(), arrays(other), x)
    found = interop.save(variables, framework="keras", like=folder / "net.keras")
    clone = convolutional()
    for weight in clone.weights:
        weight.assign(found[weight.path])
    close(model.apply(variables, x), np.asarray(clone(x)), 1e-6)


@pytest.mark.parametrize(
    "given",
    [
        "config.json",
        "net.keras",
        "config",
        "json",
        [
            ("Conv2D", {"use_bias": False}),
            "BatchNormalization",
            "Conv2D",
            ("BatchNormalization", {"scale": False}),
            {
                "class_name": "Sequential",
                "config": {
                    "layers": [{"class_name": "Dense"}, {"class_name": "LayerNormalization"}]
                },
            },
            "Dense",
        ],
    ],
    ids=str,
)
def test_weights_by_a_configuration(net, given):
    folder, theirs = net
    if given in ("config", "json"):
        given = theirs.get_config() if given == "config" else theirs.to_json()
    elif isinstance(given, str):
        given = folder / given
    x = inputs(2, 6, 6, 3)
    variables = loaded(
        model := Convolutional(), folder / "net.weights.h5", x, layers=given, show=False
    )
    close(model.apply(variables, x), np.asarray(theirs(x)), 1e-6)


def test_a_file_of_keras_2_has_names(net):
    folder, theirs = net
    x = inputs(2, 6, 6, 3)
    variables = loaded(model := Convolutional(), folder / "net.h5", x)
    close(model.apply(variables, x), np.asarray(theirs(x)), 1e-6)


def test_options_are_said_and_a_wrong_epsilon_is_warned_of(net):
    """The arrays are right, so that it is no error; a linen tree has no epsilon to compare."""
    folder, _ = net
    model = Net(nnx.Rngs(0), epsilon=1e-5)
    table = str(interop.match(model, folder / "net.keras", framework="keras"))
    assert "note: stem_bn, second_bn: epsilon=0.001, momentum=0.99" in table
    message = r"stem_bn has epsilon=1e-05, but the file was made with 0\.001\."
    with pytest.warns(UserWarning, match=message):
        interop.load(model, folder / "net.keras", framework="keras")
    assert "stem_bn has epsilon=1e-05" in table
    assert "second_bn has" not in table


def test_a_recurrent_network(tmp_path):
    i = layers.Input((6, 4))
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True), name="both")(i)
    x = layers.GRU(4, return_sequences=True, name="gru")(x)
    x = layers.LSTM(3, return_sequences=True, name="lstm")(x)
    theirs = drawn(keras.Model(i, layers.Dense(2, name="out")(x)))
    theirs.save(path := tmp_path / "m.keras")

    class Recurrent(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = jnn.LSTM(3, norm=None, bidirectional=True, name="both")(x)
            x = jnn.GRU(4, norm=None, name="gru")(x)
            return linen.Dense(2, name="out")(jnn.LSTM(3, norm=None, name="lstm")(x))

    class GRU(nnx.Module):
        """As Keras has it by default; nnx's cell has no second bias of the candidate."""

        def __init__(self, rngs):
            for name, value in recurrent.init_gru(rngs(), 6, 4, norm=None).items():
                setattr(self, name, nnx.Param(value))

        def __call__(self, x):
            names = recurrent.init_gru(KEY, 6, 4, norm=None)
            params = {name: getattr(self, name)[...] for name in names}
            return recurrent.gru(x, params, norm=None)[1]

    class Twin(nnx.Module):
        def __init__(self, rngs):
            self.both = jnnx.LSTM(4, 3, norm=None, bidirectional=True, rngs=rngs)
            self.gru = GRU(rngs)
            self.lstm = jnnx.LSTM(4, 3, norm=None, rngs=rngs)
            self.out = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(self.lstm(self.gru(self.both(x))))

    x = inputs(2, 6, 4)
    variables = loaded(model := Recurrent(), path, x)
    close(model.apply(variables, x), np.asarray(theirs(x)), 1e-6)
    same_bits(interop.save(variables, framework="keras", like=path), arrays(theirs))
    model = interop.load(Twin(nnx.Rngs(0)), path, framework="keras")
    close(model(x), np.asarray(theirs(x)), 1e-6)


class Own(keras.Model):
    """A model of a class of its own, whose configuration does not list its layers."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(5, use_bias=False)
        # the file has lists of all names in a group called layers
        self.norms = [layers.BatchNormalization(), layers.LayerNormalization()]

    def call(self, x):
        return self.norms[1](self.norms[0](self.first(x)))


def test_classes_by_groups(tmp_path):
    theirs, x = Own(), inputs(2, 3)
    theirs(x)
    drawn(theirs)
    theirs.save_weights(path := tmp_path / "m.weights.h5")

    class Ours(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(5, use_bias=False)(x)
            return jnn.LayerNorm(**SLIM)(jnn.BatchNorm(True, **SLIM)(x))

    given = {
        "first": ("Dense", {"use_bias": False}),
        "layers/batch_normalization": "BatchNormalization",
        "layers/layer_normalization": "LayerNormalization",
    }
    variables = loaded(model := Ours(), path, x, layers=given, show=False)
    close(model.apply(variables, x), np.asarray(theirs(x)), 1e-6)
    del given["layers/layer_normalization"]
    found = interop.match(variables, path, framework="keras", layers=given)
    assert "layers/layer_normalization/vars/0" in found.unused


def test_bfloat16(tmp_path):
    dense = layers.Dense(2, dtype="bfloat16")
    theirs = drawn(keras.Sequential([layers.Input((3,)), dense]))
    theirs.save(path := tmp_path / "m.keras")
    found = loaded(linen.Dense(2), path, inputs(2, 3))
    np.testing.assert_array_equal(found["params"]["kernel"], np.asarray(dense.kernel, np.float32))


def test_wrong_shapes_and_missing_layers_change_nothing(net):
    folder, _ = net
    model = Net(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(model))
    model.logits = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"logits/kernel \(5, 3\): logits/kernel \(5, 2\) gives"):
        interop.load(model, folder / "net.keras", framework="keras")
    model.logits = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    model.more = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"more/kernel \(2, 2\): nothing in the file fits it"):
        interop.load(model, folder / "net.keras", framework="keras")
    del model.more, model.head_norm
    with pytest.raises(
        ValueError, match=r"head/norm/gamma \(5,\): the model has no parameter for it"
    ):
        interop.load(model, folder / "net.keras", framework="keras")
    after = jax.tree.map(np.asarray, nnx.state(model))
    for name in ("stem", "stem_bn", "second", "second_bn", "head_hidden"):
        jax.tree.map(np.testing.assert_array_equal, after[name], before[name])


def test_numbered_arrays_need_a_configuration(net):
    folder, _ = net
    path, like = folder / "net.weights.h5", {"kernel": np.ones((5, 2), "f")}
    with pytest.raises(
        ValueError, match=r"numbers its arrays and needs the configuration.*layers="
    ):
        interop.load(like, path, framework="keras")
    with pytest.raises(ValueError, match=r"got Conv2D at 'layers/conv2d_2'; the file has layers/"):
        interop.load(like, path, framework="keras", layers=["Conv2D"] * 3)
    with pytest.raises(ValueError, match=r"must have 2 arrays by its options, kernel, bias: got 1"):
        interop.load(like, path, framework="keras", layers=["Conv2D"])
    with pytest.raises(ValueError, match="got LSTMCell at 'layers/lstm/cell'"):
        interop.load(like, path, framework="keras", layers=["LSTM"])
    with pytest.raises(TypeError, match="layers must be a Keras configuration, a list of classes"):
        interop.load(like, path, framework="keras", layers=[3])
    with pytest.raises(ValueError, match="layers must be a configuration in JSON"):
        interop.load(like, path, framework="keras", layers=path)
    with pytest.raises(ValueError, match=r"layers must be None but for Keras and Equinox"):
        interop.load(like, {"weight": np.ones((2, 5), "f")}, framework="torch", layers=["Dense"])


def test_bad_files(net, tmp_path):
    folder, _ = net
    like = {"kernel": np.ones((5, 2), "f")}

    def fails(path, message, error=ValueError, **options):
        with pytest.raises(error, match=message) as found:
            interop.load(like, path, framework="keras", **options)
        assert "\n" not in str(found.value)

    fails(tmp_path / "no.keras", "there is no such file", FileNotFoundError)
    (tmp_path / "x.onnx").touch()
    fails(tmp_path / "x.onnx", r"must end with \.keras, \.weights\.h5 or \.h5: got x\.onnx")
    whole = (folder / "net.keras").read_bytes()
    (tmp_path / "cut.keras").write_bytes(b"")
    fails(tmp_path / "cut.keras", r"cut\.keras must hold arrays: it is an empty file")
    for size in (100, len(whole) // 2):
        (tmp_path / "cut.keras").write_bytes(whole[:size])
        fails(tmp_path / "cut.keras", r"cut\.keras must be an archive of model\.save")
    with zipfile.ZipFile(tmp_path / "other.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({}))
    fails(tmp_path / "other.keras", "no item named 'model.weights.h5'")
    weights = (folder / "net.weights.h5").read_bytes()
    for size in (100, len(weights) // 2):
        (tmp_path / "cut.weights.h5").write_bytes(weights[:size])
        fails(tmp_path / "cut.weights.h5", "must be an HDF5 file of weights", layers=["Dense"])
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["images"] = np.zeros(3)
    fails(tmp_path / "data.h5", "must be weights of Keras.*got images", layers=["Dense"])
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"images \(2, 3\): the model has no parameter"):
        interop.load(like, tmp_path / "a.npz", framework="keras")


def test_another_framework():
    like, state = {"fc": {"kernel": np.ones((5, 2), "f")}}, {"fc.weight": np.ones((2, 5), "f")}
    with pytest.raises(ValueError, match=r"These are names as in framework='torch'\."):
        interop.load(like, state, framework="keras")
    with pytest.raises(ValueError, match=r"framework must be one of 'torch', 'keras', "):
        interop.load(like, state, framework="tensorflow")


def test_without_h5py(net, monkeypatch):
    folder, _ = net
    monkeypatch.setattr(keras_files, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs h5py.*pip install 'jaxnorm\[interop\]'"):
        interop.load({"kernel": np.ones(3)}, folder / "net.keras", framework="keras")
