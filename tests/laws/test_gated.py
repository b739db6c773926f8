"""Test RMS norm with a gate, in front of the norm and behind it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.nnx import Rngs
from oracle import Part, oracle

import jaxnorm as jn
from jaxnorm import linen, nnx

EPSILON = 1e-5
FIRST = pytest.mark.parametrize("gate_first", [True, False], ids=["first", "last"])
SHAPE, GROUPS = (3, 5, 24), 4


def drawn(rng, dtype="float32"):
    """x, gate, scale, bias and the gradient of the output."""
    x, gate, dy = rng.normal(0, 2, (3, *SHAPE))
    scale, bias = rng.uniform(0.5, 1.5, (2, SHAPE[-1]))
    return [jnp.asarray(a, dtype) for a in (x, gate, scale, bias, dy)]


def truth(x, gate, scale, bias, dy, *, gate_first, activation, num_groups=GROUPS, where=None):
    """The output, and the gradients of x, gate, scale and bias, in float64."""
    x, gate, scale, bias, dy = (np.asarray(a, np.float64) for a in (x, gate, scale, bias, dy))
    counts = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape) > 0
    x, gate = np.where(counts, x, 0), np.where(counts, gate, 0)
    s = 1 / (1 + np.exp(-gate))
    slope = s * (1 - s)
    a = s if activation == "sigmoid" else gate * s
    slope = slope if activation == "sigmoid" else s + gate * slope
    split = lambda a: a.reshape(*a.shape[:-1], num_groups, -1)
    found = oracle(
        split(x * a if gate_first else x),
        (Part((3,)),),
        scale=split(scale[None, None]),
        bias=split(bias[None, None]),
        cotangent=split(dy if gate_first else dy * a),
        where=None if where is None else split(np.broadcast_to(where, x.shape)),
        epsilon=EPSILON,
        centered=False,
    )
    y, dx = (np.where(counts, each.reshape(x.shape), 0) for each in (found.y, found.dx))
    dscale, dbias = (each.sum((0, 1)).reshape(-1) for each in (found.dscale, found.dbias))
    if gate_first:
        return y, dx * a * counts, dx * x * slope * counts, dscale, dbias
    return y * a, dx, dy * y * slope * counts, dscale, dbias


def results(norm, x, gate, scale, bias, dy):
    y, vjp = jax.vjp(lambda x, gate, s, b: norm(x, gate, scale=s, bias=b), x, gate, scale, bias)
    return y, *vjp(dy.astype(y.dtype))


def close(found, true, bound):
    for name, a, b in zip(("y", "dx", "dgate", "dscale", "dbias"), found, true, strict=True):
        error = np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()
        assert error <= bound, (name, error)


def norm_of(gate_first, activation="silu", **options):
    return partial(
        jn.gated_rms_norm,
        gate_first=gate_first,
        activation=activation,
        epsilon=EPSILON,
        **{"num_groups": GROUPS, **options},
    )


@FIRST
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("implementation", ["xla", "native"], indirect=True)
def test_output_and_gradients(implementation, activation, gate_first, rng):
    given = drawn(rng)
    found = results(norm_of(gate_first, activation), *given)
    close(found, truth(*given, gate_first=gate_first, activation=activation), 1e-6)


@FIRST
def test_numbers(gate_first):
    """By hand, in one group: a gate of 0 closes, and silu(large) is the gate."""
    x, gate = jnp.array([[3.0, 5.0, 4.0]]), jnp.array([[40.0, 0.0, 40.0]])
    y = jn.gated_rms_norm(x, gate, gate_first=gate_first, epsilon=0.0)
    root = np.sqrt((9 + 16 if gate_first else 9 + 25 + 16) / 3)
    factor = 1 if gate_first else 40
    np.testing.assert_allclose(y[0], np.array([3, 0, 4]) * factor / root, rtol=1e-6)


@FIRST
@pytest.mark.parametrize("axes", [1, (1, 2), "n t [c]"], ids=str)
def test_axes(axes, gate_first, rng):
    x, gate, *_ = drawn(rng)
    found = norm_of(gate_first, num_groups=1, axes=axes)(x, gate)
    reduced = axes if not isinstance(axes, str) else 2
    x, gate = (np.asarray(a, np.float64) for a in (x, gate))
    a = gate / (1 + np.exp(-gate))
    h = x * a if gate_first else x
    y = h / np.sqrt((h**2).mean(reduced, keepdims=True) + EPSILON)
    np.testing.assert_allclose(found, y if gate_first else y * a, atol=3e-6)


@FIRST
@pytest.mark.parametrize("kind", ["mask", "mask of positions", "weights"])
@pytest.mark.parametrize("implementation", ["xla", "native"], indirect=True)
def test_a_mask_hides_nan_in_x_and_in_the_gate(implementation, kind, gate_first, rng):
    x, gate, scale, bias, dy = drawn(rng)
    where = rng.random(SHAPE if kind == "mask" else (5, 1)) < 0.6
    where = where * rng.uniform(0.5, 2, where.shape).astype(np.float32) * 1
    where = where if kind == "weights" else where > 0
    where = np.array(where)
    where[..., 0, :] = 0  # a group without elements
    hidden = jnp.broadcast_to(jnp.asarray(where == 0)[(None,) * (3 - where.ndim)], SHAPE)
    true = truth(x, gate, scale, bias, dy, gate_first=gate_first, activation="silu", where=where)
    for bad in (jnp.nan, jnp.inf):
        for dirty in ((bad, 0.0), (0.0, bad), (bad, bad)):
            dirty_x, dirty_gate = (
                jnp.where(hidden, value, a) for value, a in zip(dirty, (x, gate), strict=True)
            )
            found = results(
                norm_of(gate_first, where=where[None] if where.ndim == 2 else where),
                dirty_x,
                dirty_gate,
                scale,
                bias,
                dy,
            )
            close(found, true, 2e-6)
            for each in found[:3]:
                assert np.all(np.asarray(each)[np.asarray(hidden)] == 0)


@FIRST
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype, gate_first, rng):
    given = drawn(rng, dtype)
    found = results(norm_of(gate_first), *given)
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    for a, b in zip(found, truth(*given, gate_first=gate_first, activation="silu"), strict=True):
        assert a.dtype == dtype
        spacing = np.spacing(np.abs(b.astype(kind))).astype(np.float64)
        beyond = np.abs(np.asarray(a, np.float64) - b) > 0.51 * spacing + 1e-6
        assert beyond.mean() <= 0.01


@FIRST
def test_a_gain_of_1_plus_the_scale(gate_first, rng):
    x, gate, scale, *_ = drawn(rng)
    norm = norm_of(gate_first)
    np.testing.assert_array_equal(
        norm(x, gate, scale=scale, scale_offset=1), norm(x, gate, scale=1 + scale)
    )


@FIRST
def test_dtypes(gate_first, rng):
    x, gate, scale, *_ = drawn(rng)
    norm, half = norm_of(gate_first), x.astype(jnp.bfloat16)
    for rounding in ("once", "twice"):
        assert norm(half, gate, scale=scale, rounding=rounding).dtype == jnp.bfloat16
        assert norm(x, gate.astype(jnp.bfloat16), rounding=rounding).dtype == jnp.float32
        assert norm(half, gate, rounding=rounding, dtype=jnp.float32).dtype == jnp.float32


@FIRST
@pytest.mark.usefixtures("x64")
def test_float64(gate_first, rng):
    given = drawn(rng, "float64")
    found = results(norm_of(gate_first), *given)
    close(found, truth(*given, gate_first=gate_first, activation="silu"), 1e-14)


@FIRST
def test_a_closed_gate_has_finite_gradients(gate_first):
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    for gate in (-90.0, -1e4, -1e30):
        found = jax.grad(lambda x, g: jn.gated_rms_norm(x, g, gate_first=gate_first).sum(), (0, 1))(
            x, jnp.full_like(x, gate)
        )
        assert all(np.isfinite(a).all() for a in found)


def test_a_product_of_bfloat16_may_have_any_size():
    x, gate = jnp.array([[3.0, -4.0]], jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)
    norm = partial(jn.gated_rms_norm, gate=gate, gate_first=True, epsilon=0.0)
    for size in (2.0**-100, 2.0**100):
        np.testing.assert_array_equal(norm(x * jnp.asarray(size, x.dtype)), norm(x))


TRANSFORMS = {
    "jit": jax.jit,
    "jvp": lambda f: lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a))),
    "vmap": lambda f: lambda *a: jax.vmap(f)(*(jnp.stack([each, 2 * each]) for each in a)),
    "hessian": lambda f: lambda x, g: jax.hessian(lambda g: (f(x[0, :1], g) ** 3).sum())(g[0, :1]),
    "checkpoint": lambda f: (
        lambda *a: jax.grad(lambda *a: (jax.checkpoint(f)(*a) ** 3).sum(), (0, 1))(*a)
    ),
    "scan": lambda f: lambda x, g: jax.lax.scan(lambda c, _: (f(c, g), None), x, length=3)[0],
}


@FIRST
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform, gate_first, rng):
    x, gate, *_ = drawn(rng)

    def formula(x, gate):
        h = x * jax.nn.silu(gate) if gate_first else x
        split = h.reshape(*h.shape[:-1], GROUPS, -1)
        rstd = jax.lax.rsqrt((split**2).mean(-1, keepdims=True) + EPSILON)
        y = (split * rstd).reshape(h.shape)
        return y if gate_first else y * jax.nn.silu(gate)

    made = TRANSFORMS[transform]
    found, true = (jax.jit(made(f))(x, gate) for f in (norm_of(gate_first), formula))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


@FIRST
@pytest.mark.parametrize("rounding", ["once", "twice"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_are_the_function(dtype, rounding, gate_first, rng):
    x, gate, scale, bias, _ = drawn(rng, dtype)
    options = {"gate_first": gate_first, "num_groups": GROUPS, "rounding": rounding}
    options |= {"activation": "sigmoid", "use_bias": True, "param_dtype": dtype}
    params, where = {"scale": scale, "bias": bias}, x > 0
    y = linen.GatedRMSNorm(**options).apply({"params": params}, x, gate, mask=where)
    twin = nnx.GatedRMSNorm(SHAPE[-1], **options, rngs=Rngs(0))
    twin.scale[...], twin.bias[...] = scale, bias
    del options["use_bias"], options["param_dtype"]
    true = jn.gated_rms_norm(x, gate, **options, **params, where=where)
    assert y.dtype == true.dtype == dtype
    np.testing.assert_array_equal(y, true)
    np.testing.assert_array_equal(twin(x, gate, where=where), true)


def test_parameters_of_modules(rng):
    x, gate, *_ = drawn(rng)
    made = linen.GatedRMSNorm(gate_first=True).init(jax.random.key(0), x, gate)["params"]
    assert list(made) == ["scale"]
    assert np.all(made["scale"] == 1)
    made = nnx.GatedRMSNorm(24, gate_first=True, scale_offset=1, rngs=Rngs(0))
    assert made.bias is None
    assert np.all(made.scale[...] == 0)
    y = linen.GatedRMSNorm(gate_first=False).apply(
        {"params": {"scale": jnp.ones(2)}}, np.array([[3, -3]]), np.array([[0, 40]])
    )
    np.testing.assert_allclose(y, [[0, -40]], rtol=1e-6)


X = np.ones((2, 6), np.float32)


@pytest.mark.parametrize(
    ("gate", "options", "error", "said"),
    [
        (X[:1], {}, ValueError, "gate must have the shape of x: got (1, 6) for x of shape (2, 6)."),
        (X.astype(int), {}, TypeError, "gate must be floating point: got int"),
        (X + 0j, {}, TypeError, "gate must be real: got complex64."),
        (X, {"gate_first": 1}, TypeError, "gate_first must be True or False: got 1."),
        (X, {"activation": "relu"}, ValueError, "activation must be 'silu' or 'sigmoid'"),
        (X, {"num_groups": 4}, ValueError, "num_groups must be positive and divide the channels"),
        (X, {"num_groups": 2.0}, TypeError, "num_groups must be an integer: got 2.0"),
        (X, {"num_groups": 2, "axes": (0, 1)}, ValueError, "axes must be the one axis of the"),
        (X, {"where": X[:, :5]}, ValueError, "where must broadcast against x without growing it"),
        (
            X,
            {"rounding": "never"},
            ValueError,
            "rounding must be 'once', 'twice' or 'input': got 'never'.",
        ),
        (X, {"dtype": int}, TypeError, "dtype, that of the output, must be floating point"),
        (X, {"weight": X}, TypeError, "Did you mean scale?"),
    ],
)
@FIRST
def test_wrong_arguments(gate, options, error, said, gate_first):
    with pytest.raises(error, match=re.escape(said)):
        jn.gated_rms_norm(X, gate, **{"gate_first": gate_first, **options})


def test_gates_of_modules_are_named(rng):
    module = nnx.GatedRMSNorm(6, gate_first=True, rngs=Rngs(0))
    with pytest.raises(ValueError, match=r"mask must broadcast against x"):
        module(X, X, mask=X[:, :5])
    with pytest.raises(TypeError, match="gate"):
        jn.gated_rms_norm(X, gate_first=True)
    with pytest.raises(TypeError, match="gate_first"):
        jn.gated_rms_norm(X, X)
