"""EvoNorm: norm and activation in one, found by search (Liu et al. 2020, arXiv 2004.02967).

S0   "n [h w] (g [c])", the deviation of a group
B0   "[n h w] c" and "n [h w] c", the larger of the deviations of batch and instance
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes, in_groups, other_axes, unsplit
from jaxnorm.arguments.features import aligned, checked_divisor, spatial_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run, run_with_moments
from jaxnorm.core.statistics import Moments, applicable, like_batch
from jaxnorm.engine.exponents import scale_down, scaled_epsilon
from jaxnorm.engine.groups import elements, mask_fill, rstd, safe_root
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Stats, plus, statistics, times
from jaxnorm.engine.spec import Spec


@by_keyword
def evonorm_s0(
    x: ArrayLike,
    /,
    v: ArrayLike,
    num_groups: int = 32,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Apply EvoNorm-S0, swish over a group's deviation (Liu et al. 2020, arXiv 2004.02967).

    ``y = x * sigmoid(v * x) / sqrt(var + epsilon) * scale + bias``. It is norm and activation in
    one. The variance is that of group norm: of the group's deviations from its mean. The mean
    itself is not subtracted.

    Args:
      x: real floating array ``(N, ..., C)``; the batch is axis 0. One example ``(C,)`` has no batch
        axis.
      v: the slope in the sigmoid, of the shape of the feature axes; it is usually learned, from 1.
      num_groups: the number of equal groups of neighbouring channels.
      feature_axes: the one axis of channels.
      scale: gain ``(C,)``, of any floating dtype. It is cast to the dtype of the
        statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: ``x`` or ``v`` that is not real floating; a number of groups that is no integer.
      ValueError: groups that do not divide the channels; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x, v = jnp.array([[1.0, 3.0, 10.0, 30.0]]), jnp.zeros(4)  # sigmoid(0) is 1/2
    >>> jn.evonorm_s0(x, v, 2, epsilon=0.0).tolist()
    [[0.5, 1.5, 0.5, 1.5]]
    """
    x = validation.real(x, "x")
    features = canonical_axes(feature_axes, x.ndim, "feature_axes")
    if len(features) != 1 or (features[0] == 0 and x.ndim > 1):
        raise ValueError(
            "evonorm_s0 must have one axis of channels, behind the batch axis 0: got "
            f"feature_axes={feature_axes} for shape {x.shape}."
        )
    num_groups = checked_divisor("num_groups", num_groups, x.shape[features[0]])
    reduction = in_groups(x.shape, other_axes((0, *features), x.ndim), features[0], num_groups)
    call = prepare(
        x,
        reduction,
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        formula=_swish_over_deviation,
        param=_slope(v, x, features),
        **options,
    )
    return run(call)


@by_keyword
def evonorm_b0(
    x: ArrayLike,
    /,
    v: ArrayLike,
    *,
    running: Moments | None = None,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: float = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Apply EvoNorm-B0, a norm by batch or instance (Liu et al. 2020, arXiv 2004.02967).

    ``y = x / maximum(sqrt(batch_var + epsilon), v * x + sqrt(var + epsilon)) * scale + bias``. It
    is norm and activation in one. The variance of each channel is taken over the batch,
    ``batch_var``, and over the positions of each example, ``var``. No mean is subtracted.

    Args:
      x: real floating array ``(N, ..., C)`` with at least one axis between batch and features; the
        batch is axis 0.
      v: the slope in the maximum, of the shape of the feature axes; it is usually learned, from 1.
      running: Moments whose variance replaces that of the batch, in evaluation.
      feature_axes: the axes of the features.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to both variances; a static number.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`; the batch extends over
        ``axis_name``, an example does not.

    Returns:
      The output, of the shape of ``x``, and the Moments of the batch, or ``running`` if it is
      given.

    Raises:
      TypeError: ``x`` or ``v`` that is not real floating; a traced ``epsilon``; ``running`` that
        are no Moments.
      ValueError: no spatial axis; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x, v = jnp.array([[[1.0], [3.0]], [[4.0], [4.0]]]), jnp.zeros(1)
    >>> running = jn.Moments(jnp.ones(1), jnp.zeros(1), jnp.array([4.0]))
    >>> jn.evonorm_b0(x, v, running=running, epsilon=0.0)[0][..., 0].tolist()
    [[0.5, 1.5], [2.0, 2.0]]
    """
    x = validation.real(x, "x")
    features, _ = spatial_axes(x.shape, feature_axes, "evonorm_b0")
    slope, known = _slope(v, x, features), None
    if running is not None:
        known = like_batch(applicable("running", running, x), x.shape, features).var
        options["axis_name"] = None  # nothing of the batch is used
    call = prepare(
        x,
        unsplit(x.shape, other_axes(features, x.ndim)),
        features,
        scale=scale,
        bias=bias,
        epsilon=validation.number("epsilon", epsilon),
        where=where,
        formula=_over_larger_deviation,
        param=(slope, known),
        **options,
    )
    if running is not None:
        return run(call), running
    return run_with_moments(call)


def _slope(v: ArrayLike, x: jax.Array, features: tuple[int, ...]) -> jax.Array:
    (slope,) = aligned(x.shape, features, v=validation.real(v, "v"))
    assert slope is not None
    return slope


def _swish_over_deviation(
    loops: PlainLoops, x: jax.Array, stats: Stats, scale: Any, bias: Any, v: jax.Array
) -> jax.Array:
    """Return ``x * sigmoid(v * x) / sqrt(var + epsilon) * scale + bias``."""
    spec, scaling = loops.spec, stats.scaling._replace(shift=None)
    slope = loops.broadcast_to_elements(v.reshape(spec.reduction.fit(v.shape)))
    # the sigmoid takes x itself, and not x in the units of its group
    swish = jax.nn.sigmoid(times(elements(loops, x, scaling._replace(exponent=None)), slope))
    r = loops.broadcast_to_elements(rstd(loops, scaling, stats.var))
    y = elements(loops, x, scaling) * swish * r
    scale, bias = map(loops.broadcast_to_elements, (scale, bias))
    return plus(times(y, scale), bias)


def _over_larger_deviation(
    loops: PlainLoops, x: jax.Array, stats: Stats, scale: Any, bias: Any, param: tuple
) -> jax.Array:
    """Return ``x / maximum(batch deviation, v * x + instance deviation) * scale + bias``.

    The variance of each example is found in the units of the batch, around the mean of the batch.
    """
    (v, known), (scaling, _, var) = param, stats
    spec, exponent, where = loops.spec, scaling.exponent, scaling.where
    if known is not None:
        var = scale_down(scale_down(known.astype(var.dtype), exponent), exponent)
    spatial = tuple(axis for axis in spec.axes if axis != 0)
    around = mask_fill(elements(loops, x, scaling), where)
    of_example = statistics(loops.of(Spec(unsplit(x.shape, spatial))), around, where).var
    epsilon = scaled_epsilon(loops, exponent, where, var.dtype)
    values = elements(loops, x, scaling._replace(shift=None))
    divisor = jnp.maximum(
        safe_root(var + epsilon), times(values, v) + safe_root(of_example + epsilon)
    )
    # without an epsilon a constant channel divides by 0
    y = jnp.where(divisor == 0, 0, values / jnp.where(divisor == 0, 1, divisor))
    return plus(times(y, scale), bias)
