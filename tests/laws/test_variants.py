"""Run one body under chex's variants.

Every norm equals the oracle with and without jit, placed or not, and under pmap.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from cases import BY_NAME, CASES

import jaxnorm as jn

NAMES = [(case.name, case.name) for case in CASES]
ONCE = {"with_jit": True, "without_jit": True, "with_device": True, "without_device": True}


class Variants(chex.TestCase):
    """Each norm and the statistics under each way of calling them."""

    @chex.variants(**ONCE)
    @parameterized.named_parameters(*NAMES)
    def test_every_norm(self, name):
        case, rng = BY_NAME[name], np.random.default_rng(0)
        x, (scale, bias) = rng.standard_normal(case.shape).astype(np.float32), case.params(rng)
        y = self.variant(lambda x, scale, bias: case(x, scale=scale, bias=bias))(x, scale, bias)
        chex.assert_equal_shape([x, y])
        chex.assert_type(y, jnp.float32)
        chex.assert_trees_all_close(
            np.asarray(y, np.float64), case.truth(x, scale=scale, bias=bias).y, atol=4e-6
        )

    @chex.variants(**ONCE)
    def test_merging_and_blending(self):
        x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)

        def blend(x):
            merged = jn.merge(jn.moments(x[:2], 0), jn.moments(x[2:], 0))
            return merged, jn.ema(merged, jn.moments(x, 0), momentum=0.5)

        merged, blended = self.variant(blend)(x)
        chex.assert_tree_all_finite(blended)
        truth = (
            np.full((1, 4), 6.0),
            x.astype(np.float64).mean(0)[None],
            x.astype(np.float64).var(0)[None],
        )
        found = [np.asarray(leaf, np.float64) for leaf in (merged.count, merged.mean, merged.var)]
        chex.assert_trees_all_close(tuple(found), truth, rtol=1e-5)
        chex.assert_trees_all_close(blended, merged, rtol=1e-5, atol=1e-7)

    @chex.variants(with_pmap=True)
    def test_synchronized_over_devices(self):
        x = np.random.default_rng(0).standard_normal((jax.device_count(), 4, 3)).astype(np.float32)
        options = {
            "axis_name": "d",
            "in_axes": 0,
            "broadcast_args_to_devices": False,
            "reduce_fn": None,
        }
        step = self.variant(lambda x: jn.batch_norm(x, axis_name="d")[0], **options)
        whole = jn.batch_norm(x.reshape(-1, 3))[0]
        chex.assert_trees_all_close(
            np.asarray(step(x)).reshape(-1, 3), np.asarray(whole), atol=1e-6
        )
