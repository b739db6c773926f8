"""Test laws of results, however data are cut.

The laws are of eager calls, of scaled and shifted data, and of groups that do not
divide the channels.
"""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from cut_inputs import K, N, data, folded, ids_of
from cuts import MESH, WAYS, shard_map
from flax.nnx import Rngs
from hard import B32
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from jaxnorm import linen, nnx, online

EPSILON = 1e-5
NO_DIVISOR, TOO_FEW = (
    "g={0} must divide the size of its axis: {0} against 6.",
    "the size of 'g' must be at least 1: got {0}.",
)


def finite(way):
    """With masks, without the inputs that are not finite where they count, and without constants
    for Moments, whose gradients are noise.

    Behind the masks is NaN for what is normalized at once, and 1e30 for what is sliced before,
    which is where NaN would raise.
    """
    given = data(True, fold=way.fold, segments=way.segments, shuffled=way.over_devices)
    inputs = 1 if way.fold == 1 else 0
    others = tuple(axis for axis in range(given.x.ndim) if axis != inputs)
    keep = (np.isfinite(given.x) | ~given.where).all(others)
    keep &= [way.fused or not name.startswith(("constant", "one_left")) for name in given.names]
    x, where, cotangent = (
        np.compress(keep, a, inputs) for a in (given.x, given.where, given.cotangent)
    )
    params = (given.scale, given.bias) if way.fold > 1 else (given.scale[keep], given.bias[keep])
    x = np.where(
        where,
        x,
        np.float32(np.nan if way.fused and not way.over_devices and not way.bounds else 1e30),
    )
    return replace(given, x=x, where=where, cotangent=cotangent, scale=params[0], bias=params[1])


