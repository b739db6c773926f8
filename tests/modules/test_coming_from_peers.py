"""Check what docs/from/*.md say of PyTorch, Keras and Haiku against these libraries.

Libraries that are not installed are left out.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from pages import blocks, run

import jaxnorm as jn
import jaxnorm.linen
from jaxnorm import recurrent

# the peers' own code and warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY = jax.random.key(0)
LOW, FULL = jnp.bfloat16, jnp.float32
close = np.testing.assert_allclose


@pytest.fixture
def x(rng):
    return rng.standard_normal((4, 6)).astype(np.float32)


@pytest.fixture
def with_nan(x):
    return np.where(np.arange(24).reshape(4, 6) == 0, np.float32(np.nan), x)


def converters(page):
    """The functions of a page's blocks of code."""
    return {
        name: value
        for code in blocks(f"docs/from/{page}.md")
        for name, value in run(code).items()
        if callable(value)
    }


def parts_of(norm):
    """Scale and bias, and the running Moments, of the parameters of a batch norm."""
    running = jn.Moments(jnp.ones(()), norm["mean"], norm["var"])
    return {name: norm[name] for name in ("scale", "bias")}, running


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")
        self.functions = converters("pytorch")

    def state(self, module):
        return {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}

    def norm(self, module, shape=(-1,)):
        """Scale and bias, and the running Moments (of that shape) of batch norm, or None."""
        state = module.state_dict()
        names = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
        like = {
            ours: jax.ShapeDtypeStruct(state[theirs].shape, FULL)
            for ours, theirs in names.items()
            if theirs in state
        }
        found = jn.interop.load(like, state, framework="torch")
        params = {name: found[name] for name in ("scale", "bias") if name in found}
        if "mean" not in found:
            return params, None
        mean, var = found["mean"].reshape(shape), found["var"].reshape(shape)
        return params, jn.Moments(jnp.ones(()), mean, var)

    def recurrent(self, name, module):
        like = getattr(recurrent, f"init_{name}")(KEY, 6, 5, norm=None)
        return jn.interop.load(like, module.state_dict(), framework="torch")

    def test_defaults(self):
        nn = self.torch.nn
        assert [(norm.eps, norm.momentum) for norm in (nn.BatchNorm1d(6),)] == [(1e-5, 0.1)]
        assert {
            norm.eps for norm in (nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6))
        } == {1e-5}
        assert nn.RMSNorm(6).eps is None
        assert not nn.InstanceNorm2d(6).affine

    def test_rms_epsilon(self, x):
        x *= 1e-3
        close(
            self.torch.nn.RMSNorm(6)(self.torch.tensor(x)).detach(),
            jn.rms_norm(x, epsilon=np.finfo("f4").eps),
            rtol=1e-5,
        )

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_rms_epsilon_of_each_dtype(self, dtype):
        theirs = self.torch.nn.RMSNorm(6, dtype=(kind := getattr(self.torch, dtype)))
        # whose square is 2**-22
        output = float(theirs(self.torch.full((6,), 2.0**-11, dtype=kind))[0].detach())
        with jax.enable_x64(True):
            x = jnp.full(6, 2.0**-11, dtype)
            epsilon = self.functions["epsilon_of_torch"](x)
            ours = float(jn.rms_norm(x, epsilon=epsilon)[0])
        assert epsilon == (2.0**-52 if dtype == "float64" else 2.0**-23)
        assert ours == pytest.approx(output, rel=1e-6)
        # as many digits as half precision has
        assert output == pytest.approx((1 + 2.0**22 * epsilon) ** -0.5, rel=1e-3)

    @pytest.mark.parametrize(("size", "stride", "padding"), [(8, 2, 1), (7, 2, 1), (8, 1, 0)])
    def test_padding_of_convolutions(self, size, stride, padding, rng):
        x = rng.standard_normal((2, 3, size, size)).astype(np.float32)
        module = self.torch.nn.Conv2d(3, 5, 3, stride=stride, padding=padding)
        conv = linen.Conv(5, (3, 3), strides=stride, padding=padding)
        like = conv.init(KEY, x.transpose(0, 2, 3, 1))
        variables = jn.interop.load(like, module.state_dict(), framework="torch")
        theirs = module(self.torch.tensor(x)).detach().numpy()
        close(
            conv.apply(variables, x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), theirs, atol=1e-5
        )

    def test_batch_norm_in_training_and_evaluation(self, rng):
        x = rng.standard_normal((2, 6, 3, 3)).astype(np.float32)
        module = self.torch.nn.BatchNorm2d(6)
        params, running = self.norm(module, (6, 1, 1))
        y, batch = jn.batch_norm(x, **params, feature_axes=1)
        close(y, module(self.torch.tensor(x)).detach(), atol=1e-5)
        running = jn.ema(running, batch, momentum=0.9, unbiased=True)
        _, theirs = self.norm(module, (6, 1, 1))
        close(running.mean, theirs.mean, atol=1e-6)
        close(running.var, theirs.var, rtol=1e-5)
        close(jn.normalize(x, theirs), module.eval()(self.torch.tensor(x)).detach(), atol=1e-5)

    def test_norms_of_checkpoints(self, rng):
        nn, x = self.torch.nn, rng.standard_normal((2, 6, 3, 3)).astype(np.float32)
        ours = {
            nn.GroupNorm(2, 6): lambda **params: jn.group_norm(
                x, 2, feature_axes=1, epsilon=1e-5, **params
            ),
            nn.InstanceNorm2d(6, affine=True): lambda **params: jn.instance_norm(
                x, feature_axes=1, epsilon=1e-5, **params
            ),
            nn.LayerNorm((6, 3, 3)): lambda **params: jn.layer_norm(
                x, axes=(1, 2, 3), epsilon=1e-5, **params
            ),
        }
        for module, norm in ours.items():
            for parameter in module.parameters():
                nn.init.normal_(parameter)
            found = norm(**self.norm(module)[0])
            close(found, module(self.torch.tensor(x)).detach(), atol=2e-5)

    def test_one_element_nan_and_the_mean_of_means(self, x, with_nan):
        norm = self.torch.nn.BatchNorm1d
        with pytest.raises(ValueError, match="more than 1 value"):
            norm(6)(self.torch.tensor(x[:1]))
        one, start = (
            jn.batch_norm(x[:1]),
            jn.Moments(jnp.ones(()), jnp.zeros((1, 6)), jnp.ones((1, 6))),
        )
        close(one[0], np.zeros((1, 6)))
        close(jn.ema(start, one[1], momentum=0.9).var, np.full((1, 6), 0.9), rtol=1e-6)
        np.testing.assert_array_equal(
            jn.ema(start, one[1], momentum=0.9, unbiased=True).var, start.var
        )
        (poisoned := norm(6))(self.torch.tensor(with_nan))
        assert np.isnan(poisoned.running_mean[0])
        cumulative = norm(6, momentum=None)
        for part in (x[:3], x[1:3] + 1):
            cumulative(self.torch.tensor(part))
        close(cumulative.running_mean, (x[:3].mean(0) + x[1:3].mean(0) + 1) / 2, atol=1e-6)
        close(cumulative.running_var, (x[:3].var(0, ddof=1) + x[1:3].var(0, ddof=1)) / 2, rtol=1e-5)

    def test_dtypes(self, x):
        for module in (
            self.torch.nn.BatchNorm1d(6),
            self.torch.nn.LayerNorm(6),
            self.torch.nn.GroupNorm(2, 6),
            self.torch.nn.RMSNorm(6),
        ):
            assert module(self.torch.tensor(x).bfloat16()).dtype == self.torch.bfloat16
            with pytest.raises((NotImplementedError, RuntimeError)):
                module(self.torch.tensor(x).int())
        assert jn.layer_norm(jnp.asarray(x, LOW), scale=jnp.ones(6)).dtype == LOW
        assert jaxnorm.linen.LayerNorm().init_with_output(KEY, jnp.asarray(x, LOW))[0].dtype == FULL
        with pytest.raises(TypeError):
            jn.layer_norm(x.astype(int))

    def test_weights(self):
        wrap = self.torch.nn.utils.parametrizations
        weighted = wrap.weight_norm(self.torch.nn.Linear(6, 3))
        state = self.state(weighted)
        found = jn.weight_norm(
            state["parametrizations.weight.original1"].T,
            2 * state["parametrizations.weight.original0"].ravel(),
        )
        close(found, 2 * weighted.weight.detach().numpy().T, rtol=1e-5)
        spectral = wrap.spectral_norm(self.torch.nn.Linear(6, 3), n_power_iterations=50)
        kernel, u, _ = jn.spectral_norm(
            self.state(spectral)["parametrizations.weight.original"].T, jnp.ones((1, 3)), n_steps=50
        )
        close(kernel, spectral.weight.detach().numpy().T, atol=1e-4)
        assert u.shape == (1, 3)

    @pytest.mark.parametrize("name", ["lstm", "gru"])
    def test_recurrent_checkpoints(self, name, rng):
        x = rng.standard_normal((2, 4, 6)).astype(np.float32)
        module = getattr(self.torch.nn, name.upper())(6, 5, batch_first=True)
        _, found = getattr(recurrent, name)(x, self.recurrent(name, module), norm=None)
        close(found, module(self.torch.tensor(x))[0].detach(), atol=1e-5)

    @pytest.mark.parametrize("activation", ["tanh", "relu"])
    def test_checkpoints_and_gradients_of_a_simple_network(self, activation, rng):
        x = rng.standard_normal((2, 9, 6)).astype(np.float32)
        module = self.torch.nn.RNN(6, 5, nonlinearity=activation, batch_first=True)
        params = self.recurrent("rnn", module)
        run = lambda x, params: recurrent.rnn(x, params, norm=None, activation=activation)[1]
        y, pull = jax.vjp(run, x, params)
        given = self.torch.tensor(x, requires_grad=True)
        theirs = module(given)[0]
        close(y, theirs.detach(), atol=1e-5)
        theirs.backward(self.torch.tensor(np.cos(np.asarray(y))))
        dx, dparams = pull(jnp.cos(y))
        close(dx, given.grad, atol=1e-5)
        close(dparams["recurrent_kernel"], module.weight_hh_l0.grad.T, atol=2e-5)
        close(dparams["bias"], module.bias_ih_l0.grad, atol=2e-5)


