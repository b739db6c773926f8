"""Test the norms of queries and keys, by themselves and in Flax's attention."""

import functools
import importlib
import re

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import jaxnorm as jn
from jaxnorm import linen, nnx

EPSILON, HEADS, KV, D = 1e-5, 4, 2, 8
KEY = jax.random.key(0)
# arguments, and the shapes of the parameters of q
KINDS = {
    "rms": ({}, (D,)),
    "rms, 1 + scale": ({"scale_offset": 1}, (D,)),
    "rms, no scale": ({"use_scale": False}, None),
    "rms, per head": ({"per_head_scale": True}, (HEADS, D)),
    "rms, heads": ({"over": "heads"}, (HEADS * D,)),
    "layer": ({"norm": "layer"}, (D,)),
    "layer, per head": ({"norm": "layer", "per_head_scale": True, "use_bias": True}, (HEADS, D)),
    "layer, heads": ({"norm": "layer", "over": "heads", "use_bias": True}, (HEADS * D,)),
}


def drawn(rng, dtype="float32"):
    shapes = (2, 5, HEADS, D), (2, 3, KV, D)
    return [jnp.asarray(rng.normal(1, 2, shape), dtype) for shape in shapes]


def parameters(rng, options, shape, dtype="float32"):
    """Drawn parameters of q and k, by name."""
    if shape is None:
        return {}
    names = ["scale", *(["bias"] if options.get("use_bias") else [])]
    of_k = {(HEADS, D): (KV, D), (HEADS * D,): (KV * D,)}.get(shape, shape)
    draw = lambda size: jnp.asarray(rng.uniform(0.5, 1.5, size), dtype)
    return {
        "q_norm": {name: draw(shape) for name in names},
        "k_norm": {name: draw(of_k) for name in names},
    }


def both(options, params, dtype=None):
    """The linen module with these parameters, as a function, and its nnx twin."""
    module = linen.QKNorm(**options, epsilon=EPSILON, dtype=dtype)
    twin = nnx.QKNorm(
        D,
        num_heads=HEADS,
        num_kv_heads=KV,
        **options,
        epsilon=EPSILON,
        dtype=dtype,
        rngs=flax_nnx.Rngs(0),
    )
    for norm, own in params.items():
        for name, value in own.items():
            leaf = getattr(getattr(twin, norm), name)
            assert leaf.shape == (value.size,)  # flat, as in nnx
            leaf[...] = value.reshape(-1)
    return (lambda *a, **k: module.apply({"params": params}, *a, **k)), twin


def truth(x, own, options, counts=None):
    """The norm of queries or keys in float64."""
    x = np.asarray(x, np.float64)
    counts = np.ones_like(x) if counts is None else np.broadcast_to(counts, x.shape) * 1.0
    x = np.where(counts > 0, x, 0)
    axes = (-2, -1) if options.get("over") == "heads" else (-1,)
    mean = lambda a: (
        (a * counts).sum(axes, keepdims=True) / np.maximum(counts.sum(axes, keepdims=True), 1)
    )
    d = x - mean(x) if options.get("norm") == "layer" else x
    z = d / np.sqrt(mean(d**2) + EPSILON)
    of = lambda name, default: np.asarray(own.get(name, default), np.float64).reshape(
        x.shape[-2:] if np.size(own.get(name, 0)) == x.shape[-2] * D else -1
    )
    y = z * (of("scale", 1.0) + options.get("scale_offset", 0)) + of("bias", 0.0)
    return np.where(counts > 0, y, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_both_families(kind, rng):
    options, shape = KINDS[kind]
    params, arrays = parameters(rng, options, shape), drawn(rng)
    call, twin = both(options, params)
    for name, found, x in zip(("q_norm", "k_norm"), call(*arrays), arrays, strict=True):
        true = truth(x, params.get(name, {}), options)
        np.testing.assert_allclose(found, true, rtol=3e-6, atol=3e-6)
    for one, other in zip(call(*arrays), twin(*arrays), strict=True):
        np.testing.assert_array_equal(one, other)
    made = linen.QKNorm(**options).init(KEY, *arrays).get("params", {})
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)
    start = 0 if options.get("scale_offset") else 1
    assert all(np.all(own["scale"] == start) for own in made.values())


@pytest.mark.parametrize("kind", ["rms", "layer, heads"])
def test_padding_hides_nan(kind, rng):
    options, shape = KINDS[kind]
    params, (q, k) = parameters(rng, options, shape), drawn(rng)
    masks = [rng.random((x.shape[0], x.shape[1], 1, 1)) < 0.6 for x in (q, k)]
    dirty = [jnp.where(mask, x, jnp.nan) for mask, x in zip(masks, (q, k), strict=True)]
    for call in both(options, params):
        found, vjp = jax.vjp(
            lambda q, k, call=call: call(q, k, mask=masks[0], k_mask=masks[1]), *dirty
        )
        grads = vjp(found)
        for name, y, dx, x, mask in zip(params, found, grads, dirty, masks, strict=True):
            true = truth(x, params[name], options, mask)
            np.testing.assert_allclose(y, true, rtol=3e-6, atol=3e-6)
            assert np.isfinite(dx).all()
            assert np.all(np.asarray(dx)[~np.broadcast_to(mask, x.shape)] == 0)


