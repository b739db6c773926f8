"""Test plain JAX with XLA's loops in mind, and the formulas as they are.

Rows come first: each of their gradients has a loop of its own.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DISTINCT, HOST, KINDS, long_sweep
from derivatives import check_derivatives
from hard import B32
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import shard_map, ulps

import jaxnorm as jn

NORMS = {
    "layer": lambda x, s, b: jn.layer_norm(x, scale=s, bias=b),
    "layer alone": lambda x, s, b: jn.layer_norm(x),
    "layer by std": lambda x, s, b: jn.layer_norm(
        x, scale=s, bias=b, correction=1, epsilon_in="std"
    ),
    "rms": lambda x, s, b: jn.rms_norm(x, scale=s),
    "layer of images": lambda x, s, b: jn.standardize(x, (-2, -1), scale=jnp.cos(x), bias=b[0]),
    "layer over the middle": lambda x, s, b: jn.standardize(
        x, -2, scale=s[:3, None], bias=b[:3, None]
    ),
    "gain per row": lambda x, s, b: jn.standardize(x, -1, scale=x[..., :1], bias=b),
}


@pytest.fixture(
    autouse=True, scope="module", params=long_sweep(["xla", "reference"], quick=["xla"])
)
def implementation(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXNORM_IMPLEMENTATION", request.param)
        yield request.param


@pytest.fixture
def arguments(rng):
    return [jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 3, 6), (6,), (6,))]


@pytest.mark.parametrize("name", NORMS)
def test_each_gradient_has_a_loop_of_its_own(name, arguments, implementation):
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda *a: NORMS[name](*a).sum()))(*arguments))
    assert ("jaxnorm_normalize_rows_transpose" in jaxpr) == (
        implementation == "xla" and name != "layer over the middle"
    )


@pytest.mark.parametrize("name", long_sweep(NORMS, quick=list(NORMS)[:1]))
def test_derivatives_of_both_modes_and_two_orders(name, x64, rng):
    arguments = [jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 3, 6), (6,), (6,))]
    check_derivatives(lambda *a: jnp.sin(NORMS[name](*a)), arguments)


@pytest.mark.parametrize("name", long_sweep(NORMS, quick=list(NORMS)[:1]))
def test_vmap_and_shard_map_and_scan_equal_a_loop(name, arguments):
    x, scale, bias = arguments
    gradients = jax.jit(jax.grad(lambda *a: jnp.sin(NORMS[name](*a)).sum(), (0, 1, 2)))
    alone = [gradients(one, scale, bias) for one in x]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *alone)
    mesh = jax.make_mesh((2,), ("n",), devices=HOST[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.jit(
        shard_map(gradients, mesh=mesh, in_specs=(P("n"), P(), P()), out_specs=(P("n"), P(), P()))
    )
    same(jax.vmap(gradients, (0, None, None))(x, scale, bias), expected)
    same(jax.lax.scan(lambda c, one: (c, gradients(one, scale, bias)), 0, x)[1], expected)
    same(sharded(x, scale, bias), gradients(x, scale, bias))


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert ulps(one, other) <= 4 if other.any() else not one.any()


@pytest.mark.parametrize("name", long_sweep(NORMS, quick=list(NORMS)[::3]))
def test_gradients_of_bfloat16_are_those_of_float32_rounded(name, arguments):
    rounded = [np.asarray(a).astype(jnp.bfloat16).astype(np.float32) for a in arguments]
    cotangent = jnp.ones_like(rounded[0])
    gradients = jax.jit(lambda arguments, cotangent: jax.vjp(NORMS[name], *arguments)[1](cotangent))
    want = gradients(rounded, cotangent)
    found = gradients(
        [rounded[0].astype(jnp.bfloat16), *rounded[1:]], cotangent.astype(jnp.bfloat16)
    )
    for one, other in zip(found, want, strict=True):
        bound = 2**-8 if one.dtype == jnp.bfloat16 else 1e-6
        assert (
            np.abs(np.asarray(one).astype(np.float32) - other).max()
            <= bound * np.abs(other).max() + 1e-6
        )


@pytest.mark.parametrize("value", [0.0, 0.1, 3.3, 1e6 + 0.3, 1e10])
def test_constant_rows_give_the_bias_and_finite_gradients(value):
    x, bias = jnp.full((4, 77), value, jnp.float32), jnp.linspace(0, 1, 77)
    one = lambda x: jn.layer_norm(x, bias=bias)
    for norm in (one, jax.vmap(one)):
        y, pullback = jax.vjp(norm, x)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
        assert np.isfinite(pullback(jnp.ones_like(y))[0]).all()


@pytest.mark.parametrize(
    "shape", [(2, 0, 3, 4), (0, 2, 3, 4), (2, 3, 4, 0), (2, 1, 1, 5), (2, 3, 1, 1), (2, 1, 1, 1)]
)
def test_sizes_of_none_and_one(shape):
    x = jnp.ones(shape)
    y, batch = jn.batch_norm(x, feature_axes=0)
    np.testing.assert_array_equal(y, np.zeros(shape))
    np.testing.assert_array_equal(batch.mean, np.full((shape[0], 1, 1, 1), float(x.size > 0)))
    np.testing.assert_array_equal(jn.standardize(x, (1, 2, 3)), np.zeros(shape))


def test_gradients_of_gains_of_many_elements(rng):
    """Layer norm over (H, W, C), of which each element has a gain, against float64 NumPy."""
    x, dy = (rng.standard_normal((70, 3, 11, 512)) for _ in range(2))
    params = [jnp.asarray(rng.standard_normal(x.shape[1:]), jnp.float32) for _ in range(2)]
    norm = lambda scale, bias: jn.layer_norm(
        jnp.asarray(x, jnp.float32), axes=(1, 2, 3), scale=scale, bias=bias
    )
    dscale, dbias = jax.jit(lambda *a: jax.vjp(norm, *params)[1](*a))(jnp.asarray(dy, jnp.float32))
    axes = (1, 2, 3)
    normalized = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-6)
    for found, truth in ((dscale, (dy * normalized).sum(0)), (dbias, dy.sum(0))):
        np.testing.assert_allclose(found, truth, rtol=0, atol=B32[1] * np.abs(truth).max())


@pytest.mark.parametrize("axis", [0, 3])
def test_what_is_explicitly_sharded_is_left_in_place(axis, rng):
    x = jnp.asarray(rng.standard_normal((8, 3, 11, 512)), jnp.float32)
    scale = jnp.asarray(rng.standard_normal(x.shape[1:]), jnp.float32)
    step = jax.jit(
        jax.grad(lambda scale, x: jnp.square(jn.layer_norm(x, axes=(1, 2, 3), scale=scale)).sum())
    )
    truth = step(scale, x)
    mesh = jax.make_mesh((8,), ("d",), devices=HOST, axis_types=(AxisType.Explicit,))
    spec = [None] * 4
    spec[axis] = "d"
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, P(*at)))
            for a, at in ((scale, spec[1:] if axis else []), (x, spec))
        ]
        found = step(*placed)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-6 * np.abs(truth).max())


@pytest.mark.parametrize("case", long_sweep(DISTINCT, quick=KINDS), ids=str)
def test_other_platforms_get_no_barriers(case, rng):
    """What separates the loops of a CPU would keep others from making one pass of several."""
    x, scale, bias = jnp.ones(case.shape, jnp.bfloat16), *map(jnp.asarray, case.params(rng))

    def step(x, scale, bias):
        y, pullback = jax.vjp(lambda *a: case(a[0], scale=a[1], bias=a[2]), x, scale, bias)
        return y, pullback(y)

    text = jax.jit(step).trace(x, scale, bias).lower(lowering_platforms=("tpu",)).as_text()
    # those of jax.checkpoint
    assert text.count("optimization_barrier") == {"switchable": 2, "graph": 3, "pair": 3}.get(
        case.name, 0
    )


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [(16384, 128), (32, 512, 128)], ids=str)
def test_no_loop_of_rows_stores_an_array_as_large_as_x(name, shape, usual_compile):
    """On XLA's CPU back-end, whatever the number of axes before that of the features; that of JAX
    0.8 stores four of bfloat16.
    """
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    gradient = jax.jit(
        lambda x, dy: jax.vjp(partial(getattr(jn, name), implementation="xla"), x)[1](dy)
    )
    most = 0.25 if jax.__version_info__ >= (0, 9) else 4.25
    assert gradient.lower(
        x, x
    ).compile().memory_analysis().temp_size_in_bytes <= most * 2 * np.prod(shape)


@pytest.mark.parametrize(("channels", "most"), [(1, 2.25), (128, 3.5)], ids=["rows", "elements"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_rows_beside_a_mask_store_what_is_hidden_and_little_else(
    name, channels, most, usual_compile
):
    """x and dy with 0 in what is masked out and, where that is single elements, their number or
    their mask: loops store no more.
    """
    shapes = (((32, 512, 128), jnp.float32), ((128,), jnp.float32), ((32, 512, channels), bool))
    x, scale, where = (jax.ShapeDtypeStruct(*shape) for shape in shapes)

    def step(x, scale, dy, where):
        y, pullback = jax.vjp(
            lambda x, scale: getattr(jn, name)(x, scale=scale, where=where, implementation="xla"),
            x,
            scale,
        )
        return y, pullback(dy)

    assert jax.jit(step).lower(
        x, scale, x, where
    ).compile().memory_analysis().temp_size_in_bytes <= most * 4 * np.prod(x.shape)


@pytest.mark.parametrize("dtype", long_sweep(["float32", "bfloat16"], quick=["float32"]))
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm", "switchable_norm"])
def test_what_is_of_groups_is_computed_before_loops_over_x(name, dtype, usual_compile):
    """XLA's CPU back-end would repeat for each element the 40 to 100 operations that make the
    constants of its group.
    """
    logits = (jnp.zeros(3),) * 2 if name == "switchable_norm" else ()
    norm = lambda x, scale: getattr(jn, name)(x, *logits, scale=scale, implementation="xla")
    x, scale = jnp.ones((4, 6, 5, 40), dtype), jnp.ones(40)
    step = jax.jit(lambda x, scale: jax.vjp(norm, x, scale)[1](norm(x, scale)))
    loops = [
        loop
        for loop in re.split(r"\n(?=%)", step.lower(x, scale).compile().as_text())
        if "ROOT" in loop
    ]
    over_x = [loop for loop in loops if re.search(r"ROOT \S+ = \w+\[4,6,5,40\]", loop)]
    assert over_x
    assert max(map(operations_of_groups, over_x)) <= 8


def operations_of_groups(loop: str) -> int:
    """How many operations of a compiled loop have fewer elements than x."""
    reads = ("parameter", "constant", "broadcast", "bitcast", "slice")
    found = re.findall(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", loop)
    return sum(shape != "4,6,5,40" and operation not in reads for shape, operation in found)
