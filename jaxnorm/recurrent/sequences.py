"""Arrange sequences for the loop over time, and find the steps that are taken.

The loop takes arrays ``(time, batch, ...)`` in the order of the steps. Callers have any
number of batch axes, time before or after them, and may run from the last step to the
first.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm.arguments import validation


@dataclass(frozen=True)
class Layout:
    """The layout of time and batch in the caller's arrays.

    Attributes:
      batch: the sizes of the batch axes.
      time: the number of steps.
      time_major: whether arrays are ``(time, ..., batch, features)``, or else
        ``(..., batch, time, features)``.
      reverse: whether the network runs from the last step to the first.
    """

    batch: tuple[int, ...]
    time: int
    time_major: bool
    reverse: bool

    def to_steps(self, values: jax.Array) -> jax.Array:
        """Arrange an array as ``(time, batch, ...)``, in the order of the steps."""
        rest = values.shape[len(self.batch) + 1 :]
        if not self.time_major:
            values = jnp.moveaxis(values, len(self.batch), 0)
        values = values.reshape(self.time, math.prod(self.batch), *rest)
        return values[::-1] if self.reverse else values

    def from_steps(self, values: jax.Array) -> jax.Array:
        """Arrange an array as the caller's arrays are, inverse to :meth:`to_steps`."""
        values = (values[::-1] if self.reverse else values).reshape(
            self.time, *self.batch, *values.shape[2:]
        )
        return values if self.time_major else jnp.moveaxis(values, 0, len(self.batch))

    def shardings(self, x: jax.Array) -> tuple[NamedSharding, NamedSharding, NamedSharding]:
        """Return the shardings of the final state, the outputs and the Moments.

        Under explicit sharding states and outputs are sharded as x is along batch and
        time. The Moments are not sharded.
        """
        sharding = jax.typeof(x).sharding
        names = sharding.spec[:-1]
        specs = (names[1:] if self.time_major else names[:-1]), names, ()
        return tuple(NamedSharding(sharding.mesh, PartitionSpec(*spec)) for spec in specs)  # type: ignore[return-value]

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the shape of an array with one element for each step."""
        return (self.time, *self.batch) if self.time_major else (*self.batch, self.time)


def make_layout(x: jax.Array, time_major: bool, reverse: bool) -> Layout:
    """Check the shape and dtype of x, and return its layout."""
    if x.ndim < 2:
        raise ValueError(
            "x must have an axis of time and one of features, (..., batch, time, features): got "
            f"shape {x.shape}."
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"x must be real: got {x.dtype}.")
    batch, time = (x.shape[1:-1], x.shape[0]) if time_major else (x.shape[:-2], x.shape[-2])
    return Layout(batch, time, bool(time_major), bool(reverse))


def step_mask(
    layout: Layout, lengths, where, names: tuple[str, str] = ("lengths", "where")
) -> jax.Array | None:
    """Return which steps are taken, of shape ``layout.steps``, or None for all.

    Args:
      layout: the layout of x.
      lengths: for each sequence the number of steps, after which none is taken; None
        for all.
      where: boolean, which of the steps are taken; None for all.
      names: what errors call ``lengths`` and ``where``.
    """
    lengths_name, where_name = names
    mask = check_by_step(layout, where_name, where, jnp.bool_)
    if lengths is None:
        return mask
    # NumPy: inside a trace jnp.asarray makes a traced value, whose range is checked
    # only under checkify
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{lengths_name} must be integers: got {lengths.dtype}.")
    if lengths.shape != layout.batch:
        raise ValueError(
            f"{lengths_name} must have the shape of the batch, {layout.batch}: got {lengths.shape}."
        )
    message = f"{lengths_name} must lie between 0 and the {layout.time} steps of x"
    lengths = validation.check_values(lengths, lambda n: (n >= 0) & (n <= layout.time), message)
    within = (
        jnp.arange(layout.time, dtype=jnp.int32).reshape(-1, *(1,) * len(layout.batch))
        < lengths.astype(jnp.int32)[None]
    )
    within = within if layout.time_major else jnp.moveaxis(within, 0, -1)
    return within if mask is None else mask & within


def check_by_step(layout: Layout, name: str, value, kind) -> jax.Array | None:
    """Check an array with one element for each step, if it is given."""
    if value is None:
        return None
    value = validation.as_array(value)
    if not jnp.issubdtype(value.dtype, kind):
        wanted, cast = ("boolean", "bool") if kind is jnp.bool_ else ("integers", "int")
        raise TypeError(
            f"{name} must be {wanted}: got {value.dtype}. Cast it first, for example with "
            f".astype({cast})."
        )
    if value.shape != layout.steps:
        raise ValueError(
            f"{name} must have the shape of x without its features, {layout.steps}: got "
            f"{value.shape}."
        )
    return value


def restarts(segment_ids: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return at which steps another segment starts; all arrays have time first.

    Such a step is taken, and has another id than the step that was taken before it.
    """
    if mask is None:
        mask = jnp.ones(segment_ids.shape, bool)
    at = jnp.arange(segment_ids.shape[0]).reshape(-1, *(1,) * (segment_ids.ndim - 1))
    # the last step taken up to each one, then before each one; -1 where there is none
    last = lax.cummax(jnp.where(mask, at, -1), axis=0)
    last = jnp.concatenate([jnp.full_like(last[:1], -1), last[:-1]])
    earlier = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), 0)
    return mask & (last >= 0) & (segment_ids != earlier)


def initial_state(
    names: tuple[str, ...], layout: Layout, features: tuple[int, ...], initial, dtype
) -> tuple[jax.Array, ...]:
    """Return the state before the first step, ``(batch, features)`` for each part.

    It is zeros if ``initial`` is None. ``names`` and ``features`` have an element for
    each part.
    """
    size = math.prod(layout.batch)
    if initial is None:
        return tuple(jnp.zeros((size, width), dtype) for width in features)
    parts = initial if len(names) > 1 else (initial,)
    if not isinstance(parts, tuple | list) or len(parts) != len(names):
        raise TypeError(
            f"initial must be the pair ({', '.join(names)}): got {type(initial).__name__}."
        )
    result = []
    for name, part, width in zip(names, parts, features, strict=True):
        part = validation.floating(part, f"initial {name}")
        if part.shape != (*layout.batch, width):
            raise ValueError(
                f"initial {name} must have shape {(*layout.batch, width)}: got {part.shape}."
            )
        result.append(part.astype(dtype).reshape(size, width))
    return tuple(result)


def zoneout_rates(names: tuple[str, ...], zoneout) -> tuple[float, ...]:
    """Check zoneout, and return a rate for each part of the state."""
    rates = tuple(zoneout) if isinstance(zoneout, tuple | list) else (zoneout,) * len(names)
    if len(rates) != len(names):
        raise ValueError(
            f"zoneout must be one rate, or one for each of {', '.join(names)}: got {zoneout!r}."
        )
    return tuple(validation.number("zoneout", rate, 1) for rate in rates)


def kept_units(rates: tuple[float, ...], key, layout: Layout, state) -> tuple[jax.Array, ...]:
    """Draw the units of each part of the state that keep their value at each step.

    Without a key return the rates instead, which broadcast against the states: each
    unit then takes the expected value.
    """
    if key is None:
        return tuple(
            jnp.full((layout.time, 1, 1), rate, part.dtype)
            for rate, part in zip(rates, state, strict=True)
        )
    keys = jax.random.split(key, len(rates))
    return tuple(
        jax.random.bernoulli(k, rate, (layout.time, *part.shape))
        for k, rate, part in zip(keys, rates, state, strict=True)
    )