def test_options_reach_the_norms(rng):
    q, k = drawn(rng, "bfloat16")
    options = {"rounding": "twice", "param_dtype": jnp.bfloat16}
    scale = jnp.asarray(rng.normal(1, 0.3, D), jnp.bfloat16)
    params = {name: {"scale": scale} for name in ("q_norm", "k_norm")}
    call, twin = both(options, params)
    true = jn.rms_norm(q, scale=scale, epsilon=EPSILON, rounding="twice")
    for found in (call(q, k)[0], twin(q, k)[0], jax.jit(call)(q, k)[0]):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, true)
    wide = linen.QKNorm(dtype="float32", **options).apply({"params": params}, q, k)
    assert wide[1].dtype == jnp.float32


CAUSAL = np.tril(np.ones((5, 5), bool))


def attention(x, weights, norm):
    """Attention of each position to those before it, in float64."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
    q, k, v = (
        np.einsum("btf,fhd->bthd", x, w[name]["kernel"]) + w[name]["bias"]
        for name in ("query", "key", "value")
    )
    logits = np.einsum("bqhd,bkhd->bhqk", norm(q, "q_norm"), norm(k, "k_norm")) / np.sqrt(D)
    logits = np.where(CAUSAL, logits, -np.inf)
    a = np.exp(logits - logits.max(-1, keepdims=True))
    y = np.einsum("bhqk,bkhd->bqhd", a / a.sum(-1, keepdims=True), v)
    return np.einsum("bqhd,hdf->bqf", y, w["out"]["kernel"]) + w["out"]["bias"]


@pytest.mark.parametrize("kind", ["rms, 1 + scale", "layer"])
@pytest.mark.usefixtures("ordinary_promotion")
def test_in_the_attention_of_nnx(kind, rng):
    options, shape = KINDS[kind]
    x = jnp.asarray(rng.normal(size=(2, 5, 12)), jnp.float32)
    module = flax_nnx.MultiHeadAttention(
        HEADS, 12, HEADS * D, normalize_qk=True, decode=False, rngs=flax_nnx.Rngs(0)
    )
    norms = nnx.QKNorm(D, num_heads=HEADS, **options, epsilon=EPSILON, rngs=flax_nnx.Rngs(0))
    params = parameters(rng, options, shape)
    params["k_norm"] = {"scale": params["q_norm"]["scale"] + 0.5}
    for name, own in params.items():
        getattr(norms, name).scale[...] = own["scale"].reshape(-1)
    module.query_ln, module.key_ln = norms.q_norm, norms.k_norm
    weights = {
        name: {key: getattr(getattr(module, name), key)[...] for key in ("kernel", "bias")}
        for name in ("query", "key", "value", "out")
    }
    true = attention(
        np.asarray(x, np.float64), weights, lambda a, name: truth(a, params[name], options)
    )
    np.testing.assert_allclose(module(x, mask=CAUSAL[None, None]), true, rtol=2e-5, atol=2e-5)
    grads = flax_nnx.grad(lambda module: flax_nnx.jit(lambda m, x: m(x))(module, x).sum())(module)
    assert np.any(grads["query_ln"]["scale"][...] != 0)


class Attention(flax.linen.Module):
    """A block whose attention normalizes queries and keys by our module."""

    options: dict

    @flax.linen.compact
    def __call__(self, x, mask):
        norms = linen.QKNorm(**self.options, epsilon=EPSILON, name="qk")

        # Flax passes what the signature names: without it, no mask.
        @functools.wraps(flax.linen.dot_product_attention)
        def attend(q, k, v, **rest):
            return flax.linen.dot_product_attention(*norms(q, k), v, **rest)

        return flax.linen.MultiHeadDotProductAttention(
            HEADS, qkv_features=HEADS * D, attention_fn=attend, name="attention"
        )(x, mask=mask)


@pytest.mark.parametrize("kind", ["rms", "layer, per head"])
@pytest.mark.usefixtures("ordinary_promotion")
def test_in_the_attention_of_linen(kind, rng):
    options, shape = KINDS[kind]
    x = jnp.asarray(rng.normal(size=(2, 5, 12)), jnp.float32)
    model = Attention(options)
    mask = CAUSAL[None, None]
    made = model.init(KEY, x, mask)["params"]
    params = parameters(rng, options, shape)
    params["k_norm"] = jax.tree.map(lambda a: a + 0.5, params["q_norm"])
    assert jax.tree.map(jnp.shape, made["qk"]) == jax.tree.map(jnp.shape, params)
    found = jax.jit(model.apply)({"params": {**made, "qk": params}}, x, mask)
    true = attention(
        np.asarray(x, np.float64),
        made["attention"],
        lambda a, name: truth(a, params[name], options),
    )
    np.testing.assert_allclose(found, true, rtol=2e-5, atol=2e-5)


def test_heads_are_normalized_together_before_or_after_the_split(rng):
    (q, k), params = drawn(rng), parameters(rng, *KINDS["rms, heads"])
    found = both(KINDS["rms, heads"][0], params)[0](q, k)
    merged = jn.rms_norm(q.reshape(2, 5, -1), scale=params["q_norm"]["scale"], epsilon=EPSILON)
    np.testing.assert_array_equal(found[0].reshape(2, 5, -1), merged)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm": "l2"}, "norm must be 'rms' or 'layer': got 'l2'."),
        ({"over": "all"}, "over must be 'head' or 'heads': got 'all'."),
        ({"use_bias": True}, "use_bias must be False with norm='rms', which has no bias"),
        (
            {"over": "heads", "per_head_scale": True},
            "per_head_scale must be False with over='heads'",
        ),
    ],
)
def test_wrong_options(options, said, rng):
    with pytest.raises(ValueError, match=re.escape(said)):
        linen.QKNorm(**options).init(KEY, *drawn(rng))
    with pytest.raises(ValueError, match=re.escape(said)):
        nnx.QKNorm(D, num_heads=HEADS, **options, rngs=flax_nnx.Rngs(0))


def test_wrong_calls(rng):
    with pytest.raises(ValueError, match="num_heads must be given with per_head_scale or over="):
        nnx.QKNorm(D, over="heads", rngs=flax_nnx.Rngs(0))
    norms, (q, k) = nnx.QKNorm(D, rngs=flax_nnx.Rngs(0)), drawn(rng)
    with pytest.raises(ValueError, match=r"k must have the axes \(\.\.\., heads, head_dim\): got"):
        norms(q, k[0, 0, 0])
    with pytest.raises(ValueError, match="mask must broadcast against q without growing it"):
        norms(q, k, mask=np.ones((2, 5), bool))
    with pytest.raises(TypeError, match="padding must be an argument of a call of QKNorm"):
        norms(q, k, padding=None)
    together = nnx.QKNorm(D, num_heads=HEADS, over="heads", rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match="q must have the features that QKNorm was made for, 32"):
        together(k, k)


PER_HEAD = {"norm": "layer", "per_head_scale": True}
MODELS = {  # the class of q_norm, its arguments, ours
    "qwen3": ("Qwen3RMSNorm", (D,), {"rounding": "twice"}),
    "gemma3": ("Gemma3RMSNorm", (D,), {"scale_offset": 1}),
    "olmo2": ("Olmo2RMSNorm", (HEADS * D,), {"over": "heads"}),
    "chameleon": ("ChameleonLayerNorm", ((HEADS, D),), {**PER_HEAD, "use_bias": True}),
    "stablelm": ("StableLmLayerNormPerHead", (D, HEADS), PER_HEAD),
    "cohere": ("CohereLayerNorm", ((HEADS, D),), PER_HEAD),
    "llama4": ("Llama4TextL2Norm", (), {"use_scale": False}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_values_are_those_of_models_in_transformers(model, dtype, rng):
    torch, (name, arguments, options) = pytest.importorskip("torch"), MODELS[model]
    pytest.importorskip("transformers")
    of_model = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    module = getattr(of_model, name)(
        *arguments, **({} if model == "chameleon" else {"eps": EPSILON})
    )
    options = {**options, "rounding": "twice"} if model == "chameleon" else options
    module = module.to(getattr(torch, dtype))
    for parameter in module.parameters():
        parameter.data += torch.tensor(rng.normal(0, 0.3, parameter.shape)).to(parameter.dtype)
    as_array = lambda a: jnp.asarray(a.detach().float().numpy(), dtype)
    own = {
        {"weight": "scale", "bias": "bias"}[key.split(".")[-1]]: as_array(leaf)
        for key, leaf in module.named_parameters()
    }
    if model == "stablelm":  # a module for each head
        own = {"scale": jnp.stack([as_array(each.weight) for each in module.norms])}
    x = jnp.asarray(rng.normal(size=(64, 7, HEADS, D)), dtype)
    given = torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, dtype))
    given = given.reshape(64, 7, -1) if model == "olmo2" else given
    given = given.transpose(1, 2) if model == "stablelm" else given
    theirs = module(given).detach().float()
    theirs = theirs.transpose(1, 2) if model == "stablelm" else theirs.reshape(x.shape)
    params = dict.fromkeys(("q_norm", "k_norm"), own) if own else {}
    norms = linen.QKNorm(**options, epsilon=EPSILON, param_dtype=dtype)
    found = np.asarray(norms.apply({"params": params}, x, x)[0], np.float32)
    if dtype == "float32":
        np.testing.assert_allclose(found, theirs.numpy(), rtol=2e-6, atol=2e-6)
    else:  # but for ties of float32
        assert (found != theirs.numpy()).sum() <= 2
