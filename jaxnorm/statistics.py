"""Count, mean and variance of groups of elements; merging them, and blending them over time."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from jaxnorm import validation
from jaxnorm.axes import Axes, resolve
from jaxnorm.dtypes import real
from jaxnorm.engine.collectives import across, vary, varying_axes
from jaxnorm.engine.groups import Frame, hide, scale_down
from jaxnorm.engine.plan import find_numbers
from jaxnorm.engine.reference import abs_squared
from jaxnorm.engine.segments import Parts, Segments, along, in_words
from jaxnorm.engine.segments import statistics as statistics_of_segments
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.words import Words, beyond, distilled, of_integers, two_sum
from jaxnorm.engine.words import total as words_total
from jaxnorm.engine.xla import reduce_axes
from jaxnorm.options import AxisName, Param


class Low(NamedTuple):
    """What the numbers of :class:`Moments` are short of by rounding.

    Attributes:
      count: two further words: ``count + low.count[0] + low.count[1]`` is exact for up to 2**56 elements.
      mean: a second word.
      var: a second word.
    """

    count: tuple[jax.Array, jax.Array]  # type: ignore[assignment]  # tuples have a method of this name
    mean: jax.Array
    var: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("count", "mean", "var", "low"), meta_fields=())
@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of groups of elements: a value that can be merged.

    Attributes:
      count: how many elements (or how much weight) each group holds; 0 for an empty one.
      mean: the mean of each group, 0 for an empty one.
      var: the biased variance of each group, 0 for an empty one.
      low: what these are short of by rounding, a :class:`Low`: 0 unless given. It lets merges in turn count beyond 2**24
        elements and go on beyond the digits of float32, and :func:`normalize` subtract a mean that is no float32 number.

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
    low: Low = None  # type: ignore[assignment]  # zeros unless given

    def __post_init__(self) -> None:
        if self.low is None:
            count, mean, var = map(_zero, (self.count, self.mean, self.var))
            object.__setattr__(self, "low", Low((count, count), mean, var))

    def merge(
        self,
        axes: Axes,
        *,
        axis_name: AxisName = None,
        segments: Param = None,
        num_segments: int | None = None,
        **sizes: int,
    ) -> "Moments":
        """Reduces further axes: the groups along ``axes`` become one, or one for each segment.

        Args:
          axes: ints or a pattern over the shape of ``mean``.
          axis_name: device or vmap axes to reduce over as well.
          segments: ids along the first reduction axis, as in :func:`moments`.
          num_segments: how many segments there are.
          **sizes: sizes of split axes in a pattern.

        Raises:
          TypeError: ids that are no integers.
          ValueError: the axes or the ids do not fit.
        """
        mean = validation.floating(self.mean, "mean")
        spec = Spec(resolve(axes, mean.shape, sizes), axis_name)
        at = along(spec.reduction, segments, num_segments)
        return _merge(spec, replace(self, mean=mean)) if at is None else _regroup(spec, at[0], replace(self, mean=mean), at[1])


def _zero(value: Any) -> Any:
    """Zeros for an array or a number; what stands for a leaf, as a sharding or a vmap axis, for itself."""
    if isinstance(value, jax.Array):
        make = jnp if isinstance(value, jax.core.Tracer) else np  # in a trace NumPy's would be constants, which a backward pass keeps
        zeros: Any = make.zeros(value.shape, value.dtype)
        return vary(zeros, varying_axes(value))
    if isinstance(value, np.ndarray | np.generic):
        return np.zeros_like(value)
    if isinstance(value, int | float):
        return value * 0
    return value


def moments(
    x: ArrayLike,
    /,
    axes: Axes,
    *,
    where: Param = None,
    centered: bool = True,
    axis_name: AxisName = None,
    segments: Param = None,
    num_segments: int | None = None,
    **sizes: int,
) -> Moments:
    """Count, mean and variance of ``x`` over ``axes``.

    Args:
      x: floating or complex array of any shape.
      axes: the reduction axes: an int, ints, or a pattern such as ``"n [h w] c"``.
      where: boolean mask or float weights that broadcast against ``x``. What is masked out counts for nothing, even
        NaN, and gets gradient 0. Weights are constants under differentiation.
      centered: False takes the mean as 0, so that ``var`` is the mean square.
      axis_name: name (or names) of a device or vmap axis to reduce over as well, weighted by count.
      segments: integers, in any order, from 0 to ``num_segments - 1``: which positions along the first reduction axis form a group,
        for example the nodes of a graph or the tokens of a document. Of the shape ``(n,)`` of that axis or, where each row has
        its own, of the shape of the axes of ``x`` up to it: ``(b, t)`` for ``"b [t] c"``. Further reduction axes are reduced whole.
      num_segments: how many segments there are, static; one that no id names is an empty group.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Moments whose reduced axes have size one, or ``num_segments`` (a split axis ``(g [c])`` has size g), of the dtype of ``x`` and at
      least float32. The variance is biased, and computed from deviations from the mean, corrected for its rounding: an
      offset of 1e7 standard deviations costs no accuracy. Of complex numbers it is the variance of the absolute value.

    Raises:
      TypeError: integer or boolean ``x``; a mask that is neither boolean nor float; ids that are no integers.
      ValueError: axes, pattern, mask or ids that do not fit ``x``; ids out of range (in ``jit`` found under checkify; otherwise their
        positions count for nothing).

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.moments(jnp.array([[1.0, 3.0], [5.0, 9.0]]), "n [c]").var.tolist()
    [[1.0], [4.0]]
    >>> jn.moments(jnp.array([1.0, 3.0, 7.0]), "[n]", segments=jnp.array([0, 0, 2]), num_segments=3).mean.tolist()
    [2.0, 0.0, 7.0]
    """
    x = validation.floating(x)
    where = validation.mask(where, x.shape)
    spec = Spec(resolve(axes, x.shape, sizes), axis_name, centered)
    at = along(spec.reduction, segments, num_segments)
    return moments_of(spec, x, where) if at is None else _moments_of_segments(spec, at[0], x, where, at[1])


def merge(first: Moments, *others: Moments) -> Moments:
    """The Moments of several collections taken together.

    Associative and commutative; an empty Moments (count 0) is the identity. Counts are exact, and means and variances are carried
    on in two words each, so that merging in turn loses nothing: see :class:`Low`.

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


