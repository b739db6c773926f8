"""Norms of graphs: of the nodes of each graph, whose statistics are changed before they are applied."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm import validation
from jaxnorm.axes import unsplit
from jaxnorm.dtypes import compute_dtype, real
from jaxnorm.engine.derivatives import cast_once, with_epsilon
from jaxnorm.engine.groups import elements, find_frame
from jaxnorm.engine.plan import find_stats, select
from jaxnorm.engine.reference import Stats, abs_squared, apply, nothing_saved
from jaxnorm.engine.segments import Places
from jaxnorm.engine.sharding import sharded_by_compiler
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import reduce_axes
from jaxnorm.features import aligned, packed_axes
from jaxnorm.normalization import norm_operands, static_epsilon
from jaxnorm.options import NormOptions, Param


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
    """Graph normalization: each channel over the nodes of each graph, a learned part of the mean kept (Cai et al. 2020, arXiv 2009.03294).

    ``d = x - mean_scale * mean``, ``y = d / sqrt(mean(d**2) + epsilon) * scale + bias``. Where all nodes are alike, as in regular graphs,
    the mean is what tells the graphs apart.

    Args:
      x: floating array ``(N, C)``, the nodes of all graphs, one after the other or mixed, or ``(B, N, C)``, a batch of such arrays.
      mean_scale: how much of the mean is subtracted, of the shape of the feature axes; 1 is instance norm.
      segments: ids that say which graph each node is of, see :func:`moments`; without them the nodes of an ``x`` are one graph.
      num_segments: how many graphs there are.
      feature_axes: the axes of the channels.
      scale: gain of the shape of the feature axes, of any floating dtype, cast to that of the statistics: float32 at least.
      bias: shift of the same shape and dtypes.
      epsilon: added to the mean square.
      where: boolean mask or float weights that broadcast against ``x``; what is masked out counts for nothing and outputs 0.
      **options: those of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``, ids that are no integers.
      ValueError: axes, mask, parameters or ids that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> nodes, ids = jnp.array([[1.0], [3.0], [5.0], [5.0]]), jnp.array([0, 0, 1, 1])
    >>> jn.graph_norm(nodes, jnp.ones(1), segments=ids, num_segments=2, epsilon=0.0)[:, 0].tolist()
    [-1.0, 1.0, 0.0, 0.0]
    >>> jn.graph_norm(nodes, jnp.zeros(1), segments=ids, num_segments=2, epsilon=0.0)[2:, 0].tolist()
    [1.0, 1.0]
    """
    x = validation.floating(x)
    features, nodes = packed_axes(x.shape, feature_axes, "graph norm")
    mean_scale = validation.floating(mean_scale, "mean_scale")
    if mean_scale.ndim != len(features):
        raise ValueError(
            f"mean_scale must have the shape of the feature axes, {tuple(x.shape[a] for a in features)}: got {mean_scale.shape}."
        )
    (kept,) = aligned(x.shape, features, mean_scale=1 - mean_scale)
    given = {"scale": scale, "bias": bias, "epsilon": epsilon, "where": where, "segments": segments, "num_segments": num_segments}
    return _graph(*_split(norm_operands(x, unsplit(x.shape, nodes), features, options, **given)), kept)


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
    """Pair normalization: the sum of all distances between nodes stays the same from layer to layer (Zhao & Akoglu 2019, arXiv 1909.12223).

    ``d = x - mean``, the mean of each channel over the nodes of each graph; ``y = length * d / sqrt(mean(|d|**2) + epsilon)``, of the
    squared lengths of nodes: the sum over all channels.

    Args:
      x: floating array ``(N, C)``, the nodes of all graphs, one after the other or mixed, or ``(B, N, C)``, a batch of such arrays.
      length: the root mean square of the lengths of nodes in the output, the paper's s.
      segments: ids that say which graph each node is of, see :func:`moments`; without them the nodes of an ``x`` are one graph.
      num_segments: how many graphs there are.
      feature_axes: the axes of the channels.
      scale: gain of the shape of the feature axes, of any floating dtype, cast to that of the statistics: float32 at least.
      bias: shift of the same shape and dtypes.
      epsilon: added to the mean square.
      where: boolean mask or float weights that broadcast against ``x``; what is masked out counts for nothing and outputs 0.
      **options: those of every norm, see :class:`NormOptions`.

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
    features, nodes = packed_axes(x.shape, feature_axes, "pair norm")
    length = jnp.asarray(length, real(compute_dtype(x.dtype)))
    if length.ndim:
        raise ValueError(f"length must be one number: got shape {length.shape}. Pass a scale for one gain per channel.")
    given = {"scale": scale, "bias": bias, "epsilon": epsilon, "where": where, "segments": segments, "num_segments": num_segments}
    return _pair(*_split(norm_operands(x, unsplit(x.shape, nodes), features, options, **given)), features, length)


