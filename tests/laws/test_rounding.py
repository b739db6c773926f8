"""Test where half precision is rounded, bit for bit, and scales with an offset.

The truth is float64 arithmetic, rounded by NumPy where the formula says so. A normalized element is
float32 before it is rounded, so of those within its error of a tie between two numbers of half
precision either may come.
"""

import importlib
import re
from functools import partial
from inspect import signature

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import HOST
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from jaxnorm import linen, nnx

HALF = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NORMS = {"rms": jn.rms_norm, "layer": jn.layer_norm}
EPSILON = 1e-6
W = np.ones(4, np.float32)


def to(dtype, values):
    return np.asarray(values).astype(HALF.get(dtype, dtype)).astype(np.float64)


def arrays(rng, dtype, shape=(64, 96)):
    x, scale, bias = rng.normal(size=shape), *rng.normal(1, 0.3, (2, shape[-1]))
    return [jnp.asarray(a, dtype) for a in (x, scale, bias)]


def normalized(name, x, where=None):
    """Return z, and which elements lie too near to a tie to say how they are rounded."""
    wide = np.asarray(x, np.float64)
    count = np.ones_like(wide) if where is None else np.broadcast_to(where, wide.shape)
    mean = lambda a: (a * count).sum(-1, keepdims=True) / count.sum(-1, keepdims=True)
    wide = wide - mean(wide) * (name == "layer")
    z = wide / np.sqrt(mean(wide**2) + EPSILON)
    # the mean that was subtracted is a number of float32 as well
    doubt = 1e-6 * np.abs(z) + 3e-8 * (name == "layer")
    near = to(x.dtype.name, z + doubt) != to(x.dtype.name, z - doubt)
    assert near.mean() < 1e-2
    return z, near


def same_bits(found, truth, near):
    found = np.asarray(found, np.float64)
    np.testing.assert_array_equal(found[~near], truth[~near])


# XLA may leave out roundings unless it is told not to
STRICT = {"xla_allow_excess_precision": False}
WAYS = {
    "eager": lambda function: function,
    "jit": jax.jit,
    "strict": partial(jax.jit, compiler_options=STRICT),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.mark.parametrize("implementation", ["xla", "native", "pallas"], indirect=True)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NORMS)
class TestTwice:
    @pytest.fixture
    def call(self, name, dtype, implementation, way, rng):
        """Return a function of options that returns the output, z, and what is near to a tie."""
        norm, x = partial(NORMS[name], epsilon=EPSILON, rounding="twice"), arrays(rng, dtype)[0]
        return lambda **options: (
            way(lambda x: norm(x, **options))(x),
            *normalized(name, x, options.get("where")),
        )

    def test_products_and_sums_are_rounded(self, call, dtype, rng):
        _, scale, bias = arrays(rng, dtype)
        r, (w, b) = partial(to, dtype), (np.asarray(a, np.float64) for a in (scale, bias))
        for options, truth in (
            ({}, r),
            ({"scale": scale}, lambda z: r(r(z) * w)),
            ({"scale": scale, "scale_offset": 1}, lambda z: r(r(z) * r(1 + w))),
            ({"scale": scale, "bias": bias}, lambda z: r(r(r(z) * w) + b)),
        ):
            found, z, near = call(**options)
            same_bits(found, truth(z), near)

    def test_those_with_a_parameter_of_float32_are_not(self, call, dtype, rng):
        scale, bias = (a.astype(jnp.float32) for a in arrays(rng, dtype)[1:])
        r, f = partial(to, dtype), partial(to, "float32")
        w, b = (np.asarray(a, np.float64) for a in (scale, bias))
        for options, truth in (
            ({"scale": scale, "dtype": jnp.float32}, lambda z: f(r(z) * w)),
            ({"scale": scale}, lambda z: r(f(r(z) * w))),
            ({"scale": scale, "bias": bias, "dtype": jnp.float32}, lambda z: f(f(r(z) * w) + b)),
        ):
            found, z, near = call(**options)
            assert found.dtype == options.get("dtype", dtype)
            same_bits(found, truth(z), near)

    def test_what_a_mask_hides_is_0(self, call, dtype, rng):
        x, scale, bias = arrays(rng, dtype)
        where, r = rng.random(x.shape) < 0.7, partial(to, dtype)
        found, z, near = call(scale=scale, bias=bias, where=where)
        w, b = (np.asarray(a, np.float64) for a in (scale, bias))
        same_bits(found, r(r(r(z) * w) + b) * where, near)


