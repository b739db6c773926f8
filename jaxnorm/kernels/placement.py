"""The platform of a program, and the part of an array that a device has, where they are traced.

A kernel sees the part of one device. In shard_map this is the whole array. In explicit sharding the
type of an array describes the part, and groups that are unsharded are normalized on their device.
Where XLA shards an array by itself the part is unknown: a kernel would have the array gathered.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxnorm.arguments.axes import Reduction
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.sharding import names_of, names_of_type

WHOLE = "takes nothing that is explicitly sharded, but its part in shard_map"


def platform() -> str:
    """Return the platform of JAX that programs are made for."""
    return jax.default_backend()


def capability() -> tuple[int, ...] | None:
    """Return the compute capability of the GPU, as NVIDIA numbers it, where there is a device.

    It is empty for a GPU of another maker.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu":  # the program is made for a device elsewhere
        return None
    parts = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, parts)) if all(map(str.isdecimal, parts)) else ()


def known(x: jax.Array) -> bool:
    """Return whether it is known which part of an array a device has."""
    if jax.device_count() == 1:
        return True
    mesh: Any = jax.typeof(x).sharding.mesh
    return not (mesh.empty or AxisType.Auto in mesh.axis_types)


def sharded(x: jax.Array) -> bool:
    """Return whether the array is explicitly sharded."""
    return any(names_of(x))


def on_devices(x: jax.Array) -> bool:
    """Return whether the array lies on several devices, in explicit sharding.

    It may be whole on each.
    """
    mesh: Any = jax.typeof(x).sharding.mesh
    return AxisType.Explicit in mesh.axis_types and mesh.size > 1


def obstacle(kind: Any) -> str | None:
    """Return why a device cannot normalize its part of an array of this type; None if it can."""
    manual = AxisType.Manual in kind.sharding.mesh.axis_types
    return WHOLE if manual and any(names_of_type(kind)) else None


def on_device(reduction: Reduction, kind: Any) -> Reduction | None:
    """Return a device's part of the groups of an array of this type; None if a group is sharded.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm.arguments.axes import resolve
    >>> on_device(resolve("n [c]", (4, 3)), jax.typeof(jnp.ones((4, 3)))).shape
    (4, 3)
    """
    mesh, parts, position = kind.sharding.mesh, [], 0
    for sizes, names in zip(reduction.parts, names_of_type(kind), strict=True):
        devices = math.prod(mesh.shape[name] for name in _names(names))
        if devices > 1 and (position in reduction.axes or sizes[0] % devices):
            return None
        parts.append((sizes[0] // devices, *sizes[1:]))
        position += len(sizes)
    return replace(reduction, shape=tuple(map(math.prod, parts)), parts=tuple(parts))


def fitted(reduction: Reduction, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the part on a device of a shape that broadcasts against the split shape of x."""
    return tuple(
        1 if size == 1 else own for size, own in zip(shape, reduction.split_shape, strict=True)
    )


def _names(entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def on_each_device(function: Callable, loops: PlainLoops, arrays, params, second) -> tuple:
    """Return the two results of ``function(loops, arrays, params)``.

    Where arrays like x lie on several devices, in explicit sharding, it runs on the part that each
    has. The first result is then sharded as x is, and the second as ``second()`` says.
    """
    x, spec = arrays[0], loops.spec
    if not on_devices(x):
        return function(loops, arrays, params)
    reduction = on_device(spec.reduction, jax.typeof(x))
    assert reduction is not None
    of_arrays, of_params = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, (arrays, params))
    own = loops.of(replace(spec, reduction=reduction))
    return jax.shard_map(
        partial(function, own),
        mesh=jax.typeof(x).sharding.mesh,
        in_specs=(of_arrays, of_params),
        out_specs=(of_arrays[0], second().spec),
    )(arrays, params)


def on_examples(function: Callable, loops: PlainLoops, arrays, params) -> tuple:
    """Return ``function(loops, arrays, params)``, for each element of the first axis by itself."""
    own = loops.of(replace(loops.spec, reduction=loops.spec.reduction.without_first))
    axes = tuple(None if a is None or a.shape[0] == 1 else 0 for a in params)
    one = tuple(a[0] if a is not None and a.shape[0] == 1 else a for a in params)
    return jax.vmap(partial(function, own), (0, axes))(arrays, one)


def like(shape: tuple[int, ...], dtype, *arrays) -> jax.ShapeDtypeStruct:
    """Return the type of a result, which varies over mesh axes as the arrays do.

    It varies where any of them varies, as JAX has it for their sum.
    """
    if all(jax.typeof(a).sharding.mesh.empty for a in arrays):
        return jax.ShapeDtypeStruct(shape, dtype)
    mixed = lambda *a: sum(v.sum().astype(jnp.float32) for v in a)
    return jax.eval_shape(lambda *a: jnp.broadcast_to(mixed(*a), shape).astype(dtype), *arrays)
