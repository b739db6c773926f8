"""What is known about the pooled sets: count, mean, variance. The only place that knows how to merge."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxnorm import checks
from jaxnorm.axes import Axes, resolve
from jaxnorm.dtypes import needs_power, power_of_two, real
from jaxnorm.frame import Frame, estimate, make_frame
from jaxnorm.sets import Sets


@partial(jax.tree_util.register_dataclass, data_fields=("count", "mean", "var"), meta_fields=())
@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of sets of numbers: a value that can be merged.

    Attributes:
      count: how many elements (or how much weight) each set holds; 0 for an empty set.
      mean: their mean, 0 for an empty set.
      var: their biased variance, 0 for an empty set.

    Laws: merging is associative and commutative, an empty Moments is its identity, and the Moments of a whole
    equal the merged Moments of its parts, however it is cut.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.arange(24.0).reshape(2, 3, 4)
    >>> per_instance = jn.moments(x, "n [h] c")
    >>> per_instance.merge(0).mean.tolist() == jn.moments(x, "[n h] c").mean.tolist()
    True
    """

    count: jax.Array
    mean: jax.Array
    var: jax.Array

    def merge(self, axes: Axes, *, axis_name=None, **sizes: int) -> "Moments":
        """Pools further axes: the sets along ``axes`` become one.

        Args:
          axes: ints or a pattern over the shape of ``mean``.
          axis_name: device or vmap axes to pool over as well.
          **sizes: sizes of split axes in a pattern.

        Raises:
          ValueError: the axes do not fit.
        """
        mean = checks.floating(self.mean, "mean")
        count = jnp.broadcast_to(jnp.asarray(self.count, real(mean.dtype)), mean.shape)
        pooling = resolve(axes, mean.shape, sizes)
        return _merge(Sets(pooling, axis_name), count, mean, self.var)


def moments(x: jax.Array, /, axes: Axes, *, where=None, centered: bool = True, axis_name=None, **sizes: int) -> Moments:
    """Count, mean and variance of ``x`` over ``axes``.

    Args:
      x: floating or complex array of any shape.
      axes: the pooled axes: an int, ints, or a pattern such as ``"n [h w] c"``.
      where: boolean mask or float weights that broadcast against ``x``. What is masked out counts for nothing, even
        NaN, and gets gradient 0. Weights are constants under differentiation.
      centered: False takes the mean as 0, so that ``var`` is the mean square.
      axis_name: name (or names) of a device or vmap axis to pool over, weighted by count.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Moments whose pooled axes have size one (a split axis ``(g [c])`` has size g), of the dtype of ``x`` and at least
      float32. The variance is biased, and computed from deviations, corrected for what they leave of the mean: an
      offset of 1e7 standard deviations costs no accuracy. Of complex numbers it is the variance of the absolute value.

    Raises:
      TypeError: integer or boolean ``x``; a mask that is neither boolean nor float.
      ValueError: axes, pattern or mask that do not fit ``x``.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.moments(jnp.array([[1.0, 3.0], [5.0, 9.0]]), "n [c]").var.tolist()
    [[1.0], [4.0]]
    """
    x = checks.floating(x)
    where = checks.mask(where, x.shape)
    pooling = resolve(axes, x.shape, sizes)
    return moments_of(Sets(pooling, axis_name, centered), x, where)


def merge(first: Moments, *others: Moments) -> Moments:
    """The Moments of several collections taken together.

    Associative and commutative; an empty Moments (count 0) is the identity.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> parts = [jn.moments(jnp.array(part), 0) for part in ([1.0, 2.0], [6.0])]
    >>> jn.merge(*parts).mean.tolist()
    [3.0]
    """
    parts = (first, *others)
    if not all(isinstance(part, Moments) for part in parts):
        wrong = next(type(part).__name__ for part in parts if not isinstance(part, Moments))
        raise TypeError(f"merge takes Moments: got {wrong}. Make them with jaxnorm.moments.")
    try:
        shape = jnp.broadcast_shapes(*(jnp.shape(part.mean) for part in parts))
    except ValueError:
        shapes = ", ".join(str(jnp.shape(part.mean)) for part in parts)
        raise ValueError(f"merged Moments must have shapes that broadcast: got {shapes}.") from None
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.broadcast_to(leaf, shape) for leaf in leaves]), *parts)
    return jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), stacked.merge(0))


def assemble(frame: Frame, offset: jax.Array, var: jax.Array) -> Moments:
    """The public value: the mean rounded to one number, powers of two put back."""
    mean = offset if frame.pivot is None else frame.pivot + offset
    if frame.power is not None:
        factor = power_of_two(frame.power, mean.dtype)
        mean, var = mean * factor, var * factor * factor
    return Moments(jnp.full_like(var, frame.size), mean, var)


def into_frame(moments: Moments, frame: Frame) -> Moments:
    """The inverse of :func:`assemble`."""
    mean, var = moments.mean, moments.var
    if frame.power is not None:
        factor = power_of_two(-frame.power.astype(jnp.int32), var.dtype)
        mean, var = mean * factor, var * factor * factor
    return Moments(moments.count, mean if frame.pivot is None else mean - frame.pivot, var)


@partial(jax.jit, static_argnums=0)
def moments_of(sets: Sets, x: jax.Array, where: jax.Array | None) -> Moments:
    """The Moments, of arguments that have been checked."""
    where = None if where is None else where.reshape(sets.pooling.fit(where.shape))
    frame = make_frame(sets, x, where, -100 if needs_power(x.dtype) else None)
    result = assemble(frame, *estimate(sets, x, where, frame))
    return jax.tree.map(lambda leaf: leaf.reshape(sets.pooling.kept), result)


@partial(jax.jit, static_argnums=0)
def _merge(sets: Sets, count: jax.Array, mean: jax.Array, var: jax.Array) -> Moments:
    pooling, between = sets.pooling, moments_of(sets, mean, count)
    count, var = (leaf.reshape(pooling.fit(leaf.shape)) for leaf in (count, jnp.broadcast_to(var, mean.shape)))
    total = between.count.reshape(sets.sum(count, None).shape)
    share = count / jnp.where(total > 0, total, 1)  # before the product: an empty part changes no bit
    within = sets.sum(jnp.where(count > 0, var, 0) * share, None)
    return Moments(between.count, between.mean, between.var + within.reshape(pooling.kept))
