"""Test that the bits of a group do not depend on how many groups are computed with it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep

import jaxnorm as jn

NORMS = {
    "layer": (jn.layer_norm, (96,), (96,)),
    "layer of 1000": (jn.layer_norm, (1000,), (1000,)),
    "rms": (jn.rms_norm, (1024,), (1024,)),
    "instance": (jn.instance_norm, (7, 9, 5), (5,)),
    "group": (partial(jn.group_norm, num_groups=2), (63, 8), (8,)),
}
WITH = (1, 3, 16)  # rows, of 40


def bits(a):
    return np.asarray(a).view(np.uint32 if a.dtype == jnp.float32 else np.uint16)


QUICK = [("layer", "float32"), ("rms", "bfloat16"), ("instance", "float32")]
ROWS = [(name, dtype) for name in NORMS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("implementation", ["xla", "native"], indirect=True)
@pytest.mark.parametrize(("name", "dtype"), long_sweep(ROWS, quick=QUICK))
def test_rows_have_the_same_bits_in_any_batch(name, dtype, implementation, rng):
    norm, shape, features = NORMS[name]
    x, dy = (jnp.asarray(rng.normal(3, 1, (40, *shape)), dtype) for _ in range(2))
    scale, bias = (jnp.asarray(a, jnp.float32) for a in rng.normal(1, 0.3, (2, *features)))
    norm = partial(norm, scale=scale, bias=bias, batch_invariant=True)

    @jax.jit
    def both(x, dy):
        y, pullback = jax.vjp(norm, x)
        return y, *pullback(dy)

    whole = both(x, dy)
    for rows in WITH:
        for found, truth in zip(both(x[:rows], dy[:rows]), whole, strict=True):
            np.testing.assert_array_equal(bits(found), bits(truth[:rows]))


@pytest.mark.parametrize("norm", [jn.layer_norm, jn.rms_norm])
def test_masked_rows_have_too_and_eager_ones(norm, rng):
    x, where = jnp.asarray(rng.normal(3, 1, (16, 96)), jnp.float32), rng.random((16, 96)) < 0.7
    x = jnp.where(where, x, jnp.nan)
    norm = partial(norm, batch_invariant=True, implementation="xla")
    whole = norm(x, where=where)
    assert np.isfinite(whole).all()
    for rows in (1, 5):
        np.testing.assert_array_equal(norm(x[:rows], where=where[:rows]), whole[:rows])
    np.testing.assert_array_equal(jax.vmap(norm)(x[:, None], where=where[:, None])[:, 0], whole)


def test_the_order_costs_no_digits(rng):
    """Neighbours are added as a tree: of offsets, the error stays that of float32."""
    x = rng.normal(1e4, 1, (8, 5000)).astype(np.float32)
    found = jn.layer_norm(x, batch_invariant=True, implementation="xla", epsilon=0.0)
    wide = x.astype(np.float64)
    truth = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    assert np.abs(found - truth).max() < 1e-6 * np.abs(truth).max()


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="this XLA adds rows alike on a CPU")
def test_without_the_option_the_bits_differ(rng):
    """Or there would be no need for it; this may change with XLA."""
    x = jnp.asarray(rng.normal(3, 1, (64, 1024)), jnp.float32)
    norm = jax.jit(partial(jn.layer_norm, implementation="xla"))
    assert (norm(x)[:3] != norm(x[:3])).any()


def test_the_plan_says_which_kernels_keep_the_order():
    x = jnp.ones((4, 7, 8))
    options = {"scale": None, "batch_invariant": True}
    assert jn.plan(x, -1, **options).implementation == jn.plan(x, -1).implementation
    with pytest.raises(ValueError, match="not tried on a device for batch_invariant=True"):
        jn.standardize(x, -1, implementation="pallas", batch_invariant=True)