def ema(running: Moments, /, batch: Moments, *, momentum: ArrayLike = 0.99, unbiased: bool = False) -> Moments:
    """Exponential moving average: ``momentum * running + (1 - momentum) * batch``.

    A blend, not a merge: old values fade. Where a group of the batch is empty (count 0) or holds anything that is not
    finite, that group of ``running`` stays as it was. What is finite enters, outliers too: after one element of 1e17 the variance
    is 1e31 and more for a thousand steps. Mask such elements out in the norm, ``where=abs(x) <= limit``, or such a batch
    from the average: a batch whose ``count`` is 0 leaves it as it was.

    Args:
      running: the old values; the result has their dtype, so float32 state stays float32.
      batch: the new ones, of shapes that fit.
      momentum: weight of the old value, in [0, 1], as in Flax and Keras. PyTorch's ``momentum`` is one minus this.
      unbiased: average ``var * n / (n - 1)``, as PyTorch does; Flax and Keras average the biased variance.
        Of a single element it is unknown, and leaves ``running`` as it was.

    Returns:
      Moments of the shapes of ``running``. An update too small for the dtype moves the value by its last bit, so that
      the average reaches what it follows instead of stopping short of it.

    Raises:
      TypeError: arguments that are no Moments.
      ValueError: momentum outside [0, 1], shapes that differ.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> old = jn.Moments(count=jnp.array(8.0), mean=jnp.array(0.0), var=jnp.array(1.0))
    >>> new = jn.Moments(count=jnp.array(8.0), mean=jnp.array(4.0), var=jnp.array(3.0))
    >>> float(jn.ema(old, new, momentum=0.75).mean)
    1.0
    >>> accepted = jnp.where(new.var < 2.0, new.count, 0)  # this batch is not
    >>> float(jn.ema(old, jn.Moments(accepted, new.mean, new.var), momentum=0.75).mean)
    0.0
    """
    for name, value in (("running", running), ("batch", batch)):
        if not isinstance(value, Moments):
            raise TypeError(f"{name} must be Moments: got {type(value).__name__}. Make them with jaxnorm.moments or jaxnorm.Moments.")
    momentum = validation.momentum(momentum)
    _same_shape(running, batch)
    return _ema(bool(unbiased), running, batch, momentum, 1 - momentum)


