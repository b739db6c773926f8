"""Test hard inputs, however data are cut.

Over devices, microbatches and segments, a norm equals the norm of all data in one piece
in float64.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from conftest import compiled
from cut_inputs import Data, K, N, by_input, data, ids_of
from cuts import MESH, WAYS, Piece, applied_to_segments, merged, pieces, shard_map
from derivatives import check_derivatives
from hard import B32
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxnorm as jn

OVER_DEVICES = 1e-6  # of outputs
B64 = (1e-15, 2e-15)  # output, gradient
# of float32, whose smallest normal number is a millionth of the other
LAST_BIT, TINY = 2.0**-24, 1.2e-32
RUNS = [(way, masked) for way in WAYS for masked in (True, False)]
QUICK = {("devices", True), ("merge", True)}
BY_NAME = {way.name: way for way in WAYS}
FAMILIES = [name.removeprefix("nnx_") for name in BY_NAME if name.startswith("nnx_")]
HALF_WAYS = long_sweep(
    [way for way in WAYS if way.fused or way.run in (merged, applied_to_segments)], quick=[]
)


@pytest.fixture(autouse=True)
def _compile(request):
    """As users have it, but in the long sweeps, which would take twice as long."""
    with compiled(quickly=request.node.get_closest_marker("slow") is not None):
        yield


def by_way(applies):
    """Every way that a law applies to, with masks and without."""
    runs = [run for run in RUNS if applies(run[0])]
    quick = [run for run in runs if (str(run[0]), run[1]) in QUICK]
    names = {True: "masked", False: "plain"}
    return pytest.mark.parametrize(
        ("way", "masked"),
        long_sweep(runs, quick=quick),
        ids=lambda value: names.get(value, str(value)),
    )


@dataclass(frozen=True)
class Found:
    """What was given, what came out, and the truth: of the statistics, and of the outputs."""

    given: Data
    y: np.ndarray
    moments: jn.Moments | None
    running: tuple | None
    dx: np.ndarray
    params: tuple[np.ndarray, np.ndarray]
    truths: tuple[Piece, ...]
    outputs: tuple[Piece, ...]


@cache
def found(way, masked, epsilon=1e-5, dtype="float32"):
    """Of all hard inputs in one program."""
    given = data(masked, dtype, way.fold, way.segments, way.over_devices)

    @jax.jit
    def run(x, where, scale, bias, cotangent):
        y, back, rest = jax.vjp(
            lambda *a: way.run(*a, where, epsilon), x, scale, bias, has_aux=True
        )
        return y, rest, back(cotangent.astype(y.dtype))

    y, statistics, (dx, *params) = jax.tree.map(
        np.asarray, run(given.x, given.where, given.scale, given.bias, given.cotangent)
    )
    of = partial(pieces, given, fold=way.fold, part=way.part, epsilon=epsilon)
    truths = tuple(of(way.labels(), bounds=way.bounds))
    outputs = truths if way.whole else tuple(of(way.labels(outputs=True)))
    return Found(
        given, by_input(y, way.fold), *statistics, by_input(dx, way.fold), params, truths, outputs
    )


def error(got, want, size):
    """The largest, relative to a size; NaN where there is none."""
    gap = np.abs(np.asarray(got, np.float64) - want).max(initial=0)
    return 0.0 if gap == 0 else gap / size


def wrong(errors, bound):
    """Those that are not below the bound, by input and segment: a NaN is not."""
    return {tuple(key): worst for *key, worst in errors if not worst <= bound}


def of_outputs(y, truths):
    for piece in truths:
        if piece.is_finite:
            want = piece.y[piece.shown]
            yield (
                piece.name,
                piece.label,
                error(y[piece.row, piece.at][piece.shown], want, np.abs(want).max(initial=0)),
            )


def of_gradients(dx, truths):
    for piece in truths:
        if piece.is_finite:
            yield piece.name, piece.label, error(dx[piece.row, piece.at], piece.dx, piece.dx_size)


def counted(given, way):
    """By input and position, whether it is finite or hidden: a microbatch that is neither is left
    out of running statistics.
    """
    x = by_input(given.x, way.fold)
    return (
        np.isfinite(x) if given.where is None else np.isfinite(x) | ~by_input(given.where, way.fold)
    )


def of_params(params, truths):
    """Measured by the sums of the sizes, since the sums may cancel; that of a constant's scale by
    the sizes of the cotangents.
    """
    for row in {piece.row for piece in truths}:
        own = [piece for piece in truths if piece.row == row]
        if all(piece.is_finite for piece in own):
            dscale, dbias = (
                np.concatenate([getattr(piece, which).ravel() for piece in own])
                for which in ("dscale", "dbias")
            )
            size = np.abs(dbias).sum()
            yield (
                own[0].name,
                "dscale",
                error(params[0][row], dscale.sum(), np.abs(dscale).sum() or size),
            )
            yield own[0].name, "dbias", error(params[1][row], dbias.sum(), size)


def of_moments(moments, fold, truths):
    for piece in truths:
        if piece.is_finite:
            at = (piece.label, piece.row) if fold == 1 else (piece.row, piece.label, 0)
            count, mean, low, var = (
                float(leaf[at])
                for leaf in (moments.count, moments.mean, moments.low.mean, moments.var)
            )
            # of a constant to the last bit of float32
            size = np.sqrt(piece.var) or LAST_BIT * abs(piece.mean)
            key = piece.name, piece.label
            yield *key, "count", abs(count - piece.count)
            yield *key, "mean", error(mean + low, piece.mean, size)
            yield *key, "var", error(var, piece.var, max(size**2, TINY))


def of_running(running, truths):
    """Blended once, from 0 and 1, by a momentum of 0.9; of what is empty or not finite: kept."""
    for piece in truths:
        known = piece.is_finite and piece.count > 0
        mean, var = (0.1 * piece.mean, 0.9 + 0.1 * piece.var) if known else (0.0, 1.0)
        deviation = np.sqrt(piece.var) if known else 0.0
        yield piece.name, "mean", error(running[0][piece.row], mean, abs(mean) + deviation)
        yield (
            piece.name,
            "var",
            error(running[1][piece.row], var, var + (LAST_BIT * mean) ** 2 * (deviation == 0)),
        )


@by_way(lambda way: True)
def test_outputs(way, masked):
    """Of constants and of one element the bias, where a group is normalized at once; what is hidden
    gives 0.
    """
    run = found(way, masked)
    assert wrong(of_outputs(run.y, run.outputs), OVER_DEVICES if way.over_devices else B32[0]) == {}
    for piece in run.outputs:
        if way.fused and piece.var == 0:
            want = np.where(piece.shown, piece.bias.astype(np.float32), 0)
            np.testing.assert_array_equal(run.y[piece.row, piece.at], want, err_msg=piece.name)
        assert piece.is_finite or not np.isfinite(run.y[piece.row, piece.at]).all()
    if masked:
        assert not run.y[~by_input(run.given.where, way.fold)].any()


@by_way(lambda way: True)
def test_gradients(way, masked):
    """Finite of what is finite; 0 of what is hidden."""
    run = found(way, masked)
    own = counted(run.given, way)
    whole = [piece for piece in run.outputs if piece.is_finite and own[piece.row, piece.at].all()]
    assert (
        wrong(
            of_gradients(run.dx, [piece for piece in whole if way.fused or piece.var > 0]), B32[1]
        )
        == {}
    )
    assert all(np.isfinite(run.dx[piece.row, piece.at]).all() for piece in whole)
    if masked:
        assert not run.dx[~by_input(run.given.where, way.fold)].any()
    if way.fold == 1:
        assert (
            wrong(
                of_params(run.params, [piece for piece in run.outputs if own[piece.row].all()]),
                B32[1],
            )
            == {}
        )


@by_way(lambda way: way.statistics)
def test_statistics(way, masked):
    """Counts are exact, means to a part of the deviation; all of an empty segment is 0."""
    run = found(way, masked)
    if (moments := run.moments) is not None:
        assert wrong(of_moments(moments, way.fold, run.truths), 1e-6) == {}
        assert moments.mean.shape[way.fold - 1] == (K if way.segments else 1)
        assert not way.segments or not any(
            np.take(leaf, 3, way.fold - 1).any()
            for leaf in (moments.count, moments.mean, moments.var)
        )
    if run.running is not None:
        assert wrong(of_running(run.running, run.truths), B32[0]) == {}


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_both_families_give_the_same_bits(name, masked):
    one, other = (found(BY_NAME[f"{family}_{name}"], masked) for family in ("linen", "nnx"))
    np.testing.assert_array_equal(one.y, other.y)
    for mine, same in zip(one.running or (), other.running or (), strict=True):
        np.testing.assert_array_equal(mine, same)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way.fused], ids=str)
def test_with_the_smallest_epsilon(way):
    """With which data of size 1e-20 are normalized to 1, and every group is divided by a power of
    two.
    """
    run = found(way, True, epsilon=1e-45)
    varied = [piece for piece in run.outputs if piece.var > 0 and piece.count >= 8]
    assert wrong(of_outputs(run.y, varied), OVER_DEVICES if way.over_devices else B32[0]) == {}
    assert wrong(of_gradients(run.dx, varied), B32[1]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_float64(way, x64):
    """To its own digits, about means of up to 1e8."""
    run = found(way, True, dtype="float64")
    assert run.y.dtype == run.dx.dtype == jnp.float64
    own = counted(run.given, way)
    varied = [piece for piece in run.outputs if piece.var > 0 and own[piece.row, piece.at].all()]
    assert wrong(of_outputs(run.y, varied), B64[0]) == {}
    assert wrong(of_gradients(run.dx, varied), B64[1]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_derivatives_of_both_modes_and_two_orders(way, rng, x64):
    """With masks that leave some groups empty, and NaN behind them."""
    given = data(True, "float64", way.fold, way.segments)
    x, weights = rng.standard_normal((2, *given.x.shape))
    hidden = np.where(given.where, 0, np.nan)

    def call(x):
        return jnp.sin(way.run(x + hidden, given.scale, given.bias, given.where, 1e-5)[0]) * weights

    check_derivatives(call, (x,))


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if not way.segments], ids=str)
def test_an_empty_batch(way):
    """Parameters have gradients of 0, Moments counts of 0; running statistics are what they were, 0
    and 1.
    """
    given = data(True)
    call = lambda scale, bias: way.run(given.x[:0], scale, bias, given.where[:0], 1e-5)
    y, back, (moments, running) = jax.vjp(call, given.scale, given.bias, has_aux=True)
    assert y.shape == (0, len(given.names))
    assert not any(np.asarray(gradient).any() for gradient in back(y))
    assert moments is None or not np.asarray(moments.count).any()
    if running is not None:
        np.testing.assert_array_equal(
            running, np.stack([np.zeros(y.shape[1]), np.ones(y.shape[1])])
        )


def of_rounding(found, truth, dtype):
    """By how much it is beyond half a unit in the last place, relative to the largest."""
    info = jnp.finfo(dtype)
    spacing = 2.0 ** np.floor(np.log2(np.maximum(np.abs(truth), float(info.tiny)))) * float(
        info.eps
    )
    return error(
        np.maximum(np.abs(found.astype(np.float64) - truth) - spacing / 2, 0),
        0,
        np.abs(truth).max(initial=0),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", HALF_WAYS, ids=str)
def test_half_precision_is_rounded_once(way, dtype):
    """Gradients too, but for those through Moments, which are the sum of two. Of 3e38 they are
    below the smallest normal number, and
    the variance beyond the largest: only what is normalized at once gives such an output.
    """
    run = found(way, True, dtype=dtype)
    assert run.y.dtype == jnp.dtype(dtype)
    arrays = {"y": run.y, "dx": run.dx} if way.fused else {"y": run.y}
    for piece in run.outputs:
        for name, array in arrays.items():
            huge = piece.var > 1e38
            if (
                piece.is_finite
                and piece.var > 0
                and piece.count >= 8
                and not (huge and (name == "dx" or not way.fused))
            ):
                shown, truth = (
                    array[piece.row, piece.at][piece.shown],
                    getattr(piece, name)[piece.shown],
                )
                assert of_rounding(shown, truth, dtype) <= B32[name == "dx"], (
                    name,
                    piece.name,
                    piece.label,
                )


@cache
def program():
    """Devices, microbatches, segments and masks at once: by Moments that are merged, and in one."""

    def local(x, where, ids, parts):
        by = {"segments": ids, "num_segments": K}
        each = jax.vmap(
            lambda part: jn.moments(x, 0, where=where & (parts == part)[:, None], **by)
        )(jnp.arange(3))
        whole = jax.tree.map(lambda leaf: leaf[0], each.merge(0, axis_name="d"))
        y = jn.normalize(x, whole, segments=ids, axes=0, where=where)
        return y, jn.standardize(x, 0, where=where, axis_name="d", **by)

    mapped = shard_map(local, mesh=MESH, in_specs=P("d"), out_specs=P("d"))

    @jax.jit
    def run(x, where, ids, parts, cotangent):
        ys, back = jax.vjp(lambda x: mapped(x, where, ids, parts), x)
        return [
            (
                y,
                back(tuple(cotangent if i == j else jnp.zeros_like(cotangent) for j in range(2)))[
                    0
                ],
            )
            for i, y in enumerate(ys)
        ]

    return run


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, K),
    st.integers(1, 3),
    st.sampled_from([0.2, 0.8, 1.0]),
    st.sets(st.integers(0, 7), max_size=7),
)
def test_however_the_whole_is_cut(seed, segments, parts, density, dark):
    """At random over devices, some of which are masked out whole, microbatches and segments."""
    rng = np.random.default_rng(seed)
    clean = data(False)
    order = rng.permutation(N)
    where = (rng.random(clean.x.shape) < density) & ~np.isin(np.arange(N) // (N // 8), list(dark))[
        :, None
    ]
    ids, microbatches = rng.integers(0, segments, N), rng.integers(0, parts, N)
    cut = replace(
        clean,
        x=clean.x[order],
        where=where,
        scale=np.ones_like(clean.scale),
        bias=np.zeros_like(clean.bias),
    )
    truths = [piece for piece in pieces(cut, ids) if piece.var > 0]
    merged_parts, at_once = program()(
        np.where(where, cut.x, np.nan), where, ids, microbatches, cut.cotangent
    )
    for y, dx in (merged_parts, at_once):
        assert wrong(of_outputs(by_input(y, 1), truths), OVER_DEVICES) == {}
        assert wrong(of_gradients(by_input(dx, 1), truths), OVER_DEVICES) == {}
        assert not np.asarray(y)[~where].any()
        assert not np.asarray(dx)[~where].any()


COMPLEX = {
    "instance": partial(jn.instance_norm, epsilon=1e-5),
    "layer": partial(jn.layer_norm, axes=(0, 1), epsilon=1e-5),
    "graph": lambda x, **options: jn.graph_norm(x, jnp.ones(3), **options),
    "pair": jn.pair_norm,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "masked"), list(product(COMPLEX, [True, False])))
def test_segments_of_complex_numbers(name, masked, rng):
    """The variance is that of the absolute value."""
    ids, where = ids_of(N), rng.random((N, 1)) < (0.7 if masked else 1)
    x = (rng.standard_normal((N, 3)) + 1j * rng.standard_normal((N, 3)) + 1e3).astype(np.complex64)
    given = np.where(where, x, np.complex64(np.nan))
    y = np.asarray(
        jax.jit(
            lambda x: COMPLEX[name](
                x, where=where if masked else None, segments=ids, num_segments=K
            )
        )(given)
    )
    assert y.dtype == np.complex64
    for segment in set(ids.tolist()):
        at = (ids == segment) & where[:, 0]
        own = x[at].astype(np.complex128)
        if len(own):
            rest = own - own.mean(None if name == "layer" else 0)
            square = np.abs(rest) ** 2
            var = {"layer": square.mean, "pair": square.sum(1).mean}.get(
                name, partial(square.mean, 0)
            )()
            assert (
                np.abs(y[at] - rest / np.sqrt(var + 1e-5)).max() <= B32[0] * np.sqrt(len(own)) * 2
            )
    assert not y[~where[:, 0]].any()
