"""Test weights of Haiku's own modules: their outputs, and their bits on the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from interop_values import OF_SEQUENCES, close, in_float64, inputs, same_bits

from jaxnorm import interop, recurrent
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx

hk = pytest.importorskip("haiku")
# users' code and the peers' own warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY = jax.random.key(0)


def drawn(function, x, seed=0):
    """Parameters and state of random numbers; the state after two batches."""
    rng = np.random.default_rng(seed)
    draw = lambda leaf: (0.4 * rng.standard_normal(leaf.shape)).astype("float32")
    params, state = function.init(KEY, x)
    params = jax.tree.map(draw, params)
    for i in range(2):
        state = function.apply(params, state, KEY, x + np.float32(i))[1]
    return params, state


def output(function, params, state, x):
    """The output in float64."""
    return in_float64(lambda x: function.apply(params, state, KEY, x)[0], x)


def transformed(make):
    return hk.transform_with_state(lambda x: make()(x))


def loaded(model, source, x, **options):
    shapes = jax.eval_shape(lambda: model.init(KEY, x))
    return interop.load(shapes, source, framework="haiku", **options)


def flat(tree):
    return {
        f"{module}/{name}": np.asarray(a) for module in tree for name, a in tree[module].items()
    }


def round_trip(variables, params, state):
    """Check that what was loaded comes back as it was."""
    found = interop.save(variables, framework="haiku", like=(params, state))
    for mine, theirs in zip(found, (params, state), strict=True):
        assert mine.keys() == theirs.keys()
        same_bits(flat(mine), flat(theirs))


SLIM = {"epsilon": 1e-5}
CASES = {
    "layer": (lambda: hk.LayerNorm(-1, True, True), jnn.LayerNorm(**SLIM), (4, 6)),
    "layer, two axes": (
        lambda: hk.LayerNorm((-2, -1), True, True, param_axis=(-2, -1)),
        jnn.LayerNorm(**SLIM, reduction_axes=(-2, -1), feature_axes=(-2, -1)),
        (3, 4, 6),
    ),
    "instance": (lambda: hk.InstanceNorm(True, True), jnn.InstanceNorm(**SLIM), (2, 4, 4, 6)),
    "group": (lambda: hk.GroupNorm(2), jnn.GroupNorm(2, **SLIM), (2, 4, 4, 6)),
    "rms": (lambda: hk.RMSNorm(-1), jnn.RMSNorm(**SLIM), (4, 6)),
    "linear": (lambda: hk.Linear(5), linen.Dense(5), (4, 6)),
    "linear without bias": (
        lambda: hk.Linear(5, with_bias=False),
        linen.Dense(5, use_bias=False),
        (4, 6),
    ),
    "conv 1d": (lambda: hk.Conv1D(5, 3), linen.Conv(5, (3,)), (2, 7, 6)),
    "conv 2d": (lambda: hk.Conv2D(5, (3, 2)), linen.Conv(5, (3, 2)), (2, 5, 5, 6)),
    "conv 3d": (lambda: hk.Conv3D(5, 2), linen.Conv(5, (2, 2, 2)), (1, 3, 3, 3, 2)),
    "transposed 1d": (lambda: hk.Conv1DTranspose(6, 3), linen.ConvTranspose(6, (3,)), (2, 7, 6)),
    "transposed 2d": (
        lambda: hk.Conv2DTranspose(4, (3, 2), stride=2),
        linen.ConvTranspose(4, (3, 2), strides=(2, 2)),
        (2, 5, 5, 6),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layers(case):
    make, model, shape = CASES[case]
    function, x = transformed(make), inputs(*shape)
    params, state = drawn(function, x)
    variables = loaded(model, params, x)
    close(model.apply(variables, x), output(function, params, state, x))
    round_trip(variables, params, state)


def normed(x, training=False):
    return hk.BatchNorm(True, True, 0.9)(x, training)


def test_batch_norm_takes_the_average():
    function = hk.transform_with_state(normed)
    x = inputs(4, 3, 3, 6)
    params, state = drawn(hk.transform_with_state(lambda x: normed(x, True)), x)
    ema = state["batch_norm/~/mean_ema"]
    assert ema["average"].shape == (1, 1, 1, 6)
    assert np.abs(ema["average"] - ema["hidden"]).max() > 0.1
    model = jnn.BatchNorm(use_running_average=True)
    variables = loaded(model, (params, state), x)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], ema["average"].ravel())
    close(model.apply(variables, x), output(function, params, state, x))
    round_trip(variables, params, state)
    twin = interop.load(
        jnnx.BatchNorm(6, use_running_average=True, rngs=nnx.Rngs(0)),
        (params, state),
        framework="haiku",
    )
    close(twin(x), output(function, params, state, x))


def test_averages_that_moved_go_on_in_haiku():
    """What is hidden is the average, after so many steps that nothing is left of its start."""
    x = inputs(4, 6)
    training = hk.transform_with_state(lambda x: normed(x, True))
    params, state = drawn(training, x)
    model = jnn.BatchNorm(use_running_average=False, momentum=0.9)
    variables = loaded(model, (params, state), x)
    _, after = model.apply(variables, x, mutable=["batch_stats"])
    params, state = interop.save({**variables, **after}, framework="haiku", like=(params, state))
    mean = 0.9 * after["batch_stats"]["mean"] + 0.1 * x.mean(0)
    _, state = training.apply(params, jax.tree.map(jnp.asarray, state), KEY, x)
    close(state["batch_norm/~/mean_ema"]["average"][0], mean, 1.2e-6)


def test_embeddings():
    function = hk.transform_with_state(lambda x: hk.Embed(5, 4)(x))
    x = jnp.array([3, 1])
    params, state = function.init(KEY, x)
    variables = loaded(model := linen.Embed(5, 4), params, x)
    np.testing.assert_array_equal(
        model.apply(variables, x), function.apply(params, state, KEY, x)[0]
    )
    round_trip(variables, params, state)


def unrolled(make):
    def run(x):
        core = make()
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return hk.transform_with_state(run)


@pytest.mark.parametrize("name", ["lstm", "encoder_lstm"])
def test_lstm(name):
    function, x = unrolled(lambda: hk.LSTM(5, name=name)), inputs(7, 2, 6)
    params, state = drawn(function, x)
    theirs = output(function, params, state, x)
    like = recurrent.init_lstm(KEY, 6, 5, norm=None)
    found = interop.load(like, params, framework="haiku", names={"": name})
    close(recurrent.lstm(x, found, norm=None, time_major=True)[1], theirs, OF_SEQUENCES)
    model = jnn.LSTM(5, norm=None, time_major=True)
    variables = loaded(model, params, x)
    close(model.apply(variables, x), theirs, OF_SEQUENCES)
    round_trip(variables, params, state)
    np.testing.assert_array_equal(
        interop.save(found, framework="haiku", names={"": name})[f"{name}/linear"]["w"],
        params[f"{name}/linear"]["w"],
    )


def test_gru():
    """Haiku's z is 1 - z here, and r scales the state."""
    function, x = unrolled(lambda: hk.GRU(5)), inputs(7, 2, 6)
    params, state = drawn(function, x)
    theirs = output(function, params, state, x)
    like = recurrent.init_gru(KEY, 6, 5, norm=None, reset_after=False)
    found = interop.load(like, params, framework="haiku")
    close(
        recurrent.gru(x, found, norm=None, reset_after=False, time_major=True)[1],
        theirs,
        OF_SEQUENCES,
    )
    same_bits(flat(interop.save(found, framework="haiku", like=params)), flat(params))
    # the other GRU computes something else, and has one more bias
    like = recurrent.init_gru(KEY, 6, 5, norm=None)
    with pytest.raises(ValueError, match=r"recurrent_bias \(5,\): nothing in the file fits it"):
        interop.load(like, params, framework="haiku")


