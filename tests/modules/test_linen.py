"""Test the linen modules: drop-in for Flax's, and better where Flax is wrong."""

from contextlib import suppress
from functools import partial
from itertools import product

import chex
import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import HOST, long_sweep
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import worst

import jaxnorm as jn
from jaxnorm import linen as jn_nn
from jaxnorm import nnx as jn_nnx

KEY = jax.random.key(0)

SAME = [
    ("LayerNorm", {}, {}),
    ("LayerNorm", {"reduction_axes": (1, 2, 3)}, {}),
    ("LayerNorm", {"reduction_axes": (1, 2), "feature_axes": -1, "use_bias": False}, {}),
    ("LayerNorm", {"reduction_axes": (2, 3), "feature_axes": (2, 3), "use_scale": False}, {}),
    ("RMSNorm", {}, {}),
    ("RMSNorm", {"reduction_axes": (2, 3), "feature_axes": (2, 3)}, {}),
    ("InstanceNorm", {}, {}),
    ("InstanceNorm", {"feature_axes": (2, 3)}, {}),
    ("GroupNorm", {"num_groups": 4}, {}),
    ("GroupNorm", {"num_groups": None, "group_size": 2, "reduction_axes": (1, 3)}, {}),
    ("BatchNorm", {}, {"use_running_average": False}),
    ("BatchNorm", {"momentum": 0.5, "epsilon": 1e-3, "axis": 1}, {"use_running_average": False}),
    ("BatchNorm", {"axis": (1, 3)}, {"use_running_average": False}),
    ("BatchNorm", {"axis": (1, 3)}, {"use_running_average": True}),
    ("BatchNorm", {"use_running_average": True, "dtype": jnp.bfloat16}, {}),
]


def disturb(variables):
    """Parameters and state that are no ones and zeros, of whatever names; by NumPy, since JAX would
    compile programs for each shape.
    """
    draw = lambda leaf: np.random.default_rng(0).uniform(0.1, 0.3, leaf.shape).astype(leaf.dtype)
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + draw(leaf)), variables)


def applied(module, variables, x, **call):
    """Of Flax's modules: output and state in one program, of which they make ten where each step is
    called by itself.
    """
    return jax.jit(partial(module.apply, mutable=["batch_stats"], **call))(variables, x)


def assert_rounded(found, truth):
    """``found`` is the rounding, to its own dtype, of numbers within 1e-5 of ``truth``, which is
    float32.
    """
    found, truth = map(np.asarray, (found, truth))
    low, high = ((truth + np.float32(offset)).astype(found.dtype) for offset in (-1e-5, 1e-5))
    assert ((low <= found) & (found <= high)).all()


@pytest.mark.parametrize(
    ("name", "options", "call"),
    long_sweep(SAME, quick=SAME[::2]),
    ids=[f"{row[0]} {row[1]}" for row in SAME],
)
def test_same_parameters_state_and_output_as_flax(name, options, call, rng):
    x = jnp.asarray(rng.standard_normal((4, 5, 6, 8)) * 2 + 1, jnp.float32)
    theirs, ours = getattr(flax_nn, name)(**options), getattr(jn_nn, name)(**options)
    variables, initial = jax.jit(partial(theirs.init, **call))(KEY, x), ours.init(KEY, x, **call)
    for found, truth in zip(jax.tree.leaves(initial), jax.tree.leaves(variables), strict=True):
        np.testing.assert_array_equal(found, truth)
    checkpoint = serialization.to_bytes(disturb(variables))
    restored = serialization.from_bytes(initial, checkpoint)
    found = ours.apply(restored, x, mutable=["batch_stats"], **call)
    truth = applied(theirs, restored, x, **call)
    chex.assert_trees_all_equal_dtypes(found, truth)
    # Which way a number between two halves is rounded depends on its last bit, so on the CPU:
    # float32 is compared.
    unrounded = applied(theirs.clone(dtype=None), restored, x, **call)
    jax.tree.map(assert_rounded, found, unrounded)


