"""Test weights of PyTorch's own classes: their outputs, and their bits on the way back."""

from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxnorm import interop, recurrent
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx

torch = pytest.importorskip("torch")
from interop_torch import drawn, output, round_trip  # noqa: E402
from interop_values import close, inputs, same_bits  # noqa: E402

# users' code and the peers' own warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY = jax.random.key(0)
nn, norms = torch.nn, torch.nn.utils.parametrizations

# In float32, from float64, of sums of many products: convolutions, and layers one after the other,
# of which two of a recurrent network were off by 4.1e-7.
OF_SUMS = 5e-7


def loaded(model, module, x, *, arguments=None, seed=0, **options):
    """Variables of a linen model with the weights of a module."""
    shapes = jax.eval_shape(lambda: model.init(KEY, x, **(arguments or {})))
    return interop.load(shapes, drawn(module, seed).state_dict(), framework="torch", **options)


NORMS = {
    "batch 1d": (nn.BatchNorm1d(6), jnn.BatchNorm(use_running_average=True), (5, 6)),
    "batch 2d": (nn.BatchNorm2d(6), jnn.BatchNorm(use_running_average=True), (2, 3, 3, 6)),
    "batch 3d": (nn.BatchNorm3d(6), jnn.BatchNorm(use_running_average=True), (2, 2, 3, 3, 6)),
    "batch, cumulative": (
        nn.BatchNorm1d(6, momentum=None),
        jnn.BatchNorm(use_running_average=True),
        (5, 6),
    ),
    "batch, affine=False": (
        nn.BatchNorm1d(6, affine=False),
        jnn.BatchNorm(use_running_average=True, use_scale=False, use_bias=False),
        (5, 6),
    ),
    "instance": (nn.InstanceNorm2d(6, affine=True), jnn.InstanceNorm(epsilon=1e-5), (2, 3, 3, 6)),
    "instance, running": (
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        jnn.BatchNorm(use_running_average=True),
        (2, 3, 3, 6),
    ),
    "layer": (nn.LayerNorm(6), jnn.LayerNorm(epsilon=1e-5), (5, 6)),
    "layer without bias": (
        nn.LayerNorm(6, bias=False),
        jnn.LayerNorm(epsilon=1e-5, use_bias=False),
        (5, 6),
    ),
    "group": (nn.GroupNorm(2, 6), jnn.GroupNorm(num_groups=2, epsilon=1e-5), (2, 3, 3, 6)),
    "rms": (nn.RMSNorm(6), jnn.RMSNorm(epsilon=2.0**-23), (5, 6)),
}


@pytest.mark.parametrize("case", NORMS)
def test_norms(case):
    module, model, shape = NORMS[case]
    x = inputs(*shape)
    variables = loaded(model, module, x)
    close(model.apply(variables, x), output(module, x), 2e-7)
    round_trip(variables, module)


def test_synchronized_batch_norm():
    """It needs a GPU to run, but its state is a batch norm's."""
    module, model = nn.SyncBatchNorm(6), jnn.BatchNorm(use_running_average=True)
    variables = loaded(model, module, inputs(5, 6))
    np.testing.assert_array_equal(variables["batch_stats"]["var"], module.running_var)
    round_trip(variables, module)


def test_layer_norm_over_several_axes():
    module = drawn(nn.LayerNorm((2, 3, 4)))
    axes, x = (-3, -2, -1), inputs(5, 2, 3, 4)
    with torch.no_grad():
        theirs = deepcopy(module).double()(torch.tensor(x).double()).numpy()
    model = jnn.LayerNorm(epsilon=1e-5, reduction_axes=axes, feature_axes=axes)
    close(model.apply(loaded(model, module, x), x), theirs, 2e-7)
    flat = jnnx.LayerNorm(
        24, epsilon=1e-5, reduction_axes=axes, feature_axes=axes, rngs=nnx.Rngs(0)
    )
    close(interop.load(flat, module.state_dict(), framework="torch")(x), theirs, 2e-7)
    same_bits(
        interop.save(flat, framework="torch", like=module.state_dict()),
        {name: tensor.numpy() for name, tensor in module.state_dict().items()},
    )


