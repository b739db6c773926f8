"""Bounded functions of each element, which take the place of norms and have no statistics."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import Param
from jaxnorm.engine.groups import mask_fill
from jaxnorm.engine.sharding import alongside


@by_keyword
def dynamic_tanh(
    x: ArrayLike,
    /,
    alpha: ArrayLike,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    where: Param = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Bound each element by tanh in place of a norm (Zhu et al. 2025, arXiv 2503.10622).

    Dynamic tanh (DyT): ``y = tanh(alpha * x) * scale + bias``. There are no statistics: each
    element stands for itself. The paper starts ``alpha`` at 0.5. Everything is computed in float32
    at least, and rounded once.

    Args:
      x: real floating array, for example ``(..., C)``.
      alpha: one number, or an array of shape ``(1,)`` or of a shape that ``scale`` may have.
      feature_axes: the axes along which scale and bias lie.
      scale: gain of the shape of the feature axes, of any floating dtype.
      bias: shift of the same shape as ``scale``, of any floating dtype.
      where: boolean mask or float weights that broadcast against ``x``. Where it is 0 the output
        is 0 and the gradient too, even if the element is NaN.
      dtype: dtype of the output; by default the dtype of ``x``.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: ``x`` that is integer or complex.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.dynamic_tanh(jnp.array([0.0, 100.0, -100.0]), 0.5, bias=jnp.ones(3)).tolist()
    [1.0, 2.0, 0.0]
    """
    return bounded(
        jnp.tanh,
        x,
        alpha,
        None,
        feature_axes=feature_axes,
        scale=scale,
        bias=bias,
        where=where,
        dtype=dtype,
    )


@by_keyword
def dynamic_erf(
    x: ArrayLike,
    /,
    alpha: ArrayLike,
    shift: ArrayLike | None = None,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    where: Param = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Bound each element by erf in place of a norm (Chen et al. 2025, arXiv 2512.10938).

    Dynamic erf (Derf): ``y = erf(alpha * x + shift) * scale + bias``. There are no statistics: each
    element stands for itself. The paper starts ``alpha`` at 0.5, and at 1 in language models, and
    ``shift`` at 0. Everything is computed in float32 at least, and rounded once.

    Args:
      x: real floating array, for example ``(..., C)``.
      alpha: one number, or an array of shape ``(1,)`` or of a shape that ``scale`` may have.
      shift: added to ``alpha * x``; of a shape that ``alpha`` may have.
      feature_axes: the axes along which scale and bias lie.
      scale: gain of the shape of the feature axes, of any floating dtype.
      bias: shift of the output, of the same shape as ``scale`` and of any floating dtype.
      where: boolean mask or float weights that broadcast against ``x``. Where it is 0 the output
        is 0 and the gradient too, even if the element is NaN.
      dtype: dtype of the output; by default the dtype of ``x``.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: ``x`` that is integer or complex.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.dynamic_erf(jnp.array([2.0, 100.0, -100.0]), 0.5, -1.0, scale=jnp.ones(3) * 3).tolist()
    [0.0, 3.0, -3.0]
    """
    return bounded(
        lax.erf,
        x,
        alpha,
        shift,
        feature_axes=feature_axes,
        scale=scale,
        bias=bias,
        where=where,
        dtype=dtype,
    )


def bounded(
    function: Callable[[jax.Array], jax.Array],
    x: ArrayLike,
    alpha: ArrayLike,
    shift: ArrayLike | None,
    *,
    feature_axes: int | tuple[int, ...],
    scale: Param,
    bias: Param,
    where: Param,
    dtype: DTypeLike | None,
    mask_name: str = "where",
) -> jax.Array:
    """Check the arguments, and return ``function(alpha * x + shift) * scale + bias``."""
    x = validation.real(x, "x")
    features = canonical_axes(feature_axes, x.ndim, "feature_axes")
    where = validation.mask(where, x.shape, mask_name)
    given = {
        "alpha": _coefficient("alpha", alpha, x.shape, features),
        "shift": _coefficient("shift", shift, x.shape, features),
        "scale": aligned(x.shape, features, scale=scale)[0],
        "bias": aligned(x.shape, features, bias=bias)[0],
    }
    dtypes = {name: value.dtype for name, value in given.items() if value is not None}
    output = validation.output_dtype(dtype, x=x.dtype, **dtypes)
    return _bounded(x, where, **given, function=function, dtype=output)


def _coefficient(
    name: str, value: ArrayLike | None, shape: tuple[int, ...], features: tuple[int, ...]
) -> jax.Array | None:
    """Return one number as an array without axes, and others as arrays aligned with ``shape``."""
    if value is None and name == "shift":
        return None
    value = validation.real(float(value) if isinstance(value, int) else value, name)
    if value.shape in ((), (1,)):
        return value.reshape(())
    return aligned(shape, features, **{name: value})[0]


@partial(jax.jit, static_argnames=("function", "dtype"))
def _bounded(
    x: jax.Array,
    where: jax.Array | None,
    *,
    alpha: jax.Array,
    shift: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    function: Callable[[jax.Array], jax.Array],
    dtype: jnp.dtype,
) -> jax.Array:
    wide = promoted(None, jnp.float32, x, alpha, shift, scale, bias)
    arrays = (where, alpha, shift, scale, bias)
    where, alpha, shift, scale, bias = alongside(unsplit(x.shape, ()), x, *arrays)
    # Masked before the function too, whose derivative at NaN would be NaN.
    y = mask_fill(x, where).astype(wide) * alpha.astype(wide)
    y = function(y if shift is None else y + shift.astype(wide))
    y = y if scale is None else y * scale.astype(wide)
    y = y if bias is None else y + bias.astype(wide)
    return mask_fill(y, where).astype(dtype)
