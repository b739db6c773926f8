"""Test that the error of a wrong call says what must hold, what came, and what to do."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TWINS
from flax import nnx as flax_nnx
from jax.experimental import checkify

import jaxnorm as jn
from jaxnorm import linen, nnx
from jaxnorm.arguments import validation
from jaxnorm.experiments.command import main

X = np.ones((4, 6), np.float32)
IMAGES = np.ones((2, 3, 3, 6), np.float32)
INTS = np.ones((4, 6), np.int32)
M = jn.Moments(jnp.ones((1, 6)), jnp.zeros((1, 6)), jnp.ones((1, 6)))
RNGS = flax_nnx.Rngs(0)
LOGITS = np.zeros(3, np.float32)


def init(module, x=X, **options):
    return module.init(jax.random.key(0), x, **options)


switchable = partial(jn.switchable_norm, IMAGES, LOGITS, LOGITS)
WRONG = [
    # axes
    (
        lambda: jn.moments(X, 5),
        ValueError,
        "axes must lie in [-2, 2) for an array of rank 2: got axis 5.",
    ),
    (
        lambda: jn.moments(np.float32(1), 0),
        ValueError,
        "axes must lie in [0, 0) for an array of rank 0: got axis 0.",
    ),
    (
        lambda: jn.moments(X, -3),
        ValueError,
        "axes must lie in [-2, 2) for an array of rank 2: got axis -3.",
    ),
    (
        lambda: jn.moments(X, (0, -2)),
        ValueError,
        "axes must not repeat an axis: got (0, -2) for an array of rank 2.",
    ),
    (
        lambda: jn.moments(X, ()),
        ValueError,
        "axes must name at least one axis: got () for an array of rank 2.",
    ),
    (
        lambda: jn.moments(X, True),
        TypeError,
        "axes must be integers or a pattern: got True (bool) for an array of rank 2.",
    ),
    (
        lambda: jn.moments(X, 1.0),
        TypeError,
        "axes must be integers or a pattern: got 1.0 (float) for an array of rank 2.",
    ),
    (
        lambda: jn.moments(X, 0, g=2),
        TypeError,
        "g must be an argument, or the size of a name in a pattern: got the axes 0.",
    ),
    (
        lambda: jn.batch_norm(X, feature_axes=2),
        ValueError,
        "feature_axes must lie in [-2, 2) for an array of rank 2: got axis 2.",
    ),
    (
        lambda: jn.batch_norm(X[0]),
        ValueError,
        "batch norm must have an axis to reduce besides the features: x has shape (6,)",
    ),
    (
        lambda: jn.layer_norm(X, axes=3),
        ValueError,
        "axes must lie in [-2, 2) for an array of rank 2: got axis 3.",
    ),
    (
        lambda: init(linen.LayerNorm(reduction_axes=-3)),
        ValueError,
        "reduction_axes must lie in [-2, 2)",
    ),
    (
        lambda: init(linen.BatchNorm(True, axis=(1, 1))),
        ValueError,
        "axis must not repeat an axis: got (1, 1)",
    ),
    (
        lambda: jn.batch_norm(X, feature_axes="c"),
        TypeError,
        "feature_axes must be integers: got 'c' (str) for an array of rank 2.",
    ),
    (
        lambda: jn.group_norm(X, 2, axes="n [c]"),
        TypeError,
        "axes must be integers: got 'n [c]' (str)",
    ),
    (
        lambda: jn.layer_norm(X, axis_name=3),
        TypeError,
        "axis_name must be the name of a device or vmap axis, or several: got 3.",
    ),
    (
        lambda: jn.moments(X, 0, axis_name=("i", 0)),
        TypeError,
        "or several: got ('i', 0). Axes of x go into axes.",
    ),
    (
        lambda: jax.jit(lambda a: jn.layer_norm(X, axes=a))(1),
        TypeError,
        "axes must be integers or a pattern: got",
    ),
    (
        lambda: jax.jit(lambda n: jn.group_norm(X, n))(2),
        TypeError,
        "num_groups must be an integer: got",
    ),
    (
        lambda: jn.batch_norm(X, axis_name="i"),
        NameError,
        "axis_name must be bound by jax.shard_map, jax.pmap or jax.vmap(axis_name=...)",
    ),
    (
        lambda: jax.vmap(lambda x: jn.moments(x, 0, axis_name="i"), axis_name="j")(X),
        NameError,
        "around the call: got the unbound 'i'.",
    ),
    # names that other libraries have
    (
        lambda: jn.layer_norm(X, eps=1e-5),
        TypeError,
        "eps must be an argument of layer_norm, which takes axes, scale, scale_offset, rounding, ",
    ),
    (
        lambda: jn.layer_norm(X, eps=1e-5),
        TypeError,
        "full_range, implementation, dtype, batch_invariant. Did you mean epsilon?",
    ),
    (lambda: jn.rms_norm(X, weight=X[0]), TypeError, "Did you mean scale?"),
    (lambda: jn.batch_norm(X, gamma=X[0], beta=X[0]), TypeError, "Did you mean bias and scale?"),
    (lambda: jn.batch_norm(X, axis=1), TypeError, "Did you mean feature_axes?"),
    (lambda: jn.group_norm(X, 2, weights=X), TypeError, "Did you mean where?"),
    (
        lambda: jn.switchable_norm(IMAGES, LOGITS, LOGITS, epsilom=1.0),
        TypeError,
        "Did you mean epsilon?",
    ),
    (lambda: jn.pair_norm(X, eps=1.0), TypeError, "Did you mean epsilon?"),
    (
        lambda: jn.standardize(X, -1, eps=1.0),
        TypeError,
        "eps must be an argument, or the size of a name in a pattern: got the axes -1.",
    ),
    (
        lambda: jn.standardize(X, "n [c]", weight=1),
        TypeError,
        "nor a name in the pattern 'n [c]'. Did you mean scale?",
    ),
    (
        lambda: jn.layer_norm(X, (6,)),
        TypeError,
        "layer_norm takes x by position: got 2 such arguments. Give axes, scale, ",
    ),
    (lambda: jn.layer_norm(X, (6,)), TypeError, "by keyword: layer_norm(x, axes=...)."),
    (
        lambda: jn.group_norm(X, 2, X[0]),
        TypeError,
        "group_norm takes x, num_groups by position: got 3 such arguments.",
    ),
    (
        lambda: init(linen.LayerNorm(), weights=X),
        TypeError,
        "weights must be an argument of a call of LayerNorm, which takes x, mask, ",
    ),
    (
        lambda: nnx.RMSNorm(6, rngs=RNGS)(X, weights=X),
        TypeError,
        "which takes x, mask, residual. Did you mean mask?",
    ),
    (lambda: jn.normalize(X, M, eps=1e-5), TypeError, "got no axes. Did you mean epsilon?"),
    (lambda: jn.standardize(X, 0, axis=1), TypeError, "Did you mean axes?"),
    (lambda: jn.moments(X, 0, weights=X), TypeError, "Did you mean where?"),
    (
        lambda: linen.LayerNorm(eps=1e-5),
        TypeError,
        "eps must be an argument of LayerNorm, which takes epsilon, dtype, ",
    ),
    (lambda: linen.BatchNorm(affine=False), TypeError, "Did you mean use_scale?"),
    (lambda: linen.LSTM(hidden_size=4), TypeError, "Did you mean features?"),
    (
        lambda: nnx.GraphNorm(6, eps=1e-5, rngs=RNGS),
        TypeError,
        "eps must be an argument of GraphNorm, which takes num_features, ",
    ),
    (
        lambda: nnx.PairNorm(6, foo=1, rngs=RNGS),
        TypeError,
        "foo must be an argument of PairNorm, which takes num_features, ",
    ),
    (
        lambda: nnx.PositionalNorm(6, eps=1e-5, rngs=RNGS),
        TypeError,
        "eps must be an argument of PositionalNorm, which takes num_features, ",
    ),
    (
        lambda: nnx.BatchNorm(6, eps=1e-5, rngs=RNGS),
        TypeError,
        "eps must be an argument of BatchNorm, which takes num_features, ",
    ),
    (
        lambda: nnx.LayerNorm(6, elementwise_affine=False, rngs=RNGS),
        TypeError,
        "Did you mean use_scale?",
    ),
    (
        lambda: init(linen.BatchNorm(6)),
        TypeError,
        "use_running_average must be True or False: got 6. Masks are passed as mask=;",
    ),
    (
        lambda: init(linen.BatchNorm("no")),
        TypeError,
        "use_running_average must be True or False: got 'no'.",
    ),
    (
        lambda: nnx.BatchNorm(6, rngs=RNGS)(X, X > 0),
        TypeError,
        "got an array of shape (4, 6). Masks are passed as mask=",
    ),
    (
        lambda: jn.Moments([2, 3], X[0], X[0]).merge(0),
        TypeError,
        "count of Moments must be an array: got list.",
    ),
    (
        lambda: jn.weight_norm(X, eps=1e-5),
        TypeError,
        "eps must be an argument of weight_norm, which takes ",
    ),
    (lambda: jn.recurrent.lstm(IMAGES[0], {}, weights=X), TypeError, "Did you mean where?"),
    (
        lambda: init(linen.LSTM(4), IMAGES[0], weights=X),
        TypeError,
        "weights must be an argument of a call of LSTM, which takes inputs, ",
    ),
    (
        lambda: nnx.GRU(6, 4, rngs=RNGS)(IMAGES[0], lengths=X),
        TypeError,
        "Did you mean seq_lengths?",
    ),
    (lambda: nnx.BatchNorm(6, rngs=RNGS)(X, weights=X), TypeError, "Did you mean mask?"),
    (
        lambda: jn.layer_norm(X, where=np.ones(4, bool)),
        ValueError,
        "where has shape (4,), x has shape (4, 6). Did you mean where[..., None]?",
    ),
    (
        lambda: jn.moments(IMAGES, 0, where=np.ones((2, 3), bool)),
        ValueError,
        "Did you mean where[..., None, None]?",
    ),
    (
        lambda: nnx.LayerNorm(6, rngs=RNGS)(X, mask=np.ones(4, bool)),
        ValueError,
        "Did you mean mask[..., None]?",
    ),
    # numbers that JAX would take as others
    (
        lambda: jn.moments(X, "[n] c", segments=np.array([0, 1, 0, 2**32 + 1]), num_segments=2),
        ValueError,
        "found 4294967297.",
    ),
    (
        lambda: jn.moments(
            X, "[n] c", segments=np.array([0, 1, 0, 2**33], np.uint64), num_segments=2
        ),
        ValueError,
        "found 8589934592.",
    ),
    (
        lambda: jn.moments(X, "[n] c", segments=[0, 1, 0, 2**32], num_segments=2),
        ValueError,
        "segments must fit in the integers of JAX",
    ),
    (
        lambda: jax.jit(
            lambda x: jn.moments(x, "[n] c", segments=np.array([0, 1, 0, 2**32]), num_segments=2)
        )(X),
        ValueError,
        "segments must be ids from 0 to num_segments - 1 = 1: found 4294967296.",
    ),
    (
        lambda: jn.online.debiased(0.9, np.int64(2**32 + 1)),
        ValueError,
        "step must fit in int32: found 4294967297 of int64.",
    ),
    # patterns
    (
        lambda: jn.moments(X, "n c"),
        ValueError,
        "a pattern must have at least one reduction axis: none stands in [ ].",
    ),
    (
        lambda: jn.moments(X, "n [h] c"),
        ValueError,
        "the pattern must name every axis: it names 3, the array has rank 2.",
    ),
    (
        lambda: jn.moments(X, "n [c"),
        ValueError,
        'every [ must be closed: this one is not.\n    "n [c"\n       ^\n    shape (4, 6)',
    ),
    (lambda: jn.moments(X, "n c]"), ValueError, "every ] must close a [: this one closes none."),
    (
        lambda: jn.moments(X, "n [n]"),
        ValueError,
        "a pattern must name each axis once: 'n' stands twice.",
    ),
    (
        lambda: jn.moments(X, "n ([g] c)", g=2),
        ValueError,
        "within ( ) reduction axes must stand last: 'c' follows one.",
    ),
    (
        lambda: jn.moments(X, "n (g [c])"),
        ValueError,
        "all sizes within ( ) but one must be given: pass g=… by keyword.",
    ),
    (
        lambda: jn.moments(X, "n (g [c])", g=4),
        ValueError,
        "g=4 must divide the size of its axis: 4 against 6.",
    ),
    (
        lambda: jn.moments(X, "n (g [c])", g=2.0),
        TypeError,
        "the size of 'g' must be an integer: got 2.0 (float).",
    ),
    (
        lambda: jn.moments(X, "n [c]", h=2),
        TypeError,
        "'h' is neither an argument nor a name in the pattern 'n [c]'.",
    ),
    (
        lambda: jn.moments(X, "n [c] 2"),
        ValueError,
        "a pattern holds names, '...', [ ] and ( ) only: found '2'.",
    ),
    # arrays and dtypes
    (lambda: jn.layer_norm(None), TypeError, "x must be an array of numbers: got NoneType."),
    (
        lambda: jn.rms_norm(np.array(["a"])),
        TypeError,
        "x must be an array of numbers: got one of dtype <U1.",
    ),
    (
        lambda: jn.layer_norm(jax.ShapeDtypeStruct((4,), "float32")),
        TypeError,
        "x must be an array of numbers: got ShapeDtypeStruct.",
    ),
    (lambda: jn.standardize({"x": X}, 0), TypeError, "x must be an array of numbers: got dict."),
    (
        lambda: jn.normalize(X, jn.host.moments(X, 0)),
        TypeError,
        "moments must be Moments: got those of jaxnorm.data.host.statistics. Make",
    ),
    (
        lambda: jn.normalize(X, jn.Moments(1, [0.0], [1.0])),
        TypeError,
        "mean of Moments must be an array: got list. Make it one with",
    ),
    (lambda: jn.moments(INTS, 0), TypeError, "x must be floating point: got int32. Cast it first"),
    (
        lambda: jn.standardize(X > 0, 0),
        TypeError,
        "x must be floating point: got bool. Cast it first",
    ),
    (lambda: jn.rms_norm(np.ones(3, np.uint8)), TypeError, "x must be floating point: got uint8."),
    (
        lambda: jn.layer_norm(X, scale=np.ones(6, int)),
        TypeError,
        "scale must be floating point: got int",
    ),
    (lambda: jn.layer_norm(INTS), TypeError, "x must be floating point: got int32."),
    (lambda: jn.batch_norm(INTS), TypeError, "x must be floating point: got int32."),
    # masks
    (
        lambda: jn.moments(X, 0, where=np.ones((4, 5), bool)),
        ValueError,
        "where has shape (4, 5), x has shape (4, 6).",
    ),
    (
        lambda: jn.moments(X, 0, where=np.ones((1, 4, 6), bool)),
        ValueError,
        "where must broadcast against x without growing it",
    ),
    (
        lambda: jn.moments(X, 0, where=INTS),
        TypeError,
        "where must be boolean or float weights: got int32.",
    ),
    (
        lambda: jn.moments(X, 0, where=-X),
        ValueError,
        "where, for x of shape (4, 6), must be finite and >= 0: found -1.0.",
    ),
    (lambda: jn.moments(X, 0, where=X * np.nan), ValueError, "must be finite and >= 0: found nan."),
    (
        lambda: jn.group_norm(IMAGES, 3, axes=(1, 2, 3)),
        ValueError,
        "axes must not include the channel axis, 3: got (1, 2, 3).",
    ),
    # scale, bias, moments
    (
        lambda: jn.layer_norm(X, scale=np.ones(6, "c8")),
        TypeError,
        "scale must be real for a real output: got complex64 for one of float32.",
    ),
    (
        lambda: jn.standardize(X, 0, bias=np.ones(6, "c8")),
        TypeError,
        "bias must be real for a real output: got complex64",
    ),
    (
        lambda: jn.normalize(X, M, scale=np.ones(6, "c8")),
        TypeError,
        "scale must be real for a real output: got complex64",
    ),
    (
        lambda: jn.weight_norm(X, np.ones(6, "c8")),
        TypeError,
        "scale must be real for a real output: got complex64",
    ),
    (
        lambda: jn.layer_norm(X, scale=np.ones(4, "f4")),
        ValueError,
        "scale must have the shape of the feature axes, (6,)",
    ),
    (
        lambda: jn.layer_norm(X, scale=np.ones((2, 3), "f4")),
        ValueError,
        "got scale of shape (2, 3) for x of shape (4, 6).",
    ),
    (
        lambda: jn.layer_norm(X, bias=np.ones(1, "f4")),
        ValueError,
        "bias must have the shape of the feature axes, (6,)",
    ),
    (
        lambda: jn.standardize(X, 0, scale=np.ones((2, 1, 6), "f4")),
        ValueError,
        "scale must broadcast against x without growing it",
    ),
    (
        lambda: jn.normalize(X, jn.moments(IMAGES, 0)),
        ValueError,
        "moments must broadcast against x without growing it",
    ),
    (
        lambda: jn.normalize(X, jn.moments(X + 1j, 0)),
        TypeError,
        "x must be complex for complex Moments: got float32.",
    ),
    (
        lambda: jn.normalize(X, jn.moments(X, 0), epsilonn=1e-3),
        TypeError,
        "epsilonn must be an argument, or the size of a name in a pattern: got no axes.",
    ),
    (lambda: jn.normalize(X, (0, 1)), TypeError, "moments must be Moments: got tuple."),
    (
        lambda: jn.normalize(X, jn.Moments(1.0, 0.0, -1.0)),
        ValueError,
        "the variance of moments must be >= 0: found -1.0.",
    ),
    (
        lambda: jn.merge(M, 3.0),
        TypeError,
        "each argument of merge must be Moments: got float. Make them",
    ),
    (
        lambda: jn.merge(M, jn.moments(X[:, :4], 0)),
        ValueError,
        "merged Moments must have shapes that broadcast: got (1, 6), (1, 4).",
    ),
    (lambda: jn.merge(jn.Moments(1, 1, 1)), TypeError, "mean must be floating point: got int32."),
    (
        lambda: jn.Moments(np.ones(3, "f4"), np.ones(2, "f4"), np.ones(2, "f4")).merge(0),
        ValueError,
        "count, mean and var of Moments must have shapes that broadcast: got count (3,), mean "
        "(2,), var (2,).",
    ),
    (
        lambda: jn.switchable_norm(IMAGES, LOGITS, LOGITS, running=(0, 1)),
        TypeError,
        "running must be Moments: got tuple.",
    ),
    (
        lambda: jn.switchable_norm(
            IMAGES, LOGITS, LOGITS, running=jn.Moments(1.0, np.zeros(6), -np.ones(6))
        ),
        ValueError,
        "found -1.0.",
    ),
    (
        lambda: jn.switchable_norm(IMAGES, LOGITS + 1j, LOGITS),
        TypeError,
        "mean_logits must be real: got complex64.",
    ),
    (
        lambda: jn.graph_norm(X, np.ones(6, "c8")),
        TypeError,
        "mean_scale must be real: got complex64.",
    ),
    (
        lambda: jn.graph_norm(X, np.ones((4, 6), "f4")),
        ValueError,
        "mean_scale must have the shape of the feature axes, (6,): got (4, 6).",
    ),
    (
        lambda: jn.graph_norm(X, np.ones(5, "f4")),
        ValueError,
        "mean_scale must have the shape of the feature axes, (6,): got (5,).",
    ),
    (
        lambda: jn.graph_norm(X[0], np.ones(6, "f4")),
        ValueError,
        "graph norm must leave axis 0 to the nodes or the batch: got",
    ),
    (lambda: jn.pair_norm(X, 1 + 1j), TypeError, "length must be a number: got (1+1j) (complex)."),
    (lambda: jn.pair_norm(X, -1.0), ValueError, "length must be finite and >= 0: got -1.0."),
    (lambda: jn.moments(X, 0, where=X * np.inf), ValueError, "must be finite and >= 0: found inf."),
    # groups, spatial axes, logits
    (
        lambda: jn.standardize(X, "n (g [c])", g=0),
        ValueError,
        "the size of 'g' must be at least 1: got 0.",
    ),
    (
        lambda: jn.group_norm(X, 2, feature_axes=0),
        ValueError,
        "must have one axis of channels, behind the batch axis 0: got feature_axes=0",
    ),
    (
        lambda: jn.batch_norm(X[0]),
        ValueError,
        "batch norm must have an axis to reduce besides the features: x has shape (6,)",
    ),
    (
        lambda: jn.group_norm(X, 4),
        ValueError,
        "num_groups must be positive and divide the channels: got 4 for 6 channels.",
    ),
    (
        lambda: jn.group_norm(X, 0),
        ValueError,
        "num_groups must be positive and divide the channels: got 0 for 6 channels.",
    ),
    (lambda: jn.group_norm(X, -1), ValueError, "got -1 for 6 channels."),
    (lambda: jn.group_norm(X, 12), ValueError, "got 12 for 6 channels."),
    (
        lambda: jn.group_norm(X, np.int64(4)),
        ValueError,
        "num_groups must be positive and divide the channels: got 4 for 6 channels.",
    ),
    (lambda: jn.group_norm(X, 2.0), TypeError, "num_groups must be an integer: got 2.0 (float)."),
    (
        lambda: jn.instance_norm(X),
        ValueError,
        "instance norm must have an axis to reduce besides batch and features: x has shape (4, 6).",
    ),
    (
        lambda: jn.instance_norm(IMAGES, feature_axes=0),
        ValueError,
        "instance norm must leave axis 0 to the batch",
    ),
    (
        lambda: jn.switchable_norm(IMAGES, LOGITS, LOGITS[:2]),
        ValueError,
        "var_logits must have shape (3,)",
    ),
    (
        lambda: jn.switchable_norm(IMAGES, LOGITS, LOGITS, running=jn.moments(X[:, :4], 0)),
        ValueError,
        "running must have the shape",
    ),
    (
        lambda: init(linen.GroupNorm(num_groups=None)),
        ValueError,
        "exactly one of num_groups and group_size must be given: got None",
    ),
    (
        lambda: nnx.LayerNorm(7, rngs=RNGS)(X),
        ValueError,
        "x must have the features that LayerNorm was made for, 7: got (6,) of an x of",
    ),
    (
        lambda: nnx.BatchNorm(7, use_scale=False, use_bias=False, rngs=RNGS)(X),
        ValueError,
        "that BatchNorm was made for, 7: got (6,)",
    ),
    (
        lambda: nnx.GraphNorm(7, rngs=RNGS)(X),
        ValueError,
        "that GraphNorm was made for, 7: got (6,)",
    ),
    (
        lambda: nnx.SwitchableNorm(7, use_scale=False, use_bias=False, rngs=RNGS)(IMAGES),
        ValueError,
        "that SwitchableNorm was made for, 7",
    ),
    (
        lambda: nnx.GroupNorm(6, None, 4, rngs=RNGS),
        ValueError,
        "group_size must be positive and divide the channels: got 4 for 6",
    ),
    (
        lambda: init(linen.GroupNorm(2, reduction_axes=(0,))),
        ValueError,
        "reduction_axes must include the last axis",
    ),
    # numbers and words
    (
        lambda: jn.layer_norm(X, epsilon=-1e-5),
        ValueError,
        "epsilon must be finite and >= 0: got -1e-05.",
    ),
    (
        lambda: jn.layer_norm(X, epsilon=float("nan")),
        ValueError,
        "epsilon must be finite and >= 0: got nan.",
    ),
    (
        lambda: jn.layer_norm(X, epsilon=float("inf")),
        ValueError,
        "epsilon must be finite and >= 0: got inf.",
    ),
    (
        lambda: jn.layer_norm(X, epsilon="1e-5"),
        TypeError,
        "epsilon must be a number: got '1e-5' (str).",
    ),
    (
        lambda: jax.jit(lambda e: switchable(epsilon=e))(1e-5),
        TypeError,
        "epsilon must be a static number: got a traced value.",
    ),
    (
        lambda: jax.jit(lambda e: jn.layer_norm(X, epsilon=e))(jnp.ones(2)),
        TypeError,
        "epsilon must be one floating point number: got shape",
    ),
    (
        lambda: jax.jit(lambda e: jn.layer_norm(X, epsilon=e, correction=1))(1e-5),
        TypeError,
        "static number beside correction and epsilon_in",
    ),
    (
        lambda: jax.jit(lambda c: jn.layer_norm(X, correction=c))(1.0),
        TypeError,
        "correction must be a static number: got a traced value.",
    ),
    (
        lambda: jax.jit(lambda e, c: jn.layer_norm(X, epsilon=e, correction=c))(1e-5, 1.0),
        TypeError,
        "correction must be a static number: got a traced value.",
    ),
    (
        lambda: jax.jit(lambda e: jn.layer_norm(X, epsilon=e, correction="1"))(1e-5),
        TypeError,
        "correction must be a number: got '1' (str).",
    ),
    (
        lambda: jn.layer_norm(X, dtype=jnp.int32),
        TypeError,
        "dtype, that of the output, must be floating point: got int32 for x of float32.",
    ),
    (
        lambda: jn.batch_norm(X, dtype=bool),
        TypeError,
        "dtype, that of the output, must be floating point: got bool for x of float32.",
    ),
    (
        lambda: jn.rms_norm(X + 0j, dtype="float32"),
        TypeError,
        "must be complex for complex x: got float32 for x of complex64.",
    ),
    (
        lambda: jn.normalize(X + 0j, M, dtype="float32"),
        TypeError,
        "must be complex for complex x: got float32 for x of complex64.",
    ),
    (
        lambda: switchable(dtype="int8"),
        TypeError,
        "dtype, that of the output, must be floating point: got int8 for x of float32.",
    ),
    (
        lambda: jn.weight_norm(X, dtype="int8"),
        TypeError,
        "dtype, that of the output, must be floating point: got int8 for x of float32.",
    ),
    (
        lambda: jn.layer_norm(X, correction=-1),
        ValueError,
        "correction must be finite and >= 0: got -1.0.",
    ),
    (
        lambda: jn.layer_norm(X, epsilon_in="sigma"),
        ValueError,
        "epsilon_in must be 'var' (added to the variance), 'std' (added to its root) or 'max'",
    ),
    (
        lambda: jn.standardize(X, 0, implementation="cuda"),
        ValueError,
        "None, 'reference', 'xla', 'native' or 'pallas': got 'cuda'.",
    ),
    (lambda: jn.ema(M, M, momentum=1.5), ValueError, "momentum must lie in [0, 1]: got 1.5."),
    (
        lambda: jn.ema(M, M, momentum=float("nan")),
        ValueError,
        "momentum must lie in [0, 1]: got nan.",
    ),
    (
        lambda: jn.ema(M, M, momentum="0.9"),
        TypeError,
        "momentum must be a number: got '0.9' (str).",
    ),
    (
        lambda: jn.ema(M, jn.moments(X[:, :4], 0)),
        ValueError,
        "running and batch must have the same shape",
    ),
    (lambda: jn.ema(0.9, M), TypeError, "running must be Moments: got float."),
    (
        lambda: nnx.BatchNorm(6, use_running_average=None, rngs=RNGS)(X),
        ValueError,
        "use_running_average must be given",
    ),
    # kernels
    (
        lambda: jn.weight_norm(X, np.ones(4, "f4")),
        ValueError,
        "scale must have the shape of the feature axes, (6,)",
    ),
    (
        lambda: jn.spectral_norm(X, np.ones((1, 4), "f4")),
        ValueError,
        "u must have shape (1, 6) for a kernel of shape (4, 6): got (1, 4).",
    ),
    (
        lambda: jn.spectral_norm(X, 1j * np.ones((1, 6), "c8")),
        TypeError,
        "u must be real: got complex64.",
    ),
    (
        lambda: jn.spectral_norm(X[0], np.ones((1, 6), "f4")),
        ValueError,
        "kernel must have rank 2 or more: got shape (6,).",
    ),
    (
        lambda: jn.spectral_norm(X, np.ones((1, 6), "f4"), n_steps=0),
        ValueError,
        "n_steps must be an integer of at least 1: got 0.",
    ),
]


@pytest.mark.parametrize("index", range(len(WRONG)), ids=lambda i: WRONG[i][2][:50])
def test_wrong_calls(index):
    call, error, message = WRONG[index]
    with pytest.raises(error, match=re.escape(message)):
        call()


CHECKED = [
    (lambda w: jn.moments(X, 0, where=w), -X, "must be finite and >= 0"),
    (lambda m: jn.ema(M, M, momentum=m), np.float32(1.5), "momentum must lie in [0, 1]"),
    (
        lambda v: jn.normalize(X, jn.Moments(1.0, 0.0, v)),
        np.float32(-1),
        "the variance of moments must be >= 0",
    ),
    (lambda e: jn.layer_norm(X, epsilon=e), np.float32(-1), "epsilon must be finite and >= 0"),
    (
        lambda i: jn.layer_norm(X, segments=i.astype(int), num_segments=2),
        np.full(6, 3, np.float32),
        "segments must be ids from 0 to",
    ),
]
VALUES = ["weights", "momentum", "variance", "epsilon", "segments"]


@pytest.mark.parametrize(("call", "value", "message"), CHECKED, ids=VALUES)
def test_wrong_values_inside_jit_are_found_under_checkify(call, value, message):
    error, _ = checkify.checkify(jax.jit(call))(jnp.asarray(value))
    with pytest.raises(checkify.JaxRuntimeError, match=re.escape(message)):
        error.throw()
    checkify.checkify(jax.jit(call))(jnp.abs(value) / 2)[0].throw()
    jax.block_until_ready(jax.jit(call)(jnp.asarray(value)))  # without checkify nothing is checked


def summed(call):
    return lambda value: sum(leaf.sum() for leaf in jax.tree.leaves(call(value)))


WITHIN = {
    "vmap": lambda call: lambda value: jax.vmap(call)(value[None]),
    "scan": lambda call: (
        lambda value: jax.lax.scan(lambda state, one: (state, call(one)), 0, value[None])
    ),
    "cond": lambda call: lambda value: jax.lax.cond(value.sum() < 1e9, call, call, value),
    "checkpoint": jax.checkpoint,
    "gradient": lambda call: jax.jit(jax.grad(summed(call))),
    "second derivative": lambda call: jax.grad(lambda value: jax.grad(summed(call))(value).sum()),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(("call", "value", "message"), CHECKED, ids=VALUES)
def test_wrong_values_are_found_within_transformations(call, value, message, within):
    """What is checked is used, so that no transformation drops it as dead code."""
    error, _ = checkify.checkify(WITHIN[within](call))(jnp.asarray(value))
    assert message in error.get()


@pytest.mark.parametrize(("call", "value"), [row[:2] for row in CHECKED], ids=VALUES)
def test_checks_are_no_effects(call, value):
    """Programs with effects cannot be serialized, and are not called by JAX's fast path."""
    assert not jax.make_jaxpr(call)(jnp.asarray(value)).effects


