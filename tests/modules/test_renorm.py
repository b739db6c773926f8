"""Test batch renorm: its correction, and the averages of SBX and of Keras over training steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Part, oracle

import jaxnorm as jn
from jaxnorm import linen as jn_linen
from jaxnorm import nnx as jn_nnx

KEY = jax.random.key(0)
EPSILON = 1e-3


def drawn(rng, mean=3.0, shape=(16, 5), dtype="float32"):
    """Return x, a cotangent, scale and bias, and running Moments near the batch's."""
    x, dy = rng.normal(mean, 2, shape), rng.normal(size=shape)
    scale, bias = rng.uniform(0.5, 1.5, (2, shape[-1])).astype(np.float32)
    close, wide = mean + rng.normal(0, 1, shape[-1]), rng.uniform(0.5, 9, shape[-1])
    running = jn.Moments(jnp.ones(()), *(jnp.asarray(a, "float32") for a in (close, wide)))
    return jnp.asarray(x, dtype), jnp.asarray(dy, "float32"), scale, bias, running


def corrections(x, mean, std, r_min, r_max, d_max, where=None, epsilon=EPSILON):
    """r and d in float64, for running statistics whose deviation includes epsilon."""
    x = np.asarray(x, np.float64)
    count = np.ones(x.shape) if where is None else np.broadcast_to(where, x.shape)
    own = np.average(np.where(count > 0, x, 0), 0, count)
    var = np.average(np.where(count > 0, x - own, 0) ** 2, 0, count)
    r = np.clip(np.sqrt(var + epsilon) / std, r_min, r_max)
    return own, var, r, np.clip((own - mean) / std, -d_max, d_max)


def paper(x, dy, scale, bias, mean, std, limits, where=None):
    """Output and gradients: batch norm with the gain ``r scale`` and the shift ``d scale + bias``,
    where r and d are constants.
    """
    *_, r, d = corrections(x, mean, std, *limits, where)
    wide = np.asarray(scale, np.float64)
    found = oracle(
        np.asarray(x),
        (Part((0,)),),
        epsilon=EPSILON,
        scale=(r * wide)[None],
        bias=(d * wide + bias)[None],
        cotangent=np.asarray(dy),
        where=where,
    )
    dbias = found.dbias.sum(0)
    return found.y, found.dx, found.dscale.sum(0) * r + dbias * d, dbias


def sbx(x, dy, scale, bias, mean, var, limits):
    """Output and gradients by ``m = own - d s / r`` and ``v = s**2 / r**2``, with s**2 the batch's
    variance.
    """
    own, of_batch, r, d = corrections(x, mean, np.sqrt(var + EPSILON), *limits)
    x, dy, scale = (np.asarray(a, np.float64) for a in (x, dy, scale))
    n, s = len(x), np.sqrt(of_batch)
    away = x - (own - d * s / r)
    root = 1 / np.sqrt(of_batch / r**2 + EPSILON)
    g = dy * scale
    dv = (g * away * -0.5 * root**3 / r**2).sum(0)
    dm = -(g * root).sum(0)
    dx = g * root + dm * (1 / n - d / r * (x - own) / (n * s)) + dv * 2 * (x - own) / n
    return away * root * scale + bias, dx, (dy * away * root).sum(0), dy.sum(0)


def gradients(norm, x, dy, scale, bias):
    y, vjp = jax.vjp(norm, x, jnp.asarray(scale), jnp.asarray(bias))
    return y, *vjp(dy.astype(y.dtype))


def assert_close(found, truth, bound=2e-6):
    for one, other in zip(found, truth, strict=True):
        size = max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=bound * size)


LIMITS = [(3.0, (None, None)), (1e5, (1.5, 0.3)), (1e5, (None, None)), (3.0, (1.0, 0.0))]


