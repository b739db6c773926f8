"""Test the Pallas kernels of channels, interpreted. The laws of norms run on them too."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_oracle import drawn, gradients_of, relative, truth_over
from cases import long_sweep
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxnorm as jn
from jaxnorm.kernels import placement
from jaxnorm.kernels.pallas import tpu_channels
from jaxnorm.kernels.pallas.tpu_channels import MIB, Config, config_for

EPSILON = 1e-5
OPTIONS = [{"correction": 1}, {"epsilon_in": "std"}, {"epsilon_in": "max", "epsilon": 2.0}]
OPTIONS += [{"epsilon": 0.1}]
# images, positions, groups and channels of a group: several blocks of images and of channels,
# a last block that is not full, pieces with and without a rest
SHAPES = [
    (9, 6, 128, 1),
    (40, 7, 256, 1),
    (9, 5, 32, 8),
    (33, 6, 4, 96),
    (8, 4, 2, 128),
    (8, 1, 1, 200),
    (10, 25, 1, 130),
]
# axes of scale and bias that are not of size one
PARAMS = {"none": None, "of channels": (2, 3), "of images": (0, 2, 3), "of groups": (2,)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Divide images into blocks of 16 or fewer, and these into pieces of 3 positions."""

    def config(*arguments):
        found = config_for(*arguments)
        return found and Config(16, found.channels, min(3, arguments[0]))

    monkeypatch.setattr(tpu_channels, "config_for", config)
    jax.clear_caches()
    yield
    jax.clear_caches()


def norm(x, scale, bias, **options):
    """Normalize (N, P, G, D)."""
    n, p, g, d = x.shape
    of_param = lambda a: None if a is None else jnp.broadcast_to(a, (*a.shape[:2], g, d))
    flat = lambda a: None if a is None else of_param(a).reshape(*a.shape[:2], g * d)
    given = {"epsilon": EPSILON, "implementation": "pallas", **options}
    y = jn.standardize(
        x.reshape(n, p, g * d), "n [p] (g [c])", g=g, scale=flat(scale), bias=flat(bias), **given
    )
    return y.reshape(x.shape)


def truth(x, dy, scale, bias, **options):
    return truth_over((1, 3), x, dy, scale, bias, **{"epsilon": EPSILON, **options})


gradients = partial(gradients_of, norm)


CHANNELS = [
    (shape, dtype, centered, params)
    for shape in SHAPES
    for dtype in ("float32", "bfloat16")
    for centered in (True, False)
    for params in PARAMS
    if params != "none" or shape[2] > 1  # without scale and bias these are rows
]


@pytest.mark.parametrize(
    ("shape", "dtype", "centered", "params"), long_sweep(CHANNELS, quick=CHANNELS[1::29]), ids=str
)
def test_output_and_gradients_are_those_of_the_oracle(shape, dtype, centered, params, rng):
    given = drawn(rng, shape, PARAMS[params], dtype, mean=100.0 * centered)
    found, true = gradients(*given, centered=centered), truth(*given, centered=centered)
    bounds = (1e-6, 2e-6, 1e-5, 1e-5) if dtype == "float32" else (2**-8, 2**-7, 1e-4, 1e-4)
    for a, b, bound in zip(found, true, bounds, strict=False):
        assert relative(a, b) <= bound


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, rng):
    given = drawn(rng, (8, 6, 16, 8), (2, 3), "float32")
    for a, b in zip(gradients(*given, **options), truth(*given, **options), strict=True):
        assert relative(a, b) <= 5e-6


def test_the_output_has_the_dtype_that_is_asked_for(rng):
    x, dy, scale, bias = drawn(rng, (9, 6, 16, 8), (2, 3), "bfloat16")
    y, dx, *_ = gradients(x, dy, scale, bias, dtype="float32")
    assert (y.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)
    assert relative(y, truth(x, dy, scale, bias)[0]) <= 2e-6


HARD = {
    "offset": lambda rng, shape: rng.normal(1e6, 1, shape),
    "sorted": lambda rng, shape: np.sort(rng.normal(1e4, 1, shape), 1),
    "an outlier first": lambda rng, shape: np.where(
        np.arange(shape[1])[:, None, None] == 0, 1e6, rng.normal(size=shape)
    ),
    "small": lambda rng, shape: 1e-3 * rng.normal(size=shape),
    "large": lambda rng, shape: 1e15 * rng.normal(size=shape),
}


