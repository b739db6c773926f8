"""Test the modules of GRN, FRN, EvoNorm and RevIN, and compare them with classes of PyTorch."""

import re
from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm as jn
from jaxnorm import linen as jn_linen
from jaxnorm import nnx as jn_nnx

KEY = jax.random.key(0)


def images(rng, *shape):
    return (rng.standard_normal(shape or (4, 6, 5, 8)) * 1.5 + 0.3).astype(np.float32)


class Timm:
    """A layer of PyTorch Image Models, with random parameters."""

    def __init__(self, file, name, rng, **options):
        self.torch = pytest.importorskip("torch")
        layers = pytest.importorskip(f"timm.layers.{file}", exc_type=ImportError)
        self.layer = getattr(layers, name)(8, **options)
        for param in self.layer.parameters():
            values = rng.uniform(-0.5, 1.5, param.shape).astype(np.float32)
            param.data = self.torch.from_numpy(values)
        self.params = {
            name: param.detach().numpy().copy() for name, param in self.layer.named_parameters()
        }

    def __call__(self, x, dy, *, first=True):
        """Return the output and the gradients of ``sum(dy * y)``, all with the channels last."""
        move = (lambda a, *axes: np.moveaxis(a, *axes)) if first else lambda a, *axes: a
        given = self.torch.from_numpy(np.ascontiguousarray(move(x, -1, 1))).requires_grad_()
        y = self.layer(given)
        y.backward(self.torch.from_numpy(np.ascontiguousarray(move(dy, -1, 1))))
        grads = {name: param.grad.numpy() for name, param in self.layer.named_parameters()}
        return move(y.detach().numpy(), 1, -1), move(given.grad.numpy(), 1, -1), grads


NAMES = {"weight": "scale", "tau": "threshold"}
CLASSES = [
    ("grn", "GlobalResponseNorm", {"channels_last": True}, "GlobalResponseNorm", {}),
    (
        "filter_response_norm",
        "FilterResponseNormTlu2d",
        {},
        "FilterResponseNorm",
        {"epsilon": 1e-5},
    ),
    ("evo_norm", "EvoNorm2dS0", {"groups": 4}, "EvoNormS0", {"num_groups": 4}),
    (
        "evo_norm",
        "EvoNorm2dS0",
        {"group_size": 4},
        "EvoNormS0",
        {"num_groups": None, "group_size": 4},
    ),
    (
        "evo_norm",
        "EvoNorm2dB0",
        {},
        "EvoNormB0",
        {"epsilon": 1e-3, "momentum": 0.9, "unbiased": True},
    ),
]


@pytest.mark.parametrize(("file", "theirs", "given", "ours", "options"), CLASSES)
def test_classes_of_timm_give_the_same(file, theirs, given, ours, options, rng):
    """Outputs and gradients to 1e-5, and the running variance."""
    timm, x, dy = Timm(file, theirs, rng, **given), images(rng), images(rng)
    y, dx, grads = timm(x, dy, first=not given.get("channels_last"))
    module = getattr(jn_linen, ours)(**options)
    params = {NAMES.get(name, name): value for name, value in timm.params.items()}
    stats = {"var": jnp.ones(8)}
    mode = {"use_running_average": False} if ours == "EvoNormB0" else {}

    @jax.jit
    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def both(params, x):
        variables = {"params": params, "batch_stats": stats}
        y, state = module.apply(variables, x, **mode, mutable=["batch_stats"])
        return (dy * y).sum(), (y, state)

    (dparams, found_dx), (found, state) = both(params, x)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(found, y)
    close(found_dx, dx)
    for name, grad in grads.items():  # sums of 120 numbers
        np.testing.assert_allclose(dparams[NAMES.get(name, name)], grad, rtol=1e-5, atol=1e-4)
    if mode:
        close(state["batch_stats"]["var"], timm.layer.running_var)
        timm.layer.eval()
        evaluated = module.apply({"params": params, **state}, x, use_running_average=True)
        close(evaluated, timm(x, dy)[0])


def test_convnext_v2_of_transformers_gives_the_same(rng):
    torch = pytest.importorskip("torch")
    name = "transformers.models.convnextv2.modeling_convnextv2"
    layer = pytest.importorskip(name, exc_type=ImportError).ConvNextV2GRN(8)
    x, scale, bias = images(rng), *rng.normal(size=(2, 8)).astype(np.float32)
    layer.weight.data[:], layer.bias.data[:] = torch.from_numpy(scale), torch.from_numpy(bias)
    y = jn.global_response_norm(x, scale=scale, bias=bias)
    np.testing.assert_allclose(y, layer(torch.from_numpy(x)).detach(), rtol=1e-5, atol=1e-5)


