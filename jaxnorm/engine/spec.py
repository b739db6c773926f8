"""The static facts about a norm: which elements share statistics, and what is done with those."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Reduction, rough_product
from jaxnorm.arguments.dtypes import compute_dtype, needs_power
from jaxnorm.arguments.options import AxisName
from jaxnorm.engine.collectives import hashable
from jaxnorm.engine.segments import Places, Segments


class Operands(NamedTuple):
    """The arrays of a norm: what is normalized, and by what; None where there is none.

    Attributes:
      x: the data.
      where, scale, bias: what broadcasts against x; inside of a program, against its split shape.
      ids: which segment each position is of.
      epsilon: a traced one, added to the variance beside that of the spec.
      param: what ``Spec.adjust`` takes.
    """

    x: Any
    where: jax.Array | None = None
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    ids: jax.Array | None = None
    epsilon: jax.Array | None = None
    param: jax.Array | None = None


@dataclass(frozen=True)
class Spec:
    """What the statistics are taken over, and how they are applied.

    Attributes:
      reduction: how x is split, and which axes of the split shape are reduced.
      axis_name: device or vmap axes that are reduced as well.
      centered: whether the mean is subtracted.
      epsilon: added to the variance, or to its root, as epsilon_in says.
      correction: the count is reduced by it in the variance.
      epsilon_in: "var" or "std".
      dtype: that of the output; None where statistics alone are asked for.
      full_range: whether each group is divided by a power of two, whatever its dtype.
      segments: what ids name as groups along the first reduction axis; None where that is reduced
        whole.
      adjust: ``adjust(loops, stats, param)``, the statistics that are applied instead of ``stats``;
        None where these are.
      power_axes: the axes along which all groups are divided by one power of two.
    """

    reduction: Reduction
    axis_name: AxisName = None
    centered: bool = True
    # so small that it changes no variance, and large enough for float32 to need no scaling
    epsilon: float = 1e-30
    correction: float = 0.0
    epsilon_in: str = "var"
    dtype: jnp.dtype | None = None
    full_range: bool = False
    segments: Any = None  # Segments; checkers need not know where there are none
    adjust: Callable | None = None
    power_axes: tuple[int, ...] = ()

    def __post_init__(self):  # these facts are hashed
        for name, made in (("axis_name", hashable), ("centered", bool), ("full_range", bool)):
            object.__setattr__(self, name, made(getattr(self, name)))

    @property
    def axes(self) -> tuple[int, ...]:
        """The reduction axes, of the split shape."""
        return self.reduction.axes

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """The reduction axes but for that of segments."""
        return (
            self.axes
            if self.segments is None
            else tuple(axis for axis in self.axes if axis != self.segments.axis)
        )

    @property
    def ordinary(self) -> bool:
        """Whether groups are what the axes span, and normalized by their own statistics: kernels
        are for no others.
        """
        return self.segments is None and self.adjust is None

    def places(self, ids: jax.Array | None) -> Places | None:
        """The :meth:`Segments.places` of these ids; None without ids."""
        return None if ids is None else self.segments.places(ids)

    @property
    def stats_shape(self) -> tuple[int, ...]:
        """The shape of the statistics: a reduced axis has size one, that of segments as many as
        they are.
        """
        shape = list(self.reduction.stats_shape)
        if self.segments is not None:
            shape[self.reduction.whole_axis(self.segments.axis)] = self.segments.number
        return tuple(shape)

    @property
    def power_of_epsilon(self) -> int:
        """Scaling x by s scales epsilon by s to this power."""
        return 2 if self.epsilon_in == "var" else 1

    def lowest_power(self, dtype, epsilon: jax.Array | None = None) -> Any:
        """The least exponent p of the 2**p that data of this dtype are divided by; None if they
        need no scaling.

        They need it where squares overflow, and where squares vanish although epsilon is smaller
        still.
        """
        finfo = jnp.finfo(compute_dtype(dtype))
        if not (
            self.full_range
            or needs_power(dtype)
            or self.epsilon < float(finfo.tiny) / float(finfo.eps)
        ):
            return None
        if epsilon is None:
            return (
                (math.frexp(self.epsilon)[1] - 60) // self.power_of_epsilon
                if self.epsilon
                else -finfo.maxexp
            )
        epsilon = lax.stop_gradient(epsilon).astype(finfo.dtype)
        return jnp.where(
            epsilon > 0, (jnp.frexp(epsilon)[1] - 60) // self.power_of_epsilon, -finfo.maxexp
        )

    def shared_axes(self, *params: jax.Array | None) -> tuple[int, ...]:
        """The reduction axes along which none of the parameters differs."""
        return tuple(
            axis for axis in self.axes if all(a is None or a.shape[axis] == 1 for a in params)
        )

    def is_of_groups(self, where: jax.Array | None) -> bool:
        """Whether a mask, or weights, split, are the same for all elements of each group that are
        on this device.
        """
        return self.shared_axes(where) == self.axes

    @property
    def in_rows(self) -> bool:
        """Whether each group is a row: all of the last axes, and nothing of another."""
        longer = [
            axis for axis, size in enumerate(self.reduction.split_shape) if rough_product(size) > 1
        ]
        reduced = [axis for axis in longer if axis in self.axes]
        return bool(reduced) and longer[-len(reduced) :] == reduced

    def along(self, ids, num_segments) -> tuple["Spec", jax.Array | None]:
        """This spec by segments, and the ids, checked; without ids the spec as it is, and None."""
        if ids is None and num_segments is None:
            return self, None
        reduction, axis = self.reduction, self.axes[0]
        own = reduction.whole_axis(axis)
        ids = validation.segments(ids, num_segments, reduction.shape[: own + 1])
        if len(reduction.parts[own]) > 1:
            raise ValueError(
                f"segments must lie along an axis that is not split: axis {own}, the first one "
                "with a reduction, is split into "
                f"{reduction.parts[own]}. Reshape x first."
            )
        return replace(self, segments=Segments(axis, index(num_segments), ids.shape)), ids

    def batched(self, size: int) -> "Spec":
        """The spec of an array with one more axis in front."""
        reduction = self.reduction
        more = Reduction(
            (size, *reduction.shape),
            ((size,), *reduction.parts),
            tuple(axis + 1 for axis in reduction.axes),
        )
        return replace(self, reduction=more)