class TestInput:
    """As Google's Gemma is written for JAX: all arithmetic in the dtype of x."""

    @staticmethod
    def truth(name, x, dtype, where=True):
        """Return z, and the rows whose mean or variance lies near to a tie."""
        r, doubt = partial(to, dtype), np.zeros((*x.shape[:-1], 1), bool)
        n = np.broadcast_to(where, x.shape).sum(-1, keepdims=True)

        def mean(values):
            found = np.where(where, values, 0).sum(-1, keepdims=True) / n
            return r(found), r(found * (1 + 1e-6)) != r(found * (1 - 1e-6))

        x = np.where(where, np.asarray(x, np.float64), 0)
        if name == "layer":
            shift, doubt = mean(x)
            x = np.where(where, r(x - shift), 0)
        var, more = mean(r(x * x))
        total = r(var + r(EPSILON))
        root = 1 / np.sqrt(total)
        more |= r(root * (1 + 1e-6)) != r(root * (1 - 1e-6))
        return r(x * r(root)), doubt | more

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("name", NORMS)
    def test_every_operation_is_rounded(self, name, dtype, way, rng):
        x, scale, bias = arrays(rng, dtype)
        r, (w, b) = partial(to, dtype), (np.asarray(a, np.float64) for a in (scale, bias))
        norm = partial(NORMS[name], epsilon=EPSILON, rounding="input")
        where = rng.random(x.shape) < 0.7
        hidden = jnp.where(where, x, jnp.nan)
        for given, options, truth in (
            (x, {}, lambda z: z),
            (x, {"scale": scale, "scale_offset": 1}, lambda z: r(z * r(1 + w))),
            (x, {"scale": scale, "bias": bias}, lambda z: r(r(z * w) + b)),
            (hidden, {"scale": scale, "where": where}, lambda z: r(z * w)),
        ):
            z, doubt = self.truth(name, given, dtype, options.get("where", True))
            assert doubt.mean() < 0.05
            found = way(lambda x, options=options: norm(x, **options))(given)
            same_bits(found, truth(z), np.broadcast_to(doubt, z.shape))

    def test_bits_are_those_of_the_formula_in_jnp(self, way, rng):
        x, scale, _ = arrays(rng, "bfloat16")
        root = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON)
        formula = x * root * (1 + scale)[None]  # eager
        norm = partial(jn.rms_norm, epsilon=EPSILON, rounding="input", scale_offset=1)
        found = way(lambda x: norm(x, scale=scale))(x)
        assert (np.asarray(found) != np.asarray(formula)).any(-1).sum() <= 1
        assert (np.asarray(found) != np.asarray(norm(x, scale=scale, rounding="once"))).mean() > 0.2

    def test_gradients_are_those_of_the_formula(self, rng):
        x, dy = arrays(rng, "bfloat16")[0], arrays(rng, "bfloat16")[0][::-1]

        def formula(x):
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON)

        found, truth = (
            np.asarray(jax.vjp(f, x)[1](dy)[0], np.float64)
            for f in (partial(jn.rms_norm, epsilon=EPSILON, rounding="input"), formula)
        )
        assert np.abs(found - truth).max() <= 2**-6 * np.abs(truth).max()

    def test_nothing_to_divide_by(self):
        x = jnp.zeros((2, 8), jnp.bfloat16)
        norm = partial(jn.rms_norm, epsilon=0.0, rounding="input")
        assert np.all(norm(x) == 0)
        assert np.all(jax.grad(lambda x: norm(x).astype(jnp.float32).sum())(x) == 0)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_bits_are_those_of_maxtext(offset, weights, way, rng):
    """It rounds the normalized x and the weight, and adds the offset in half precision."""
    x, scale = arrays(rng, "bfloat16")[0], arrays(rng, weights)[1] - offset
    wide = x.astype(jnp.float32)
    z = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)
    weight = scale.astype(jnp.bfloat16)
    formula = z.astype(jnp.bfloat16) * (weight + jnp.asarray(offset, jnp.bfloat16))[None]
    options = {"scale": weight, "scale_offset": offset, "rounding": "twice", "epsilon": EPSILON}
    found = way(lambda x: jn.rms_norm(x, **options))(x)
    _, near = normalized("rms", x)
    same_bits(found, np.asarray(formula, np.float64), near)


