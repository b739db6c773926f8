"""Test roles of parameters, weight decay and Muon, with every norm of both families."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxnorm as jn
from jaxnorm.training import ROLES, labels, muon_dimensions, weight_decay_mask

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
OPTIONS = {
    "evonorm_s0": {"num_groups": 2},
    "filter_response": {"learn_epsilon": True},
    "gated_rms": {"gate_first": True},
    "ghost_batch": {"num_chunks": 2},
    "group": {"num_groups": 2},
    "positional": {"use_scale": True},
    "unit": {"use_scale": True},
}
AFFINE = {"scale": "gain", "bias": "bias"}
RUNNING = {"mean": "statistic", "var": "statistic"}
BY_CONDITION = {"modulation/kernel": "weight", "modulation/bias": "bias"}
BATCH = AFFINE | RUNNING
TRUTH = {
    "batch": BATCH,
    "batch_renorm": BATCH | dict.fromkeys(("r_max", "d_max", "steps"), "statistic"),
    "keras_batch_renorm": BATCH | dict.fromkeys(("renorm_mean", "renorm_stddev"), "statistic"),
    "ghost_batch": BATCH,
    "conditional_batch": BY_CONDITION | RUNNING,
    "layer": AFFINE,
    "ada_layer": BY_CONDITION,
    "ada_layer_zero": BY_CONDITION,
    "rms": {"scale": "gain"},
    "gated_rms": {"scale": "gain"},
    "qk": {"q_norm/scale": "qk_gain", "k_norm/scale": "qk_gain"},
    "unit": {"scale": "gain"},
    "scale": {"scale": "gain"},
    "instance": AFFINE,
    "ada_instance": BY_CONDITION,
    "spade": {
        f"{layer}/{leaf}": role
        for layer in ("shared", "gamma", "beta")
        for leaf, role in (("kernel", "weight"), ("bias", "bias"))
    },
    "reversible_instance": AFFINE,
    "group": AFFINE,
    "positional": {"scale": "gain"},
    "switchable": BATCH | dict.fromkeys(("mean_logits", "var_logits"), "coefficient"),
    "global_response": AFFINE,
    "filter_response": AFFINE | {"threshold": "bias", "learned_epsilon": "coefficient"},
    "evonorm_s0": AFFINE | {"v": "coefficient"},
    "evonorm_b0": AFFINE | {"v": "coefficient", "var": "statistic"},
    "film": BY_CONDITION,
    "dynamic_tanh": AFFINE | {"alpha": "coefficient"},
    "dynamic_erf": AFFINE | {"alpha": "coefficient", "shift": "bias"},
    "graph": AFFINE | {"mean_scale": "coefficient"},
    "pair": {},
}
X = jnp.ones((2, 4, 4, 8))


def inputs(row):
    """What its module takes besides x."""
    if "condition" in row.call:
        return (jnp.ones((2, 4, 4, 3)),) if row.name == "spade" else (jnp.ones((2, 3)),)
    return (X,) if "gate)" in row.call or "q, k" in row.call else ()


def of_linen(name):
    row = jn.available_norms()[name]
    options = OPTIONS.get(name, {}) | ({"use_running_average": False} if row.running else {})
    init = jn.linen.norm(name, **options).init
    return jax.eval_shape(lambda: init(jax.random.key(0), X, *inputs(row)))


def of_nnx(name):
    row, sizes = jn.available_norms()[name], ()
    if "condition" in row.call:
        sizes = (3,)
    module = getattr(jn.nnx, row.nnx)
    return nnx.state(module(8, *sizes, rngs=nnx.Rngs(0), **OPTIONS.get(name, {})))


def by_path(tree):
    """Roles by path, without collections and boxes."""
    found = {}
    for path, role in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        names = [each for each in names if each not in ("params", "batch_stats", "value")]
        found["/".join(names)] = role
    return found


def test_every_norm_has_a_row():
    assert list(TRUTH) == list(jn.available_norms())
    assert set(ROLES) >= {role for roles in TRUTH.values() for role in roles.values()}


@pytest.mark.parametrize("name", TRUTH)
def test_each_parameter_of_each_norm(name):
    linen, state = of_linen(name), of_nnx(name)
    assert by_path(labels(linen)) == TRUTH[name]
    assert by_path(labels(state)) == TRUTH[name]
    assert by_path(labels(nnx.to_pure_dict(state))) == TRUTH[name]  # without classes
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), linen)
    assert by_path(labels(stacked)) == TRUTH[name]
    decays = by_path(weight_decay_mask(linen))
    assert decays == {path: role == "weight" for path, role in TRUTH[name].items()}


CELL = {
    "bias": "bias",
    "cell_bias": "bias",
    "cell_scale": "gain",
    "input_kernel": "weight",
    "input_scale": "gain",
    "recurrent_kernel": "weight",
    "recurrent_scale": "gain",
}


def test_recurrent_networks():
    key, x = jax.random.key(0), jnp.ones((2, 5, 3))
    params = jn.recurrent.init_lstm(key, 3, 4, projection=2)
    assert labels(params) == CELL | {"projection": "weight"}
    assert labels(jn.recurrent.init_lstm(key, 3, 4, placement="sum"))["scale"] == "gain"
    assert labels(jn.recurrent.init_gru(key, 3, 4))["recurrent_bias"] == "bias"
    assert labels(jn.linen.LSTM(4).init(key, x)) == {"params": {"cell": CELL}}
    state = nnx.state(jn.nnx.LSTM(3, 4, rngs=nnx.Rngs(0)), nnx.Param)
    assert by_path(labels(state)) == {f"cell/{name}": role for name, role in CELL.items()}


def test_norms_of_weights():
    """Their lengths are gains, and their statistics no parameters."""
    key, x, layer = jax.random.key(0), jnp.ones((2, 3)), {"kernel": "weight", "bias": "bias"}
    found = labels(jn.linen.WeightNorm(nn.Dense(4)).init(key, x))["params"]
    assert found == {"layer_instance": layer, "layer_instance/kernel/scale": "gain"}
    found = labels(jn.linen.SpectralNorm(nn.Dense(4)).init(key, x, update_stats=False))
    assert found["params"]["layer_instance"] == layer
    assert set(jax.tree.leaves(found["batch_stats"])) == {"statistic"}


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(4, kernel_init=boxed)(x)
        x = jn.linen.LayerNorm(scale_init=nn.with_partitioning(nn.initializers.ones, ("model",)))(x)
        return nn.Embed(5, 4, embedding_init=boxed)(jnp.zeros(2, int)) + x


def test_boxes_of_metadata_stay():
    found = labels(jax.eval_shape(lambda: Boxed().init(jax.random.key(0), jnp.ones((2, 3)))))
    params = found["params"]
    assert isinstance(params["Dense_0"]["kernel"], nn.Partitioned)
    assert params["Dense_0"]["kernel"].value == params["Embed_0"]["embedding"].value == "weight"
    assert params["LayerNorm_0"]["scale"].value == "gain"
    assert params["LayerNorm_0"]["bias"] == "bias"


def test_other_libraries():
    leaf = lambda *shape: np.ones(shape, np.float32)
    haiku = {"layer_norm": {"scale": leaf(4), "offset": leaf(4)}, "linear": {"w": leaf(4, 2)}}
    assert labels(haiku) == {
        "layer_norm": {"scale": "gain", "offset": "bias"},
        "linear": {"w": "weight"},
    }
    assert labels({"norm": {"weight": leaf(4)}, "fc": {"weight": leaf(4, 2)}, "b": leaf(4)}) == {
        "norm": {"weight": "gain"},
        "fc": {"weight": "weight"},
        "b": "bias",
    }
    # a learned mean is no running statistic
    assert labels({"mean": leaf(4, 2), "v": leaf(4, 4)}) == {"mean": "weight", "v": "weight"}


def test_state_that_is_not_trained():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert set(jax.tree.leaves(labels(nnx.state(model)))) == {"statistic"}
    assert labels({"params": {}, "cache": {"index": jnp.zeros((), int)}}) == {
        "params": {},
        "cache": {"index": "statistic"},
    }
    assert labels({"table": jnp.zeros((2, 2), int)}) == {"table": "statistic"}


def test_arguments_tell_what_a_tree_cannot():
    params = {
        "block": {"norm": {"scale": jnp.zeros(4)}, "grn": {"scale": jnp.zeros(4)}},
        "my_q": {"scale": jnp.ones(4)},
        "Dense_0": {"kernel": jnp.ones((4, 4))},
    }
    before = {
        "block": {"norm": {"scale": True}, "grn": {"scale": False}},
        "my_q": {"scale": True},
        "Dense_0": {"kernel": True},
    }
    found = labels(params, offset=("norm", "grn"), qk="my_q", before_norm=before)
    assert found["block"] == {"norm": {"scale": "offset_gain"}, "grn": {"scale": "offset_gain"}}
    assert found["my_q"] == {"scale": "qk_gain"}
    assert found["Dense_0"] == {"kernel": "weight_before_norm"}
    assert weight_decay_mask(params, before_norm=before)["Dense_0"]["kernel"]
    decays = weight_decay_mask(params, also=lambda path, leaf: path.startswith("block"))
    assert decays == {
        "block": {"norm": {"scale": True}, "grn": {"scale": True}},
        "my_q": {"scale": False},
        "Dense_0": {"kernel": True},
    }


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda p: labels(p, offset="nrom"), ValueError, "got 'nrom' for the gains norm/scale"),
        (lambda p: labels(p, before_norm={}), ValueError, "got 0 leaves for 2"),
        (lambda p: labels({"a": "b"}), TypeError, "must be arrays: got str at 'a'"),
        (lambda p: labels("b"), TypeError, r"must be arrays: got str\. Of a linen model pass"),
        (lambda p: labels(nn.LayerNorm()), TypeError, r"must be arrays: got LayerNorm\. Of a"),
        (lambda p: weight_decay_mask({"a": nn.LayerNorm}), TypeError, "got type at 'a'"),
        (lambda p: labels(p["fc"]["kernel"]), TypeError, r"one array, of shape \(4, 4\)\. Pass"),
        (lambda p: weight_decay_mask(np.ones(3)), TypeError, "must be a tree, whose names"),
        (lambda p: muon_dimensions(p["norm"]["scale"]), TypeError, "must be a tree, whose names"),
        (lambda p: labels(p, offsets="norm"), TypeError, "offset"),
        (lambda p: weight_decay_mask(p, also="embed"), ValueError, "got 'embed', which names none"),
        (lambda p: muon_dimensions(p, stacked="layer"), ValueError, "got 'layer', which names"),
    ],
)
def test_errors(call, error, said):
    params = {"norm": {"scale": jnp.ones(4)}, "fc": {"kernel": jnp.ones((4, 4))}}
    with pytest.raises(error, match=said):
        call(params)


def test_a_gain_and_a_kernel_share_one_scale(rng):
    """Decay of the kernel alone is undone by the gain."""
    x, kernel = (jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((5, 4), (4, 3)))
    y = jn.rms_norm(x, scale=jnp.ones(4)) @ kernel
    np.testing.assert_array_equal(jn.rms_norm(x, scale=jnp.full(4, 2.0)) @ (kernel / 2), y)


class Stack(nn.Module):
    """Layers that nn.scan stacks, with gains (4, 16) and kernels (4, 16, 16)."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = jn.linen.RMSNorm()(x)
                x = nn.MultiHeadDotProductAttention(2, use_bias=False)(x)
                return nn.Dense(16)(x), None

        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(3)(layers(name="layers")(x, None)[0])


