"""Test every norm under every transformation of JAX."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES, DISTINCT, HOST, KERNELS, KINDS, laws, long_sweep
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Part, oracle

import jaxnorm as jn

shard_map = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map


def ulps(found, truth):
    """The largest difference, in units of the last place of the largest value."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    return np.abs(found - truth).max() / (np.abs(truth).max() * np.finfo(np.float32).eps)


def arguments(case, rng, batch=()):
    x = rng.standard_normal((*batch, *case.shape)).astype(np.float32)
    return jnp.asarray(x), *map(jnp.asarray, case.params(rng))


def loss(case, x, scale, bias):
    return jnp.sin(case(x, scale=scale, bias=bias)).sum()


@laws(CASES, quick=KINDS[:3])
def test_jit_equals_eager(case, implementation, rng):
    x, scale, bias = arguments(case, rng)
    call = partial(case, scale=scale, bias=bias)
    assert ulps(jax.jit(call)(x), call(x)) <= 4
    gradient = jax.grad(partial(loss, case), (0, 1, 2))
    for jitted, eager in zip(
        jax.jit(gradient)(x, scale, bias), gradient(x, scale, bias), strict=True
    ):
        assert ulps(jitted, eager) <= 4


@laws(CASES, native=KERNELS, quick=KINDS[:3])
def test_vmap_equals_a_loop(case, implementation, rng):
    x, scale, bias = arguments(case, rng, (3,))
    both = jax.jit(
        lambda x: (
            case(x, scale=scale, bias=bias),
            jax.grad(lambda x: loss(case, x, scale, bias))(x),
        )
    )
    loop = [np.stack(results) for results in zip(*map(both, x), strict=True)]
    twice = jax.jit(lambda x: (jax.vmap(both)(x), jax.vmap(jax.vmap(both))(x[None])))
    for found, outer, truth in zip(*twice(x), loop, strict=True):
        assert ulps(found, truth) <= 4
        assert ulps(outer, truth[None]) <= 4


@laws(CASES)
def test_vmap_over_parameters(case, implementation, rng):
    x, scale, bias = arguments(case, rng)
    scales = np.stack([scale, 2 * np.asarray(scale)])
    one = jax.jit(lambda s: case(x, scale=s, bias=bias))
    assert ulps(jax.jit(jax.vmap(one))(scales), np.stack([one(s) for s in scales])) <= 4


@laws(CASES, native=KERNELS, quick=[BY_NAME["positional"]])
def test_vmap_over_many_directions_equals_a_loop(case, implementation, rng):
    # many, as of a Jacobian: XLA in jaxlib 0.10.2 then adds up wrong products for x that all share
    x, scale, bias = arguments(case, rng)
    d, ddx = arguments(case, rng, (2, 480))[0]
    norm = partial(case, scale=scale, bias=bias)
    gradient = jax.grad(partial(loss, case))
    both = jax.jit(
        lambda d, ddx: (
            jax.jvp(norm, (x,), (d,))[1],
            jax.vjp(norm, x)[1](d)[0],
            jax.jvp(lambda x: gradient(x, scale, bias), (x,), (ddx,))[1],
        )
    )
    some = np.array([0, 1, 2, 40, 77, 239, 240, 451, 479])
    each = [both(d[i], ddx[i]) for i in some]
    for found, truth in zip(jax.jit(jax.vmap(both))(d, ddx), zip(*each, strict=True), strict=True):
        assert ulps(found[some], np.stack(truth)) <= 16


@laws(CASES, native=KERNELS, quick=KINDS[:3])
def test_scan_and_checkpoint_equal_a_loop(case, implementation, rng):
    x, scale, bias = arguments(case, rng)

    def step(x, _):
        x = jnp.sin(case(x, scale=scale, bias=bias))
        return x, None

    def scanned(x):
        return jax.lax.scan(jax.checkpoint(step), x, length=2)[0].sum()

    def looped(x):
        return step(step(x, None)[0], None)[0].sum()

    (found, slope), (truth, wanted) = (
        jax.jit(jax.value_and_grad(function))(x) for function in (scanned, looped)
    )
    assert ulps(found, truth) <= 4
    np.testing.assert_allclose(slope, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    long_sweep([case for case in CASES if case.name != "switchable"], quick=KINDS[:1]),
    ids=str,
)
def test_a_traced_epsilon_equals_a_static_one(case, rng):
    x, scale, bias = arguments(case, rng)
    where = jnp.asarray(rng.uniform(size=case.shape) < 0.8)
    traced = jax.jit(
        lambda x, e: jax.value_and_grad(
            lambda x: jnp.sin(case(x, scale=scale, bias=bias, where=where, epsilon=e)).sum()
        )(x)
    )
    static = jax.jit(
        jax.value_and_grad(
            lambda x: jnp.sin(case(x, scale=scale, bias=bias, where=where, epsilon=0.5)).sum()
        )
    )
    for found, truth in zip(traced(x, 0.5), static(x), strict=True):
        np.testing.assert_allclose(found, truth, rtol=2e-6, atol=2e-6)
    value = jax.jit(jax.value_and_grad(lambda e: jnp.sin(case(x, epsilon=e)).sum()))
    (_, slope), *ends = value(0.5), *(float(value(0.5 + step)[0]) for step in (0.01, -0.01))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 0.02, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("size", [1e-15, 1e19])
