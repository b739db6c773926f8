"""Collectives over device and vmap axes, over whole axes or within groups of devices."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.options import AxisGroups, AxisName


def hashable(axis_name: AxisName) -> AxisName:
    """Return the axis name with tuples for lists, so that programs can be compiled for it.

    Raises:
      TypeError: one of the names is an integer.
    """
    if isinstance(axis_name, AxisGroups):
        return axis_name._replace(groups=tuple(map(tuple, axis_name.groups)))
    if any(
        isinstance(name, int)
        for name in (axis_name if isinstance(axis_name, tuple | list) else [axis_name])
    ):
        raise TypeError(
            f"axis_name must be the name of a device or vmap axis, or several: got {axis_name!r}. "
            "Axes of x go into axes."
        )
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def across(collective, value, axis_name):
    """Apply the collective to the value over the axis, or within its groups of devices."""
    if axis_name is None:
        return value
    try:
        if not isinstance(axis_name, AxisGroups):
            return collective(value, axis_name)
        return collective(
            value,
            axis_name.axis_name,
            axis_index_groups=[list(group) for group in axis_name.groups],
        )
    except (NameError, AssertionError):  # shard_map over other axes asserts
        raise NameError(
            "axis_name must be bound by jax.shard_map, jax.pmap or jax.vmap(axis_name=...) around "
            f"the call: got the unbound {axis_name!r}."
        ) from None
    except NotImplementedError as error:  # JAX raises it without a message
        raise NotImplementedError(
            "groups of devices must not be used in shard_map with check_vma=True: got "
            f"{axis_name}. Pass check_vma=False."
        ) from error


def rows_of_devices(row: jax.Array, axis_name) -> jax.Array:
    """Return the vectors of all devices as the rows of a matrix; those of other groups are 0.

    Each device fills its own row of a matrix of zeros, and the matrices are summed. The sum has the
    same type on each device, as ``out_specs=P()`` of shard_map requires, which the result of
    ``all_gather`` has not.
    """
    name = axis_name.axis_name if isinstance(axis_name, AxisGroups) else axis_name
    mine = jnp.arange(across(lax.psum, 1, name), dtype=jnp.int32) == lax.axis_index(name)
    return across(lax.psum, jnp.where(mine[:, None], row, 0), axis_name)


def number_of_devices(axis_name) -> int | jax.Array:
    """Return how many devices share statistics with this one.

    The number is traced where the groups differ in size.
    """
    if not isinstance(axis_name, AxisGroups):
        return across(lax.psum, 1, axis_name)
    # groups of one size need no lookup by device
    sizes = {device: len(group) for group in axis_name.groups for device in group}
    if len(set(sizes.values())) == 1:
        return len(axis_name.groups[0])
    return jnp.asarray([sizes[device] for device in sorted(sizes)])[
        lax.axis_index(axis_name.axis_name)
    ]


def varying_axes(a: jax.Array) -> frozenset:
    """Return the mesh axes over which the array varies: none outside of shard_map."""
    kind = jax.typeof(a)
    return (
        kind.manual_axis_type.varying
        if hasattr(kind, "manual_axis_type")
        else getattr(kind, "vma", frozenset())
    )


def vary(a: jax.Array, axes: frozenset) -> jax.Array:
    """Mark the array as varying over these mesh axes.

    Its cotangents are then summed over them.
    """
    missing = tuple(sorted(axes - varying_axes(a), key=str))
    if not missing:
        return a
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(a, missing, to="varying")
    return jax.lax.pvary(a, missing)  # type: ignore[attr-defined]  # older JAX