HARD_IMAGES = [(kind, *sizes) for kind in HARD for sizes in ((128, 1), (16, 8))]


@pytest.mark.parametrize(("kind", "g", "d"), long_sweep(HARD_IMAGES, quick=HARD_IMAGES[:6:3]))
def test_hard_images(kind, g, d, rng):
    x = jnp.asarray(HARD[kind](rng, (8, 77, g, d)), jnp.float32)
    assert relative(norm(x, None, None), truth(x, x, None, None)[0]) <= 4e-7


@pytest.mark.parametrize(
    ("dtype", "g", "d"), [("float32", 130, 1), ("bfloat16", 130, 1), ("float32", 32, 5)]
)
def test_images_of_equal_elements_are_the_bias(dtype, g, d):
    values = [0.1, 3.7, 1e3, 1e15, -77.3, 0, 1e-20, 3e38 if dtype == "bfloat16" else 1e18]
    x = jnp.broadcast_to(jnp.asarray(values, dtype)[:, None, None, None], (8, 49, g, d))
    y = norm(x, None, jnp.full((1, 1, g, d), 0.5))
    np.testing.assert_array_equal(y, jnp.full_like(x, 0.5))


def mixed(rng, g, d):
    """bfloat16 groups of every size, next to each other."""
    sizes = np.array([1, 3e38, 1e-3, 1e20, 1e15, 0.0, 1e30, 7])
    sizes = np.stack([np.resize(np.roll(sizes, i), g) for i in range(20)])
    x = sizes[:, None, :, None] * rng.uniform(-1, 1, (20, 7, g, d))
    return sizes, jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize(("g", "d", "centered"), [(128, 1, True), (16, 8, True), (16, 8, False)])
def test_bfloat16_of_any_size(g, d, centered, rng):
    sizes, x = mixed(rng, g, d)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, (1, 1, g, d)), jnp.float32)
    y, dx, dscale, _ = gradients(x, dy, scale, scale, centered=centered)
    true = truth(x, dy, scale, scale, centered=centered)
    assert relative(y, true[0]) <= 2**-8
    assert relative(dscale, true[2]) <= 1e-4
    for size in (1, 1e-3, 1e20, 1e15, 0.0, 1e30, 7):  # those of 3e38 are below the normal numbers
        own = (slice(None), sizes == size)
        of_size = lambda a, own=own: np.moveaxis(np.asarray(a, np.float64), 1, 0)[own]
        assert relative(of_size(dx), of_size(true[1])) <= 2**-6


BITS = [(g, d, dtype) for g, d in ((128, 1), (16, 8)) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("g", "d", "dtype"), long_sweep(BITS, quick=BITS[-1:]))
def test_an_image_has_the_same_bits_in_any_batch(g, d, dtype, rng):
    """Whatever the other images hold: huge numbers or NaN, too."""
    _, x = mixed(rng, g, d)
    x = x.astype(dtype)
    dy = jnp.asarray(rng.normal(size=x.shape), dtype)
    both = jax.jit(lambda x, dy: gradients(x, dy, None, None))
    whole = both(x.at[7].set(jnp.nan), dy)
    for at in (slice(8, 17), slice(11, 20)):
        for a, b in zip(whole, both(x[at], dy[at]), strict=True):
            np.testing.assert_array_equal(a[at], b)


def test_config_does_not_depend_on_the_batch():
    x = [jax.ShapeDtypeStruct((n, 49, 32, 4), jnp.float32) for n in (8, 1000)]
    scale = jnp.ones((1, 1, 32, 4))
    few, many = (tpu_channels.Images(a, scale, 4, 4).config for a in x)
    assert (few.channels, few.piece) == (many.channels, many.piece)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_nothing_is_gathered_where_xla_shards_arrays(axis, rng):
    """Plain JAX runs, whose sums are reduced over devices."""
    x, dy, scale, bias = drawn(rng, (8, 8, 16, 8), (2, 3), "float32")
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    spec = PartitionSpec(*("d" if each == axis else None for each in range(3)))
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    given = place(x, spec), place(dy, spec), *(place(a, PartitionSpec()) for a in (scale, bias))
    program = jax.jit(gradients).lower(*given).compile()
    assert "all-gather" not in program.as_text()
    assert "while" not in program.as_text()  # the interpreter's loop over blocks
    for a, b in zip(program(*given), truth(x, dy, scale, bias), strict=True):
        assert relative(a, b) <= 1e-5


