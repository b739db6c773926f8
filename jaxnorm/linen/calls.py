"""The arguments that a linen module passes to its norm: parameters, dtypes, device axes."""

from typing import Any

import jax

from jaxnorm.arguments.axes import Reduction, unsplit
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.core.call import Call
from jaxnorm.flax_common.arguments import Inputs, bound, inexact, module_axes
from jaxnorm.flax_common.calls import call_of


def inputs(module: Any, x: jax.Array, features: tuple[int, ...]) -> Inputs:
    """Return a module's ``x``, scale, bias and output dtype.

    Scale and bias are created on first use.
    """
    sizes = tuple(x.shape[axis] for axis in features)

    def create(name: str) -> jax.Array | None:
        if not getattr(module, f"use_{name}", False):
            return None
        return module.param(name, getattr(module, f"{name}_init"), sizes, module.param_dtype)

    scale, bias = create("scale"), create("bias")
    dtype = promoted(module.dtype, x, scale, bias)
    return Inputs(inexact(x, dtype), scale, bias, dtype)


def across(module: Any):
    """Return the device axes over which a module shares statistics.

    As in Flax, the axes need not be bound while a module is initialized.
    """
    return bound(module.axis_name, module.axis_index_groups, initializing=module.is_initializing())


def over(
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
    """Prepare the normalization of ``x`` by a module."""
    return call_of(
        module,
        inputs(module, x, features),
        reduction,
        features,
        mask,
        across(module),
        centered=centered,
        segments=segments,
        num_segments=num_segments,
    )


def over_axes(module: Any, x: jax.Array, mask: Param, *, centered: bool = True) -> Call:
    """Prepare the normalization of ``x`` over a module's reduction axes."""
    features, reduced = module_axes(module, x.ndim)
    return over(module, x, unsplit(x.shape, reduced), features, mask, centered=centered)