def test_checks_where_the_internals_of_checkify_are_others(monkeypatch):
    monkeypatch.setattr(validation, "_checked", lambda: validation._checked_by_effect)
    error, _ = checkify.checkify(jax.jit(lambda w: jn.moments(X, 0, where=w)))(jnp.asarray(-X))
    assert "must be finite and >= 0" in error.get()


COMMANDS = [
    (
        ["compare", "--norms", "bach"],
        2,
        "unknown norm 'bach' for dense: choose from none, batch, batch_renorm, ",
    ),
    (
        ["compare", "--norms", "instance"],
        2,
        "unit, scale, group, dynamic_tanh, dynamic_erf. instance is for --variants conv,deep.",
    ),
    (
        ["compare", "cifar"],
        2,
        "unknown task 'cifar': choose from digits, mnist, pimnist, sequential, sequential-mnist, "
        "vowels, imdb, text, handwriting, vit, denoise, draw.",
    ),
    (
        ["compare", "--variants", "late"],
        2,
        "unknown variant 'late' of digits: choose from dense, conv, deep.",
    ),
    (
        ["compare", "sequential", "--norms", "group"],
        2,
        "'group' for lstm-rows, gru-rows, rnn-rows, lstm-embedded, gru-embedded, rnn-embedded: "
        "choose from none, layer, layer-0.3, layer-sum, layer-sum-0.3, rms, batch.",
    ),
    (
        ["compare", "--norms", "none,,batch"],
        2,
        "must be names with commas between them: got 'none,,batch'.",
    ),
    (["compare", "--batch-sizes", "8,x"], 2, "must be an integer: got 'x'."),
    (["compare", "--batch-sizes", "0"], 2, "must be positive and finite: got 0."),
    (["compare", "--learning-rate", "nan"], 2, "must be positive and finite: got nan."),
    (["compare", "--momentum", "2"], 2, "must lie in [0, 1]: got 2."),
    (
        ["compare", "--batch-sizes", "100000"],
        1,
        "batch size 100000 is larger than the 1437 training examples.",
    ),
    (
        ["explain", "--batch-size", "5000"],
        1,
        "batch size 5000 is larger than the 1437 training examples.",
    ),
    (
        ["compare", "--out", "text/mnist.npz"],
        1,
        "text/mnist.npz/results.json cannot be written (File exists): pass another --out.",
    ),
    (
        ["axes", "--out", "text/mnist.npz/a.png"],
        1,
        "jaxnorm: text/mnist.npz/a.png cannot be written (File exists): pass another --out.\n",
    ),
    (["axes", "--out", "axes.doc"], 2, ".svgz, .tif, .tiff, .webp: got 'axes.doc'."),
    (
        ["compare", "--resume"],
        1,
        "results.json to resume: leave out --resume, or pass the --out of the earlier run.",
    ),
    (
        ["compare", "mnist", "--data-dir", "."],
        1,
        "mnist.npz: put mnist.npz there, or pass --data-dir",
    ),
    (
        ["compare", "mnist", "--data-dir", "text"],
        1,
        "text/mnist.npz is damaged or incomplete: delete it, and download it again.",
    ),
    (
        ["compare", "mnist", "--data-dir", "other"],
        1,
        "must hold the arrays x_train, y_train, x_test, y_test",
    ),
    (
        ["compare", "mnist", "--data-dir", "shape"],
        1,
        "mnist.npz must hold images (n, 28, 28) and labels (n,)",
    ),
    (["compare", "--resume", "--out", "broken"], 1, "is not the result of a comparison"),
    ([], 2, "the following arguments are required: COMMAND"),
    (["train"], 2, "invalid choice: 'train'"),
]


