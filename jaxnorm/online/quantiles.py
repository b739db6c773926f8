"""Quantiles of samples, and arrays normalized to the range between two of them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.arguments import validation
from jaxnorm.arguments.numbers import is_number
from jaxnorm.online.samples import Range

MODES = ("quantile", "min_max")
# A power of two, which changes no bit.
SCALE = 2.0**-9
# The smallest divisor whose scaled values and inverse are normal numbers of float32.
LEAST = 2.0**-100


def divisible(floor: Any) -> float:
    """Return the smallest width to divide by, after checking that it is above 0."""
    if not validation.number("floor", floor):
        raise ValueError("floor must be above 0, as a constant feature has width 0: got 0.")
    return float(floor)


def ends(mode: str, ranks: Any) -> tuple[float, float]:
    """Return the ranks that become -1 and 1; the extremes have ranks 0 and 1."""
    if mode not in MODES:
        hint = " For mean and deviation take online.normalize." if mode == "standard" else ""
        raise ValueError(f"mode must be 'quantile' or 'min_max': got {mode!r}.{hint}")
    pair = tuple(ranks) if isinstance(ranks, Iterable) else (ranks,)
    if not all(map(_is_rank, pair)) or len(pair) != 2:
        raise ValueError(f"ranks must be two numbers from 0 to 1: got {ranks!r}.")
    if not pair[0] < pair[1]:
        raise ValueError(f"ranks must be two, the lower one first: got {ranks!r}.")
    return (float(pair[0]), float(pair[1])) if mode == "quantile" else (0.0, 1.0)


def _is_rank(value: Any) -> bool:
    return is_number(value) and bool(0 <= value <= 1)


def quantile(state: Range, rank: float) -> jax.Array:
    """Return the quantile of a rank from 0 to 1 of each feature; NaN for a feature without data."""
    if rank in (0, 1):
        return jnp.where(state.count > 0, state.max if rank else state.min, jnp.nan)
    size, dtype = state.values.shape[-1], state.min.dtype
    # NumPy computes the places for each count, in the float64 of numpy.quantile
    places = rank * np.maximum(np.arange(size + 1) - 1, 0)
    floor, share = np.floor(places), places % 1
    shares = (np.asarray(a, dtype) for a in (share, rank, 1 - rank))
    return _quantile(state, floor.astype(np.int32), *shares)


@jax.jit
def _quantile(
    state: Range, floor: jax.Array, share: jax.Array, rank: jax.Array, rest: jax.Array
) -> jax.Array:
    """Return the quantile of a rank; ``rest`` is one minus the rank.

    Where all elements are in the sample, ``floor`` and ``share`` say for each number of elements
    between which two the quantile is.
    """
    known = jnp.concatenate([state.min[..., None], state.values, state.max[..., None]], axis=-1)
    size = state.values.shape[-1]
    held = jnp.minimum(state.count, jnp.uint32(size)).astype(jnp.int32)
    whole = state.count <= size
    below, between = _place_in_sample(state, rank, rest)
    below = jnp.where(whole, 1 + jnp.take(floor, held), below)
    between = jnp.where(whole, jnp.take(share, held), between)
    above = jnp.minimum(below + 1, jnp.where(whole, jnp.maximum(held, 1), size + 1))
    low, high = (
        jnp.take_along_axis(known, place[..., None], axis=-1)[..., 0] for place in (below, above)
    )
    # half the step twice: the step from -3e38 to 3e38 overflows
    half = (high / 2 - low / 2) * between
    return jnp.where(state.count > 0, jnp.clip(low + half + half, low, high), jnp.nan)


def _place_in_sample(state: Range, rank: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return after which of (minimum, sample, maximum) a quantile is, and which share of the step.

    The n elements of a feature have the places 0 to n - 1 in sorted order, and a quantile has the
    place ``rank * (n - 1)``. The element i of a sample of m has the expected place
    ``(i + 1) * (n + 1) / (m + 1) - 1``, and minimum and maximum have the first and the last place.
    """
    size, dtype = state.values.shape[-1], state.min.dtype
    # in units of the places from one element of the sample to the next
    place = (size + 1) / (jnp.maximum(state.count, jnp.uint32(size + 1)).astype(dtype) + 1)
    end, all_places = 1 - place, size + 1 - 2 * place
    left, right = rank * all_places, rest * all_places
    inner = jnp.clip(left - end, 0, size - 1)
    index = jnp.floor(inner)
    below = jnp.where(left < end, 0, jnp.where(right < end, size, 1 + index)).astype(jnp.int32)
    share = jnp.where(
        left < end, left / end, jnp.where(right < end, 1 - right / end, inner - index)
    )
    return below, share


def normalize(
    x: jax.Array,
    state: Range,
    ranks: tuple[float, float],
    floor: float,
    limit: float | None,
) -> jax.Array:
    """Return ``x`` with the quantiles of two ranks at -1 and 1, clipped to a limit."""
    low, half, divisor, seen = _scale(x, state, ranks, floor)
    # Numerator and divisor are scaled, since the difference of -3e38 and 3e38 overflows, and since
    # XLA may multiply by the inverse of the divisor, which would underflow.
    above_low = x.astype(low.dtype) * SCALE - low * SCALE
    y = (above_low - half * SCALE) / (divisor * SCALE)
    y = jnp.where(seen, y.astype(x.dtype), x)
    return y if limit is None else jnp.clip(y, -limit, limit)


def denormalize(y: jax.Array, state: Range, ranks: tuple[float, float], floor: float) -> jax.Array:
    """Return the ``x`` that :func:`normalize` makes ``y`` without a limit."""
    low, half, divisor, seen = _scale(y, state, ranks, floor)
    x = y.astype(low.dtype) * divisor + (low + half)
    return jnp.where(seen, x.astype(y.dtype), y)


def _scale(
    x: jax.Array, state: Range, ranks: tuple[float, float], floor: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return low, half the width, the divisor and whether a feature has data, to fit ``x``."""
    state = lax.stop_gradient(state)
    wide = np.promote_types(x.dtype, state.min.dtype)
    seen = state.count > 0
    low, high = (jnp.where(seen, quantile(state, rank), 0).astype(wide) for rank in ranks)
    half = high / 2 - low / 2
    divisor = jnp.maximum(half, max(floor / 2, LEAST))
    lead = (1,) * (x.ndim - seen.ndim)
    low, half, divisor, seen = (
        leaf.reshape(lead + leaf.shape) for leaf in (low, half, divisor, seen)
    )
    return low, half, divisor, seen
