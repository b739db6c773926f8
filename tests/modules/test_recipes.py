"""Run the code of docs/guides/recipes.md, and compare it with NumPy and with other libraries.

Libraries that are not installed are left out.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from pages import blocks, run

# as a reader would run it; and the peers' own warnings
pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
CODE = blocks("docs/guides/recipes.md")
close = np.testing.assert_allclose


@cache
def recipe(word):
    """The names that the one block with a word defines."""
    (code,) = (code for code in CODE if word in code)
    return run(code)


def drawn(rng, tree):
    """Parameters of the same shapes, none of which is where it starts."""
    draw = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.2 + 0.1, leaf.dtype)
    return jax.tree.map(draw, tree)


def standardized(x, axes, epsilon, correction=0):
    """The norm in float64, and the deviation and the mean."""
    x = np.asarray(x, np.float64)
    mean = x.mean(axes, keepdims=True)
    deviation = np.sqrt(x.var(axes, ddof=correction, keepdims=True) + epsilon)
    return (x - mean) / deviation, deviation, mean


def imported(name):
    return pytest.importorskip(name, exc_type=ImportError)


def torch_of(array, torch):
    tensor = torch.tensor(np.asarray(array, np.float32))
    return tensor.to(torch.bfloat16) if array.dtype == jnp.bfloat16 else tensor


def load(module, **values):
    """Give a module of PyTorch its parameters, by the names of its state, with dots as __."""
    torch = imported("torch")
    state = {name.replace("__", "."): torch_of(value, torch) for name, value in values.items()}
    module.load_state_dict(state, assign=True)
    return module.eval()


def outputs(module, *arrays, channels_first=False):
    """Call a module of PyTorch on arrays."""
    torch = imported("torch")
    arrays = [torch_of(array, torch) for array in arrays]
    if channels_first:
        return torch.movedim(module(torch.movedim(arrays[0], -1, 1)), 1, -1).detach().numpy()
    return module(*arrays).detach().float().numpy()


def dense(name, params):
    """The state of a dense layer, or of one that makes heads or takes them."""
    kernel = np.asarray(params["kernel"])
    inputs = kernel.shape[:-1] if params["bias"].ndim == 1 else kernel.shape[:1]
    return {
        f"{name}__weight": kernel.reshape(np.prod(inputs), -1).T,
        f"{name}__bias": params["bias"].reshape(-1),
    }


def conv(kernel):
    return np.transpose(kernel, (3, 2, 0, 1))


def attention_of_timm(params, norms=None, **options):
    """Timm's attention with the parameters of Flax's, which has a layer for each of q, k and v."""
    found = [dense("qkv", params[name]) for name in ("query", "key", "value")]
    state = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    state |= dense("proj", params["out"])
    if norms is not None:
        state |= {f"{name}__weight": norms[name]["scale"] for name in ("q_norm", "k_norm")}
    attention = imported("timm.layers.attention").Attention
    return load(attention(24, 4, qkv_bias=True, **options), **state)


@pytest.mark.parametrize(
    ("model", "name", "epsilon"),
    [
        ("gemma", "Gemma", 1e-6),
        ("llama", "Llama", 1e-5),
        ("qwen3", "Qwen3", 1e-6),
        ("olmo2", "Olmo2", 1e-6),
    ],
)
def test_language_models(model, name, epsilon):
    module = imported(f"transformers.models.{model}.modeling_{model}")
    found = recipe("olmo2 =")
    theirs = load(getattr(module, f"{name}RMSNorm")(64, eps=epsilon), weight=found["w"])
    assert found[model].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[model].astype("f4"), outputs(theirs, found["x"]))


@pytest.mark.slow  # tests/modules/test_attention.py has both
def test_attention_is_the_same_in_linen_and_nnx(rng):
    linen, nnx = recipe("class Attention"), recipe("attention.query_ln")
    params = drawn(rng, linen["variables"]["params"])
    flax, norms = params["MultiHeadDotProductAttention_0"], params["QKNorm_0"]
    theirs = nnx["attention"]
    for name in ("query", "key", "value", "out"):
        getattr(theirs, name).kernel[...] = flax[name]["kernel"]
        getattr(theirs, name).bias[...] = flax[name]["bias"]
    for norm, name in ((theirs.query_ln, "q_norm"), (theirs.key_ln, "k_norm")):
        norm.scale[...] = norms[name]["scale"]
    x, mask = linen["x"], jnp.tril(jnp.ones((5, 5), bool))[None, None]
    y = linen["Attention"]().apply({"params": params}, x, mask=mask)
    close(y, theirs(x, mask=mask), rtol=1e-5, atol=1e-6)
    assert float(abs(y - linen["y"]).max()) > 0.01


def test_attention_of_timm(rng):
    rms, found = imported("timm.layers").RmsNorm, recipe("class Attention")
    params = drawn(rng, found["variables"]["params"])
    y = found["Attention"]().apply({"params": params}, found["x"])
    flax = params["MultiHeadDotProductAttention_0"]
    theirs = attention_of_timm(flax, params["QKNorm_0"], qk_norm=True, norm_layer=rms)
    close(y, outputs(theirs, found["x"]), rtol=1e-5, atol=1e-6)


def test_a_block_of_dit_starts_as_the_identity():
    found = recipe("AdaLayerNormZero")
    np.testing.assert_array_equal(found["y"], found["x"])


def test_a_block_of_dit(rng):
    """The layer of a block has six parts: shift, scale and gate of attention, and of the rest."""
    torch, timm = imported("torch"), imported("timm.layers")
    found = recipe("AdaLayerNormZero")
    params, x = drawn(rng, found["variables"]["params"]), found["x"]
    condition = rng.standard_normal((2, 24)).astype("f4")
    attention = attention_of_timm(params["MultiHeadDotProductAttention_0"])
    mlp = timm.Mlp(24, 96, act_layer=lambda: torch.nn.GELU(approximate="tanh"))
    load(mlp, **dense("fc1", params["Dense_0"]), **dense("fc2", params["Dense_1"]))
    two = [params[f"AdaLayerNormZero_{i}"]["modulation"] for i in range(2)]
    silu = np.asarray(jax.nn.silu(condition), np.float64)
    truth = np.asarray(x, np.float64)
    for layer, block in zip(two, (attention, mlp), strict=True):
        parts = silu @ np.asarray(layer["kernel"], np.float64) + layer["bias"]
        shift, scale, gate = np.split(parts[:, None], 3, axis=-1)
        y = standardized(truth, -1, 1e-6)[0] * (1 + scale) + shift
        truth = truth + gate * outputs(block, y)
    close(found["Block"]().apply({"params": params}, x, condition), truth, rtol=1e-5, atol=1e-5)


def test_a_block_of_convnext(rng):
    block = imported("timm.models.convnext").ConvNeXtBlock(4, use_grn=True, ls_init_value=None)
    found = recipe("GlobalResponseNorm")
    params, images = drawn(rng, found["variables"]["params"]), found["images"]
    grn = params["GlobalResponseNorm_0"]
    load(
        block,
        conv_dw__weight=conv(params["Conv_0"]["kernel"]),
        conv_dw__bias=params["Conv_0"]["bias"],
        norm__weight=params["LayerNorm_0"]["scale"],
        norm__bias=params["LayerNorm_0"]["bias"],
        mlp__grn__weight=grn["scale"],
        mlp__grn__bias=grn["bias"],
        **dense("mlp__fc1", params["Dense_0"]),
        **dense("mlp__fc2", params["Dense_1"]),
    )
    y = found["Block"]().apply({"params": params}, images)
    close(y, outputs(block, images, channels_first=True), rtol=1e-5, atol=1e-5)


def test_a_stem_sees_kernels_up_to_their_mean_and_scale():
    found = recipe("class Stem")
    of_sum = jax.jit(jax.grad(lambda params: found["apply"](params, found["images"]).sum()))
    gradient = of_sum(found["params"])["Conv_0"]["kernel"]
    assert float(abs(gradient).max()) > 0.1
    close(gradient.sum((0, 1, 2)), np.zeros(64), atol=1e-3)
    close((gradient * found["params"]["Conv_0"]["kernel"]).sum((0, 1, 2)), np.zeros(64), atol=1e-2)


def test_a_stem_of_timm(rng):
    theirs = imported("timm.models.resnetv2").create_resnetv2_stem(3, 64, preact=False)
    found = recipe("class Stem")
    params, images = drawn(rng, found["params"]), found["images"]
    norm, kernel = params["GroupNorm_0"], conv(params["Conv_0"]["kernel"])
    load(theirs, conv__weight=kernel, norm__weight=norm["scale"], norm__bias=norm["bias"])
    truth = outputs(theirs, images, channels_first=True)
    close(found["apply"](params, images), truth, rtol=1e-4, atol=1e-5)


def test_crossq(rng):
    found = recipe("class Critic")
    critic, key = found["Critic"](), jax.random.key(0)
    now, following = rng.standard_normal((2, 8, 5)).astype("f4") + np.float32([[[1.0]], [[3.0]]])
    reward, discount = rng.standard_normal(8).astype("f4"), np.float32([0.99] * 7 + [0])
    both = np.concatenate([now, following])

    @jax.jit  # at once, in which XLA sees what is computed twice
    def everything():
        variables = critic.init(key, both, train=False)
        q, _ = critic.apply(variables, both, train=True, mutable=["batch_stats"])
        step = jax.value_and_grad(found["loss"], has_aux=True)
        state = (variables["params"], variables["batch_stats"])
        return q[:, 0], *step(*state, now, following, reward, discount)

    q, (loss, updated), gradient = everything()
    error = q[:8] - reward - discount * q[8:]
    close(loss, (error**2).mean(), rtol=1e-5)
    close(gradient["Dense_2"]["bias"][0], 2 * error.mean(), rtol=1e-4)  # none through the target
    close(updated["BatchRenorm_0"]["mean"], 0.01 * both.mean(0), rtol=1e-5)


def test_the_gated_norm_of_mamba():
    module = imported("transformers.models.mamba2.modeling_mamba2")
    found = recipe("by_kernels")
    x, z, w = (np.asarray(found[name], np.float64) for name in "xzw")
    h = (x * z / (1 + np.exp(-z))).reshape(8, 2, 32)
    y = (h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5)).reshape(8, 64) * w
    for name, ulps in (("by_kernels", 1), ("by_transformers", 3)):
        assert found[name].dtype == jnp.bfloat16
        close(found[name].astype("f4"), y, rtol=ulps * 2.0**-8)
    theirs = load(module.MambaRMSNormGated(64, group_size=32, eps=1e-5), weight=found["w"])
    truth = outputs(theirs, found["x"], found["z"])
    assert (found["by_transformers"].astype("f4") != truth).sum() <= 1  # a tie of float32


def test_forecasts_follow_the_level_and_scale_of_a_series(rng):
    found = recipe("class Forecast")
    model, variables, series = found["Forecast"](24), found["variables"], found["series"]
    close(model.apply(variables, 10 * series + 100), 10 * found["future"] + 100, atol=1e-3)
    y, deviation, mean = standardized(series, 1, 1e-5)
    layer = variables["params"]["Dense_0"]
    truth = np.einsum("btv,ts->bsv", y, layer["kernel"]) + layer["bias"][None, :, None]
    close(found["future"], truth * deviation + mean, rtol=1e-5, atol=1e-5)


def test_many_styles(rng):
    found = recipe("AdaInstanceNorm")
    params = drawn(rng, found["variables"]["params"])
    table = params["AdaInstanceNorm_0"]["modulation"]
    x = nn.Conv(8, (3, 3)).apply({"params": params["Conv_0"]}, found["images"])
    scale, bias = np.split(np.asarray(table["kernel"] + table["bias"], np.float64), 2, axis=1)
    norm = standardized(x, (1, 2), 1e-5)[0]
    in_style = lambda image, style: norm[image] * (1 + scale[style]) + bias[style]
    truth = [0.3 * in_style(i, i) + 0.7 * in_style(i, 4) for i in range(2)]
    y = found["Layer"]().apply({"params": params}, found["images"], found["style"])
    close(y, np.maximum(truth, 0), rtol=1e-5, atol=1e-5)


def test_the_style_of_an_image():
    found = recipe("ada_instance_norm")
    content = standardized(found["content"], (1, 2), 1e-5, correction=1)[0]
    _, deviation, mean = standardized(found["style"], (1, 2), 1e-5, correction=1)
    close(found["y"], content * deviation + mean, rtol=1e-5, atol=1e-5)
    close(found["halfway"], (found["y"] + found["content"]) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"size": 2, "alpha": 1.0, "beta": 0.5, "k": 1.0}, {"size": 9, "alpha": 3.0}]
)
def test_local_response(options, rng):
    function = recipe("reduce_window")["local_response_norm"]
    x = rng.standard_normal((2, 3, 8)).astype("f4") * 5
    size, alpha, beta, k = ({"size": 5, "alpha": 5e-4, "beta": 0.75, "k": 2.0} | options).values()
    near = [slice(max(c - size // 2, 0), c + (size - 1) // 2 + 1) for c in range(8)]
    total = np.stack([(x[..., part].astype("f8") ** 2).sum(-1) for part in near], -1)
    close(function(x, **options), x / (k + alpha / size * total) ** beta, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 5])
def test_local_response_of_torch(size, rng):
    theirs = imported("torch").nn.LocalResponseNorm(size, 5e-4, 0.75, 2.0)
    x = rng.standard_normal((2, 3, 8)).astype("f4") * 50
    y = recipe("reduce_window")["local_response_norm"](x, size)
    close(y, outputs(theirs, x, channels_first=True), rtol=1e-5)


def test_weights_of_length_one(rng):
    found = recipe("to_length_one")
    shapes = {"query": (6, 2, 3), "up": (6, 8), "out": (2, 3, 6), "alpha": (6,)}
    params = drawn(rng, {name: np.zeros(shape, "f4") for name, shape in shapes.items()})
    gradients = drawn(rng, params)

    @jax.jit
    def stepped(params):
        both = optax.adam(1e-3), found["optimizer"]
        updates = [each.update(gradients, each.init(params), params)[0] for each in both]
        return [optax.apply_updates(params, update) for update in updates]

    moved, new = stepped(params)
    for name, truth in moved.items():
        if name != "alpha":
            axis = 0 if name in ("query", "up") else -1
            truth = truth / np.linalg.norm(np.asarray(truth, "f8"), axis=axis, keepdims=True)
        close(new[name], truth, rtol=1e-5, atol=3e-7)


def test_float8(rng):
    function = jax.jit(recipe("float8")["rms_norm_in_float8"])
    x = rng.standard_normal((5, 64)).astype("f4") * np.float32([[1], [1e-3], [0], [1e4], [1e-30]])
    w = rng.standard_normal(64).astype("f4")
    y, scale = function(x, w)
    assert (y.dtype, scale.dtype, scale.shape) == (jnp.float8_e4m3fn, jnp.float32, (5, 1))
    assert scale[2] == 1
    found = np.asarray(y.astype("f4"))
    np.testing.assert_array_equal(abs(found).max(-1), [448, 448, 0, 448, 448])
    x = x.astype("f8")
    truth = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
    # 4 bits of each number, and the least one of the format
    assert (abs(found * scale - truth) <= abs(truth) / 16 * 1.001 + scale * 2.0**-10).all()
    y, scale = function(np.ones((5, 64), "f4"), np.full(64, 1e-38, "f4"))  # 1e-38 / 448 vanishes
    assert np.isfinite(y.astype("f4")).all()
    assert (scale == 1).all()