class _Static(NamedTuple):
    """The facts that a program is compiled for."""

    spec: Spec
    implementation: str


class _Arrays(NamedTuple):
    """What is normalized, by what; a traced epsilon is added to the variance."""

    x: Any
    where: jax.Array | None
    ids: jax.Array | None
    scale: jax.Array | None
    bias: jax.Array | None
    epsilon: jax.Array | None


def _split(operands: tuple) -> tuple[_Static, _Arrays]:
    spec, x, where, scale, bias, implementation, ids = operands
    spec, added = static_epsilon(spec)
    return _Static(spec, select(implementation, None, x).implementation), _Arrays(x, where, ids, scale, bias, added)


def _run(norm: Callable, static: _Static, arrays: _Arrays, param: jax.Array) -> jax.Array:
    """``norm(places of segments or None, spec, x, further arrays, param)``, each array cast once."""

    def run(arrays: _Arrays, param: jax.Array) -> jax.Array:
        return cast_once(partial(norm, static.spec.places(arrays.ids)), static.spec, arrays.x, arrays._replace(x=None), param)

    return sharded_by_compiler(run, jax.typeof(arrays.x).sharding)(arrays, param)


@partial(jax.jit, static_argnums=0)
def _graph(static: _Static, arrays: _Arrays, kept: jax.Array) -> jax.Array:
    """The mean that is kept is taken from the offset that is subtracted, and its square belongs to the mean square."""

    def run(places: Places | None, spec: Spec, x, arrays: _Arrays, kept):
        frame, offset, var = find_stats(spec, x, arrays.where, static.implementation, places)
        mean = kept.astype(offset.dtype) * (frame.pivot + offset)
        return _apply(spec, x, arrays, Stats(frame, offset - mean, var + abs_squared(mean)))

    return _run(run, static, arrays, kept)


@partial(jax.jit, static_argnums=(0, 2))
def _pair(static: _Static, arrays: _Arrays, features: tuple[int, ...], length: jax.Array) -> jax.Array:
    """Variances are summed over the channels, which therefore have one power of two."""

    def run(places: Places | None, spec: Spec, x, arrays: _Arrays, length):
        power, u = _of_one_size(spec, places, x, arrays.where, features)
        own = Spec(spec.reduction, spec.axis_name, segments=spec.segments)
        frame, offset, var = find_stats(own, u, arrays.where, static.implementation, places)
        scale = length * (jnp.ones((1,) * x.ndim, length.dtype) if arrays.scale is None else arrays.scale.astype(length.dtype))
        stats = Stats(frame._replace(power=power), offset, reduce_axes(var, features))
        return _apply(spec, x, arrays._replace(scale=scale), stats)

    return _run(run, static, arrays, length)


def _of_one_size(spec: Spec, places: Places | None, x, where, features: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array]:
    """The power of two of all channels of each group, and x divided by it; None, and x itself, where none is needed."""
    together = replace(spec, reduction=unsplit(x.shape, tuple(sorted({*spec.axes, *features}))), centered=False, bare=True)
    frame = find_frame(together, x, where, places)
    return frame.power, x if frame.power is None else elements(together, x, where, frame)


def _apply(spec: Spec, x: jax.Array, arrays: _Arrays, stats: Stats) -> jax.Array:
    _, where, _, scale, bias, epsilon = arrays
    stats = stats if epsilon is None else with_epsilon(stats, epsilon)
    return nothing_saved(partial(apply, spec))(x, where, stats, scale, bias)
