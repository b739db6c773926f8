"""Test norms that take a condition at the call: values, gradients, masks, twins and errors."""

import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HOST, long_sweep
from flax import nnx
from jax import shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Part, oracle, worst

import jaxnorm as jn

N, H, W, C, K = 3, 4, 6, 8, 5
SHAPE = (N, H, W, C)
IMAGE, LAST, BATCH = (1, 2), (3,), (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """A module, its options, the shape of its condition, and what it computes."""

    name: str
    options: dict
    axes: tuple[int, ...] | None = LAST  # None: no statistics
    epsilon: float = 1e-6
    parts: str = "bias scale"  # in the order of the layer's outputs
    lead: tuple[int, ...] = (N,)
    centered: bool = True
    offset: float = 1
    running: bool = False

    def __str__(self):
        return f"{self.name} {self.options} {self.lead}"

    @property
    def labels(self):
        return "num_classes" in self.options

    @property
    def conv(self):
        return self.name == "SPADE"

    def condition(self, rng):
        if self.labels:
            return jnp.asarray(rng.integers(0, self.options["num_classes"], self.lead))
        size = (*self.lead, K) if not self.conv else (N, 2, 3, K)
        return jnp.asarray(rng.standard_normal(size), jnp.float32)

    def linen(self, **more):
        mode = {"use_running_average": False} if self.running else {}
        return getattr(jn.linen, self.name)(**self.options, **mode, **more)

    def nnx(self, **more):
        sizes = (C,) if self.labels else (C, K)
        return getattr(jn.nnx, self.name)(*sizes, **self.options, **more, rngs=nnx.Rngs(0))

    def variables(self, rng, x, condition, **more):
        """Variables with parameters that are drawn at random, and the module that they are of."""
        module = self.linen(**more)
        shapes = jax.eval_shape(module.init, jax.random.key(0), x, condition)
        draw = lambda leaf: jnp.asarray(rng.normal(0.0, 0.1, leaf.shape), leaf.dtype)
        stats = {"mean": jnp.zeros(C), "var": jnp.ones(C)} if self.running else {}
        return module, {"params": jax.tree.map(draw, shapes["params"]), "batch_stats": stats}

    def modulation(self, params, condition):
        """Scale and bias in float64 NumPy, of the rank of x; and the gate, if there is one."""
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        if self.conv:
            return spade_modulation(params, np.asarray(condition, np.float64))
        if self.labels:
            values = params["modulation"]["embedding"][np.asarray(condition)]
        else:
            given = np.asarray(condition, np.float64)
            if "Layer" in self.name:
                given = given / (1 + np.exp(-given))
            values = given @ params["modulation"]["kernel"] + params["modulation"]["bias"]
        names, lead = self.parts.split(), values.shape[:-1]
        target = (*lead, *(1,) * (3 - len(lead)), C)
        return {
            name: part.reshape(target)
            for name, part in zip(names, np.split(values, len(names), -1), strict=True)
        }

    def truth(self, x, found, **options):
        """The oracle's result for x, with scale and bias."""
        scale, bias = self.offset + found["scale"], found["bias"]
        if self.axes is None:
            x = np.asarray(x, np.float64)
            where, dy = options.get("where"), options.get("cotangent", 0.0)
            live = True if where is None else np.broadcast_to(where, x.shape) > 0
            return np.where(live, x * scale + bias, 0), np.where(live, dy * scale, 0)
        result = oracle(
            x,
            (Part(self.axes),),
            scale=scale,
            bias=bias,
            epsilon=self.epsilon,
            centered=self.centered,
            **options,
        )
        return result.y, result.dx


def conv(x, layer):
    """A convolution of 3 x 3 with zeros around."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    kernel, (_, h, w, _) = layer["kernel"], x.shape
    return layer["bias"] + sum(
        padded[:, i : i + h, j : j + w] @ kernel[i, j] for i in range(3) for j in range(3)
    )


def spade_modulation(params, labels):
    nearest = labels[:, np.arange(H) * labels.shape[1] // H]
    nearest = nearest[:, :, np.arange(W) * labels.shape[2] // W]
    hidden = np.maximum(conv(nearest, params["shared"]), 0)
    return {"scale": conv(hidden, params["gamma"]), "bias": conv(hidden, params["beta"])}


ROWS = [
    Row("AdaLayerNorm", {}),
    Row("AdaLayerNorm", {"norm": "rms"}, lead=(1, H), centered=False),
    Row("AdaLayerNormZero", {}, parts="bias scale gate", lead=(N, 1, W)),
    Row("FiLM", {}, axes=None, parts="scale bias"),
    Row("FiLM", {"scale_offset": 0}, axes=None, parts="scale bias", lead=(), offset=0),
    Row("AdaInstanceNorm", {}, axes=IMAGE, epsilon=1e-8, parts="scale bias"),
    Row("ConditionalBatchNorm", {}, BATCH, 1e-5, "scale bias", running=True),
    Row("ConditionalBatchNorm", {"num_classes": 4}, BATCH, 1e-5, "scale bias", running=True),
    Row("SPADE", {"hidden_features": 7}, IMAGE, 1e-5),
    Row("SPADE", {"hidden_features": 7, "norm": "batch"}, BATCH, 1e-5, running=True),
]
KINDS = [ROWS[0], ROWS[2], ROWS[3], ROWS[5], ROWS[7], ROWS[8]]
most_rows = pytest.mark.parametrize("row", long_sweep(ROWS, quick=KINDS), ids=str)
each_kind = pytest.mark.parametrize("row", KINDS, ids=str)
some_kinds = pytest.mark.parametrize("row", long_sweep(KINDS, quick=KINDS[4:5]), ids=str)


def only_y(found):
    return found[0] if isinstance(found, tuple) else found


def apply(module, variables, x, condition, mask=None, **call):
    """The output of a linen module, and its new running statistics, by one program."""
    run = jax.jit(partial(module.apply, mutable=["batch_stats"], **call))
    y, state = run(variables, x, condition, mask=mask)
    return y, state.get("batch_stats", {})


def into(module, variables):
    """Give an nnx module the variables of its linen twin."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        {**variables["params"], **variables["batch_stats"]}
    ):
        target = module
        for key in path:
            target = getattr(target, key.key)
        target[...] = leaf
    return module


