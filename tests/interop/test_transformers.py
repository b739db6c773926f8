"""Test whole models that others wrote: transformers' logits from our models with its weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm as jn

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from bench import transformers_models as models  # noqa: E402
from bench.transformers_cases import CASES, TOKENS, theirs  # noqa: E402
from examples.models.decoder import Config, Decoder  # noqa: E402
from examples.models.resnet import ResNet  # noqa: E402
from examples.models.vit import OF_FILE, ViT  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
SMALL = [name for name in CASES if name != "ResNet-18"]


@pytest.mark.parametrize("name", CASES)
def test_logits_in_float32(name):
    case = CASES[name]
    hf, inputs = theirs(case), case.inputs()
    loaded = models.ours(case, hf, inputs)
    assert models.largest(models.computed(loaded, inputs), models.logits_of(hf, inputs)) < 5e-6
    assert not loaded.matching.unused
    assert not loaded.matching.missing
    assert loaded.matching.guessed == name.startswith("ResNet")
    assert case.lines() <= 5


@pytest.mark.parametrize("name", SMALL)
def test_norms_in_bfloat16_to_the_bit(name):
    """But for ties between two numbers, where the last bit of float32 decides; and logits as near
    to those in float32 as transformers' own are.
    """
    case = CASES[name]
    hf, inputs = theirs(case, "bfloat16"), case.inputs()
    loaded = models.ours(case, hf, inputs)
    norms, elements, different = models.norm_bits(loaded, hf, inputs)
    assert norms >= 5
    assert elements > 3000
    assert different <= elements / 2000
    mine, true = models.computed(loaded, inputs), models.logits_of(hf, inputs)
    rounded = np.asarray(jnp.asarray(inputs, "bfloat16"), "float32") if case.image else inputs
    exact = models.logits_of(hf.float(), rounded)
    assert models.largest(mine, true) < 0.04
    assert models.largest(mine, exact) < 1.5 * models.largest(true, exact)


def test_another_rounding_is_seen():
    """The comparison of bits can fail: Llama's norms by the call of another row of the guide."""
    case = CASES["Llama 3"]
    hf, inputs = theirs(case, "bfloat16"), case.inputs()
    (x, y), weight = models.recorded(hf, inputs)["model.norm"], hf.model.norm.weight
    scale = jnp.asarray(models.as_numpy(weight))
    options = {"scale": scale, "epsilon": hf.config.rms_norm_eps}
    right = jn.rms_norm(jnp.asarray(x), rounding="twice", **options)
    np.testing.assert_array_equal(right, y)
    other = jn.rms_norm(jnp.asarray(x), rounding="once", **options)
    assert 0.15 < np.mean(np.asarray(other) != y) < 0.45


@pytest.mark.parametrize("name", ["Qwen 3", "Gemma 3"])
def test_a_saved_checkpoint(name, tmp_path):
    """Tied embeddings are in the file once; config.json says the rest."""
    case = CASES[name]
    hf = theirs(case)
    hf.save_pretrained(tmp_path)
    config = Config.of(json.loads((tmp_path / "config.json").read_text()))
    assert config == Config.of(hf.config.to_dict())
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    file = tmp_path / "model.safetensors"
    assert jn.interop.load(model, file, framework="torch", names=config.names) is model
    found = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS))
    assert models.largest(np.asarray(found), models.logits_of(hf, TOKENS)) < 5e-6


def test_a_saved_vit_has_other_names(tmp_path):
    """transformers 5 writes the names of older versions, which its state dict does not have."""
    case = CASES["ViT"]
    hf, images = theirs(case), case.inputs()
    hf.save_pretrained(tmp_path)
    model = ViT.of(hf.config.to_dict())
    like = jax.eval_shape(model.init, jax.random.key(0), images)
    file = tmp_path / "model.safetensors"
    options = {"framework": "torch", "names": OF_FILE}
    assert not jn.interop.match(like, file, **options).guessed
    found = model.apply(jn.interop.load(like, file, **options), images)
    assert models.largest(np.asarray(found), models.logits_of(hf, images)) < 5e-6


@pytest.mark.parametrize("name", ["Gemma 3", "ResNet, tiny"])
def test_the_way_back(name):
    """All of a state dict to the bit, with tied embeddings and counts of batches."""
    case = CASES[name]
    hf, inputs = theirs(case), case.inputs()
    model, variables, (_, names) = case.load(hf, inputs, "float32")
    state = hf.state_dict()
    source = model if variables is None else variables
    back = jn.interop.save(source, framework="torch", names=names, like=state)
    assert list(back) == list(state)
    for key, tensor in state.items():
        np.testing.assert_array_equal(back[key], tensor.numpy())
    assert not hf.load_state_dict({key: torch.tensor(a) for key, a in back.items()}).missing_keys


def test_a_checkpoint_of_another_size_changes_nothing():
    case = CASES["OLMo 2"]
    hf = theirs(case)
    config = Config.of({**hf.config.to_dict(), "intermediate_size": 40})
    model = Decoder(config, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    fit = (
        r"layers/0/mlp/down_proj/kernel \(40, 32\): .*down_proj.weight \(32, 48\) gives \(48, 32\)"
    )
    with pytest.raises(ValueError, match=fit):
        jn.interop.load(model, hf.state_dict(), framework="torch", names=config.names)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_resnet_of_timm():
    """ResNet-18 with the names of torchvision, by sizes and order alone."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=7).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.ndim == 1:  # norms and their statistics
                drawn = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(0.5 + drawn if name.endswith(("weight", "var")) else drawn - 0.5)
    images = np.random.default_rng(0).standard_normal((2, 64, 64, 3)).astype("float32")
    with torch.no_grad():
        true = model(torch.tensor(images).movedim(-1, 1)).numpy()
    ours = ResNet(num_classes=7)
    like = jax.eval_shape(ours.init, jax.random.key(0), images)
    found = jn.interop.load(like, model.state_dict(), framework="torch", show=False)
    assert models.largest(np.asarray(jax.jit(ours.apply)(found, images)), true) < 5e-6