@pytest.mark.usefixtures("ordinary_promotion")
@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_bits_are_those_of_flax(family, way, rng):
    """Flax multiplies x by rsqrt and weight together; nnx since 0.12.1 rounds the weight first."""
    x, scale, _ = arrays(rng, "bfloat16", (256, 96))
    scale = jnp.asarray(rng.normal(1, 0.3, 96), jnp.float32)
    kinds = {"dtype": jnp.bfloat16, "epsilon": EPSILON}
    if family == "linen":
        theirs = flax_linen.RMSNorm(**kinds).apply({"params": {"scale": scale}}, x)
        ours = way(lambda x: linen.RMSNorm(**kinds).apply({"params": {"scale": scale}}, x))(x)
    else:
        module = flax_nnx.RMSNorm(96, rngs=flax_nnx.Rngs(0), **kinds)
        module.scale[...] = scale
        theirs = module(x)
        if "promote_dtype" in signature(flax_nnx.RMSNorm.__init__).parameters:
            scale = scale.astype(jnp.bfloat16)
        ours = way(lambda x: jn.rms_norm(x, scale=scale, epsilon=EPSILON))(x)
    truth = normalized("rms", x)[0] * np.asarray(scale, np.float64)
    r = partial(to, "bfloat16")
    near = r(truth * (1 + 1e-6)) != r(truth * (1 - 1e-6))
    assert near.mean() < 1e-3
    same_bits(ours, np.asarray(theirs, np.float64), near)


@pytest.mark.parametrize("family", ["function", "linen", "nnx"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("rounding", ["once", "twice"])
def test_a_gain_of_1_plus_the_scale(rounding, name, family, rng):
    """As in Gemma with "once": in bfloat16, 1 + scale would lose bits of the scale."""
    x, scale, _ = arrays(rng, "bfloat16")
    scale, options = scale - 1, {"scale_offset": 1, "rounding": rounding, "epsilon": EPSILON}
    title = {"rms": "RMSNorm", "layer": "LayerNorm"}[name]
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    if family == "function":
        found = NORMS[name](x, scale=scale, **options)
    elif family == "linen":
        module = getattr(linen, title)(**options, **kinds)
        params = module.init(jax.random.key(0), x)["params"]
        assert np.all(params["scale"] == 0)
        found = module.apply({"params": {**params, "scale": scale}}, x)
    else:
        module = getattr(nnx, title)(x.shape[-1], rngs=flax_nnx.Rngs(0), **options, **kinds)
        assert np.all(module.scale[...] == 0)
        module.scale[...] = scale
        found = module(x)
    z, near = normalized(name, x)
    r, gain = partial(to, "bfloat16"), 1 + np.asarray(scale, np.float64)
    if rounding == "twice":
        return same_bits(found, r(r(z) * r(gain)), near)
    truth = z * gain
    same_bits(found, r(truth), r(truth * (1 + 1e-6)) != r(truth * (1 - 1e-6)))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_of_a_sum(norm, rng):
    (x, scale, _), options = arrays(rng, "bfloat16"), {"scale_offset": 1, "rounding": "twice"}
    y, total = jn.add_norm(x, x[::-1], norm=norm, scale=scale, **options)
    np.testing.assert_array_equal(total, x + x[::-1])
    np.testing.assert_array_equal(y, NORMS[norm](total, scale=scale, **options))


def test_gradients_are_those_of_the_formula(rng):
    x, scale, dy = (a.astype(jnp.bfloat16) for a in arrays(rng, "float32", (5, 64)))

    def formula(x, scale):  # as Llama is written for PyTorch
        wide = x.astype(jnp.float32)
        z = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + EPSILON)
        return scale[None] * z.astype(x.dtype)

    norm = lambda x, scale: jn.rms_norm(x, scale=scale, epsilon=EPSILON, rounding="twice")
    ways = (jax.vjp(f, x, scale)[1](norm(x, scale) * dy[None]) for f in (norm, formula))
    for found, truth in zip(*ways, strict=True):
        found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
        assert np.abs(found - truth).max() <= 2**-7 * np.abs(truth).max()


def test_parameters_and_masks_may_be_sharded_otherwise_than_x(rng):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=HOST[:4], axis_types=(AxisType.Explicit,) * 2)
    x, scale, bias = arrays(rng, "bfloat16")
    given, specs = (x, scale, bias, x > 0), (P(None, "b"), P("a"), P("b"), P("a", None))
    run = jax.jit(
        lambda x, scale, bias, where: jn.rms_norm(
            x, scale=scale, bias=bias, where=where, rounding="twice"
        )
    )
    with jax.set_mesh(mesh):
        lying = [NamedSharding(mesh, spec) for spec in specs]
        found = run(*(jax.device_put(a, each) for a, each in zip(given, lying, strict=True)))
    assert jax.typeof(found).sharding.spec == specs[0]
    np.testing.assert_array_equal(found, run(*given))