@pytest.mark.parametrize(
    ("arguments", "status", "message"), COMMANDS, ids=[" ".join(command[0]) for command in COMMANDS]
)
def test_wrong_commands(arguments, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("text", "other", "shape", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "mnist.npz").write_text("no archive")
    np.savez(tmp_path / "other" / "mnist.npz", images=np.zeros(3))
    flat = {name: np.zeros((4, 784)) for name in ("x_train", "x_test")} | {
        name: np.zeros(4) for name in ("y_train", "y_test")
    }
    np.savez(tmp_path / "shape" / "mnist.npz", **flat)
    (tmp_path / "broken" / "results.json").write_text("{}")
    try:
        found = main(arguments)
    except SystemExit as exit_:
        found = exit_.code
    assert found == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "options"), TWINS, ids=[f"{row[0]} {row[1]}" for row in TWINS])
def test_modules_call_their_mask_by_its_name(name, options):
    options = {"num_groups": 3} if "num_groups" in options else options
    made = getattr(nnx, name)(6, **options, rngs=RNGS)
    for run in (partial(init, getattr(linen, name)(**options), IMAGES), partial(made, IMAGES)):
        with pytest.raises(
            TypeError, match=r"mask must be boolean or float weights: got int32\. Cast it first"
        ):
            run(mask=np.ones((2, 3, 3, 6), np.int32))
        with pytest.raises(
            ValueError,
            match=r"growing it: mask has shape \(2, 3, 3, 5\), x has shape \(2, 3, 3, 6\)\.",
        ):
            run(mask=np.ones((2, 3, 3, 5), bool))
        with pytest.raises(
            ValueError,
            match=r"mask, for x of shape \(2, 3, 3, 6\), must be finite and >= 0: found -1.0\.",
        ):
            run(mask=-IMAGES)


@pytest.mark.parametrize(("name", "options"), TWINS, ids=[f"{row[0]} {row[1]}" for row in TWINS])
def test_modules_take_no_keyword_of_the_functions(name, options):
    options = {"num_groups": 3} if "num_groups" in options else options
    for run in (
        getattr(nnx, name)(6, **options, rngs=RNGS),
        partial(init, getattr(linen, name)(**options)),
    ):
        for keyword in ("centered", "correction", "epsilon", "implementation", "segment"):
            with pytest.raises(
                TypeError,
                match=f"^{keyword} must be an argument of a call of {name}, which takes x, ",
            ):
                run(IMAGES, **{keyword: None})
