"""Several devices that share statistics: which, how many, and sums over them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class AxisGroups(NamedTuple):
    """An ``axis_name`` whose devices share statistics in groups, as ``axis_index_groups`` of :func:`jax.lax.psum`."""

    axis_name: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


def across(collective, value, axis_name):
    """``collective`` of ``value`` over the axis, or in its groups."""
    if axis_name is None:
        return value
    if not isinstance(axis_name, AxisGroups):
        return collective(value, axis_name)
    try:
        return collective(value, axis_name.axis_name, axis_index_groups=[list(group) for group in axis_name.groups])
    except NotImplementedError as error:  # of JAX, without a word
        raise NotImplementedError(
            f"groups of devices must not be used in shard_map with check_vma=True: got {axis_name}. Pass check_vma=False."
        ) from error


def devices(axis_name) -> int | jax.Array:
    """How many devices share statistics with this one: a traced number where groups differ in size."""
    if not isinstance(axis_name, AxisGroups):
        return across(lax.psum, 1, axis_name)
    sizes = {device: len(group) for group in axis_name.groups for device in group}
    if len(set(sizes.values())) == 1:
        return len(axis_name.groups[0])
    return jnp.asarray([sizes[device] for device in sorted(sizes)])[lax.axis_index(axis_name.axis_name)]


def bound(axis_name, groups=None, *, initializing: bool = False):
    """``axis_name`` where it is bound, in groups if those are given; None where no axis is, as under sharded ``jit``.

    Raises:
      ValueError: other axes are bound and one of these names is not, unless a module is initializing its parameters.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,) if axis_name is not None else ()
    if not names:
        return None
    try:  # here, since it takes long to import, for what most never need
        from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as bound_names
    except ImportError:  # JAX 0.8
        from jax.core import unsafe_get_axis_names_DO_NOT_USE as bound_names
    found = [name for name in bound_names() if not str(name).startswith(("_internal", "<axis"))]  # those of a pmap without a name
    missing = [name for name in names if name not in found]
    if missing and found and not initializing:
        raise ValueError(
            f"axis_name must be among the axes that are bound here, {', '.join(map(repr, found))}: got {axis_name!r}. "
            "Name one of those, or None to leave other devices aside."
        )
    names = tuple(name for name in names if name in found)
    if not names:
        return None
    return names if groups is None else AxisGroups(names, tuple(tuple(group) for group in groups))
