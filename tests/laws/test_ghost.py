"""Test ghost batch norm: it is batch norm of each chunk, however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Part, oracle, worst

import jaxnorm as jn

SHAPE = (11, 4, 5)
CUTS = [
    ({"size": 4}, [4, 4, 3]),
    ({"size": 11}, [11]),
    ({"size": 20}, [11]),
    ({"num_chunks": 3}, [4, 4, 3]),
    ({"num_chunks": 4}, [3, 3, 3, 2]),
    ({"num_chunks": 10}, [2, 2, 2, 2, 2, 1]),  # fewer than asked for, as torch.chunk
    ({"num_chunks": 30}, [1] * 11),
]


MASKED = [{"size": 4}, {"size": 11}, {"num_chunks": 11}]


def drawn(rng, mean=3.0, dtype="float32"):
    x, dy = rng.normal(mean, 2, SHAPE), rng.normal(size=SHAPE)
    params = rng.uniform(0.5, 1.5, (2, SHAPE[-1]))
    return jnp.asarray(x, dtype), *(jnp.asarray(a, "float32") for a in (dy, *params))


def truth(x, dy, scale, bias, sizes, where=None, epsilon=1e-5):
    """Output and gradients of each chunk by the oracle, one after the other."""
    ends = np.cumsum(sizes)[:-1]
    cut = lambda a: [None] * len(sizes) if a is None else np.split(np.asarray(a), ends)
    found = [
        oracle(
            part,
            (Part((0, 1)),),
            epsilon=epsilon,
            scale=np.asarray(scale)[None, None],
            bias=np.asarray(bias)[None, None],
            cotangent=own,
            where=mask,
        )
        for part, own, mask in zip(cut(x), cut(dy), cut(where), strict=True)
    ]
    y, dx = (np.concatenate([getattr(f, name) for f in found]) for name in ("y", "dx"))
    return (
        y,
        dx,
        *(sum(getattr(f, name).sum((0, 1)) for f in found) for name in ("dscale", "dbias")),
    )
    of_params = (sum(getattr(f, name).sum((0, 1)) for f in found) for name in ("dscale", "dbias"))
    return y, dx, *of_params


def gradients(x, dy, scale, bias, **options):
    norm = lambda *a: jn.ghost_batch_norm(a[0], scale=a[1], bias=a[2], **options)[0]
    y, vjp = jax.vjp(norm, x, scale, bias)
    return y, *vjp(dy.astype(y.dtype))


@pytest.mark.parametrize(
    ("cut", "sizes"), long_sweep(CUTS, quick=CUTS[::5]), ids=[str(cut) for cut, _ in CUTS]
)
def test_each_chunk_is_a_batch_of_its_own(cut, sizes, rng):
    given = drawn(rng)
    assert sum(sizes) == SHAPE[0]
    for found, true in zip(gradients(*given, **cut), truth(*given, sizes), strict=True):
        assert worst(found, true, tuple(range(true.ndim - 1))) <= 2e-6


@pytest.mark.parametrize("cut", long_sweep(MASKED, quick=MASKED[:1]), ids=str)
def test_masks_and_merged_moments(cut, rng):
    """NaN under the mask, of weights; one chunk hidden whole; merged they are the batch's."""
    x, dy, scale, bias = drawn(rng, mean=1e4)
    where = (rng.random((*SHAPE[:2], 1)) < 0.7) * rng.uniform(0.5, 2, (*SHAPE[:2], 1))
    where[4:8] = 0
    where = where.astype(np.float32)
    hidden = np.broadcast_to(where, SHAPE) == 0
    size = cut.get("size", 1)
    sizes = [len(part) for part in np.split(np.arange(11), range(size, 11, size))]
    nan = jnp.where(hidden, jnp.nan, x)
    found = gradients(nan, dy, scale, bias, where=where, **cut)
    true = truth(x, dy, scale, bias, sizes, where)
    for got, want in zip(found, true, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max())
    assert not np.asarray(found[0])[hidden].any()
    assert not np.asarray(found[1])[hidden].any()
    _, chunks = jn.ghost_batch_norm(nan, where=where, **cut)
    whole = jn.moments(nan, (0, 1), where=where)
    assert chunks.mean.shape == (len(sizes), 1, SHAPE[-1])
    for name in ("count", "mean", "var"):
        np.testing.assert_allclose(
            getattr(chunks.merge(0), name), getattr(whole, name), rtol=3e-7, err_msg=name
        )


@pytest.mark.parametrize("dtype", long_sweep(["bfloat16", "float16"], quick=["bfloat16"]))
def test_half_precision_is_rounded_once(dtype, rng):
    given = drawn(rng, dtype=dtype)
    y, dx, *_ = gradients(*given, size=4)
    true = truth(given[0], given[1].astype(dtype).astype("float32"), *given[2:], [4, 4, 3])
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    for found, exact in zip((y, dx), true, strict=False):
        spacing = float(jnp.finfo(dtype).eps) * np.abs(exact)
        assert (
            np.abs(np.asarray(found, np.float64) - exact) <= 0.51 * spacing + 1e-6
        ).mean() > 0.99
        spacing = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(np.abs(exact)))
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert (error <= 0.51 * spacing + 1e-6).mean() > 0.99


