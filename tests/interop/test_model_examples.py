"""Test the example models without PyTorch: configs of whatever age, positions, windows, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm as jn
from examples.models.attention import causal_mask, frequencies, rotated, softcapped
from examples.models.decoder import FAMILIES, Config, Decoder
from examples.models.resnet import ResNet

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
# each as config.json of older versions has it, and of transformers 5
AGES = {
    "Llama 3": (
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ),
    "Qwen 3": (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
        {
            "model_type": "qwen3",
            "sliding_window": 8,
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
        },
    ),
    "Llama 2": ({"model_type": "llama", "rope_scaling": None}, {"model_type": "llama"}),
    "Gemma 3": (
        {
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4},
            },
        },
    ),
    "Gemma 2": (
        {"model_type": "gemma2", "sliding_window": 8},
        {
            "model_type": "gemma2",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


@pytest.mark.parametrize("name", AGES)
def test_configs_of_both_ages(name):
    old, new = (Config.of({**SIZES, **given}) for given in AGES[name])
    assert old == new
    windows = [window for window, _ in old.layers]
    expected = {"Gemma": [8, None, 8, None], "Qwen": [None, None, 8, 8], "Llama": [None] * 4}
    assert windows == expected[name.split()[0]]


def test_defaults_of_a_family():
    """What a config.json leaves out."""
    config = Config.of({**SIZES, "model_type": "olmo2"})
    assert (config.num_kv_heads, config.head_dim, config.epsilon) == (4, 8, 1e-5)
    assert (config.tied, config.query_scale, config.activation) == (False, 8**-0.5, "silu")
    assert Config.of({**SIZES, "model_type": "gemma2"}).tied
    assert not Config.of({**SIZES, "model_type": "gemma2", "tie_word_embeddings": False}).tied


def test_other_models_are_refused():
    listed = ", ".join(FAMILIES)
    with pytest.raises(ValueError, match=f"model_type must be one of {listed}: got 'gpt2'"):
        Config.of({**SIZES, "model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"rope_type must be .*: got 'yarn'"):
        frequencies(8, {"rope_theta": 1e4, "rope_type": "yarn"})


def test_a_decoder_comes_back_from_what_it_was_saved_as():
    # on every version of Flax, unlike the comparison with PyTorch
    config = Config.of({"model_type": "llama", **SIZES, "num_hidden_layers": 1})
    model = Decoder(config, rngs=nnx.Rngs(0))
    saved = jn.interop.save(model, framework="torch", names=config.names)
    loaded = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(1)))
    jn.interop.load(loaded, saved, framework="torch", names=config.names)
    jax.tree.map(
        np.testing.assert_array_equal, *map(nnx.to_pure_dict, map(nnx.state, (loaded, model)))
    )


def test_positions():
    """Products of queries and keys depend on the difference of their positions alone."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8)).astype("float32")
    angles = jnp.arange(20.0)[:, None] * frequencies(8, {"rope_theta": 1e4})
    turn = lambda x, at: rotated(jnp.asarray(x), jnp.cos(angles[at]), jnp.sin(angles[at]))
    first = jnp.sum(turn(q, 7) * turn(k, 3))
    np.testing.assert_allclose(jnp.sum(turn(q, 16) * turn(k, 12)), first, rtol=1e-5)
    np.testing.assert_allclose(frequencies(4, {"rope_theta": 1e4}), [1, 0.01])
    half = frequencies(4, {"rope_theta": 1e4, "type": "linear", "factor": 2})  # as once called
    np.testing.assert_allclose(half, [0.5, 0.005])


def test_a_window():
    np.testing.assert_array_equal(
        causal_mask(4, 2), np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool)
    )
    np.testing.assert_array_equal(causal_mask(3), np.tri(3, dtype=bool))


def test_a_cap():
    np.testing.assert_allclose(
        softcapped(jnp.array([-1e3, 0.01, 1e3]), 5.0), [-5, 0.01, 5], rtol=1e-5
    )
    assert softcapped(jnp.ones(2), None).tolist() == [1, 1]


def test_strided_convolutions_pad_both_sides():
    """With a one at the first pixel, and at the last, the first layer sees both alike."""
    model = ResNet(num_classes=2, depths=(1,), features=(8,), stem=8)
    images = np.zeros((2, 8, 8, 3), "float32")
    images[0, 0, 0], images[1, -2, -2] = 1, 1
    variables = model.init(jax.random.key(0), images)
    kernel = variables["params"]["stem"]["Conv_0"]["kernel"]
    found = model.apply(variables, images, capture_intermediates=True)[1]["intermediates"]
    y = found["stem"]["Conv_0"]["__call__"][0]
    # windows start 3 pixels before an even one: at its pixel, it has the kernel's middle
    np.testing.assert_allclose(y[0, 0, 0], kernel[3, 3].sum(0), rtol=1e-6)
    np.testing.assert_allclose(y[1, 3, 3], kernel[3, 3].sum(0), rtol=1e-6)
