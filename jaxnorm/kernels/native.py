"""Standardizing by the CPU kernels of forward.cc and backward.cc, and the transpose of its tangent."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.axes import unsplit
from jaxnorm.engine import reference
from jaxnorm.engine.groups import Frame, count_elements, hide
from jaxnorm.engine.reference import Inputs, Residuals, Stats
from jaxnorm.engine.sharding import split_sharding
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import placement
from jaxnorm.kernels.layout import Layout, find
from jaxnorm.kernels.placement import fitted, on_device, sharded
from jaxnorm.kernels.primitives import differentiable, linear

DTYPES = ("float32", "bfloat16")
# of the bytes of a group: where its statistics are more than that, backward recomputes them
RESIDUALS = 1 / 20
WIDEST = 16384  # channels, where groups have several positions
# instead of a value for each group: residuals that are recomputed, cotangents that are 0
ABSENT = np.zeros((1, 1, 1, 1), np.float32)
# bytes: of more, the statistics that XLA has for every channel are less than a hundredth
CHANNEL = 2048


def obstacle(x: jax.Array, spec: Spec, operands: Operands) -> str | None:
    """Why the kernels cannot take these arguments, in words; None if they can."""
    _, where, scale, bias, *_ = operands
    if spec.axis_name is not None:
        return "takes no axis_name"
    if where is not None and where.dtype != jnp.bool_:
        return f"takes no weights, but a boolean mask: got {where.dtype}"
    if operands.epsilon is not None:
        return "takes no traced epsilon"
    dtypes = dict.fromkeys((str(x.dtype), str(spec.dtype)))
    if not dtypes.keys() <= set(DTYPES):
        return f"takes and gives {' and '.join(DTYPES)}: got {', '.join(dtypes)}"
    if any(a is not None and jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (scale, bias)):
        return "takes no complex scale or bias"
    if found := placement.obstacle(x):
        return found
    reduction = on_device(spec.reduction, x)
    if reduction is None:
        return f"reduces no axes that devices share: {spec.axes} of {spec.reduction.split_shape}, sharded {jax.typeof(x).sharding.spec}"
    shapes = [spec.reduction.fit(a.shape) for a in (scale, bias) if a is not None]
    layout = find(reduction, *(fitted(reduction, shape) for shape in shapes))
    if layout is None or (layout.p > 1 and layout.g * layout.d > WIDEST):
        return f"reduces no such axes: {spec.axes} of {spec.reduction.split_shape}"
    if (
        where is not None
        and layout.mask(reduction.split_shape, fitted(reduction, spec.reduction.fit(where.shape)))
        is None
    ):
        return f"takes no mask that differs from channel to channel: got shape {where.shape} for x of shape {x.shape}"
    return None


@dataclass(frozen=True)
class Facts:
    """What kernels are passed beside arrays."""

    layout: Layout
    rank: int  # of x, without axes that it is mapped over
    spec: Spec  # its reduction is not used: layout says where the groups lie
    lowest_power: int | None
    moments: bool  # whether the statistics are asked for

    def arranged(self, x: jax.Array) -> jax.Array:
        """x as ``(..., N, P, G, D)``. Outside of the primitives it keeps its shape: no copy, where
        NaN behind a mask would be seen.
        """
        return x.reshape(*x.shape[: x.ndim - self.rank], *self.layout[:4])

    def spec_of(self, shape: tuple[int, ...]) -> Spec:
        """The spec of an array ``(..., N, P, G, D)``."""
        return replace(self.spec, reduction=unsplit(shape, (len(shape) - 3, len(shape) - 1)))

    def frame(
        self, spec: Spec, pivot: jax.Array, power: jax.Array, where: jax.Array | None
    ) -> Frame:
        """The frame, for :meth:`spec_of` or for channels joined to one axis, whose groups are
        reduced over the positions alone.
        """
        count: Any = float(self.layout.p * self.layout.d)
        if where is not None:
            count = (
                where.sum(spec.axes[0], keepdims=True, dtype=jnp.int32).astype(jnp.float32)
                * self.layout.d
            )
        return Frame(
            count,
            None if self.lowest_power is None else power,
            pivot if self.spec.centered else None,
            where,
        )

    def informative(self, x: jax.Array) -> tuple[bool, bool, bool, bool]:
        """Whether pivot, offset, variance and power hold information. In bfloat16 the offset is
        smaller than the precision of x.
        """
        centered = self.spec.centered
        return centered, centered and x.dtype != jnp.bfloat16, True, self.lowest_power is not None

    def recompute(self, x: jax.Array) -> bool:
        """Whether backward recomputes the statistics. Not where moments are asked for in units of a
        power: it might be another.
        """
        informative, group_bytes = (
            self.informative(x),
            self.layout.p * self.layout.d * x.dtype.itemsize,
        )
        return sum(np.compress(informative, (4, 4, 4, 1))) > RESIDUALS * group_bytes and not (
            self.moments and informative[3]
        )

    @property
    def shape_and_stats(self) -> dict[str, dict]:
        """The attributes of every kernel: structs Shape and StatsOptions."""
        lowest_power = np.int64(-(2**63) if self.lowest_power is None else self.lowest_power)
        return {
            "shape": {name: np.int64(getattr(self.layout, name)) for name in ("p", "g", "d")},
            "stats": {"centered": self.spec.centered, "lowest_power": lowest_power},
        }

    @property
    def attributes(self) -> dict[str, dict]:
        """The attributes of a kernel that applies statistics, struct Rule among them."""
        values = {name: np.float64(getattr(self.spec, name)) for name in ("epsilon", "correction")}
        return {
            **self.shape_and_stats,
            "rule": {**values, "epsilon_in_std": self.spec.epsilon_in == "std"},
        }


def forward(spec: Spec, operands: Operands, *, moments: bool) -> tuple:
    """The output and, if asked for, the Stats, where there is no obstacle; mask, scale and bias
    split and sharded as x is.
    """
    x, *params = operands[:4]
    if not sharded(x):
        y, found = _standardize_part(spec, moments, x, *params)
    else:
        reduction = on_device(spec.reduction, x)
        assert reduction is not None
        of_x, of_params = jax.tree.map(lambda a: jax.typeof(a).sharding, (x, params))
        of_stats = split_sharding(spec.reduction, x, spec.reduction.split_stats_shape)
        on_each = lambda x, params: _standardize_part(
            replace(spec, reduction=reduction), moments, x, *params
        )
        specs = jax.tree.map(lambda sharding: sharding.spec, ((of_x, of_params), (of_x, of_stats)))
        y, found = jax.shard_map(on_each, mesh=of_x.mesh, in_specs=specs[0], out_specs=specs[1])(
            x, params
        )
    if found is None or operands.where is None:
        return y, found
    count = count_elements(spec, operands.where, None).astype(jnp.float32)
    return y, found._replace(frame=found.frame._replace(n=count, where=operands.where))


def _standardize_part(
    spec: Spec, moments: bool, x, where, scale, bias
) -> tuple[jax.Array, Stats | None]:
    """The output and the Stats of the part of x that a device has."""
    layout = find(spec.reduction, *(a.shape for a in (scale, bias) if a is not None))
    assert layout is not None
    full = (
        jnp.broadcast_to(jnp.asarray(value if a is None else a, jnp.float32), layout.params)
        for a, value in ((scale, 1), (bias, 0))
    )
    scale, bias = (a.reshape(layout.scales, 1, layout.g, layout.d) for a in full)
    facts = Facts(layout, x.ndim, spec, spec.lowest_power(x.dtype), moments)
    if where is not None:
        where = jnp.broadcast_to(
            where, layout.mask(spec.reduction.split_shape, where.shape)
        ).reshape(-1, layout.p, 1, 1)
    y, *found = _standardize(facts, (x, scale, bias, where))
    pivot, offset, var, power = (a.reshape(spec.reduction.split_stats_shape) for a in found)
    return y, Stats(
        facts.frame(spec, pivot, power, None)._replace(n=None), offset, var
    ) if moments else None


def _forward(facts: Facts, arguments):
    """Output and statistics. With many positions a kernel computes the statistics alone: XLA fuses
    the rest with what follows.
    """
    given, scale, bias, where = arguments
    x, arrays = facts.arranged(given), [a for a in arguments if a is not None]
    per_group = (*x.shape[:-3], 1, facts.layout.g, 1)
    many = facts.layout.p * x.dtype.itemsize > CHANNEL
    wanted = many or facts.moments or not facts.recompute(x)
    sizes = [
        math.prod(per_group) if informative and wanted else 1
        for informative in facts.informative(x)
    ]
    results = [like((size,), jnp.float32, *arrays) for size in sizes]
    expanded = lambda a: jnp.broadcast_to(
        a.reshape(per_group if a.size > 1 else (1,) * x.ndim), per_group
    )
    if many:
        call = jax.ffi.ffi_call("JaxnormStatistics", results, vmap_method="broadcast_all")
        found = list(map(expanded, call(flat(x), mask_or_none(where), **facts.shape_and_stats)))
        return _applied(facts, (x, scale, bias, where), found).reshape(given.shape), *found
    output = like((x.size,), facts.spec.dtype, *arrays)
    call = jax.ffi.ffi_call("JaxnormForward", [output, *results], vmap_method="broadcast_all")
    y, *found = call(*map(flat, (x, scale, bias)), mask_or_none(where), **facts.attributes)
    return y.reshape(given.shape), *map(expanded, found)


def _plain(facts: Facts, arguments):
    """:func:`_forward` in plain JAX, for other platforms."""
    given, scale, bias, where = arguments
    x = hide(facts.arranged(given), where)
    y, (frame, offset, var) = reference.forward(facts.spec_of(x.shape), x, where, scale, bias)
    found = (
        jnp.zeros_like(var) if a is None else a.astype(jnp.float32)
        for a in (frame.pivot, offset, var, frame.power)
    )
    return hide(y, where).reshape(given.shape), *found


def _applied(facts: Facts, arguments, found) -> jax.Array:
    """The output, by a loop over all channels of a position, each with the statistics of its group."""
    per_channel = [jnp.broadcast_to(a, (*a.shape[:-1], facts.layout.d)) for a in found]
    x, scale, bias, pivot, offset, var, power = (
        a.reshape(*a.shape[:-2], -1) for a in (*arguments[:3], *per_channel)
    )
    where = None if arguments[3] is None else arguments[3].reshape(*arguments[3].shape[:-2], 1)
    spec = replace(facts.spec, reduction=unsplit(x.shape, (x.ndim - 2,)))
    stats = Stats(facts.frame(spec, pivot, power, where), offset, var)
    return hide(reference.apply(spec, hide(x, where), stats, scale, bias), where)


def _jvp(facts: Facts, arguments, tangents):
    x, scale, _, where = arguments
    y, pivot, offset, var, power = _standardize(facts, arguments)
    frame = jax.lax.stop_gradient((pivot, power.astype(jnp.int8)))
    found = zip((frame[0], offset, var, frame[1]), facts.informative(x), strict=True)
    residuals = (
        a if informative and not facts.recompute(x) else ABSENT.astype(a.dtype)
        for a, informative in found
    )
    dy, doffset, dvar = _apply_tangent(facts, (x, *residuals, scale, where), tangents[:3])
    return (y, pivot, offset, var, power), (
        dy,
        jnp.zeros_like(pivot),
        doffset,
        dvar,
        jnp.zeros_like(power),
    )


def _plain_residuals(facts: Facts, residuals) -> tuple[Spec, Residuals]:
    """The residuals of plain JAX from those of the kernel."""
    x, pivot, offset, var, power, scale, where = residuals
    x = hide(facts.arranged(x), where)
    spec = facts.spec_of(x.shape)
    if facts.recompute(x):
        return spec, Residuals(x, reference.statistics(spec, x, where), scale, scale)
    offset_is_known = facts.informative(x)[1] or not facts.spec.centered
    offset = jnp.broadcast_to(offset, var.shape) if offset_is_known else None
    return spec, Residuals(
        x, Stats(facts.frame(spec, pivot, power, where), offset, var), scale, scale
    )


def _tangent(facts: Facts, residuals, arguments):
    """The tangents of output, offset and variance, in plain JAX."""
    (given, *params), where = arguments, residuals[-1]
    dx = hide(facts.arranged(given), where)
    dy, *dstats = reference.tangent(*_plain_residuals(facts, residuals), Inputs(dx, *params))
    return hide(dy, where).reshape(given.shape), *dstats


def _tangent_like(facts: Facts, residuals, arguments):
    """Arrays of the shapes and dtypes that :func:`_tangent` returns."""
    given, *params = arguments
    dy, *dstats = reference.tangent_like(
        *_plain_residuals(facts, residuals), Inputs(facts.arranged(given), *params)
    )
    return dy.reshape(given.shape), *dstats


def _backward(facts: Facts, residuals, cotangents):
    """The transpose of :func:`_tangent`, by the kernel."""
    (x, pivot, offset, var, power, scale, where), (dy, *dstats) = residuals, cotangents
    doffset, dvar = (ABSENT if a is None else a for a in dstats)
    own_x, own_dy = map(facts.arranged, (x, dy))
    arguments = list(map(flat, (own_x, own_dy, scale, pivot, offset, var, doffset, dvar, power)))
    results_like = [like(arguments[i].shape, arguments[i].dtype, *arguments) for i in (0, 2, 2)]
    call = jax.ffi.ffi_call("JaxnormBackward", results_like, vmap_method="broadcast_all")
    results = call(
        *arguments, mask_or_none(where), **facts.attributes, recompute=facts.recompute(x)
    )
    return tuple(a.reshape(of.shape) for a, of in zip(results, (x, scale, scale), strict=True))


def _plain_backward(facts: Facts, residuals, cotangents):
    """:func:`_backward` in plain JAX, for other platforms."""
    (given, *dstats), where = cotangents, residuals[-1]
    dy = hide(facts.arranged(given), where)
    dx, *params = reference.backward(*_plain_residuals(facts, residuals), (dy, *dstats))
    return hide(dx, where).reshape(given.shape), *params


_standardize = differentiable(
    "jaxnorm_native", _forward, _jvp, batched=lambda facts, size: facts, results=5, elsewhere=_plain
)
_apply_tangent = linear(
    "jaxnorm_native_tangent",
    _tangent,
    _backward,
    like=lambda residuals: (residuals[0], residuals[-2], residuals[-2]),
    batched=lambda facts, size: facts,  # any axes may stand before those of x
    results=3,
    results_like=_tangent_like,
    elsewhere=_plain_backward,
)


def flat(a: jax.Array) -> jax.Array:
    """``(..., N, P, G, D)`` as the kernels take it: in one axis, which needs no copy, whatever
    layout XLA gives to axes of size one.

    But with the channels, G and D, as an axis of their own where there are others: XLA computes
    what it fuses with x in the shape that is passed, and would find the channel of each element, of
    a bias for example, by a division.
    """
    channels = math.prod(a.shape[-2:])
    return a.reshape(-1) if channels in (1, a.size) else a.reshape(-1, channels)


def mask_or_none(where: jax.Array | None) -> jax.Array | np.ndarray:
    """The mask as the kernels take it: an array without elements where there is none."""
    return np.zeros(0, np.bool_) if where is None else where.reshape(-1)


def like(shape: tuple[int, ...], dtype, *arrays) -> jax.ShapeDtypeStruct:
    """A result, which varies over the mesh axes that any of the arrays varies over: as JAX itself
    has it of a sum.
    """
    if all(jax.typeof(a).sharding.mesh.empty for a in arrays):
        return jax.ShapeDtypeStruct(shape, dtype)
    mixed = lambda *a: sum(v.sum().astype(jnp.float32) for v in a)
    return jax.eval_shape(lambda *a: jnp.broadcast_to(mixed(*a), shape).astype(dtype), *arrays)