class Net(flax_nn.Module):
    """A model that changes one import."""

    nn: object

    @flax_nn.compact
    def __call__(self, x, train: bool):
        x = flax_nn.Conv(8, (3, 3))(x)
        x = flax_nn.relu(self.nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = flax_nn.relu(self.nn.GroupNorm(num_groups=4)(flax_nn.Conv(8, (3, 3))(x)))
        x = x.mean((1, 2))
        return flax_nn.Dense(3)(self.nn.LayerNorm()(x))


def train(model, variables, x, labels, steps=5):
    optimizer = optax.sgd(1e-2)
    params, stats = variables["params"], variables["batch_stats"]
    state = optimizer.init(params)

    @jax.jit
    def step(params, stats, state):
        def loss(params):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"]
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new[
                "batch_stats"
            ]

        (_, stats_), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state_ = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), stats_, state_

    for _ in range(steps):
        params, stats, state = step(params, stats, state)
    return {"params": params, "batch_stats": stats}


def test_a_model_that_changes_its_import_trains_the_same(rng):
    x, labels = (
        jnp.asarray(rng.standard_normal((16, 8, 8, 3)), jnp.float32),
        jnp.asarray(rng.integers(0, 3, 16)),
    )
    theirs, ours = Net(flax_nn), Net(jn_nn)
    variables = theirs.init(KEY, x, False)
    assert jax.tree.structure(variables) == jax.tree.structure(
        jax.eval_shape(partial(ours.init, train=False), KEY, x)
    )
    after, truth = train(ours, variables, x, labels), train(theirs, variables, x, labels)
    for got, want in zip(
        jax.tree.leaves(after["batch_stats"]), jax.tree.leaves(truth["batch_stats"]), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-3)
    for training in (False, True):
        found = ours.apply(truth, x, training, mutable=["batch_stats"])[0]
        np.testing.assert_allclose(
            found, theirs.apply(truth, x, training, mutable=["batch_stats"])[0], atol=1e-5
        )


