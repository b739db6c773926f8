"""What linen and nnx share of norms whose scale and bias are computed from a condition."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.dtypes import compute_dtype, promoted
from jaxnorm.arguments.options import Param
from jaxnorm.arguments.validation import as_array, check_values
from jaxnorm.core.call import prepare, run
from jaxnorm.core.normalization import with_running
from jaxnorm.core.rounding import with_offset
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import across, inexact, instance_axes
from jaxnorm.flax_common.calls import Options, by_running, over_batch
from jaxnorm.flax_common.running import as_moments

Activation = Callable[[jax.Array], jax.Array]
LayerKind = Literal["layer", "rms"]
ImageKind = Literal["instance", "batch"]


def vectors(module: Any, condition: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return a condition that holds vectors, as floats in the dtype of the layer that reads it.

    Raises:
      TypeError: it is of integers or booleans, such as labels.
      ValueError: its axes but the last are no leading axes of x, which has this shape; the vectors
        have no elements.
    """
    condition = as_array(condition, "condition")
    if not jnp.issubdtype(condition.dtype, jnp.inexact):
        remedy = (
            "Pass num_classes to the constructor for labels"
            if hasattr(module, "num_classes")
            else "Make vectors of labels by an embedding"
        )
        raise TypeError(
            f"condition must be vectors of floats: got {condition.dtype} of shape "
            f"{condition.shape}. {remedy}."
        )
    _check_channels(shape)
    leading = condition.shape[:-1]
    if not condition.ndim or not _leads(leading, shape):
        raise ValueError(
            "condition must have the shape (..., k), where ... are leading axes of x or 1: got "
            f"{condition.shape} for x of shape {shape}. One vector for each example is "
            f"{(*shape[:1], 'k')}."
        )
    if not condition.shape[-1]:
        raise ValueError(
            f"condition must be vectors of at least one element: got shape {condition.shape}."
        )
    # A layer casts its input to its own dtype. Cast here, where x and parameters of different
    # dtypes are intended, even under strict promotion.
    return condition.astype(promoted(module.dtype, condition, jnp.dtype(module.param_dtype)))


def labels(condition: Any, num_classes: int, shape: tuple[int, ...]) -> jax.Array:
    """Return a condition that holds labels of classes.

    Raises:
      TypeError: they are no integers.
      ValueError: they are out of range, or no leading axes of x, which has this shape.
    """
    condition = as_array(condition, "condition")
    if not jnp.issubdtype(condition.dtype, jnp.integer):
        raise TypeError(
            f"condition must be labels, integers below num_classes={num_classes}: got "
            f"{condition.dtype}. Without num_classes it is vectors."
        )
    _check_channels(shape)
    if not _leads(condition.shape, shape):
        raise ValueError(
            "condition must have labels for leading axes of x or 1: got shape "
            f"{condition.shape} for x of shape {shape}. One label for each example is "
            f"{shape[:1]}."
        )
    message = f"condition must be labels from 0 to num_classes - 1 = {num_classes - 1}"
    return check_values(condition, lambda i: (i >= 0) & (i < num_classes), message)


def _check_channels(shape: tuple[int, ...]) -> None:
    if not shape:
        raise ValueError("x must have an axis of channels: got shape ().")