def test_attention():
    function = hk.transform_with_state(
        lambda x: hk.MultiHeadAttention(2, 3, w_init=hk.initializers.RandomNormal(), model_size=6)(
            x, x, x
        )
    )
    x = inputs(2, 4, 6)
    params, state = drawn(function, x)
    variables = loaded(model := linen.MultiHeadDotProductAttention(num_heads=2), params, x)
    close(model.apply(variables, x), output(function, params, state, x), OF_SEQUENCES)
    round_trip(variables, params, state)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (3, 3), name="conv")(x)
        x = linen.relu(jnn.BatchNorm(True, name="bn")(x)).mean((1, 2))
        for i in range(2):
            x = linen.Dense(5, name=f"linear_{i}")(x)
        return x


def test_a_network_and_a_file(tmp_path):
    def network(x, training=False):
        x = hk.Conv2D(4, 3, name="conv")(x)
        x = hk.BatchNorm(True, True, 0.9, name="bn")(x, training)
        return hk.nets.MLP([5, 5], activation=lambda x: x)(jax.nn.relu(x).mean((1, 2)))

    function, x = hk.transform_with_state(network), inputs(2, 5, 5, 3)
    params, state = drawn(hk.transform_with_state(lambda x: network(x, True)), x)
    names = {f"linear_{i}": f"mlp/~/linear_{i}" for i in range(2)}
    variables = loaded(model := Net(), (params, state), x, names=names)
    close(model.apply(variables, x), output(function, params, state, x))
    round_trip(variables, params, state)
    np.savez(tmp_path / "w.npz", **flat(params), **flat(state))
    again = loaded(model, tmp_path / "w.npz", x, names=names)
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_without_a_model_of_haiku():
    model = jnn.BatchNorm(use_running_average=True)
    variables = model.init(KEY, inputs(4, 6))
    params, state = interop.save(variables, framework="haiku", names={"": "batch_norm"})
    assert list(params["batch_norm"]) == ["scale", "offset"]
    assert set(state) == {"batch_norm/~/mean_ema", "batch_norm/~/var_ema"}
    again = loaded(model, (params, state), inputs(4, 6))
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_what_is_refused(tmp_path):
    like = {"kernel": np.ones((6, 5), "f"), "bias": np.ones(5, "f")}
    params = {"linear": {"w": np.ones((6, 4), "f"), "b": np.ones(5, "f")}}
    with pytest.raises(ValueError, match=r"linear/w \(6, 4\): the model has no parameter for it"):
        interop.load(like, params, framework="haiku")
    with pytest.raises(TypeError, match=r"source must be params of Haiku.*got int"):
        interop.load(like, (params, 3), framework="haiku")
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"images \(2, 3\): the model has no parameter for it"):
        interop.load(like, tmp_path / "images.npz", framework="haiku")
    state = {"weight": np.ones((5, 6), "f"), "bias": np.ones(5, "f")}
    with pytest.raises(ValueError, match=r"These are names as in framework='torch'\."):
        interop.load(like, state, framework="haiku")
