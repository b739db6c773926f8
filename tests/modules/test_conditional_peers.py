"""Compare norms that take a condition with the classes of other libraries, where they install."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm as jn

torch = pytest.importorskip("torch")
N, H, W, C, K = 3, 4, 6, 8, 5


def draw(rng, *shape):
    return (rng.standard_normal(shape) * 2 + 1).astype(np.float32)


def moved(array):
    """A tensor with the channels in front of the positions."""
    return torch.movedim(torch.tensor(array), -1, 1)


def back(tensor):
    return torch.movedim(tensor, 1, -1).detach().numpy()


def dense(linear, chunks, order):
    """The parameters of a linear layer whose chunks of outputs come in another order."""
    weight, bias = (value.detach().chunk(chunks) for value in (linear.weight, linear.bias))
    pick = lambda parts: torch.cat([parts[at] for at in order]).numpy()
    return {"params": {"modulation": {"kernel": pick(weight).T, "bias": pick(bias)}}}


def diffusers():
    return pytest.importorskip("diffusers.models.normalization")


def test_adaln_zero_of_diffusers(rng):
    theirs, zero = diffusers(), jn.linen.AdaLayerNormZero()
    x, condition = draw(rng, N, H, C), draw(rng, N, C)
    single = theirs.AdaLayerNormZeroSingle(C)
    y, gate = zero.apply(dense(single.linear, 3, (0, 1, 2)), x, condition)
    for found, truth in zip(
        (y, gate[:, 0]), single(torch.tensor(x), torch.tensor(condition)), strict=True
    ):
        np.testing.assert_allclose(found, truth.detach().numpy(), atol=3e-6)
    # the layer of a block of DiT holds two
    block = theirs.AdaLayerNormZero(C)
    shown, gate_1, shift, scale, gate_2 = block(torch.tensor(x), emb=torch.tensor(condition))
    y, gate = zero.apply(dense(block.linear, 6, (0, 1, 2)), x, condition)
    np.testing.assert_allclose(y, shown.detach().numpy(), atol=3e-6)
    np.testing.assert_allclose(gate[:, 0], gate_1.detach().numpy(), atol=1e-6)
    y, gate = zero.apply(dense(block.linear, 6, (3, 4, 5)), x, condition)
    shown = block.norm(torch.tensor(x)) * (1 + scale[:, None]) + shift[:, None]
    np.testing.assert_allclose(y, shown.detach().numpy(), atol=3e-6)
    np.testing.assert_allclose(gate[:, 0], gate_2.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_adaln_of_diffusers(norm, rng):
    """AdaLayerNorm has the order of DiT with chunk_dim=1, AdaLayerNormContinuous the other."""
    theirs = diffusers()
    x, condition = draw(rng, N, H, C), draw(rng, N, C)
    given = torch.tensor(x), torch.tensor(condition)
    continuous = theirs.AdaLayerNormContinuous(
        C, C, elementwise_affine=False, eps=1e-6, norm_type=f"{norm}_norm"
    )
    y = jn.linen.AdaLayerNorm(norm=norm).apply(dense(continuous.linear, 2, (1, 0)), x, condition)
    np.testing.assert_allclose(y, continuous(*given).detach().numpy(), atol=3e-6)
    if norm == "layer":
        plain = theirs.AdaLayerNorm(C, chunk_dim=1, norm_eps=1e-6)
        y = jn.linen.AdaLayerNorm().apply(dense(plain.linear, 2, (0, 1)), x, condition)
        np.testing.assert_allclose(y, plain(given[0], temb=given[1]).detach().numpy(), atol=3e-6)


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("size", [(2, 3), (8, 12), (5, 4)])
def test_spade(norm, size, rng):
    """By the formula of the authors' class, with PyTorch's layers and resizing."""
    x, labels = draw(rng, N, H, W, C), draw(rng, N, *size, K)
    shared = torch.nn.Conv2d(K, 16, 3, padding=1)
    gamma, beta = (torch.nn.Conv2d(16, C, 3, padding=1) for _ in range(2))
    plain = {"instance": torch.nn.InstanceNorm2d, "batch": torch.nn.BatchNorm2d}[norm]
    plain = plain(C, affine=False)
    resized = torch.nn.functional.interpolate(moved(labels), size=(H, W), mode="nearest")
    hidden = shared(resized).relu()
    theirs = plain(moved(x)) * (1 + gamma(hidden)) + beta(hidden)
    layers = {"shared": shared, "gamma": gamma, "beta": beta}
    params = {
        name: {
            "kernel": layer.weight.detach().permute(2, 3, 1, 0).numpy(),
            "bias": layer.bias.detach().numpy(),
        }
        for name, layer in layers.items()
    }
    stats = {"mean": jnp.zeros(C), "var": jnp.ones(C)} if norm == "batch" else {}
    module = jn.linen.SPADE(
        norm=norm, hidden_features=16, use_running_average=False, momentum=0.9, unbiased=True
    )
    y, state = module.apply(
        {"params": params, "batch_stats": stats}, x, labels, mutable=["batch_stats"]
    )
    np.testing.assert_allclose(y, back(theirs), atol=5e-6)
    if norm == "batch":
        state = state["batch_stats"]
        np.testing.assert_allclose(state["mean"], plain.running_mean, rtol=1e-6)
        np.testing.assert_allclose(state["var"], plain.running_var, rtol=1e-6)


def test_nearest_is_the_rule_of_pytorch():
    """But where PyTorch's product of float32 numbers falls below a whole number."""
    from jaxnorm.flax_common.conditional import label_map

    module, wrong = jn.linen.SPADE(kernel_size=(3,)), []
    for old in range(1, 33):
        labels = np.arange(old, dtype=np.float32)
        for new in range(1, 33):
            x = np.zeros((1, new, 1), np.float32)
            found = label_map(module, labels[None, :, None], x)[0, :, 0]
            theirs = torch.nn.functional.interpolate(
                torch.tensor(labels)[None, None], size=(new,), mode="nearest"
            )[0, 0]
            if (np.asarray(found) != theirs.numpy()).any():
                wrong.append((old, new))
    assert wrong == [(26, 22)]


def test_conditional_batch_norm(rng):
    """A batch norm without parameters, and a table of gains and biases, in both modes."""
    x, labels = draw(rng, N, H, W, C), rng.integers(0, 7, N)
    plain, table = torch.nn.BatchNorm2d(C, affine=False), torch.nn.Embedding(7, 2 * C)
    module = jn.linen.ConditionalBatchNorm(num_classes=7, momentum=0.9, unbiased=True)
    gains = table.weight.detach().numpy() - np.repeat([1, 0], C).astype(np.float32)
    variables = {
        "params": {"modulation": {"embedding": gains}},
        "batch_stats": {"mean": jnp.zeros(C), "var": jnp.ones(C)},
    }
    for evaluating in (False, True):
        plain.train(not evaluating)
        gain, bias = table(torch.tensor(labels))[..., None, None].chunk(2, 1)
        theirs = plain(moved(x)) * gain + bias
        y, state = module.apply(
            variables, x, labels, use_running_average=evaluating, mutable=["batch_stats"]
        )
        np.testing.assert_allclose(y, back(theirs), atol=5e-6)
        variables |= state
    np.testing.assert_allclose(variables["batch_stats"]["var"], plain.running_var, rtol=1e-6)
