"""Test the models that take weights, weights of Flax, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import FrozenDict, freeze
from interop_values import dense, ones, state

import jaxnorm as jn
from jaxnorm import interop
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
KEY = jax.random.key(0)
rng = np.random.default_rng(0)


NORM = {"scale": ones(2), "bias": ones(2)}


class TestModels:
    source = state(weight=(3, 2), bias=(3,))

    def expect(self, params):
        np.testing.assert_array_equal(params["kernel"], self.source["weight"].T)
        np.testing.assert_array_equal(params["bias"], self.source["bias"])

    def test_variables_of_linen(self):
        variables = linen.Dense(3).init(KEY, jnp.ones((1, 2)))
        result = interop.load(variables, self.source, framework="torch")
        self.expect(result["params"])
        assert isinstance(result["params"]["kernel"], jax.Array)
        frozen = interop.load(freeze(variables), self.source, framework="torch")
        assert isinstance(frozen, FrozenDict)
        self.expect(frozen["params"])
        self.expect(interop.load(variables["params"], self.source, framework="torch"))

    def test_boxes_are_kept(self):
        layer = linen.Dense(3, kernel_init=linen.with_partitioning(linen.zeros_init(), (None, "x")))
        variables = layer.init(KEY, jnp.ones((1, 2)))
        result = interop.load(variables, self.source, framework="torch")
        assert result["params"]["kernel"].names == (None, "x")
        self.expect(linen.unbox(result["params"]))

    def test_values_are_copies(self):
        source = {name: value.copy() for name, value in self.source.items()}
        result = interop.load({"kernel": ones(2, 3), "bias": ones(3)}, source, framework="torch")
        source["bias"][:] = 9
        self.expect(result)

    def test_modules_of_nnx(self):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        before = np.asarray(model.kernel[...])
        with pytest.raises(ValueError, match="bias"):
            interop.load(model, {"weight": self.source["weight"]}, framework="torch")
        np.testing.assert_array_equal(model.kernel[...], before)
        assert interop.load(model, self.source, framework="torch") is model
        self.expect({"kernel": model.kernel[...], "bias": model.bias[...]})

    def test_a_state_of_nnx(self):
        state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        result = interop.load(state, self.source, framework="torch")
        assert isinstance(result, nnx.State)
        pure = nnx.to_pure_dict(result)
        self.expect(pure)

    def test_random_states_stay(self):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.fc, self.dropout = nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        model = Model(nnx.Rngs(0))
        interop.load(model, self.source, framework="torch")
        self.expect({"kernel": model.fc.kernel[...], "bias": model.fc.bias[...]})
        assert model.dropout(jnp.ones(4)).shape == (4,)

    def test_a_normalized_network_of_nnx(self):
        model = jnnx.BatchNorm(2, rngs=nnx.Rngs(0))
        source = state(weight=(2,), bias=(2,), running_mean=(2,), running_var=(2,))
        interop.load(model, source | {"num_batches_tracked": np.array(3)}, framework="torch")
        np.testing.assert_array_equal(model.var[...], source["running_var"])


class TestFlax:
    """Variables of linen and modules of nnx, each into the other."""

    def test_linen_into_nnx_and_back(self):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.norm = jnnx.BatchNorm(4, rngs=rngs)
                self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
                self.rnn = jnnx.LSTM(4, 3, norm=None, rngs=rngs)

        class Linen(linen.Module):
            def setup(self):
                self.norm = jnn.BatchNorm(use_running_average=True)
                self.attention = linen.MultiHeadDotProductAttention(2)
                self.rnn = jnn.LSTM(3, norm=None)

            def __call__(self, x):
                return self.rnn(self.attention(self.norm(x)))

        x = rng.standard_normal((2, 5, 4)).astype("f")
        variables = Linen().init(KEY, x)
        variables = jax.tree.map(lambda a: a + rng.uniform(0, 1, a.shape).astype("f"), variables)
        model = interop.load(Model(nnx.Rngs(0)), variables, framework="flax", show=False)
        model.eval()
        y = model.rnn(model.attention(model.norm(x)))
        np.testing.assert_allclose(y, Linen().apply(variables, x), atol=1e-6)
        back = interop.load(variables, model, framework="flax", show=False)
        jax.tree.map(np.testing.assert_array_equal, back, variables)

    def test_files(self, tmp_path):
        params = jn.recurrent.init_gru(KEY, 3, 4, norm=None)
        np.savez(tmp_path / "w.npz", **interop.save(params, framework="flax"))
        like = jax.eval_shape(lambda: params)
        found = interop.load(like, tmp_path / "w.npz", framework="flax")
        jax.tree.map(np.testing.assert_array_equal, found, params)


class TestSave:
    def test_names(self):
        params = {"Dense_0": dense(2, 3), "block": {"LayerNorm_0": NORM, "gamma": ones(3)}}
        names = lambda **options: set(interop.save(params, framework="torch", **options))
        assert names() == {
            "Dense_0.weight",
            "block.LayerNorm_0.weight",
            "block.LayerNorm_0.bias",
            "block.gamma",
        }
        assert names(names={"Dense_0": "fc", "block": "layer.0"}) == {
            "fc.weight",
            "layer.0.LayerNorm_0.weight",
            "layer.0.LayerNorm_0.bias",
            "layer.0.gamma",
        }
        assert names(names={"block": None}) == {"Dense_0.weight"}
        known = {"Dense_0": "fc"}.get  # what it does not know keeps its path
        assert names(names=known) - names() == {"fc.weight"}

    def test_heads(self):
        """A kernel of three axes is a convolution's unless its bias has two."""
        convolution = {"kernel": ones(3, 2, 4), "bias": ones(4)}
        heads = {"kernel": ones(3, 2, 4), "bias": ones(2, 4)}
        shape = lambda params, **options: (
            interop.save(params, framework="torch", **options)["weight"].shape
        )
        assert shape(convolution) == (4, 2, 3)
        assert shape(heads) == (8, 3)
        assert shape(convolution, kinds={"": "Dense"}) == (4, 6)

    def test_a_state_dict_to_fill(self):
        like = {"fc.weight": ones(3, 2, dtype=np.float64), "n.num_batches_tracked": np.array(5)}
        like |= {f"n.{name}": ones(3) for name in ("running_mean", "running_var")}
        variables = {
            "params": {"fc": {"kernel": np.full((2, 3), 2, "f")}},
            "batch_stats": {"n": {"mean": np.zeros(3, "f"), "var": ones(3)}},
        }
        found = interop.save(variables, framework="torch", like=like)
        assert list(found) == list(like)
        assert found["fc.weight"].dtype == np.float64
        assert found["fc.weight"].flags.c_contiguous
        assert found["n.num_batches_tracked"] == 5
        assert not found["n.running_mean"].any()
        with pytest.raises(ValueError, match=r"more \(2,\): the model has no parameter"):
            interop.save(variables, framework="torch", like={**like, "more": ones(2)})

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            ({"a": "x", "b": "x"}, "two are called 'x.weight'"),
            ({"c": "x"}, "names must be paths of the model: got 'c'"),
        ],
    )
    def test_mistakes(self, names, said):
        params = {"a": dense(2, 3), "b": dense(2, 3)}
        with pytest.raises(ValueError, match=said):
            interop.save(params, framework="torch", names=names)
