"""Switchable norm by the CPU kernels of switchable_forward.cc and switchable_backward.cc, and the transpose of its tangent."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.application import Rule, apply_root
from jaxnorm.axes import unsplit
from jaxnorm.frame import Frame
from jaxnorm.kernels import native
from jaxnorm.kernels.layout import find
from jaxnorm.kernels.native import NOTHING, flat, like
from jaxnorm.kernels.placement import WHOLE, sharded
from jaxnorm.primitives import differentiable, linear
from jaxnorm.sets import Sets

TOLD = 3  # numbers that tell mean and variance, as in instances.h


def obstacle(x: jax.Array, sets: Sets, rule: Rule, where, scale, bias) -> str | None:
    """Why the kernels cannot take these arguments, in words; None if they can."""
    found = WHOLE if sharded(x) else native.obstacle(x, sets, rule, where, scale, bias)
    layout = None if found else find(sets.pooling)
    if layout is not None and (layout.d > 1 or layout.p == 1):
        return f"pools positions, with the channels last: got axes {sets.pooling.axes} of {sets.pooling.split}"
    return found


class Facts(NamedTuple):
    """What there is to know beside arrays."""

    norm: Any  # hashable; norm.of_arrays(x, weights, running, scale, bias) -> y, mean, var, in plain JAX; its axes and rule
    front: int = 0  # axes in front of those that it knows

    def plain(self, *arguments):
        plain = self.norm.of_arrays
        for _ in range(self.front):
            plain = jax.vmap(plain)
        return plain(*arguments)

    def batched(self, size: int) -> "Facts":
        return self._replace(front=self.front + 1)

    def axes(self, of: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis + self.front for axis in of)

    def sizes(self, x: jax.Array) -> dict[str, np.int64]:
        """Examples, positions, channels."""
        p, c = (math.prod(x.shape[axis] for axis in self.axes(of)) for of in (self.norm.spatial, self.norm.features))
        return {"n": np.int64(x.shape[self.front]), "p": np.int64(p), "c": np.int64(c)}

    def many(self, x: jax.Array) -> bool:
        """Whether XLA makes the output, as of other norms, and the kernels keep what they know of instances."""
        return int(self.sizes(x)["p"]) * x.dtype.itemsize > native.CHANNEL

    def kept(self, x: jax.Array) -> list[tuple[int, ...]]:
        """Shapes of what the backward kernel is given: of instances, layers and the batch."""
        front, (n, _, c) = x.shape[: self.front], map(int, self.sizes(x).values())
        return [(*front, n, TOLD, c) if self.many(x) else (*front, 1), (*front, TOLD, n), (*front, TOLD, c)]

    def each(self, x: jax.Array, *ones: int) -> tuple[int, ...]:
        """The shape of x with these of its axes of size one."""
        return tuple(1 if axis - self.front in ones else size for axis, size in enumerate(x.shape))


def standardize(norm, x, weights, running, scale, bias) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, and mean and variance of each channel, of arguments that there is no obstacle to.

    Weights ``(6,)`` are those of means, then of variances; running, unless None, mean and variance that stand in for the batch's.
    """
    facts = Facts(norm)
    channels = facts.each(x, 0, *norm.spatial)
    rows = x.shape[0] if any(a is not None and a.shape[0] > 1 for a in (scale, bias)) else 1
    params = (jnp.broadcast_to(jnp.asarray(v if a is None else a, jnp.float32), (rows, *channels[1:])) for a, v in ((scale, 1), (bias, 0)))
    given = None if running is None else tuple(jnp.broadcast_to(jnp.asarray(a, jnp.float32), channels) for a in running)
    return tuple(_standardize(facts, (x, weights, given, *params))[:3])


def _call(name: str, results, facts: Facts, x, *given, **attributes) -> list[jax.Array]:
    taken = [flat(a, len(facts.norm.features)) for a in (x, *given)]
    results_like = [like((math.prod(shape),), dtype, *taken) for shape, dtype in results]
    attributes |= facts.sizes(x) | {"epsilon": np.float64(facts.norm.rule.epsilon)}
    found = jax.ffi.ffi_call(f"JaxnormSwitchable{name}", results_like)(*taken, **attributes)
    return [a.reshape(shape) for a, (shape, _) in zip(found, results, strict=True)]