@pytest.mark.parametrize(("mean", "limits"), long_sweep(LIMITS, quick=LIMITS[:2]), ids=str)
def test_the_correction_of_the_paper(limits, mean, rng):
    """Also where the limits are traced, and where NaN is masked out."""
    r_max, d_max = limits
    x, dy, scale, bias, running = drawn(rng, mean)
    known = np.asarray(running.mean, np.float64), np.sqrt(np.float64(running.var) + EPSILON)
    bounds = (0, np.inf, np.inf) if r_max is None else (1 / r_max, r_max, d_max)
    where = rng.random((16, 1)) < 0.8
    for mask in (None, where):
        given = x if mask is None else jnp.where(mask, x, jnp.nan)
        norm = lambda x, scale, bias, *limits, mask=mask: jn.batch_renorm(
            x, running, r_max=limits[0], d_max=limits[1], scale=scale, bias=bias, where=mask
        )[0]
        true = paper(given, dy, scale, bias, *known, bounds, mask)
        found = gradients(lambda *a, norm=norm: norm(*a, r_max, d_max), given, dy, scale, bias)
        assert_close(found, true)
    if r_max is None:
        # what evaluation gives, which reads the mean as one number
        plain = jn.normalize(x, running, scale=scale, bias=bias, epsilon=EPSILON)
        np.testing.assert_allclose(norm(x, scale, bias, *limits, mask=None), plain, rtol=2e-6)
    else:
        traced = jax.jit(norm)(given, scale, bias, r_max, d_max)
        np.testing.assert_allclose(traced, found[0], rtol=1e-6, atol=1e-6)


def test_half_precision_is_rounded_once(rng):
    x, dy, scale, bias, running = drawn(rng, dtype="bfloat16", shape=(64, 5))
    norm = partial(jn.batch_renorm, running=running, r_max=1.5, d_max=0.3)
    found = gradients(lambda x, s, b: norm(x, scale=s, bias=b)[0], x, dy, scale, bias)
    known = np.asarray(running.mean, np.float64), np.sqrt(np.float64(running.var) + EPSILON)
    rounded = dy.astype(jnp.bfloat16).astype(jnp.float32)
    true = paper(x, rounded, scale, bias, *known, (1 / 1.5, 1.5, 0.3))
    for one, other in zip(found[:2], true, strict=False):
        spacing = 2.0 ** (np.floor(np.log2(np.abs(other))) - 7)
        assert one.dtype == jnp.bfloat16
        assert (np.abs(np.asarray(one, np.float64) - other) <= 0.51 * spacing).mean() > 0.99
    assert_close(found[2:], true[2:])


def test_without_statistics_in_running_it_is_batch_norm(rng):
    x, _, scale, bias, _ = drawn(rng)
    nothing = jn.Moments(jnp.zeros(5), jnp.full(5, 7.0), jnp.zeros(5))
    found = jn.batch_renorm(x, nothing, scale=scale, bias=bias)[0]
    truth = jn.batch_norm(x, scale=scale, bias=bias, epsilon=EPSILON)[0]
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)


def test_epsilon_of_the_deviation_and_constants(rng):
    x, _, _, _, running = drawn(rng)
    y, batch = jn.batch_renorm(x, running, epsilon=0.5, epsilon_in="std")
    truth = (np.asarray(x) - running.mean[None]) / (np.sqrt(running.var) + np.float32(0.5))[None]
    np.testing.assert_allclose(y, truth, rtol=3e-6, atol=3e-6)
    traced = jax.jit(lambda e: jn.batch_renorm(x, running, epsilon=e)[0])(0.5)
    np.testing.assert_allclose(traced, jn.batch_renorm(x, running, epsilon=0.5)[0], rtol=1e-6)
    equal = jnp.full((4, 5), 2.5)
    value, slope = jax.value_and_grad(
        lambda x: jn.batch_renorm(x, running, epsilon=0.0, r_max=3.0, d_max=5.0)[0].sum()
    )(equal)
    assert np.isfinite([value, *slope.ravel()]).all()
    y, batch = jn.batch_renorm(equal, running, where=np.zeros((4, 1), bool))
    assert not np.asarray(y).any()
    assert not np.asarray(batch.count).any()


def test_transformations(rng):
    x, dy, scale, _, running = drawn(rng)
    norm = lambda x: jn.batch_renorm(x, running, r_max=1.5, d_max=0.3, scale=scale)[0]
    _, tangent = jax.jvp(norm, (x,), (dy,))
    (back,) = jax.vjp(norm, x)[1](dy)
    np.testing.assert_allclose((tangent * dy).sum(), (back * dy).sum(), rtol=1e-5)
    stacked = jax.vmap(norm)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(stacked[1], norm(2 * x), rtol=1e-6, atol=1e-6)
    shared = jax.vmap(
        lambda x: jn.batch_renorm(x, running, axis_name="d", r_max=1.5, d_max=0.3, scale=scale)[0],
        axis_name="d",
    )(x.reshape(4, 4, 5))
    np.testing.assert_allclose(shared.reshape(16, 5), norm(x), rtol=2e-6, atol=2e-6)