def test_of_initializers_only_the_default_is_that_of_the_gain():
    x = jnp.ones((2, 3))
    module = linen.RMSNorm(scale_offset=1, scale_init=jax.nn.initializers.constant(0.5))
    assert np.all(module.init(jax.random.key(0), x)["params"]["scale"] == 0.5)
    options = {"scale_offset": 1, "scale_init": jax.nn.initializers.constant(0.5)}
    assert np.all(nnx.RMSNorm(3, rngs=flax_nnx.Rngs(0), **options).scale[...] == 0.5)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"scale_offset": 1}, ValueError, "scale_offset must have a scale to be added to: got 1.0"),
        ({"scale": W, "scale_offset": "1"}, TypeError, "scale_offset must be a number: got '1'"),
        ({"scale": W, "scale_offset": -1}, ValueError, "scale_offset must be finite and >= 0"),
        ({"scale": W, "scale_offset": True}, TypeError, "scale_offset must be a number: got True"),
        ({"rounding": "thrice"}, ValueError, "rounding must be 'once', 'twice' or 'input': got"),
        (
            {"rounding": "twice", "segments": np.zeros(3, int), "num_segments": 1, "axes": 0},
            ValueError,
            "rounding='twice' must have no segments",
        ),
        ({"rounding": "input", "correction": 1}, ValueError, "must have correction=0: got 1"),
        ({"rounding": "input", "epsilon_in": "std"}, ValueError, "must have epsilon_in='var': got"),
        ({"rounding": "input", "full_range": True}, ValueError, "must have full_range=False: got"),
        (
            {"rounding": "input", "implementation": "native"},
            ValueError,
            "implementation='native' has no kernel for this norm",
        ),
    ],
)
def test_wrong_arguments(options, error, said):
    with pytest.raises(error, match=re.escape(said)):
        jn.layer_norm(jnp.ones((3, 4)), **options)


FAMILIES = {  # model, class, arguments
    "llama": ("LlamaRMSNorm", {"rounding": "twice"}),
    "llama4": ("Llama4TextRMSNorm", {"rounding": "twice"}),
    "qwen3": ("Qwen3RMSNorm", {"rounding": "twice"}),
    "mistral": ("MistralRMSNorm", {"rounding": "twice"}),
    "phi3": ("Phi3RMSNorm", {"rounding": "twice"}),
    "deepseek_v3": ("DeepseekV3RMSNorm", {"rounding": "twice"}),
    "t5": ("T5LayerNorm", {"rounding": "twice"}),
    "olmo2": ("Olmo2RMSNorm", {}),
    "gpt_oss": ("GptOssRMSNorm", {}),
    "gemma4": ("Gemma4RMSNorm", {}),
    "gemma": ("GemmaRMSNorm", {"scale_offset": 1}),
    "gemma2": ("Gemma2RMSNorm", {"scale_offset": 1}),
    "gemma3": ("Gemma3RMSNorm", {"scale_offset": 1}),
    "qwen3_next": ("Qwen3NextRMSNorm", {"scale_offset": 1}),
}