def test_running_statistics_follow_the_documented_formula(rng):
    x = rng.standard_normal((16, 3)).astype(np.float32) + 2
    norm = jn_nn.BatchNorm(momentum=0.75, use_running_average=False)
    variables = norm.init(KEY, x)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], np.zeros(3))
    _, state = norm.apply(variables, x, mutable=["batch_stats"])
    np.testing.assert_allclose(state["batch_stats"]["mean"], 0.25 * x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(state["batch_stats"]["var"], 0.75 + 0.25 * x.var(0), rtol=1e-6)


@pytest.mark.parametrize("name", long_sweep(["BatchNorm", "SwitchableNorm"], quick=["BatchNorm"]))
@pytest.mark.parametrize("bad", ["nan", "empty", "masked"])
def test_a_broken_batch_leaves_the_state(name, bad):
    norm = getattr(jn_nn, name)(use_running_average=False)
    x = jnp.ones((4, 5, 5, 3)) + jnp.arange(3.0).reshape(1, 1, 1, 3)
    variables = disturb(norm.init(KEY, x))
    batch = {"nan": x * jnp.nan, "empty": x[:0], "masked": x}[bad]
    mask = jnp.zeros((4, 1, 1, 1), bool) if bad == "masked" else None
    _, state = norm.apply(variables, batch, mask=mask, mutable=["batch_stats"])
    for after, before in zip(
        jax.tree.leaves(state["batch_stats"]),
        jax.tree.leaves(variables["batch_stats"]),
        strict=True,
    ):
        np.testing.assert_array_equal(after, before)


def test_float_masks_and_masks_of_one_channel(rng):
    x = jnp.asarray(rng.standard_normal((4, 6, 8)), jnp.float32)
    mask = jnp.asarray(rng.random((4, 6, 1)) < 0.6)
    for norm in (
        jn_nn.GroupNorm(num_groups=2),
        jn_nn.LayerNorm(reduction_axes=(1, 2)),
        jn_nn.InstanceNorm(),
    ):
        variables = norm.init(KEY, x)
        y = norm.apply(variables, np.where(mask, x, np.nan).astype(np.complex64), mask=mask)
        np.testing.assert_allclose(
            y, norm.apply(variables, x, mask=mask.astype(jnp.float32)), atol=1e-6
        )


def test_an_axis_name_that_is_not_bound_is_ignored(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    for norm in (
        jn_nn.LayerNorm(axis_name="d"),
        jn_nn.RMSNorm(axis_name="d"),
        jn_nn.BatchNorm(False, axis_name="d"),
    ):
        y, variables = norm.init_with_output(KEY, x)
        assert y.shape == x.shape
        norm.apply(variables, x, mutable=["batch_stats"])


@pytest.mark.parametrize(
    "transform",
    [
        partial(jax.vmap, axis_name="replica"),
        partial(jax.pmap, axis_name="replica", devices=HOST[:2]),
    ],
    ids=["vmap", "pmap"],
)
@pytest.mark.parametrize(
    "axis_name", ["data", pytest.param(("replica", "data"), marks=pytest.mark.slow)]
)
def test_an_axis_name_beside_those_that_are_bound_is_a_mistake(axis_name, transform):
    x = jnp.ones((2, 4, 5, 3))
    modules = (
        jn_nn.LayerNorm,
        jn_nn.RMSNorm,
        partial(jn_nn.BatchNorm, False),
        partial(jn_nn.SwitchableNorm, False),
    )
    for norm in (module(axis_name=axis_name) for module in modules):
        # where Flax's batch norm shares nothing either
        variables = transform(lambda x, norm=norm: norm.init(KEY, x))(x)
        with pytest.raises(ValueError, match="among the axes that are bound here, 'replica': got"):
            transform(lambda v, x, norm=norm: norm.apply(v, x, mutable=["batch_stats"])[0])(
                variables, x
            )
    unnamed = partial(jax.pmap, devices=HOST[:2])  # binds no axis
    unnamed(lambda x: jn_nn.LayerNorm(axis_name="data").init_with_output(KEY, x)[0])(x)


def test_replicas_share_their_statistics(rng):
    x = jnp.asarray(rng.standard_normal((2, 4, 3)), jnp.float32)
    norm = jn_nn.BatchNorm(False, axis_name="d")
    variables = norm.init(KEY, x[0])
    apply = partial(norm.apply, variables, mutable=["batch_stats"])
    y, state = jax.vmap(apply, axis_name="d")(x)
    whole, truth = jn_nn.BatchNorm(False).apply(variables, x.reshape(8, 3), mutable=["batch_stats"])
    np.testing.assert_allclose(y.reshape(8, 3), whole, atol=1e-6)
    np.testing.assert_allclose(
        state["batch_stats"]["mean"][1], truth["batch_stats"]["mean"], atol=1e-7
    )
    groups = jn_nn.BatchNorm(False, axis_name="d", axis_index_groups=[[0], [1]])
    y = jax.pmap(
        lambda x: groups.apply(variables, x, mutable=["batch_stats"])[0],
        axis_name="d",
        devices=HOST[:2],
    )(x)
    np.testing.assert_allclose(
        y[0], jn_nn.BatchNorm(False).apply(variables, x[0], mutable=["batch_stats"])[0], atol=1e-6
    )


@pytest.mark.slow
def test_groups_of_replicas_share_the_statistics_of_switchable_norm(rng):
    x = jnp.asarray(rng.standard_normal((4, 2, 5, 3)), jnp.float32)
    norm = jn_nn.SwitchableNorm(False, axis_name="d", axis_index_groups=[[0, 3], [1, 2]])
    variables = norm.init(KEY, x[0])
    y, state = jax.pmap(
        partial(norm.apply, variables, mutable=["batch_stats"]), axis_name="d", devices=HOST[:4]
    )(x)
    for group in map(np.array, ([0, 3], [1, 2])):
        whole, truth = jn_nn.SwitchableNorm(False).apply(
            variables, x[group].reshape(4, 5, 3), mutable=["batch_stats"]
        )
        np.testing.assert_allclose(y[group].reshape(4, 5, 3), whole, atol=1e-6)
        for name in ("mean", "var"):
            np.testing.assert_allclose(
                state["batch_stats"][name][group], [truth["batch_stats"][name]] * 2, atol=1e-6
            )


EXPLICIT = [*product(["linen", "nnx"], ["BatchNorm", "SwitchableNorm"], ["whole", "sharded"])]


@pytest.mark.parametrize(
    ("family", "name", "state"), long_sweep(EXPLICIT, quick=[("linen", "BatchNorm", "whole")])
)
def test_training_where_channels_are_explicitly_sharded(family, name, state, rng):
    """Output, gradients and state as on one device; the state lies as it did."""
    of_state = P("model") if state == "sharded" else P(None)
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), devices=HOST, axis_types=(AxisType.Explicit,) * 2
    )
    x = rng.standard_normal((8, 4, 6)).astype(np.float32)
    nnx_norm = getattr(jn_nnx, name)(6, use_running_average=False, rngs=nnx.Rngs(0))
    graph, variables = nnx.split(nnx_norm)
    if family == "linen":
        norm = getattr(jn_nn, name)(use_running_average=False)
        variables = norm.init(KEY, x)

    def step(variables, x):
        if family == "linen":
            y, new = norm.apply(variables, x, mutable=["batch_stats"])
            return y, (new["batch_stats"]["mean"], new["batch_stats"]["var"])
        module = nnx.merge(graph, variables, copy=True)
        return module(x), (module.mean[...], module.var[...])

    run = jax.jit(
        jax.value_and_grad(
            lambda v, x: (lambda y, state: (jnp.sin(y).sum(), (y, state)))(*step(v, x)),
            (0, 1),
            has_aux=True,
        )
    )
    truth = run(variables, x)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda leaf: jax.device_put(
                leaf, NamedSharding(mesh, of_state if leaf.shape == (6,) else P())
            ),
            variables,
        )
        found = run(placed, jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))))
        assert all(jax.typeof(leaf).sharding.spec == of_state for leaf in found[0][1][1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), found, truth)


