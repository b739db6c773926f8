"""Check against Flax what docs/from/flax.md says of Flax.

test_flax.py checks signatures and dtypes.
"""

import warnings

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm as jn
import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm.nnx.flax_versions import RUNNING_PROMOTE

pytestmark = pytest.mark.usefixtures("ordinary_promotion")  # Flax relies on it
KEY = jax.random.key(0)
LOW, FULL = jnp.bfloat16, jnp.float32
close = np.testing.assert_allclose


@pytest.fixture
def x(rng):
    return rng.standard_normal((4, 6)).astype(np.float32)


@pytest.fixture
def with_nan(x):
    return np.where(np.arange(24).reshape(4, 6) == 0, np.float32(np.nan), x)


MASK = np.array([[1, 1, 1, 1, 0, 0]] * 3 + [[0] * 6], bool)  # the last row is masked out whole


def layer(library, x, mask=None):
    return library.LayerNorm(use_bias=False, use_scale=False).apply({}, x, mask=mask)


def updated(library, x, **options):
    norm = library.BatchNorm(
        use_running_average=False, momentum=0.5, use_fast_variance=False, **options
    )
    variables = norm.init(KEY, np.ones((4, 6), np.float32))
    return norm.apply(variables, x, mutable=["batch_stats"])


def mean(library, x, mask, **options):
    """Of a batch, as the module sees it."""
    norm = library.BatchNorm(
        use_running_average=False, momentum=0.0, use_bias=False, use_scale=False, **options
    )
    state = {"batch_stats": {"mean": np.zeros(6, np.float32), "var": np.ones(6, np.float32)}}
    return norm.apply(state, x, mask=mask, mutable=["batch_stats"])[1]["batch_stats"]["mean"]


def test_masked_elements(x):
    ours, theirs = (layer(library, x, MASK) for library in (jaxnorm.linen, flax.linen))
    close(ours[:3, :4], theirs[:3, :4], atol=1e-5)
    assert not np.any(ours[~MASK])
    assert np.all(theirs[:3, 4:] != 0)
    assert np.all(np.isnan(theirs[3]))