def run(way, x, scale, bias, where, cotangent, epsilon=EPSILON):
    y, back, _ = jax.vjp(
        lambda x, scale, bias: way.run(x, scale, bias, where, epsilon), x, scale, bias, has_aux=True
    )
    return y, *back(cotangent.astype(y.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_eager_calls_are_those_of_jit(way):
    """And raise nothing under debug_nans and debug_infs, whatever is behind the mask."""
    given = finite(way)
    arguments = tuple(
        map(jnp.asarray, (given.x, given.scale, given.bias, given.where, given.cotangent))
    )
    with jax.debug_nans(True), jax.debug_infs(True):
        eager = run(way, *arguments)
    jitted = jax.jit(lambda *a: run(way, *a))(*arguments)
    for one, other, bound in zip(eager, jitted, (B32[0], *3 * (B32[1],)), strict=True):
        size = np.abs(np.asarray(other)).max(
            axis=-2 if way.fold > 1 and np.ndim(other) == 3 else 0, keepdims=True
        )
        assert (np.abs(one - np.asarray(other)) <= 2 * bound * size).all()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_scale_and_a_shift_of_the_data(way, rng):
    """y(a x + b) = sign(a) y(x), where epsilon is scaled as well, and their gradients."""
    given = data(True, fold=way.fold, segments=way.segments)
    x = folded(
        np.round(8 * rng.standard_normal((N, len(given.names)))).astype(np.float32) / 8, way.fold
    )
    by, shift = -4.0, 1024.0  # without rounding
    y, dx, dscale, dbias = jax.jit(lambda *a: run(way, *a))(
        x, given.scale, given.bias, given.where, given.cotangent
    )
    moved = jax.jit(lambda *a: run(way, *a, epsilon=by**2 * EPSILON))(
        np.float32(by) * x + np.float32(shift),
        -given.scale,
        given.bias,
        given.where,
        given.cotangent,
    )
    for one, other, bound in zip(
        moved, (y, dx / by, -dscale, dbias), (B32[0], *3 * (B32[1],)), strict=True
    ):
        assert np.abs(one - np.asarray(other)).max() <= bound * np.abs(np.asarray(other)).max()


EXPLICIT = jax.make_mesh((2,), ("m",), devices=HOST[:2], axis_types=(AxisType.Explicit,))
# not by JAX if rows are sharded
SLICED = {"merge", "stages", "segments_of_microbatches", "linen_accumulate", "nnx_accumulate"}
# which is tried below, without jax.vmap of its checks
ON_ONE = [way for way in WAYS if not way.over_devices and way.name != "online"]
PLACED = [
    (way, axis)
    for way in ON_ONE
    for axis in ("rows", "inputs")
    if axis == "inputs" or way.name not in SLICED
]


@cache
def on_one_device(way):
    """As many inputs as two devices share, and what comes of them."""
    given, inputs = finite(way), 1 if way.fold == 1 else 0
    even = range(given.x.shape[inputs] // 2 * 2)
    take = lambda a: (
        np.take(a, even, inputs if a.ndim > 1 else 0) if a.ndim > 1 or way.fold == 1 else a
    )
    arrays = [take(a) for a in (given.x, given.scale, given.bias, given.where, given.cotangent)]
    return arrays, jax.jit(lambda *a: run(way, *a))(*arrays)


@pytest.mark.parametrize(
    ("way", "axis"), long_sweep(PLACED, quick=[(ON_ONE[0], "inputs")]), ids=str
)
def test_explicitly_sharded_rows_and_inputs(way, axis):
    """Outputs and gradients are those of arrays on one device, and lie as x does."""
    arrays, truth = on_one_device(way)
    x, (rows, inputs) = arrays[0], (0, 1) if way.fold == 1 else (1, 0)
    spec = P(
        *(
            "m" if position == (rows if axis == "rows" else inputs) else None
            for position in range(x.ndim)
        )
    )
    with jax.set_mesh(EXPLICIT):
        placed = [
            jax.device_put(a, NamedSharding(EXPLICIT, spec if a.ndim == x.ndim else P(None)))
            for a in arrays
        ]
        found = jax.jit(lambda *a: run(way, *a))(*placed)
    assert [jax.typeof(a).sharding.spec for a in found[:2]] == [spec, spec]
    # that parameters' gradients are sums of
    terms = np.sqrt((arrays[-1] ** 2).sum(axis=0 if way.fold == 1 else (0, 1)))
    for one, other, bound in zip(found, truth, (B32[0], *3 * (B32[1],)), strict=True):
        size = (
            np.abs(np.asarray(other)).max(axis=rows, keepdims=True) if np.ndim(other) > 1 else terms
        )
        assert (np.abs(np.asarray(one) - np.asarray(other)) <= 2 * bound * size).all()


SPECS = [(spec, how) for spec in (P("m", None), P(None, "m")) for how in ("jit", "eager")]


@pytest.mark.parametrize(("spec", "how"), long_sweep(SPECS, quick=SPECS[3:]), ids=str)
def test_states_that_are_whole_merge_what_is_explicitly_sharded(spec, how, rng):
    """And stay whole."""
    x, zeros = rng.standard_normal((24, 6)).astype(np.float32), online.init(jnp.zeros(6))

    def follow(state, x):
        state = online.update(state, x)
        return state, jn.merge(zeros, jn.moments(x, 0)), online.normalize(x, state)

    truth = follow(zeros, x)
    with jax.set_mesh(EXPLICIT):
        found = (jax.jit(follow) if how == "jit" else follow)(
            zeros, jax.device_put(x, NamedSharding(EXPLICIT, spec))
        )
    assert jax.typeof(found[0].mean).sharding.spec == P(None)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("groups", "message"), [(4, NO_DIVISOR), (7, NO_DIVISOR), (0, TOO_FEW), (-1, TOO_FEW)]
)
@pytest.mark.parametrize("over_devices", [True, False], ids=["devices", "whole"])
def test_groups_that_do_not_divide(groups, message, over_devices, rng):
    """The error has both numbers."""
    x = rng.standard_normal((N, 6)).astype(np.float32)

    def local(x, ids):
        by = {"segments": ids, "num_segments": K, "axis_name": "d" if over_devices else None}
        return jn.standardize(x, "[n] (g [c])", g=groups, **by)

    with pytest.raises(ValueError, match=re.escape(message.format(groups))):
        (shard_map(local, mesh=MESH, in_specs=P("d"), out_specs=P("d")) if over_devices else local)(
            x, ids_of(N)
        )


X, IDS = np.ones((8, 6), np.float32), np.zeros(8, np.int32)
BY = {"segments": IDS, "num_segments": 1}
WITH_AXES = {
    "whole": lambda axes: jn.moments(X, axes),
    "segments": lambda axes: jn.standardize(X, axes, **BY),
    "devices": lambda axes: shard_map(
        lambda x: jn.standardize(x, axes, axis_name="d"),
        mesh=MESH,
        in_specs=P("d"),
        out_specs=P("d"),
    )(X),
    "microbatches": lambda axes: jn.moments(X, 0).merge(axes),
    "linen": lambda axes: linen.LayerNorm(reduction_axes=axes).init_with_output(
        jax.random.key(0), X, **BY
    ),
    "nnx": lambda axes: nnx.LayerNorm(6, reduction_axes=axes, rngs=Rngs(0))(X, **BY),
}
MISTAKES = [
    (5, r"must lie in \[-2, 2\) for an array of rank 2: got axis 5"),
    (-3, "got axis -3"),
    ((0, -2), "must not repeat an axis: got"),
]


@pytest.mark.parametrize(("axes", "message"), MISTAKES, ids=str)
@pytest.mark.parametrize("way", WITH_AXES)
def test_axes_that_are_not_there(way, axes, message):
    with pytest.raises(ValueError, match=message):
        WITH_AXES[way](axes)


@pytest.mark.parametrize("momentum", [-0.1, 1.5, np.nan])
@pytest.mark.parametrize("family", ["linen", "nnx", "online"])
def test_momentum_of_accumulated_microbatches(family, momentum):
    def run():
        if family == "online":
            return online.debiased(momentum, 1)
        if family == "nnx":
            norm = nnx.BatchNorm(6, momentum=momentum, rngs=Rngs(0))
            nnx.accumulate(norm)
            return norm(X)
        norm = linen.BatchNorm(use_running_average=False, momentum=momentum)
        variables = linen.accumulate(norm.init(jax.random.key(0), X))
        return norm.apply(variables, X, mutable=["batch_stats", "batch_moments"])

    with pytest.raises(ValueError, match="momentum must"):
        run()
