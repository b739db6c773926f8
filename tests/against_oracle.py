"""Draw the arrays of a norm, and compute its output and gradients by an oracle and by JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from oracle import Part, oracle


def drawn(rng, shape, axes, dtype, mean=0.0):
    """Return x, the cotangent of y, scale and bias, which differ along the axes, if any."""
    x, dy = rng.normal(mean, 2, shape), rng.normal(size=shape)
    params = tuple(size if axis in (axes or ()) else 1 for axis, size in enumerate(shape))
    scale, bias = rng.uniform(0.5, 1.5, (2, *params)) if axes else (None, None)
    as_array = lambda a, dtype: None if a is None else jnp.asarray(a, dtype)
    return *(as_array(a, dtype) for a in (x, dy)), *(as_array(a, "float32") for a in (scale, bias))


def truth_over(axes, x, dy, scale, bias, **options):
    """Return the output of a norm over axes, and the gradients of x and of the params given."""
    ones = (1,) * x.ndim
    known = lambda a, value: np.full(ones, value) if a is None else np.asarray(a, np.float64)
    found = oracle(
        np.asarray(x, np.float64),
        (Part(axes),),
        scale=known(scale, 1.0),
        bias=known(bias, 0.0),
        cotangent=np.asarray(dy, np.float64),
        **options,
    )
    over = lambda a, param: a.sum(
        tuple(i for i, size in enumerate(param.shape) if size == 1), keepdims=True
    )
    params = () if scale is None else (over(found.dscale, scale), over(found.dbias, bias))
    return found.y, found.dx, *params


def gradients_of(norm, x, dy, scale, bias, **options):
    """Return the output of ``norm``, and the gradients of x and of the params given."""
    if scale is None:
        y, vjp = jax.vjp(lambda x: norm(x, None, None, **options), x)
    else:
        y, vjp = jax.vjp(partial(norm, **options), x, scale, bias)
    return y, *vjp(dy.astype(y.dtype))


def relative(found, true):
    """Return the largest difference, of the largest true value."""
    return np.abs(np.asarray(found, np.float64) - true).max() / max(np.abs(true).max(), 1e-300)