def test_a_traced_epsilon_of_data_whose_squares_leave_the_range(size, rng):
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    norm = jax.jit(lambda x, e: jn.layer_norm(x, epsilon=e, full_range=True))
    np.testing.assert_allclose(
        norm(x * size, 0.25 * size**2), jn.layer_norm(x, epsilon=0.25), rtol=2e-6, atol=2e-6
    )


def test_a_traced_epsilon_of_0_in_half_precision():
    """Tiny data are normalized, whatever the range of the dtype of epsilon."""
    x = jnp.array([[1.0, 3.0]]) * 1e-25
    np.testing.assert_allclose(
        jax.jit(lambda e: jn.layer_norm(x, epsilon=e))(jnp.float16(0)), [[-1, 1]], rtol=1e-6
    )


@pytest.mark.parametrize("name", ["layer_norm", "graph_norm", "pair_norm"])
@pytest.mark.parametrize("size", [1e-23, 1e-31])
def test_a_traced_epsilon_far_larger_than_variances(name, size, rng):
    """Then a norm is a product with 1 / sqrt(epsilon)."""
    x = rng.standard_normal((4, 6)).astype(np.float32)
    norm = (
        getattr(jn, name)
        if name != "graph_norm"
        else lambda x, **options: jn.graph_norm(x, jnp.ones(6), **options)
    )
    truth = (x - x.mean(1 if name == "layer_norm" else 0, keepdims=True)) / np.sqrt(1e-5)
    both = jax.jit(jax.value_and_grad(lambda x, e: (norm(x, epsilon=e) * truth).sum()))
    (_, slope), y = both(x * size, 1e-5), jax.jit(lambda x, e: norm(x, epsilon=e))(x * size, 1e-5)
    np.testing.assert_allclose(np.asarray(y) / size, truth, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(slope, truth / np.sqrt(1e-5), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_are_known_without_computing(case):
    x = jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
    found = jax.eval_shape(case, x)
    assert (found.shape, found.dtype) == (case.shape, jnp.bfloat16)


def test_a_donated_buffer_is_reused(rng):
    x = jnp.asarray(rng.standard_normal((64, 128)), jnp.float32)
    truth = np.asarray(jn.layer_norm(x))
    compiled = jax.jit(jn.layer_norm, donate_argnums=0).lower(x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == x.nbytes
    assert ulps(compiled(x), truth) <= 4


def wide_input(case, rng):
    shape = (8 * case.shape[0], *case.shape[1:])
    return rng.standard_normal(shape).astype(np.float32) + 3


@pytest.mark.parametrize("case", long_sweep(DISTINCT, quick=KINDS[:3]), ids=str)
def test_sharded_jit_equals_one_device(case, rng):
    x = wide_input(case, rng)
    scale, bias = case.params(rng)
    mesh = Mesh(np.array(HOST), ("data",))
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    function = jax.jit(jax.value_and_grad(partial(loss, case), (0, 1, 2)))
    value, gradients = function(sharded, scale, bias)
    single, truths = function(jnp.asarray(x), scale, bias)
    np.testing.assert_allclose(value, single, rtol=1e-5)
    for found, truth in zip(gradients, truths, strict=True):
        np.testing.assert_allclose(found, truth, atol=1e-5 * np.abs(truth).max())


LARGE = [
    replace(BY_NAME[name], name=f"{name}_large", shape=(2, 64, 40, 8), param=(8,))
    for name in ("batch_conv", "switchable")
]


SHARED = [BY_NAME["batch_conv"], BY_NAME["switchable"], *LARGE]


@pytest.mark.parametrize("case", long_sweep(SHARED, quick=SHARED[:1]), ids=str)
def test_shard_map_equals_one_device(case, rng):
    x = wide_input(case, rng)
    scale, bias = case.params(rng)
    mesh = Mesh(np.array(HOST), ("data",))

    @partial(shard_map, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    def mapped(x, scale, bias):
        return case(x, scale=scale, bias=bias, axis_name="data")

    truth = case(x, scale=scale, bias=bias)
    np.testing.assert_allclose(jax.jit(mapped)(x, scale, bias), truth, atol=2e-6)
    found = jax.jit(jax.grad(lambda *a: jnp.sin(mapped(*a)).sum(), (0, 1, 2)))(x, scale, bias)
    truths = jax.grad(partial(loss, case), (0, 1, 2))(x, scale, bias)
    for got, want in zip(found, truths, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_replicas_are_weighted_by_their_valid_elements(rng):
    """Means of 4 and of 1 valid elements: Flax averages them to 3.0, the truth is 1.8."""
    x = np.array([[1.0, 1.0, 1.0, 1.0], [5.0, np.nan, np.nan, np.nan]], np.float32)
    found = jax.vmap(
        lambda x: jn.moments(x, 0, where=~jnp.isnan(x), axis_name="replica"), axis_name="replica"
    )(x)
    np.testing.assert_allclose(found.mean, np.full((2, 1), 1.8), rtol=1e-7)
    np.testing.assert_allclose(found.var, np.full((2, 1), 2.56), rtol=1e-6)
    np.testing.assert_array_equal(found.count, np.full((2, 1), 5.0))


def test_batch_norm_of_one_example_per_replica(rng):
    x = rng.standard_normal((8, 3)).astype(np.float32)
    y, found = jax.vmap(lambda x: jn.batch_norm(x, axis_name="d"), axis_name="d")(x)
    truth, whole = jn.batch_norm(x)
    np.testing.assert_allclose(y, truth, atol=1e-6)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, np.broadcast_to(want, (8, 3)), atol=1e-6)


@pytest.mark.parametrize("mean", [0, 1e3, 1e6])
def test_uneven_and_empty_shards(mean, rng):
    counts = [64, 0, 1, 5, 40, 13, 2, 30]
    x = (rng.standard_normal((8, 64, 3)) + mean).astype(np.float32)
    mask = np.arange(64)[None, :, None] < np.array(counts)[:, None, None]
    x = np.where(mask, x, np.nan)
    y, found = jax.vmap(lambda x, m: jn.batch_norm(x, where=m, axis_name="d"), axis_name="d")(
        x, mask
    )
    valid = x[np.broadcast_to(mask, x.shape)].reshape(-1, 3).astype(np.float64)
    truth = (valid - valid.mean(0)) / np.sqrt(valid.var(0) + 1e-5)
    np.testing.assert_allclose(
        np.asarray(y)[np.broadcast_to(mask, x.shape)].reshape(-1, 3),
        truth,
        atol=1e-6 * np.abs(truth).max(),
    )
    np.testing.assert_array_equal(np.asarray(found.count)[0, 0], np.full(3, sum(counts)))
    empty = jax.vmap(
        lambda x: jn.batch_norm(x, where=jnp.zeros_like(x, bool), axis_name="d"), axis_name="d"
    )(x)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(empty))


@pytest.mark.parametrize("case", long_sweep(DISTINCT, quick=KINDS[:1]), ids=str)
def test_masks_and_parameters_that_are_explicitly_sharded_otherwise_than_x(case, rng):
    """Output and gradients lie as x and the parameters do."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=HOST[:4], axis_types=(AxisType.Explicit,) * 2)
    shape = [size + size % 2 for size in case.shape]  # which two devices share
    x, where = rng.standard_normal(shape).astype(np.float32), rng.random(shape) < 0.8
    scale, bias = rng.uniform(0.5, 1.5, (2, shape[-1])).astype(np.float32)
    given, none = (x, scale, bias, where), [None] * (len(shape) - 1)

    def run(x, scale, bias, where):
        call = lambda x, scale, bias: case(x, scale=scale, bias=bias, where=where)
        return call(x, scale, bias), *jax.grad(lambda *a: jnp.sin(call(*a)).sum(), (0, 1, 2))(
            x, scale, bias
        )

    specs = P(*none, "b"), P("a"), P("b"), P("a", *none)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(
            *(
                jax.device_put(a, NamedSharding(mesh, spec))
                for a, spec in zip(given, specs, strict=True)
            )
        )
    assert [jax.typeof(a).sharding.spec for a in found] == [specs[0], *specs[:3]]
    for one, other in zip(found, jax.jit(run)(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 * np.abs(other).max())


# the axis of the mesh that each axis of x lies along, and how many groups one of these is split
# into
SPLITS = {
    "channels over two axes": (
        (None, None, ("a", "b")),
        {1: True, 2: False, 4: True, 8: True},
        lambda x, g: jn.group_norm(x, g),
    ),
    "examples over one": (
        ("a",),
        {1: True, 3: False, 4: True},
        lambda x, g: jn.standardize(x, "(k [n]) [h] c", k=g),
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_axes_that_are_explicitly_sharded(name, rng):
    """Groups that devices hold whole; others are refused in words, since no type says how the parts
    are sharded.
    """
    spec, fits, norm = SPLITS[name]
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=HOST[:4], axis_types=(AxisType.Explicit,) * 2)
    x = rng.standard_normal((12, 4, 8)).astype(np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(*spec)))
        for groups, held in fits.items():
            if held:
                np.testing.assert_allclose(
                    jax.jit(norm, static_argnums=1)(placed, groups), norm(x, groups), atol=2e-6
                )
            else:
                with pytest.raises(
                    ValueError,
                    match=(
                        "an axis that is explicitly sharded must be split into a multiple "
                        "of its devices"
                    ),
                ):
                    jax.jit(norm, static_argnums=1)(placed, groups)


def test_moments_are_merged_over_devices_alone(rng):
    """As after merging the batches of each device in a loop."""
    x = rng.standard_normal((4, 5, 3)).astype(np.float32)
    merged = jax.vmap(
        lambda x: jn.moments(x, 0).merge((), axis_name="d"), axis_name="d", out_axes=None
    )(x)
    whole = jn.moments(x.reshape(20, 3), 0)
    assert (merged.count == 20).all()
    np.testing.assert_allclose(merged.mean, whole.mean, atol=1e-7)
    np.testing.assert_allclose(merged.var, whole.var, rtol=1e-6)
    with pytest.raises(ValueError, match=re.escape("axes must name at least one axis: got ()")):
        jn.moments(x, 0).merge(())


GROUPS = [((0, 1), (2, 3)), ((0, 1, 2), (3,), (4, 5, 6, 7)), ((5,), (0, 4, 2, 1, 3, 6, 7))]


@pytest.mark.parametrize(
    "groups", long_sweep([(groups,) for groups in GROUPS], quick=[(GROUPS[1],)]), ids=str
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_groups_of_replicas(groups, masked, rng):
    """Moments, output and gradient of each group by itself, whatever their sizes."""
    x, cotangent = rng.standard_normal((2, sum(map(len, groups)), 6, 2)).astype(np.float32)
    where = rng.uniform(size=x.shape) < 0.8 if masked else np.ones(x.shape, bool)

    @partial(jax.pmap, axis_name="d", devices=HOST)
    def run(x, where, cotangent):
        options = {
            "where": where if masked else None,
            "axis_name": jn.AxisGroups("d", groups),
            "epsilon": 1e-5,
        }
        y, pullback, found = jax.vjp(lambda x: jn.batch_norm(x, **options), x, has_aux=True)
        return (
            y,
            pullback(cotangent)[0],
            found,
            jn.standardize(x.astype(jnp.bfloat16), 0, **options),
        )

    y, dx, found, half = run(x, where, cotangent)
    for group in map(list, groups):
        of = lambda a, group=group: np.asarray(a)[group].astype(np.float64)
        truth = oracle(
            of(x), (Part((0, 1)),), epsilon=1e-5, cotangent=of(cotangent), where=of(where)
        )
        np.testing.assert_array_equal(
            found.count[jnp.array(group)][:, 0], [of(where).sum((0, 1))] * len(group)
        )
        np.testing.assert_allclose(of(y), truth.y, atol=1e-6)
        np.testing.assert_allclose(of(dx), truth.dx, atol=3e-6)
        np.testing.assert_allclose(of(half), truth.y, atol=0.03)


def test_groups_of_replicas_where_devices_are_told_apart():
    mesh = Mesh(np.array(HOST[:4]), ("d",))
    across = jn.AxisGroups("d", ((0, 1), (2, 3)))
    mapped = shard_map(
        lambda x: jn.moments(x, 0, axis_name=across).mean,
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    with pytest.raises(NotImplementedError, match=r"groups of devices.*check_vma=False"):
        mapped(jnp.arange(8.0))


def test_a_numpy_array_may_be_overwritten_after_the_call(rng):
    """Memory that lies on 64 bytes JAX takes as it is, without a copy, unless it is told not to."""
    memory = np.zeros(6 * 16 * 4 + 64, np.uint8)
    x = memory[-memory.ctypes.data % 64 :][: 6 * 16 * 4].view(np.float32).reshape(6, 16)
    x[:] = rng.standard_normal(x.shape)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    gradient_by_scale = lambda x: jax.vjp(
        lambda scale: jn.layer_norm(x, scale=scale), jnp.ones(16)
    )[1]
    (truth,), pullback = gradient_by_scale(jnp.array(x))(cotangent), gradient_by_scale(x)
    x[:] = 0
    np.testing.assert_array_equal(pullback(cotangent)[0], truth)
