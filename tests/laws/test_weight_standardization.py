"""Test weight standardization, centered weight norm, and norms of all kernels of a model."""

from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import jaxnorm as jn

AXES = (0, 1, 2)
GAIN = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def drawn(rng, spread=1.0):
    """The kernel of a convolution, with a mean of its own and an output without any spread."""
    k = rng.standard_normal((3, 3, 4, 8)) * spread + 0.1
    k[..., 3] = 0.3
    return k.astype(np.float32)


def parts(k):
    """Deviation, variance and number of the weights of each output, in float64."""
    k = k.astype(np.float64)
    return k - k.mean(AXES), k.var(AXES), k.size // k.shape[-1]


# as the programs compute them: of deviation d, variance v and number n
PROGRAMS = {
    "timm": ({}, lambda d, v, n: d / np.sqrt(v + 1e-6)),
    "BiT": ({"epsilon": 1e-10}, lambda d, v, n: d / np.sqrt(v + 1e-10)),
    "the authors": (
        {"epsilon": 1e-5, "epsilon_in": "std", "correction": 1},
        lambda d, v, n: d / (np.sqrt(v * n / (n - 1)) + 1e-5),
    ),
    "timm, scaled": (
        {"by_fan_in": True, "scale": GAIN},
        lambda d, v, n: d / np.sqrt(v + 1e-6) * GAIN * n**-0.5,
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_that_standardize(program, rng):
    options, truth = PROGRAMS[program]
    for spread in (1.0, 1e-3):
        k = drawn(rng, spread)
        found = jn.weight_standardization(k, **options)
        np.testing.assert_allclose(found, truth(*parts(k)), rtol=3e-6, atol=1e-6)
        np.testing.assert_array_equal(found[..., 3], np.zeros((3, 3, 4)))
    by_output_first = jn.weight_standardization(k.transpose(3, 2, 0, 1), feature_axes=0, **options)
    np.testing.assert_allclose(by_output_first.transpose(2, 3, 1, 0), found, atol=1e-6)


def test_nfnets(rng):
    """(k - mean) gain / sqrt(max(n var, 1e-4)), of kernels below and above it."""
    norm = partial(jn.weight_norm, centered=True, epsilon=1e-2, epsilon_in="max")
    for spread in (1.0, 1e-3):
        k = drawn(rng, spread)
        d, v, n = parts(k)
        truth = d * GAIN / np.sqrt(np.maximum(v * n, 1e-4))
        np.testing.assert_allclose(norm(k, GAIN), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.usefixtures("use")
def test_gradients(implementation, rng):
    """The gradient has no part along ones nor, without epsilon, along the kernel."""
    k, dy = rng.standard_normal((2, 36, 8)).astype(np.float32)
    norm = partial(jn.weight_standardization, implementation=implementation, epsilon=0.0)
    y, vjp = jax.vjp(norm, k)
    d, v, _ = parts(k[:, None, None])
    d, z = d[:, 0, 0], d[:, 0, 0] / np.sqrt(v)
    truth = (dy - dy.mean(0) - z * (z * dy).mean(0)) / np.sqrt(v)
    np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(vjp(dy)[0], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon_in", ["var", "std", "max"])
def test_weight_norm_has_every_form(epsilon_in):
    """Of length 5, or 3 where centered, with an epsilon of 1."""
    k, roots = jnp.array([[3.0], [4.0]]), {"var": 26**0.5, "std": 6.0, "max": 5.0}
    found = jn.weight_norm(k, epsilon=1.0, epsilon_in=epsilon_in)
    np.testing.assert_allclose(found, k / roots[epsilon_in], rtol=1e-6)
    found = jn.weight_norm(k, centered=True, epsilon=0.0, epsilon_in=epsilon_in)
    np.testing.assert_allclose(found, [[-(0.5**0.5)], [0.5**0.5]], rtol=1e-6)


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.relu(flax.linen.Conv(4, (3, 3))(x))
        return flax.linen.Dense(2)(x.mean((1, 2)))


class NnxNet(flax_nnx.Module):
    def __init__(self, rngs):
        self.conv = flax_nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.dense = flax_nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(flax_nnx.relu(self.conv(x)).mean((1, 2)))


@pytest.mark.usefixtures("ordinary_promotion")
def test_a_loss_of_a_linen_model_goes_through_the_norm(rng):
    """The gradient by each kernel has no part along it, and the biases have theirs."""
    x = rng.standard_normal((2, 6, 6, 3)).astype(np.float32)
    model = Net()
    params = model.init(jax.random.key(0), x)["params"]
    scales = {path: np.ones(k.shape[-1]) for path, k in jn.kernels_by_path(params).items()}
    assert set(scales) == {"Conv_0/kernel", "Dense_0/kernel"}

    @jax.jit
    def loss(params, scales):
        normalized = jn.map_kernels(jn.weight_norm, params, scales)
        return (model.apply({"params": normalized}, x) ** 2).sum()

    by_params, by_scales = jax.grad(loss, argnums=(0, 1))(params, scales)
    for path, kernel in jn.kernels_by_path(params).items():
        gradient = jn.kernels_by_path(by_params)[path]
        assert np.abs(gradient).max() > 1e-3
        along = (gradient * kernel).sum(tuple(range(kernel.ndim - 1)))
        np.testing.assert_allclose(along, np.zeros_like(along), atol=1e-5)
        assert np.abs(by_scales[path]).max() > 1e-3
    assert by_params["Dense_0"]["bias"].any()


@pytest.mark.usefixtures("ordinary_promotion")
def test_spectral_norm_of_an_nnx_model(rng):
    """As the largest singular values of NumPy have it, by one step per call."""
    graph, params = flax_nnx.split(NnxNet(flax_nnx.Rngs(0)), flax_nnx.Param)
    us = jn.spectral_vectors(jax.random.key(0), params)
    step = jax.jit(
        lambda params, us: jn.map_kernels(
            lambda k, u: jn.spectral_norm(k, u)[:2], params, us, has_aux=True
        )
    )
    for _ in range(200):
        normalized, us = step(params, us)
    pairs = zip(*(jn.kernels_by_path(a).values() for a in (normalized, params)), strict=True)
    for found, kernel in pairs:
        matrix = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
        truth = np.asarray(kernel) / np.linalg.norm(matrix, 2)
        np.testing.assert_allclose(found, truth, atol=1e-5)
    y = flax_nnx.merge(graph, normalized)(np.ones((1, 6, 6, 3), np.float32))
    assert y.shape == (1, 2)
    assert jax.tree.structure(normalized) == jax.tree.structure(params)


HAIKU = {"mlp/~/linear_0": {"w": np.ones((3, 2)), "b": np.zeros(2)}, "norm": {"scale": np.ones(2)}}


def test_what_is_a_kernel():
    twice = partial(jn.map_kernels, lambda leaf: 2 * leaf)
    assert list(jn.kernels_by_path(HAIKU, match="w")) == ["mlp/~/linear_0/w"]
    assert len(jn.kernels_by_path(HAIKU, match=("w", "scale"))) == 2
    found = twice(HAIKU, match=lambda path, leaf: leaf.ndim == 1)
    assert found["norm"]["scale"].tolist() == [2, 2]
    assert found["mlp/~/linear_0"]["w"] is HAIKU["mlp/~/linear_0"]["w"]
    assert twice([{"kernel": 1.0}, {"kernels": 1.0}]) == [{"kernel": 2.0}, {"kernels": 1.0}]
    boxed = {"kernel": flax.linen.Partitioned(np.ones(2), ("data",))}
    assert twice(boxed)["kernel"].value.tolist() == [2, 2]


def test_mistakes():
    words = "match must name leaves of params: got 'kernel' for mlp/~/linear_0/b, mlp/~/linear_0/w,"
    with pytest.raises(ValueError, match=words):
        jn.map_kernels(jn.weight_norm, HAIKU)
    with pytest.raises(ValueError, match="got 'kernel' for a tree without leaves"):
        jn.kernels_by_path({})
    with pytest.raises(ValueError, match=r"a/0, .*, a/7 and 4 more\."):
        jn.kernels_by_path({"a": list(range(12))})
    with pytest.raises(ValueError, match="one value, by its path: got other in one of both alone"):
        jn.map_kernels(jn.weight_norm, {"kernel": np.ones((2, 2))}, {"kernel": 1, "other": 1})
    with pytest.raises(ValueError, match="one value, by its path: got kernel in one"):
        jn.map_kernels(jn.weight_norm, {"kernel": np.ones((2, 2))}, {})
    with pytest.raises(ValueError, match=r"rank 2 or more: got shape \(3,\) at kernel\."):
        jn.spectral_vectors(jax.random.key(0), {"kernel": np.ones(3)})
    with pytest.raises(ValueError, match="scale must have the shape of the feature axes"):
        jn.weight_standardization(np.ones((2, 3), np.float32), np.ones(2, np.float32))
    with pytest.raises(TypeError, match="kernel must be floating"):
        jn.weight_standardization(np.ones((2, 3), int))
    with pytest.raises(ValueError, match="epsilon_in must be 'var'"):
        jn.weight_norm(np.ones((2, 3), np.float32), epsilon_in="sum")


def as_torch(kernel):
    return torch().tensor(kernel.transpose(3, 2, 0, 1))


def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["StdConv2d", "ScaledStdConv2d"])
def test_timm(name, rng):
    """What these convolutions do to an image of each weight alone."""
    layers = pytest.importorskip("timm.layers.std_conv", exc_type=ImportError)
    k = rng.standard_normal((3, 3, 4, 8)).astype(np.float32)
    options = {"gamma": 1.7} if name.startswith("Scaled") else {}
    theirs = getattr(layers, name)(4, 8, 3, padding=0, bias=False, **options)
    theirs.weight.data = as_torch(k)
    more = {}
    if options:
        theirs.gain.data = torch().tensor(GAIN).reshape(8, 1, 1, 1)
        more = {"by_fan_in": True, "scale": 1.7 * GAIN}
    seen = theirs(torch().eye(36).reshape(36, 4, 3, 3)).detach().numpy().reshape(4, 3, 3, 8)
    found = jn.weight_standardization(k, **more)
    np.testing.assert_allclose(found.transpose(2, 0, 1, 3), seen, atol=2e-6)


def test_pytorch(rng):
    """The parametrizations of a convolution: weight norm, and spectral norm at its limit."""
    of = torch().nn.utils.parametrizations
    k = drawn(rng)
    by_length = of.weight_norm(torch().nn.Conv2d(4, 8, 3))
    own = by_length.parametrizations.weight
    own.original1.data, own.original0.data = as_torch(k), torch().tensor(GAIN).reshape(8, 1, 1, 1)
    truth = by_length.weight.detach().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_allclose(jn.weight_norm(k, GAIN), truth, atol=1e-6)
    by_sigma = of.spectral_norm(torch().nn.Conv2d(4, 8, 3), n_power_iterations=300)
    by_sigma.parametrizations.weight.original.data = as_torch(k)
    truth = by_sigma.weight.detach().numpy().transpose(2, 3, 1, 0)
    found = jn.spectral_norm(k, np.ones((1, 8), np.float32), n_steps=300)[0]
    np.testing.assert_allclose(found, truth, atol=2e-6)
