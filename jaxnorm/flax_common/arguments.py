"""Rules for the arguments of Flax's modules, which accept more than the functions do."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.nn.initializers import Initializer

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes, other_axes
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.arguments.features import checked_divisor
from jaxnorm.arguments.options import AxisGroups, AxisName
from jaxnorm.arguments.validation import as_array


def module_axes(module: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the feature axes and the reduction axes of a Flax LayerNorm or RMSNorm."""
    return canonical_axes(module.feature_axes, rank, "feature_axes"), canonical_axes(
        module.reduction_axes, rank, "reduction_axes"
    )


def initial_scale(initializer: Initializer, offset: float) -> Initializer:
    """Return the initializer of a scale that ``offset`` is added to.

    The default, ones, is that of the gain: the scale then starts from ``1 - offset``.
    """
    offset = validation.number("scale_offset", offset)
    if offset and initializer is initializers.ones:
        return initializers.constant(1 - offset)
    return initializer


def instance_axes(
    feature_axes, rank: int, *, packed: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the feature axes and the reduction axes of a Flax InstanceNorm.

    Packed ``x`` needs no batch axis: axis 0 is then reduced if no other axis is.

    Raises:
      ValueError: the feature axes include the batch axis 0, or do not fit the rank.
    """
    features = canonical_axes(feature_axes, rank, "feature_axes")
    # Flax's tests look for Flax's words, so the message begins with them.
    if 0 in features:
        raise ValueError(
            "The channel axes cannot include the leading dimension as this is assumed to be the "
            "batch axis. "
            f"Got feature_axes={feature_axes} for rank {rank}."
        )
    # As in Flax, and unlike the function, no axis need be left to reduce.
    reduced = other_axes((0, *features), rank)
    return features, reduced if reduced or not packed else (0,)


def group_axes(reduction_axes, rank: int) -> tuple[int, ...]:
    """Return the reduction axes of group norm without the last axis, the channels.

    A module's ``reduction_axes``, if given, must include the channels.
    """
    if not rank:
        raise ValueError("x must have an axis of channels: got shape ().")
    if reduction_axes is None:
        return other_axes((0, rank - 1), rank)
    reduced = canonical_axes(reduction_axes, rank, "reduction_axes")
    # Each group takes its channels from the last axis, so that axis cannot be left out.
    if rank - 1 not in reduced:
        raise ValueError(
            "reduction_axes must include the last axis, the axis of the channels: got "
            f"{reduction_axes} for rank {rank}."
        )
    return reduced[:-1]


def group_count(num_groups: int | None, group_size: int | None, channels: int) -> int:
    """Return the number of groups, exactly one of ``num_groups`` and ``group_size`` being given."""
    if num_groups is not None and group_size is None:
        return checked_divisor("num_groups", num_groups, channels)
    if group_size is None or num_groups is not None:
        raise ValueError(
            f"exactly one of num_groups and group_size must be given: got {num_groups} and "
            f"{group_size}. "
            "Pass num_groups=None with group_size."
        )
    return channels // checked_divisor("group_size", group_size, channels)


# PyTorch users pass these in the place of use_running_average.
NO_FLAGS = (
    " Masks are passed as mask=; the number of features is an argument of nnx's constructors alone."
)


def flag(name: str, value: Any, remedy: str = "") -> Any:
    """Return ``value`` if it is a boolean, or equals 0 or 1, which Flax takes too.

    Raises:
      TypeError: it is anything else.
    """
    # An array with axes is a mask in the place of the flag, and is neither 0 nor 1.
    if isinstance(value, bool) or (
        not isinstance(value, str | jax.core.Tracer)
        and getattr(value, "ndim", 0) == 0
        and value in (0, 1)
    ):
        return value
    return validation.flag(name, value, remedy)


def inexact(x, dtype) -> jax.Array:
    """Return ``x`` as a float or complex array for an output of ``dtype``.

    Flax's modules take integers and booleans, which the functions refuse.
    """
    x = x if isinstance(x, jax.Array) else as_array(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(real_dtype(compute_dtype(dtype)))


def across(module: Any) -> AxisName:
    """Return the device axes over which a module shares statistics, with their groups.

    None means that no axis of the module is bound, for example under sharded ``jit``. There the
    compiler reduces over devices.

    Raises:
      ValueError: other axes are bound and one of the module's is not. As in Flax, a linen module
        may name any axis while it is initialized.
    """
    name, groups = module.axis_name, module.axis_index_groups
    names = tuple(name) if isinstance(name, tuple | list) else () if name is None else (name,)
    if not names:
        return None
    # Imported here because the import is slow and few calls need it.
    try:
        from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as bound_names
    except ImportError:  # JAX 0.8
        from jax.core import unsafe_get_axis_names_DO_NOT_USE as bound_names
    # An unnamed pmap binds an axis with an internal name, which no user can mean.
    found = [name for name in bound_names() if not str(name).startswith(("_internal", "<axis"))]
    missing = [name for name in names if name not in found]
    # Parameters of nnx modules are made by the constructor, without a call.
    initializing = hasattr(module, "is_initializing") and module.is_initializing()
    if missing and found and not initializing:
        raise ValueError(
            f"axis_name must be among the axes that are bound here, {', '.join(map(repr, found))}: "
            f"got {module.axis_name!r}. "
            "Name one of those, or None to leave other devices aside."
        )
    names = tuple(name for name in names if name in found)
    if not names:
        return None
    return names if groups is None else AxisGroups(names, tuple(tuple(group) for group in groups))
