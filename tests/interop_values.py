"""Help tests of weights from other frameworks: inputs, and what counts as equal."""

import jax
import numpy as np

from jaxnorm.flax_common import float64

rng = np.random.default_rng(0)

# Of recurrent layers and attention in float32, from float64: several sums of products one after the
# other. Found were at most 2.7e-7 here, and 4e-7 in 600 steps of the layers, whose state forgets.
OF_SEQUENCES = 4e-7


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def dense(n_in, n_out):
    return {"kernel": ones(n_in, n_out)}


def state(**shapes):
    """A state dict of random numbers; double underscores are dots."""
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)
    return {name.replace("__", "."): draw(shape) for name, shape in shapes.items()}


def inputs(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype("float32")


def in_float64(run, x):
    """What a model of a peer that runs on JAX returns, whatever dtypes it names.

    Its program is evaluated in float64. To ask Keras for float64 is not enough: on JAX it rounds to
    float32 within layers of any dtype.
    """
    return float64.in_float64(jax.make_jaxpr(run)(x), [x])[0]


def close(ours, theirs, rtol=2e-7):
    """To a part of the largest value."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * np.abs(theirs).max())


def same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        value = np.asarray(tensor)
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
