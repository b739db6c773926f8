"""Test norms of a sum, which return the sum as well."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import Rngs
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import Part, oracle

import jaxnorm as jn
from jaxnorm import linen, nnx

NORMS = {"rms": (linen.RMSNorm, nnx.RMSNorm), "layer": (linen.LayerNorm, nnx.LayerNorm)}
IMPLEMENTATIONS = ("xla", "reference", "native", "pallas")
EPSILON = 1e-5


def drawn(rng, shape=(3, 18, 40), dtype="float32", param=None):
    """x, residual, scale, bias and the cotangents of output and sum."""
    x, residual, dy, dtotal = rng.normal(1, 2, (4, *shape))
    scale, bias = rng.uniform(0.5, 1.5, (2, *(param or shape[-1:])))
    arrays = tuple(jnp.asarray(a, dtype) for a in (x, residual)), (dy, dtotal)
    return (*arrays[0], *(jnp.asarray(a, "float32") for a in (scale, bias))), tuple(
        jnp.asarray(a, dtype) for a in arrays[1]
    )


def truth(x, residual, scale, bias, dy, dtotal, norm, where=None):
    """The output, the sum, and the gradients of all four."""
    as_double = lambda a: np.asarray(a, np.float64)
    total = as_double(x + residual)  # rounded as the sum is
    scale, bias = (as_double(a).reshape((1,) * (3 - a.ndim) + a.shape) for a in (scale, bias))
    options = {} if where is None else {"where": np.broadcast_to(where, total.shape)}
    found = oracle(
        total,
        (Part((2,)),),
        scale=scale,
        bias=bias,
        cotangent=as_double(dy),
        epsilon=EPSILON,
        centered=norm == "layer",
        **options,
    )
    own = lambda a, param: a.sum(
        tuple(i for i, size in enumerate(param.shape) if size == 1), keepdims=True
    )
    dx = found.dx + as_double(dtotal)
    return found.y, total, dx, dx, own(found.dscale, scale), own(found.dbias, bias)


def results(call, given, cotangents):
    """The output, the sum, and the gradients of all four."""
    (y, total), vjp = jax.vjp(call, *given)
    return y, total, *vjp((cotangents[0].astype(y.dtype), cotangents[1]))


def close(found, true, bound):
    for a, b in zip(found, true, strict=True):
        assert (
            np.abs(np.asarray(a, np.float64).reshape(b.shape) - b).max() <= bound * np.abs(b).max()
        )


@pytest.mark.parametrize("param", [None, (3, 1, 40)], ids=["shared", "of examples"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2**-7)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_results_are_those_of_the_norm_of_the_sum(implementation, norm, dtype, bound, param, rng):
    given, cotangents = drawn(rng, dtype=dtype, param=param)
    call = lambda x, residual, scale, bias: jn.add_norm(
        x, residual, norm=norm, scale=scale, bias=bias, epsilon=EPSILON
    )
    found = results(call, given, cotangents)
    assert [a.dtype for a in found[:4]] == [jnp.dtype(dtype)] * 4
    close(found, truth(*given, *cotangents, norm), bound)
    np.testing.assert_array_equal(found[1], given[0] + given[1])


@pytest.mark.parametrize("norm", NORMS)
def test_one_kernel_adds_and_one_computes_the_gradients(norm, rng):
    given, cotangents = drawn(rng)
    call = partial(jn.add_norm, norm=norm, implementation="pallas")
    program = str(
        jax.make_jaxpr(lambda *a: results(lambda x, r: call(x, r), a[:2], a[2:]))(
            *given[:2], *cotangents
        )
    )
    assert len(re.findall(r"jaxnorm_pallas_add\[", program)) == 1
    assert len(re.findall(r"jaxnorm_pallas_add_tangent_transpose\[", program)) == 1
    assert " add_any " not in program


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a))),
        lambda f: lambda *a: jax.vmap(f)(*(jnp.stack([each, 2 * each]) for each in a)),
        lambda f: lambda *a: jax.hessian(lambda x: (f(x, *a[1:])[0] ** 3).sum())(a[0]),
        lambda f: (
            lambda *a: jax.grad(lambda *a: sum((h**3).sum() for h in jax.checkpoint(f)(*a)))(*a)
        ),
        lambda f: lambda *a: jax.grad(lambda *a: (f(*a)[1] ** 3).sum(), (0, 1))(*a),
        lambda f: lambda *a: jax.lax.scan(lambda c, _: (f(*c, *a[2:]), None), a[:2], length=3)[0],
    ],
    ids=["jvp", "vmap", "hessian", "checkpoint", "of the sum alone", "scan"],
)
@pytest.mark.parametrize("implementation", ["native", "pallas"], indirect=True)
def test_transforms_are_those_of_plain_jax(implementation, transform, rng):
    given, _ = drawn(rng, (2, 3, 8))
    f, g = (
        transform(
            lambda *a, name=name: jn.add_norm(*a[:2], scale=a[2], bias=a[3], implementation=name)
        )
        for name in (implementation, "xla")
    )
    for a, b in zip(jax.tree.leaves(f(*given)), jax.tree.leaves(g(*given)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("implementation", ["xla", "native", "pallas"], indirect=True)
def test_masked_elements_do_not_count(implementation, rng):
    given, cotangents = drawn(rng)
    where = rng.random((3, 18, 1)) < 0.6
    hole = ~np.broadcast_to(where, given[0].shape)
    bad = (jnp.where(hole, jnp.nan, given[0]), *given[1:])
    call = lambda *a: jn.add_norm(
        *a[:2], norm="layer", scale=a[2], bias=a[3], where=where, epsilon=EPSILON
    )
    y, total, dx, *rest = results(call, bad, cotangents)
    true = truth(*given, *cotangents, "layer", where)
    assert np.isnan(total[hole]).all()
    close((y, dx, *rest), (true[0], *true[2:]), 2e-6)


def test_the_sum_has_the_dtype_of_both(rng):
    x, residual = jnp.asarray(rng.normal(size=(2, 5, 8)), jnp.float32)
    y, total = jn.add_norm(x.astype(jnp.bfloat16), residual)
    assert (y.dtype, total.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(total, x.astype(jnp.bfloat16).astype(jnp.float32) + residual)
    y, total = jn.add_norm(x, residual, dtype="bfloat16")
    assert (y.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("implementation", ["xla", "native", "pallas"], indirect=True)
def test_explicit_sharding(implementation, rng):
    given, cotangents = drawn(rng, (8, 18, 40))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    place = lambda a: jax.device_put(
        a, NamedSharding(mesh, PartitionSpec("d") if a.ndim == 3 else PartitionSpec())
    )
    call = lambda *a: jn.add_norm(*a[:2], scale=a[2], bias=a[3], epsilon=EPSILON)
    program = jax.jit(partial(results, call))
    found = program(tuple(map(place, given)), tuple(map(place, cotangents)))
    close(found, truth(*given, *cotangents, "rms"), 3e-6)
    other = jax.device_put(given[1], NamedSharding(mesh, PartitionSpec(None, None, "d")))
    with pytest.raises(Exception, match="shard"):
        call(place(given[0]), other, *map(place, given[2:]))


@pytest.mark.parametrize("specs", [("d", None), (None, "d")], ids=str)
@pytest.mark.parametrize("implementation", ["xla", "native", "pallas"], indirect=True)
def test_a_sum_of_arrays_one_of_which_is_sharded(implementation, specs, rng):
    given, cotangents = drawn(rng, (8, 18, 40))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))
    x, residual = (place(a, spec) for a, spec in zip(given, specs, strict=False))
    params, dys = tuple(map(place, given[2:])), tuple(place(a, "d") for a in cotangents)
    call = lambda *a: jn.add_norm(*a[:2], scale=a[2], bias=a[3], epsilon=EPSILON)
    found = jax.jit(partial(results, call))((x, residual, *params), dys)
    close(found, truth(*given, *cotangents, "rms"), 3e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_modules_add_a_residual(norm, rng):
    x, residual = jnp.asarray(rng.normal(size=(2, 3, 18, 40)), jnp.float32)
    of_linen, of_nnx = NORMS[norm]
    module = of_linen()
    params = module.init(jax.random.key(0), x)
    found, same = (
        module.apply(params, x, residual=residual),
        of_nnx(40, rngs=Rngs(0))(x, residual=residual),
    )
    for a, b in zip(found, same, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found[1], x + residual)
    np.testing.assert_allclose(found[0], module.apply(params, x + residual), atol=1e-6)


def test_segments_of_a_sum(rng):
    x, residual = jnp.asarray(rng.normal(size=(2, 6, 4)), jnp.float32)
    options = {"segments": jnp.array([0, 0, 1, 1, 1, 2]), "num_segments": 3}
    module = linen.LayerNorm(reduction_axes=0)
    params = module.init(jax.random.key(0), x, **options)
    y, total = module.apply(params, x, residual=residual, **options)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, module.apply(params, x + residual, **options))


WRONG = [
    (
        (2, 4),
        {},
        ValueError,
        "residual must have the shape of x: got (2, 4) for x of shape (2, 3).",
    ),
    (
        (2, 3),
        {"axes": "n (g [c])"},
        ValueError,
        "axes must split no axis here: got 'n (g ",
    ),
    ((2, 3), {"norm": "batch"}, ValueError, "norm must be 'rms' or 'layer': got 'batch'."),
    ((2, 3), {"eps": 1e-3}, TypeError, "Did you mean epsilon?"),
    ((2, 3), {"scale": np.ones(4)}, ValueError, "scale must"),
]


@pytest.mark.parametrize(("shape", "options", "error", "words"), WRONG)
def test_errors(shape, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        jn.add_norm(jnp.ones((2, 3)), jnp.ones(shape), **options)


def test_whole_numbers_are_refused():
    with pytest.raises(TypeError, match="residual must be floating point: got int32"):
        jn.add_norm(jnp.ones((2, 3)), jnp.ones((2, 3), int))
