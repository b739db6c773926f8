"""Norms whose scale and bias are statistics of another array."""

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.features import spatial_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import OF_CORRECTION, prepare, run
from jaxnorm.core.statistics import Moments, moments_of
from jaxnorm.engine.groups import safe_root
from jaxnorm.engine.spec import Spec


@by_keyword
def ada_instance_norm(
    x: ArrayLike,
    /,
    style: ArrayLike,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    style_where: Param = None,
    correction: float = 0,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Give channels the mean and deviation of a style (Huang & Belongie 2017, arXiv 1703.06868).

    Adaptive instance normalization (AdaIN), for the transfer of the style of one image to another:
    ``y = std(style) * (x - mean(x)) / std(x) + mean(style)``, with
    ``std(a) = sqrt(var(a) + epsilon)``. Statistics are over the positions of each channel of each
    example, as in :func:`instance_norm`. The paper defines it so. The PyTorch code in wide use has
    ``correction=1``. The authors' Torch code corrects the variance of the style alone, and adds
    epsilon to the variance of ``x`` alone.

    Args:
      x: floating array ``(N, ..., C)`` with at least one axis between batch and features; the batch
        is axis 0.
      style: floating array of as many axes, and of the same channels. It has positions of its own,
        and the batch of ``x`` or a batch of one example, which is then the style of all.
      feature_axes: the axes that, besides the batch, are not reduced.
      epsilon: added to both variances.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      style_where: a mask likewise of the elements of ``style`` that count. A style that is masked
        out whole has mean 0 and variance 0.
      correction: 1 divides by n - 1 in both variances.
      **options: the options of every norm, see :class:`NormOptions`; ``axis_name`` is of both
        arrays, ``full_range`` of ``x``.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x`` or ``style``.
      ValueError: no spatial axis; axes, a style or masks that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x, style = jnp.array([[[1.0], [3.0]]]), jnp.array([[[10.0], [30.0], [10.0], [30.0]]])
    >>> jn.ada_instance_norm(x, style, epsilon=0.0)[0, :, 0].tolist()
    [10.0, 30.0]
    """
    x, style = validation.floating(x), validation.floating(style, "style")
    features, reduced = spatial_axes(x.shape, feature_axes, "adaptive instance norm")
    _check_style(style.shape, x.shape, features)
    style_where = validation.mask(style_where, style.shape, "style_where", "style")
    scale, bias = _as_parameters(style, style_where, reduced, epsilon, correction, options)
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        correction=correction,
        **options,
    )
    return run(call)


def _as_parameters(
    style: jax.Array,
    where: jax.Array | None,
    reduced: tuple[int, ...],
    epsilon: Any,
    correction: float,
    options: NormOptions,
) -> tuple[jax.Array, jax.Array]:
    """Return the deviation and the mean of a style as scale and bias."""
    correction = validation.number("correction", correction, remedy=OF_CORRECTION)
    epsilon = validation.number_or_traced("epsilon", epsilon)
    spec = Spec(unsplit(style.shape, reduced), options.get("axis_name"))
    found = moments_of(spec, style, where)
    return _deviation(correction, found, epsilon), found.mean


@partial(jax.jit, static_argnums=0)
def _deviation(correction: float, found: Moments, epsilon: ArrayLike) -> jax.Array:
    """Return ``sqrt(var + epsilon)`` of the corrected variance."""
    var = found.var
    if correction:
        count = found.count.astype(var.dtype)
        freedom = count - correction
        var = jnp.where(freedom > 0, var * (count / jnp.where(freedom > 0, freedom, 1)), 0)
    return safe_root(var + jnp.asarray(epsilon, var.dtype))


def _check_style(style: tuple[int, ...], shape: tuple[int, ...], features: tuple[int, ...]) -> None:
    """Raise ValueError unless a style has the rank, the channels and the batch of x."""
    fits = len(style) == len(shape) and style[0] in (1, shape[0])
    if not fits or any(style[axis] != shape[axis] for axis in features):
        raise ValueError(
            "style must have as many axes as x, its channels, and its batch or one example: got "
            f"style of shape {style} for x of shape {shape}."
        )