class TestKeras:
    @pytest.fixture(autouse=True)
    def _keras(self):
        self.keras = pytest.importorskip("keras")
        self.layers = self.keras.layers

    def weights(self, layer):
        return {weight.name: np.asarray(weight) for weight in layer.weights}

    def norm(self, layer):
        """Scale and bias, and the running Moments."""
        like = {name: jax.ShapeDtypeStruct((6,), FULL) for name in ("scale", "bias", "mean", "var")}
        return parts_of(jn.interop.load(like, self.weights(layer), framework="keras"))

    def recurrent(self, name, layer, **options):
        like = getattr(recurrent, f"init_{name}")(KEY, 6, 5, norm=None, **options)
        return jn.interop.load(like, self.weights(layer), framework="keras")

    def test_defaults(self):
        layers = self.layers
        assert (layers.BatchNormalization().momentum, layers.BatchNormalization().epsilon) == (
            0.99,
            1e-3,
        )
        assert {
            layer.epsilon for layer in (layers.LayerNormalization(), layers.GroupNormalization())
        } == {1e-3}
        assert layers.RMSNormalization().epsilon == 1e-6
        assert layers.LSTM(5).cell.unit_forget_bias

    def test_batch_norm_in_training_and_evaluation(self, x):
        layer = self.layers.BatchNormalization(momentum=0.5)
        y, batch = jn.batch_norm(x, epsilon=1e-3)
        close(y, layer(x, training=True), atol=1e-5)
        params, running = self.norm(layer)
        close(running.mean, 0.5 * batch.mean[0], atol=1e-6)
        close(running.var, 0.5 + 0.5 * batch.var[0], rtol=1e-5)
        close(jn.normalize(x, running, **params, epsilon=1e-3), layer(x, training=False), atol=1e-5)

    def test_a_frozen_batch_norm(self, x):
        layer = self.layers.BatchNormalization(momentum=0.5)
        layer(x, training=True)
        layer.trainable = False
        before = np.asarray(layer.moving_mean)
        params, running = self.norm(layer)
        close(layer(x, training=True), jn.normalize(x, running, **params, epsilon=1e-3), atol=1e-5)
        np.testing.assert_array_equal(layer.moving_mean, before)

    def test_masks(self, x, with_nan):
        x, mask = np.stack([x, x + 2]), np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
        ours, theirs = (
            jn.batch_norm(x, where=mask[..., None], epsilon=1e-3)[0],
            self.layers.BatchNormalization()(x, training=True, mask=mask),
        )
        close(ours[mask], np.asarray(theirs)[mask], atol=1e-5)
        assert not np.any(ours[~mask])
        assert np.all(np.asarray(theirs)[~mask] != 0)
        layer = self.layers.BatchNormalization(momentum=0.5)
        close(
            layer(x, training=True, mask=np.zeros((2, 4), bool)),
            x / np.sqrt(np.float32(1e-3)),
            rtol=1e-5,
        )
        close(layer.moving_variance, np.full(6, 0.5))
        layer(with_nan[None], training=True)
        assert np.isnan(np.asarray(layer.moving_mean)[0])
        with pytest.raises(TypeError):
            self.layers.LayerNormalization()(x, mask=mask)

    def test_dtypes_and_devices(self, x):
        for name in ("BatchNormalization", "LayerNormalization", "RMSNormalization"):
            assert getattr(self.layers, name)()(jnp.asarray(x, LOW)).dtype == FULL
        assert self.layers.LayerNormalization()(x.astype("int32")).dtype == FULL
        with pytest.raises(ValueError, match="only supported with the TensorFlow backend"):
            self.layers.BatchNormalization(synchronized=True)

    def test_instance_norm(self, rng):
        x = rng.standard_normal((2, 3, 3, 6)).astype(np.float32)
        close(jn.instance_norm(x, epsilon=1e-3), self.layers.GroupNormalization(-1)(x), atol=1e-5)

    def test_recurrent_checkpoints_and_masks(self, rng):
        x = rng.standard_normal((2, 4, 6)).astype(np.float32)
        for name, options in (
            ("LSTM", {}),
            ("GRU", {}),
            ("GRU", {"reset_after": False}),
            ("SimpleRNN", {"activation": "relu"}),
        ):
            layer = getattr(self.layers, name)(
                5, return_sequences=True, bias_initializer="random_normal", **options
            )
            theirs, kind = np.asarray(layer(x)), name.lower().removeprefix("simple")
            made = options if kind == "gru" else {}
            params = self.recurrent(kind, layer, **made)
            ours = getattr(recurrent, kind)(x, params, norm=None, **options)[1]
            close(ours, theirs, atol=1e-5)
            masked = np.asarray(layer(x, mask=np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)))
            np.testing.assert_array_equal(masked[1, 3], masked[1, 2])


