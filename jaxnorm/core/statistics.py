"""Compute Moments, the count, mean and variance of groups of elements, and merge them."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export  # JAX 0.7.2 does not import it by itself
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, resolve, unsplit
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.arguments.keywords import out_of_sizes, with_hint
from jaxnorm.arguments.options import AxisName, Param
from jaxnorm.core.plan import find_stats, select, usual_loops
from jaxnorm.engine.collectives import across, vary, varying_axes
from jaxnorm.engine.counts import low_parts_of_count
from jaxnorm.engine.exponents import scale_down
from jaxnorm.engine.groups import (
    Scaling,
    abs_squared,
    broadcast_stats,
    in_segments,
    mask_fill,
    mask_fill_split,
    over_groups,
    total_weight,
)
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.parts import Parts, low_parts, parts_of_count, sum_parts, two_sum
from jaxnorm.engine.reference import Stats
from jaxnorm.engine.segments import ScatterIndices
from jaxnorm.engine.sharding import alongside, sharded_as, sharded_by_compiler, stats_sharding
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.engine.xla import prevent_folding

# options of moments
OF_MOMENTS = ("axes", "where", "centered", "axis_name", "segments", "num_segments")


class Low(NamedTuple):
    """The low parts of the numbers of :class:`Moments`: what each number loses by rounding.

    Attributes:
      count: two low parts: ``count + low.count[0] + low.count[1]`` is exact for up to 2**56
        elements.
      mean: one low part.
      var: one low part.
    """

    count: tuple[jax.Array, jax.Array]  # type: ignore[assignment]  # tuples have a method of this name
    mean: jax.Array
    var: jax.Array


@partial(
    jax.tree_util.register_dataclass, data_fields=("count", "mean", "var", "low"), meta_fields=()
)
@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of groups of elements: a value that can be merged.

    Attributes:
      count: how many elements (or how much weight) each group holds; 0 for an empty one.
      mean: the mean of each group, 0 for an empty one.
      var: the biased variance of each group, 0 for an empty one.
      low: a :class:`Low`, the low parts of count, mean and variance; 0 unless given. With them
        one merge after another counts more than 2**24 elements and keeps more digits than float32
        has, and :func:`normalize` subtracts a mean that is no float32 number.

    Laws: merging is associative and commutative. An empty Moments is its identity. However data
    are cut into parts, the merged Moments of the parts equal the Moments of all data.

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
            count, *rest = _float_parts(self.count)
            mean, var = map(_zero, (self.mean, self.var))
            object.__setattr__(self, "count", count)
            object.__setattr__(self, "low", Low(tuple(rest), mean, var))

    def merge(
        self,
        axes: Axes,
        *,
        axis_name: AxisName = None,
        segments: Param = None,
        num_segments: int | None = None,
        **sizes: int,
    ) -> "Moments":
        """Merge the groups along ``axes`` into one, or into one for each segment.

        Args:
          axes: ints or a pattern over the shape of ``mean``; with ``axis_name`` it may be ().
          axis_name: device or vmap axes to reduce over as well.
          segments: ids along the first reduction axis, as in :func:`moments`.
          num_segments: the number of segments.
          **sizes: sizes of split axes in a pattern.

        Raises:
          TypeError: ids that are no integers.
          ValueError: the axes or the ids do not fit.
        """
        if sizes:
            (segments,) = out_of_sizes(sizes, axes, segments=segments).values()
        check_moments("the merged value", self)
        mean = validation.floating(self.mean, "mean")
        shape = shape_of(self)
        reduction = (
            unsplit(shape, ())
            if axes == () and axis_name is not None and segments is None
            else resolve(axes, shape, sizes)
        )
        spec, ids = Spec(reduction, axis_name).along(segments, num_segments)
        return _merged(spec, replace(self, mean=mean), ids)


jax.export.register_namedtuple_serialization(Low, serialized_name="jaxnorm.Low")
jax.export.register_pytree_node_serialization(
    Moments,
    serialized_name="jaxnorm.Moments",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)


def _float_parts(count: Any) -> tuple[Any, Any, Any]:
    """Split a count into three parts: the rounded count, and the two low parts that it loses.

    An integer that does not fit in the 32 bits that JAX would give it becomes three floats.
    """
    integer = isinstance(count, int) or (
        isinstance(count, np.ndarray | np.generic) and count.dtype.kind in "iu"
    )
    if (
        not integer
        or jax.dtypes.canonicalize_dtype(np.int64) == np.int64
        or np.max(count, initial=0) < 2**31
    ):
        return count, _zero(count), _zero(count)
    first = np.asarray(count, np.float32)
    # float64 holds counts up to 2**53
    second = np.asarray(count - first.astype(np.float64), np.float32)
    return first, second, np.zeros_like(second)


def _zero(value: Any) -> Any:
    """Return zeros like an array or a number.

    Whatever else stands for a leaf, such as a sharding or a vmap axis, is returned as it is.
    """
    # Zeros of NumPy would be constants, which a backward pass keeps.
    if isinstance(value, jax.core.Tracer):
        return vary(jnp.zeros(value.shape, value.dtype), varying_axes(value))
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return np.zeros(value.shape, value.dtype)
    return value * 0 if isinstance(value, int | float) else value


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
    """Return count, mean and variance of ``x`` over ``axes``.

    Args:
      x: floating or complex array of any shape.
      axes: the reduction axes: an int, ints, or a pattern such as ``"n [h w] c"``.
      where: boolean mask or float weights that broadcast against ``x``. Masked elements count
        for nothing, even if they are NaN, and get gradient 0. Weights are constants under
        differentiation.
      centered: False takes the mean as 0, so that ``var`` is the mean square.
      axis_name: name (or names) of a device or vmap axis to reduce over as well, weighted by count.
      segments: an id for each position along the first reduction axis, an integer from 0 to
        ``num_segments - 1``. Positions with the same id form a group, for example the nodes of a
        graph or the tokens of a document. Ids may come in any order. The shape is ``(n,)`` for
        ``"[n] c"``. If each row has its own ids, it is the shape of ``x`` up to that axis:
        ``(b, t)`` for ``"b [t] c"``. Further reduction axes are reduced whole.
      num_segments: the number of segments, static. A segment without any id is an empty group.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Moments in the dtype of ``x``, in float32 at least. Reduced axes have size one; the first of
      them has size ``num_segments`` if there are segments, and a split axis ``(g [c])`` has size
      g. The variance is biased. It is computed from deviations from the mean, and corrected for
      the rounding of the mean: an offset of 1e7 standard deviations costs no accuracy. For complex
      ``x`` it is the mean of ``abs(x - mean) ** 2``.

    Raises:
      TypeError: integer or boolean ``x``; a mask that is neither boolean nor float; ids that are no
        integers.
      ValueError: axes, pattern, mask or ids that do not fit ``x``; ids out of range. In ``jit``
        such ids are errors under checkify only; otherwise their positions count for nothing.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.moments(jnp.array([[1.0, 3.0], [5.0, 9.0]]), "n [c]").var.tolist()
    [[1.0], [4.0]]
    >>> packed, ids = jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 2])
    >>> jn.moments(packed, "[n]", segments=ids, num_segments=3).mean.tolist()
    [2.0, 0.0, 7.0]
    """
    if sizes:
        where, segments = out_of_sizes(sizes, axes, where=where, segments=segments).values()
    x = validation.floating(x)
    where = validation.mask(where, x.shape)
    reduction = with_hint(OF_MOMENTS, resolve, axes, x.shape, sizes)
    centered = validation.flag("centered", centered)
    spec, ids = Spec(reduction, axis_name, centered).along(segments, num_segments)
    return moments_of(spec, x, where, ids)


def merge(first: Moments, *others: Moments) -> Moments:
    """Merge the Moments of several collections into the Moments of all of them.

    Merging is associative and commutative; an empty Moments (count 0) is the identity. Counts are
    exact. Each mean and variance, of float32 at least, has a high and a low part, so that one merge
    after another loses nothing: see :class:`Low`.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> parts = [jn.moments(jnp.array(part), 0) for part in ([1.0, 2.0], [6.0])]
    >>> jn.merge(*parts).mean.tolist()
    [3.0]
    """
    parts = (first, *others)
    for part in parts:
        check_moments("each argument of merge", part)
        validation.floating(part.mean, "mean")
    shapes = list(map(shape_of, parts))
    try:
        shape = jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"merged Moments must have shapes that broadcast: got {', '.join(map(str, shapes))}."
        ) from None
    return jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), _stacked(shape, parts).merge(0))


@partial(jax.jit, static_argnums=0)
def _stacked(shape: tuple[int, ...], parts: tuple[Moments, ...]) -> Moments:
    """Stack Moments along a new first axis, sharded as the first of them."""
    parts = jax.tree.map(jnp.asarray, parts)  # numbers where jit is disabled
    like = jnp.broadcast_to(parts[0].mean, shape)
    stack = lambda *leaves: jnp.stack(
        [sharded_as(like, jnp.broadcast_to(leaf, shape)) for leaf in leaves]
    )
    return jax.tree.map(stack, *map(_with_count_parts, parts))


def from_stats(spec: Spec, stats: Stats) -> Moments:
    """Return the Stats of the engine as Moments, in the units of x.

    The mean has a high part, which is rounded, and a low part, which is the rest.
    """
    scaling, low_mean, var = stats
    if usual_loops(spec).sample:
        # one value for both parts of the mean: each may be computed by a loop of its own
        low_mean = prevent_folding(low_mean)
    count = jnp.full_like(var, total_weight(spec, scaling))
    low_count = low_parts_of_count(usual_loops(spec), scaling.where, scaling.scatter_indices, count)
    mean, rest = (
        (low_mean, jnp.zeros_like(low_mean))
        if scaling.shift is None
        else two_sum(scaling.shift, low_mean)
    )
    up = None if scaling.exponent is None else -scaling.exponent
    low = Low(low_count, scale_down(lax.stop_gradient(rest), up), jnp.zeros_like(var))
    found = Moments(count, scale_down(mean, up), scale_down(scale_down(var, up), up), low)
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, var.shape).reshape(spec.stats_shape), found
    )


def shape_of(moments: Moments) -> tuple[int, ...]:
    """Return the shape to which count, mean and variance broadcast.

    Raises:
      ValueError: they do not broadcast.
    """
    shapes = {name: jnp.shape(getattr(moments, name)) for name in ("count", "mean", "var")}
    try:
        return jnp.broadcast_shapes(*shapes.values())
    except ValueError:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"count, mean and var of Moments must have shapes that broadcast: got {found}."
        ) from None


def check_moments(name: str, value: Any) -> None:
    """Raise TypeError unless a value is Moments whose leaves may be arrays.

    Args:
      name: what errors call the value.
      value: the value of an argument.
    """
    if not isinstance(value, Moments):
        kind = (
            f"those of {type(value).__module__}"
            if type(value).__name__ == "Moments"
            else type(value).__name__
        )
        raise TypeError(
            f"{name} must be Moments: got {kind}. Make them with jaxnorm.moments or "
            "jaxnorm.Moments(count, mean, var)."
        )
    for field in ("count", "mean", "var"):
        if isinstance(leaf := getattr(value, field), list | tuple):
            raise TypeError(
                f"{field} of Moments must be an array: got {type(leaf).__name__}. Make it one with "
                "jnp.asarray."
            )


def applicable(name: str, value: Any, x: jax.Array) -> Moments:
    """Check Moments by which x is normalized, and return them."""
    check_moments(name, value)
    if jnp.iscomplexobj(value.mean) and not jnp.iscomplexobj(x):
        raise TypeError(
            f"x must be complex for complex Moments: got {x.dtype}. Cast it, for example with "
            ".astype(jnp.complex64)."
        )
    return replace(value, var=validation.variance(name, value.var))


def like_batch(running: Moments, shape: tuple[int, ...], features: tuple[int, ...]) -> Moments:
    """Reshape running Moments of the shape of the features to the shape of a batch's Moments."""
    target = tuple(size if axis in features else 1 for axis, size in enumerate(shape))
    sizes = tuple(shape[axis] for axis in features)
    for name in ("count", "mean", "var"):
        given = jnp.shape(getattr(running, name))
        if given not in (target, sizes) and not (name == "count" and math.prod(given) == 1):
            raise ValueError(
                f"running must have the shape of the features, {sizes} or {target}: its {name} has "
                f"{given}."
            )
    one = (1,) * len(shape)
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(
            jnp.reshape(leaf, one if jnp.size(leaf) == 1 else target), target
        ),
        running,
    )


def in_units_of(moments: Moments, scaling: Scaling) -> Moments:
    """Return the Moments in the units of the scale exponent, relative to the shift."""
    mean, low = (scale_down(part, scaling.exponent) for part in (moments.mean, moments.low.mean))
    var = scale_down(scale_down(moments.var, scaling.exponent), scaling.exponent)
    return Moments(
        moments.count,
        (mean if scaling.shift is None else mean - scaling.shift) + prevent_folding(low),
        var,
    )


def moments_of(
    spec: Spec, x: jax.Array, where: jax.Array | None, ids: jax.Array | None = None
) -> Moments:
    """Return the Moments of x, for arguments that have been checked."""
    operation = "moments" if spec.ordinary else None
    plan = select(None, operation, x, spec, Operands(x, where, ids=ids))
    return _moments_of(spec, plan.implementation, x, where, ids)


@partial(jax.jit, static_argnums=(0, 1))
def _moments_of(
    spec: Spec,
    implementation: str,
    x: jax.Array,
    where: jax.Array | None,
    ids: jax.Array | None,
) -> Moments:
    def run(x: jax.Array, where: jax.Array | None, ids: jax.Array | None) -> Moments:
        (where,) = alongside(spec.reduction, x, where)
        x = mask_fill_split(spec, x, where)
        return from_stats(
            spec, find_stats(spec, x, where, implementation, spec.scatter_indices(ids))
        )

    if ids is None:
        return run(x, where, ids)
    return sharded_by_compiler(run, stats_sharding(spec.reduction, x))(x, where, ids)