MISTAKES = [
    ({"r_max": 0.5}, ValueError, "r_max must be 1 or more: found 0.5."),
    ({"d_max": -1.0}, ValueError, "d_max must be finite and >= 0: got -1.0."),
    ({"x": np.ones((4, 5), int)}, TypeError, "x must be floating point: got int32."),
    ({"x": np.ones((4, 5), np.complex64)}, TypeError, "x must be real: got complex64."),
    ({"running": 3.0}, TypeError, "running must be Moments: got float."),
    ({"x": np.ones((4, 6), np.float32)}, ValueError, "running must have the shape of the features"),
    ({"feature_axes": (0, 1)}, ValueError, "batch renorm must have an axis to reduce besides"),
    ({"rmax": 3.0}, TypeError, "Did you mean r_max?"),
]


@pytest.mark.parametrize(("options", "error", "message"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_mistakes(options, error, message):
    given = {"x": np.ones((4, 5), np.float32), **options}
    running = given.pop("running", jn.Moments(jnp.ones(()), jnp.zeros(5), jnp.ones(5)))
    with pytest.raises(error, match=message):
        jn.batch_renorm(given.pop("x"), running, **given)


# ------------------------------------------------------------------------------------- modules

STEPS = 8


def batches(rng, mean=2.0):
    """Batches whose mean and deviation change from step to step."""
    return [
        jnp.asarray(rng.normal(mean * rng.uniform(0.5, 2), rng.uniform(0.2, 4), (32, 5)), "float32")
        for _ in range(STEPS)
    ]


def trained(norm, xs, rng):
    """Output, gradients and state of each step, then the output of evaluation."""
    scale, bias = rng.uniform(0.5, 1.5, (2, 5)).astype(np.float32)
    params = {"scale": jnp.asarray(scale), "bias": jnp.asarray(bias)}
    stats = norm.init(KEY, xs[0])["batch_stats"]
    dy = jnp.asarray(rng.standard_normal(xs[0].shape), "float32")

    @jax.jit
    def step(stats, x):
        def run(x, scale, bias):
            given = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
            y, new = norm.apply(given, x, mutable=["batch_stats"])
            return y, new["batch_stats"]

        y, vjp, new = jax.vjp(run, x, *params.values(), has_aux=True)
        return (y, *vjp(dy)), new

    found = []
    for x in xs:
        results, new = step(stats, x)
        found.append((stats, results, new))
        stats = new
    evaluated = norm.clone(use_running_average=True).apply(
        {"params": params, "batch_stats": stats}, xs[0]
    )
    return scale, bias, dy, found, evaluated


@pytest.mark.parametrize("mean", long_sweep([2.0, 1e4], quick=[1e4]))
def test_sbx_over_training_steps(mean, rng):
    """Three steps of batch norm, then corrections within [1/3, 3] and 5; the state is averaged."""
    xs = batches(rng, mean)
    norm = jn_linen.BatchRenorm(use_running_average=False, warmup_steps=3, momentum=0.9)
    scale, bias, dy, found, evaluated = trained(norm, xs, rng)
    mean, var = np.zeros(5), np.ones(5)
    for number, (x, (_, results, new)) in enumerate(zip(xs, found, strict=True)):
        limits = (1, 1, 0) if number < 3 else (1 / 3, 3, 5)
        assert_close(results, sbx(x, dy, scale, bias, mean, var, limits), 1e-5)
        wide = np.asarray(x, np.float64)
        mean, var = 0.9 * mean + 0.1 * wide.mean(0), 0.9 * var + 0.1 * wide.var(0)
        assert_close((new["mean"], new["var"]), (mean, var), 1e-6)
        assert (int(new["steps"]), float(new["r_max"]), float(new["d_max"])) == (number + 1, 3, 5)
        # the running statistics as float32, from which the next step starts
        mean, var = (np.asarray(new[name], np.float64) for name in ("mean", "var"))
    truth = (np.asarray(xs[0], np.float64) - mean) / np.sqrt(var + EPSILON) * scale + bias
    assert_close([evaluated], [truth], 1e-6)


CLIPPING = [None, {"rmin": 0.5, "rmax": 2.0, "dmax": 1.0}, {"rmax": 1.5}]


@pytest.mark.parametrize("clipping", long_sweep(CLIPPING, quick=CLIPPING[1:2]), ids=str)
def test_keras_over_training_steps(clipping, rng):
    xs = batches(rng)
    norm = jn_linen.KerasBatchRenorm(
        use_running_average=False, momentum=0.9, renorm_momentum=0.8, renorm_clipping=clipping
    )
    scale, bias, dy, found, evaluated = trained(norm, xs, rng)
    limits = tuple(
        (clipping or {}).get(key, other)
        for key, other in zip(("rmin", "rmax", "dmax"), (0, np.inf, np.inf), strict=True)
    )
    mean, std, renorm_mean, renorm_std = np.zeros(5), np.ones(5), np.zeros(5), np.ones(5)
    for x, (_, results, new) in zip(xs, found, strict=True):
        true = paper(x, dy, scale, bias, renorm_mean, np.maximum(renorm_std, EPSILON**0.5), limits)
        assert_close(results, true, 1e-5)
        own, of_batch = np.float64(x).mean(0), np.sqrt(np.float64(x).var(0) + EPSILON)
        mean, std = 0.9 * mean + 0.1 * own, 0.9 * std + 0.1 * of_batch
        renorm_mean, renorm_std = (
            0.8 * renorm_mean + 0.2 * own,
            0.8 * renorm_std + 0.2 * of_batch,
        )
        state = [new[name] for name in ("mean", "var", "renorm_mean", "renorm_stddev")]
        assert_close(state, (mean, std**2 - EPSILON, renorm_mean, renorm_std), 2e-6)
    truth = (np.asarray(xs[0], np.float64) - mean) / std * scale + bias
    assert_close([evaluated], [truth], 2e-6)


@pytest.mark.parametrize("clipping", CLIPPING[:2], ids=str)
def test_equals_keras(clipping, rng, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    xs = batches(rng)
    norm = jn_linen.KerasBatchRenorm(
        use_running_average=False, momentum=0.9, renorm_momentum=0.8, renorm_clipping=clipping
    )
    scale, bias, dy, found, evaluated = trained(norm, xs, rng)
    layer = keras.layers.BatchNormalization(
        renorm=True, momentum=0.9, renorm_momentum=0.8, renorm_clipping=clipping
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        layer.build((None, 5))
        state = [variable.value for variable in layer.non_trainable_variables]
        names = [variable.name for variable in layer.non_trainable_variables]

        @jax.jit
        def step(state, x):
            run = lambda x, *params: layer.stateless_call(params, state, x, training=True)
            y, vjp, new = jax.vjp(run, x, jnp.asarray(scale), jnp.asarray(bias), has_aux=True)
            return (y, *vjp(dy)), new

        for x, (_, results, new) in zip(xs, found, strict=True):
            true, state = step(state, x)
            assert_close(results, true, 1e-5)
            theirs = dict(zip(names, state, strict=True))
            renamed = {"mean": "moving_mean", "var": "moving_variance"}
            for name, value in new.items():
                assert_close([value], [theirs[renamed.get(name, name)]], 1e-5)
        true, _ = layer.stateless_call([scale, bias], state, xs[0], training=False)
    assert_close([evaluated], [true], 1e-5)


NORMS = [
    ("BatchRenorm", {"warmup_steps": 0}),
    ("KerasBatchRenorm", {}),
    ("GhostBatchNorm", {"num_chunks": 3}),
]


def made(family, name, options, x):
    """Return a function of x and mask that trains a module, and one that returns its state."""
    if family == "nnx":
        module = getattr(jn_nnx, name)(5, rngs=nnx.Rngs(0), **options)
        held = lambda: {
            key: np.asarray(value[...])
            for key, value in vars(module).items()
            if isinstance(value, nnx.BatchStat)
        }
        return module, held
    module = getattr(jn_linen, name)(use_running_average=False, **options)
    variables = module.init(KEY, x)

    def run(x, mask=None):
        y, new = module.apply(variables, x, mask=mask, mutable=["batch_stats"])
        variables.update(new)
        return y

    return run, lambda: {key: np.asarray(leaf) for key, leaf in variables["batch_stats"].items()}


@pytest.mark.parametrize(("name", "options"), NORMS, ids=[name for name, _ in NORMS])
def test_twins_and_batches_that_leave_the_state(name, options, rng):
    """Masks with NaN beneath, then batches that are empty, hidden or NaN: no state moves."""
    xs, mask = batches(rng)[:2], rng.random((32, 1)) < 0.7
    (linen, of_linen), (other, of_nnx) = (made(f, name, options, xs[0]) for f in ("linen", "nnx"))
    hidden = jnp.where(mask, xs[1], jnp.nan)
    for arguments in ({"x": xs[0]}, {"x": hidden, "mask": mask}):
        one, two = linen(**arguments), other(**arguments)
        np.testing.assert_array_equal(one, two)
        assert np.isfinite(one).all()
    before = of_linen()
    jax.tree.map(np.testing.assert_array_equal, before, of_nnx())
    assert (before["mean"] != 0).all()
    for x, mask in ((xs[0][:0], None), (xs[0], np.zeros((32, 1), bool)), (xs[0] * jnp.nan, None)):
        for run, held in ((linen, of_linen), (other, of_nnx)):
            run(x, mask=mask)
            jax.tree.map(np.testing.assert_array_equal, before, held())


@pytest.mark.parametrize(("name", "options"), NORMS, ids=[name for name, _ in NORMS])
def test_recalibrate_and_accumulate(name, options, rng):
    """Both families find the norms: a population replaces mean and variance, and nothing else."""
    xs = batches(rng)[:3]
    whole = np.concatenate(xs).astype(np.float64)
    norm = getattr(jn_linen, name)(use_running_average=False, momentum=0.9, **options)
    twin = getattr(jn_nnx, name)(5, momentum=0.9, rngs=nnx.Rngs(0), **options)
    variables = norm.init(KEY, xs[0])
    after = jn_linen.recalibrate(norm, variables, xs)["batch_stats"]
    jn_nnx.recalibrate(twin, xs)
    for key, leaf in after.items():
        np.testing.assert_allclose(getattr(twin, key)[...], leaf, rtol=1e-6)
        if key not in ("mean", "var"):
            np.testing.assert_array_equal(leaf, variables["batch_stats"][key])
    assert_close((after["mean"], after["var"]), (whole.mean(0), whole.var(0)))
    variables, twin = (
        jn_linen.accumulate(variables),
        getattr(jn_nnx, name)(5, momentum=0.9, rngs=nnx.Rngs(0), **options),
    )
    jn_nnx.accumulate(twin)
    start = dict(variables["batch_stats"])
    for x in xs:
        y, new = norm.apply(variables, x, mutable=["batch_stats", "batch_moments"])
        variables |= new
        np.testing.assert_array_equal(twin(x), y)
    stats = variables["batch_stats"]
    assert_close([stats["mean"]], [0.1 * whole.mean(0)])
    if name == "KerasBatchRenorm":
        true = (0.9 + 0.1 * np.sqrt(whole.var(0) + EPSILON)) ** 2 - EPSILON
    else:
        true = 0.9 + 0.1 * whole.var(0)
    assert_close([stats["var"]], [true])
    if name == "BatchRenorm":  # corrected towards the statistics before the batch, as one step
        assert int(stats["steps"]) == int(twin.steps[...]) == 1
        alone = norm.apply(
            {"params": variables["params"], "batch_stats": start}, xs[2], mutable=True
        )
        np.testing.assert_allclose(alone[0], y, rtol=1e-6, atol=1e-6)
    for key, leaf in stats.items():
        np.testing.assert_array_equal(getattr(twin, key)[...], leaf)


def test_checkpoints_of_sbx_load(rng):
    """Their limits and steps are Python integers before the first step."""
    x = jnp.asarray(rng.standard_normal((8, 3)), "float32")
    norm = jn_linen.BatchRenorm(use_running_average=False)
    stats = {"mean": np.zeros(3), "var": np.ones(3), "r_max": 3, "d_max": 5, "steps": 100_000}
    stats = jax.tree.map(lambda a: a.astype(np.float32) if isinstance(a, np.ndarray) else a, stats)
    theirs = {
        "params": {"scale": np.ones(3, "float32"), "bias": np.zeros(3, "float32")},
        "batch_stats": stats,
    }
    loaded = serialization.from_bytes(norm.init(KEY, x), serialization.to_bytes(theirs))
    y, new = norm.apply(loaded, x, mutable=["batch_stats"])
    running = jn.Moments(jnp.ones(()), jnp.zeros(3), jnp.ones(3))
    np.testing.assert_allclose(y, jn.batch_renorm(x, running, r_max=3.0, d_max=5.0)[0], atol=2e-3)
    assert int(new["batch_stats"]["steps"]) == 100_001
    first, variables = norm.clone(warmup_steps=0).init_with_output(KEY, x)  # batch norm, too
    np.testing.assert_allclose(first, jn.batch_norm(x, epsilon=EPSILON)[0], atol=1e-6)
    assert jax.tree.structure(variables) == jax.tree.structure(theirs)


def test_the_running_statistics_of_tabnet(rng):
    """Chunks of nearly equal sizes, one blend after another, of the unbiased variance."""
    x = jnp.asarray(rng.normal(3, 2, (30, 5)), "float32")
    norm = jn_linen.GhostBatchNorm(
        virtual_batch_size=8, momentum=0.9, unbiased=True, use_running_average=False
    )
    y, new = norm.apply(norm.init(KEY, x), x, mutable=["batch_stats"])
    mean, var = np.zeros(5), np.ones(5)
    for chunk in np.split(np.float64(x), [8, 16, 24]):  # ceil(30 / 4), as torch.chunk
        mean, var = 0.9 * mean + 0.1 * chunk.mean(0), 0.9 * var + 0.1 * chunk.var(0, ddof=1)
    assert_close((new["batch_stats"]["mean"], new["batch_stats"]["var"]), (mean, var))
    np.testing.assert_array_equal(y, jn.ghost_batch_norm(x, num_chunks=4)[0])
    evaluated = jn_linen.BatchNorm(True).apply(new | {"params": norm.init(KEY, x)["params"]}, x)
    assert_close([evaluated], [(np.float64(x) - mean) / np.sqrt(var + 1e-5)])


@pytest.mark.parametrize(
    ("name", "options"), long_sweep(NORMS, quick=NORMS[2:]), ids=[name for name, _ in NORMS]
)
def test_where_batch_and_channels_are_explicitly_sharded(name, options, rng):
    x = rng.standard_normal((24, 4, 6)).astype(np.float32)
    options = {"num_chunks": 4} if "num_chunks" in options else options
    norm = getattr(jn_linen, name)(use_running_average=False, **options)
    variables = norm.init(KEY, x)
    run = jax.jit(
        jax.value_and_grad(
            lambda x, variables: (
                lambda y, new: (jnp.sin(y).sum(), (y, new["batch_stats"]["var"]))
            )(*norm.apply(variables, x, mutable=["batch_stats"])),
            has_aux=True,
        )
    )
    truth = run(x, variables)
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), devices=HOST, axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, NamedSharding(mesh, P()))
        found = run(jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))), placed)
    same = partial(np.testing.assert_allclose, rtol=3e-6, atol=3e-6)
    jax.tree.map(same, (found[0][1], found[1]), (truth[0][1], truth[1]))


