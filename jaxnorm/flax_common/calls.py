"""Prepare and run the norms that linen and nnx modules call."""

from collections.abc import Callable
from contextvars import ContextVar
from inspect import unwrap
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments.axes import Reduction, other_axes, unsplit
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call, prepare, run_with_moments
from jaxnorm.core.normalization import with_running
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import across, module_axes
from jaxnorm.flax_common.running import as_moments

Result = TypeVar("Result")

# Called with each module and the call that it prepares; None, but while models are compared.
watching: ContextVar[Callable[[Any, Call], None] | None] = ContextVar("watching", default=None)


class Options(TypedDict):
    """Keyword arguments that every module passes to its norm.

    Attributes:
      scale: gain of the shape of the feature axes, or None.
      bias: shift of the shape of the feature axes, or None.
      epsilon: the number that the norm adds to the variance.
      where: the mask of the call, not yet checked.
      mask_name: the name by which errors call the mask.
      dtype: dtype of the output.
    """

    scale: jax.Array | None
    bias: jax.Array | None
    epsilon: ArrayLike
    where: Param
    mask_name: str
    dtype: jnp.dtype


def over(
    inputs: Callable[..., tuple[Any, ...]],
    module: Any,
    x: jax.Array,
    reduction: Reduction,
    features: tuple[int, ...],
    mask: Param,
    *,
    centered: bool = True,
    segments: Param = None,
    num_segments: int | None = None,
) -> Call:
    """Prepare the normalization of ``x`` by a module.

    Args:
      inputs: the function ``inputs`` of linen/calls.py or nnx/calls.py. It returns ``x``
        as floats and the :class:`Options`; nnx adds the running statistics.
      module: the Flax module.
      x: the array to normalize.
      reduction: the axes to reduce.
      features: the feature axes.
      mask: the mask of the call, not yet checked.
      centered: whether the norm subtracts the mean.
      segments: ids along the first reduction axis.
      num_segments: the number of segments.
    """
    x, options, *_ = inputs(module, x, features, mask)
    call = prepare(
        x,
        reduction,
        features,
        scale_offset=getattr(module, "scale_offset", 0),
        rounding=getattr(module, "rounding", "once"),
        centered=centered,
        axis_name=across(module),
        segments=segments,
        num_segments=num_segments,
        **options,
    )
    if watch := watching.get():
        watch(module, call)
    return call


def over_axes(
    inputs: Callable[..., tuple[Any, ...]],
    module: Any,
    x: jax.Array,
    mask: Param,
    *,
    centered: bool = True,
) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes, as :func:`over` does."""
    features, reduced = module_axes(module, x.ndim)
    return over(inputs, module, x, unsplit(x.shape, reduced), features, mask, centered=centered)


def over_batch(
    module: Any, x: jax.Array, features: tuple[int, ...], options: Options, **correction: Any
) -> tuple[jax.Array, Moments]:
    """Normalize each feature over the batch of a module, and return the Moments of the batch.

    As in Flax, no axis need be left to reduce. The function :func:`jaxnorm.batch_norm` refuses
    that. ``correction`` is what :func:`prepare` takes besides, such as ``adjust``.
    """
    reduction = unsplit(x.shape, other_axes(features, x.ndim))
    axis_name = across(module)
    call = prepare(x, reduction, features, axis_name=axis_name, **options, **correction)
    if watch := watching.get():
        watch(module, call)
    return run_with_moments(call)


def by_running(
    x: jax.Array, features: tuple[int, ...], options: Options, mean: jax.Array, var: jax.Array
) -> jax.Array:
    """Normalize each feature by a running mean and variance, which may be flat."""
    sizes = tuple(x.shape[axis] for axis in features)
    running = as_moments(mean.reshape(sizes), var.reshape(sizes))
    return with_running(x, running, features, **options)


def apply_norm(norm: Callable[..., Result], x: jax.Array, *params: Any, **options: Any) -> Result:
    """Call a norm such as :func:`jaxnorm.graph_norm` with a module's :class:`Options`.

    Args:
      norm: the public function.
      x: the array to normalize.
      *params: further arguments by position, for example a ``mean_scale``.
      **options: the :class:`Options`, and others of the function.
    """
    # Users must not pass mask_name, so the public function refuses it. The function
    # within takes it, and checks the mask under the name that the module gives it.
    return unwrap(norm)(x, *params, **options)
