"""Linearize the steps of a layer-normalized LSTM, for a loop of few operations.

JAX's linearization of a step follows the step: the sums of its second norm wait for those
of the first. Here all sums are of the inputs of a step, so that the loop takes them at
once. With n features of all gates, m of one, and r and u of each norm as in pointwise.py::

    da = dh W                                    centered, since W is
    du = r (da - u mu)                           mu = mean(u da)
    di, df, dg, do = K scale du                  K of the gates' derivative
    dc' = f dc + di + df + dg
        = raw - A mu                             raw = f dc + P_i da_i + P_f da_f + P_g da_g
                                                 P = K scale r, A = P_i u_i + P_f u_f + P_g u_g

The norm of c' is linear, and its projection of A is known before the loop. With q for the
normalized c', and R for r times its gain::

    ds = R (dc' - mean(dc') - q mean(q dc'))
       = R (raw - mean(raw) - q mean(q raw)) - D mu
                                                 D = R (A - mean(A) - q mean(q A))
    dh' = tanh(s) do + k ds                      k = o (1 - tanh(s)**2)
        = P_o da_o - E mu + k ds                 K_o with the factor tanh(s), E = P_o u_o

The sums for mu, mean(raw) and mean(q raw) do not wait for each other. Nor do those of the
transpose, which are of R ds, q R ds and E dh' + D ds + A dc'. Tangents of parameters and
inputs add to mu, raw, ds and dh'.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.engine.groups import inverse_root
from jaxnorm.recurrent.cell import State, Weights
from jaxnorm.recurrent.cells import LSTM
from jaxnorm.recurrent.gates import Gates, add_up, mean_product, mean_square
from jaxnorm.recurrent.pointwise import expand_like, normalize_with_root


class Point(NamedTuple):
    """Where steps are linearized.

    Attributes:
      a: the products of h and the recurrent matrix, of each gate.
      input_term: the input's term of each gate.
      c: the cell state before the step.
      zero_input: boolean, where x is 0 in all features: norms of zeros then have the
        derivative 0, as in pointwise.py.
    """

    a: Gates
    input_term: Gates
    c: jax.Array
    zero_input: jax.Array


class Values(NamedTuple):
    """What a step computes at a point, in the names of the module's docstring.

    Attributes:
      scale: the gain of each gate.
      u: the normalized product of each gate.
      r: the factor of that norm.
      by_gate: K.
      forget: f.
      q: the normalized c', or None without a norm of c'.
      gain: R, or None without a norm of c'.
      by_s: k.
    """

    scale: Gates
    u: Gates
    r: jax.Array
    by_gate: Gates
    forget: jax.Array
    q: jax.Array | None
    gain: jax.Array | None
    by_s: jax.Array


class Coefficients(NamedTuple):
    """What the tangent of a step is made with, in the names of the module's docstring.

    Attributes:
      by_a: P.
      by_unit: u / n.
      forget: f.
      to_c: -A.
      q: the normalized c', or None without a norm of c'.
      by_sums: -R / m, or None without a norm of c'.
      to_s: -D, or None without a norm of c'.
      by_s: k.
      to_h: -E.
    """

    by_a: Gates
    by_unit: Gates
    forget: jax.Array
    to_c: jax.Array
    q: jax.Array | None
    by_sums: jax.Array | None
    to_s: jax.Array | None
    by_s: jax.Array
    to_h: jax.Array


class Source(NamedTuple):
    """What parameters and inputs add to mu, raw, ds and dh'; None is 0."""

    mu: jax.Array
    raw: jax.Array
    s: jax.Array | None
    h: jax.Array


def evaluate(cell: LSTM, weights: Weights, point: Point) -> Values:
    """Return the values of steps at a point, whose arrays may be stacked over time."""
    scale, total, shift = _gains(cell, weights, point.c), point.a, point.input_term
    if cell.normalizes_sum:
        total = tuple(map(jnp.add, total, shift))
        shift = tuple(expand_like(bias, point.c) for bias in weights["bias"])
    v = mean_square(total)
    r = inverse_root(v, cell.epsilon, positive=cell.epsilon > 0)
    u = tuple(each * r for each in total)
    r = jnp.where(point.zero_input & (v == 0), 0, r)
    t = tuple(jnp.tanh(gain * each + x) for gain, each, x in zip(scale, u, shift, strict=True))
    # a sigmoid is t / 2 + 1 / 2, whose derivative is (1 - t**2) / 2
    factors = [0.5 if is_sigmoid else 1.0 for is_sigmoid in cell.sigmoids]
    i, f, g, o = (k * each + (1 - k) for k, each in zip(factors, t, strict=True))
    slopes = [k * (1 - each * each) for k, each in zip(factors, t, strict=True)]
    s, q, gain = _shown(cell, weights, f * point.c + i * g, point.zero_input)
    shown = jnp.tanh(s)
    by_gate = tuple(map(jnp.multiply, (g, point.c, i, shown), slopes))
    return Values(scale, u, r, by_gate, f, q, gain, o * (1 - shown * shown))


