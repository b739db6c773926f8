"""Sums that keep their rounding error, as three parts: number = first + second + third.

The first part is the number as rounded, the others are its low parts, as in double-float
arithmetic. Counts of up to 2**56 stay exact in float32, and a mean that is followed over many
merges does not stop short.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.engine.collectives import across

DIGIT = 8  # bits: sums of 2**16 digits are exact in float32
DIGITS = 7
Words = tuple[jax.Array, jax.Array, jax.Array]


def two_sum(a, b) -> tuple[jax.Array, jax.Array]:
    """Return a + b as rounded, and its rounding error (Knuth 1997, section 4.2.2).

    The error is 0 where the sum is not finite.
    """
    total = a + b
    # part is b as it went into the total, and total - part is a as it did
    part = total - a
    return total, jnp.where(jnp.isfinite(total), (a - (total - part)) + (b - part), 0)


def distilled(numbers: list) -> Words:
    """Sum numbers, the largest first, into three parts."""
    words = []
    # each pass adds up the errors of the pass before
    for _ in range(2):
        total, errors = numbers[0], []
        for value in numbers[1:]:
            total, error = two_sum(total, value)
            errors.append(error)
        words.append(total)
        numbers = errors or [jnp.zeros_like(total)]
    return words[0], words[1], sum(numbers[1:], numbers[0])


def words_of_count(count: jax.Array, further: Sequence[jax.Array], dtype) -> Words:
    """Return a count of any dtype, with its low parts, as three parts of this dtype."""
    if count.dtype == dtype:
        return count, further[0], further[1]
    if jnp.issubdtype(count.dtype, jnp.floating):
        first = count.astype(dtype)
        rest = count - first.astype(count.dtype)
        return distilled(
            [
                first,
                rest.astype(dtype),
                (rest - rest.astype(dtype).astype(count.dtype)).astype(dtype),
                *further,
            ]
        )
    # 24 bits at a time, which float32 holds exactly
    count = count.astype(jnp.int32) if count.dtype.itemsize < 4 else count
    shifts = (shift for shift in (48, 24, 0) if shift < jnp.iinfo(count.dtype).bits)
    return distilled(
        [
            *(((count >> shift) & ((1 << 24) - 1)).astype(dtype) * 2.0**shift for shift in shifts),
            *further,
        ]
    )


def add_words(
    words: Words, axes: tuple[int, ...], axis_name=None, by: Callable | None = None
) -> Words:
    """Sum over axes, which keep size one, or with ``by``, and over devices.

    The sum is exact for at most 2**16 integers. Each part is split into digits of a few bits, whose
    sums need no rounding.
    """
    # without anything to add, the parts stay as they are
    if not axes and axis_name is None and by is None:
        return words
    stacked = jnp.stack(words)[None]
    # digit k of an integer is floor(n / 256**k) - 256 floor(n / 256**(k + 1))
    units = jnp.asarray(
        [2.0 ** (DIGIT * power) for power in reversed(range(DIGITS))], stacked.dtype
    )
    units = units.reshape(-1, *(1,) * (stacked.ndim - 1))
    whole = jnp.floor(stacked / units)
    digits = whole - jnp.concatenate([jnp.zeros_like(whole[:1]), whole[:-1]]) * 2.0**DIGIT
    parts = jnp.concatenate([digits * units, stacked - jnp.floor(stacked)])
    sums = parts.sum((1, *(axis + 2 for axis in axes)), keepdims=True)[:, 0]
    sums = sums if by is None else jax.vmap(by)(sums)
    return distilled(list(across(lax.psum, sums, axis_name)))


def beyond(words: Words, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the low parts of a number whose high part is ``first``."""
    return two_sum((words[0] - first) + words[1], words[2])
