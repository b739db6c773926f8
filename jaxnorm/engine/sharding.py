"""Explicit sharding, in which the type of an array says how it is sharded."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnorm.arguments.axes import Reduction
from jaxnorm.engine.spec import Operands, Spec


def sharded_as(old: jax.Array, new: jax.Array) -> jax.Array:
    """Shard ``new`` as ``old`` is sharded, in explicit sharding.

    This way a state keeps its sharding, whatever the batch is sharded over.
    """
    sharding, other = jax.typeof(old).sharding, jax.typeof(new).sharding
    if _explicit(sharding):
        return jax.sharding.reshard(new, sharding)
    # old is on no mesh: each device gets the whole of new
    return (
        jax.sharding.reshard(new, NamedSharding(other.mesh, PartitionSpec()))
        if _explicit(other)
        else new
    )


def sharded_by_compiler(run: Callable, shardings: Any) -> Callable:
    """Return a function of arrays within which XLA decides the sharding.

    It is for operations where types cannot say it. Its results are sharded as ``shardings`` say,
    which is one sharding or a pytree of them.
    """
    axes = _explicit(jax.tree.leaves(shardings)[0])
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=shardings) if axes else run


def alongside(reduction: Reduction, x: jax.Array, *arrays: jax.Array | None) -> list:
    """Split arrays that broadcast against x as x is split.

    In explicit sharding they are also sharded as x is.
    """
    split = [None if a is None else a.reshape(reduction.fit(a.shape)) for a in arrays]
    if not _explicit(jax.typeof(x).sharding):
        return split
    _check_split(reduction, x)
    return [
        None if a is None else jax.sharding.reshard(a, split_sharding(reduction, x, a.shape))
        for a in split
    ]


def split_operands(spec: Spec, operands: Operands) -> Operands:
    """Split mask, scale and bias as x is split."""
    x, where, scale, bias, *_ = operands
    where, scale, bias = alongside(spec.reduction, x, where, scale, bias)
    return operands._replace(where=where, scale=scale, bias=bias)


def by_compiler(function: Callable[..., Any], operands: Operands) -> Callable[..., Any]:
    """Let XLA shard a function of operands with ids, whose types do not tell how.

    Its output is sharded as x is.
    """
    if operands.ids is None:
        return function
    return sharded_by_compiler(function, jax.typeof(operands.x).sharding)


def split_sharding(reduction: Reduction, x: jax.Array, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of an array that broadcasts against x in its split shape."""
    # JAX says how a reshape shards the parts of a split axis
    names = names_of(jax.eval_shape(lambda x: x.reshape(reduction.split_shape), x))
    return _along(x, names, [size != 1 for size in shape])


def _check_split(reduction: Reduction, x: jax.Array) -> None:
    """Raise a ValueError where no type says how a split axis is sharded.

    There each device would hold a part of a group, or more groups than another.
    """
    mesh = jax.typeof(x).sharding.mesh
    for axis, (names, sizes) in enumerate(zip(names_of(x), reduction.parts, strict=True)):
        devices = math.prod(
            mesh.shape[name]
            for name in (names if isinstance(names, tuple) else (names,))
            if name is not None
        )
        # devices hold whole blocks of a split axis if they divide the number of blocks
        if len(sizes) > 1 and sizes[0] != 1 and sizes[0] % devices:
            raise ValueError(
                "an axis that is explicitly sharded must be split into a multiple of its devices: "
                f"axis {axis} of x, over {devices} "
                f"devices, is split into {sizes}. Reshard x first, or let the compiler shard it, "
                "by mesh axes that are Auto."
            )


def stats_sharding(reduction: Reduction, x: jax.Array) -> NamedSharding:
    """Return the sharding of the statistics of segments.

    They are sharded as x is, along its axes that are neither reduced nor split.
    """
    return _along(
        x,
        names_of(x),
        [size == full for size, full in zip(reduction.stats_shape, reduction.shape, strict=True)],
    )


def unsharded(x: jax.Array) -> NamedSharding:
    """Return the sharding of an array that each device of the mesh of x has whole."""
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())


def names_of(x: jax.Array) -> tuple:
    """Return the mesh axis that each axis of x is sharded over.

    It is a tuple where there are several, and None where there is none.
    """
    return names_of_type(jax.typeof(x))


def names_of_type(kind: Any) -> tuple:
    """Return the :func:`names_of` an array of this type."""
    return tuple(kind.sharding.spec)


def _along(x: jax.Array, names: Iterable, wanted: Iterable[bool]) -> NamedSharding:
    """Return a sharding on the mesh of x, over the wanted names."""
    spec = PartitionSpec(
        *(name if is_wanted else None for name, is_wanted in zip(names, wanted, strict=True))
    )
    return NamedSharding(jax.typeof(x).sharding.mesh, spec)


def is_explicit(x: jax.Array) -> bool:
    """Return whether the type of an array says how it is sharded."""
    return bool(_explicit(jax.typeof(x).sharding))


def _explicit(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes whose sharding types describe."""
    mesh = sharding.mesh
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )
