"""Normalizing data with given Moments or with its own: the public functions."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.keywords import out_of_sizes, with_hint
from jaxnorm.arguments.options import AxisName, EpsilonIn, Param
from jaxnorm.core.blocks import blocks_along, blocks_of
from jaxnorm.core.call import make_spec, prepare, run
from jaxnorm.core.plan import Plan, usual_loops
from jaxnorm.core.statistics import Moments, applicable, like_batch, shape_of
from jaxnorm.engine.derivatives import with_epsilon
from jaxnorm.engine.groups import Scaling, masked
from jaxnorm.engine.reference import Stats, apply
from jaxnorm.engine.sharding import by_compiler, split_operands
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.engine.xla import prevent_folding

# elements, for a variance whose elements were not counted: no correction changes it
UNCOUNTED = 1e30
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def normalize(
    x: ArrayLike,
    /,
    moments: Moments,
    *,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    correction: float = 0,
    epsilon_in: EpsilonIn = "var",
    dtype: DTypeLike | None = None,
    segments: ArrayLike | None = None,
    axes: Axes | None = None,
    **sizes: int,
) -> jax.Array:
    """Normalize ``x`` by given Moments, for example a running average.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``.

    Args:
      x: floating or complex array.
      moments: mean and variance that broadcast against ``x``. An axis of size g against one of size
        C, with g dividing C, holds the Moments of g equal blocks, as :func:`moments` returns them
        for ``(g [c])``.
      scale: factor that broadcasts against ``x``, of any floating dtype, cast to that of the
        statistics: float32 at least.
      bias: summand that broadcasts against ``x``, of the same dtypes.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``; the output is 0 where they
        are 0, whatever ``x`` holds there.
      correction: 0 uses the biased variance, 1 the unbiased one (needs ``moments.count``).
      epsilon_in: ``"var"`` as above, ``"std"`` for ``/ (sqrt(var) + epsilon)``, ``"max"`` for
        ``/ max(sqrt(var), epsilon)``.
      dtype: dtype of the result; that of ``x`` by default.
      segments: ids along the first of ``axes``, as in :func:`moments`: each position is normalized
        by the Moments of its segment.
      axes: the reduction axes of the Moments of segments; ``moments`` has a size of its own along
        the first of them.
      **sizes: sizes of split axes in a pattern.

    Returns:
      An array of the shape of ``x``. Inside, at least float32. Moments as :func:`moments` returns
      them have a mean in two parts, and give what :func:`standardize` gives; a mean that is one
      number is known to the precision of its dtype. Moments of nothing, of count 0 and variance 0,
      give ``bias``, and gradient 0.

    Raises:
      TypeError: integer or boolean ``x``, or a real one for complex Moments; ``segments`` without
        ``axes``.
      ValueError: shapes that do not fit, negative ``epsilon`` or variance.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[1.0, 3.0], [5.0, 9.0]])
    >>> jn.normalize(x, jn.moments(x, "n [c]"), epsilon=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    >>> x, ids = jnp.array([1.0, 3.0, 10.0, 30.0]), jnp.array([0, 0, 1, 1])
    >>> m = jn.moments(x, "[n]", segments=ids, num_segments=2)
    >>> jn.normalize(x, m, segments=ids, axes="[n]", epsilon=0.0).tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    if sizes:
        where, segments = out_of_sizes(sizes, axes, where=where, segments=segments).values()
    x = validation.floating(x)
    moments = applicable("moments", moments, x)
    blocks, along, ids = with_hint(
        OF_NORMALIZE, blocks_along, shape_of(moments), x.shape, segments, axes, sizes
    )
    scale, bias = validation.param("scale", scale, x.shape), validation.param("bias", bias, x.shape)
    spec, traced_epsilon = make_spec(
        blocks,
        x,
        scale,
        bias,
        epsilon=epsilon,
        correction=correction,
        epsilon_in=epsilon_in,
        dtype=dtype,
        segments=along,
    )
    return _normalize(
        spec,
        moments,
        Operands(x, validation.mask(where, x.shape), scale, bias, ids, traced_epsilon),
    )


def standardize(
    x: ArrayLike,
    /,
    axes: Axes,
    *,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    centered: bool = True,
    correction: float = 0,
    epsilon_in: EpsilonIn = "var",
    axis_name: AxisName = None,
    full_range: bool = False,
    implementation: str | None = None,
    dtype: DTypeLike | None = None,
    batch_invariant: bool = False,
    segments: ArrayLike | None = None,
    num_segments: int | None = None,
    **sizes: int,
) -> jax.Array:
    """Normalize ``x`` by its own statistics over ``axes``.

    It is :func:`moments` and :func:`normalize` in one.

    Residuals of the backward pass are ``x`` and at most a few numbers per group of elements that
    share statistics.

    Args:
      x: floating or complex array.
      axes: the reduction axes: an int, ints, or a pattern such as ``"n [h w] (g [c])"``.
      scale: factor that broadcasts against ``x``, of any floating dtype, cast to that of the
        statistics: float32 at least.
      bias: summand that broadcasts against ``x``, of the same dtypes.
      epsilon: added to the variance; 0 is allowed: a group of equal elements then gives ``bias``,
        and gradient 0, but not with float weights, whose sums are rounded. With any other epsilon
        the gradient of such a group is multiplied by 1 / sqrt(epsilon), but by less where epsilon
        is below 1.2e-38, the smallest normal float32, or below 1.2e-38 times the square of the
        largest element.
      where: boolean mask or float weights that broadcast against ``x``. What is masked out counts
        for nothing, outputs 0 and gets gradient 0, even NaN. A group that is masked out whole is 0
        everywhere.
      centered: False divides by the root mean square and subtracts nothing.
      correction: 0 for the biased variance, 1 for the unbiased one; a group of no more elements
        than that has variance 0.
      epsilon_in: ``"var"`` for ``sqrt(var + epsilon)``, ``"std"`` for ``sqrt(var) + epsilon``,
        ``"max"`` for ``max(sqrt(var), epsilon)``. The maximum has no gradient where epsilon is the
        larger of the two.
      axis_name: name (or names) of a device or vmap axis to reduce over as well, weighted by count.
      full_range: first divides each group by a power of two, which keeps elements of any size
        (1e-30, 3e38) accurate, for 1.2 to 2 times the work in plain JAX (bfloat16 input and
        ``epsilon`` below 1e-30 always do).
      implementation: None selects automatically, see :func:`plan`; ``"native"`` is a CPU kernel,
        see :mod:`jaxnorm.kernels`, ``"xla"`` is plain JAX, and ``"reference"`` is plain JAX without
        optimization barriers, merged axes and recomputed statistics.
      dtype: dtype of the result; that of ``x`` by default.
      batch_invariant: whether the bits of a group must not depend on the other groups, see
        :class:`NormOptions`.
      segments: ids along the first reduction axis, as in :func:`moments`: each segment is
        normalized by itself, in plain JAX.
      num_segments: how many segments there are.
      **sizes: sizes of split axes in a pattern.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer or boolean ``x``; ids that are no integers.
      ValueError: axes, pattern, mask, parameters or ids that do not fit ``x``; a negative
        ``epsilon``; ids out of range (in ``jit`` found under checkify; otherwise their positions
        give NaN).

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.standardize(jnp.array([[1.0, 3.0], [5.0, 9.0]]), "n [c]", epsilon=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    >>> packed, ids = jnp.array([1.0, 10.0, 3.0, 30.0]), jnp.array([0, 1, 0, 1])
    >>> jn.standardize(packed, "[n]", segments=ids, num_segments=2, epsilon=0.0).tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    if sizes:
        where, segments = out_of_sizes(sizes, axes, where=where, segments=segments).values()
    x = validation.floating(x)
    call = prepare(
        x,
        with_hint(OF_STANDARDIZE, resolve, axes, x.shape, sizes),
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        centered=centered,
        correction=correction,
        epsilon_in=epsilon_in,
        axis_name=axis_name,
        full_range=full_range,
        implementation=implementation,
        dtype=dtype,
        batch_invariant=batch_invariant,
        segments=segments,
        num_segments=num_segments,
    )
    return run(call)


def takes_arguments_of(
    _: Callable[Arguments, Any],
) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Tell type checkers that a function takes the arguments of another function.

    Its result has the type that it says itself.
    """
    return lambda function: cast(Callable[Arguments, Result], function)


@takes_arguments_of(standardize)
def plan(*arguments: Any, **options: Any) -> Plan:
    """Return the plan of :func:`standardize`: which implementation would run, and why no other.

    It also says how reverse mode would compute the gradients.

    ``plan(x, axes, **options)`` takes the arguments of :func:`standardize`.

    Returns:
      A Plan, which prints itself: ``implementation`` is the name, ``derivative`` says how the
      gradients are computed, and ``others`` holds the reason for each other name.

    Raises:
      TypeError: as :func:`standardize`.
      ValueError: as :func:`standardize`; an implementation that cannot take these arguments.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.plan(jnp.ones((4, 3)), "n [c]", implementation="xla")
    xla
      gradients: a formula in plain JAX, which recomputes the statistics
      not reference: implementation='xla' is asked for
      not native: implementation='xla' is asked for
      not pallas: implementation='xla' is asked for
    """
    given = signature(standardize).bind(*arguments, **options)
    given.apply_defaults()
    x, axes, sizes = (given.arguments.pop(name) for name in ("x", "axes", "sizes"))
    named = {name: given.arguments[name] for name in ("where", "segments")}
    given.arguments.update(out_of_sizes(sizes, axes, **named))
    x = validation.floating(x)
    reduction = with_hint(OF_STANDARDIZE, resolve, axes, x.shape, sizes)
    return prepare(x, reduction, **given.arguments).plan()


# help() then shows the arguments by name.
plan.__signature__ = signature(standardize).replace(return_annotation=Plan)  # type: ignore[attr-defined]

OF_NORMALIZE, OF_STANDARDIZE = (
    [name for name in signature(function).parameters if name not in ("x", "sizes")]
    for function in (normalize, standardize)
)


def with_running(
    x: jax.Array,
    running: Moments,
    features: tuple[int, ...],
    *,
    scale: Param,
    bias: Param,
    epsilon: ArrayLike,
    where: Param,
    dtype: DTypeLike | None = None,
    mask_name: str = "where",
) -> jax.Array:
    """Normalize by running statistics, as batch norm does in evaluation.

    Running statistics and parameters have the shape of the feature axes.
    """
    moments = like_batch(applicable("moments", running, x), x.shape, features)
    scale, bias = aligned(x.shape, features, scale=scale, bias=bias)
    blocks = blocks_of(shape_of(moments), x.shape)
    spec, traced = make_spec(blocks, x, scale, bias, epsilon=epsilon, dtype=dtype)
    where = validation.mask(where, x.shape, mask_name)
    return _normalize(spec, moments, Operands(x, where, scale, bias, epsilon=traced))


@partial(jax.jit, static_argnums=0)
def _normalize(spec: Spec, moments: Moments, operands: Operands) -> jax.Array:
    def each(operands: Operands, moments: Moments) -> jax.Array:
        operands, loops = split_operands(spec, operands), usual_loops(spec)
        dtype = compute_dtype(operands.x.dtype)
        fitted = lambda leaf: jnp.asarray(leaf).reshape(spec.reduction.fit(jnp.shape(leaf)))
        n, var = (fitted(leaf).astype(real_dtype(dtype)) for leaf in (moments.count, moments.var))
        mean, low_mean = (fitted(leaf).astype(dtype) for leaf in (moments.mean, moments.low.mean))
        low_mean = prevent_folding(low_mean)
        stats = with_epsilon(
            spec,
            Stats(
                Scaling(n, None, mean, operands.where, spec.scatter_indices(operands.ids)),
                low_mean,
                var,
            ),
            operands.epsilon,
        )
        known = (n > 0) | (var > 0)  # Moments of nothing have no deviation to divide by
        stats = stats._replace(scaling=stats.scaling._replace(n=jnp.where(n > 0, n, UNCOUNTED)))
        applied = lambda own: (
            jax.checkpoint(partial(apply, loops))(own.x, stats, own.scale, own.bias, known),
            None,
        )
        return masked(spec, operands, applied)[0]

    return by_compiler(each, operands)(operands, moments)
