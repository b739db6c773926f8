"""Test weights of Equinox's own modules: their outputs, and their bits on the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from interop_values import OF_SEQUENCES, close, in_float64, inputs

from jaxnorm import interop, recurrent
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx

eqx = pytest.importorskip("equinox")
# users' code and the peers' own warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY, SLIM = jax.random.key(0), {"epsilon": 1e-5}


def drawn(module, seed=0):
    """The module with random arrays."""
    rng = np.random.default_rng(seed)
    draw = lambda leaf: (
        jnp.asarray(0.4 * rng.standard_normal(leaf.shape), leaf.dtype)
        if eqx.is_inexact_array(leaf)
        else leaf
    )
    return jax.tree.map(draw, module)


def loaded(model, source, x, **options):
    shapes = jax.eval_shape(lambda: model.init(KEY, x))
    return interop.load(shapes, source, framework="equinox", **options)


def same(ours, theirs):
    """Every leaf, the order of state included."""
    a, b = jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(theirs)
    for mine, other in zip(a, b, strict=True):
        assert jnp.asarray(mine).dtype == jnp.asarray(other).dtype if eqx.is_array(other) else True
        if eqx.is_array(other):
            np.testing.assert_array_equal(mine, other)


def first(x):
    return jnp.moveaxis(x, -1, 1)


CASES = {
    "layer": (lambda: eqx.nn.LayerNorm(6), jnn.LayerNorm(**SLIM), (4, 6)),
    "layer, two axes": (
        lambda: eqx.nn.LayerNorm((3, 6)),
        jnn.LayerNorm(**SLIM, reduction_axes=(-2, -1), feature_axes=(-2, -1)),
        (4, 3, 6),
    ),
    "layer without bias": (
        lambda: eqx.nn.LayerNorm(6, use_bias=False),
        jnn.LayerNorm(**SLIM, use_bias=False),
        (4, 6),
    ),
    "rms": (lambda: eqx.nn.RMSNorm(6, use_bias=False), jnn.RMSNorm(**SLIM), (4, 6)),
    "linear": (lambda: eqx.nn.Linear(6, 5, key=KEY), linen.Dense(5), (4, 6)),
    "linear without bias": (
        lambda: eqx.nn.Linear(6, 5, use_bias=False, key=KEY),
        linen.Dense(5, use_bias=False),
        (4, 6),
    ),
}
SPATIAL = {
    "group": (lambda: eqx.nn.GroupNorm(2, 6), jnn.GroupNorm(2, **SLIM), (2, 4, 4, 6)),
    "conv 1d": (
        lambda: eqx.nn.Conv1d(6, 5, 3, key=KEY),
        linen.Conv(5, (3,), padding="VALID"),
        (2, 7, 6),
    ),
    "conv 2d of groups": (
        lambda: eqx.nn.Conv2d(6, 4, (3, 2), groups=2, key=KEY),
        linen.Conv(4, (3, 2), padding="VALID", feature_group_count=2),
        (2, 5, 5, 6),
    ),
    "conv 3d": (
        lambda: eqx.nn.Conv3d(2, 5, 2, key=KEY),
        linen.Conv(5, (2, 2, 2), padding="VALID"),
        (1, 3, 3, 3, 2),
    ),
    "transposed 1d": (
        lambda: eqx.nn.ConvTranspose1d(6, 6, 3, key=KEY),
        linen.ConvTranspose(6, (3,), padding="VALID"),
        (2, 7, 6),
    ),
    "transposed 2d": (
        lambda: eqx.nn.ConvTranspose2d(6, 4, (3, 2), stride=2, key=KEY),
        linen.ConvTranspose(4, (3, 2), strides=(2, 2), padding="VALID"),
        (2, 5, 5, 6),
    ),
}


@pytest.mark.parametrize("case", [*CASES, *SPATIAL])
def test_layers(case, tmp_path):
    make, model, shape = (CASES | SPATIAL)[case]
    theirs, x = drawn(make()), inputs(*shape)
    variables = loaded(model, theirs, x)
    if case in CASES:
        expected = in_float64(jax.vmap(theirs), x)
    else:
        expected = in_float64(lambda x: jnp.moveaxis(jax.vmap(theirs)(first(x)), 1, -1), x)
    close(model.apply(variables, x), expected)
    same(interop.save(variables, framework="equinox", like=theirs), theirs)
    eqx.tree_serialise_leaves(path := tmp_path / "m.eqx", theirs)
    options = {
        name: getattr(theirs, name) for name in ("use_bias", "use_weight") if hasattr(theirs, name)
    }
    for layers in (make(), {"layer": (type(theirs).__name__, options)}):
        again = loaded(model, path, x, layers=layers)
        jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_a_bias_of_rms_norm_has_no_place():
    with pytest.raises(ValueError, match=r"bias \(6,\): the model has no parameter for it"):
        loaded(jnn.RMSNorm(), eqx.nn.RMSNorm(6), inputs(4, 6))


def trained(mode, steps, x, momentum=0.9):
    """A batch norm and its state after so many steps."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "n", mode=mode, momentum=momentum)
    norm = drawn(norm)
    for i in range(steps):
        step = jax.vmap(norm, axis_name="n", in_axes=(0, None), out_axes=(0, None))
        _, state = step(x + np.float32(i), state)
    return norm, state