def test_training_goes_on_as_in_pytorch():
    """The running statistics after the next batch, and the output of it."""
    module, x = drawn(nn.BatchNorm2d(6)), inputs(4, 3, 3, 6)
    model = jnn.BatchNorm(use_running_average=False, momentum=0.9, unbiased=True)
    variables = loaded(model, module, x)
    y, after = model.apply(variables, x, mutable=["batch_stats"])
    close(y, output(module.train(), x), 2e-7)
    np.testing.assert_allclose(after["batch_stats"]["mean"], module.running_mean, rtol=1.2e-6)
    np.testing.assert_allclose(after["batch_stats"]["var"], module.running_var, rtol=1.2e-6)


KERNELS = {
    "Linear": (nn.Linear(6, 4), linen.Dense(4), (5, 6)),
    "Linear without bias": (nn.Linear(6, 4, bias=False), linen.Dense(4, use_bias=False), (5, 6)),
    "Conv1d": (nn.Conv1d(6, 4, 3, padding=1), linen.Conv(4, (3,), padding=1), (2, 7, 6)),
    "Conv2d": (
        nn.Conv2d(6, 4, (3, 2), stride=2),
        linen.Conv(4, (3, 2), strides=2, padding="VALID"),
        (2, 7, 8, 6),
    ),
    "Conv2d of groups": (
        nn.Conv2d(6, 4, 3, groups=2),
        linen.Conv(4, (3, 3), feature_group_count=2, padding="VALID"),
        (2, 7, 8, 6),
    ),
    "Conv2d of each channel": (
        nn.Conv2d(6, 6, 3, groups=6),
        linen.Conv(6, (3, 3), feature_group_count=6, padding="VALID"),
        (2, 7, 8, 6),
    ),
    "Conv3d": (nn.Conv3d(6, 4, 2), linen.Conv(4, (2, 2, 2), padding="VALID"), (1, 4, 3, 5, 6)),
    "ConvTranspose1d": (
        nn.ConvTranspose1d(6, 4, 3, stride=2),
        linen.ConvTranspose(4, (3,), strides=(2,), padding="VALID"),
        (2, 5, 6),
    ),
    "ConvTranspose2d": (
        nn.ConvTranspose2d(6, 4, (4, 3), stride=2, padding=1),
        linen.ConvTranspose(4, (4, 3), strides=(2, 2), padding=((2, 2), (1, 1))),
        (2, 5, 4, 6),
    ),
    "ConvTranspose2d, transpose_kernel": (
        nn.ConvTranspose2d(6, 4, (2, 3), stride=2),
        linen.ConvTranspose(4, (2, 3), strides=(2, 2), padding="VALID", transpose_kernel=True),
        (2, 5, 4, 6),
    ),
    "ConvTranspose3d": (
        nn.ConvTranspose3d(6, 4, 2),
        linen.ConvTranspose(4, (2, 2, 2), padding="VALID"),
        (1, 3, 3, 2, 6),
    ),
}


@pytest.mark.parametrize("case", KERNELS)
def test_kernels(case):
    module, model, shape = KERNELS[case]
    x = inputs(*shape)
    variables = loaded(model, module, x)
    close(model.apply(variables, x), output(module, x), OF_SUMS)
    round_trip(variables, module)


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_as_many_channels_in_as_out(transpose_kernel):
    """Shapes do not tell convolutions from transposed ones, nor the two ways to store these."""
    module, x = drawn(nn.ConvTranspose1d(4, 4, 3)), inputs(2, 5, 4)
    layer = linen.ConvTranspose(4, (3,), padding="VALID", transpose_kernel=transpose_kernel)
    params = layer.init(KEY, x)["params"]
    kind = "ConvTranspose(transpose_kernel=True)" if transpose_kernel else "ConvTranspose"
    found = interop.load(params, module.state_dict(), framework="torch", kinds={"*": kind})
    close(layer.apply({"params": found}, x), output(module, x), 2e-7)
    # by name
    if not transpose_kernel:
        named = interop.load(
            {"ConvTranspose_0": params}, module.state_dict(), framework="torch", show=False
        )
        np.testing.assert_array_equal(named["ConvTranspose_0"]["kernel"], found["kernel"])
    # by type
    theirs = nnx.ConvTranspose(
        4, 4, (3,), padding="VALID", transpose_kernel=transpose_kernel, rngs=nnx.Rngs(0)
    )
    interop.load(theirs, module.state_dict(), framework="torch")
    close(theirs(x), output(module, x), 2e-7)