@pytest.fixture(scope="module")
def stack():
    return Stack().init(jax.random.key(0), jnp.ones((1, 2, 16)))["params"]


def other_layers_move(optimizer, params, rng):
    """By which share each update of the layers 1 to 3 changes if the gradient of layer 0 grows."""
    gradient = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), params
    )
    more = {"layers": jax.tree.map(lambda leaf: leaf.at[0].mul(100.0), gradient["layers"])}
    update = jax.jit(lambda g: optimizer.update(g, optimizer.init(params), params)[0]["layers"])
    once, again = update(gradient), update(gradient | more)
    share = lambda a, b: float(jnp.linalg.norm((a - b)[1:]) / jnp.linalg.norm(a[1:]))
    return by_path(jax.tree.map(share, once, again))


def test_plain_muon_takes_stacked_gains_for_a_matrix(stack, rng):
    moved = other_layers_move(optax.contrib.muon(1e-2), stack, rng)
    assert moved.pop("RMSNorm_0/scale") > 0.1
    assert moved.pop("Dense_0/bias") > 0.1  # biases as well
    assert set(moved.values()) == {0.0}  # which Adam trains, since their rank is not 2


def test_layers_of_a_stack_stay_apart(stack, rng):
    dimensions = lambda params: muon_dimensions(params, stacked="layers")
    own = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dimensions)
    groups = dict.fromkeys(ROLES, optax.adam(1e-3)) | {"weight": own}
    for optimizer in (own, optax.multi_transform(groups, labels)):
        assert set(other_layers_move(optimizer, stack, rng).values()) == {0.0}


