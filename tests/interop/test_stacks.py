"""Test that layers which nn.scan stacked take weights of single layers, and give them back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxnorm import interop

KEY, DEPTH = jax.random.key(0), 3
NAMES = {"layers": "model.h.{i}", "LayerNorm_0": "model.ln"}


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Conv(4, (3,), name="conv")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(4, name="fc")(y), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH
        )
        return nn.LayerNorm()(layers(name="layers")(x, None)[0])


class Listed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            x, _ = Layer(name=f"layers_{i}")(x, None)
        return nn.LayerNorm()(x)


X = jax.random.normal(KEY, (2, 5, 4))


def source():
    rng, found = np.random.default_rng(0), {}
    shapes = {"norm.weight": (4,), "norm.bias": (4,), "conv.weight": (4, 4, 3), "conv.bias": (4,),
              "fc.weight": (4, 4), "fc.bias": (4,)}  # fmt: skip
    for i in range(DEPTH):
        found |= {f"model.h.{i}.{name}": shape for name, shape in shapes.items()}
    found |= {"model.ln.weight": (4,), "model.ln.bias": (4,)}
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in found.items()}


def abstract(model):
    return jax.eval_shape(model.init, KEY, X)


@pytest.mark.parametrize(
    "names",
    [
        NAMES,
        {"params/layers": "model.h.{i}", "LayerNorm_0": "model.ln"},
        {f"layers/{part}": f"model.h.{{i}}.{part}" for part in ("norm", "conv", "fc")}
        | {"LayerNorm_0": "model.ln"},
        {"layers/fc": "model.h.{i}.fc"} | NAMES,
    ],
)
def test_each_layer_has_its_weights(names):
    found = interop.load(abstract(Scanned()), source(), framework="torch", names=names)
    listed = {"layers_*": "model.h.*", "LayerNorm_0": "model.ln"}
    one_by_one = interop.load(abstract(Listed()), source(), framework="torch", names=listed)
    for name in ("conv", "norm", "fc"):
        own = [one_by_one["params"][f"layers_{i}"][name] for i in range(DEPTH)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
        jax.tree.map(np.testing.assert_array_equal, found["params"]["layers"][name], stacked)
    expected = Listed().apply(one_by_one, X)
    np.testing.assert_allclose(Scanned().apply(found, X), expected, rtol=1e-5, atol=1e-6)


def test_they_are_saved_again():
    variables = interop.load(abstract(Scanned()), source(), framework="torch", names=NAMES)
    for like in (None, source()):
        again = interop.save(variables, framework="torch", names=NAMES, like=like)
        assert again.keys() == source().keys()
        for key, array in source().items():
            np.testing.assert_array_equal(again[key], array)


def test_numpy_stays_and_the_table_shows_layers():
    like = {"layers": {"scale": np.ones((2, 3), np.float32)}, "skip": {"scale": np.ones(())}}
    like["layers"]["t"] = np.zeros(2, np.float32)
    state = {"n.0.weight": np.full(3, 2.0, "f"), "n.1.weight": np.full(3, 4.0, "f")}
    options = {"framework": "torch", "names": {"layers": "n.{i}", "skip": None},
               "allow_missing": True}  # fmt: skip
    found = interop.load(like, state, show=False, **options)
    assert isinstance(found["layers"]["scale"], np.ndarray)
    assert found["layers"]["scale"].tolist() == [[2.0] * 3, [4.0] * 3]
    assert found["layers"]["t"] is like["layers"]["t"]
    assert "layers/scale[1]  (3,)" in repr(interop.match(like, state, **options))


def test_layers_without_values_keep_theirs():
    like = {"layers": {"scale": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))}}
    state = {"n.0.weight": np.full(3, 2.0, "f"), "n.1.bias": np.full(3, 4.0, "f")}
    options = {"framework": "torch", "names": {"layers": "n.{i}"}, "allow_missing": True}
    found = interop.load(like, state, **options)["layers"]
    assert found["scale"][:, 0].tolist() == [2.0, 1.0]
    assert found["bias"][:, 0].tolist() == [1.0, 4.0]
    shapes = jax.eval_shape(lambda: like)
    with pytest.raises(ValueError, match=r"layers of layers/(scale|bias), .*: 1 of 2 got none"):
        interop.load(shapes, state, **options)


def test_stacks_of_nnx():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,))
    def made(rngs):
        return nnx.ConvTranspose(4, 4, (3,), rngs=rngs)

    class Model(nnx.Module):
        def __init__(self):
            self.layers = made(nnx.Rngs(0))

    model, names = Model(), {"layers": "up.{i}"}
    state = interop.save(model, framework="torch", names=names)
    kernel = np.asarray(model.layers.kernel[...])
    assert {key: array.shape for key, array in state.items()} == {
        f"up.{i}.{name}": shape
        for i in range(2)
        for name, shape in (("weight", (4, 4, 3)), ("bias", (4,)))
    }
    same = interop.load(model, {k: 2 * v for k, v in state.items()}, framework="torch", names=names)
    assert same is model
    np.testing.assert_array_equal(model.layers.kernel[...], 2 * kernel)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"layer": "model.h.{i}"}, r"with \{i\} must be paths of modules, .*: got 'layer'\."),
        ({"layers/*": "model.h.{i}.*"}, r"with \{i\} must be paths of modules, without \*"),
        ({"layers/norm/scale": "model.h.{i}.norm.weight"}, "must be paths of modules"),
        ({"layers": "model.g.{i}"}, r"names must say layers of the file: got 'model\.g\.0'"),
        ({"LayerNorm_0": "model.h.{i}.norm"}, r"of the file: got 'model\.h\.3\.norm'"),
        ({"": "model.h.{i}"}, r"arrays of '' must have layers along their first axis"),
    ],
)
def test_names_that_fit_no_stack(names, said):
    with pytest.raises(ValueError, match=said):
        interop.load(abstract(Scanned()), source(), framework="torch", names=names)


@pytest.mark.parametrize("names", [{"layers": 3}, {3: "model.h.{i}"}])
def test_names_that_are_no_strings(names):
    with pytest.raises(TypeError, match="names must map paths to paths"):
        interop.load(abstract(Scanned()), source(), framework="torch", names=names)


def test_layers_that_the_file_lacks():
    less = {key: array for key, array in source().items() if ".h.2." not in key}
    with pytest.raises(ValueError, match=r"got 'model\.h\.2' for 'layers/2'"):
        interop.load(abstract(Scanned()), less, framework="torch", names=NAMES)
