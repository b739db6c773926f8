"""Switchable norm: a learned blend of the statistics of instance, layer and batch norm, which are merged from the first."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import validation
from jaxnorm.application import Rule
from jaxnorm.axes import unsplit
from jaxnorm.dtypes import compute_dtype, real
from jaxnorm.engine.derivatives import own_statistics
from jaxnorm.engine.plan import IMPLEMENTATIONS, select
from jaxnorm.features import aligned, like_batch, spatial_axes
from jaxnorm.frame import make_frame
from jaxnorm.loops import divide, hold
from jaxnorm.normalization import make_rule
from jaxnorm.sets import Sets
from jaxnorm.statistics import Moments, assemble, into_frame


def switchable_norm(
    x: jax.Array,
    /,
    mean_logits: jax.Array,
    var_logits: jax.Array,
    *,
    running: Moments | None = None,
    feature_axes: int | tuple[int, ...] = -1,
    scale=None,
    bias=None,
    epsilon: float = 1e-5,
    where=None,
    axis_name=None,
    full_range: bool = False,
    implementation: str | None = None,
    dtype=None,
) -> tuple[jax.Array, Moments]:
    """Switchable normalization: a learned blend of instance, layer and batch statistics (Luo et al. 2018, arXiv 1806.10779).

    Means are blended with ``softmax(mean_logits)``, variances with ``softmax(var_logits)``. The layer statistics are
    the instance statistics merged over the channels, the batch statistics the same merged over the batch.

    Args:
      x: floating array ``(N, ..., C)`` with at least one axis between batch and features; the batch is axis 0.
      mean_logits: ``(3,)``, in the order instance, layer, batch.
      var_logits: ``(3,)``, in the same order.
      running: Moments that stand in for those of the batch (evaluation).
      feature_axes: the axes of the features.
      scale: gain of the shape of the feature axes.
      bias: shift of the same shape.
      epsilon: added to the variance.
      where: mask or weights that broadcast against ``x``; what is masked out counts for nothing and outputs 0.
      axis_name: device or vmap axes that the batch extends over.
      full_range: as for :func:`standardize`.
      implementation: as for :func:`standardize`, but that no kernel computes this norm.
      dtype: dtype of the output; that of ``x`` by default.

    Returns:
      The output, of the shape of ``x``, and the Moments of the batch (``running`` where that is given).

    Raises:
      TypeError: integer ``x``.
      ValueError: logits that are not ``(3,)``, no spatial axis; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> instance_only = jnp.array([50.0, 0.0, 0.0])
    >>> jn.switchable_norm(x, instance_only, instance_only, epsilon=0.0)[0][..., 0].tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    x = validation.floating(x)
    features, spatial = spatial_axes(x.shape, feature_axes, "switchable norm")
    logits = [validation.floating(value, name) for name, value in (("mean_logits", mean_logits), ("var_logits", var_logits))]
    for name, value in zip(("mean_logits", "var_logits"), logits, strict=True):
        if value.shape != (3,):
            raise ValueError(f"{name} must have shape (3,), for instance, layer and batch: got {value.shape}.")
    scale, bias = aligned(x.shape, features, scale=scale, bias=bias)
    where = validation.mask(where, x.shape)
    rule = make_rule(x, validation.static_epsilon(epsilon), dtype=x.dtype if dtype is None else dtype, full_range=full_range)
    if running is not None:
        running = like_batch(running, x.shape, features)
    select(implementation, IMPLEMENTATIONS, None, x)  # plain JAX, unless what is asked for is unknown
    y, batch = _switchable(Norm(rule, features, spatial, axis_name), x, *logits, running, scale, bias, where)
    return y, batch if running is None else running


@partial(jax.jit, static_argnums=0)
def _switchable(norm: "Norm", x, mean_logits, var_logits, running, scale, bias, where):
    weights = jnp.concatenate([jax.nn.softmax(logits.astype(real(compute_dtype(x.dtype)))) for logits in (mean_logits, var_logits)])
    return norm(x, weights, running, scale, bias, where)