@partial(jax.jit, static_argnums=0)
def _merged(spec: Spec, parts: Moments, ids: jax.Array | None) -> Moments:
    run = partial(_merge, spec)
    return (
        run(parts)
        if ids is None
        else sharded_by_compiler(run, stats_sharding(spec.reduction, parts.mean))(parts, ids)
    )


def _merge(spec: Spec, parts: Moments, ids: jax.Array | None = None) -> Moments:
    """Merge Moments along the reduction axes.

    With n the counts, N their sum, and p one number near the mean, which keeps digits::

        mean = p + sum(n / N (mean_i - p))
        var  = sum(n / N var_i) + sum(n / N (mean_i - mean)**2)
    """
    loops, scatter_indices = usual_loops(spec), spec.scatter_indices(ids)
    parts, counts = _split(spec, parts)
    totals = _total_counts(spec, counts, scatter_indices)
    to_elements = partial(broadcast_stats, loops, scatter_indices=scatter_indices)
    weight, n = in_segments(spec, counts[0], scatter_indices), to_elements(totals[0])
    # the weight is divided before the product, so that an empty part changes no bit
    share = weight / jnp.where(n > 0, n, 1)
    average = partial(_averages, loops, scatter_indices, weight, share)
    shifts = lax.stop_gradient(average(parts.mean, parts.var))
    lows: tuple[jax.Array, ...] = parts.low[1:]
    # Over devices or by ids a shift may be unknown until the program runs. Where the parts
    # are constants, XLA would then add low to a first, and the sum loses low.
    if spec.axis_name is not None or scatter_indices is not None:
        lows = tuple(map(prevent_folding, lows))
    shifted = [
        mask_fill(a - to_elements(shift) + low, weight)
        for a, shift, low in zip((parts.mean, parts.var), shifts, lows, strict=True)
    ]
    remainders = average(*shifted)
    rest = [a - to_elements(mean) for a, mean in zip(shifted, remainders, strict=True)]
    # the remainders are rounded too, and their errors would add up over merges
    between, *corrections = average(abs_squared(rest[0]), *rest)
    (mean, low_mean), (var, low_var) = map(
        two_sum, shifts, (remainders[0], remainders[1] + between)
    )
    low_mean, low_var = low_mean + corrections[0], low_var + corrections[1]
    low = lax.stop_gradient(Low(low_parts(totals, totals[0]), low_mean, low_var))
    merged = Moments(totals[0], mean, jnp.maximum(var, 0), low)
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, mean.shape).reshape(spec.stats_shape), merged
    )


