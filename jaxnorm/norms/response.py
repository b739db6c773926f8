"""Norms that divide a channel by the size of its response: by its squares, without a mean.

filter response norm    "n [h w] c", not centered, and a threshold
global response norm    "n [h w] c", compared with the other channels
"""

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import other_axes, unsplit
from jaxnorm.arguments.features import aligned, spatial_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run
from jaxnorm.engine.exponents import scale_down, scaled_epsilon
from jaxnorm.engine.groups import elements, mask_fill, safe_root, total_weight
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Stats, plus, times


@by_keyword
def filter_response_norm(
    x: ArrayLike,
    /,
    *,
    threshold: Param = None,
    scale: Param = None,
    bias: Param = None,
    feature_axes: int | tuple[int, ...] = -1,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Divide each channel of each example by its RMS (Singh & Krishnan 2019, arXiv 1911.09737).

    Filter response normalization (FRN), with statistics over positions, and the thresholded linear
    unit (TLU): ``y = maximum(x / sqrt(mean(x**2) + epsilon) * scale + bias, threshold)``. No
    example depends on another, and no mean is subtracted. The threshold takes the place of ReLU.

    Args:
      x: floating array ``(N, ..., C)`` with at least one axis between batch and features; the batch
        is axis 0.
      threshold: the least output, of the shape of the feature axes; None for no threshold. It is
        cast to the dtype of the output.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      feature_axes: the axes that, besides the batch, are not reduced.
      epsilon: added to the mean square; it may be traced. For feature maps of one position the
        paper learns a number e and passes ``1e-6 + abs(e)``.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0, whatever the threshold is.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``; complex ``x`` with a threshold.
      ValueError: no spatial axis; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[[3.0], [-3.0]], [[-20.0], [20.0]]])
    >>> jn.filter_response_norm(x, epsilon=0.0)[..., 0].tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    >>> jn.filter_response_norm(x, threshold=jnp.array([0.5]), epsilon=0.0)[..., 0].tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    x = validation.floating(x) if threshold is None else validation.real(x, "x")
    features, spatial = spatial_axes(x.shape, feature_axes, "filter response norm")
    call = prepare(
        x,
        unsplit(x.shape, spatial),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        centered=False,
        **options,
    )
    if threshold is None:
        return run(call)
    (least,) = aligned(x.shape, features, threshold=validation.real(threshold, "threshold"))
    return _at_least(run(call), least, call.operands.where)


@jax.jit
def _at_least(y: jax.Array, least: jax.Array, where: jax.Array | None) -> jax.Array:
    # the larger of two rounded numbers is the rounded larger number
    return mask_fill(jnp.maximum(y, least.astype(y.dtype)), where)


@by_keyword
def global_response_norm(
    x: ArrayLike,
    /,
    *,
    scale: Param = None,
    bias: Param = None,
    feature_axes: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Multiply each channel by its share in the response (Woo et al. 2023, arXiv 2301.00808).

    Global response normalization (GRN) of ConvNeXt V2, which makes channels compete. It adds its
    result to ``x``: ``y = scale * x * g / (mean(g) + epsilon) + bias + x``, with the length
    ``g = sqrt(sum(x**2))`` of each channel of each example over its positions. The mean of g is
    taken over the channels. With a scale and a bias of 0, where training starts, ``y = x``.

    Args:
      x: floating array ``(N, ..., C)`` with at least one axis between batch and features; the batch
        is axis 0.
      scale: gain of the shape of the feature axes, of any floating dtype; None for 1. It is cast to
        the dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      feature_axes: the axes of the channels.
      epsilon: added to the mean of g, outside of the root; a static number.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0. Weights multiply the
        squares. A channel without an element that counts does not enter the mean of g.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``. Where all of a channel is 0, g has gradient 0.

    Raises:
      TypeError: integer ``x``, a traced ``epsilon``.
      ValueError: no spatial axis; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[[3.0, 0.0], [4.0, 15.0]]])  # channels of length 5 and 15, on average 10
    >>> jn.global_response_norm(x, scale=jnp.array([2.0, 2.0]), epsilon=0.0).tolist()
    [[[6.0, 0.0], [8.0, 60.0]]]
    """
    x = validation.floating(x)
    features, spatial = spatial_axes(x.shape, feature_axes, "global response norm")
    call = prepare(
        x,
        unsplit(x.shape, spatial),
        features,
        scale=scale,
        bias=bias,
        epsilon=validation.number("epsilon", epsilon),
        epsilon_in="std",  # it has the unit of x, and not of the squares
        where=where,
        centered=False,
        formula=_with_response,
        **options,
    )
    return run(call)


def _with_response(
    loops: PlainLoops, x: jax.Array, stats: Stats, scale: Any, bias: Any, _: None
) -> jax.Array:
    """Return ``x * (1 + scale * share) + bias``, with the share of each channel."""
    scaling = stats.scaling
    gain = loops.compute_first(1 + times(_share(loops, stats), scale))
    values = elements(loops, x, scaling._replace(exponent=None))
    return plus(times(values, gain), bias)


def _share(loops: PlainLoops, stats: Stats) -> jax.Array:
    """Return ``g / (mean(g) + epsilon)`` of each channel, and 0 where that divides by 0.

    Each channel has a scale exponent of its own, so that the squares of a weak one do not vanish
    next to a strong one. The lengths are compared in the units of the largest exponent.
    """
    spec, (scaling, _, square) = loops.spec, stats
    channels = other_axes((0, *spec.axes), square.ndim)
    n = jnp.asarray(total_weight(spec, scaling), square.dtype)
    length, exponent = safe_root(square) * jnp.sqrt(n), scaling.exponent
    if exponent is not None:
        over_channels = partial(loops.reduce_axes, exponent.astype(jnp.int32), channels)
        # a channel of zeros has no size, and must not set the unit
        known = jnp.where(square > 0, exponent.astype(jnp.int32), over_channels(jnp.min))
        exponent = jnp.max(known, channels, keepdims=True)
        smaller = jnp.minimum(exponent - known, -jnp.finfo(length.dtype).minexp)
        length = scale_down(length, smaller)
    counts = jnp.broadcast_to(n > 0, square.shape).astype(square.dtype)
    mean = loops.divide(*(loops.reduce_axes(a, channels) for a in (length, counts)))
    total = mean + scaled_epsilon(loops, exponent, scaling.where, mean.dtype)
    return jnp.where(total == 0, 0, length / jnp.where(total == 0, 1, total))