@most_rows
@pytest.mark.parametrize("masked", long_sweep([False, True], quick=[True]))
def test_values_and_gradients(row, masked, rng):
    """At an offset of 1e3 where the mean is subtracted, and with NaN beneath the mask."""
    x = rng.standard_normal(SHAPE).astype(np.float32) * 2
    x += 1e3 if row.centered and row.axes else 1
    where = rng.random((N, H, W, 1)) < 0.7 if masked else None
    given = jnp.asarray(x if where is None else np.where(where, x, np.nan))
    condition, dy = row.condition(rng), rng.standard_normal(SHAPE).astype(np.float32)
    module, variables = row.variables(rng, given, condition)
    mask = None if where is None else jnp.asarray(where)

    def loss(x, params):
        found = apply(module, {**variables, "params": params}, x, condition, mask=mask)[0]
        return (only_y(found) * dy).sum(), found

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, found), (dx, dparams) = run(given, variables["params"])
    parts = row.modulation(variables["params"], condition)
    y, true_dx = row.truth(x, parts, where=where, cotangent=dy)
    axes = row.axes or LAST
    assert worst(only_y(found), y, axes) <= 1e-6
    assert worst(dx, true_dx, axes) <= 4e-6
    if masked:
        hidden = np.broadcast_to(~where, SHAPE)
        assert not np.asarray(only_y(found))[hidden].any()
        assert not np.asarray(dx)[hidden].any()
    if isinstance(found, tuple):
        np.testing.assert_allclose(found[1], parts["gate"], atol=2e-6)
    # beta's bias, or the part of the layer's that is the bias, is added to each valid element
    total = np.where(True if where is None else where, dy, 0).sum(BATCH)
    if row.conv:
        np.testing.assert_allclose(dparams["beta"]["bias"], total, rtol=1e-4, atol=1e-4)
    elif not row.labels:
        at = row.parts.split().index("bias")
        dbias = dparams["modulation"]["bias"][at * C : (at + 1) * C]
        np.testing.assert_allclose(dbias, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", long_sweep(ROWS, quick=KINDS[1::2]), ids=str)
@pytest.mark.parametrize("dtype", long_sweep([None, "bfloat16"], quick=["bfloat16"]))
def test_linen_and_nnx_agree_to_the_bit(row, dtype, rng):
    x = jnp.asarray(rng.standard_normal(SHAPE) * 2 + 1, dtype or "float32")
    condition, mask = row.condition(rng), jnp.asarray(rng.random((N, H, W, 1)) < 0.7)
    module, variables = row.variables(rng, x, condition, dtype=dtype)
    twin = into(row.nnx(dtype=dtype), variables)
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(twin)))
    assert shapes == jax.tree.map(jnp.shape, {**variables["params"], **variables["batch_stats"]})
    found, state = apply(module, variables, x, condition, mask=mask)
    for one, other in zip(
        jax.tree.leaves(nnx.jit(type(twin).__call__)(twin, x, condition, mask=mask)),
        jax.tree.leaves(found),
        strict=True,
    ):
        assert one.dtype == other.dtype == x.dtype
        np.testing.assert_array_equal(*(np.asarray(leaf, np.float32) for leaf in (one, other)))
    for name, value in state.items():
        np.testing.assert_array_equal(getattr(twin, name)[...], value)


