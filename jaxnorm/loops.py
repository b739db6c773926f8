"""How XLA's CPU back-end comes to make one loop of a pass over an array; elsewhere the same numbers come of it."""

import math
from collections.abc import Callable
from functools import cache, wraps
from itertools import takewhile

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.axes import number
from jaxnorm.dtypes import real

SMALL = 1 << 15  # elements: of fewer it makes loops as simple as they come
MANY = 4096  # of fewer sets it ends its loop with every number that it makes for a set
LONG_ROW = 1 << 14  # numbers: rows of more it adds up 3 to 30 times as slowly as it multiplies matrices
MOST_ROWS = 1024  # the work of the product grows with the square of their number
MOST_AT_ONCE = 1 << 16  # numbers of a set that a TPU adds up in one go
PART = 64  # rows that one number adds up in turn


def apart(*arrays: jax.Array | None) -> tuple:
    """The same arrays, which XLA's CPU back-end takes for others, and for different ones in other company.

    It makes one loop of all that is done with an array and the means of its rows, if no other loop needs any of it: what
    they have in common, be it no more than a cast, it keeps, as large as the array. Of these it shares nothing. Of small
    arrays, which the cache holds, it may.
    """
    given = [a for a in arrays if a is not None]
    if all(number(a.size) < SMALL for a in given):
        return arrays
    own = iter(_only_on("cpu", _apart)(*given))
    return tuple(None if a is None else next(own) for a in arrays)


@cache
def _only_on(platform: str, function: Callable) -> Callable:
    from jaxnorm.primitives import only_on  # loads parts of JAX that values of small arrays do without

    return only_on(platform, f"jaxnorm_{function.__name__.strip('_')}_{platform}", function)


def _apart(*arrays: jax.Array) -> list[jax.Array]:
    return lax.optimization_barrier(arrays)


def _product(values: jax.Array) -> list[jax.Array]:
    return [values * lax.optimization_barrier(jnp.ones((), values.dtype))]


def as_product(values: jax.Array) -> jax.Array:
    """The same. A TPU adds products up in the time that it takes to read them, and what it is given as it is in 1.2 times that.

    Of halves, which it can compare as they are, it would find the largest in a pass of its own.
    """
    return _only_on("tpu", _product)(values)[0]


def _second(first: jax.Array, second: jax.Array) -> list[jax.Array]:
    return [second, second]


def second_on_cpu(first: jax.Array, second: jax.Array) -> jax.Array:
    """Of two arrays, for neither of which it matters which it is."""
    return _only_on("cpu", _second)(first, second)[0]


def flat(function: Callable) -> Callable:
    """``function`` of scalars and arrays with a number for every set, computed without the last axes where those have size one.

    XLA's CPU back-end takes a loop for every last axis, be it of one number: of many sets, that tells.
    """

    @wraps(function)
    def call(*values):
        shapes = [jnp.shape(a) for a in values if jnp.ndim(a) > 0]
        ones = min((len(list(takewhile(lambda size: size == 1, reversed(shape)))) for shape in shapes), default=0)
        if not ones or len(set(map(len, shapes))) > 1 or max(number(*shape) for shape in shapes) < MANY:
            return function(*values)
        results = function(*(a.reshape(a.shape[:-ones]) if jnp.ndim(a) > 0 else a for a in values))
        return jax.tree.map(lambda a: a.reshape(*a.shape, *(1,) * ones), results)

    return call


def add_up(values: jax.Array, axis: int) -> jax.Array:
    """Their sum along an axis, of which one number is left. Of some long rows it is a product with ones, part by part.

    For arrays that a device has all of: what is sharded would be gathered. One infinite number among more than PART rows
    makes it NaN, for the product takes the rows of the other parts times 0.
    """
    count, length = values.shape[axis], math.prod(values.shape[axis + 1 :])
    if count * length != values.size or length <= LONG_ROW or count > MOST_ROWS:
        return jnp.sum(values, axis, keepdims=True)
    parts = np.arange(count) // PART == np.arange(-(-count // PART))[:, None]
    sums = jnp.asarray(parts, values.dtype) @ values.reshape(count, length)
    return (jnp.ones((1, len(sums)), values.dtype) @ sums).reshape(*values.shape[:axis], 1, *values.shape[axis + 1 :])


def add_in_turn(values: jax.Array, axes: list[int], whole: bool) -> jax.Array:
    """Their sum along axes, one after the other.

    XLA's CPU back-end may add several small axes up in one run, each number to all before it: 1e-5 off for 8000 equal ones.
    In turn they are off by 5e-7. Other back-ends make one pass over x of several sums, if nothing keeps those apart: there it
    is one, but for the last axis of very many on a TPU; a GPU's divides them by itself.
    """
    kept_apart = _apart if number(values.size) < SMALL else _only_on("cpu", _apart)
    many = number(*(values.shape[axis] for axis in axes)) > MOST_AT_ONCE
    for place, axis in enumerate(axes, 1):
        values = add_up(values, axis) if whole else jnp.sum(values, axis, keepdims=True)
        if len(axes) > 1:  # or the sums are merged again
            (values,) = kept_apart(values)
        if many and place == len(axes) - 1:
            (values,) = _only_on("tpu", _apart)(values)
    return values


def divide(total: jax.Array, count, shade: jax.Array | None = None) -> jax.Array:
    """The same number wherever it is used, and exactly the constant for sums of a constant.

    A compiler replaces division by a constant with multiplication by its rounded inverse, and fuses that, unrounded, into
    what is done with it. So the count is hidden from it behind a zero, made of the shade, that it cannot know to be one.
    Without a shade it is made of the total: XLA's CPU back-end then ends its loop there if that is its last sum.
    """
    shade = lax.stop_gradient(total if shade is None else shade)
    return flat(_divide)(total, divisor(count, total), shade)


def _divide(total, divisor, shade):
    return total / (divisor + jnp.minimum(jnp.abs(shade), 0).astype(total.dtype))


def hold(values: jax.Array) -> jax.Array:
    """The same, as the result of a division: XLA's CPU back-end lets a loop over x read those, and compute others each time."""
    return divide(values, 1.0)


def divisor(count, total: jax.Array) -> jax.Array:
    """The count, 1 for an empty set, of the dtype of the total."""
    if isinstance(count, float):
        return jnp.asarray(count if count > 0 else 1, total.dtype)
    count = jnp.asarray(count, real(total.dtype))
    return jnp.where(count > 0, count, 1).astype(total.dtype)


def near(total: jax.Array, count, lowest: float) -> jax.Array:
    """Near the mean, which is no less than ``lowest``: by a product, but rounded by itself (see divide), for that bound comes between.

    Of nothing but such steps a GPU's compiler makes one kernel with what is done with a row.
    """
    return jnp.maximum(total * (1 / divisor(count, total)), lowest)