def _forward(facts: Facts, arguments):
    """The results, and what the derivative keeps."""
    x, weights, running, scale, bias = arguments
    rule, channels, shapes = facts.norm.rule, facts.each(x, 0, *facts.norm.spatial), facts.kept(x)
    given = NOTHING if running is None else _told(facts, *running)
    if facts.many(x):
        results = [(shape, jnp.float32) for shape in (*[facts.each(x, *facts.norm.spatial)] * 4, *shapes, channels)]
        pivot, offset, root, power, *kept, var = _call("Statistics", results, facts, x, weights, given)
        sets, frame = Sets(unsplit(x.shape, facts.axes(facts.norm.spatial))), Frame(float(facts.sizes(x)["p"]), power, pivot)
        y = apply_root(sets, rule, None, frame, x, offset, root, scale, bias)
    else:
        results = [(x.shape, x.dtype if rule.dtype is None else rule.dtype), *((shape, jnp.float32) for shape in (*shapes[1:], channels))]
        y, *kept, var = _call("Forward", results, facts, x, weights, given, scale, bias, scales=np.int64(scale.shape[facts.front]))
        kept = [jnp.zeros(shapes[0], jnp.float32), *kept]
    return y, kept[2][..., 0, :].reshape(channels), var, *kept


def _told(facts: Facts, mean: jax.Array, var: jax.Array) -> jax.Array:
    """As the kernels take them."""
    each = [a.reshape(*a.shape[: facts.front], 1, -1) for a in (mean, jnp.zeros_like(mean), jnp.sqrt(var))]
    return jnp.concatenate(each, axis=-2)


def _plain(facts: Facts, arguments):
    """The same for other platforms, which find again what kernels keep."""
    return *facts.plain(*arguments), *(jnp.zeros(shape, jnp.float32) for shape in facts.kept(arguments[0]))


def _jvp(facts: Facts, arguments, tangents):
    results = _standardize(facts, arguments)
    kept = jax.lax.stop_gradient(results[3:])
    return results, (*_apply_tangent(facts, (arguments, kept), tangents), *map(jnp.zeros_like, kept))


def _tangent(facts: Facts, residuals, tangents):
    """In plain JAX."""
    return jax.jvp(facts.plain, residuals[0], tangents)[1]


def _backward(facts: Facts, residuals, cotangents):
    """Its transpose, by the kernel."""
    ((x, weights, running, scale, bias), kept), (by_y, *by_batch) = residuals, cotangents
    channels = facts.each(x, 0, *facts.norm.spatial)
    told: list = [NOTHING]
    if any(by is not None for by in by_batch):
        told = [jnp.stack([jnp.zeros(channels, jnp.float32) if by is None else by for by in by_batch], axis=-1)]
    results = [(a.shape, a.dtype) for a in (x, scale, bias, weights)] + [(channels, jnp.float32)] * 2
    flags = {"scales": np.int64(scale.shape[facts.front]), "running": running is not None}
    given = x, by_y, weights, scale, *kept, *told
    by_x, by_scale, by_bias, by_weights, *by_running = _call("Backward", results, facts, *given, **flags)
    return by_x, by_weights, None if running is None else tuple(by_running), by_scale, by_bias


def _plain_backward(facts: Facts, residuals, cotangents):
    """The same for other platforms."""
    results: tuple
    results, pull_back = jax.vjp(facts.plain, *residuals[0])
    return pull_back(tuple(jnp.zeros_like(a) if by is None else by for a, by in zip(results, cotangents, strict=True)))


_standardize = differentiable("jaxnorm_switchable", _forward, _jvp, Facts.batched, results=6, elsewhere=_plain)
_apply_tangent = linear(
    "jaxnorm_switchable_tangent",
    _tangent,
    _backward,
    like=lambda residuals: residuals[0],
    batched=Facts.batched,
    results=3,
    elsewhere=_plain_backward,
)