def test_a_forecaster_normalizes_and_reverses_with_one_instance(rng):
    class Forecaster(flax.linen.Module):
        def setup(self):
            self.norm = jn_linen.ReversibleInstanceNorm()

        def __call__(self, series):
            y, moments = self.norm(series)
            return self.norm.inverse(y[:, -3:], moments)

    series = images(rng, 2, 12, 8) + 1e5
    found, variables = Forecaster().init_with_output(KEY, series)
    np.testing.assert_allclose(found, series[:, -3:], rtol=2e-7)
    assert sorted(variables["params"]["norm"]) == ["bias", "scale"]

    class Compact(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, series):
            norm = jn_linen.ReversibleInstanceNorm()
            y, moments = norm(series)
            return norm.inverse(y[:, -3:], moments)

    grads = jax.grad(lambda params: Compact().apply({"params": params}, series).sum())(
        {"ReversibleInstanceNorm_0": variables["params"]["norm"]}
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_inverses_of_both_families_agree_to_the_bit(dtype, rng):
    series = jnp.asarray(images(rng, 2, 12, 8), dtype)
    module = jn_nnx.ReversibleInstanceNorm(8, rngs=nnx.Rngs(0))
    for param in (module.scale, module.bias):
        param[...] = jnp.asarray(rng.uniform(0.5, 1.5, 8), jnp.float32)
    params = {"scale": module.scale[...], "bias": module.bias[...]}
    twin, mask = jn_linen.ReversibleInstanceNorm(), rng.random((2, 12, 1)) < 0.7
    y, moments = module(series, mask=mask)
    found = module.inverse(y, moments, mask=mask)
    other = twin.apply({"params": params}, y, moments, mask=mask, method="inverse")
    assert found.dtype == other.dtype == jnp.float32
    np.testing.assert_array_equal(found, other)
    np.testing.assert_allclose(found, np.where(mask, series, 0), rtol=1e-5, atol=1e-5)
    plain = jn_nnx.ReversibleInstanceNorm(8, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    bare = jn_linen.ReversibleInstanceNorm(use_scale=False, use_bias=False)
    np.testing.assert_array_equal(
        plain.inverse(*plain(series)), bare.apply({}, *plain(series), method="inverse")
    )


def test_the_inverse_needs_parameters_and_says_so():
    norm, moments = jn_linen.ReversibleInstanceNorm(), jn.Moments(*np.ones((3, 1), np.float32))
    message = "must have its parameters before inverse: got no scale and no bias. Call the layer on"
    with pytest.raises(ValueError, match=re.escape(message)):
        norm.init(KEY, np.ones((1, 2, 1), np.float32), moments, method="inverse")
    twin = jn_nnx.ReversibleInstanceNorm(1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="mask must broadcast against x"):
        twin.inverse(np.ones((1, 2, 1), np.float32), moments, mask=np.ones(3, bool))


def test_global_response_norm_starts_as_the_identity(rng):
    x = images(rng)
    module = jn_nnx.GlobalResponseNorm(8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module(x), x)
    y, variables = jn_linen.GlobalResponseNorm().init_with_output(KEY, x)
    np.testing.assert_array_equal(y, x)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(variables))


def test_an_epsilon_is_learned(rng):
    """By its size, which the paper adds to 1e-6; it starts from 1e-4."""
    x = 0.01 * images(rng, 4, 1, 1, 8)
    norm = jn_linen.FilterResponseNorm(learn_epsilon=True, use_threshold=False)
    params = norm.init(KEY, x)["params"]
    assert sorted(params) == ["bias", "learned_epsilon", "scale"]
    assert float(params["learned_epsilon"]) == np.float32(1e-4)
    for epsilon in (1e-4, -1e-4):
        y = norm.apply({"params": params | {"learned_epsilon": jnp.float32(epsilon)}}, x)
        np.testing.assert_allclose(y, x / np.sqrt(x**2 + 1.01e-4), rtol=1e-5)
    slope = jax.grad(lambda params: (x * norm.apply({"params": params}, x)).sum())(params)
    truth = -0.5 * (x**2 / (x.astype(np.float64) ** 2 + 1.01e-4) ** 1.5).sum()
    np.testing.assert_allclose(slope["learned_epsilon"], truth, rtol=1e-5)


@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_b0_averages_the_variance_alone_and_can_be_recalibrated(family, rng):
    batches = [images(rng, 2, 3, 4, 8) for _ in range(2)] + [images(rng, 4, 3, 4, 8) + 2]
    exact = np.concatenate(batches).astype(np.float64).var((0, 1, 2))
    if family == "nnx":
        norm = jn_nnx.EvoNormB0(8, momentum=0.75, rngs=nnx.Rngs(0))
        norm(batches[0])
        first = norm.var[...]
        jn_nnx.recalibrate(norm, batches)
        found = norm.var[...]
        norm = jn_nnx.EvoNormB0(8, momentum=0.0, rngs=nnx.Rngs(0))
        jn_nnx.accumulate(norm)
        for x in batches:
            norm(x)
        merged = norm.var[...]
        assert not hasattr(norm, "mean")
    else:
        norm = jn_linen.EvoNormB0(momentum=0.75, use_running_average=False)
        variables = norm.init(KEY, batches[0])
        apply = lambda variables, x, norm=norm: norm.apply(
            variables, x, mutable=["batch_stats", "batch_moments"]
        )[1]
        first = apply(variables, batches[0])["batch_stats"]["var"]
        state = jn_linen.recalibrate(norm, variables, batches)["batch_stats"]
        found = state["var"]
        assert list(state) == ["var"]
        variables = jn_linen.accumulate(variables)
        for x in batches:
            updated = apply(
                variables, x, jn_linen.EvoNormB0(momentum=0.0, use_running_average=False)
            )
            variables |= updated
        merged = variables["batch_stats"]["var"]
    np.testing.assert_allclose(first, 0.75 + 0.25 * batches[0].var((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    np.testing.assert_allclose(merged, exact, rtol=1e-6)


def test_what_does_not_fit_is_said_in_words():
    x, rngs = np.ones((2, 3, 8), np.float32), nnx.Rngs(0)
    with pytest.raises(
        ValueError, match="num_groups must be positive and divide the channels: got 3"
    ):
        jn_nnx.EvoNormS0(8, num_groups=3, rngs=rngs)
    with pytest.raises(ValueError, match="exactly one of num_groups and group_size must be given"):
        jn_linen.EvoNormS0(group_size=4).init(KEY, x)
    with pytest.raises(ValueError, match="that FilterResponseNorm was made for, 4: got"):
        jn_nnx.FilterResponseNorm(4, use_scale=False, use_bias=False, rngs=rngs)(x)
    with pytest.raises(TypeError, match="tau_init must be an argument of FilterResponseNorm"):
        jn_linen.FilterResponseNorm(tau_init=None)