def test_each_kernel_of_a_stack_is_a_matrix_of_its_own(stack, rng):
    gradient = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), stack
    )
    dimensions = muon_dimensions(stack, stacked="layers")
    assert dimensions["layers"]["RMSNorm_0"]["scale"] is None
    own = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dimensions)
    found = own.update(gradient, own.init(stack), stack)[0]["layers"]
    attention = "MultiHeadDotProductAttention_0"
    for name, shape in {"query": (16, 16), "out": (16, 16)}.items():
        alone = {"kernel": gradient["layers"][attention][name]["kernel"][2].reshape(shape)}
        plain = optax.contrib.muon(1e-2)
        truth = plain.update(alone, plain.init(alone), alone)[0]["kernel"]
        update = found[attention][name]["kernel"][2].reshape(shape)
        np.testing.assert_allclose(update, truth, rtol=2e-3, atol=2e-6)


def test_muon_leaves_embeddings_and_vectors_to_adam():
    shapes = {
        "embedding": (9, 4),
        "conv": {"kernel": (3, 3, 4, 8), "bias": (8,)},
        "norm": {"scale": (2, 4)},
        "lstm": {"input_kernel": (3, 8), "input_scale": (8,)},
    }
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    found = muon_dimensions(params)
    numbers = optax.contrib.MuonDimensionNumbers
    assert found == {
        "embedding": None,
        "conv": {"kernel": numbers((0, 1, 2), (3,)), "bias": None},
        "norm": {"scale": None},
        "lstm": {"input_kernel": numbers((0,), (1,)), "input_scale": None},
    }
    assert muon_dimensions(params, leave=None)["embedding"] == numbers((0,), (1,))


def test_muon_of_a_state_of_nnx():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jn.nnx.RMSNorm(4, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    gradient = jax.tree.map(lambda leaf: leaf + 1, params)
    updates = []
    for numbers in (muon_dimensions, None):  # without a stack both are the same
        muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)
        updates.append(muon.update(gradient, muon.init(params), params)[0])
    assert jax.tree.structure(updates[0]) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, *updates)