# T5's with float32 weights rounds nothing.
ROWS = [(family, weights) for family in FAMILIES for weights in ("bfloat16", "float32")]
ROWS.remove(("t5", "float32"))


@pytest.mark.parametrize(("family", "weights"), ROWS)
def test_bits_are_those_of_the_class_in_transformers(family, weights, rng, way):
    torch, (name, options) = pytest.importorskip("torch"), FAMILIES[family]
    pytest.importorskip("transformers")
    of_family = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(of_family, name)(512, eps=EPSILON).to(getattr(torch, weights))
    x, w = rng.normal(size=(256, 512)), rng.normal(1, 0.3, 512) - options.get("scale_offset", 0)
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, weights)
    as_tensor = lambda a: torch.tensor(np.asarray(a, np.float32)).to(getattr(torch, a.dtype.name))
    module.weight.data = as_tensor(w)
    theirs = module(as_tensor(x)).detach()
    dtype = str(theirs.dtype).removeprefix("torch.")
    ours = way(lambda x: jn.rms_norm(x, scale=w, epsilon=EPSILON, dtype=dtype, **options))(x)
    differ = np.asarray(ours, np.float32) != theirs.float().numpy()
    # A product with a weight of float32 is float32, which may lie at a tie of two of bfloat16.
    assert differ.sum() <= (0 if weights == "bfloat16" else 2)


TWICE = {"rounding": "twice"}
GATED = {  # model, class, its arguments, ours
    "mamba2": ("MambaRMSNormGated", {"group_size": 512}, {"gate_first": True, **TWICE}),
    "bamba": ("BambaRMSNormGated", {"group_size": 512}, {"gate_first": True, **TWICE}),
    "granitemoehybrid": (
        "GraniteMoeHybridRMSNormGated",
        {"group_size": 256},
        {"gate_first": True, "num_groups": 2, **TWICE},
    ),
    "zamba2": (
        "Zamba2RMSNormGated",
        {"group_size": 128},
        {"gate_first": True, "num_groups": 4, **TWICE},
    ),
    "nemotron_h": (
        "NemotronHRMSNormGated",
        {"group_size": 64},
        {"gate_first": True, "num_groups": 8, **TWICE},
    ),
    "falcon_h1": (
        "FalconH1RMSNormGated",
        {"n_groups": 4, "norm_before_gate": False},
        {"gate_first": True, "num_groups": 4},
    ),
    "qwen3_next": ("Qwen3NextRMSNormGated", {}, {"gate_first": False, **TWICE}),
    "qwen3_5": ("Qwen3_5RMSNormGated", {}, {"gate_first": False, **TWICE}),
    "olmo_hybrid": ("OlmoHybridRMSNormGated", {}, {"gate_first": False, **TWICE}),
    "lara_mini": ("LaraMiniRMSNormGated", {}, {"gate_first": False}),
    "kimi_linear": (
        "KimiLinearRMSNormGated",
        {},
        {"gate_first": False, "activation": "sigmoid"},
    ),
}


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", GATED)
def test_bits_with_a_gate_are_those_of_the_class_in_transformers(family, weights, rng, way):
    torch, (name, arguments, options) = pytest.importorskip("torch"), GATED[family]
    pytest.importorskip("transformers")
    of_family = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(of_family, name)(512, eps=EPSILON, **arguments).to(getattr(torch, weights))
    x, gate = (jnp.asarray(a, jnp.bfloat16) for a in rng.normal(size=(2, 256, 512)))
    w = jnp.asarray(rng.normal(1, 0.3, 512), weights)
    as_tensor = lambda a: torch.tensor(np.asarray(a, np.float32)).to(getattr(torch, a.dtype.name))
    module.weight.data = as_tensor(w)
    theirs = module(as_tensor(x), as_tensor(gate)).detach()
    dtype = str(theirs.dtype).removeprefix("torch.")
    norm = partial(jn.gated_rms_norm, scale=w, epsilon=EPSILON, dtype=dtype, **options)
    differ = np.asarray(way(norm)(x, gate), np.float32) != theirs.float().numpy()
    # An activation is float32 and its last bit varies, and so does what lies at a tie in bfloat16.
    assert differ.sum() <= 4