def test_embedding():
    module, model = drawn(nn.Embedding(7, 3)), linen.Embed(7, 3)
    variables = loaded(model, module, jnp.zeros(2, int))
    np.testing.assert_array_equal(variables["params"]["embedding"], module.weight.detach())
    round_trip(variables, module)


CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
MODULES = {"lstm": jnn.LSTM, "gru": jnn.GRU, "rnn": jnn.SimpleRNN}


def runs(module, *given, **options):
    """The first output in float64; a copy computes it, as the module stays in float32."""
    with torch.no_grad():
        wide = (torch.tensor(x).double() for x in given)
        return deepcopy(module).double()(*wide, **options)[0].numpy()


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(
    ("layers", "bidirectional"), [(1, False), (2, False), (1, True), (2, True)]
)
def test_recurrent_layers(name, layers, bidirectional):
    options = {"num_layers": layers, "bidirectional": bidirectional}
    module = CELLS[name](4, 3, batch_first=True, **options)
    model, x = MODULES[name](3, norm=None, **options), inputs(2, 6, 4)
    variables = loaded(model, module, x, show=False)
    close(model.apply(variables, x), runs(module, x), OF_SUMS)
    round_trip(variables, module)
    # the two biases are one here: the way back of what has changed keeps the sum
    changed = jax.tree.map(lambda leaf: leaf * np.float32(0.5), variables)
    back = interop.save(changed, framework="torch", like=module.state_dict())
    module.load_state_dict({key: torch.tensor(value) for key, value in back.items()})
    close(model.apply(changed, x), runs(module, x), OF_SUMS)
    again = interop.load(changed, back, framework="torch", show=False)
    jax.tree.map(np.testing.assert_array_equal, again, changed)


def test_projection():
    module = drawn(nn.LSTM(4, 5, proj_size=2, num_layers=2, bidirectional=True, batch_first=True))
    x = inputs(2, 6, 4)
    model = jnn.LSTM(5, norm=None, projection=2, num_layers=2, bidirectional=True)
    close(model.apply(loaded(model, module, x, show=False), x), runs(module, x), OF_SUMS)


@pytest.mark.parametrize("name", CELLS)
def test_parameters_of_functions(name):
    module, x = drawn(CELLS[name](4, 3, batch_first=True)), inputs(2, 6, 4)
    like = getattr(recurrent, f"init_{name}")(KEY, 4, 3, norm=None)
    params = interop.load(like, module.state_dict(), framework="torch")
    assert params.keys() == like.keys()
    close(getattr(recurrent, name)(x, params, norm=None)[1], runs(module, x), OF_SUMS)