def test_scan_vmap_and_remat(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)

    class Block(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x, _=None):
            return jn_nn.BatchNorm(use_running_average=False)(
                flax_nn.Dense(8)(jn_nn.LayerNorm()(x))
            ), None

    collections = {"params": 0, "batch_stats": 0}
    scanned = flax_nn.scan(
        flax_nn.remat(Block), variable_axes=collections, split_rngs={"params": True}, length=3
    )()
    variables = scanned.init(KEY, x, None)
    assert variables["params"]["LayerNorm_0"]["scale"].shape == (3, 8)
    (y, _), state = scanned.apply(variables, x, None, mutable=["batch_stats"])
    truth = x
    for i in range(3):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
        (truth, _), new = Block().apply(layer, truth, mutable=["batch_stats"])
        np.testing.assert_allclose(
            state["batch_stats"]["BatchNorm_0"]["mean"][i],
            new["batch_stats"]["BatchNorm_0"]["mean"],
            atol=1e-7,
        )
    np.testing.assert_allclose(y, truth, atol=1e-5)
    mapped = flax_nn.vmap(
        Block, variable_axes=collections, split_rngs={"params": True}, in_axes=0
    )()
    y, _ = mapped.init_with_output(KEY, jnp.stack([x, 2 * x]))[0]
    assert y.shape == (2, 4, 8)


def test_partitioning_metadata(rng):
    boxed = flax_nn.with_partitioning(flax_nn.initializers.ones, ("features",))
    variables = jn_nn.LayerNorm(scale_init=boxed).init(KEY, jnp.ones((2, 8)))
    assert flax_nn.get_partition_spec(variables)["params"]["scale"] == jax.sharding.PartitionSpec(
        "features"
    )


def test_half_precision_input_and_parameters(rng):
    """The statistics see the input as it is; the output has the dtype that Flax's would have."""
    x = jnp.asarray(rng.standard_normal((6, 64)) + 100, jnp.bfloat16)
    y, _ = jn_nn.LayerNorm().init_with_output(KEY, x)
    exact = np.asarray(x).astype(np.float64)
    truth = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-6)
    assert y.dtype == jnp.float32
    assert worst(y, truth, 1) <= 4e-7
    assert jn_nn.LayerNorm(dtype=jnp.bfloat16).init_with_output(KEY, x)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_have_the_bits_of_the_functions(dtype, rng):
    x = jnp.asarray(rng.standard_normal((4, 5, 6, 8)), dtype)
    scale, bias = jnp.asarray(rng.standard_normal((2, 8)), jnp.float32)
    params, options = (
        {"params": {"scale": scale, "bias": bias}},
        {"scale": scale, "bias": bias, "dtype": jnp.float32},
    )
    pairs = [
        (jn_nn.LayerNorm(), jn.layer_norm(x, **options)),
        (jn_nn.InstanceNorm(), jn.instance_norm(x, **options)),
        (jn_nn.GroupNorm(4), jn.group_norm(x, 4, **options)),
        (jn_nn.BatchNorm(False), jn.batch_norm(x, **options)[0]),
    ]
    for module, truth in pairs:
        stats = (
            {"batch_stats": {"mean": jnp.zeros(8), "var": jnp.ones(8)}}
            if isinstance(module, jn_nn.BatchNorm)
            else {}
        )
        np.testing.assert_array_equal(
            module.apply({**params, **stats}, x, mutable=["batch_stats"])[0], truth
        )


