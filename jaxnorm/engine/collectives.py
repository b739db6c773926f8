"""The names of mesh and vmap axes: in groups, and those that arrays vary over inside of shard_map."""

from typing import NamedTuple

import jax


class AxisGroups(NamedTuple):
    """An ``axis_name`` whose devices share statistics in groups, as ``axis_index_groups`` of :func:`jax.lax.psum`."""

    axis_name: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


def varying_axes(a: jax.Array) -> frozenset:
    """Empty outside of shard_map."""
    kind = jax.typeof(a)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", frozenset())


def vary(a: jax.Array, axes: frozenset) -> jax.Array:
    """The array, varying over these axes; its cotangents are summed over them."""
    missing = tuple(sorted(axes - varying_axes(a), key=str))
    if not missing:
        return a
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(a, missing, to="varying")
    return jax.lax.pvary(a, missing)  # type: ignore[attr-defined]  # of older JAX