def test_masks_of_floats(x, rng):
    weights = rng.random((4, 6)).astype(np.float32)
    ours = mean(jaxnorm.linen, x, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of JAX 0.7, by Flax's use of it
        theirs = mean(flax.linen, x, weights)
    close(ours, np.average(x, 0, weights), atol=1e-6)
    close(theirs, x.mean(0), atol=1e-6)


def test_nan_under_a_mask(x):
    x = np.where(MASK, x, np.nan)[:3]
    ours, theirs = (
        jax.grad(lambda x, library=library: (layer(library, x, MASK[:3])[:, :4] ** 3).sum())(x)
        for library in (jaxnorm.linen, flax.linen)
    )
    assert np.all(np.isfinite(ours))
    assert np.any(np.isnan(theirs))


def test_variance_far_from_zero(x):
    truth = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    ours, theirs = (
        np.abs(layer(library, x + np.float32(4096)) - truth).max()
        for library in (jaxnorm.linen, flax.linen)
    )
    assert ours < 1e-3 < theirs  # x itself is rounded to 5e-4 there


def test_axis_names(x):
    assert updated(jaxnorm.linen, x, axis_name="i")[0].shape == (4, 6)
    with pytest.raises(NameError, match="unbound axis name: i"):
        updated(flax.linen, x, axis_name="i")
    with pytest.raises(ValueError, match="axis_name must be among the axes"):
        jax.vmap(lambda x: updated(jaxnorm.linen, x, axis_name="i")[0], axis_name="other")(x[None])


def test_replicas_of_different_counts(x):
    mask = np.array([[1, 1], [1, 0]], bool)[..., None]
    halves, taken = x.reshape(2, 2, 6), x[:3]

    def across(library):
        return jax.vmap(lambda x, m: mean(library, x, m, axis_name="i"), axis_name="i")(
            halves, mask
        )[0]

    close(across(jaxnorm.linen), taken.mean(0), atol=1e-6)
    close(across(flax.linen), (x[:2].mean(0) + x[2]) / 2, atol=1e-6)


def test_batches_of_nan_or_nothing(x, with_nan):
    ours, theirs = (
        updated(library, with_nan)[1]["batch_stats"]["mean"]
        for library in (jaxnorm.linen, flax.linen)
    )
    assert ours[0] == 0
    assert np.isnan(theirs[0])
    assert np.all(np.isnan(mean(flax.linen, x, np.zeros((4, 6), bool))))
    assert not np.any(mean(jaxnorm.linen, x, np.zeros((4, 6), bool)))


def test_state_defaults_and_checkpoints(x):
    (ours, new), (theirs, old) = (updated(library, x) for library in (jaxnorm.linen, flax.linen))
    close(ours, theirs, atol=1e-5)
    jax.tree.map(lambda a, b: close(a, b, atol=1e-6), new, old)
    close(new["batch_stats"]["var"], 0.5 + 0.5 * x.var(0), rtol=1e-5)
    assert (flax.linen.BatchNorm().momentum, flax.linen.BatchNorm().epsilon) == (0.99, 1e-5)
    others = (
        flax.linen.LayerNorm(),
        flax.linen.RMSNorm(),
        flax.linen.InstanceNorm(),
        flax.linen.GroupNorm(),
    )
    assert {norm.epsilon for norm in others} == {1e-6}


def test_nnx_casts_before_the_statistics(x):
    x = x + np.float32(300)  # which bfloat16 has in steps of 2
    truth = jn.layer_norm(jnp.asarray(x))
    ours, theirs = (
        library.LayerNorm(6, dtype=LOW, rngs=nnx.Rngs(0))(x).astype(FULL)
        for library in (jaxnorm.nnx, nnx)
    )
    assert np.abs(ours - truth).max() < 0.02
    # Flax casts since the version that also promotes these
    assert (np.abs(theirs - truth).max() > 0.1) == RUNNING_PROMOTE


@pytest.mark.parametrize("library", [jaxnorm.nnx, nnx], ids=["jaxnorm", "flax"])
def test_transformations_that_drop_running_statistics(library):
    def mean(transform, *arguments):
        norm = library.BatchNorm(6, momentum=0.5, rngs=nnx.Rngs(0))
        transform(lambda norm, x: norm(x))(norm, *arguments)
        return norm.mean[...].tolist()

    def scan(axes):
        return lambda function: nnx.scan(function, in_axes=(axes, 0), out_axes=0)

    batches = jnp.ones((2, 4, 6))
    assert mean(jax.jit, batches[0]) == mean(scan(None), batches) == [0.0] * 6
    assert mean(nnx.jit, batches[0]) == [0.5] * 6
    assert mean(scan(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})), batches) == [0.75] * 6


@pytest.mark.skipif(
    not hasattr(nnx, "WeightNorm"), reason="this Flax has no such class: test_nnx.py has the error"
)
@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_nnx_wrappers_and_the_layer(name, x):
    def changed(library):
        layer = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        before = np.array(layer.kernel[...])
        getattr(library, name)(layer, rngs=nnx.Rngs(1))(x)
        return bool(np.any(layer.kernel[...] != before))

    assert [changed(jaxnorm.nnx), changed(nnx)] == [False, True]


def test_axes_out_of_range_and_repeated(x):
    for axes, error in ((5, IndexError), ((-1, -1), None)):
        with pytest.raises(ValueError, match="reduction_axes must"):
            jaxnorm.linen.LayerNorm(reduction_axes=axes).init(KEY, x)
        if error is None:
            flax.linen.LayerNorm(reduction_axes=axes).init(KEY, x)
        else:
            with pytest.raises(error):
                flax.linen.LayerNorm(reduction_axes=axes).init(KEY, x)


def test_a_single_element(x):
    for library in (jaxnorm.linen, flax.linen):
        close(updated(library, x[:1])[0], np.zeros((1, 6)))
