"""Test the nnx modules: drop-in for Flax's, twins of the linen ones, better where Flax is wrong."""

import re

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import TWINS, long_sweep
from flax import nnx
from orbax import checkpoint

from jaxnorm import linen as jn_linen
from jaxnorm import nnx as jn_nnx
from jaxnorm.nnx.flax_versions import Absent

KEY = jax.random.key(0)
# Flax before 0.12.1: no norms of weights, no promote_dtype, no metadata
OLDER = not hasattr(nnx, "WeightNorm")
wraps_layers = pytest.mark.skipif(
    OLDER, reason="this Flax has no such class: a test below has the error"
)

SAME = [
    ("LayerNorm", 8, {}),
    ("LayerNorm", 8, {"reduction_axes": (1, 2, 3), "use_bias": False}),
    ("RMSNorm", 8, {}),
    ("InstanceNorm", 8, {}),
    ("GroupNorm", 8, {"num_groups": 4}),
    ("GroupNorm", 8, {"num_groups": None, "group_size": 2, "use_scale": False}),
    ("BatchNorm", 8, {}),
    ("BatchNorm", 5, {"axis": 1, "momentum": 0.5, "epsilon": 1e-3}),
    ("BatchNorm", 8, {"dtype": jnp.bfloat16}),
]


def leaves(module):
    return dict(nnx.to_flat_state(nnx.state(module)))


def disturb(module):
    """By NumPy: JAX would compile programs for each shape."""
    for variable in leaves(module).values():
        draw = np.random.default_rng(0).uniform(0.1, 0.3, variable.shape).astype(variable.dtype)
        variable[...] = jnp.asarray(np.asarray(variable[...]) + draw)


@pytest.mark.parametrize(
    ("name", "features", "options"),
    long_sweep(SAME, quick=SAME[::2]),
    ids=[f"{row[0]} {row[2]}" for row in SAME],
)
def test_same_parameters_state_and_output_as_flax(name, features, options, rng):
    if not hasattr(nnx, name):
        pytest.skip(f"this Flax has no nnx.{name}")
    x = jnp.asarray(rng.standard_normal((4, 5, 6, 8)) * 2 + 1, jnp.float32)
    theirs, ours = (
        getattr(nn, name)(features, **options, rngs=nnx.Rngs(0)) for nn in (nnx, jn_nnx)
    )
    assert {path: type(leaf) for path, leaf in leaves(ours).items()} == {
        path: type(leaf) for path, leaf in leaves(theirs).items()
    }
    disturb(theirs)
    nnx.update(ours, nnx.state(theirs))
    # Flax rounds x to bfloat16 before its statistics
    tolerance = 2e-2 if options.get("dtype") else 1e-5
    for mode in ("train", "eval"):
        for module in (ours, theirs):
            getattr(module, mode)()
        with jax.numpy_dtype_promotion("standard"):  # Flax relies on it
            found, truth = ours(x), nnx.jit(lambda module, x: module(x))(theirs, x)
        assert found.dtype == truth.dtype
        np.testing.assert_allclose(
            *(np.asarray(y).astype(np.float32) for y in (found, truth)),
            atol=tolerance,
            rtol=tolerance,
        )
        for path, leaf in leaves(ours).items():
            np.testing.assert_allclose(leaf[...], leaves(theirs)[path][...], atol=tolerance)


def linen_twin(name, options, x, module):
    """The output and new state of the linen module with the state of an nnx one."""
    twin = getattr(jn_linen, name)(**options)
    state = {path[0]: leaf for path, leaf in leaves(module).items()}
    params = {key: leaf[...] for key, leaf in state.items() if isinstance(leaf, nnx.Param)}
    stats = {key: leaf[...] for key, leaf in state.items() if isinstance(leaf, nnx.BatchStat)}
    return twin.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])


