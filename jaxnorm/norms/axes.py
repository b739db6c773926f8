"""The named norms that differ in their axes alone.

    batch      "[n h w] c"          instance   "n [h w] c"
    layer      "n h w [c]"          group      "n [h w] (g [c])"
    rms        layer, not centered  positional "n h w [c]", with its Moments
    switchable a blend of instance, layer and batch (switchable.py)

Channels come last unless ``feature_axes`` says otherwise. ``scale`` and ``bias`` have the
shape of the feature axes, in the order of the axes of ``x``. Or they have the rank of ``x``
and broadcast against it, for adaptive norms: a scale ``(n, 1, 1, c)``.
"""

from typing import Unpack

import jax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Axes, canonical_axes, in_groups, other_axes, unsplit, whole
from jaxnorm.arguments.features import batch_axes, checked_divisor, spatial_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import EpsilonIn, NormOptions, Param
from jaxnorm.core.call import prepare, run, run_with_moments
from jaxnorm.core.rounding import Rounding
from jaxnorm.core.statistics import Moments


@by_keyword
def batch_norm(
    x: ArrayLike,
    /,
    *,
    scale: Param = None,
    bias: Param = None,
    feature_axes: int | tuple[int, ...] = -1,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Normalize each feature over everything else (Ioffe & Szegedy 2015, arXiv 1502.03167).

    Batch normalization: ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. In training, blend
    the returned Moments into a running average with :func:`ema`. In evaluation, where the features
    come last, call ``normalize(x, running, scale=scale, bias=bias)``. For a batch of one element
    the output in training is ``bias``.

    Args:
      x: floating array, for example ``(N, C)`` or ``(N, H, W, C)``.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      feature_axes: the axes that are not reduced, in any order.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      The output, of the shape of ``x``, and the Moments of the batch, whose reduced axes have size
      one.

    Raises:
      TypeError: integer ``x``.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> y, batch = jn.batch_norm(jnp.array([[1.0, 0.0], [3.0, 8.0]]), epsilon=0.0)
    >>> y.tolist(), batch.mean.tolist()
    ([[-1.0, -1.0], [1.0, 1.0]], [[2.0, 4.0]])
    """
    x = validation.floating(x)
    reduced, features = batch_axes(
        x.shape, feature_axes, "batch norm", across=options.get("axis_name") is not None
    )
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        **options,
    )
    return run_with_moments(call)


@by_keyword
def layer_norm(
    x: ArrayLike,
    /,
    *,
    axes: Axes = -1,
    scale: Param = None,
    scale_offset: float = 0,
    rounding: Rounding = "once",
    bias: Param = None,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    correction: float = 0,
    epsilon_in: EpsilonIn = "var",
    segments: ArrayLike | None = None,
    num_segments: int | None = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Normalize each example over its features (Ba, Kiros & Hinton 2016, arXiv 1607.06450).

    Layer normalization: ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``; with
    ``epsilon_in="std"`` it divides by ``sqrt(var) + epsilon``, with ``epsilon_in="max"`` by
    ``max(sqrt(var), epsilon)``.

    Args:
      x: floating array ``(..., C)``.
      axes: the reduction axes, which are the feature axes too. Several axes have one gain
        and one bias for each element, like ``normalized_shape`` in PyTorch and Paddle.
      scale: gain of the shape of the reduction axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      scale_offset: a number that is added to ``scale`` in the dtype of the statistics: with 1 the
        gain is ``1 + scale``, as in Gemma.
      rounding: where half precision is rounded. ``"once"`` rounds ``y`` alone. ``"twice"`` also
        rounds the normalized ``x`` to its dtype, and each product and sum with a parameter of half
        precision, as Llama does. ``"input"`` rounds every operation to the dtype of ``x`` but the
        sums in the means, as Google's Gemma does; plain JAX computes it.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      correction: 1 divides by n - 1 in the variance.
      epsilon_in: ``"std"`` adds ``epsilon`` to the standard deviation; with ``"max"`` it is the
        least standard deviation that divides.
      segments: ids along the first of the axes, see :func:`moments`. With ``axes=(-2, -1)``
        each document of a packed sequence, or each graph, is normalized over its positions
        and channels. Scale and bias have the shape of the other axes.
      num_segments: the number of segments.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``. For a single feature the output is ``bias``.

    Raises:
      TypeError: integer ``x``.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.layer_norm(jnp.array([[1.0, 3.0]]), scale=jnp.array([1.0, 2.0]), epsilon=0.0).tolist()
    [[-1.0, 2.0]]
    """
    x = validation.floating(x)
    reduced = whole(axes, x.shape)
    # Segments may have any length, so no parameter can have the shape of their axis.
    features = reduced if segments is None else reduced[1:]
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        features,
        scale=scale,
        scale_offset=scale_offset,
        rounding=rounding,
        bias=bias,
        epsilon=epsilon,
        where=where,
        correction=correction,
        epsilon_in=epsilon_in,
        segments=segments,
        num_segments=num_segments,
        **options,
    )
    return run(call)