@pytest.mark.parametrize("row", long_sweep(KINDS, quick=KINDS[1:5:3]), ids=str)
def test_a_module_starts_as_the_norm_without_parameters(row, rng):
    """Unless its layer starts at random, as the sources of FiLM, StyleGAN and SPADE have it."""
    x, condition = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32), row.condition(rng)
    found, variables = row.linen().init_with_output(jax.random.key(0), x, condition)
    zeros = {"scale": np.zeros(C), "bias": np.zeros(C)}
    same = worst(only_y(found), row.truth(x, zeros)[0], row.axes or LAST) <= 1e-6
    assert same == (row.name in ("AdaLayerNorm", "AdaLayerNormZero", "ConditionalBatchNorm"))
    if isinstance(found, tuple):
        assert found[1].shape == (N, 1, W, C)
        assert not found[1].any()
    # so does the other family
    for one, other in zip(
        jax.tree.leaves(variables["params"]),
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(row.nnx(), nnx.Param))),
        strict=True,
    ):
        assert one.shape == other.shape
        assert abs(float(one.std() - other.std())) < 0.15


@some_kinds
def test_half_precision_is_rounded_once(row, rng):
    """With a layer whose outputs are exact in bfloat16, however it computes."""
    x = jnp.asarray(rng.standard_normal(SHAPE) * 2 + 100, jnp.bfloat16)
    condition = row.condition(rng)
    module, variables = row.variables(rng, x, condition, dtype=jnp.bfloat16)
    exact = lambda leaf: jnp.asarray(rng.integers(-8, 8, leaf.shape) / 16, leaf.dtype)
    keep = lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key == "kernel" else exact(leaf)
    variables["params"] = jax.tree_util.tree_map_with_path(keep, variables["params"])
    y = np.asarray(only_y(apply(module, variables, x, condition)[0]))
    assert y.dtype == jnp.bfloat16
    truth, _ = row.truth(x, row.modulation(variables["params"], condition))
    spacing = 2.0 ** (np.floor(np.log2(np.abs(truth) + 1e-30)) - 7)
    assert (np.abs(y.astype(np.float64) - truth) <= 0.51 * spacing + 1e-5).all()


@some_kinds
@pytest.mark.parametrize("family", long_sweep(["linen", "nnx"], quick=["nnx"]))
def test_nothing_and_single_elements_are_finite(row, family, rng):
    """Groups that are masked out whole or hold one element, and batches without examples."""
    x, condition = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32), row.condition(rng)
    mask = np.ones((N, H, W, 1), bool)
    mask[0] = mask[1, 0, 0] = False
    mask[2], mask[2, 1, 1] = False, True
    module, variables = row.variables(rng, x, condition)
    twin = into(row.nnx(), variables)

    def run(x, condition, mask):
        if family == "nnx":
            return only_y(nnx.clone(twin)(x, condition, mask=mask))
        return only_y(apply(module, variables, x, condition, mask=mask)[0])

    hidden = jnp.where(mask, x, jnp.nan)
    y, pull = jax.vjp(lambda x: run(x, condition, jnp.asarray(mask)), hidden)
    (dx,) = pull(jnp.ones_like(y))
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
    assert not y[0].any()
    lead = condition[:0] if condition.shape[:1] == (N,) else condition
    assert run(x[:0], lead, None).shape == (0, H, W, C)