def _leads(leading: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    # the channels are no axis that a condition can have
    return len(leading) < len(shape) and all(
        given in (1, size) for given, size in zip(leading, shape, strict=False)
    )


def spread(values: jax.Array, parts: int, shape: tuple[int, ...]) -> list[jax.Array]:
    """Split the last axis into equal parts, which broadcast against x of a shape."""
    leading = values.shape[:-1]
    target = (*leading, *(1,) * (len(shape) - 1 - len(leading)), shape[-1])
    return [part.reshape(target) for part in jnp.split(values, parts, axis=-1)]


def label_map(module: Any, condition: Any, x: jax.Array) -> jax.Array:
    """Return a map of conditions, of the size of the image ``x``, as floats.

    Each position takes the value of the position of the map in which its own upper left corner
    lies, as by PyTorch's mode "nearest". :func:`jax.image.resize` goes by its centre.

    Raises:
      ValueError: ``x`` or the map is no batch of images of this rank.
    """
    condition, rank = as_array(condition, "condition"), len(module.kernel_size)
    if x.ndim != rank + 2:
        raise ValueError(
            f"x must have a batch, {rank} axes of positions as kernel_size={module.kernel_size} "
            f"has, and channels: got shape {x.shape}."
        )
    if condition.ndim != x.ndim or condition.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            "condition must be a map (batch, ..., labels) of as many axes as x, with its batch or "
            f"one example: got {condition.shape} for x of shape {x.shape}."
        )
    if not condition.size and x.size:
        raise ValueError(
            "condition must have a position to take a value from, and a label: got a map of shape "
            f"{condition.shape} for x of shape {x.shape}."
        )
    condition = condition.astype(promoted(module.dtype, condition, jnp.dtype(module.param_dtype)))
    for axis in range(1, rank + 1):
        old, new = condition.shape[axis], x.shape[axis]
        if old != new:
            # PyTorch multiplies in float32, which falls below a whole number for a few pairs of
            # sizes, such as 26 and 22.
            nearest = np.arange(new) * old // new
            condition = jnp.take(condition, nearest, axis=axis, mode="clip")
    return condition


def options_of(
    module: Any,
    x: jax.Array,
    mask: Param,
    *,
    scale: jax.Array,
    bias: jax.Array,
    offset: float = 1,
) -> tuple[jax.Array, Options]:
    """Return ``x`` as floats, and the options of its norm with the gain ``offset + scale``."""
    dtype = promoted(module.dtype, x, scale, bias)
    x = inexact(x, dtype)
    return x, Options(
        scale=with_offset(scale, offset, x.dtype, "once"),
        bias=bias,
        epsilon=getattr(module, "epsilon", 0.0),
        where=mask,
        mask_name="mask",
        dtype=dtype,
    )


def layer(module: Any, x: jax.Array, options: Options) -> jax.Array:
    """Normalize each position over its channels, as the module's ``norm`` says."""
    check_kind(module.norm, ("layer", "rms"))
    last = (x.ndim - 1,)
    return run(
        prepare(
            x,
            unsplit(x.shape, last),
            last,
            centered=module.norm == "layer",
            axis_name=across(module),
            **options,
        )
    )


def instance(module: Any, x: jax.Array, options: Options) -> jax.Array:
    """Normalize each channel of each example."""
    features, reduced = instance_axes(-1, x.ndim)
    return run(prepare(x, unsplit(x.shape, reduced), features, axis_name=across(module), **options))


def batch(
    module: Any,
    x: jax.Array,
    options: Options,
    running: tuple[jax.Array, jax.Array],
    *,
    evaluating: bool,
) -> tuple[jax.Array, Moments | None]:
    """Normalize each channel over the batch, or by its running mean and variance.

    The Moments of the batch are returned too; they are None in evaluation.
    """
    features = (x.ndim - 1,)
    if evaluating:
        return by_running(x, features, options, *running), None
    return over_batch(module, x, features, options)


def scale_and_shift(x: jax.Array, options: Options) -> jax.Array:
    """Return ``x * scale + bias``: the norm by a mean of 0 and a variance of 1."""
    dtype, sizes = compute_dtype(x.dtype), x.shape[-1:]
    neutral = as_moments(jnp.zeros(sizes, dtype), jnp.ones(sizes, dtype))
    return with_running(x, neutral, (x.ndim - 1,), **options)


def check_kind(norm: Any, kinds: Sequence[str]) -> None:
    """Raise ValueError unless a module's ``norm`` is one of two kinds."""
    if norm not in kinds:
        raise ValueError(f"norm must be {kinds[0]!r} or {kinds[1]!r}: got {norm!r}.")
