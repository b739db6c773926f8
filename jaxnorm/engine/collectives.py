"""The names of mesh and vmap axes: those that are bound, and those that arrays vary over inside of shard_map."""

from typing import NamedTuple

import jax


class AxisGroups(NamedTuple):
    """An ``axis_name`` whose devices share statistics in groups, as ``axis_index_groups`` of :func:`jax.lax.psum`."""

    axis_name: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


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
