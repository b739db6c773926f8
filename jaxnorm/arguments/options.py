"""The options that every norm takes, and the types of what callers pass."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

from jax.typing import ArrayLike, DTypeLike


class AxisGroups(NamedTuple):
    """An ``axis_name`` whose devices share statistics in groups, as ``axis_index_groups`` of
    :func:`jax.lax.psum`.
    """

    axis_name: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


Param = ArrayLike | None
AxisName = str | Sequence[str] | AxisGroups | None
EpsilonIn = Literal["var", "std"]


class NormOptions(TypedDict, total=False):
    """The options that every norm takes, by keyword, beside its own.

    Attributes:
      axis_name: name (or names) of device or vmap axes to reduce over as well, weighted by count.
      full_range: first divides each group by a power of two, which keeps elements of any size
        (1e-30, 3e38) accurate, for 1.2 to 2 times the work in plain JAX (bfloat16 input and
        ``epsilon`` below 1e-30 always do).
      implementation: None selects automatically, see :func:`jaxnorm.plan`; ``"native"`` is a CPU
        kernel, see :mod:`jaxnorm.kernels`, ``"xla"`` plain JAX, ``"reference"`` that without
        separate passes, joined axes, recomputed statistics.
      dtype: dtype of the output; that of ``x`` by default.
    """

    axis_name: AxisName
    full_range: bool
    implementation: str | None
    dtype: DTypeLike | None
