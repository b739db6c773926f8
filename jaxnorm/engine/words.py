"""Sums whose rounding error is kept, as further words of the same number: number = first + second +
third.

Counts of up to 2**56 stay exact in float32, and a mean that is followed over many merges does not
stop short.
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
    """a + b as it is rounded, and its rounding error, 0 where it is not finite (Knuth 1997, section
    4.2.2).
    """
    total = a + b
    part = total - a
    return total, jnp.where(jnp.isfinite(total), (a - (total - part)) + (b - part), 0)


def distilled(numbers: list) -> Words:
    """The sum of numbers, the largest first, as three words."""
    words = []
    for _ in range(2):
        total, errors = numbers[0], []
        for value in numbers[1:]:
            total, error = two_sum(total, value)
            errors.append(error)
        words.append(total)
        numbers = errors or [jnp.zeros_like(total)]
    return words[0], words[1], sum(numbers[1:], numbers[0])


def words_of_count(count: jax.Array, further: Sequence[jax.Array], dtype) -> Words:
    """A count of any dtype, and further words of it, as words of this dtype."""
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
    """The sum over axes, which keep size one, or that of ``by``, and over devices. It is exact for
    at most 2**16 integers.

    Each word is split into digits of a few bits, whose sums need no rounding.
    """
    # nothing is added, and the words are as they were
    if not axes and axis_name is None and by is None:
        return words
    stacked = jnp.stack(words)[None]
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
    """The words that a number has beyond its first."""
    return two_sum((words[0] - first) + words[1], words[2])
