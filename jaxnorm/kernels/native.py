"""Standardizing by the CPU kernels of forward.cc and backward.cc, and the transpose of its tangent."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.application import Inputs, Residuals, Rule, apply, own, tangent
from jaxnorm.axes import unsplit
from jaxnorm.frame import Frame, Stats, estimate, make_frame
from jaxnorm.kernels import placement
from jaxnorm.kernels.layout import Layout, find
from jaxnorm.kernels.placement import alike, fitted, on_device, sharded
from jaxnorm.primitives import differentiable, linear
from jaxnorm.sets import Sets
from jaxnorm.transposed import transpose_in_passes

DTYPES = ("float32", "bfloat16")
KEPT = 1 / 20  # of the bytes of a set at most what is known of it is kept for the derivative; else it is found again
WIDEST = 16384  # channels, where sets have several positions
NOTHING = np.zeros((1, 1, 1, 1), np.float32)  # stands for numbers of sets that need not be kept, or are 0
CHANNEL = 2048  # bytes: of more, the numbers that XLA has for every channel weigh less than a hundredth


def obstacle(x: jax.Array, sets: Sets, rule: Rule, where, scale, bias) -> str | None:
    """Why the kernels cannot take these arguments, in words; None if they can."""
    if where is not None or sets.axis_name is not None:
        return "takes no mask and no axis_name"
    if isinstance(rule.epsilon, jax.core.Tracer):
        return "takes no traced epsilon"
    dtypes = [x.dtype, *([] if rule.dtype is None else [rule.dtype])]
    if any(str(dtype) not in DTYPES for dtype in dtypes):
        return f"takes and gives {' and '.join(DTYPES)}: got {', '.join(map(str, dtypes))}"
    if any(a is not None and jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (scale, bias)):
        return "takes no complex scale or bias"
    if found := placement.obstacle(x, scale, bias):
        return found
    pooling = on_device(sets.pooling, x)
    if pooling is None:
        return f"pools no axes that devices share: {sets.pooling.axes} of {sets.pooling.split}, sharded {jax.typeof(x).sharding.spec}"
    shapes = [sets.pooling.fit(a.shape) for a in (scale, bias) if a is not None]
    layout = find(pooling, *(fitted(pooling, shape) for shape in shapes))
    if layout is None or (layout.p > 1 and layout.g * layout.d > WIDEST):
        return f"pools no such axes: {sets.pooling.axes} of {sets.pooling.split}"
    return None


@dataclass(frozen=True)
class Facts:
    """What kernels are told beside arrays."""

    layout: Layout
    rule: Rule
    centered: bool
    lowest: int | None
    moments: bool  # whether what is known of sets is asked for

    def sets(self, shape: tuple[int, ...]) -> Sets:
        """Of an array ``(..., N, P, G, D)``."""
        return Sets(unsplit(shape, (len(shape) - 3, len(shape) - 1)), None, self.centered)

    def frame(self, pivot: jax.Array, power: jax.Array) -> Frame:
        return Frame(float(self.layout.p * self.layout.d), None if self.lowest is None else power, pivot if self.centered else None)

    def told(self, x: jax.Array) -> tuple[bool, bool, bool, bool]:
        """Whether pivot, offset, variance and power say something. Next to bfloat16 the offset is nothing."""
        return self.centered, self.centered and x.dtype != jnp.bfloat16, True, self.lowest is not None

    def again(self, x: jax.Array) -> bool:
        """Whether the derivative finds again what is known of sets; the power in which moments are told need not come out the same."""
        told, set_bytes = self.told(x), self.layout.p * self.layout.d * x.dtype.itemsize
        return sum(np.compress(told, (4, 4, 4, 1))) > KEPT * set_bytes and not (self.moments and told[3])

    @property
    def attributes(self) -> dict[str, np.int64]:
        return {"p": np.int64(self.layout.p), "g": np.int64(self.layout.g), "d": np.int64(self.layout.d)}

    @property
    def numbers(self) -> dict[str, np.float64 | bool]:
        rule = self.rule
        return {"epsilon": np.float64(rule.epsilon), "correction": np.float64(rule.correction), "in_std": rule.epsilon_in == "std"}

    @property
    def flags(self) -> dict[str, np.int64 | bool]:
        return {"centered": self.centered, "lowest": np.int64(-(2**63) if self.lowest is None else self.lowest)}


def standardize(sets: Sets, rule: Rule, lowest: int | None, moments: bool, x, scale, bias) -> tuple:
    """Output, and frame, offset and variance of each set if asked for, of arguments that there is no obstacle to; scale and bias split."""
    if not sharded(x):
        y, found = _whole(sets, rule, lowest, moments, x, scale, bias)
    else:
        pooling = on_device(sets.pooling, x)
        assert pooling is not None
        of_x, of_sets = jax.typeof(x).sharding, alike(sets.pooling, x, sets.pooling.split_kept)
        of_params = tuple(None if a is None else alike(sets.pooling, x, a.shape) for a in (scale, bias))
        params = tuple(None if a is None else jax.sharding.reshard(a, of) for a, of in zip((scale, bias), of_params, strict=True))
        on_each = lambda x, params: _whole(replace(sets, pooling=pooling), rule, lowest, moments, x, *params)  # noqa: E731
        specs = jax.tree.map(lambda sharding: sharding.spec, ((of_x, of_params), (of_x, of_sets)))
        y, found = jax.shard_map(on_each, mesh=of_x.mesh, in_specs=specs[0], out_specs=specs[1])(x, params)
    return y, found and (Frame(float(sets.pooling.size), *found[0]), *found[1:])


def _whole(sets: Sets, rule: Rule, lowest: int | None, moments: bool, x, scale, bias) -> tuple:
    """Of what a device has; of the frame what is not known without."""
    layout = find(sets.pooling, *(a.shape for a in (scale, bias) if a is not None))
    assert layout is not None
    whole = (jnp.broadcast_to(jnp.asarray(value if a is None else a, jnp.float32), layout.params) for a, value in ((scale, 1), (bias, 0)))
    scale, bias = (a.reshape(layout.scales, 1, layout.g, layout.d) for a in whole)
    facts = Facts(layout, rule, sets.centered, lowest, moments)
    y, *found = _standardize(facts, (x.reshape(layout[:4]), scale, bias))
    pivot, offset, var, power = (a.reshape(sets.pooling.split_kept) for a in found)
    return y.reshape(x.shape), (facts.frame(pivot, power)[1:], offset, var) if moments else None


def _forward(facts: Facts, arguments):
    """Of many positions the statistics alone by a kernel: XLA makes one loop of the rest and what follows, and keeps no output."""
    x, rule, per_set = arguments[0], facts.rule, (*arguments[0].shape[:-3], 1, facts.layout.g, 1)
    many = facts.layout.p * x.dtype.itemsize > CHANNEL
    wanted = many or facts.moments or not facts.again(x)
    sizes = [math.prod(per_set) if told and wanted else 1 for told in facts.told(x)]
    results = [like((size,), jnp.float32, *arguments) for size in sizes]
    each = lambda a: jnp.broadcast_to(a.reshape(per_set if a.size > 1 else (1,) * x.ndim), per_set)  # noqa: E731
    if many:
        call = jax.ffi.ffi_call("JaxnormStatistics", results, vmap_method="broadcast_all")
        found = list(map(each, call(flat(x), **facts.attributes, **facts.flags)))
        return _applied(facts, arguments, found), *found
    output = like((x.size,), x.dtype if rule.dtype is None else rule.dtype, *arguments)
    call = jax.ffi.ffi_call("JaxnormForward", [output, *results], vmap_method="broadcast_all")
    y, *found = call(*map(flat, arguments), **facts.attributes, **facts.numbers, **facts.flags)
    return y.reshape(x.shape), *map(each, found)


def _plain(facts: Facts, arguments):
    """The same for other platforms."""
    x, scale, bias = arguments
    sets = facts.sets(x.shape)
    frame = make_frame(sets, x, None, facts.lowest)
    offset, var = estimate(sets, x, None, frame)
    numbers = (jnp.zeros_like(var) if a is None else a.astype(jnp.float32) for a in (frame.pivot, offset, var, frame.power))
    return apply(sets, facts.rule, None, frame, x, offset, var, scale, bias), *numbers


def _applied(facts: Facts, arguments, found) -> jax.Array:
    """The output, by a loop over all channels of a position, each with the numbers of its group."""
    x, scale, bias, *numbers = (a.reshape(*a.shape[:-2], -1) for a in (*arguments, *found))
    groups = facts.layout.g if facts.layout.d > 1 else None
    sets = Sets(unsplit(x.shape, (x.ndim - 2,)), None, facts.centered, groups=groups)
    pivot, offset, var, power = map(sets.each, numbers)
    return apply(sets, facts.rule, None, facts.frame(pivot, power), x, offset, var, scale, bias).reshape(arguments[0].shape)


def _jvp(facts: Facts, arguments, tangents):
    x, scale, _ = arguments
    y, pivot, offset, var, power = _standardize(facts, arguments)
    frame = jax.lax.stop_gradient((pivot, power.astype(jnp.int8)))
    found = zip((frame[0], offset, var, frame[1]), facts.told(x), strict=True)
    kept = (a if told and not facts.again(x) else NOTHING.astype(a.dtype) for a, told in found)
    dy, doffset, dvar = _apply_tangent(facts, (x, *kept, scale), tangents)
    return (y, pivot, offset, var, power), (dy, jnp.zeros_like(pivot), doffset, dvar, jnp.zeros_like(power))


def _known(facts: Facts, residuals) -> tuple[Sets, Residuals]:
    """Sets, and what plain JAX keeps, by what was kept."""
    x, pivot, offset, var, power, scale = residuals
    sets = facts.sets(x.shape)
    if facts.again(x):
        frame = make_frame(sets, x, None, facts.lowest)
        stats = Stats(frame, *estimate(sets, x, None, frame))
    else:
        estimated = facts.centered and not facts.told(x)[1]
        stats = Stats(facts.frame(pivot, power), None if estimated else jnp.broadcast_to(offset, var.shape), var)
    return sets, Residuals(x, None, stats, (), scale, scale)


def _tangent(facts: Facts, residuals, arguments):
    """In plain JAX."""
    dx, dscale, dbias = arguments
    sets, given = _known(facts, residuals)
    return tangent(sets, facts.rule, own, given, Inputs(dx, (), dscale, dbias))


def _backward(facts: Facts, residuals, cotangents):
    """Its transpose, by the kernel."""
    (x, pivot, offset, var, power, scale), (by_y, *by_each) = residuals, cotangents
    by_each = [NOTHING if a is None else a for a in by_each]
    given = list(map(flat, (x, by_y, scale, pivot, offset, var, *by_each, power)))
    results_like = [like(given[i].shape, given[i].dtype, *given) for i in (0, 2, 2)]
    call = jax.ffi.ffi_call("JaxnormBackward", results_like, vmap_method="broadcast_all")
    results = call(*given, **facts.attributes, **facts.numbers, **facts.flags, again=facts.again(x))
    return tuple(a.reshape(of.shape) for a, of in zip(results, (x, scale, scale), strict=True))


def _plain_backward(facts: Facts, residuals, cotangents):
    """The same for other platforms."""
    sets, given = _known(facts, residuals)
    by_x, _, *by_params = transpose_in_passes((sets, facts.rule, own), given, cotangents)
    return by_x, *by_params


_standardize = differentiable("jaxnorm_native", _forward, _jvp, batched=lambda facts, size: facts, results=5, elsewhere=_plain)
_apply_tangent = linear(
    "jaxnorm_native_tangent",
    _tangent,
    _backward,
    like=lambda residuals: (residuals[0], residuals[-1], residuals[-1]),
    batched=lambda facts, size: facts,  # any axes may stand before the four
    results=3,
    elsewhere=_plain_backward,
)


def flat(a: jax.Array, axes: int = 2) -> jax.Array:
    """As the kernels take it: in one axis, which needs no copy, whatever layout XLA gives to axes of size one.

    But with the channels, its last axes, as an axis of their own where there are others: XLA makes what it adds to x in the shape that is
    taken, and would find the channel of each number, of a bias for example, by a division.
    """
    channels = math.prod(a.shape[-axes:])
    return a.reshape(-1) if channels in (1, a.size) else a.reshape(-1, channels)


def like(shape: tuple[int, ...], dtype, *arrays) -> jax.ShapeDtypeStruct:
    """A result, which varies over the mesh axes that any of the arrays varies over: as JAX itself has it of a sum."""
    mixed = lambda *a: sum(v.sum().astype(jnp.float32) for v in a)  # noqa: E731
    return jax.eval_shape(lambda *a: jnp.broadcast_to(mixed(*a), shape).astype(dtype), *arrays)
