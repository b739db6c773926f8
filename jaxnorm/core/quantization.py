"""Store arrays in float8, with a scale for each group of elements.

    scale = max(|x|) / largest float8        over the reduction axes; 1 where max(|x|) is 0
    q     = x / scale                        rounded to float8

Compiled together with a norm, the largest element comes from the same loops as the norm's output.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, Reduction, resolve
from jaxnorm.arguments.dtypes import checked_dtype, compute_dtype
from jaxnorm.arguments.keywords import out_of_sizes, with_hint
from jaxnorm.arguments.options import AxisName, Param
from jaxnorm.core.blocks import blocks_of
from jaxnorm.engine.collectives import across, hashable
from jaxnorm.engine.exponents import power_of_two as two_to_the
from jaxnorm.engine.groups import mask_fill
from jaxnorm.engine.sharding import alongside

OF_QUANTIZE = ("axes", "where", "dtype", "power_of_two", "axis_name")


class Quantized(NamedTuple):
    """An array in float8 and its scales.

    Attributes:
      values: float8 array ``q``; ``q * scale`` is near the array that was quantized.
      scale: scale of each group, float32, or float64 for float64. Reduced axes have size one, and a
        split axis ``(b [k])`` has size b.
    """

    values: jax.Array
    scale: jax.Array


def quantize(
    x: ArrayLike,
    /,
    axes: Axes = -1,
    *,
    where: Param = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    power_of_two: bool = False,
    axis_name: AxisName = None,
    **sizes: int,
) -> Quantized:
    """Return ``x`` in float8, with a scale for each group (Micikevicius et al. 2022).

    ``scale = max(|x|) / largest`` over each group, where ``largest`` is the largest number of the
    float8 dtype, and ``q = x / scale``. The axes say what shares a scale: ``-1`` each row,
    ``"[n c]"`` the tensor, ``"n (b [k])"`` with ``k=128`` blocks of 128 features. Quantize the
    output of a norm in the same ``jit``: pass the norm ``dtype=jnp.float32``, so that nothing is
    rounded twice.

    Args:
      x: floating array of any shape.
      axes: the reduction axes: an int, ints, or a pattern such as ``"n (b [k])"``.
      where: boolean mask that broadcasts against ``x``. Elements that it hides do not count, even
        if they are NaN, and become 0.
      dtype: a float8 dtype with a sign, such as ``float8_e4m3fn`` or ``float8_e5m2``.
      power_of_two: round each scale up to a power of two, by which dividing is exact.
      axis_name: name (or names) of a device or vmap axis over which the largest element is taken as
        well.
      **sizes: sizes of split axes in a pattern.

    Returns:
      Quantized, a pair of values and scales. The scale is 1 for a group whose elements are all 0,
      of which none counts, or that has Inf or NaN. Inf becomes the largest number, and NaN stays
      NaN. The scale of other groups is at least the least normal number, 1.2e-38 in float32. Where
      the largest element is below 5.3e-36, or 6.7e-34 for float8_e5m2, the values thus do not reach
      the largest number.

      The scale is a constant under differentiation, and JAX rounds gradients through ``values`` to
      float8; for training take ``x + lax.stop_gradient(dequantize(quantize(x)) - x)``, whose
      gradient is that of ``x``.

    Raises:
      TypeError: integer or complex ``x``; a dtype that is no float8; a mask of weights.
      ValueError: axes, pattern or mask that do not fit ``x``.

    Source: arXiv 2209.05433.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> q, scale = jn.quantize(jnp.array([[1.0, -3.5, 7.0], [0.0, 0.0, 0.0]]))
    >>> q.astype(jnp.float32).tolist(), scale.tolist()
    ([[64.0, -224.0, 448.0], [0.0, 0.0, 0.0]], [[0.015625], [1.0]])
    """
    if sizes:
        (where,) = out_of_sizes(sizes, axes, where=where).values()
    x = validation.real(x, "x")
    dtype = _float8(dtype)
    reduction = with_hint(OF_QUANTIZE, resolve, axes, x.shape, sizes)
    where = validation.mask(where, x.shape)
    if where is not None and where.dtype != jnp.bool_:
        raise TypeError(
            f"where must be a boolean mask: got {where.dtype}. A largest element has no weight."
        )
    power_of_two = validation.flag("power_of_two", power_of_two)
    return _quantized(x, where, reduction, dtype, power_of_two, hashable(axis_name))


def dequantize(quantized: Quantized, /, *, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return ``values * scale``, the array that was quantized up to its rounding.

    Args:
      quantized: a pair of values and scales, as :func:`quantize` returns it.
      dtype: dtype of the result; the product is rounded to it once.

    Raises:
      TypeError: something else than such a pair.
      ValueError: the scales do not fit the values.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[1.0, -3.5, 7.0, 0.0]])
    >>> jn.dequantize(jn.quantize(x, "n (b [k])", k=2)).tolist()
    [[1.0, -3.5, 7.0, 0.0]]
    """
    if not (isinstance(quantized, tuple) and len(quantized) == 2):
        raise TypeError(
            f"dequantize must have values and scales: got {type(quantized).__name__}. Pass what "
            "quantize returns, as one argument."
        )
    values, scale = (
        validation.real(array, name)
        for name, array in zip(Quantized._fields, quantized, strict=True)
    )
    return _product(
        values, scale, blocks_of(scale.shape, values.shape), checked_dtype("dtype", dtype)
    )