def from_numbers(numbers: Any) -> Moments:
    """The public value of what the engine found, see engine/numbers.py."""
    count, mean, var, low_count, low_mean = numbers
    return Moments(count, mean, var, Low(low_count, low_mean, jnp.zeros_like(var)))


def into_frame(moments: Moments, frame: Frame) -> Moments:
    """The Moments in the units of the frame, relative to its pivot."""
    mean, low = (scale_down(word, frame.power) for word in (moments.mean, moments.low.mean))
    var = scale_down(scale_down(moments.var, frame.power), frame.power)
    return Moments(moments.count, (mean if frame.pivot is None else mean - frame.pivot) + low, var)


@partial(jax.jit, static_argnums=0)
def moments_of(spec: Spec, x: jax.Array, where: jax.Array | None) -> Moments:
    """The Moments, of arguments that have been checked."""
    where = None if where is None else where.reshape(spec.reduction.fit(where.shape))
    return from_numbers(find_numbers(spec, x, where))


@partial(jax.jit, static_argnums=(0, 1))
def _moments_of_segments(spec: Spec, at: Segments, x: jax.Array, where: jax.Array | None, ids: jax.Array) -> Moments:
    where = None if where is None else where.reshape(spec.reduction.fit(where.shape))
    return from_numbers(in_words(spec, at, *statistics_of_segments(spec, at, Parts(x), where, at.places(ids))))


@partial(jax.jit, static_argnums=(0, 1))
def _regroup(spec: Spec, at: Segments, parts: Moments, ids: jax.Array) -> Moments:
    """Merging, where groups become one for each segment."""
    shape, dtype = parts.mean.shape, real(parts.mean.dtype)
    parts = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape).reshape(spec.reduction.split_shape), parts)
    words, places = _count_words(parts, dtype), at.places(ids)
    whole = words_total(words, tuple(axis for axis in spec.axes if axis != at.axis), spec.axis_name, lambda word: at.total(word, places))
    taken = Parts(parts.mean, parts.low.mean, parts.var + parts.low.var)
    return from_numbers(in_words(spec, at, *statistics_of_segments(spec, at, taken, lax.stop_gradient(words[0]), places, whole)))


@partial(jax.jit, static_argnums=0)
def _merge(spec: Spec, parts: Moments) -> Moments:
    """With n the counts, N their sum and p one number near the mean, which keeps digits::

    mean = p + sum(n / N (mean_i - p)),   var = sum(n / N var_i) + sum(n / N (mean_i - mean)**2)
    """
    reduction, dtype = spec.reduction, real(parts.mean.dtype)
    parts = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, parts.mean.shape).reshape(reduction.split_shape), parts)
    words = _count_words(parts, dtype)
    whole, weight = words_total(words, reduction.axes, spec.axis_name), words[0]
    share = weight / jnp.where(whole[0] > 0, whole[0], 1)  # before the product: an empty part changes no bit

    def averages(*values: jax.Array) -> list[jax.Array]:
        return across(lax.psum, [reduce_axes(hide(a, weight) * share.astype(a.dtype), spec.axes) for a in values], spec.axis_name)

    pivots = lax.stop_gradient(averages(parts.mean, parts.var))
    apart = [hide(a - pivot + low, weight) for a, pivot, low in zip((parts.mean, parts.var), pivots, parts.low[1:], strict=True)]
    offsets = averages(*apart)
    rest = [a - offset for a, offset in zip(apart, offsets, strict=True)]
    between, *corrections = averages(abs_squared(rest[0]), *rest)  # of the offsets too, whose rounding would add up over merges
    (mean, low_mean), (var, low_var) = map(two_sum, pivots, (offsets[0], offsets[1] + between))
    low_mean, low_var = low_mean + corrections[0], low_var + corrections[1]
    low = lax.stop_gradient(Low(beyond(whole, whole[0]), low_mean, low_var))
    merged = Moments(whole[0], mean, jnp.maximum(var, 0), low)
    return jax.tree.map(lambda leaf: leaf.reshape(reduction.stats_shape), merged)