@some_kinds
def test_transformations(row, rng):
    """vmap, scan and checkpoint equal a loop, and forward mode equals reverse mode."""
    xs = jnp.asarray(rng.standard_normal((2, *SHAPE)), jnp.float32)
    conditions = jnp.stack([row.condition(rng) for _ in range(2)])
    module, variables = row.variables(rng, xs[0], conditions[0])
    run = lambda x, condition: only_y(apply(module, variables, x, condition)[0])
    loop = np.stack([run(*pair) for pair in zip(xs, conditions, strict=True)])
    pair = (xs, conditions)
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(*pair), loop, atol=1e-6)
    scanned = jax.lax.scan(lambda _, pair: (None, jax.checkpoint(run)(*pair)), None, pair)[1]
    np.testing.assert_allclose(scanned, loop, atol=1e-6)
    dx, dy = (jnp.asarray(rng.standard_normal(SHAPE), jnp.float32) for _ in range(2))
    at = partial(run, condition=conditions[0])
    _, forward = jax.jvp(at, (xs[0],), (dx,))
    (backward,) = jax.vjp(at, xs[0])[1](dy)
    np.testing.assert_allclose((forward * dy).sum(), (backward * dx).sum(), rtol=1e-3, atol=1e-4)


RUNNING = [row for row in ROWS if row.running]


@pytest.mark.parametrize("row", long_sweep(RUNNING, quick=RUNNING[1:2]), ids=str)
def test_running_statistics(row, rng):
    """They follow those of the batch, serve evaluation, and can be replaced by a population's."""
    x, condition = jnp.asarray(rng.standard_normal(SHAPE) + 3, jnp.float32), row.condition(rng)
    _, variables = row.variables(rng, x, condition)
    module = getattr(jn.linen, row.name)(**row.options, momentum=0.75)
    twin = into(row.nnx(momentum=0.75), variables)
    _, state = apply(module, variables, x, condition, use_running_average=False)
    exact = np.asarray(x, np.float64).mean(BATCH), np.asarray(x, np.float64).var(BATCH)
    np.testing.assert_allclose(state["mean"], 0.25 * exact[0], rtol=1e-6)
    np.testing.assert_allclose(state["var"], 0.75 + 0.25 * exact[1], rtol=1e-6)
    # each half of the batch, with its conditions, in turn
    halves = [(x[:1], condition[:1]), (x[1:], condition[1:])]
    given = {"params": variables["params"], "batch_stats": state}
    fresh = jn.linen.recalibrate(module, given, halves, use_running_average=False)
    jn.nnx.recalibrate(twin, halves)
    for stats in (fresh["batch_stats"], {"mean": twin.mean[...], "var": twin.var[...]}):
        for found, truth in zip((stats["mean"], stats["var"]), exact, strict=True):
            np.testing.assert_allclose(found, truth, rtol=1e-5)
    twin.eval()
    evaluated = module.apply(fresh, x, condition, use_running_average=True)
    np.testing.assert_allclose(twin(x, condition), evaluated, atol=1e-6)
    y, _ = row.truth(x, row.modulation(variables["params"], condition))
    np.testing.assert_allclose(evaluated, y, atol=2e-5)


VECTORS = "condition must have the shape (..., k), where ... are leading axes of x or 1: got "
WRONG = [
    ("AdaLayerNorm", {}, (4, K), f"{VECTORS}(4, 5) for x of shape (3, 4, 6, 8). One vector for"),
    ("FiLM", {}, (N, 6, K), f"{VECTORS}(3, 6, 5) for x of shape"),
    ("AdaInstanceNorm", {}, (N, H, W, C, K), VECTORS),
    ("AdaLayerNorm", {}, (), VECTORS),
    ("AdaLayerNormZero", {"norm": "batch"}, (N, K), "norm must be 'layer' or 'rms': got 'batch'."),
    ("SPADE", {"norm": "layer"}, SHAPE, "norm must be 'instance' or 'batch': got 'layer'."),
    ("SPADE", {}, (N, K), "condition must be a map (batch, ..., labels) of as many axes as x"),
    ("SPADE", {"kernel_size": (3,)}, SHAPE, "x must have a batch, 1 axes of positions as kernel"),
]


