"""Test statistics by segments.

They equal the statistics of each segment by itself, and of a batch in which each
segment is padded.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from flax import nnx as flax_nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import Part, oracle

import jaxnorm as jn
from jaxnorm import linen, nnx

shard_map = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map

K = 5  # segments, of which 3 is empty
IDS = np.random.default_rng(1).permutation(np.repeat([0, 1, 2, 4], [22, 1, 7, 30]))
N, C = len(IDS), 6
MASKS = ["plain", "mask", "position", "weights"]


def packed(rng, kind="plain", shape=(N, C)):
    """Values, a mask of that kind, and a cotangent; NaN is hidden under masks."""
    x, cotangent = rng.standard_normal((2, *shape)).astype(np.float32)
    if kind == "plain":
        return x + 3, None, cotangent
    where = rng.random((*shape[:-1], 1) if kind == "position" else shape) < 0.7
    x = np.where(where, x + 3, np.float32(np.nan))
    return (
        x,
        np.where(where, rng.uniform(0.5, 2, where.shape), 0).astype(np.float32)
        if kind == "weights"
        else where,
        cotangent,
    )


def padded(a, fill=0):
    """Of positions, ``(segments, longest, ...)``; with what is left at the end hidden."""
    longest, result = np.bincount(IDS).max(), []
    for segment in range(K):
        own = a[segment == IDS]
        result.append(
            np.concatenate([own, np.full((longest - len(own), *a.shape[1:]), fill, a.dtype)])
        )
    return np.stack(result)


def unpadded(a):
    """The inverse of :func:`padded`."""
    result = np.zeros((N, *a.shape[2:]), np.asarray(a).dtype)
    for segment in range(K):
        result[segment == IDS] = a[segment, : (segment == IDS).sum()]
    return result


def exactly(found):
    """The mean, which is two numbers, as one."""
    return np.asarray(found.mean, np.float64) + np.asarray(found.low.mean, np.float64)


def close(found, truth, bound=1e-6):
    np.testing.assert_allclose(
        found, truth, rtol=0, atol=bound * max(np.abs(truth).max(initial=0), 1e-30)
    )


@pytest.mark.parametrize("kind", MASKS)
def test_moments_equal_padding_each(kind, rng):
    x, where, _ = packed(rng, kind)
    shown = np.ones((N, 1), bool) if where is None else where
    for centered in (True, False) if kind == "mask" else (True,):
        truth = jn.moments(padded(x), "g [n] c", where=padded(shown), centered=centered)
        found = jn.moments(x, "[n] c", where=where, segments=IDS, num_segments=K, centered=centered)
        assert found.mean.shape == (K, C)
        for name in ("count", "mean", "var"):
            close(getattr(found, name), getattr(truth, name)[:, 0], 3e-7)
    assert not np.asarray(found.count[3]).any()
    assert not np.asarray(found.var[3]).any()


PADDED = [*(("[n] c", kind) for kind in MASKS), ("[n c]", "mask"), ("[n] (k [c])", "plain")]


@pytest.mark.parametrize(("axes", "kind"), long_sweep(PADDED, quick=PADDED[1::3]))
def test_output_and_gradients_equal_padding_each(axes, kind, rng):
    x, where, cotangent = packed(rng, kind)
    # with less of it, padding one element alone is 1e-5 off
    sizes = {"epsilon": 0.1, **({"k": 2} if "k" in axes else {})}
    scale, bias = rng.uniform(0.5, 1.5, (2, 1, C)).astype(np.float32)

    @jax.jit
    def by_segments(x, scale, bias):
        return jn.standardize(
            x, axes, scale=scale, bias=bias, where=where, segments=IDS, num_segments=K, **sizes
        )

    @jax.jit
    def by_padding(x, scale, bias):
        shown = padded(np.ones((N, 1), bool) if where is None else where)
        return jn.standardize(
            x, f"g {axes}", scale=scale[None], bias=bias[None], where=shown, **sizes
        )

    (y, pullback), (truth, back) = (
        jax.vjp(by_segments, x, scale, bias),
        jax.vjp(by_padding, padded(x), scale, bias),
    )
    close(y, unpadded(truth), 4e-7)
    (dx, *found), (expected, *wanted) = (
        pullback(jnp.asarray(cotangent)),
        back(jnp.asarray(padded(cotangent))),
    )
    close(dx, unpadded(expected))
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    if kind == "mask":
        tangent = jax.jvp(by_segments, (x, scale, bias), (cotangent, scale, bias))[1]
        close(
            tangent,
            unpadded(
                jax.jvp(by_padding, (padded(x), scale, bias), (padded(cotangent), scale, bias))[1]
            ),
            2e-6,
        )


def test_gradients_of_segments_long_enough_for_partial_sums(rng):
    x, cotangent = rng.standard_normal((2, 500, C)).astype(np.float32)
    ids = np.where(np.arange(500) % 9 < 2, np.arange(500) % 3, 3)
    found = jax.jit(
        lambda x: jax.vjp(partial(jn.standardize, axes=0, segments=ids, num_segments=4), x)[1](
            cotangent
        )[0]
    )(x)
    for segment in (0, 3):
        close(
            found[ids == segment],
            oracle(
                x[ids == segment], (Part((0,)),), epsilon=1e-5, cotangent=cotangent[ids == segment]
            ).dx,
        )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, K - 1), min_size=150, max_size=150), st.sampled_from([0, 1e3, 1e6]))
def test_however_it_is_cut(ids, offset):
    """Segments of any cut have the Moments of their elements, and merge to those of the whole."""
    x = (np.random.default_rng(2).standard_normal((150, C)) + offset).astype(np.float32)
    ids = np.array(ids)
    found = jn.moments(x, "[n] c", segments=ids, num_segments=K)
    exact = x.astype(np.float64)
    for segment in set(ids.tolist()):
        own = exact[ids == segment]
        np.testing.assert_array_equal(found.count[segment], np.full(C, len(own)))
        mean = exactly(found)[segment]
        np.testing.assert_allclose(mean - own.mean(0), np.zeros(C), atol=1e-6)
        np.testing.assert_allclose(found.var[segment], own.var(0), rtol=1e-6, atol=1e-12)
    whole = found.merge(0)
    np.testing.assert_array_equal(whole.count[0], np.full(C, 150))
    np.testing.assert_allclose(whole.var[0], exact.var(0), rtol=2e-6)


HARD = {
    "normal": lambda rng, n: rng.standard_normal((n, 2)),
    "sorted": lambda rng, n: np.sort(rng.standard_normal((n, 2)), 0),
    "lognormal": lambda rng, n: np.exp(2 * rng.standard_normal((n, 2))),
    "outlier": lambda rng, n: np.where(
        np.arange(n)[:, None] == n // 3, 1e4, rng.standard_normal((n, 2))
    ),
}


@pytest.mark.parametrize("segments", [1, 50_000], ids=["one", "beside many"])
@pytest.mark.parametrize("offset", long_sweep([0, 1e6], quick=[1e6]))
@pytest.mark.parametrize("kind", long_sweep(HARD, quick=list(HARD)[::2]))
def test_long_segments_against_float64(kind, offset, segments, rng):
    """Sums in sequence are 1e-5 off, and of sorted or rounded data more."""
    n = 200_000
    x = (HARD[kind](rng, n) + offset).astype(np.float32)
    ids = np.where(np.arange(n) % 2, 0, np.arange(n) % segments)
    found = jn.moments(x, 0, segments=ids, num_segments=segments)
    exact = x[ids == 0].astype(np.float64)
    mean = exactly(found)[0]
    np.testing.assert_allclose((mean - exact.mean(0)) / exact.std(0), np.zeros(2), atol=1e-6)
    np.testing.assert_allclose(found.var[0], exact.var(0), rtol=1e-6)
    np.testing.assert_array_equal(found.count[0], np.full(2, len(exact)))


@pytest.mark.parametrize("epsilon", [1e-5, 0.0])
def test_constant_segments_give_the_bias(epsilon):
    bias = np.linspace(0, 1, C, dtype=np.float32)[None]
    norm = partial(jn.standardize, axes=0, bias=bias, epsilon=epsilon, segments=IDS, num_segments=K)
    for value in (0.1, 3.3, 1e6 + 0.3, 1e10):
        x = np.full((N, C), value, np.float32)
        y, pullback = jax.vjp(norm, x)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
        assert jnp.isfinite(pullback(jnp.ones_like(y))[0]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_any_size(dtype, rng):
    x = jnp.asarray(packed(rng)[0], dtype) * jnp.asarray(
        1e30 if dtype == "bfloat16" else 1e3, dtype
    )
    y = jn.standardize(x, 0, segments=IDS, num_segments=K, epsilon=0.0)
    truth = jn.standardize(x[IDS == 4], 0, epsilon=0.0)
    np.testing.assert_allclose(
        y[IDS == 4].astype(jnp.float32), truth.astype(jnp.float32), atol=2.0**-7
    )


@pytest.mark.slow
def test_rows_with_ids_of_their_own(rng):
    """``(b, t)`` ids, under vmap and in another layout too; ``(t,)`` ids are those of every row."""
    x, ids = rng.standard_normal((3, 20, 4)).astype(np.float32), rng.integers(0, 4, (3, 20))
    one = lambda x, ids: jn.standardize(x, "[t] c", segments=ids, num_segments=4)
    truth = np.stack([one(*row) for row in zip(x, ids, strict=True)])
    close(jn.standardize(x, "b [t] c", segments=ids, num_segments=4), truth)
    close(jax.vmap(one)(x, ids), truth)
    close(jn.standardize(x, "b [t] c", segments=ids[0], num_segments=4)[1], one(x[1], ids[0]))
    turned = jn.standardize(x.swapaxes(1, 2), "b c [t]", segments=ids[:, None], num_segments=4)
    close(np.swapaxes(turned, 1, 2), truth)
    gradient = jax.vmap(jax.grad(lambda x, ids: jnp.sin(one(x, ids)).sum()))(x, ids)
    close(
        gradient,
        jax.grad(
            lambda x: jnp.sin(jn.standardize(x, "b [t] c", segments=ids, num_segments=4)).sum()
        )(x),
        2e-6,
    )


@pytest.mark.parametrize("pattern", ["b [t] c", "b [t c]", "b [t] (g [c])"])
def test_normalize_applies_the_moments_of_segments(pattern, rng):
    x, ids = rng.standard_normal((3, 20, 4)).astype(np.float32) + 1e3, rng.integers(0, 4, (3, 20))
    options = {"segments": ids, **({"g": 2} if "g" in pattern else {})}
    found = jn.moments(x, pattern, num_segments=4, **options)
    y = jn.normalize(x, found, axes=pattern, **options)
    close(y, jn.standardize(x, pattern, num_segments=4, **options), 4e-7)


def test_merging_by_segments_equals_the_moments_of_segments(rng):
    """Tokens to documents: per-token Moments, masked, some empty, regrouped."""
    x, where = rng.standard_normal((N, C)).astype(np.float32) + 1e3, rng.random((N, C)) < 0.5
    truth = jn.moments(x, "[n c]", where=where, segments=IDS, num_segments=K)
    found = jn.moments(x, "n [c]", where=where).merge("[n] c", segments=IDS, num_segments=K)
    np.testing.assert_array_equal(found.count, truth.count)
    np.testing.assert_allclose(found.mean, truth.mean, rtol=1e-7)
    np.testing.assert_allclose(found.var, truth.var, rtol=1e-6)
    large = jn.Moments(jnp.full((3,), 2.0**24), jnp.zeros(3), jnp.ones(3)).merge(
        0, segments=np.array([1, 1, 1]), num_segments=2
    )
    one = jn.Moments(jnp.ones(2), jnp.zeros(2), jnp.ones(2))
    counted = jn.merge(large, one)
    assert [float(counted.count[1]) + float(counted.low.count[0][1]), float(counted.count[0])] == [
        3 * 2**24 + 1,
        1,
    ]


def test_merging_by_segments_is_differentiable(rng):
    x = rng.standard_normal((N, C)).astype(np.float32)

    def loss(of, x):
        m = of(x)
        return (jnp.sin(m.mean) + m.var**2).sum()

    by_token = lambda x: jn.moments(x, "n [c]").merge("[n] c", segments=IDS, num_segments=K)
    found, truth = (
        jax.grad(partial(loss, of))(x)
        for of in (by_token, partial(jn.moments, axes="[n c]", segments=IDS, num_segments=K))
    )
    close(found, truth, 2e-6)


def test_segments_extend_over_devices(rng):
    x, where, _ = packed(rng, "mask", (8 * 20, C))
    ids = rng.integers(0, K - 1, 8 * 20)
    mesh = Mesh(np.array(HOST), ("d",))

    @partial(shard_map, mesh=mesh, in_specs=(P("d"), P("d"), P("d")), out_specs=(P("d"), P()))
    def mapped(x, where, ids):
        options = {"where": where, "axis_name": "d", "segments": ids, "num_segments": K}
        return jn.standardize(x, 0, **options), jn.moments(x, 0, **options)

    def single(x):
        return jn.standardize(x, 0, where=where, segments=ids, num_segments=K)

    y, found = jax.jit(mapped)(x, where, ids)
    truth, back = jax.vjp(jax.jit(single), x)
    close(y, truth)
    truth = jn.moments(x, 0, where=where, segments=ids, num_segments=K)
    for one, other in zip(
        (found.count, found.mean, found.var), (truth.count, truth.mean, truth.var), strict=True
    ):
        close(one, other)
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(mapped(x, where, ids)[0]).sum()))(x)
    close(gradient, back(jnp.cos(y))[0], 2e-6)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 4.2), ("bfloat16", 2.2)])
def test_reverse_mode_keeps_the_input_the_ids_and_a_few_numbers_per_segment(dtype, bound, rng):
    n, c, k = 2048, 64, 8
    x, ids = (
        jnp.asarray(rng.standard_normal((n, c)), dtype),
        jnp.asarray(rng.integers(0, k, n), jnp.int32),
    )
    _, pullback = jax.vjp(lambda x: jn.standardize(x, 0, segments=ids, num_segments=k), x)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "nbytes"))
    assert stored <= bound * x.size + 4 * n


@pytest.mark.slow
def test_a_traced_epsilon_and_other_options(rng):
    x, *_ = packed(rng)
    norm = partial(jn.standardize, axes=0, segments=IDS, num_segments=K)
    close(jax.jit(lambda x, e: norm(x, epsilon=e))(x, 0.5), norm(x, epsilon=0.5))
    for options in (
        {"correction": 1, "full_range": True},
        {"epsilon_in": "std", "implementation": "reference"},
        {"epsilon_in": "max", "epsilon": 0.9},
    ):
        y = norm(x, **options)
        close(y[IDS == 0], jn.standardize(x[IDS == 0], 0, **options))
    assert jn.plan(x, 0, segments=IDS, num_segments=K).implementation == "xla"


GRAPH = np.array([0.0, 0.3, 0.7, 1.0, 1.2, -0.5], np.float32)


@pytest.mark.parametrize("offset", [0, 1e3])
def test_norms_of_graphs_equal_their_formulas(offset, rng):
    """As PyTorch Geometric writes them, in float64."""
    x = (rng.standard_normal((N, C)) + offset).astype(np.float32)
    by = {"segments": IDS, "num_segments": K}
    scale, bias = rng.uniform(0.5, 1.5, (2, C)).astype(np.float32)
    graph, pair = np.zeros((2, N, C))
    for segment in set(IDS.tolist()):
        own = x[segment == IDS].astype(np.float64)
        part = own - own.mean(0) * GRAPH
        graph[segment == IDS] = part / np.sqrt((part**2).mean(0) + 1e-5) * scale + bias
        rest = own - own.mean(0)
        pair[segment == IDS] = 2 * rest / np.sqrt(1e-5 + (rest**2).sum(1).mean())
    close(jn.graph_norm(x, jnp.asarray(GRAPH), scale=scale, bias=bias, **by), graph)
    close(jn.pair_norm(x, 2.0, **by), pair)
    tokens = jn.layer_norm(x, axes=(-2, -1), scale=scale, bias=bias, **by)
    channels = jn.instance_norm(x, scale=scale, bias=bias, **by)
    own = x[IDS == 4].astype(np.float64)
    close(tokens[IDS == 4], (own - own.mean()) / np.sqrt(own.var() + 1e-6) * scale + bias)
    close(channels[IDS == 4], (own - own.mean(0)) / np.sqrt(own.var(0) + 1e-6) * scale + bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_kept_of_the_mean_is_of_float32(dtype, rng):
    """1 - 2**-10 is 1 in bfloat16."""
    x, kept = rng.standard_normal((N, C)).astype(np.float32) + 1, np.full(C, 2.0**-10)
    np.testing.assert_array_equal(
        jn.graph_norm(x, jnp.asarray(kept, dtype)), jn.graph_norm(x, jnp.asarray(kept, jnp.float32))
    )


def test_what_is_kept_of_the_mean_of_float64_is_of_float64(x64, rng):
    x, scale = jnp.asarray(rng.standard_normal((N, C)) + 1000), np.float32(0.1)
    found = jn.graph_norm(x, jnp.full(C, scale))
    np.testing.assert_array_equal(found, jn.graph_norm(x, jnp.full(C, float(scale))))


@pytest.mark.parametrize("kind", long_sweep(MASKS, quick=MASKS[1:2]))
def test_gradients_of_norms_of_graphs(kind, rng):
    x, where, cotangent = packed(rng, kind)
    parts = {"graph": Part((0,), 0.75, kept=0.25), "pair": Part((0,), summed=(1,))}
    norms = {
        "graph": lambda x, **by: jn.graph_norm(x, jnp.full(C, 0.75), **by),
        "pair": jn.pair_norm,
    }
    for name, norm in norms.items():
        y, pullback = jax.vjp(
            lambda x, norm=norm: norm(x, where=where, segments=IDS, num_segments=K), x
        )
        (dx,) = pullback(jnp.asarray(cotangent))
        for segment in (0, 2, 4):
            at = segment == IDS
            truth = oracle(
                x[at],
                (parts[name],),
                epsilon=1e-5,
                cotangent=cotangent[at],
                where=None if where is None else where[at],
            )
            close(y[at], truth.y)
            close(dx[at], truth.dx, 2e-6)


def test_modules_take_segments(rng):
    x, key = jnp.asarray(packed(rng)[0]), jax.random.key(0)
    by = {"segments": jnp.asarray(IDS), "num_segments": K}
    ones = jnp.ones(C)
    layer = {"reduction_axes": (-2, -1), "feature_axes": -1}
    rows = [
        ("GraphNorm", {}, jn.graph_norm(x, ones, **by)),
        ("PairNorm", {"length": 2.0}, jn.pair_norm(x, 2.0, **by)),
        ("InstanceNorm", {}, jn.instance_norm(x, **by)),
        ("LayerNorm", layer, jn.layer_norm(x, axes=(-2, -1), **by)),
    ]
    for name, options, truth in rows:
        np.testing.assert_array_equal(
            getattr(linen, name)(**options).init_with_output(key, x, **by)[0], truth
        )
        np.testing.assert_array_equal(
            getattr(nnx, name)(C, **options, rngs=flax_nnx.Rngs(0))(x, **by), truth
        )


X, SEGMENTS = np.ones((4, 6), np.float32), np.array([0, 0, 1, 2])
M = jn.moments(X, 0, segments=SEGMENTS, num_segments=3)
WRONG = [
    (
        lambda: jn.moments(X, 0, segments=X[:, 0], num_segments=3),
        TypeError,
        "segments must be integers, an id for each position: got float32.",
    ),
    (
        lambda: jn.moments(X, 0, segments=SEGMENTS),
        TypeError,
        "must be given together: got segments alone. Pass num_segments=..., too.",
    ),
    (
        lambda: jn.standardize(X, 0, num_segments=3),
        TypeError,
        "must be given together: got num_segments alone. Pass segments=..., too.",
    ),
    (
        lambda: jn.moments(X, 0, segments=SEGMENTS, num_segments=3.0),
        TypeError,
        "num_segments must be a static integer: got 3.0 (float).",
    ),
    (
        lambda: jax.jit(lambda k: jn.moments(X, 0, segments=SEGMENTS, num_segments=k))(3),
        TypeError,
        "num_segments must be a static integer",
    ),
    (
        lambda: jn.moments(X, 0, segments=SEGMENTS, num_segments=0),
        ValueError,
        "num_segments must be at least 1: got 0.",
    ),
    (
        lambda: jn.moments(X, 1, segments=SEGMENTS, num_segments=3),
        ValueError,
        "up to the first reduction axis, (6,) or (4, 6): got (4,).",
    ),
    (
        lambda: jn.moments(X, 0, segments=SEGMENTS[:3], num_segments=3),
        ValueError,
        "up to the first reduction axis, (4,): got (3,).",
    ),
    (
        lambda: jn.moments(X, 0, segments=SEGMENTS, num_segments=2),
        ValueError,
        "must be ids from 0 to num_segments - 1 = 1: found 2.",
    ),
    (
        lambda: jn.instance_norm(X, segments=-SEGMENTS, num_segments=3),
        ValueError,
        "must be ids from 0 to num_segments - 1 = 2: found -1.",
    ),
    (
        lambda: jn.moments(X, "(g [n]) c", g=2, segments=SEGMENTS, num_segments=3),
        ValueError,
        "segments must lie along an axis that is not",
    ),
    (
        lambda: jn.normalize(X, M, segments=SEGMENTS),
        TypeError,
        "segments and axes must be given together: got segments alone.",
    ),
    (
        lambda: jn.normalize(X, M, axes=0),
        TypeError,
        "segments and axes must be given together: got axes alone.",
    ),
    (
        lambda: jn.normalize(X[None], M, segments=SEGMENTS, axes=1),
        ValueError,
        "moments have shape (3, 6), x has shape (1, 4, 6).",
    ),
    (
        lambda: jn.graph_norm(X, np.ones(4, "f4")),
        ValueError,
        "mean_scale must have the shape of the feature axes, (6,)",
    ),
    (
        lambda: jn.graph_norm(X, np.ones((4, 6), "f4")),
        ValueError,
        "mean_scale must have the shape of the feature axes, (6,): got (4, 6).",
    ),
    (
        lambda: jn.pair_norm(X, np.ones(6, "f4")),
        ValueError,
        "length must be one number: got shape (6,). Pass a scale",
    ),
    (
        lambda: jn.standardize(X, 0, segments=SEGMENTS, num_segments=3, implementation="native"),
        ValueError,
        "implementation='native' has no kernel for this norm. Leave implementation out.",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)), ids=lambda i: WRONG[i][2][:50])
def test_wrong_calls(case, monkeypatch):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_ids_out_of_range_inside_jit():
    """Found under checkify; else they count for nothing, and give NaN."""
    norm = jax.jit(lambda ids: jn.standardize(X, 0, segments=ids, num_segments=2))
    error, _ = checkify.checkify(norm)(jnp.asarray(SEGMENTS))
    with pytest.raises(
        checkify.JaxRuntimeError, match="must be ids from 0 to num_segments - 1 = 1"
    ):
        error.throw()
    checkify.checkify(norm)(jnp.asarray(SEGMENTS) // 2)[0].throw()
    np.testing.assert_array_equal(
        jnp.isnan(norm(jnp.asarray(SEGMENTS)))[:, 0], [False, False, False, True]
    )
    counted = jax.jit(
        lambda ids: jn.moments(X[None], "b [n] c", segments=ids[None], num_segments=2).count
    )(jnp.asarray(SEGMENTS) - 1)
    np.testing.assert_array_equal(counted[0, :, 0], [1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int64"])
def test_ids_of_any_integer_dtype(dtype, rng, request):
    """With more segments than an id of that dtype can name, too."""
    if dtype == "int64":
        request.getfixturevalue("x64")
    x, ids, more = (
        rng.standard_normal((10, 2)).astype(np.float32),
        np.repeat([50, 3, 120, 0, 7], 2),
        2 ** (17 if dtype == "uint16" else 9),
    )
    calls = (
        lambda ids, k: jn.standardize(x, 0, segments=ids, num_segments=k),
        lambda ids, k: jn.moments(x, 0, segments=ids, num_segments=k).count[:121],
        lambda ids, k: jn.moments(x, "n [c]").merge(0, segments=ids, num_segments=k).count[:121],
    )
    for call in calls:
        of = jax.jit(call, static_argnums=1)
        want = of(ids.astype(np.int32), 121)
        for found in (of(ids.astype(dtype), more), call(ids.astype(dtype), more)):
            np.testing.assert_array_equal(found, want)
        checkify.checkify(lambda ids, of=of: of(ids, more))(jnp.asarray(ids, dtype))[0].throw()


def test_gradients_by_positions_that_belong_to_no_segment():
    """They are 0, whatever stands there; those of the others are what they are without them."""
    x, ids, one = (
        jnp.array([[1.0], [3.0], [5.0], [jnp.nan]]),
        jnp.array([0, 0, 7, -1]),
        jnp.ones((4, 1)),
    )
    for found in (
        lambda x, ids: jn.moments(x, 0, segments=ids, num_segments=2),
        lambda x, ids: jn.moments(
            x[None, ::-1], "b [n] c", segments=ids[None, ::-1], num_segments=2
        ),
        lambda x, ids: jn.moments(x, 0, segments=ids, num_segments=2, where=one),
        lambda x, ids: jn.Moments(one, x, one).merge(0, segments=ids, num_segments=2),
    ):
        mean, var = (
            jax.jit(
                jax.grad(lambda x, ids, name=name, found=found: getattr(found(x, ids), name).sum())
            )
            for name in ("mean", "var")
        )
        np.testing.assert_array_equal(mean(x, ids).ravel(), [0.5, 0.5, 0, 0])
        np.testing.assert_array_equal(var(x, ids).ravel(), [-1, 1, 0, 0])


def test_parameters_behind_a_mask_of_no_segment():
    """Padding has an id out of range and is masked out."""
    x, ids = jnp.array([[1.0], [2.0], [5.0], [3.0], [9.0]]), jnp.array([0, 0, 1, 1, -1])
    slope = jax.jit(
        jax.grad(
            lambda s, ids: jn.instance_norm(
                x, scale=s, segments=ids, num_segments=2, where=(ids >= 0)[:, None]
            )[0, 0]
        )
    )
    np.testing.assert_allclose(slope(jnp.ones(1), ids), [-1], rtol=1e-5)


def test_pair_norm_without_channels_and_of_every_dtype(x64):
    assert jn.pair_norm(jnp.zeros((5, 0), jnp.bfloat16)).shape == (5, 0)
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        for scale in (None, jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float64)):
            found = jn.pair_norm(
                jnp.array([[3.0, 0.0], [-3.0, 8.0]], dtype), 5.0, scale=scale, epsilon=0.0
            )
            assert found.dtype == dtype
            np.testing.assert_allclose(found.astype(jnp.float32), [[3, -4], [-3, 4]], rtol=1e-6)


@pytest.mark.parametrize("masked", [True, False])
def test_segments_of_positions_without_elements(masked):
    x, ids = np.zeros((5, 0), np.float32), np.zeros(5, int)
    options = {
        "segments": ids,
        "num_segments": 2,
        "where": np.ones((5, 1), bool) if masked else None,
    }
    np.testing.assert_array_equal(jn.moments(x, (0, 1), **options).count, np.zeros((2, 1)))
    assert jn.layer_norm(x, axes=(0, 1), **options).shape == (5, 0)


@pytest.mark.slow
def test_groups_of_devices_of_unequal_sizes(rng):
    """Output, gradient and Moments of a segment are those of the rows of its group of devices."""
    groups = [[0, 3, 5], [1, 2], [4], [6, 7]]
    x, where, ids = (
        rng.standard_normal((8, 6, 3)).astype(np.float32),
        rng.random((8, 6, 3)) < 0.7,
        rng.integers(0, 4, (8, 6)),
    )
    cotangent = rng.standard_normal(x.shape).astype(np.float32)

    def run(x, where, ids, cotangent, axis_name=None):
        by = {"where": where, "segments": ids, "num_segments": 4, "axis_name": axis_name}
        y, pullback = jax.vjp(lambda x: jn.standardize(x, 0, **by, epsilon=0.1), x)
        return y, pullback(cotangent)[0], jn.moments(x, 0, **by)

    y, dx, found = jax.pmap(
        partial(run, axis_name=jn.AxisGroups("d", groups)), axis_name="d", devices=HOST
    )(x, where, ids, cotangent)
    for group in groups:
        whole = [np.concatenate(a[group]) for a in (x, where, ids, cotangent)]
        truth = jax.jit(run)(*whole)
        np.testing.assert_allclose(np.concatenate(np.asarray(y)[group]), truth[0], atol=1e-6)
        np.testing.assert_allclose(np.concatenate(np.asarray(dx)[group]), truth[1], atol=1e-6)
        for device in group:
            np.testing.assert_array_equal(found.count[device], truth[2].count)
            np.testing.assert_allclose(found.mean[device], truth[2].mean, atol=1e-6)
            np.testing.assert_allclose(found.var[device], truth[2].var, atol=1e-6)
