"""Take the steps of a layer-normalized LSTM with few operations.

Each operation on a TPU costs its start, and arrays of one step are small. XLA makes four
of a step: the product with the recurrent matrix and the sum of its squares, the gates and
c', the statistics of c', and h'. The statistics are one, since the shift of c' is a
product, too, with which XLA fuses the sums of the shifted values.

Gates have arrays of their own throughout: XLA's TPU back-end writes a concatenation as
four padded arrays, of which it takes the maximum.
"""

from collections.abc import Iterable
from functools import partial, reduce

import jax
import jax.numpy as jnp

from jaxnorm.engine.groups import inverse_root
from jaxnorm.engine.xla import unknown_ones
from jaxnorm.recurrent.cell import State, Steps, Weights, input_product
from jaxnorm.recurrent.cells import LSTM
from jaxnorm.recurrent.pointwise import GATES, expand_like, split

Gates = tuple[jax.Array, ...]


def with_gates(weights: Weights) -> Weights:
    """Return the parameters with an array for each gate, and the recurrent matrix as it was."""
    packed = weights["recurrent_kernel"]
    apart = {
        name: tuple(split(value, GATES)) if value.shape[-1] == packed.shape[-1] else value
        for name, value in weights.items()
    }
    return {**apart, "recurrent_kernel": packed, "recurrent_kernels": apart["recurrent_kernel"]}


def input_terms(cell: LSTM, weights: Weights, x: jax.Array, steps: Steps) -> Gates:
    """Return the input's term of each gate, with the bias if possible."""
    a = tuple(input_product(steps, x, weight) for weight in weights["input_kernel"])
    if cell.normalizes_sum:
        return a
    return tuple(
        expand_like(scale, u) * u + expand_like(bias, u)
        for scale, bias, u in zip(
            weights["input_scale"], weights["bias"], normalize_gates(cell.epsilon, a), strict=True
        )
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalize_gates(epsilon: float, a: Gates) -> Gates:
    """Divide gates by the root of the mean square of all their features."""
    r = inverse_root(mean_square(a), epsilon, positive=epsilon > 0)
    return tuple(each * r for each in a)


@normalize_gates.defjvp
def _normalize_gates_jvp(epsilon, primals, tangents):
    # du = r (da - u mean(u da)), derived in pointwise.py
    (a,), (da,) = primals, tangents
    r = inverse_root(mean_square(a), epsilon, positive=epsilon > 0)
    u = tuple(each * r for each in a)
    mu = mean_product(u, da)
    return u, tuple(r * (d - each * mu) for each, d in zip(u, da, strict=True))


def add_up(values: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of arrays."""
    return reduce(jnp.add, values)


def mean_product(a: Gates, b: Gates) -> jax.Array:
    """Return the mean of ``a * b`` over the features of all gates."""
    total = add_up(map(jnp.multiply, a, b))
    return jnp.sum(total, -1, keepdims=True) / (len(a) * total.shape[-1])


def mean_square(a: Gates) -> jax.Array:
    """Return the mean square over the features of all gates."""
    return mean_product(a, a)


def make_ones(weights: Weights, dtype) -> tuple[jax.Array, jax.Array]:
    """Return a vector and a matrix of ones, which XLA takes for any numbers."""
    # Otherwise XLA computes the roots and means of rows apart, as small arrays. Compiled for
    # a TPU, each took 1830 cycles of the 15,700 of a step.
    width = weights["recurrent_kernel"].shape[-1] // len(GATES)
    return unknown_ones((width,), dtype), unknown_ones((width, width), dtype)


def step(
    cell: LSTM, weights: Weights, ones: tuple[jax.Array, jax.Array], a: jax.Array, term: Gates, c
) -> State:
    """Return the state after a step.

    Args:
      cell: the static arguments of a step.
      weights: the parameters, as :func:`with_gates` returns them.
      ones: as :func:`make_ones` returns them.
      a: the packed product of h and the recurrent matrix.
      term: the input's term of each gate.
      c: the cell state before the step.
    """
    scale, shift = weights["recurrent_scale" if cell.normalizes_each_term else "scale"], term
    total: Gates = tuple(split(a, GATES))
    if cell.normalizes_sum:
        total = tuple(map(jnp.add, total, term))
        shift = tuple(expand_like(each, c) for each in weights["bias"])
        squares = jnp.sum(add_up(each * each for each in total), -1, keepdims=True)
    else:
        squares = jnp.sum(a * a, -1, keepdims=True)
    v = squares * expand_like(ones[0], c) / a.shape[-1]
    r = inverse_root(v, cell.epsilon, positive=cell.epsilon > 0)
    i, f, g, o = (
        jnp.tanh(expand_like(gain, c) * (each * r) + x)
        for gain, each, x in zip(scale, total, shift, strict=True)
    )
    i, f, o = (0.5 * gate + 0.5 for gate in (i, f, o))
    c = f * c + i * g
    if not cell.normalizes_cell:
        return o * jnp.tanh(c), c
    s = _normalize_cell(cell, ones, c)
    s = s * expand_like(weights["cell_scale"], c) if "cell_scale" in weights else s
    s = s + expand_like(weights["cell_bias"], c) if "cell_bias" in weights else s
    return o * jnp.tanh(s), s if cell.carries else c


def _normalize_cell(cell: LSTM, ones: tuple[jax.Array, jax.Array], c: jax.Array) -> jax.Array:
    """Normalize c, with sums that are taken at once."""
    vector, matrix = expand_like(ones[0], c), ones[1]
    mean = lambda values: jnp.sum(values, -1, keepdims=True) * vector / c.shape[-1]
    root = partial(inverse_root, epsilon=cell.epsilon, positive=cell.epsilon > 0)
    if cell.norm != "layer":
        return c * root(mean(c * c))
    # The product of precision "high" takes two bfloat16 for each element, of which it adds
    # up all digits: the shift is within 2**-17 mean(|c|) of the mean. The variance is then
    # rounded as a number 1 + 2**-34 mean(|c|)**2 / var times as large: not twice, up to a
    # mean of 1e5 deviations.
    d = c - jnp.matmul(c, matrix, precision="high") / c.shape[-1]
    low_mean = mean(d)
    v = jnp.maximum(mean(d * d) - low_mean * low_mean, 0)
    return (d - low_mean) * root(v)