def test_each_device_runs_them_on_its_part(rng):
    """In explicit sharding of images."""
    x, dy, scale, bias = drawn(rng, (64, 6, 16, 8), (2, 3), "float32")
    true = truth(x, dy, scale, bias)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    by_images, whole = PartitionSpec("d"), PartitionSpec()
    given = place(x, by_images), place(dy, by_images), place(scale, whole), place(bias, whole)
    program = jax.jit(gradients).lower(*given).compile()
    assert "all-gather" not in program.as_text()
    for a, b in zip(program(*given), true, strict=True):
        assert relative(a, b) <= 1e-5


REFUSED = [
    ("takes no batch norm: got (0, 1) of (16, 9, 128)", (16, 9, 128), "[n p] c", {}),
    ("takes images of 128 channels or more: got 64", (16, 9, 64), "n [p] c", {}),
    ("takes 8 images or more: got 7", (7, 9, 128), "n [p] c", {}),
    (
        "takes images that fit in 16 MiB of memory next to the cores: got 3136 positions",
        (16, 3136, 128),
        "n [p] c",
        {},
    ),
    (
        "takes no groups of 100 of 1600 channels, which fill no 1024 or fewer",
        (16, 9, 1600),
        "n [p] (g [c])",
        {"g": 16},
    ),
    ("takes no mask", (16, 9, 128), "n [p] c", {"where": np.ones((16, 9, 1), bool)}),
    ("takes neither full_range", (16, 9, 128), "n [p] c", {"full_range": True}),
]


@pytest.mark.parametrize(("words", "shape", "axes", "options"), REFUSED)
def test_what_they_do_not_take(words, shape, axes, options):
    with pytest.raises(ValueError, match=f"implementation='pallas' {re.escape(words)}"):
        jn.plan(jnp.ones(shape), axes, implementation="pallas", **options)


KINDS = {
    "TPU v2": 16,
    "TPU v3": 16,
    "TPU v4": 16,
    "TPU v5 lite": 128,
    "TPU v5p": 64,
    "TPU v6 lite": 128,
    "TPU7x": 64,
    "TPU of the future": 16,
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_each_generation(kind, monkeypatch):
    class Device:
        device_kind = kind

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert tpu_channels.vmem() == KINDS[kind] * MIB


def test_blocks_fit_in_the_memory(monkeypatch):
    for p, c, d in ((49, 512, 1), (784, 128, 4), (3136, 256, 8), (3136, 640, 20)):
        for sizes in ((4, 4), (2, 2, 2), (2, 4, 2)):
            for room in (16, 64, 128):
                config = config_for(p, c, d, sizes, room * MIB)
                if config is not None:
                    block = 2 * sum(sizes) * p * config.images * config.channels
                    assert block + tpu_channels.SPARE <= room * MIB
                    assert config.images % (32 // min(sizes)) == config.channels % d == 0


def test_they_run_where_they_are_named(monkeypatch):
    """Since no TPU was at hand to try them on."""
    x = jnp.ones((16, 7, 7, 128))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(placement, "platform", lambda: "tpu")
    found = jn.plan(x, "n [h w] c")
    assert found.implementation == "xla"
    assert found.others["pallas"].startswith("it has not run on a TPU or GPU yet")
    found = jn.plan(x, "n [h w] c", implementation="pallas")
    assert (found.implementation, found.derivative) == ("pallas", "a kernel")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_group_that_is_not_finite_leaves_the_others_alone(bad, rng):
    x = jnp.asarray(rng.normal(size=(8, 4, 128)), jnp.float32)
    norm = lambda x: jn.group_norm(x, 8, implementation="pallas")
    both = lambda x: (norm(x), jax.grad(lambda x: (jnp.sin(norm(x))).sum())(x))
    good = np.ones(x.shape, bool)
    good[3, :, :16] = False
    for a, b in zip(both(x.at[3, 0, 0].set(bad)), both(x), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[good], np.asarray(b)[good])


@pytest.mark.usefixtures("x64")
def test_group_norm_under_x64(rng):
    x = jnp.asarray(rng.normal(size=(8, 4, 128)), jnp.float32)
    found, true = (jn.group_norm(x, 8, implementation=name) for name in ("pallas", "xla"))
    np.testing.assert_allclose(found, true, atol=2e-6)