def _split(spec: Spec, parts: Moments) -> tuple[Moments, Parts]:
    """Return Moments of the split shape, and the three parts of their counts."""
    reduction = spec.reduction
    parts = jax.tree.map(
        lambda leaf: jnp.reshape(leaf, reduction.fit(leaf.shape)), _with_count_parts(parts)
    )
    counts = (parts.count, *parts.low.count)
    summed = tuple(
        size if axis in spec.axes else 1 for axis, size in enumerate(reduction.split_shape)
    )
    # along other axes the counts keep size one where all groups hold as many elements
    shape = jnp.broadcast_shapes(summed, *map(jnp.shape, counts))
    counts = jax.tree.map(lambda count: jnp.broadcast_to(count, shape), counts)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, reduction.split_shape), parts), counts


def _total_counts(spec: Spec, counts: Parts, scatter_indices: ScatterIndices | None) -> Parts:
    """Return the sum of the counts of each group, exactly, as three parts."""
    reduce = (
        None
        if scatter_indices is None
        else partial(spec.segments.reduce, scatter_indices=scatter_indices)
    )
    return sum_parts(counts, spec.whole_axes, spec.axis_name, reduce)


def _averages(
    loops: PlainLoops,
    scatter_indices: ScatterIndices | None,
    weight: jax.Array,
    share: jax.Array,
    *values: jax.Array,
) -> list[jax.Array]:
    """Return averages over each group: ``sum(share * value)`` without values of weight 0."""
    return across(
        lax.psum,
        [
            over_groups(loops, mask_fill(a, weight) * share.astype(a.dtype), scatter_indices)
            for a in values
        ],
        loops.spec.axis_name,
    )


def _with_count_parts(parts: Moments) -> Moments:
    """Return Moments in float32 at least.

    The count has three parts, of the real dtype that belongs to the dtype of the mean.
    """
    mean, var, *low = (
        a.astype(compute_dtype(a.dtype))
        for a in (parts.mean, parts.var, parts.low.mean, parts.low.var)
    )
    low_count = [
        sharded_as(parts.count, part.astype(real_dtype(mean.dtype))) for part in parts.low.count
    ]
    first, second, third = parts_of_count(parts.count, low_count, real_dtype(mean.dtype))
    return Moments(first, mean, var, Low((second, third), *low))