WRAPPING = [lambda: flax_nn.Dense(7), lambda: flax_nn.Conv(7, (3, 3))]
WRAPPED = [
    ("WeightNorm", {}, {}),
    ("WeightNorm", {"feature_axes": None}, {}),
    ("WeightNorm", {"use_scale": False}, {}),
]
WRAPPED += [
    ("SpectralNorm", {"n_steps": n}, {"update_stats": update})
    for n in (1, 3)
    for update in (False, True)
]


@pytest.mark.parametrize(
    ("name", "options", "call"), WRAPPED, ids=[f"{row[0]} {row[1]} {row[2]}" for row in WRAPPED]
)
@pytest.mark.parametrize("make", long_sweep(WRAPPING, quick=WRAPPING[1:]), ids=["dense", "conv"])
def test_norms_of_weights_equal_flax(name, options, call, make, rng):
    class Model(flax_nn.Module):
        nn: object

        @flax_nn.compact
        def __call__(self, x):
            return getattr(self.nn, name)(make(), **options)(x, **call)

    x = jnp.asarray(rng.standard_normal((4, 5, 5, 6)), jnp.float32)
    theirs, ours = Model(flax_nn), Model(jn_nn)
    variables = theirs.init(KEY, x)
    assert jax.tree.structure(variables) == jax.tree.structure(jax.eval_shape(ours.init, KEY, x))
    variables = disturb(variables)
    found, truth = (model.apply(variables, x, mutable=["batch_stats"]) for model in (ours, theirs))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


BOXED = flax_nn.with_partitioning(flax_nn.initializers.lecun_normal(), (None, "features"))


@pytest.mark.parametrize("filtered", [{"kernel"}, None])  # None: the bias, which is in no box, too
def test_weight_norm_of_partitioned_kernels(filtered, rng):
    """As without the metadata, and as Flax's where that is new enough to take them."""
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    boxed, plain = (
        jn_nn.WeightNorm(flax_nn.Dense(7, kernel_init=init), variable_filter=filtered)
        for init in (BOXED, BOXED.__wrapped__)
    )
    theirs = flax_nn.WeightNorm(flax_nn.Dense(7, kernel_init=BOXED), variable_filter=filtered)
    variables = boxed.init(KEY, x)
    params = flax_nn.unbox(variables)["params"]
    assert (
        "layer_instance/bias/scale" in params,
        "layer_instance/kernel/value/scale" in params,
    ) == (filtered is None, True)
    renamed = {"params": {key.replace("/value/", "/"): value for key, value in params.items()}}
    others = [(plain, renamed)]
    with suppress(AttributeError):
        chex.assert_trees_all_close(variables, theirs.init(KEY, x), rtol=1e-6)
        others.append((theirs, variables))
    for other, same in others:
        found, truth = (
            jax.value_and_grad(lambda v, module=module: jnp.sin(module.apply(v, x)).sum())(
                disturb(v)
            )
            for module, v in ((boxed, variables), (other, same))
        )
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_spectral_norm_of_partitioned_kernels(rng):
    """As without the metadata; Flax's takes none with it."""
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    boxed, plain = (
        jn_nn.SpectralNorm(flax_nn.Dense(7, kernel_init=init))
        for init in (BOXED, BOXED.__wrapped__)
    )
    variables, truth = (norm.init(KEY, x, update_stats=False) for norm in (boxed, plain))
    assert flax_nn.get_partition_spec(variables)["params"]["layer_instance"][
        "kernel"
    ] == jax.sharding.PartitionSpec(None, "features")
    state, expected = variables["batch_stats"], truth["batch_stats"]
    assert sorted(state) == ["layer_instance/kernel/value/sigma", "layer_instance/kernel/value/u"]
    chex.assert_trees_all_equal(
        {key.replace("/value/", "/"): leaf for key, leaf in state.items()}, expected
    )
    found = [
        norm.apply(v, x, update_stats=True, mutable=["batch_stats"])
        for norm, v in ((boxed, variables), (plain, truth))
    ]
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_edge_cases_that_flax_takes(rng):
    """No axis to reduce: every element is a group of its own; complex running means; kernels
    normalized element by element.
    """
    x = jnp.asarray(rng.standard_normal((10,)), jnp.float32)
    y, _ = jn_nn.BatchNorm(False, axis_name="batch").init_with_output(KEY, x)
    np.testing.assert_array_equal(y, np.zeros(10))
    rows = jnp.asarray(rng.standard_normal((10, 6)), jnp.float32)
    np.testing.assert_array_equal(
        jn_nn.InstanceNorm().init_with_output(KEY, rows)[0], np.zeros((10, 6))
    )
    images = jnp.asarray(rng.standard_normal((3, 4, 32)), jnp.float32)
    unbatched = jn_nn.GroupNorm(2, reduction_axes=(-3, -2, -1)).init_with_output(KEY, images)[0]
    batched = jn_nn.GroupNorm(2, reduction_axes=(-3, -2, -1)).init_with_output(KEY, images[None])[0]
    np.testing.assert_allclose(unbatched, batched[0], atol=1e-6)
    with pytest.raises(ValueError, match="cannot include the leading dimension"):
        jn_nn.InstanceNorm(feature_axes=(0, 2)).init(KEY, images)
    with pytest.raises(ValueError, match="Input is 3D but error_on_non_matrix is True"):
        jn_nn.SpectralNorm(flax_nn.DenseGeneral((3, 4)), error_on_non_matrix=True).init(
            KEY, rows, update_stats=False
        )


