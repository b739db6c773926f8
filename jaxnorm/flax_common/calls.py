"""Prepare and run the norms that linen and nnx modules call."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments.axes import Reduction, unsplit
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call, prepare
from jaxnorm.flax_common.arguments import across, module_axes

Result = TypeVar("Result")


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
    return prepare(
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