@pytest.mark.parametrize(("name", "options", "size", "message"), WRONG)
@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_wrong_conditions(name, options, size, message, family):
    x, condition = jnp.ones(SHAPE), jnp.ones(size)
    features = C if name == "SPADE" and size == SHAPE else K

    def run():
        if family == "nnx":
            made = getattr(jn.nnx, name)(C, features, **options, rngs=nnx.Rngs(0))
            return made(x, condition)
        return getattr(jn.linen, name)(**options).init(jax.random.key(0), x, condition)

    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        run()


def test_wrong_labels():
    x, rngs = jnp.ones(SHAPE), nnx.Rngs(0)
    by_label = jn.nnx.ConditionalBatchNorm(C, num_classes=4, rngs=rngs)
    by_vector = jn.nnx.ConditionalBatchNorm(C, K, rngs=rngs)
    linen = jn.linen.ConditionalBatchNorm(False, num_classes=4)
    init = lambda labels: linen.init(jax.random.key(0), x, labels)
    for run in (partial(by_label, x), init):
        with pytest.raises(ValueError, match=r"from 0 to num_classes - 1 = 3: found 4\."):
            run(jnp.array([0, 4, 1]))
        with pytest.raises(TypeError, match=r"integers below num_classes=4: got float32\."):
            run(jnp.ones((N, K)))
        with pytest.raises(ValueError, match=r"leading axes of x or 1: got shape \(2,\) for x"):
            run(jnp.zeros(2, int))
    with pytest.raises(TypeError, match=r"of floats: got int32 of shape \(3,\)\. Pass num_c"):
        by_vector(x, jnp.zeros(N, int))
    for sizes in ((None, None), (K, 4)):
        with pytest.raises(ValueError, match="exactly one of condition_features and num_classes"):
            jn.nnx.ConditionalBatchNorm(C, sizes[0], num_classes=sizes[1], rngs=rngs)
    with pytest.raises(ValueError, match=r"x must have as many features as ConditionalBatchNorm"):
        by_label(x[..., :2], jnp.zeros(N, int))
    with pytest.raises(ValueError, match=r"condition must have as many features as Condit.*, 5:"):
        by_vector(x, jnp.ones((N, 2)))


@each_kind
def test_names_of_arguments(row, rng):
    x, condition = jnp.ones(SHAPE), row.condition(rng)
    made = row.nnx()
    for run in (made, partial(row.linen().init, jax.random.key(0))):
        with pytest.raises(TypeError, match=r"weights must be an argument of a call of .* mask\?"):
            run(x, condition, weights=None)
        with pytest.raises(TypeError, match="mask must be boolean or float weights"):
            run(x, condition, mask=np.ones(SHAPE, np.int32))
    with pytest.raises(TypeError, match=r"param_dtyp must be an argument of .* param_dtype\?"):
        row.nnx(param_dtyp=jnp.float32)
    with pytest.raises(TypeError, match=r"param_dtyp must be an argument of .* param_dtype\?"):
        row.linen(param_dtyp=jnp.float32)


SHARDED = [ROWS[0], ROWS[7], ROWS[8]]


@pytest.mark.parametrize("row", long_sweep(SHARDED, quick=SHARDED[1:2]), ids=str)
def test_sharded_batches_are_as_whole_ones(row, rng):
    """By the compiler, and by a named axis, over two devices."""
    x = jnp.asarray(rng.standard_normal((4, H, W, C)), jnp.float32)
    condition = jnp.concatenate([row.condition(rng), row.condition(rng)[:1]])
    module, variables = row.variables(rng, x, condition, axis_name="data" if row.running else None)
    truth, state = apply(module, variables, x, condition)
    mesh = Mesh(np.array(HOST[:2]), ("data",))
    parts = NamedSharding(mesh, P("data"))
    split = [jax.device_put(array, parts) for array in (x, condition)]
    run = lambda *given: module.apply(variables, *given, mutable=["batch_stats"])
    by_axis = shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()))
    for sharded in (run, by_axis):
        y, new = jax.jit(sharded)(*split)
        np.testing.assert_allclose(only_y(y), only_y(truth), atol=2e-6)
        for name, value in state.items():
            np.testing.assert_allclose(new["batch_stats"][name], value, atol=1e-6)