def test_complex_batches_have_complex_running_means(rng):
    x = jnp.asarray(
        rng.standard_normal((8, 3)) + 1j * rng.standard_normal((8, 3)) + 2, jnp.complex64
    )
    mask = rng.random((8, 1)) < 0.7
    norm = jn_nn.BatchNorm(False, momentum=0.9, dtype=jnp.complex64)
    y, variables = norm.init_with_output(KEY, x)
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(y.mean(0), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(y.var(0), np.ones(3), rtol=1e-4)
    _, state = norm.apply(
        variables, jnp.where(mask, x, jnp.nan), mask=mask, mutable=["batch_stats"]
    )
    np.testing.assert_allclose(state["batch_stats"]["mean"], 0.1 * x.mean(0, where=mask), rtol=1e-5)
    np.testing.assert_allclose(
        state["batch_stats"]["var"], 0.9 + 0.1 * x.var(0, where=mask), rtol=1e-5
    )


@pytest.mark.parametrize("axes", [(0, 1), (), 0, 1])
@pytest.mark.parametrize("word", ["kernel", "bias"])
def test_weight_norm_over_any_axes(axes, word, rng):
    if word == "bias" and axes not in ((), 0):
        pytest.skip("a bias has one axis")
    layer = flax_nn.Dense(2, bias_init=flax_nn.initializers.normal())
    norm = jn_nn.WeightNorm(layer, feature_axes=axes, variable_filter={word})
    x = jnp.asarray(rng.standard_normal((1, 3)), jnp.float32)
    variables = disturb(norm.init(KEY, x))
    params = {
        name: np.asarray(value) for name, value in variables["params"]["layer_instance"].items()
    }
    scale = variables["params"][f"layer_instance/{word}/scale"]
    features = (axes,) if isinstance(axes, int) else axes
    reduced = tuple(axis for axis in range(params[word].ndim) if axis not in features)
    length = np.sqrt((np.asarray(params[word], np.float64) ** 2).sum(reduced, keepdims=True))
    params[word] = params[word] / length * np.expand_dims(scale, reduced)
    np.testing.assert_allclose(
        norm.apply(variables, x),
        np.asarray(x) @ params["kernel"] + np.asarray(params["bias"]),
        atol=1e-6,
    )


PAIRS = [
    (jn_nn.LayerNorm(reduction_axes=(1, 2, 3)), jn_nn.GroupNorm(num_groups=1)),
    (jn_nn.InstanceNorm(), jn_nn.GroupNorm(num_groups=None, group_size=1)),
    (jn_nn.LayerNorm(reduction_axes=(1, 2)), jn_nn.InstanceNorm()),
    (
        jn_nn.LayerNorm(reduction_axes=-2, feature_axes=(1, 3)),
        jn_nn.InstanceNorm(feature_axes=(1, -1)),
    ),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda m: type(m).__name__)
def test_norms_that_are_the_same_agree_to_1e_7(one, other, rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 4, 5)), jnp.float32)
    np.testing.assert_allclose(
        one.init_with_output(KEY, x)[0], other.init_with_output(KEY, x)[0], atol=1e-7
    )