def make_coefficients(cell: LSTM, at: Values) -> Coefficients:
    """Return the coefficients of a step's tangent by a and c."""
    by_a = tuple(k * gain * at.r for k, gain in zip(at.by_gate, at.scale, strict=True))
    *to_c, to_h = map(jnp.multiply, by_a, at.u)
    a = add_up(to_c)
    by_unit = tuple(u / (len(at.u) * u.shape[-1]) for u in at.u)
    by_sums = to_s = None
    if at.q is not None and at.gain is not None:
        projected = a - at.q * jnp.mean(at.q * a, -1, keepdims=True)
        if cell.norm == "layer":
            projected = projected - jnp.mean(a, -1, keepdims=True)
        by_sums, to_s = at.gain / -a.shape[-1], -at.gain * projected
    return Coefficients(by_a, by_unit, at.forget, -a, at.q, by_sums, to_s, at.by_s, -to_h)


def make_source(cell: LSTM, dweights: Weights, at: Values, da: Gates, dinput_term: Gates) -> Source:
    """Return what the tangents of parameters and inputs add to the tangent of a step.

    Args:
      cell: the static arguments of a step.
      dweights: the tangents of the parameters.
      at: the values of the step.
      da: the tangents of a by the recurrent matrix.
      dinput_term: the tangents of the input's term.
    """
    dscale, dshift = _gains(cell, dweights, at.forget), dinput_term
    if cell.normalizes_sum:
        da = tuple(map(jnp.add, da, dinput_term))
        dshift = tuple(expand_like(bias, at.forget) for bias in dweights["bias"])
    *raw, h = (
        k * (gain * at.r * d + dgain * u + x)
        for k, gain, d, dgain, u, x in zip(
            at.by_gate, at.scale, da, dscale, at.u, dshift, strict=True
        )
    )
    s = None
    if "cell_scale" in dweights and at.q is not None:
        s = at.q * expand_like(dweights["cell_scale"], at.forget)
    if "cell_bias" in dweights:
        shift = expand_like(dweights["cell_bias"], at.forget)
        s = jnp.broadcast_to(shift, at.forget.shape) if s is None else s + shift
    mu = jnp.broadcast_to(mean_product(at.u, da), at.forget.shape)
    return Source(mu, add_up(raw), s, h)


def apply(cell: LSTM, by: Coefficients, source: Source, da: Gates, dc: jax.Array) -> State:
    """Return the tangent of the state after a step."""
    products = add_up(map(jnp.multiply, by.by_unit, da))
    # as wide as all that it is multiplied with, so that its transpose is one sum
    mu = jnp.broadcast_to(jnp.sum(products, -1, keepdims=True), dc.shape) + source.mu
    di, df, dg, do = map(jnp.multiply, by.by_a, da)
    raw = by.forget * dc + di + df + dg + source.raw
    dc = raw + by.to_c * mu
    ds = dc
    if by.q is not None and by.by_sums is not None and by.to_s is not None:
        total = by.q * jnp.sum(by.q * raw, -1, keepdims=True)
        if cell.norm == "layer":
            total = total + jnp.sum(raw, -1, keepdims=True)
        ds = by.by_sums * (total - raw.shape[-1] * raw) + by.to_s * mu
    ds = ds if source.s is None else ds + source.s
    return do + by.to_h * mu + by.by_s * ds + source.h, ds if cell.carries else dc


def _gains(cell: LSTM, weights: Weights, like: jax.Array) -> Gates:
    """Return the gain of the norm of each gate."""
    packed = weights["scale" if cell.normalizes_sum else "recurrent_scale"]
    return tuple(expand_like(gain, like) for gain in packed)


def _shown(cell: LSTM, weights: Weights, c: jax.Array, zero_input: jax.Array):
    """Return what the output shows of c', s, and with a norm of c' also q and R."""
    if not cell.normalizes_cell:
        return c, None, None
    q, r = normalize_with_root(-1, cell.norm == "layer", cell.epsilon, c, None, zero_input)
    s, gain = q, r
    if "cell_scale" in weights:
        scale = expand_like(weights["cell_scale"], c)
        s, gain = scale * q, scale * r
    return s + expand_like(weights["cell_bias"], c) if "cell_bias" in weights else s, q, gain