def test_transformations(rng):
    """jit, vmap over more batches, jvp, and a scale for each example."""
    x, dy, scale, bias = drawn(rng)
    norm = lambda x: jn.ghost_batch_norm(x, size=4, scale=scale, bias=bias)[0]
    y = norm(x)
    np.testing.assert_allclose(jax.jit(norm)(x), y, rtol=1e-6, atol=1e-6)
    stacked = jax.vmap(norm)(jnp.stack([x, x[::-1]]))
    np.testing.assert_allclose(stacked[0], y, rtol=1e-6, atol=1e-6)
    _, tangent = jax.jvp(norm, (x,), (dy,))
    (back,) = jax.vjp(norm, x)[1](dy)
    np.testing.assert_allclose((tangent * dy).sum(), (back * dy).sum(), rtol=1e-5)
    own = jnp.asarray(rng.uniform(0.5, 1.5, (11, 1, 5)), "float32")
    np.testing.assert_allclose(
        jn.ghost_batch_norm(x, size=4, scale=own)[0],
        jn.ghost_batch_norm(x, size=4)[0] * own,
        rtol=1e-6,
    )


def test_chunks_of_the_same_number_share_statistics_over_devices(rng):
    x = jnp.asarray(rng.standard_normal((2, *SHAPE)), "float32")
    norm = lambda x, name: jn.ghost_batch_norm(x, size=4, axis_name=name)
    y, chunks = jax.vmap(lambda x: norm(x, "d"), axis_name="d")(x)
    first = jn.batch_norm(x[:, :4])[0]
    np.testing.assert_allclose(y[:, :4], first, atol=1e-6)
    np.testing.assert_array_equal(chunks.count[:, :, 0, 0], [[32, 32, 24]] * 2)


def test_empty_batches_and_single_elements():
    y, chunks = jn.ghost_batch_norm(jnp.ones((0, 3)), size=4)
    assert y.shape == (0, 3)
    assert not np.asarray(chunks.count).any()
    y, chunks = jn.ghost_batch_norm(jnp.full((3, 1), 5.0), size=2, epsilon=0.0, bias=jnp.ones(1))
    assert (y.tolist(), chunks.var.tolist()) == ([[1.0]] * 3, [[0.0]] * 2)
    slope = jax.grad(lambda x: jn.ghost_batch_norm(x, size=2)[0].sum())(jnp.full((3, 1), 5.0))
    assert np.isfinite(slope).all()


def test_no_copy_of_x_but_where_a_chunk_is_shorter():
    """Equal chunks are one reduction; a shorter one takes two slices and one concatenation."""
    texts = [
        str(jax.make_jaxpr(lambda x: jn.ghost_batch_norm(x, size=4)[0])(jnp.ones((n, 8))))
        for n in (12, 11)
    ]
    assert ["concatenate" in text for text in texts] == [False, True]


WRONG = [
    ({}, ValueError, "exactly one of size and num_chunks must be given: got None and None."),
    ({"size": 2, "num_chunks": 2}, ValueError, "must be given: got 2 and 2."),
    ({"size": 0}, ValueError, "size must be 1 or more: got 0."),
    ({"num_chunks": -1}, ValueError, "num_chunks must be 1 or more: got -1."),
    ({"size": 2.0}, TypeError, r"size must be an integer: got 2.0 \(float\)."),
    ({"size": 2, "feature_axes": 0}, ValueError, "must leave axis 0 to the batch: got"),
    ({"sise": 2}, TypeError, "Did you mean size?"),
    ({"size": 2, "scale": np.ones(4)}, ValueError, "scale must have the shape of the feature axes"),
    ({"size": 2, "where": np.ones(4)}, ValueError, "where must broadcast against x"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        jn.ghost_batch_norm(jnp.ones((5, 3)), **options)


def test_chunks_of_a_sharded_batch_are_of_one_size():
    mesh = jax.make_mesh((4,), ("d",), devices=HOST[:4], axis_types=(AxisType.Explicit,))
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    with jax.set_mesh(mesh):
        by_batch, by_features = (
            jax.device_put(x[:, :n], NamedSharding(mesh, P(*names)))
            for n, names in ((3, ("d", None)), (3, (None, None)))
        )
        y, _ = jn.ghost_batch_norm(by_batch, size=2)
        np.testing.assert_allclose(y, jn.ghost_batch_norm(x, size=2)[0], atol=1e-6)
        y, _ = jn.ghost_batch_norm(by_features, size=3)
        np.testing.assert_allclose(y, jn.ghost_batch_norm(x, size=3)[0], atol=1e-6)
        said = "got chunks of 3 and a last one of 2, of 8 examples sharded over 'd'. Choose a size"
        with pytest.raises(ValueError, match=said):
            jn.ghost_batch_norm(by_batch, size=3)
