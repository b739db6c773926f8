"""Inside of shard_map: the mesh axes that arrays vary over, by the name that each JAX has for them."""

import jax


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
