"""Test the Pallas kernels, interpreted. The laws of all norms run on them too."""

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
from jaxnorm.kernels.pallas import tpu_rows
from jaxnorm.kernels.pallas.tpu_rows import Config

EPSILON = 1e-6
# rows and width; blocks of 32 rows, of two pieces each
SHAPES = [(1, 128), (33, 100), (70, 128), (5, 4096), (37, 1003), (3, 12288)]
# of epsilon 2 some groups have less deviation, and some more
OPTIONS = [{"correction": 1}, {"epsilon_in": "std"}, {"epsilon_in": "max", "epsilon": 2.0}]
OPTIONS += [{"epsilon": 0.1}]
# axes of scale and bias that are not of size one
PARAMS = {"none": None, "of features": (2,), "of examples": (0, 2), "of rows": (0, 1, 2)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Divide rows into blocks of 32, and these into pieces of 16."""
    monkeypatch.setattr(
        tpu_rows, "config_for", lambda n, *_: Config(32, 16) if n > 16 else Config(16, 16)
    )
    jax.clear_caches()
    yield
    jax.clear_caches()


def norm(x, scale, bias, **options):
    given = {"epsilon": EPSILON, "implementation": "pallas", **options}
    return jn.standardize(x, "b n [c]", scale=scale, bias=bias, **given)


def truth(x, dy, scale, bias, **options):
    return truth_over((2,), x, dy, scale, bias, **{"epsilon": EPSILON, **options})


gradients = partial(gradients_of, norm)


ROWS = [
    (shape, dtype, centered, params)
    for shape in SHAPES
    for dtype in ("float32", "bfloat16")
    for centered in (True, False)
    for params in PARAMS
]


@pytest.mark.parametrize(
    ("shape", "dtype", "centered", "params"), long_sweep(ROWS, quick=ROWS[1::13]), ids=str
)
def test_output_and_gradients_are_those_of_the_oracle(shape, dtype, centered, params, rng):
    given = drawn(rng, (2, *shape), PARAMS[params], dtype, mean=100.0 * centered)
    found, true = gradients(*given, centered=centered), truth(*given, centered=centered)
    bounds = (2e-6, 3e-6, 1e-5, 1e-5) if dtype == "float32" else (2**-8, 2**-7, 1e-4, 1e-4)
    for a, b, bound in zip(found, true, bounds, strict=False):
        assert relative(a, b) <= bound


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, rng):
    given = drawn(rng, (2, 20, 40), (2,), "float32")
    for a, b in zip(gradients(*given, **options), truth(*given, **options), strict=True):
        assert relative(a, b) <= 5e-6


def test_the_output_has_the_dtype_that_is_asked_for(rng):
    x, dy, scale, bias = drawn(rng, (2, 20, 40), (2,), "bfloat16")
    y, dx, *_ = gradients(x, dy, scale, bias, dtype="float32")
    assert (y.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)
    assert relative(y, truth(x, dy, scale, bias)[0]) <= 2e-6


HARD = {
    "offset": lambda rng, shape: rng.normal(1e6, 1, shape),
    "sorted": lambda rng, shape: np.sort(rng.normal(1e4, 1, shape)),
    "an outlier first": lambda rng, shape: np.where(
        np.arange(shape[-1]) == 0, 1e6, rng.normal(size=shape)
    ),
    "small": lambda rng, shape: 1e-3 * rng.normal(size=shape),
    "large": lambda rng, shape: 1e15 * rng.normal(size=shape),
}


@pytest.mark.parametrize("kind", HARD)
def test_hard_rows(kind, rng):
    x = jnp.asarray(HARD[kind](rng, (1, 24, 1024)), jnp.float32)
    assert relative(norm(x, None, None), truth(x, x, None, None)[0]) <= 4e-7


@pytest.mark.parametrize("width", [1, 100, 128, 1000, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_equal_elements_are_the_bias(dtype, width, rng):
    values = jnp.asarray([0.1, 3.7, 1e3, 1e15, -77.3], dtype)[None, :, None]
    x = jnp.broadcast_to(values, (1, 5, width))
    y = norm(x, None, jnp.full((1, 1, 1), 0.5))
    np.testing.assert_array_equal(y, jnp.full_like(x, 0.5))


def mixed(rng, width):
    """bfloat16 rows of every size."""
    sizes = np.array([1, 3e38, 1e-3, 1e20, 1e15, 0.0, 1e30, 7])
    x = sizes[:, None] * rng.uniform(-1, 1, (8, width))
    return jnp.asarray(np.tile(x, (9, 1))[None, :70], jnp.bfloat16)


@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
def test_bfloat16_of_any_size(centered, rng):
    x = mixed(rng, 128)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, (1, 1, 128)), jnp.float32)
    y, dx, dscale, _ = gradients(x, dy, scale, scale, centered=centered)
    true = truth(x, dy, scale, scale, centered=centered)
    assert relative(y, true[0]) <= 2**-8
    assert relative(dscale, true[2]) <= 1e-4
    for row in (0, 2, 3, 4, 5, 6, 7):  # gradients of 3e38 are below the normal numbers
        assert relative(dx[0, row], true[1][0, row]) <= 2**-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch(dtype, rng):
    """Whatever the other rows hold: huge numbers or NaN, too."""
    x = mixed(rng, 128).astype(dtype)
    dy = jnp.asarray(rng.normal(size=x.shape), dtype)
    both = lambda x, dy: gradients(x, dy, None, None, dtype="float32")
    whole = both(x.at[0, 7].set(jnp.nan), dy)
    for at in (slice(0, 1), slice(2, 7), slice(40, 70)):
        for a, b in zip(whole, both(x[:, at], dy[:, at]), strict=True):
            np.testing.assert_array_equal(a[:, at], b)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_nothing_is_gathered_where_xla_shards_arrays(devices, axis, rng):
    """Plain JAX runs, whose sums are reduced over devices."""
    x, dy, scale, bias = drawn(rng, (8, 8, 16), (2,), "float32")
    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
    spec = PartitionSpec(*("d" if each == axis else None for each in range(3)))
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    given = place(x, spec), place(dy, spec), *(place(a, PartitionSpec()) for a in (scale, bias))
    program = jax.jit(gradients).lower(*given).compile()
    assert "all-gather" not in program.as_text()
    assert "while" not in program.as_text()  # the interpreter's loop over blocks
    for a, b in zip(program(*given), truth(x, dy, scale, bias), strict=True):
        assert relative(a, b) <= 1e-5


def test_each_device_runs_them_on_its_part(rng):
    """In explicit sharding, and in shard_map."""
    x, dy, scale, bias = drawn(rng, (8, 40, 16), (2,), "float32")
    true = truth(x, dy, scale, bias)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    by_rows, whole = PartitionSpec("d"), PartitionSpec()
    given = place(x, by_rows), place(dy, by_rows), place(scale, whole), place(bias, whole)
    program = jax.jit(gradients).lower(*given).compile()
    assert "all-gather" not in program.as_text()
    for a, b in zip(program(*given), true, strict=True):
        assert relative(a, b) <= 1e-5


def test_of_a_norm_that_returns_moments(rng):
    x = jnp.asarray(rng.normal(3, 2, (4, 24)), jnp.float32)
    loss = lambda x, name: sum(
        (a * jnp.cos(a)).sum() for a in jax.tree.leaves(jn.positional_norm(x, implementation=name))
    )
    found, expected = (jax.value_and_grad(loss)(x, name) for name in ("pallas", "xla"))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


REFUSED = [
    ("takes no batch norm: got (0,) of (4, 6, 8)", "[n] h c", {}),
    ("takes no mask", "n h [c]", {"where": np.ones((4, 6, 1), bool)}),
    ("takes no weights", "n h [c]", {"where": np.ones((4, 6, 1))}),
    ("takes neither full_range nor an epsilon below 1e-31", "n h [c]", {"epsilon": 0}),
    ("takes neither full_range", "n h [c]", {"full_range": True}),
    (
        "takes neither full_range nor an epsilon below 3e-16",
        "n h [c]",
        {"epsilon": 1e-16, "epsilon_in": "max"},
    ),
    ("takes and gives float32 and bfloat16", "n h [c]", {"dtype": "float16"}),
]


@pytest.mark.parametrize(("words", "axes", "options"), REFUSED)
def test_what_they_do_not_take(words, axes, options):
    with pytest.raises(ValueError, match=f"implementation='pallas' {re.escape(words)}"):
        jn.plan(jnp.ones((4, 6, 8)), axes, implementation="pallas", **options)


def test_bfloat16_whose_epsilon_depends_on_the_unit():
    x = jnp.ones((4, 64), jnp.bfloat16)
    words = "takes no bfloat16 with epsilon_in='std' or 'max', or with an"
    for options in ({"epsilon_in": "std"}, {"epsilon_in": "max"}, {"epsilon": 1.0}):
        with pytest.raises(ValueError, match=words):
            jn.plan(x, -1, implementation="pallas", **options)
    with pytest.raises(ValueError, match="takes rows of 16384 elements or fewer: got 20000"):
        jn.plan(jnp.ones((1, 20_000)), -1, implementation="pallas")


def test_they_run_where_they_are_named(monkeypatch):
    """Since no TPU was at hand to try them on."""
    x = jnp.ones((4, 64))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(placement, "platform", lambda: "tpu")
    found = jn.plan(x, -1)
    assert found.implementation == "xla"
    assert found.others["pallas"].startswith("it has not run on a TPU or GPU yet")
    found = jn.plan(x, -1, implementation="pallas")
    assert (found.implementation, found.derivative) == ("pallas", "a kernel")


def test_empty_arrays():
    with pytest.raises(
        ValueError, match=r"implementation='pallas' takes no empty arrays: got \(0, 8\)"
    ):
        jn.plan(jnp.ones((0, 8)), -1, implementation="pallas")
    assert jn.layer_norm(jnp.ones((0, 8))).shape == (0, 8)
