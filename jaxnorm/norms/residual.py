"""Norms of a sum: the residual connection in front of a norm, in one step with it."""

from typing import Literal, Unpack

import jax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, unsplit, whole
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run_of_sum
from jaxnorm.core.rounding import Rounding

NORMS = ("rms", "layer")


@by_keyword
def add_norm(
    x: ArrayLike,
    /,
    residual: ArrayLike,
    *,
    norm: Literal["rms", "layer"] = "rms",
    axes: Axes = -1,
    scale: Param = None,
    scale_offset: float = 0,
    rounding: Rounding = "once",
    bias: Param = None,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, jax.Array]:
    """Add a residual, and normalize the sum: ``h = x + residual``, ``y = norm(h)``.

    A transformer that normalizes in front of each block (Xiong et al. 2020, arXiv 2002.04745) adds
    the result of a block to its residual stream, and normalizes the stream for the next block:

        y, stream = jn.add_norm(block(y), stream, scale=scale)

    With ``norm="rms"``, ``y = h / sqrt(mean(h**2) + epsilon) * scale + bias``; with ``"layer"``,
    ``y = (h - mean(h)) / sqrt(var(h) + epsilon) * scale + bias``.

    On a TPU one kernel reads x and the residual and writes both results, see
    :mod:`jaxnorm.kernels`; its gradient also is one kernel. Elsewhere it is the sum, and then the
    norm.

    Args:
      x: floating array ``(..., C)``, for example the result of a block.
      residual: array of the shape of ``x``, for example the residual stream.
      norm: ``"rms"`` or ``"layer"``.
      axes: the reduction axes, which are the feature axes too.
      scale: gain of the shape of the reduction axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      scale_offset: a number that is added to ``scale`` in the dtype of the statistics: with 1 the
        gain is ``1 + scale``, as in Gemma.
      rounding: where half precision is rounded. ``"once"`` rounds ``y`` alone. ``"twice"`` also
        rounds the normalized ``x`` to its dtype, and each product and sum with a parameter of half
        precision, as Llama does. ``"input"`` rounds every operation to the dtype of ``x`` but the
        sums in the means, as Google's Gemma does; plain JAX computes it.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance or the mean square.
      where: boolean mask or float weights that broadcast against ``x``. Elements of the sum where
        it is 0 do not count, even if they are NaN, and are 0 in ``y``. The sum has them.
      **options: the options of every norm, see :class:`NormOptions`; ``dtype`` is that of ``y``.

    Returns:
      ``y`` and the sum. The sum has the dtype to which ``x`` and ``residual`` promote, and ``y``
      too by default.

    Raises:
      TypeError: integer ``x`` or ``residual``.
      ValueError: a residual of another shape; an unknown norm; axes, mask or parameters that do
        not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> y, h = jn.add_norm(jnp.array([[1.0, -2.0]]), jnp.array([[2.0, -1.0]]), epsilon=0.0)
    >>> y.tolist(), h.tolist()
    ([[1.0, -1.0]], [[3.0, -3.0]])
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be 'rms' or 'layer': got {norm!r}.")
    x, residual = validation.summands(x, residual)
    reduced = whole(axes, x.shape)
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        reduced,
        scale=scale,
        scale_offset=scale_offset,
        rounding=rounding,
        bias=bias,
        epsilon=epsilon,
        where=where,
        centered=norm == "layer",
        **options,
    )
    return run_of_sum(call, residual)