def test_mistakes_of_modules(rng):
    x = jnp.ones((4, 3))
    for clipping, message in (
        ({"r_max": 3.0}, "renorm_clipping must have the keys rmax, rmin, dmax, or some"),
        ({"rmax": 1.0, "rmin": 2.0}, "rmin or more: got rmax=1.0 and rmin=2.0."),
        ({"dmax": -1.0}, "dmax of renorm_clipping must be finite and >= 0: got -1.0."),
    ):
        with pytest.raises(ValueError, match=message):
            jn_linen.KerasBatchRenorm(False, renorm_clipping=clipping).init(KEY, x)
        with pytest.raises(ValueError, match=message):
            jn_nnx.KerasBatchRenorm(3, renorm_clipping=clipping, rngs=nnx.Rngs(0))(x)
    for name, options in (("BatchRenorm", {}), ("KerasBatchRenorm", {})):
        with pytest.raises(TypeError, match="x must be real: got complex64"):
            getattr(jn_linen, name)(False, **options).init(KEY, x.astype(jnp.complex64))
    for wrong in (jn_linen.GhostBatchNorm(False), jn_nnx.GhostBatchNorm(3, rngs=nnx.Rngs(0))):
        run = partial(wrong.init, KEY) if hasattr(wrong, "init") else wrong
        with pytest.raises(ValueError, match="one of virtual_batch_size and num_chunks must be"):
            run(x)
    with pytest.raises(ValueError, match="must leave axis 0 to the batch: got axis=0"):
        jn_linen.GhostBatchNorm(False, axis=0, num_chunks=2).init(KEY, x)