def _float8(dtype: DTypeLike) -> jnp.dtype:
    """Return a float8 dtype, if it is one that has a sign."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    named = found is not None and found.name.startswith("float8")
    if found is None or not named or float(jnp.finfo(found).min) >= 0:
        raise TypeError(
            f"dtype must be a float8 with a sign: got {dtype if found is None else found}. Take "
            "float8_e4m3fn or float8_e5m2 of jax.numpy."
        )
    return found


@partial(jax.jit, static_argnames=("reduction", "dtype", "power_of_two", "axis_name"))
def _quantized(
    x: jax.Array,
    where: jax.Array | None,
    reduction: Reduction,
    dtype: jnp.dtype,
    power_of_two: bool,
    axis_name: AxisName,
) -> Quantized:
    """Quantize an array, for arguments that are checked."""
    (where,) = alongside(reduction, x, where)
    u = mask_fill(x.astype(compute_dtype(x.dtype)).reshape(reduction.split_shape), where)
    size = jnp.abs(lax.stop_gradient(u))
    largest = across(lax.pmax, size.max(reduction.axes, keepdims=True, initial=0), axis_name)
    most = jnp.asarray(float(jnp.finfo(dtype).max), u.dtype)
    # the least normal number, since a processor may take smaller ones as 0
    scale = jnp.maximum(largest / most, jnp.finfo(u.dtype).tiny)
    if power_of_two:
        fraction, exponent = jnp.frexp(scale)
        scale = two_to_the(jnp.where(fraction == 0.5, exponent - 1, exponent), u.dtype)
    # chosen for each group: a choice for each element, by isfinite, would make a GPU store u
    scale = jnp.where((largest > 0) & (largest < jnp.inf), scale, 1)
    # the quotient may be rounded up, and beyond the largest number there is NaN
    q = jnp.clip(u / scale, -most, most)
    return Quantized(q.astype(dtype).reshape(x.shape), scale.reshape(reduction.stats_shape))


@partial(jax.jit, static_argnames=("blocks", "dtype"))
def _product(values: jax.Array, scale: jax.Array, blocks: Reduction, dtype: jnp.dtype) -> jax.Array:
    """Multiply values by the scale of their blocks, for arguments that are checked."""
    (scale,) = alongside(blocks, values, scale)
    product = values.reshape(blocks.split_shape).astype(scale.dtype) * scale
    return product.reshape(values.shape).astype(dtype)