def evaluated(norm, state, x):
    """The output in float64."""
    call = lambda x: norm(x, state, inference=True)[0]
    return in_float64(jax.vmap(call, axis_name="n"), x)


@pytest.mark.parametrize(("mode", "steps"), [("batch", 0), ("batch", 1), ("batch", 5), ("ema", 3)])
def test_batch_norm(mode, steps, tmp_path):
    x = inputs(5, 6)
    norm, state = trained(mode, steps, x)
    model = jnn.BatchNorm(use_running_average=True)
    variables = loaded(model, (norm, state), x)
    close(model.apply(variables, x), evaluated(norm, state, x))
    same(interop.save(variables, framework="equinox", like=(norm, state)), (norm, state))
    eqx.tree_serialise_leaves(path := tmp_path / "m.eqx", (norm, state))
    classes = {"norm": ("BatchNorm", {"mode": mode, "momentum": 0.9})}
    for layers in (trained(mode, 0, x), classes):
        again = loaded(model, path, x, layers=layers)
        jax.tree.map(np.testing.assert_array_equal, again, variables)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_averages_that_moved_go_on_in_equinox(mode):
    x = inputs(5, 6)
    norm, state = trained(mode, 2, x)
    model = jnn.BatchNorm(use_running_average=False, momentum=0.9)
    variables = loaded(model, (norm, state), x)
    _, after = model.apply(variables, x, mutable=["batch_stats"])
    variables = {**variables, **after}
    norm, state = interop.save(variables, framework="equinox", like=(norm, state))
    evaluation = jnn.BatchNorm(use_running_average=True)
    close(evaluation.apply(variables, x), evaluated(norm, state, x))
    step = jax.vmap(norm, axis_name="n", in_axes=(0, None), out_axes=(0, None))
    _, state = step(x, state)
    index = norm.batch_state_index if mode == "batch" else norm.ema_state_index
    close(state.get(index)[0], 0.9 * after["batch_stats"]["mean"] + 0.1 * x.mean(0), 1.2e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell"])
def test_cells(name, bias):
    cell = drawn(getattr(eqx.nn, name)(6, 5, use_bias=bias, key=KEY))
    kind, x = name.removesuffix("Cell").lower(), inputs(2, 1, 6)
    h = jnp.asarray(inputs(2, 5)) * np.float32(0.5)
    like = getattr(recurrent, f"init_{kind}")(KEY, 6, 5, norm=None)
    params = interop.load(like, cell, framework="equinox")
    carry = h if kind == "gru" else (h, h)
    ours = getattr(recurrent, kind)(x, params, initial=carry, norm=None)[1][:, 0]
    theirs = in_float64(lambda x: jax.tree.leaves(jax.vmap(cell)(x, carry))[0], x[:, 0])
    close(ours, theirs)
    if bias:
        same(interop.save(params, framework="equinox", like=cell), cell)


@pytest.mark.parametrize("bias", [True, False])
def test_attention(bias):
    options = {f"use_{name}_bias": bias for name in ("query", "key", "value", "output")}
    theirs, x = drawn(eqx.nn.MultiheadAttention(2, 6, **options, key=KEY)), inputs(2, 4, 6)
    model = linen.MultiHeadDotProductAttention(num_heads=2, use_bias=bias)
    variables = loaded(model, theirs, x)
    expected = in_float64(lambda x: jax.vmap(theirs)(x, x, x), x)
    close(model.apply(variables, x), expected, OF_SEQUENCES)
    same(interop.save(variables, framework="equinox", like=theirs), theirs)


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    norms: list
    drop: eqx.nn.Dropout
    head: eqx.nn.MLP

    def __init__(self):
        self.conv = eqx.nn.Conv2d(3, 6, 3, key=KEY)
        self.norms = [eqx.nn.BatchNorm(6, "n", mode="batch"), eqx.nn.BatchNorm(6, "n", mode="ema")]
        self.drop = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.MLP(6, 2, 5, 1, key=KEY)

    def __call__(self, x, state, inference=True):
        x = self.conv(x)
        for norm in self.norms:
            x, state = norm(x, state, inference=inference)
        return self.head(x.mean((1, 2))), state


class Ours(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(6, (3, 3), padding="VALID")(x)
        for _ in range(2):
            x = jnn.BatchNorm(use_running_average=True)(x)
        return linen.Dense(2)(linen.relu(linen.Dense(5)(x.mean((1, 2)))))


def test_a_network_and_its_file(tmp_path):
    x = inputs(2, 5, 5, 3)
    net, state = eqx.nn.make_with_state(Net)()
    net = drawn(net)
    call = lambda inference: jax.vmap(
        lambda x, s: net(x, s, inference), axis_name="n", in_axes=(0, None), out_axes=(0, None)
    )
    for _ in range(3):
        _, state = call(False)(first(x), state)
    theirs = in_float64(lambda x: call(True)(x, state)[0], first(x))
    variables = loaded(model := Ours(), (net, state), x, show=False)
    close(model.apply(variables, x), theirs)
    same(interop.save(variables, framework="equinox", like=(net, state)), (net, state))
    eqx.tree_serialise_leaves(path := tmp_path / "m.eqx", (net, state))
    classes = {
        "conv": "Conv2d",
        "bn1": ("BatchNorm", {"mode": "batch"}),
        "bn2": ("BatchNorm", {"mode": "ema"}),
        "fc1": "Linear",
        "fc2": "Linear",
    }
    for layers in (eqx.nn.make_with_state(Net)(), classes):
        again = loaded(model, path, x, layers=layers, show=False)
        jax.tree.map(np.testing.assert_array_equal, again, variables)
    for layers, message in (
        (None, r"has \d+ arrays without names: got no layers\. Pass layers="),
        (net, "got 14 arrays and numbers for 20 in the file"),
        ({"conv": "Linear"}, r"conv\.weight needs 2 axes, got shape \(6, 3, 3, 3\) at array 0"),
        ({"conv": "Conv2d"}, "got none for 12 more arrays, the first of shape"),
        (classes | {"fc3": "Linear"}, r"fc3\.weight needs 2 axes, got shape \(6,\) at array"),
        (classes | {"bn1": "BatchNorm"}, "must say the mode of batch norm 'bn1', 'batch' or 'ema'"),
        (classes | {"fc2": "Dense"}, "layers must be of classes that are known.*got 'Dense'"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded(model, path, x, layers=layers)


def test_a_wrong_epsilon_is_warned_of():
    from flax import nnx

    norm = jnnx.LayerNorm(6, epsilon=1e-6, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="the layer has epsilon=1e-06, but the file was made with"):
        interop.load(norm, eqx.nn.LayerNorm(6), framework="equinox")


def test_bad_files(tmp_path):
    like, layers = {"kernel": np.ones((6, 5), "f")}, {"fc": ("Linear", {"use_bias": False})}
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", eqx.nn.Linear(6, 5, use_bias=False, key=KEY))
    whole = (tmp_path / "m.eqx").read_bytes()
    for size, message in (
        (0, "an empty file"),
        (60, "must be a file of equinox"),
        (150, "after 0"),
    ):
        (tmp_path / "cut.eqx").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=message):
            interop.load(like, tmp_path / "cut.eqx", framework="equinox", layers=layers)
    (tmp_path / "text.eqx").write_text("no arrays")
    with pytest.raises(ValueError, match=r"must be a file of equinox\.tree_serialise_leaves"):
        interop.load(like, tmp_path / "text.eqx", framework="equinox", layers=layers)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        interop.load(like, tmp_path / "no.eqx", framework="equinox", layers=layers)
    with pytest.raises(TypeError, match="layers must be the modules of the file, or a dict"):
        interop.load(like, tmp_path / "m.eqx", framework="equinox", layers="Linear")
    norm = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "n", mode="ema")[0]
    with pytest.raises(
        ValueError, match=r"must have the state of batch norm .*Give \(module, state\)"
    ):
        interop.load(like, norm, framework="equinox")
    with pytest.raises(TypeError, match="source must be an Equinox module"):
        interop.load(like, 3, framework="equinox")


def test_bfloat16(tmp_path):
    linear = jax.tree.map(lambda a: a.astype(jnp.bfloat16), eqx.nn.Linear(6, 5, key=KEY))
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", linear)
    found = loaded(linen.Dense(5), tmp_path / "m.eqx", inputs(2, 6), layers=linear)
    np.testing.assert_array_equal(found["params"]["kernel"], linear.weight.T.astype(jnp.float32))
