"""Reversible instance norm of time series: a norm and its inverse, by the Moments of the series."""

from functools import partial
from typing import Unpack

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, other_axes, unsplit, whole
from jaxnorm.arguments.dtypes import compute_dtype, promoted, real_dtype
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run_with_moments
from jaxnorm.core.statistics import Moments, applicable, shape_of
from jaxnorm.engine.groups import mask_fill, safe_root
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Stats
from jaxnorm.engine.xla import prevent_folding


@by_keyword
def reversible_instance_norm(
    x: ArrayLike,
    /,
    *,
    axes: Axes = 1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Normalize each time series, and return what undoes it (RevIN, Kim et al. 2022, ICLR).

    Reversible instance normalization, with statistics over time for each example and channel:
    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. A model forecasts from y, and
    :func:`reverse_instance_norm` returns its forecast to the level and the scale of the series.
    Both treat mean and variance as constants: no gradient flows through them.

    Args:
      x: floating array, for example ``(batch, time, channels)``.
      axes: the reduction axes, the axis of time by default.
      scale: gain of the shape of the axes that are neither reduced nor axis 0, ``(channels,)``, of
        any floating dtype. It is cast to the dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      The output, of the shape of ``x``, and the Moments of each series, whose reduction axes have
      size one. They are in the units of ``x``: the inverse needs a variance within the range of
      their dtype.

    Raises:
      TypeError: integer ``x``.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> series = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> y, moments = jn.reversible_instance_norm(series, epsilon=0.0)
    >>> y[..., 0].tolist(), moments.mean[..., 0].tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]])
    >>> jn.reverse_instance_norm(jnp.zeros((2, 1, 1)), moments, epsilon=0.0)[..., 0].tolist()
    [[2.0], [20.0]]
    """
    x = validation.floating(x)
    reduced = whole(axes, x.shape)
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        other_axes((0, *reduced), x.ndim),
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        adjust=_held,
        **options,
    )
    y, moments = run_with_moments(call)
    return y, lax.stop_gradient(moments)


def _held(loops: PlainLoops, stats: Stats, _: None) -> Stats:
    """Return the statistics as constants under differentiation."""
    low_mean, var = lax.stop_gradient((stats.low_mean, stats.var))
    return stats._replace(low_mean=low_mean, var=var)


@by_keyword
def reverse_instance_norm(
    x: ArrayLike,
    /,
    moments: Moments,
    *,
    axes: Axes = 1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Undo :func:`reversible_instance_norm` by the Moments of the series (Kim et al. 2022, ICLR).

    ``y = (x - bias) / (scale + epsilon**2) * sqrt(var + epsilon) + mean``. As in the authors'
    program, the square of epsilon keeps a gain of 0 from dividing by 0.

    Args:
      x: floating array, for example a forecast ``(batch, horizon, channels)`` of the normalized
        series. Its size along the reduction axes may differ from the series'.
      moments: the Moments of the series, as :func:`reversible_instance_norm` returns them.
      axes: the reduction axes of the series, the axis of time by default.
      scale: the gain of the norm, of any floating dtype.
      bias: the shift of the norm.
      epsilon: the number that the norm adds to the variance; static.
      where: boolean mask or float weights that broadcast against ``x``. Where it is 0 the outputs
        are 0, whatever ``x`` holds, and gradients are 0.
      dtype: dtype of the output; by default the dtype of ``x``.

    Returns:
      An array of the shape of ``x``, computed in float32 at least and rounded once. The mean has a
      high and a low part, so that a large offset costs no digits but those of the dtype.

    Raises:
      TypeError: integer ``x``; ``moments`` that are no Moments, or complex ones for a real ``x``.
      ValueError: axes, moments, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> moments = jn.Moments(jnp.array(2.0), jnp.array(20.0), jnp.array(100.0))
    >>> jn.reverse_instance_norm(jnp.array([[[-1.0], [2.0]]]), moments)[..., 0].round(3).tolist()
    [[10.0, 40.0]]
    """
    return reverse(
        x, moments, axes=axes, scale=scale, bias=bias, epsilon=epsilon, where=where, dtype=dtype
    )


def reverse(
    x: ArrayLike,
    moments: Moments,
    *,
    axes: Axes,
    scale: Param,
    bias: Param,
    epsilon: ArrayLike,
    where: Param,
    dtype: DTypeLike | None,
    mask_name: str = "where",
) -> jax.Array:
    """Return :func:`reverse_instance_norm` with a name for ``where`` in errors."""
    x = validation.floating(x)
    moments = applicable("moments", moments, x)
    validation.check_fits("moments", shape_of(moments), x.shape)
    features = other_axes((0, *whole(axes, x.shape)), x.ndim)
    scale, bias = aligned(x.shape, features, scale=scale, bias=bias)
    given = {name: a.dtype for name, a in (("scale", scale), ("bias", bias)) if a is not None}
    output = validation.output_dtype(dtype, x=x.dtype, **given)
    where = validation.mask(where, x.shape, mask_name)
    return _reversed(validation.number("epsilon", epsilon), output, x, moments, scale, bias, where)


@partial(jax.jit, static_argnums=(0, 1))
def _reversed(epsilon: float, dtype, x, moments: Moments, scale, bias, where) -> jax.Array:
    given = [a for a in (x, moments.mean, scale, bias) if a is not None]
    held = promoted(None, *(compute_dtype(a.dtype) for a in given))
    as_held = lambda a: a.astype(held)
    z = mask_fill(as_held(x), where)
    if bias is not None:
        z = z - as_held(bias)
    if scale is not None:
        z = z / (as_held(scale) + epsilon**2)
    root = as_held(safe_root(moments.var.astype(real_dtype(held)) + epsilon))
    # the low part goes first: added to the mean itself, it would be lost in rounding
    low, mean = prevent_folding(as_held(moments.low.mean)), as_held(moments.mean)
    return mask_fill((z * root + low) + mean, where).astype(dtype)