def _count_words(parts: Moments, dtype: jnp.dtype) -> Words:
    if jnp.issubdtype(parts.count.dtype, jnp.integer):
        return of_integers(parts.count, dtype)
    return distilled([word.astype(dtype) for word in (parts.count, *parts.low.count)])


@partial(jax.jit, static_argnums=0)
def _ema(unbiased: bool, running: Moments, batch: Moments, momentum: ArrayLike, weight: ArrayLike) -> Moments:
    count, mean, var = (jnp.asarray(leaf) for leaf in (batch.count, batch.mean, batch.var))
    if unbiased:
        n = count.astype(var.dtype)
        var = jnp.where(n > 1, var * (n / jnp.where(n > 1, n - 1, 1)), jnp.nan)
    known = (count > 0) & jnp.isfinite(mean) & jnp.isfinite(var)
    fresh = (jnp.broadcast_to(count, known.shape), mean, var)
    old = map(jnp.asarray, (running.count, running.mean, running.var))
    count, mean, var = (_blend(a, b, momentum, weight, known) for a, b in zip(old, fresh, strict=True))
    return Moments(count, mean, var)


def _same_shape(running: Moments, batch: Moments) -> None:
    for name in ("mean", "var"):
        old, new = jnp.shape(getattr(running, name)), jnp.shape(getattr(batch, name))
        if [size for size in old if size != 1] != [size for size in new if size != 1]:
            raise ValueError(f"running and batch must have the same shape, up to axes of size one: {name} has {old} and {new}.")


def _blend(old: jax.Array, new: jax.Array, momentum: ArrayLike, weight: ArrayLike, known: jax.Array) -> jax.Array:
    if old.ndim == 0 and known.size != 1:  # one count for all groups
        new, known = jnp.max(new, where=known, initial=0), jnp.any(known)
    new, known = (_sharded_as(old, a.reshape(old.shape)) for a in (new, known))
    dtype = old.dtype if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    if jnp.iscomplexobj(new):
        dtype = new.dtype
    old, new = old.astype(dtype), jnp.where(known, new, 0).astype(dtype)
    momentum, weight = (jnp.asarray(value, jnp.finfo(dtype).dtype) for value in (momentum, weight))
    step = new - old
    result = old + weight.astype(dtype) * step  # in this form a value equal to the batch stays what it is
    result = jnp.where(jnp.isfinite(step), result, momentum.astype(dtype) * old + weight.astype(dtype) * new)  # -3e38 and 3e38
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        result = result + lax.stop_gradient(jnp.where(result == old, _last_bit(old, new), 0))
    result = jnp.where(momentum == 0, new, jnp.where(momentum == 1, old, result))
    return jnp.where(known, result, old)


def _sharded_as(old: jax.Array, new: jax.Array) -> jax.Array:
    """In explicit sharding ``new`` lying as ``old`` does: the state goes on as it began, whatever the batch is sharded over."""
    explicit = AxisType.Explicit in jax.typeof(old).sharding.mesh.axis_types
    return jax.sharding.reshard(new, jax.typeof(old).sharding) if explicit else new


def _last_bit(old: jax.Array, new: jax.Array) -> jax.Array:
    """The smallest step from ``old`` towards ``new``."""
    old, new = lax.stop_gradient(old), lax.stop_gradient(new)
    return jnp.nextafter(old, new) - old


def like_batch(running: Moments, shape: tuple[int, ...], features: tuple[int, ...]) -> Moments:
    """Running Moments of the shape of the features or of the batch's, as the batch's."""
    target = tuple(size if axis in features else 1 for axis, size in enumerate(shape))
    sizes = tuple(shape[axis] for axis in features)
    for name in ("mean", "var"):
        given = jnp.shape(getattr(running, name))
        if given not in (target, sizes):
            raise ValueError(f"running must have the shape of the features, {sizes} or {target}: its {name} has {given}.")
    shape = jnp.shape(running.mean)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), shape).reshape(target), running)
