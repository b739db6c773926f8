"""The pointwise functions of a step, with derivatives whose coefficients can be computed before
they are needed.

Autodiff of a loop stores or recomputes what each step computed. Here every nonlinear function is
one whose tangent is ``coefficient * tangent``, so that the coefficients of all steps come out of
one parallel pass over the saved states, and the loop that runs backwards multiplies and adds.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.engine.groups import inverse_root


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def normalize(
    axis: int,
    centered: bool,
    epsilon: float,
    a: jax.Array,
    where: jax.Array | None,
    zero_input: jax.Array | None,
) -> jax.Array:
    """``a`` normalized over one axis: :func:`jaxnorm.standardize` with this other derivative and a
    plain two-pass.

    The derivative is 0 where ``idle`` says so and the variance is 0: it would be ``1 /
    sqrt(epsilon)``, once per step.
    """
    return _normalize(axis, centered, epsilon, a, where)[0]


@normalize.defjvp
def _normalize_jvp(axis, centered, epsilon, primals, tangents):
    """d u = r (d a - mean(d a) - u mean(u d a))"""
    a, where, zero_input = primals
    u, r, v = _normalize(axis, centered, epsilon, a, where)
    if zero_input is not None:
        r = jnp.where(zero_input & (v == 0), 0, r)
    da = tangents[0]
    if where is not None:
        da = jnp.where(where, da, 0)
    du = da - _mean(axis, da, where) if centered else da
    return u, r * (du - u * _mean(axis, u * da, where))


def _normalize(
    axis: int, centered: bool, epsilon: float, a: jax.Array, where
) -> tuple[jax.Array, jax.Array, jax.Array]:
    d = a - _mean(axis, a, where) if centered else a
    if where is not None:
        d = jnp.where(where, d, 0)
    v = _mean(axis, d * d, where)
    r = inverse_root(v, epsilon, positive=epsilon > 0)
    return d * r, r, v


def _mean(axis: int, values: jax.Array, where) -> jax.Array:
    if where is None:
        return jnp.mean(values, axis, keepdims=True)
    total = jnp.sum(values, axis, keepdims=True, where=where)
    return total / jnp.maximum(jnp.sum(where, axis, keepdims=True), 1).astype(values.dtype)


@jax.custom_jvp
def tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@tanh.defjvp
def _tanh_jvp(primals, tangents):
    y = jnp.tanh(primals[0])
    return y, (1 - y * y) * tangents[0]


def make_gate_factors(features: int, sigmoids: tuple[bool, ...], dtype) -> jax.Array:
    """The factors that turn packed tanh into packed gates: sigmoid(v) = tanh(v / 2) / 2 + 1 / 2."""
    return jnp.concatenate(
        [jnp.full(features, 0.5 if sigmoid else 1, dtype) for sigmoid in sigmoids]
    )


LSTM_SIGMOIDS = (True, True, False, True)  # i, f, g, o
GATES = (1, 1, 1, 1)


@jax.custom_jvp
def lstm_gates(a: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``f c + i g`` and ``o`` of the packed pre-activations, those of the sigmoids halved: one tanh
    before any slicing.
    """
    i, f, g, o = _lstm_gates(a, c)[1]
    return f * c + i * g, o


@lstm_gates.defjvp
def _lstm_gates_jvp(primals, tangents):
    (a, c), (da, dc) = primals, tangents
    t, (i, f, g, o), factors = _lstm_gates(a, c)
    slope = factors * (1 - t * t)
    di, df, dg, do = split(jnp.concatenate([g, c, i, jnp.ones_like(o)], -1) * slope * da, GATES)
    return (f * c + i * g, o), (f * dc + di + df + dg, do)


def _lstm_gates(a: jax.Array, c: jax.Array):
    factors = expand_like(make_gate_factors(c.shape[-1], LSTM_SIGMOIDS, a.dtype), a)
    t = jnp.tanh(a)
    return t, split(factors * t + (1 - factors), GATES), factors


def split(packed: jax.Array, blocks: tuple[int, ...]) -> list[jax.Array]:
    """Parts of a packed array, of so many blocks each; the transpose is one concatenation, that of
    slices a sum of padded arrays.
    """
    features = packed.shape[-1] // sum(blocks)
    return list(lax.split(packed, [count * features for count in blocks], axis=packed.ndim - 1))


def expand_like(vector: jax.Array, values: jax.Array) -> jax.Array:
    """One element per feature, of the rank of ``values``."""
    return vector.reshape(*(1,) * (values.ndim - 1), -1)
