"""The options that every norm takes, and the types of arguments."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

from jax.typing import ArrayLike, DTypeLike


class AxisGroups(NamedTuple):
    """An ``axis_name`` whose devices share statistics in groups.

    The groups are given as in ``axis_index_groups`` of :func:`jax.lax.psum`.
    """

    axis_name: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


Param = ArrayLike | None
AxisName = str | Sequence[str] | AxisGroups | None
EpsilonIn = Literal["var", "std", "max"]


class NormOptions(TypedDict, total=False):
    """The options that every norm takes by keyword, besides its own.

    Functions accept ``mask`` as an alias of ``where``, and the calls of modules accept
    ``where`` as an alias of ``mask``. ``segment_ids`` is an alias of ``segments``
    everywhere.

    Attributes:
      axis_name: name (or names) of device or vmap axes to reduce over as well, weighted by count.
      full_range: first divides each group by a power of two. This keeps elements of any size
        (1e-30, 3e38) accurate, for 1.2 to 2 times the work in plain JAX. bfloat16 input and
        ``epsilon`` below 1e-30 always do so.
      implementation: None selects automatically, see :func:`jaxnorm.plan`. ``"native"`` is a CPU
        kernel, see :mod:`jaxnorm.kernels`. ``"xla"`` is plain JAX. ``"reference"`` is plain JAX
        without separate passes, merged axes and recomputed statistics.
      dtype: dtype of the output; by default the dtype of ``x``.
      batch_invariant: whether the bits of a group, in the output and, without a mask, in the
        gradient of ``x``, must not depend on how many groups are computed with it. Plain JAX then
        adds up in one order, for 0.9 to 2.3 times its usual time on a CPU. The CPU kernels always
        do, at no cost.
    """

    axis_name: AxisName
    full_range: bool
    implementation: str | None
    dtype: DTypeLike | None
    batch_invariant: bool
