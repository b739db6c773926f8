"""Switchable norm: a learned blend of the statistics of instance, layer and batch norm.

Only the instance statistics are computed from ``x``. Merging them over the channels gives the
layer statistics, and merging them over the batch gives the batch statistics.
"""

from dataclasses import replace
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import other_axes, unsplit
from jaxnorm.arguments.features import spatial_axes
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import Call, prepare, run
from jaxnorm.core.plan import find_stats, loops_for, select, usual_loops
from jaxnorm.core.statistics import Moments, applicable, from_stats, in_units_of, like_batch
from jaxnorm.engine.groups import (
    Scaling,
    elements,
    mask_fill_split,
    rstd,
    total_weight,
)
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Stats, plus, times
from jaxnorm.engine.scaling import find_scaling
from jaxnorm.engine.sharding import split_operands
from jaxnorm.engine.spec import Operands, Spec


@by_keyword
def switchable_norm(
    x: ArrayLike,
    /,
    mean_logits: ArrayLike,
    var_logits: ArrayLike,
    *,
    running: Moments | None = None,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: float = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Normalize by a blend of three kinds of statistics (Luo et al. 2018, arXiv 1806.10779).

    Switchable normalization learns how to blend instance, layer and batch statistics.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. Means are blended with
    ``softmax(mean_logits)``, variances with ``softmax(var_logits)``. The layer statistics are the
    instance statistics merged over the channels. The batch statistics are the instance
    statistics merged over the batch.

    Args:
      x: floating array ``(N, ..., C)`` with at least one axis between batch and features; the batch
        is axis 0.
      mean_logits: ``(3,)``, in the order instance, layer, batch.
      var_logits: ``(3,)``, in the same order.
      running: Moments that replace the batch statistics, in evaluation.
      feature_axes: the axes of the features.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`; the batch extends over
        ``axis_name``.

    Returns:
      The output, of the shape of ``x``, and the Moments of the batch, or ``running`` if it is
      given.

    Raises:
      TypeError: integer ``x``, complex logits; ``running`` that are no Moments, or complex ones for
        a real ``x``.
      ValueError: logits that are not ``(3,)``, no spatial axis; axes, mask or parameters that do
        not fit.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> instance_only = jnp.array([50.0, 0.0, 0.0])
    >>> jn.switchable_norm(x, instance_only, instance_only, epsilon=0.0)[0][..., 0].tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    x = validation.floating(x)
    features, spatial = spatial_axes(x.shape, feature_axes, "switchable norm")
    logits = _checked("mean_logits", mean_logits), _checked("var_logits", var_logits)
    everything, epsilon = (
        unsplit(x.shape, tuple(range(x.ndim))),
        validation.number("epsilon", epsilon),
    )
    call = prepare(
        x,
        everything,
        features,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        **options,
    )
    if running is not None:
        running = applicable("running", running, x)
        running = like_batch(running, x.shape, features)
    # None because no kernel computes a blend.
    selected = select(call.implementation, None, x).implementation
    y, batch = _switchable(selected, call.spec, features, spatial, *logits, running, call.operands)
    return y, batch if running is None else running


def _checked(name: str, logits: ArrayLike) -> jax.Array:
    """Return logits as an array, if there is one for each kind of statistics."""
    logits = validation.real(logits, name)
    if logits.shape != (3,):
        raise ValueError(
            f"{name} must have shape (3,), for instance, layer and batch: got {logits.shape}."
        )
    return logits


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _switchable(
    implementation: str,
    spec: Spec,
    features,
    spatial,
    mean_logits,
    var_logits,
    running,
    operands: Operands,
):
    """Return the output and the Moments of the batch, for arguments that have been checked.

    The backward pass computes the blend again, so that its residuals are the arguments.
    """
    x, where, scale, bias, *_ = split_operands(spec, operands)
    x = mask_fill_split(spec, x, where)
    loops = loops_for(spec, implementation, where)
    scaling = find_scaling(loops.of(replace(spec, centered=False)), x, where)
    scaling = scaling._replace(estimates=None)
    norm = jax.checkpoint(partial(_blended, implementation, loops, features, spatial))
    return norm(x, scaling, mean_logits, var_logits, running, scale, bias, where)


def _blended(
    implementation: str,
    loops: PlainLoops,
    features,
    spatial,
    x,
    scaling: Scaling,
    mean_logits,
    var_logits,
    running,
    scale,
    bias,
    where,
):
    """Normalize by blended statistics.

    The blend is applied as an instance norm with another gain and shift. For every e::

        (u - mean) * rstd = (u - instance.mean) / sqrt(instance.var + e) * gain + shift
        gain = sqrt(instance.var + e) * rstd,   shift = (instance.mean - mean) * rstd

    Means are blended relative to their common origin, so that a large common part of the means
    costs no digits.
    """
    spec = loops.spec
    instance_spec = Spec(unsplit(x.shape, spatial), batch_invariant=spec.batch_invariant)
    u = elements(loops, x, scaling)
    instance_scaling, low_mean, var = find_stats(instance_spec, u, where, implementation)
    n, shift = (
        jnp.asarray(total_weight(instance_spec, instance_scaling), var.dtype),
        jnp.asarray(instance_scaling.shift),
    )
    axis_name = spec.axis_name if running is None else None
    origin_spec = Spec(unsplit(shift.shape, tuple(range(x.ndim))), axis_name)
    origin = jnp.asarray(
        find_scaling(usual_loops(origin_spec), shift, None if where is None else n).shift
    )
    scaling, instance = scaling._replace(shift=origin), Moments(n, shift - origin + low_mean, var)
    running = None if running is None else in_units_of(running, scaling)
    layer, batch = (
        instance.merge(features),
        instance.merge(0, axis_name=axis_name) if running is None else running,
    )
    step, var = _blend(mean_logits, var_logits, instance, layer, batch, u.dtype)
    r = rstd(loops, scaling, var)
    scale_of_instance, bias_of_instance = (
        jnp.sqrt(instance.var + instance_spec.epsilon) * r,
        step * r.astype(u.dtype),
    )
    instance_spec = replace(instance_spec, dtype=spec.dtype)
    scale, bias = map(
        loops.compute_first,
        (times(scale_of_instance, scale), plus(times(bias_of_instance, scale), bias)),
    )
    y = run(Call(instance_spec, Operands(u, where, scale, bias), implementation))
    of_batch = replace(spec, reduction=unsplit(x.shape, other_axes(features, x.ndim)))
    scaling = scaling._replace(n=batch.count, shift=jnp.where(batch.count > 0, origin, 0))
    return y, from_stats(of_batch, Stats(scaling, batch.mean, batch.var))


def _blend(mean_logits, var_logits, instance: Moments, layer: Moments, batch: Moments, dtype):
    """Return the instance mean minus the blended mean, and the blended variance."""
    mean_weights, var_weights = (
        jax.nn.softmax(logits.astype(instance.var.dtype)) for logits in (mean_logits, var_logits)
    )
    var = sum(
        weight * part.var
        for weight, part in zip(var_weights, (instance, layer, batch), strict=True)
    )
    # In this form weights that add up to 1 + 1e-7 do no harm.
    step = sum(
        weight.astype(dtype) * (instance.mean - part.mean)
        for weight, part in zip(mean_weights[1:], (layer, batch), strict=True)
    )
    return step, var
