"""Compute the pointwise functions of a step, each with a derivative of its own.

Autodiff of a loop stores or recomputes what each step computed. Here the tangent of
every nonlinear function is ``coefficient * tangent``. One parallel pass over the stored
states computes the coefficients of all steps. The loop that runs backwards then only
multiplies and adds.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.engine.groups import inverse_root
from jaxnorm.engine.xla import end_of_sum


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def normalize(
    axis: int,
    centered: bool,
    epsilon: float,
    a: jax.Array,
    where: jax.Array | None,
    zero_input: jax.Array | None,
) -> jax.Array:
    """Normalize over one axis, in two passes.

    Args:
      axis: the reduction axis.
      centered: whether the mean is subtracted.
      epsilon: added to the variance.
      a: the values.
      where: boolean mask of the elements that count.
      zero_input: boolean. Where it is True and the variance is 0, the derivative is 0.
        Otherwise it would be ``1 / sqrt(epsilon)`` there, once for each step.
    """
    return _normalize(axis, centered, epsilon, a, where)[0]


@normalize.defjvp
def _normalize_jvp(axis, centered, epsilon, primals, tangents):
    """Return the normalized values and their tangent, derived below."""
    # With d = a - mean(a), v = mean(d**2), r = (v + epsilon)**(-1/2) and u = r d:
    #     dd = da - mean(da)
    #     dv = 2 mean(d dd) = 2 mean(d da)      since mean(d) = 0
    #     dr = -1/2 r**3 dv = -r**3 mean(d da) = -r**2 mean(u da)
    #     du = r dd + d dr = r (dd - u mean(u da))
    # Uncentered, d = a and dd = da.
    a, where, zero_input = primals
    u, r = normalize_with_root(axis, centered, epsilon, a, where, zero_input)
    da = tangents[0]
    if where is not None:
        da = jnp.where(where, da, 0)
    dd = da - _mean(axis, da, where) if centered else da
    return u, r * (dd - u * _mean(axis, u * da, where))


def normalize_with_root(
    axis: int, centered: bool, epsilon: float, a: jax.Array, where, zero_input
) -> tuple[jax.Array, jax.Array]:
    """Return the normalized values, and 1 / sqrt(variance + epsilon) for derivatives."""
    u, r, v = _normalize(axis, centered, epsilon, a, where)
    return u, r if zero_input is None else jnp.where(zero_input & (v == 0), 0, r)


def _normalize(
    axis: int, centered: bool, epsilon: float, a: jax.Array, where
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the normalized values, 1 / sqrt(variance + epsilon) and the variance."""
    d = a - _mean(axis, a, where) if centered else a
    if where is not None:
        d = jnp.where(where, d, 0)
    v = _mean(axis, d * d, where)
    r = inverse_root(v, epsilon, positive=epsilon > 0)
    return d * r, r, v


def _mean(axis: int, values: jax.Array, where) -> jax.Array:
    """Return the mean of the elements that count, and 0 where none does."""
    if where is None:
        return end_of_sum(jnp.mean(values, axis, keepdims=True))
    total = end_of_sum(jnp.sum(values, axis, keepdims=True, where=where))
    return total / jnp.maximum(jnp.sum(where, axis, keepdims=True), 1).astype(values.dtype)


@jax.custom_jvp
def tanh(x: jax.Array) -> jax.Array:
    """Return the tanh, with a derivative that needs no transcendental function."""
    return jnp.tanh(x)


@tanh.defjvp
def _tanh_jvp(primals, tangents):
    # y = tanh(x) has dy = (1 - y**2) dx. The rule of JAX 0.10 evaluates two logistic
    # functions of x instead.
    y = jnp.tanh(primals[0])
    return y, (1 - y * y) * tangents[0]


def make_gate_factors(features: int, sigmoids: tuple[bool, ...], dtype) -> jax.Array:
    """Return a factor for each packed feature: 1/2 for gates that are sigmoids, else 1.

    One tanh then computes all gates, since ``sigmoid(v) = tanh(v / 2) / 2 + 1 / 2``.
    """
    return jnp.concatenate(
        [jnp.full(features, 0.5 if sigmoid else 1, dtype) for sigmoid in sigmoids]
    )


# the gates lie side by side along the last axis, in the order i, f, g, o; g is a tanh
LSTM_SIGMOIDS = (True, True, False, True)
GATES = (1, 1, 1, 1)


@jax.custom_jvp
def lstm_gates(a: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``f c + i g`` and ``o`` of an LSTM.

    Args:
      a: the packed pre-activations, halved where the gate is a sigmoid.
      c: the cell state before the step.
    """
    i, f, g, o = _lstm_gates(a, c)[1]
    return f * c + i * g, o


@lstm_gates.defjvp
def _lstm_gates_jvp(primals, tangents):
    # A packed gate is s = k t + 1 - k with t = tanh(a), where k is 1/2 for a sigmoid
    # and 1 for a tanh. So ds = k (1 - t**2) da, and with c' = f c + i g
    #     dc' = f dc + c df + g di + i dg
    # All four products by da are taken at once, as [g, c, i, 1] * ds, before the split.
    (a, c), (da, dc) = primals, tangents
    t, (i, f, g, o), factors = _lstm_gates(a, c)
    slope = factors * (1 - t * t)
    di, df, dg, do = split(jnp.concatenate([g, c, i, jnp.ones_like(o)], -1) * slope * da, GATES)
    return (f * c + i * g, o), (f * dc + di + df + dg, do)


def _lstm_gates(a: jax.Array, c: jax.Array):
    """Return the packed tanh, the four gates, and the factors of the gates."""
    factors = expand_like(make_gate_factors(c.shape[-1], LSTM_SIGMOIDS, a.dtype), a)
    # one tanh of the whole array, before it is split
    t = jnp.tanh(a)
    return t, split(factors * t + (1 - factors), GATES), factors


def split(packed: jax.Array, blocks: tuple[int, ...]) -> list[jax.Array]:
    """Split a packed array along its last axis into parts of so many blocks each."""
    # the transpose of lax.split is one concatenation; for slices it is a sum of padded
    # arrays
    features = packed.shape[-1] // sum(blocks)
    return list(lax.split(packed, [count * features for count in blocks], axis=packed.ndim - 1))


def expand_like(vector: jax.Array, values: jax.Array) -> jax.Array:
    """Reshape a vector of features to the rank of ``values``."""
    # explicit, since strict rank promotion refuses to broadcast a vector
    return vector.reshape(*(1,) * (values.ndim - 1), -1)
