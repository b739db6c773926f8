"""Norms by the CPU kernels of forward.cc and backward.cc."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.engine import reference
from jaxnorm.engine.groups import mask_fill
from jaxnorm.engine.reference import Stats
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels.norm import Found, NormKernels, layout_of
from jaxnorm.kernels.placement import like
from jaxnorm.kernels.plain import ABSENT
from jaxnorm.kernels.static import Static

DTYPES = ("float32", "bfloat16")
EPSILON_IN = ("var", "std", "max")  # in the order of enum EpsilonIn of group_stats.h
# a share of the bytes of a group: backward recomputes statistics that take more
RESIDUALS = 1 / 20
WIDEST = 16384  # channels, where groups have several positions
CHANNEL = 2048  # bytes: XLA's statistics of each channel are less than 1 % of one that is longer


def obstacle(x: jax.Array, spec: Spec, operands: Operands) -> str | None:
    """Return why the kernels cannot take these arguments, in words; None if they can."""
    layout = layout_of(x, spec, operands, DTYPES)
    if isinstance(layout, str):
        return layout
    if layout.p > 1 and layout.g * layout.d > WIDEST:
        return f"reduces no such axes: {spec.axes} of {spec.reduction.split_shape}"
    return None


def _recompute(static: Static, x: jax.Array) -> bool:
    """Return whether backward recomputes the statistics.

    It does not where moments are asked for and have a scale exponent, since a recomputed exponent
    might differ.
    """
    informative = static.informative(x)
    group_bytes = static.layout.p * static.layout.d * x.dtype.itemsize
    # shift, low part and variance are float32, and the exponent is int8
    large = sum(np.compress(informative, (4, 4, 4, 1))) > RESIDUALS * group_bytes
    return large and not (static.moments and informative[3])


def _shape_and_stats(static: Static) -> dict[str, dict]:
    """Return the attributes of every kernel: structs Shape and StatsOptions."""
    lowest_exponent = np.int64(
        -(2**63) if static.lowest_exponent is None else static.lowest_exponent
    )
    return {
        "shape": {name: np.int64(getattr(static.layout, name)) for name in ("p", "g", "d")},
        "stats": {"centered": static.spec.centered, "lowest_exponent": lowest_exponent},
    }


def _attributes(static: Static) -> dict[str, dict]:
    """Return the attributes of a kernel that applies statistics, with struct Rule."""
    values = {name: np.float64(getattr(static.spec, name)) for name in ("epsilon", "correction")}
    rule = {**values, "epsilon_in": np.int64(EPSILON_IN.index(static.spec.epsilon_in))}
    return {**_shape_and_stats(static), "rule": rule}


def _forward(static: Static, arguments) -> Found:
    """Return the output and the statistics.

    With many positions a kernel computes the statistics alone, and XLA fuses the rest with the
    operations that follow.
    """
    (x, scale, bias, where), arrays = arguments, [a for a in arguments if a is not None]
    per_group = static.stats_shape(x)
    many = static.layout.p * x.dtype.itemsize > CHANNEL
    # statistics that nobody reads are not written: their result has one element
    wanted = many or static.moments or not _recompute(static, x)
    sizes = [
        math.prod(per_group) if informative and wanted else 1
        for informative in static.informative(x)
    ]
    results = [like((size,), jnp.float32, *arrays) for size in sizes]
    expanded = lambda a: jnp.broadcast_to(
        a.reshape(per_group if a.size > 1 else (1,) * x.ndim), per_group
    )
    if many:
        call = jax.ffi.ffi_call("JaxnormStatistics", results, vmap_method="broadcast_all")
        found = call(flat(x), mask_or_none(where), **_shape_and_stats(static))
        stats = list(map(expanded, found))
        return Found(_applied(static, arguments, stats), *stats)
    output = like((x.size,), static.spec.dtype, *arrays)
    call = jax.ffi.ffi_call("JaxnormForward", [output, *results], vmap_method="broadcast_all")
    y, *found = call(*map(flat, (x, scale, bias)), mask_or_none(where), **_attributes(static))
    return Found(y, *map(expanded, found))


def _applied(static: Static, arguments, found) -> jax.Array:
    """Return the output, by a loop over all channels of a position, with their statistics."""
    per_channel = [jnp.broadcast_to(a, (*a.shape[:-1], static.layout.d)) for a in found]
    x, scale, bias, shift, low_mean, var, exponent = (
        a.reshape(*a.shape[:-2], -1) for a in (*arguments[:3], *per_channel)
    )
    where = arguments[3]
    where = None if where is None else where.reshape(*where.shape[:-2], 1)
    loops = static.loops_over(x.shape, x.ndim - 2)
    stats = Stats(static.scaling(loops.spec, shift, exponent, where), low_mean, var)
    return mask_fill(reference.apply(loops, mask_fill(x, where), stats, scale, bias), where)


def _backward(static: Static, residuals, cotangents):
    """Return the gradients with respect to x, scale and bias."""
    (x, shift, low_mean, var, exponent, scale, where), (dy, *dstats) = residuals, cotangents
    # The kernel computes the closed form that engine.reference.backward derives.
    dlow_mean, dvar = (ABSENT if a is None else a for a in dstats)
    arguments = list(map(flat, (x, dy, scale, shift, low_mean, var, dlow_mean, dvar, exponent)))
    results_like = [like(arguments[i].shape, arguments[i].dtype, *arguments) for i in (0, 2, 2)]
    call = jax.ffi.ffi_call("JaxnormBackward", results_like, vmap_method="broadcast_all")
    results = call(
        *arguments,
        mask_or_none(where),
        **_attributes(static),
        recompute=_recompute(static, x),
    )
    return tuple(a.reshape(of.shape) for a, of in zip(results, (x, scale, scale), strict=True))


KERNELS = NormKernels(
    "jaxnorm_native",
    forward={"cpu": _forward},
    backward={"cpu": _backward},
    recompute=_recompute,
)
forward, derivative = KERNELS.forward, KERNELS.derivative


def flat(a: jax.Array) -> jax.Array:
    """Return ``(..., N, P, G, D)`` as the kernels take it: in one axis.

    One axis needs no copy, whatever layout XLA gives to axes of size one. But the channels, G and
    D, are an axis of their own where other axes have elements. XLA computes the operations that it
    fuses with x in this shape. In one axis it would find the channel of each element, of a bias for
    example, by a division.
    """
    channels = math.prod(a.shape[-2:])
    return a.reshape(-1) if channels in (1, a.size) else a.reshape(-1, channels)


def mask_or_none(where: jax.Array | None) -> jax.Array | np.ndarray:
    """Return the mask as the kernels take it: without elements where none is given."""
    return np.zeros(0, np.bool_) if where is None else where.reshape(-1)