@by_keyword
def positional_norm(
    x: ArrayLike,
    /,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Normalize each position over its channels (Li et al. 2019, arXiv 1907.04312).

    Positional normalization: ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. The Moments
    ``m`` serve a later layer with the same positions (moment shortcut). The formula
    ``z * jnp.sqrt(m.var + epsilon) + m.mean`` gives the output z of that layer the mean and
    the standard deviation of ``x``.

    Args:
      x: floating array, for example ``(N, H, W, C)``.
      feature_axes: the axes of the channels, which are reduced.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      The output, of the shape of ``x``, and the Moments of each position, whose reduction axes have
      size one.

    Raises:
      TypeError: integer ``x``.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> y, m = jn.positional_norm(jnp.array([[1.0, 3.0], [10.0, 30.0]]), epsilon=0.0)
    >>> y.tolist(), m.mean.tolist(), (y * jnp.sqrt(m.var) + m.mean).tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [[2.0], [20.0]], [[1.0, 3.0], [10.0, 30.0]])
    """
    x = validation.floating(x)
    features = canonical_axes(feature_axes, x.ndim, "feature_axes")
    # The channels are reduced and have the parameters, as in layer norm.
    call = prepare(
        x,
        unsplit(x.shape, features),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        **options,
    )
    return run_with_moments(call)


@by_keyword
def rms_norm(
    x: ArrayLike,
    /,
    *,
    axes: Axes = -1,
    scale: Param = None,
    scale_offset: float = 0,
    rounding: Rounding = "once",
    bias: Param = None,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    epsilon_in: EpsilonIn = "var",
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Divide each example by its root mean square (Zhang & Sennrich 2019, arXiv 1910.07467).

    RMS normalization, layer norm without the mean:
    ``y = x / sqrt(mean(x**2) + epsilon) * scale + bias``; with ``epsilon_in="std"`` it divides by
    ``sqrt(mean(x**2)) + epsilon``, with ``epsilon_in="max"`` by ``max(sqrt(mean(x**2)), epsilon)``.

    Args:
      x: floating array ``(..., C)``.
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
      epsilon: added to the mean square.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      epsilon_in: ``"std"`` adds ``epsilon`` to the root mean square, as some papers and checkpoints
        do; with ``"max"`` it is the least root mean square that divides.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``.
      ValueError: axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.rms_norm(jnp.array([[3.0, -3.0]]), epsilon=0.0).tolist()
    [[1.0, -1.0]]
    """
    x = validation.floating(x)
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
        epsilon_in=epsilon_in,
        centered=False,
        **options,
    )
    return run(call)


@by_keyword
def instance_norm(
    x: ArrayLike,
    /,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    segments: ArrayLike | None = None,
    num_segments: int | None = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Normalize each channel of each example (Ulyanov et al. 2016, arXiv 1607.08022).

    Instance normalization, with statistics over positions:
    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``.

    Args:
      x: floating array ``(N, ..., C)`` with at least one axis between batch and features; the batch
        is axis 0.
      feature_axes: the axes that, besides the batch, are not reduced.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      segments: ids along the first axis between batch and features, see :func:`moments`.
        Each document of a packed sequence is then normalized over its positions. ``x`` may be
        ``(N, C)``, without a batch, for example the nodes of graphs.
      num_segments: the number of segments.
      **options: the options of every norm, see :class:`NormOptions`.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer ``x``.
      ValueError: no spatial axis; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> jn.instance_norm(x, epsilon=0.0)[..., 0].tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    >>> packed, ids = jnp.array([[1.0], [3.0], [10.0], [30.0]]), jnp.array([0, 0, 1, 1])
    >>> jn.instance_norm(packed, segments=ids, num_segments=2, epsilon=0.0)[..., 0].tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    x = validation.floating(x)
    features, reduced = spatial_axes(
        x.shape, feature_axes, "instance norm", packed=segments is not None
    )
    call = prepare(
        x,
        unsplit(x.shape, reduced),
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        segments=segments,
        num_segments=num_segments,
        **options,
    )
    return run(call)


@by_keyword
def group_norm(
    x: ArrayLike,
    /,
    num_groups: int = 32,
    *,
    feature_axes: int | tuple[int, ...] = -1,
    axes: tuple[int, ...] | None = None,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-6,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> jax.Array:
    """Normalize each example over groups of channels (Wu & He 2018, arXiv 1803.08494).

    Group normalization: ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. One group is layer
    norm over all but the batch, one channel per group is instance norm.

    Args:
      x: floating array ``(N, ..., C)``; the batch is axis 0. One example ``(C,)`` has no
        batch axis.
      num_groups: the number of equal groups of neighbouring channels.
      feature_axes: the one axis of channels.
      axes: the other reduction axes; all but the batch by default.
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
      TypeError: integer ``x``, a number of groups that is no integer.
      ValueError: groups that do not divide the channels; axes, mask or parameters that do not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.group_norm(jnp.array([[1.0, 3.0, 10.0, 30.0]]), 2, epsilon=0.0).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """
    x = validation.floating(x)
    features = canonical_axes(feature_axes, x.ndim, "feature_axes")
    # Under vmap one example (C,) comes without a batch: its axis 0 holds the channels.
    if len(features) != 1 or (features[0] == 0 and x.ndim > 1):
        raise ValueError(
            "group norm must have one axis of channels, behind the batch axis 0: got "
            f"feature_axes={feature_axes} for shape {x.shape}."
        )
    num_groups = checked_divisor("num_groups", num_groups, x.shape[features[0]])
    # canonical_axes refuses (), which here means that only the channels are reduced.
    reduced = (
        other_axes((0, *features), x.ndim)
        if axes is None
        else ()
        if isinstance(axes, tuple) and not axes
        else canonical_axes(axes, x.ndim)
    )
    if features[0] in reduced:
        raise ValueError(f"axes must not include the channel axis, {features[0]}: got {axes}.")
    reduction = in_groups(x.shape, reduced, features[0], num_groups)
    call = prepare(
        x,
        reduction,
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        **options,
    )
    return run(call)
