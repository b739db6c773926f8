"""Make norms of arrays that CPU kernels take in several chunks, and compare results."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm as jn


def adaptive(x, scale, bias, **options):
    return jn.standardize(
        x, "n [t] c", scale=_rank(scale) * x[:, :1].astype(scale.dtype), bias=_rank(bias), **options
    )


# Each with several chunks of positions or of rows, the last ones not full, or one thread per n.
WIDE = {
    "rows": (lambda x, s, b, **o: jn.layer_norm(x, scale=s, bias=b, **o), (533, 129)),
    "long rows": (lambda x, s, b, **o: jn.layer_norm(x, scale=s, bias=b, **o), (3, 40_001)),
    "rms": (lambda x, s, b, **o: jn.rms_norm(x, scale=s, bias=b, **o), (533, 129)),
    "batch": (lambda x, s, b, **o: jn.batch_norm(x, scale=s, bias=b, **o)[0], (6, 37, 41, 16)),
    "group": (lambda x, s, b, **o: jn.group_norm(x, 4, scale=s, bias=b, **o), (3, 60, 61, 24)),
    "small images": (
        lambda x, s, b, **o: jn.group_norm(x, 4, scale=s, bias=b, **o),
        (40, 20, 21, 24),
    ),
    "instance": (lambda x, s, b, **o: jn.instance_norm(x, scale=s, bias=b, **o), (40, 20, 21, 24)),
    "small instances": (
        lambda x, s, b, **o: jn.instance_norm(x, scale=s, bias=b, **o),
        (40, 7, 7, 140),
    ),
    "few small instances": (
        lambda x, s, b, **o: jn.instance_norm(x, scale=s, bias=b, **o),
        (3, 8, 9, 300),
    ),
    "smaller groups": (
        lambda x, s, b, **o: jn.group_norm(x, 12, scale=s, bias=b, **o),
        (40, 3, 5, 36),
    ),
    "narrow rows": (lambda x, s, b, **o: jn.layer_norm(x, scale=s, bias=b, **o), (533, 33)),
    "small groups": (
        lambda x, s, b, **o: jn.group_norm(x, 12, scale=s, bias=b, **o),
        (3, 5, 11, 36),
    ),
    "channels": (
        lambda x, s, b, **o: jn.standardize(x, "n [h w c]", scale=s, bias=b, **o),
        (5, 20, 21, 24),
    ),
    "adaptive": (adaptive, (7, 300, 24)),
    "adaptive, long": (adaptive, (3, 1030, 24)),
    "many channels": (
        lambda x, s, b, **o: jn.batch_norm(x, scale=s, bias=b, **o)[0],
        (2, 11, 13, 277),
    ),
    "without": (lambda x, s, b, **o: jn.standardize(x, "n h w [c]", **o), (7, 5, 3, 33)),
}


def _rank(a):
    return a.reshape(1, 1, -1)


def with_gradients(norm, x, scale, bias, cotangent, **options):
    y, pullback = jax.vjp(partial(norm, **options), x, scale, bias)
    return y, *pullback(cotangent.astype(y.dtype))


def arguments(rng, shape, dtype=np.float32):
    x, cotangent = (jnp.asarray(mean + rng.standard_normal(shape), dtype) for mean in (3, 0))
    return (
        x,
        *(jnp.asarray(rng.uniform(0.5, 1.5, shape[-1:]).astype(np.float32)) for _ in range(2)),
        cotangent,
    )


def close(found, truth, bound, least=1e-30):
    """Compare each leaf, relative to its largest number, or to the least size given."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), least)