class TestHaiku:
    @pytest.fixture(autouse=True)
    def _haiku(self):
        self.hk = pytest.importorskip("haiku")

    def norm(self, params, state):
        """Scale and bias, and the running Moments."""
        like = {name: jax.ShapeDtypeStruct((6,), FULL) for name in ("scale", "bias", "mean", "var")}
        return parts_of(jn.interop.load(like, (params, state), framework="haiku"))

    def call(self, make, x, **options):
        function = self.hk.without_apply_rng(
            self.hk.transform_with_state(lambda x: make(self.hk)(x, **options))
        )
        params, state = function.init(KEY, np.ones_like(x))
        y, state = function.apply(params, state, x)
        return y, params, state

    def test_batch_norm_in_training(self, x, with_nan):
        def make(hk):
            return hk.BatchNorm(True, True, 0.9)

        y, params, state = self.call(make, x, is_training=True)
        ours, batch = jn.batch_norm(x)
        close(ours, y, atol=5e-5)  # Haiku's variance is a difference of squares
        found, running = self.norm(params, state)
        assert {name: value.shape for name, value in found.items()} == {"scale": (6,), "bias": (6,)}
        # after a single step the averages are those of the batch
        close(running.mean, batch.mean[0], atol=1e-6)
        close(running.var, batch.var[0], rtol=1e-4)
        assert np.abs(self.call(make, x + np.float32(4096), is_training=True)[0] - ours).max() > 0.1
        assert np.isnan(
            self.call(make, with_nan, is_training=True)[2]["batch_norm/~/mean_ema"]["average"][0, 0]
        )

    def test_a_frozen_batch_norm(self, x):
        hk = self.hk
        function = hk.without_apply_rng(
            hk.transform_with_state(lambda x, training: hk.BatchNorm(True, True, 0.9)(x, training))
        )
        params, state = function.init(KEY, x, True)
        _, state = function.apply(params, state, x, True)
        y, after = function.apply(params, state, x + 1, False)
        close(y, jn.normalize(x + 1, self.norm(params, state)[1]), atol=5e-5)
        jax.tree.map(np.testing.assert_array_equal, after, state)

    def test_unbound_axis(self, x):
        with pytest.raises(NameError, match="unbound axis name: i"):
            self.call(
                lambda hk: hk.BatchNorm(True, True, 0.9, cross_replica_axis="i"),
                x,
                is_training=True,
            )

    def test_defaults_and_dtypes(self, x):
        norms = {
            lambda hk: hk.LayerNorm(-1, True, True): jn.layer_norm(x, epsilon=1e-5),
            lambda hk: hk.RMSNorm(-1): jn.rms_norm(x, epsilon=1e-5),
            lambda hk: hk.GroupNorm(2): jn.group_norm(x, 2, epsilon=1e-5),
        }
        for make, ours in norms.items():
            close(ours, self.call(make, x)[0], atol=1e-5)
            assert self.call(make, jnp.asarray(x, LOW))[0].dtype == LOW
        # by bfloat16's mean, which has steps of 0.5 there
        shifted = jnp.asarray(x + np.float32(100), LOW)
        theirs = self.call(lambda hk: hk.LayerNorm(-1, False, False), shifted)[0].astype(FULL)
        truth, ours = jn.layer_norm(shifted.astype(FULL)), jn.layer_norm(shifted).astype(FULL)
        assert np.abs(theirs - truth).max() > 0.05 > np.abs(ours - truth).max()
        with pytest.raises(TypeError):
            self.hk.testing.transform_and_run(lambda: self.hk.LayerNorm(-1))()

    def test_lstm_checkpoints(self, rng):
        x = rng.standard_normal((4, 2, 6)).astype(np.float32)

        def unroll(x):
            core = self.hk.LSTM(5)
            return self.hk.dynamic_unroll(core, x, core.initial_state(2))[0]

        function = self.hk.without_apply_rng(self.hk.transform(unroll))
        params = jax.tree.map(
            lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), function.init(KEY, x)
        )
        like = recurrent.init_lstm(KEY, 6, 5, norm=None)
        converted = jn.interop.load(like, params, framework="haiku")
        _, ours = recurrent.lstm(x, converted, norm=None, time_major=True)
        close(ours, function.apply(params, x), atol=1e-5)

    def test_gru_checkpoints_and_gradients(self, rng):
        x = rng.standard_normal((7, 2, 6)).astype(np.float32)

        def unroll(x):
            core = self.hk.GRU(5)
            return self.hk.dynamic_unroll(core, x, core.initial_state(2))[0]

        function = self.hk.without_apply_rng(self.hk.transform(unroll))
        params = jax.tree.map(
            lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), function.init(KEY, x)
        )
        like = recurrent.init_gru(KEY, 6, 5, norm=None, reset_after=False)
        converted = jn.interop.load(like, params, framework="haiku")
        run = lambda x: recurrent.gru(x, converted, norm=None, reset_after=False, time_major=True)[
            1
        ]
        theirs = lambda x: function.apply(params, x)
        close(run(x), theirs(x), atol=1e-5)
        gradients = (jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (run, theirs))
        close(*gradients, atol=1e-5)