@pytest.mark.parametrize(
    ("cell", "module"),
    [
        (linen.OptimizedLSTMCell(3), nn.LSTM),
        (linen.LSTMCell(3), nn.LSTM),
        (linen.GRUCell(3), nn.GRU),
        (linen.SimpleCell(3), nn.RNN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_cells_of_flax(cell, module):
    module, model, x = module(4, 3, batch_first=True), linen.RNN(cell), inputs(2, 6, 4)
    variables = loaded(model, module, x)
    close(model.apply(variables, x), runs(module, x), OF_SUMS)


def test_cells_of_flax_in_both_directions():
    module = nn.GRU(4, 3, batch_first=True, bidirectional=True)
    model = linen.Bidirectional(linen.RNN(linen.GRUCell(3)), linen.RNN(linen.GRUCell(3)))
    x = inputs(2, 6, 4)
    close(model.apply(loaded(model, module, x, show=False), x), runs(module, x), OF_SUMS)


@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell", "SimpleCell"])
def test_cells_of_nnx(name):
    module = drawn((nn.RNN if name == "SimpleCell" else nn.LSTM)(4, 3, batch_first=True))
    model = nnx.RNN(getattr(nnx, name)(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    interop.load(model, module.state_dict(), framework="torch")
    close(model(x := inputs(2, 6, 4)), runs(module, x), OF_SUMS)


def test_a_gru_of_nnx_has_no_place_for_the_bias_of_the_candidate():
    module = drawn(nn.GRU(4, 3, batch_first=True))
    model = nnx.RNN(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no place for recurrent_bias, which is not 0"):
        interop.load(model, module.state_dict(), framework="torch")
    with torch.no_grad():
        module.bias_hh_l0[6:] = 0
    interop.load(model, module.state_dict(), framework="torch")
    close(model(x := inputs(2, 6, 4)), runs(module, x), OF_SUMS)


@pytest.mark.parametrize("name", CELLS)
def test_without_biases(name):
    module = nn.RNN if name == "rnn" else CELLS[name]
    module, x = module(4, 3, batch_first=True, bias=False), inputs(2, 6, 4)
    model = MODULES[name](3, norm=None)
    close(model.apply(loaded(model, module, x), x), runs(module, x), OF_SUMS)


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_single_cells(name):
    module = drawn(getattr(nn, name)(4, 3))
    kind = {"LSTMCell": "lstm", "GRUCell": "gru", "RNNCell": "rnn"}[name]
    like = getattr(recurrent, f"init_{kind}")(KEY, 4, 3, norm=None)
    params = interop.load(like, module.state_dict(), framework="torch")
    x = inputs(2, 1, 4)
    with torch.no_grad():
        theirs = deepcopy(module).double()(torch.tensor(x[:, 0]).double())
    theirs = (theirs[0] if kind == "lstm" else theirs).numpy()
    close(getattr(recurrent, kind)(x, params, norm=None)[1][:, 0], theirs, OF_SUMS)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 4, "vdim": 5}, {"bias": False}], ids=str)
def test_attention(sizes):
    module = nn.MultiheadAttention(6, 2, batch_first=True, **sizes)
    q, k, v = (inputs(2, 3, size) for size in (6, sizes.get("kdim", 6), sizes.get("vdim", 6)))
    model = linen.MultiHeadDotProductAttention(num_heads=2, use_bias=sizes.get("bias", True))
    shapes = jax.eval_shape(lambda: model.init(KEY, q, k, v))
    drawn(module)
    variables = interop.load(shapes, module.state_dict(), framework="torch")
    close(model.apply(variables, q, k, v), runs(module, q, k, v, need_weights=False), OF_SUMS)
    round_trip(variables, module)
    named = interop.save(variables, framework="torch")
    same_bits(named, {key: tensor.numpy() for key, tensor in module.state_dict().items()})
    theirs = nnx.MultiHeadAttention(
        num_heads=2,
        in_features=6,
        in_kv_features=sizes.get("kdim", 6),
        use_bias=sizes.get("bias", True),
        decode=False,
        rngs=nnx.Rngs(0),
    )
    if sizes.get("kdim") is None:
        interop.load(theirs, module.state_dict(), framework="torch")
        close(theirs(q, k, v), runs(module, q, k, v, need_weights=False), OF_SUMS)


def test_attention_of_separate_layers():
    """As transformers has it: four Linear, of which the heads are not told apart."""
    layers = nn.ModuleDict({f"{name}_proj": nn.Linear(6, 6) for name in ("q", "k", "v", "out")})
    model, x = linen.MultiHeadDotProductAttention(num_heads=2), inputs(2, 3, 6)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    variables = loaded(model, layers, x, names=names)
    kernel = variables["params"]["query"]["kernel"]
    np.testing.assert_array_equal(kernel.reshape(6, 6), layers["q_proj"].weight.detach().numpy().T)
    round_trip(variables, layers, names=names)
