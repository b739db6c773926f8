"""Sums that keep their rounding error, as three parts: number = first + second + third.

The first part is the high part: the number as rounded. The others are low parts, as in double-float
arithmetic. Counts of up to 2**56 stay exact in float32. A mean that is updated in many merges keeps
moving, even where one step is less than its last digit.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.engine.collectives import across

# Bits of a digit: float32 holds integers of 24 bits, so a sum of 2**16 digits of 8 bits is exact.
DIGIT = 8
# Digits of a part: 56 bits, the range of exact counts.
DIGITS = 7
Parts = tuple[jax.Array, jax.Array, jax.Array]


def two_sum(a, b) -> tuple[jax.Array, jax.Array]:
    """Return a + b as rounded, and its rounding error (Knuth 1997, section 4.2.2).

    The error is 0 where the sum is not finite.
    """
    total = a + b
    # part is b as it went into the total, and total - part is a as it did
    part = total - a
    return total, jnp.where(jnp.isfinite(total), (a - (total - part)) + (b - part), 0)


def sum_into_parts(numbers: list) -> Parts:
    """Sum numbers, the largest first, into three parts."""
    parts = []
    # each pass adds up the errors of the pass before
    for _ in range(2):
        total, errors = numbers[0], []
        for value in numbers[1:]:
            total, error = two_sum(total, value)
            errors.append(error)
        parts.append(total)
        # one number alone leaves no errors
        numbers = errors or [jnp.zeros_like(total)]
    return parts[0], parts[1], sum(numbers[1:], numbers[0])


def parts_of_count(count: jax.Array, low: Sequence[jax.Array], dtype) -> Parts:
    """Return a count of any dtype, with its low parts, as three parts of this dtype."""
    if count.dtype == dtype:
        return count, low[0], low[1]
    if jnp.issubdtype(count.dtype, jnp.floating):
        # a wider float can have more digits than one number of this dtype
        first = count.astype(dtype)
        rest = count - first.astype(count.dtype)
        return sum_into_parts(
            [
                first,
                rest.astype(dtype),
                (rest - rest.astype(dtype).astype(count.dtype)).astype(dtype),
                *low,
            ]
        )
    # 24 bits at a time, which float32 holds exactly
    count = count.astype(jnp.int32) if count.dtype.itemsize < 4 else count
    shifts = (shift for shift in (48, 24, 0) if shift < jnp.iinfo(count.dtype).bits)
    return sum_into_parts(
        [
            *(((count >> shift) & ((1 << 24) - 1)).astype(dtype) * 2.0**shift for shift in shifts),
            *low,
        ]
    )


def sum_parts(
    parts: Parts, axes: tuple[int, ...], axis_name=None, by: Callable | None = None
) -> Parts:
    """Sum over axes, which keep size one, or with ``by``, and over devices.

    The sum is exact for at most 2**16 integers. Each part is split into digits of a few bits, whose
    sums need no rounding.
    """
    # without anything to add, the parts stay as they are
    if not axes and axis_name is None and by is None:
        return parts
    stacked = jnp.stack(parts)[None]
    # digit k of an integer is floor(n / 256**k) - 256 floor(n / 256**(k + 1))
    units = jnp.asarray(
        [2.0 ** (DIGIT * power) for power in reversed(range(DIGITS))], stacked.dtype
    )
    units = units.reshape(-1, *(1,) * (stacked.ndim - 1))
    whole = jnp.floor(stacked / units)
    digits = whole - jnp.concatenate([jnp.zeros_like(whole[:1]), whole[:-1]]) * 2.0**DIGIT
    # the last term is the fraction, which float weights have
    terms = jnp.concatenate([digits * units, stacked - jnp.floor(stacked)])
    sums = terms.sum((1, *(axis + 2 for axis in axes)), keepdims=True)[:, 0]
    sums = sums if by is None else jax.vmap(by)(sums)
    return sum_into_parts(list(across(lax.psum, sums, axis_name)))


def low_parts(parts: Parts, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the low parts of a number whose high part is ``high``."""
    return two_sum((parts[0] - high) + parts[1], parts[2])
