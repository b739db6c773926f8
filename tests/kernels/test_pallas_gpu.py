"""Test the Pallas kernels for GPUs: what they take, and their results as interpreted on a CPU.

JAX interprets them from 0.12 on. tests/project/test_ahead_gpu.py compiles them.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_oracle import drawn, relative
from cases import long_sweep
from test_pallas import EPSILON, HARD, OPTIONS, PARAMS, mixed, truth

import jaxnorm as jn
from jaxnorm.arguments.axes import resolve
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec
from jaxnorm.kernels import placement
from jaxnorm.kernels.layout import find
from jaxnorm.kernels.pallas import norm
from jaxnorm.kernels.static import Static

pytestmark = pytest.mark.usefixtures("on_a_gpu")
interpreted = pytest.mark.skipif(
    jax.__version_info__ < norm.VERSION, reason="JAX interprets Mosaic GPU from 0.12 on"
)
INTERPRETED = {"platform": "gpu", "interpret": True}
OWN = {"scale": np.ones((8, 1), np.float32)}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Ask the kernels as on a GPU."""
    monkeypatch.setattr(placement, "platform", lambda: "gpu")


def gradients(x, dy, scale, bias, **options):
    """Return the output, and the gradients of x (B, N, D), and of scale and bias (1 or B, 1, D).

    The primitives of the kernels cannot call the interpreter.
    """
    batch, n, width = x.shape
    spec = Spec(resolve("n [c]", (n, width)), **{"epsilon": EPSILON, "dtype": x.dtype, **options})
    static = Static(find(spec.reduction), 2, PlainLoops(spec), None, False, norm._recompute)
    arranged = lambda a: jnp.broadcast_to(a[:, :, None, None], (batch, 1, 1, 1, width))
    rows, params, on_cpu = static.arranged(x), (arranged(scale), arranged(bias)), INTERPRETED
    y = norm._forward(static, (rows, *params, None), **on_cpu).y
    residuals = (rows, *(None,) * 4, params[0], None)
    dx, *dparams = norm._backward(static, residuals, (static.arranged(dy), None, None), **on_cpu)
    dparams = [a.reshape(batch, 1, width) for a in dparams]
    if scale.shape[0] == 1:
        dparams = [a.sum(0, keepdims=True) for a in dparams]
    return y.reshape(x.shape), dx.reshape(x.shape), *dparams


def output(x, **options):
    """Return the output, without scale and bias."""
    one = jnp.ones((1, 1, x.shape[-1]), jnp.float32)
    return gradients(x, x, one, jnp.zeros_like(one), **options)[0]


# a row in one warp, two or four; more rows in a block; a last block that takes rows again
SHAPES = [(33, 128), (4, 96), (70, 32), (7, 1536), (2, 2048), (5, 4096), (1, 3072)]
ROWS = [
    (shape, dtype, centered, params)
    for shape in SHAPES
    for dtype in ("float32", "bfloat16")
    for centered in (True, False)
    for params in ("of features", "of examples")
]


@interpreted
@pytest.mark.parametrize(
    ("shape", "dtype", "centered", "params"), long_sweep(ROWS, quick=ROWS[1::5]), ids=str
)
def test_output_and_gradients_are_those_of_the_oracle(shape, dtype, centered, params, rng):
    given = drawn(rng, (2, *shape), PARAMS[params], dtype, mean=100.0 * centered)
    found, true = gradients(*given, centered=centered), truth(*given, centered=centered)
    bounds = (2e-6, 3e-6, 1e-5, 1e-5) if dtype == "float32" else (2**-8, 2**-7, 1e-4, 1e-4)
    for a, b, bound in zip(found, true, bounds, strict=True):
        assert relative(a, b) <= bound


@interpreted
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, rng):
    given = drawn(rng, (1, 20, 64), (2,), "float32")
    for a, b in zip(gradients(*given, **options), truth(*given, **options), strict=True):
        assert relative(a, b) <= 5e-6


@interpreted
@pytest.mark.parametrize("kind", HARD)
def test_hard_rows(kind, rng):
    x = jnp.asarray(HARD[kind](rng, (1, 24, 1024)), jnp.float32)
    assert relative(output(x), truth(x, x, None, None)[0]) <= 4e-7


@interpreted
@pytest.mark.parametrize("width", [32, 96, 1536, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_equal_elements_are_the_bias(dtype, width):
    values = jnp.asarray([0.1, 3.7, 1e3, 1e15, -77.3], dtype)[None, :, None]
    x, one = jnp.broadcast_to(values, (1, 5, width)), jnp.ones((1, 1, width), jnp.float32)
    y, *_ = gradients(x, x, one, one / 2)
    np.testing.assert_array_equal(y, jnp.full_like(x, 0.5))


@interpreted
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


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch(dtype, rng):
    """Whatever the other rows hold: huge numbers or NaN, too."""
    x = mixed(rng, 128).astype(dtype)
    dy, one = jnp.asarray(rng.normal(size=x.shape), dtype), jnp.ones((1, 1, 128), jnp.float32)
    both = lambda x, dy: gradients(x, dy, one, one)[:2]
    whole = both(x.at[0, 1].set(jnp.nan), dy)
    # of whole blocks: the interpreter adds up elements of smaller ones in another order
    for at in (slice(2, 34), slice(30, 70)):
        for a, b in zip(whole, both(x[:, at], dy[:, at]), strict=True):
            np.testing.assert_array_equal(a[:, at], b)


REFUSED = [
    ("takes GPUs of compute capability 9.0 or newer: got 8.0", (8, 64), {}, (8, 0)),
    ("takes GPUs of compute capability 9.0 or newer: got none", (8, 64), {}, ()),
    ("takes rows of a multiple of 32 elements: got 100", (8, 100), {}, None),
    ("takes rows of a multiple of 128 elements: got 2112", (8, 2112), {}, (9, 0)),
    ("takes rows of 4096 elements or fewer: got 8192", (8, 8192), {}, (10, 0)),
    ("takes 4 rows or more: got 3", (3, 64), {}, None),
    (
        "takes a scale and bias on a GPU that all rows share: got scale of (8, 1)",
        (8, 64),
        OWN,
        None,
    ),
]


@pytest.mark.parametrize(("words", "shape", "options", "capability"), REFUSED)
def test_what_they_do_not_take(words, shape, options, capability, monkeypatch):
    monkeypatch.setattr(placement, "capability", lambda: capability)
    monkeypatch.setattr(norm, "VERSION", (0, 7))
    with pytest.raises(ValueError, match=f"implementation='pallas' {re.escape(words)}"):
        jn.plan(jnp.ones(shape), "n [c]", implementation="pallas", **options)


def test_an_older_jax(monkeypatch):
    monkeypatch.setattr(norm, "VERSION", (9, 5))
    with pytest.raises(ValueError, match=r"takes JAX 9\.5 or newer on a GPU: got"):
        jn.plan(jnp.ones((8, 64)), -1, implementation="pallas")


def test_they_run_where_they_are_named(monkeypatch):
    """Since they have not run on a GPU."""
    x = jnp.ones((8, 64))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(norm, "VERSION", (0, 7))
    assert jn.plan(x, -1).others["pallas"].startswith("it has not run on a TPU or GPU yet")
    found = jn.plan(x, -1, implementation="pallas")
    assert (found.implementation, found.derivative) == ("pallas", "a kernel")
