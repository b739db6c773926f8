"""Test exported programs, for sizes that are unknown before they run or for other devices."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_cases
from cases import BY_NAME, DISTINCT, long_sweep
from flax import nnx

import jaxnorm as jn
from jaxnorm import linen

SYMBOLIC = {
    "layer": "b, 77",
    "layer_hwc": "b, 4, 5, 6",
    "rms": "b, 77",
    "batch": "b, 5",
    "batch_conv": "b, h, h + 1, 8",
    "batch_nchw": "b, 8, h, h",
    "instance": "b, h, h, 4",
    "group": "b, h, h, 8",
    "group_nchw": "b, 8, h",
    "switchable": "b, h, h, 4",
    "graph": "b, h, 4",
    "pair": "b, h, 4",
}
# the last of them large enough for other loops
SIZES = [{"b": 5, "h": 3}, {"b": 7, "h": 8}, {"b": 40, "h": 33}]
# of the largest number: as far as two ways to compute the same may differ
NEAR = {"float32": 3e-6, "bfloat16": 1e-2}


SCOPE = jax.export.SymbolicScope()


def exported(function, shape, *dtypes):
    """The program for an array of this shape, or several alike but in dtype, as it is read from a
    file.
    """
    structs = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=SCOPE), dtype)
        for dtype in dtypes
    ]
    return from_bytes(function, *structs)


def from_bytes(function, *arguments):
    return jax.export.deserialize(
        jax.export.export(jax.jit(function), platforms=["cpu"])(*arguments).serialize()
    )


def concrete(shape, sizes):
    return tuple(eval(size, {}, sizes) for size in shape.split(","))


def assert_near(found, wanted, bound):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert got.shape == want.shape
        np.testing.assert_allclose(
            got, want, rtol=0, atol=bound * max(1, np.abs(want).max(initial=0))
        )


@pytest.mark.parametrize("dtype", long_sweep(["float32", "bfloat16"], quick=["float32"]))
@pytest.mark.parametrize("name", long_sweep(SYMBOLIC, quick=["batch_conv"]))
def test_norms_and_their_gradients_of_any_size(name, dtype, rng):
    case = BY_NAME[name]
    scale, bias = (jnp.asarray(p, dtype) for p in case.params(rng))

    def both(x, weights):
        y, back = jax.vjp(lambda *a: case(a[0], scale=a[1], bias=a[2]), x, scale, bias)
        return y, back(weights)

    program = exported(both, SYMBOLIC[name], dtype, dtype)
    for size in SIZES:
        x, weights = (
            jnp.asarray(rng.standard_normal(concrete(SYMBOLIC[name], size)) + 2, dtype)
            for _ in range(2)
        )
        given = [np.asarray(a, np.float64) for a in (x, scale, bias, weights)]
        truth = case.resized(x.shape).truth(
            given[0], **dict(zip(("scale", "bias", "cotangent"), given[1:], strict=True))
        )
        assert_near(
            program.call(x, weights), (truth.y, (truth.dx, truth.dscale, truth.dbias)), NEAR[dtype]
        )


@pytest.mark.parametrize("name", long_sweep(SYMBOLIC, quick=["layer", "batch_conv", "group"]))
def test_sets_of_one_number(name):
    shape = SYMBOLIC[name].replace("h + 1", "h")
    x = jnp.full(concrete(shape, {"b": 1, "h": 1}), 3.0)
    np.testing.assert_array_equal(
        exported(BY_NAME[name], shape, "float32").call(x), BY_NAME[name](x)
    )


@pytest.mark.slow
def test_exports_of_masks_weights_and_merged_axes(rng):
    def norms(x, weights):
        return (
            jn.standardize(x, (0, 1), where=weights > 0.5),
            jn.standardize(x, (0, 1), where=weights, correction=1),
            jn.standardize(x, "(k [n]) [h] c", k=4, epsilon_in="std"),
            jn.standardize(x, (1, 2), full_range=True),
            jn.normalize(x, jn.moments(x, 0)),
            jn.merge(jn.moments(x, (0, 1)), jn.moments(2 * x, (0, 1))),
        )

    program = exported(norms, "4 * b, h, 3", "float32", "float32")
    for shape in ((8, 5, 3), (80, 65, 3)):
        x, weights = (
            jnp.asarray(rng.standard_normal(shape), jnp.float32),
            jnp.asarray(rng.uniform(size=shape), jnp.float32),
        )
        assert_near(program.call(x, weights), jax.jit(norms)(x, weights), 3e-6)


@pytest.mark.parametrize("by_row", long_sweep([False, True], quick=[False]))
def test_segments_of_any_length(by_row, rng):
    def norms(x, ids):
        by, axes = {"segments": ids, "num_segments": 4}, 1 if by_row else 0
        found = jn.moments(x, axes, **by)
        both = jax.value_and_grad(lambda x: jnp.sin(jn.standardize(x, axes, **by)).sum())(x)
        return both, found, jn.Moments(jnp.ones_like(x), x, x * x).merge(axes, **by)

    x_shape, ids_shape = ("b, t, 3", "b, t") if by_row else ("t, 3", "t")
    structs = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=SCOPE), kind)
        for shape, kind in ((x_shape, "f4"), (ids_shape, "i4"))
    ]
    program = jax.export.export(jax.jit(norms), platforms=["cpu"])(*structs)
    for sizes in ({"b": 2, "t": 5}, {"b": 3, "t": 700}):
        x = jnp.asarray(rng.standard_normal(concrete(x_shape, sizes)) + 2, jnp.float32)
        ids = jnp.asarray(
            rng.integers(0, 4, concrete(ids_shape, sizes) if by_row else (sizes["t"],)), jnp.int32
        )
        assert_near(program.call(x, ids), jax.jit(norms)(x, ids), 3e-6)


NETWORKS = [
    case for case in recurrent_cases.CASES if case.placement == "ba2016" and case.norm != "rms"
]
OF_ANY_LENGTH = [(case, "b, t, 3") for case in NETWORKS]
OF_ANY_LENGTH += [
    (case, shape) for case in NETWORKS if case.projection for shape in ("b, 9, 3", "5, t, 3")
]


@pytest.mark.parametrize(
    ("case", "shape"), long_sweep(OF_ANY_LENGTH, quick=OF_ANY_LENGTH[:1]), ids=str
)
def test_networks_and_their_gradients_of_any_length(case, shape, rng):
    params = case.params()

    def both(x):
        outputs, back = jax.vjp(lambda params, x: case.call(x, params)[1], params, x)
        return outputs, back(jnp.cos(outputs))

    program = exported(both, shape, "float32")
    for size in ({"b": 2, "t": 1}, {"b": 5, "t": 12}):
        x = jnp.asarray(rng.standard_normal(concrete(shape, size)), jnp.float32)
        assert_near(program.call(x), jax.jit(both)(x), 2e-5)


def test_modules_of_any_batch(rng):
    module = linen.BatchNorm(use_running_average=False)
    state = module.init(jax.random.key(0), jnp.ones((2, 3, 8)))
    layer = nnx.split(jn.nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(0)))
    x = jnp.asarray(rng.standard_normal((11, 4, 8)), jnp.float32)
    for call in (
        lambda x: module.apply(state, x, mutable=["batch_stats"]),
        lambda x: nnx.merge(*layer)(x),
    ):
        assert_near(exported(call, "b, t, 8", "float32").call(x), call(x), 3e-6)


X, IDS = (
    np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32),
    np.array([0, 1, 1, 2, 2, 2]),
)
LSTM_PARAMS = jax.tree.map(np.asarray, recurrent_cases.Case("lstm").params())
CHECKED = {
    "batch norm in evaluation": (
        lambda x, var: linen.BatchNorm(use_running_average=True).apply(var, x),
        X,
        None,
    ),
    "weights": (lambda x, where: jn.layer_norm(x, where=where), X, np.abs(X)),
    "weights of moments": (lambda x, where: jn.moments(x, 0, where=where), X, np.abs(X)),
    "given moments": (jn.normalize, X, jn.Moments(np.float32(1), X[:1], np.abs(X[:1]))),
    "segments": (lambda x, ids: jn.standardize(x, "n [t] c", segments=ids, num_segments=3), X, IDS),
    "epsilon": (lambda x, epsilon: jn.rms_norm(x, epsilon=epsilon), X, np.float32(0.1)),
    "momentum": (
        lambda x, momentum: jn.ema(jn.moments(x, 0), jn.moments(-x, 0), momentum=momentum),
        X,
        np.float32(0.5),
    ),
    "lengths": (
        lambda x, lengths: jn.recurrent.lstm(x, LSTM_PARAMS, lengths=lengths)[1],
        X[..., :3],
        np.array([6, 0, 3, 1]),
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_programs_that_check_values_can_be_saved(name):
    """Of running variance, weights, ids and lengths, which checkify looks at, and of Moments."""
    call, x, value = CHECKED[name]
    value = (
        linen.BatchNorm(use_running_average=True).init(jax.random.key(0), x)
        if value is None
        else value
    )
    assert_near(from_bytes(call, x, value).call(x, value), jax.jit(call)(x, value), 1e-6)


def test_kernels_take_no_symbolic_sizes():
    with pytest.raises(
        ValueError, match=r"implementation='native' takes no symbolic sizes: got \(b, 8\)"
    ):
        exported(lambda x: jn.standardize(x, -1, implementation="native"), "b, 8", "float32")


LSTM = recurrent_cases.Case("lstm"), recurrent_cases.Case("lstm", None)
WITH_KERNELS = {
    **{case.name: (case, case.shape) for case in DISTINCT if case.kernel},
    "many positions": (BY_NAME["batch_conv"], (2, 40, 40, 8)),
    **{
        str(case): (
            lambda x, case=case: case.call(x, case.params(x.dtype))[1],
            (5, 9, recurrent_cases.FEATURES),
        )
        for case in LSTM
    },
}


@pytest.mark.parametrize(
    ("vmapped", "dtype"),
    long_sweep(product([False, True], ["float32", "bfloat16"]), quick=[(False, "float32")]),
)
@pytest.mark.parametrize("name", long_sweep(WITH_KERNELS, quick=list(WITH_KERNELS)[:1]))
def test_programs_for_other_platforms_where_kernels_are_built(name, vmapped, dtype, use, rng):
    """They are not called in what is exported, nor in what is lowered for another device than a
    CPU.
    """
    use("native")
    call, shape = WITH_KERNELS[name]
    call, shape = (jax.vmap(call), (3, *shape)) if vmapped else (call, shape)

    def both(x):
        y, back = jax.vjp(call, x)
        return y, back(jnp.cos(y))

    x = jnp.asarray(rng.standard_normal(shape) + 2, dtype)
    traced = jax.jit(both).trace(x)
    assert "Jaxnorm" in traced.lower().as_text()
    assert "Jaxnorm" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    program = jax.export.export(jax.jit(both), platforms=("cpu", "cuda", "tpu"))(x)
    assert_near(program.call(x), jax.jit(both)(x), NEAR[dtype])
