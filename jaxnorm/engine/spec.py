"""Static arguments of a norm: the groups that share statistics, and the use of the statistics."""

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
from jaxnorm.arguments.dtypes import compute_dtype, needs_exponent
from jaxnorm.arguments.options import AxisName
from jaxnorm.engine.collectives import hashable
from jaxnorm.engine.segments import ScatterIndices, Segments


class Operands(NamedTuple):
    """The arrays of a norm; None stands for an array that is not given.

    Attributes:
      x: the data.
      where, scale, bias: arrays that broadcast against x; inside of a program, against its split
        shape.
      ids: the segment of each position.
      epsilon: a traced epsilon, added to the variance besides the epsilon of the spec.
      param: the last argument of ``Spec.adjust`` or ``Spec.formula``, an array or a pytree.
    """

    x: Any
    where: jax.Array | None = None
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    ids: jax.Array | None = None
    epsilon: jax.Array | None = None
    param: Any = None


@dataclass(frozen=True)
class Spec:
    """The groups that share statistics, and the way the statistics are applied.

    Attributes:
      reduction: how x is split, and which axes of the split shape are reduced.
      axis_name: device or vmap axes that are reduced as well.
      centered: whether the mean is subtracted.
      epsilon: added to the variance or to its root, or the least root, as epsilon_in says.
      correction: the variance divides by the count less this number.
      epsilon_in: "var", "std" or "max".
      dtype: dtype of the output; None where only statistics are asked for.
      full_range: whether each group is divided by a power of two, whatever its dtype.
      batch_invariant: whether the bits of a group must not depend on the other groups.
      segments: the groups that ids name along the first reduction axis; None where that axis is
        reduced whole.
      adjust: ``adjust(loops, stats, param)`` returns the statistics that are applied instead of
        ``stats``, or an :class:`~jaxnorm.engine.reference.Adjusted`; None where ``stats`` are
        applied.
      exponent_axes: axes along which all groups are divided by one power of two.
      formula: ``formula(loops, x, stats, scale, bias, param)`` returns the output, split for loops,
        where it is not ``(x - mean) / sqrt(var + epsilon) * scale + bias``; None where it is.
    """

    reduction: Reduction
    axis_name: AxisName = None
    centered: bool = True
    # it is so small that it changes no variance, and large enough that float32 needs no scaling:
    # see lowest_exponent
    epsilon: float = 1e-30
    correction: float = 0.0
    epsilon_in: str = "var"
    dtype: jnp.dtype | None = None
    full_range: bool = False
    batch_invariant: bool = False
    segments: Any = None  # Segments; Any spares type checkers each test for None
    adjust: Callable | None = None
    exponent_axes: tuple[int, ...] = ()
    formula: Callable | None = None

    def __post_init__(self):  # static arguments must be hashable
        flags = ("centered", "full_range", "batch_invariant")
        for name, made in (("axis_name", hashable), *((flag, bool) for flag in flags)):
            object.__setattr__(self, name, made(getattr(self, name)))

    @property
    def axes(self) -> tuple[int, ...]:
        """The reduction axes, of the split shape."""
        return self.reduction.axes

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """The reduction axes without the axis of segments."""
        return (
            self.axes
            if self.segments is None
            else tuple(axis for axis in self.axes if axis != self.segments.axis)
        )

    @property
    def ordinary(self) -> bool:
        """Whether the axes span the groups, and their own statistics normalize them.

        Kernels take no other norms.
        """
        return self.segments is None and self.adjust is None and self.formula is None

    def scatter_indices(self, ids: jax.Array | None) -> ScatterIndices | None:
        """Return the :meth:`Segments.scatter_indices` of these ids; None without ids."""
        return None if ids is None else self.segments.scatter_indices(ids)

    @property
    def stats_shape(self) -> tuple[int, ...]:
        """The shape of the statistics.

        A reduced axis has size one. The axis of segments has their number as its size.
        """
        shape = list(self.reduction.stats_shape)
        if self.segments is not None:
            shape[self.reduction.whole_axis(self.segments.axis)] = self.segments.number
        return tuple(shape)

    @property
    def power_of_epsilon(self) -> int:
        """The power of s that scales epsilon when s scales x."""
        return 2 if self.epsilon_in == "var" else 1

    def least_epsilon(self, dtype) -> float:
        """Return the least epsilon that hides what squares too small for this dtype lose."""
        # A square below tiny loses digits, and the variance is wrong by up to tiny. So are the sum
        # of variance and epsilon, and the square of an epsilon that is the least root. The root of
        # a variance is wrong by up to sqrt(tiny).
        tiny, eps = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).eps)
        least = {"var": tiny / eps, "std": math.sqrt(tiny) / eps, "max": math.sqrt(tiny / eps)}
        return least[self.epsilon_in]

    def epsilon_hides_squares(self, dtype) -> bool:
        """Return whether epsilon hides what squares too small for this dtype lose."""
        return self.epsilon >= self.least_epsilon(dtype)

    def lowest_exponent(self, dtype, epsilon: jax.Array | None = None) -> Any:
        """Return the least p of the 2**p that data of this dtype are divided by.

        It is None if the data need no scaling. They need it where squares overflow, and where
        squares vanish although epsilon is smaller still.
        """
        finfo = jnp.finfo(compute_dtype(dtype))
        if not (
            self.full_range or needs_exponent(dtype) or not self.epsilon_hides_squares(finfo.dtype)
        ):
            return None
        # At this p the variance of a group that is smaller still is about 2**-59 of epsilon, so
        # that more scaling would change nothing, and epsilon / 2**(2 p) stays in the range.
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
        """Return the reduction axes along which none of the parameters differs."""
        return tuple(
            axis for axis in self.axes if all(a is None or a.shape[axis] == 1 for a in params)
        )

    def treats_groups_alike(self, where: jax.Array | None) -> bool:
        """Return whether a split mask treats all elements of a group alike.

        Only elements on this device count. The mask may be weights.
        """
        return self.shared_axes(where) == self.axes

    @property
    def reduces_trailing_axes(self) -> bool:
        """Whether the norm reduces trailing axes: all of the last axes, and no other axis."""
        longer = [
            axis for axis, size in enumerate(self.reduction.split_shape) if rough_product(size) > 1
        ]
        reduced = [axis for axis in longer if axis in self.axes]
        return bool(reduced) and longer[-len(reduced) :] == reduced

    def along(self, ids, num_segments) -> tuple["Spec", jax.Array | None]:
        """Return this spec by segments, and the checked ids.

        Without ids the spec stays as it is, and the ids are None.
        """
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
        """Return the spec of an array with one more axis in front."""
        reduction = self.reduction
        more = Reduction(
            (size, *reduction.shape),
            ((size,), *reduction.parts),
            tuple(axis + 1 for axis in reduction.axes),
        )
        return replace(self, reduction=more)