@dataclass(frozen=True)
class Norm:
    """The static facts about the norm."""

    rule: Rule
    features: tuple[int, ...]
    spatial: tuple[int, ...]
    axis_name: Any = None

    def __call__(self, x, weights, running, scale, bias, where) -> tuple[jax.Array, Moments]:
        """The output, and the Moments of the batch; weights are those of the means, then those of the variances."""
        everything, own = Sets(unsplit(x.shape, tuple(range(x.ndim))), self.axis_name), Sets(unsplit(x.shape, self.spatial))
        frame = make_frame(own, x, where, self.rule.lowest_power(x.dtype), alike=everything)
        assert frame.pivot is not None
        # The blend does not move when all of x does: about the middle of all of x, no digits are lost to a large mean.
        count = None if where is None else jnp.broadcast_to(frame.size, frame.pivot.shape)
        middle = frame._replace(pivot=_average(frame.pivot, count, everything.axes, self.axis_name)[0])
        weights = list(weights.reshape(6, *(1,) * x.ndim))
        blend = Blend(self.features, 0, self.axis_name, own.pooling.size)
        extra = middle.pivot, count, None if running is None else into_frame(running, middle), weights[:3], weights[3:]
        y, offset, var = own_statistics(own, self.rule, blend, x, where, frame, extra, scale, bias)
        _, _, batch = blend.parts(frame.pivot, offset, var, extra)
        return y, assemble(middle._replace(size=batch.count), batch.mean, batch.var)


@dataclass(frozen=True)
class Blend:
    """Instance, layer and batch statistics, each in its weight: what switchable norm applies of those of instances."""

    features: tuple[int, ...]
    examples: int
    axis_name: object
    size: int  # of every instance, where they have no counts

    def parts(self, pivot, offset, var, extra) -> tuple[Moments, Moments, Moments]:
        """The three, about the middle of all of x."""
        middle, count, running, *_ = extra
        instance = Moments(count, (pivot - middle) + offset, var)
        batch = self._merge(instance, (self.examples,), self.axis_name) if running is None else running
        return instance, self._merge(instance, self.features), batch

    def _merge(self, parts: Moments, axes: tuple[int, ...], axis_name=None) -> Moments:
        """Of parts whose means are small: between them is no large number that digits could be lost to."""
        mean, total = _average(parts.mean, parts.count, axes, axis_name)
        var, _ = _average(parts.var + _square_about(parts.mean, mean), parts.count, axes, axis_name)
        return Moments(total * jnp.asarray(self.size, total.dtype) if parts.count is None else total, mean, var)

    def __call__(self, pivot, offset, var, extra):
        instance, *others = parts = self.parts(pivot, offset, var, extra)
        *_, mean_weights, var_weights = extra
        # As a step from one of the means: weights that add up to 1 + 1e-7 then do no harm.
        there = sum(w * part.mean for w, part in zip(mean_weights[1:], others, strict=True))
        mean = offset + (there + -sum(mean_weights[1:]) * instance.mean)
        return hold(mean), sum(w * part.var for w, part in zip(var_weights, parts, strict=True))

    def batched(self) -> "Blend":
        """The same for arrays with one more axis in front."""
        return replace(self, features=tuple(axis + 1 for axis in self.features), examples=self.examples + 1)


@jax.custom_jvp
def _square_about(values: jax.Array, mean: jax.Array) -> jax.Array:
    """``(values - mean)**2``, to be averaged as the mean was. That average has no slope by the mean, so none is computed here."""
    return (values - mean) ** 2


@_square_about.defjvp
def _square_about_jvp(primals, tangents):
    values, mean = primals
    return _square_about(values, mean), 2 * (values - mean) * tangents[0]


def _average(values, weights, axes: tuple[int, ...], axis_name) -> tuple[jax.Array, jax.Array]:
    """The weighted mean, and the sum of the weights, each of them 1 where there are none."""
    sets = Sets(unsplit(values.shape, axes), axis_name)
    total = sets.count(weights, None if weights is None else sets.sum(weights, None))
    return divide(sets.sum(values, weights), total), jnp.asarray(total, values.dtype)
