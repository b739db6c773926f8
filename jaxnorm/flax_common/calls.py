"""Calls of norms by linen and nnx modules."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments.options import Param

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