@pytest.mark.parametrize("dtype", long_sweep(["float32", "bfloat16"], quick=["bfloat16"]))
@pytest.mark.parametrize(("name", "options"), TWINS, ids=[f"{row[0]} {row[1]}" for row in TWINS])
def test_linen_and_nnx_agree_to_the_bit(name, options, dtype, rng):
    x = jnp.asarray(rng.standard_normal((4, 5, 6, 8)) * 2 + 1, dtype)
    module = getattr(jn_nnx, name)(8, **options, rngs=nnx.Rngs(0))
    disturb(module)
    truth, state = linen_twin(name, options, x, module)
    found = module(x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(
            *(np.asarray(leaf).astype(np.float32) for leaf in (one, other))
        )
    for key, leaf in state.get("batch_stats", {}).items():
        np.testing.assert_array_equal(getattr(module, key)[...], leaf)


class Net(nnx.Module):
    """A model that changes one import; with Flax's two passes, since its one-pass default strays by
    the bound.
    """

    def __init__(self, nn, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.batch = nn.BatchNorm(8, momentum=0.9, use_fast_variance=False, rngs=rngs)
        self.group = nn.GroupNorm(8, num_groups=4, use_fast_variance=False, rngs=rngs)
        self.layer = nn.LayerNorm(8, use_fast_variance=False, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.group(nnx.relu(self.batch(self.conv(x)))))
        return self.head(self.layer(x.mean((1, 2))))


def test_a_model_that_changes_its_import_trains_the_same(rng):
    x, labels = (
        jnp.asarray(rng.standard_normal((16, 8, 8, 3)), jnp.float32),
        jnp.asarray(rng.integers(0, 3, 16)),
    )
    ours, theirs = Net(jn_nnx, nnx.Rngs(0)), Net(nnx, nnx.Rngs(0))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for model in (ours, theirs):
        model.train()
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
        for _ in range(5):
            step(model, optimizer)
    for path, leaf in leaves(ours).items():
        np.testing.assert_allclose(leaf[...], leaves(theirs)[path][...], atol=1e-4)
    nnx.update(ours, nnx.state(theirs))
    ours.eval()
    theirs.eval()
    np.testing.assert_allclose(ours(x), theirs(x), atol=1e-5)


@pytest.mark.parametrize("name", long_sweep(["BatchNorm", "SwitchableNorm"], quick=["BatchNorm"]))
@pytest.mark.parametrize("bad", ["nan", "empty", "masked"])
def test_a_broken_batch_leaves_the_state(name, bad):
    norm = getattr(jn_nnx, name)(3, rngs=nnx.Rngs(0))
    disturb(norm)
    before = jax.tree.map(jnp.copy, nnx.state(norm, nnx.BatchStat))
    x = jnp.ones((4, 5, 5, 3))
    norm(
        {"nan": x * jnp.nan, "empty": x[:0], "masked": x}[bad],
        mask=jnp.zeros((4, 1, 1, 1), bool) if bad == "masked" else None,
    )
    for found, truth in zip(
        jax.tree.leaves(nnx.state(norm, nnx.BatchStat)), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(found, truth)


def test_an_axis_name_beside_those_that_are_bound_is_a_mistake():
    for norm in (
        jn_nnx.LayerNorm(3, axis_name="data", rngs=nnx.Rngs(0)),
        jn_nnx.BatchNorm(3, axis_name="data", rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(
            ValueError, match="among the axes that are bound here, 'replica': got 'data'"
        ):
            jax.vmap(norm, axis_name="replica")(jnp.ones((2, 4, 3)))


def test_group_norm_over_some_axes_equals_linen(rng):
    """Flax's nnx.GroupNorm is silently wrong here."""
    x = jnp.asarray(rng.standard_normal((2, 4, 5, 6)), jnp.float32)
    found = jn_nnx.GroupNorm(6, 2, reduction_axes=(1, 3), rngs=nnx.Rngs(0))(x)
    exact = np.asarray(x, np.float64).reshape(2, 4, 5, 2, 3)
    truth = (exact - exact.mean((1, 4), keepdims=True)) / np.sqrt(
        exact.var((1, 4), keepdims=True) + 1e-6
    )
    np.testing.assert_allclose(found, truth.reshape(x.shape), atol=2e-6)


def test_two_feature_axes_have_flat_parameters(rng):
    x = jnp.asarray(rng.standard_normal((3, 4, 5, 6)), jnp.float32)
    norm = jn_nnx.BatchNorm(24, axis=(1, 3), momentum=0.0, rngs=nnx.Rngs(0))
    truth = jn_linen.BatchNorm(False, axis=(1, 3)).init_with_output(KEY, x)[0]
    np.testing.assert_allclose(norm(x), truth, atol=1e-6)
    np.testing.assert_allclose(norm.mean[...], x.mean((0, 2)).ravel(), atol=1e-6)
    norm.eval()
    np.testing.assert_allclose(norm(x), truth, atol=1e-5)


def test_scan_and_vmap_over_layers(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return jn_nnx.BatchNorm(8, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(norm, x):
        return jnp.sin(norm(x))

    norms = make(nnx.Rngs(0))
    found = forward(norms, x)
    truth = x
    for i in range(3):
        norm = jn_nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        truth = jnp.sin(norm(truth))
        np.testing.assert_allclose(norms.mean[...][i], norm.mean[...], atol=1e-7)
    np.testing.assert_allclose(found, truth, atol=1e-5)


def test_a_view_evaluates_without_touching_the_model(rng):
    if not hasattr(nnx, "view"):
        pytest.skip("this Flax has no nnx.view")
    x = jnp.asarray(rng.standard_normal((4, 3)), jnp.float32)
    norm = jn_nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    view = nnx.view(norm, use_running_average=True)
    np.testing.assert_allclose(view(x), x / np.sqrt(1 + 1e-5), rtol=1e-6)
    assert norm.use_running_average is False


def test_metadata_reaches_the_parameters():
    if OLDER:  # neither Flax's class
        with pytest.raises(
            TypeError,
            match="scale_metadata must be an argument of LayerNorm, which takes num_features, ",
        ):
            jn_nnx.LayerNorm(8, scale_metadata={"tag": "gain"}, rngs=nnx.Rngs(0))
        return
    norm = jn_nnx.LayerNorm(
        8, scale_metadata={"tag": "gain"}, bias_metadata={"tag": "shift"}, rngs=nnx.Rngs(0)
    )
    assert (norm.scale.tag, norm.bias.tag) == ("gain", "shift")


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "BatchNorm"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_promotion_rule_of_the_user_is_kept(name, mode, rng):
    """It is given all arrays, those of the running statistics too, and makes the dtype of the
    output.
    """
    x = jnp.asarray(rng.standard_normal((4, 8)) + 100, jnp.float32)
    given = []

    def to_half(arrays, *, dtype):
        given.append([None if a is None else a.shape for a in arrays])
        return tuple(None if a is None else a.astype(jnp.bfloat16) for a in arrays)

    if OLDER:  # neither Flax's class
        with pytest.raises(
            TypeError,
            match=f"promote_dtype must be an argument of {name}, which takes num_features, ",
        ):
            getattr(jn_nnx, name)(8, promote_dtype=to_half, rngs=nnx.Rngs(0))
        return
    ours, theirs = (
        getattr(nn, name)(8, promote_dtype=to_half, rngs=nnx.Rngs(0)) for nn in (jn_nnx, nnx)
    )
    plain = getattr(jn_nnx, name)(8, rngs=nnx.Rngs(0))
    for norm in (ours, theirs, plain):
        getattr(norm, mode)()
    found = ours(x)
    with jax.numpy_dtype_promotion("standard"):
        assert found.dtype == theirs(x).dtype == jnp.bfloat16
    assert given[0] == given[1]
    np.testing.assert_array_equal(found, plain(x.astype(jnp.bfloat16)).astype(jnp.bfloat16))


def test_group_norm_has_scale_and_bias_along_its_feature_axis_as_flax(rng):
    x = jnp.asarray(rng.standard_normal((2, 8, 8)), jnp.float32)
    ours, theirs = (nn.GroupNorm(8, 2, rngs=nnx.Rngs(0)) for nn in (jn_nnx, nnx))
    for norm in (ours, theirs):
        disturb(norm)
        norm.feature_axis = 1
    np.testing.assert_allclose(ours(x), theirs(x), atol=1e-5)


def linear():
    return nnx.Linear(8, 5, rngs=nnx.Rngs(0))


@wraps_layers
@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_norms_of_weights_equal_flax_and_leave_the_layer_alone(name, rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    ours, theirs = (getattr(nn, name)(linear(), rngs=nnx.Rngs(1)) for nn in (jn_nnx, nnx))
    np.testing.assert_allclose(ours(x), theirs(x), atol=1e-5)
    np.testing.assert_array_equal(ours.layer_instance.kernel[...], linear().kernel[...])


@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_a_norm_of_weights_that_flax_lacks_says_which_flax_has_it(name):
    norm = getattr(jn_nnx, name) if OLDER else type(name, (Absent,), {})
    message = (
        f"jaxnorm.nnx.{name} needs Flax 0.12.1 or newer, which has the class: "
        f"Flax {flax.__version__} is installed."
    )
    with pytest.raises(ImportError, match=re.escape(message)):
        norm(linear(), rngs=nnx.Rngs(1))


@wraps_layers
@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_wrappers_of_layers_have_the_state_of_flax(name, rng, tmp_path):
    """The same leaves, keys drawn and checkpoints."""
    x, streams = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32), [nnx.Rngs(1), nnx.Rngs(1)]
    pair = [
        getattr(nn, name)(linear(), rngs=rngs)
        for nn, rngs in zip((jn_nnx, nnx), streams, strict=True)
    ]
    found, truth = (nnx.state(norm) for norm in pair)
    chex.assert_trees_all_equal(found, truth)
    assert [type(leaf) for _, leaf in nnx.to_flat_state(found)] == [
        type(leaf) for _, leaf in nnx.to_flat_state(truth)
    ]
    assert streams[0].params.count[...] == streams[1].params.count[...]
    for i, (source, target) in enumerate((pair, pair[::-1])):
        changed = jax.tree.map(lambda leaf, i=i: (1.5 + i) * leaf, nnx.state(source))
        with checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(i), changed)
            checkpointer.wait_until_finished()
            nnx.update(target, checkpointer.restore(tmp_path / str(i), nnx.state(target)))
        nnx.update(source, changed)
        chex.assert_trees_all_equal(nnx.state(source), nnx.state(target))
        np.testing.assert_allclose(source(x), target(x), atol=1e-5)


@wraps_layers
def test_weight_norm_trains_its_parameters(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    norm = jn_nnx.WeightNorm(linear(), rngs=nnx.Rngs(1))
    # which older versions of Flax keep as plain arrays
    trained = nnx.Any(nnx.Param, nnx.PathContains("scales"))
    gradient = nnx.jit(nnx.grad(lambda m: (m(x) ** 2).sum(), argnums=nnx.DiffState(0, trained)))(
        norm
    )
    kernel, scale = norm.layer_instance.kernel[...], jnp.ones(5)

    def loss(kernel, scale):
        return (
            (x @ (kernel / jnp.sqrt((kernel**2).sum(0, keepdims=True)) * scale.reshape(1, 5))) ** 2
        ).sum()

    truth = jax.grad(loss, (0, 1))(kernel, scale)
    found = dict(nnx.to_flat_state(gradient))
    np.testing.assert_allclose(found[("layer_instance", "kernel")][...], truth[0], atol=1e-4)
    np.testing.assert_allclose(found[("scales", ("kernel",))][...], truth[1], rtol=1e-5)
    nnx.Optimizer(norm, optax.sgd(0.1), wrt=trained).update(norm, gradient)
    np.testing.assert_allclose(norm.scales[("kernel",)][...], scale - 0.1 * truth[1], rtol=1e-5)


@wraps_layers
def test_spectral_norm_keeps_its_vector_in_training_only(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    norm = jn_nnx.SpectralNorm(linear(), n_steps=50, rngs=nnx.Rngs(1))
    u = norm.batch_stats[("kernel", "u")]
    before = u[...]
    norm.eval()
    norm(x)
    np.testing.assert_array_equal(u[...], before)
    norm.train()
    norm(x, False)
    norm(x, update_stats=False)
    np.testing.assert_array_equal(u[...], before)
    norm(x)
    largest = np.linalg.svd(np.asarray(linear().kernel[...]))[1][0]
    np.testing.assert_allclose(norm.batch_stats[("kernel", "sigma")][...], largest, rtol=1e-5)
    assert np.abs(u[...] - before).max() > 0.1


@pytest.mark.parametrize("name", ["BatchNorm", "SwitchableNorm"])
def test_the_running_mean_of_complex_batches_is_that_of_linen(name, rng):
    x = jnp.asarray(
        rng.standard_normal((4, 5, 3)) + 1j * rng.standard_normal((4, 5, 3)) + 5j, jnp.complex64
    )
    ours, twin = (
        getattr(jn_nnx, name)(3, momentum=0.5, rngs=nnx.Rngs(0)),
        getattr(jn_linen, name)(False, momentum=0.5),
    )
    y = ours(x)
    twin_y, state = twin.apply(twin.init(KEY, x), x, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, twin_y)
    for which in ("mean", "var"):
        np.testing.assert_array_equal(getattr(ours, which)[...], state["batch_stats"][which])
    ours.eval()
    assert (
        np.abs(
            ours(x) - twin.clone(use_running_average=True).apply({**twin.init(KEY, x), **state}, x)
        ).max()
        == 0
    )
