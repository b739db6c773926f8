"""Norms of the nodes of each graph.

Both norms change the statistics of a graph before they are applied. The function that does
so is the ``adjust`` of :class:`jaxnorm.engine.spec.Spec`.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.arguments.features import aligned, spatial_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run
from jaxnorm.engine.groups import abs_squared
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Stats, times


@by_keyword
def graph_norm(
    x: ArrayLike,
    /,
    mean_scale: ArrayLike,
    *,
    segments: ArrayLike | None = None,
    num_segments: int | None = None,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Normalize each channel over the nodes of each graph (Cai et al. 2020, arXiv 2009.03294).

    Graph normalization subtracts a learned part of the mean.

    ``d = x - mean_scale * mean``, ``y = d / sqrt(mean(d**2) + epsilon) * scale + bias``. Where
    all nodes are alike, as in regular graphs, only the mean tells the graphs apart.

    Args:
      x: floating array ``(N, C)``: the nodes of all graphs, one after the other or mixed.
        Or a batch ``(B, N, C)`` of such arrays.
      mean_scale: the part of the mean that is subtracted, of the shape of the feature axes;
        1 is instance norm.
      segments: the id of the graph of each node, see :func:`moments`. Without ids all nodes
        of ``x``, or of each example of a batch, are one graph.
      num_segments: the number of graphs.
      feature_axes: the axes of the channels.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the mean square.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``, ids that are no integers.
      ValueError: axes, mask, parameters or ids that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> nodes, ids = jnp.array([[1.0], [3.0], [5.0], [5.0]]), jnp.array([0, 0, 1, 1])
    >>> options = {"segments": ids, "num_segments": 2, "epsilon": 0.0}
    >>> jn.graph_norm(nodes, jnp.ones(1), **options)[:, 0].tolist()
    [-1.0, 1.0, 0.0, 0.0]
    >>> jn.graph_norm(nodes, jnp.zeros(1), **options)[2:, 0].tolist()
    [1.0, 1.0]
    """
    x = validation.floating(x)
    # The nodes of all graphs may lie along axis 0, without a batch.
    features, nodes = spatial_axes(x.shape, feature_axes, "graph norm", packed=True)
    mean_scale = (validation.floating if jnp.iscomplexobj(x) else validation.real)(
        mean_scale, "mean_scale"
    )
    if mean_scale.shape != (sizes := tuple(x.shape[axis] for axis in features)):
        raise ValueError(
            f"mean_scale must have the shape of the feature axes, {sizes}: got {mean_scale.shape}."
        )
    # In bfloat16 the difference 1 - mean_scale would be rounded to 8 bits.
    dtype = np.promote_types(compute_dtype(x.dtype), compute_dtype(mean_scale.dtype))
    (remaining,) = aligned(x.shape, features, mean_scale=1 - mean_scale.astype(dtype))
    call = prepare(
        x,
        unsplit(x.shape, nodes),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        segments=segments,
        num_segments=num_segments,
        adjust=_leave_of_mean,
        param=remaining,
        **options,
    )
    return run(call)


@by_keyword
def pair_norm(
    x: ArrayLike,
    /,
    length: ArrayLike = 1.0,
    *,
    segments: ArrayLike | None = None,
    num_segments: int | None = None,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Normalize the distances between nodes of each graph (Zhao & Akoglu 2019, arXiv 1909.12223).

    Pair normalization keeps the sum of all distances the same from layer to layer.

    ``d = x - mean``, ``y = length * d / sqrt(mean(|d|**2) + epsilon)``. The mean of ``x`` is
    taken for each channel over the nodes of each graph. ``|d|**2`` is the squared length of a
    node: the sum of squares over all channels.

    Args:
      x: floating array ``(N, C)``: the nodes of all graphs, one after the other or mixed.
        Or a batch ``(B, N, C)`` of such arrays.
      length: the root mean square length of the nodes in the output, the paper's s.
      segments: the id of the graph of each node, see :func:`moments`. Without ids all nodes
        of ``x``, or of each example of a batch, are one graph.
      num_segments: the number of graphs.
      feature_axes: the axes of the channels.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the mean square.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``, ids that are no integers.
      ValueError: axes, mask, parameters or ids that do not fit; a length that is not one number.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> nodes = jnp.array([[3.0, 0.0], [-3.0, 8.0]])
    >>> jn.pair_norm(nodes, 5.0, epsilon=0.0).tolist()
    [[3.0, -4.0], [-3.0, 4.0]]
    """
    x = validation.floating(x)
    features, nodes = spatial_axes(x.shape, feature_axes, "pair norm", packed=True)
    if jnp.ndim(length):
        raise ValueError(
            f"length must be one number: got shape {jnp.shape(length)}. Pass a scale for one gain "
            "per channel."
        )
    length = jnp.asarray(
        validation.number_or_traced("length", length), real_dtype(compute_dtype(x.dtype))
    )
    # The length, which may be traced, becomes part of the gain: one factor fewer at
    # each element.
    gain = (
        jnp.ones([x.shape[axis] for axis in features], length.dtype)
        if scale is None
        else validation.floating(scale, "scale")
    )
    scale = times(length, gain)
    call = prepare(
        x,
        unsplit(x.shape, nodes),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        segments=segments,
        num_segments=num_segments,
        adjust=_sum_over_channels,
        exponent_axes=features,
        **options,
    )
    return run(call)


def _leave_of_mean(loops: PlainLoops, stats: Stats, remaining: jax.Array) -> Stats:
    """Change statistics so that a part of the mean remains in the output.

    With m the mean, r the remaining part of it, and d = x - (m - r m)::

        mean(d) = r m,   mean(d**2) = var + |r m|**2
    """
    scaling, low_mean, var = stats
    mean = remaining.astype(low_mean.dtype) * (scaling.shift + low_mean)
    return Stats(scaling, low_mean - mean, var + abs_squared(mean))


def _sum_over_channels(loops: PlainLoops, stats: Stats, _: None) -> Stats:
    """Return the mean squared length of the nodes as the variance of each channel.

    It is the sum of the variances over channels. ``exponent_axes`` gives all channels of a
    graph the same power of two, because only variances with one unit can be added.
    """
    return stats._replace(var=loops.reduce_axes(stats.var, loops.spec.exponent_axes))
