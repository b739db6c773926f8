"""Match the shapes of Moments to the array that they normalize.

Where Moments have size g along an axis and the array has size C, the axis of the array
is cut into g equal blocks, and each element of the Moments serves one block.
"""

from dataclasses import replace
from typing import Any

import jax

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Reduction, resolve
from jaxnorm.engine.segments import Segments
from jaxnorm.engine.spec import Spec


def blocks_of(given: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    """Split ``shape`` so that Moments of the ``given`` shape broadcast against it."""
    padded = (1,) * (len(shape) - len(given)) + given
    divides = len(given) == len(shape) and all(
        s > 0 and c % s == 0 for s, c in zip(given, shape, strict=True) if s != c
    )
    if not divides:
        validation.check_fits("moments", given, shape)
    parts = tuple((c,) if s in (1, c) else (s, c // s) for s, c in zip(padded, shape, strict=True))
    return Reduction(shape, parts, ())


def blocks_along(
    given: tuple[int, ...], shape: tuple[int, ...], ids: Any, axes: Any, sizes: dict[str, int]
) -> tuple[Reduction, Segments | None, jax.Array | None]:
    """Return the :func:`blocks_of` x without the axis of segments, the segments, and their ids.

    Segments and ids are None where none are given.
    """
    if ids is None or axes is None:
        if ids is not axes:
            passed, missing = ("axes", "segments") if ids is None else ("segments", "axes")
            raise TypeError(
                f"segments and axes must be given together: got {passed} alone. Pass "
                f"{missing}=..., too."
            )
        if sizes:
            raise TypeError(
                f"{', '.join(sorted(sizes))} must be an argument, or the size of a name in a "
                "pattern: got no axes."
            )
        return blocks_of(given, shape), None, None
    own = resolve(axes, shape, sizes)
    first = own.whole_axis(own.axes[0])
    if len(given) != len(shape):
        raise ValueError(
            f"moments of segments must have the axes of x: moments have shape {given}, x has shape "
            f"{shape}."
        )
    blocks = blocks_of((*given[:first], shape[first], *given[first + 1 :]), shape)
    spec, ids = Spec(own).along(ids, given[first])
    return blocks, replace(spec.segments, axis=sum(map(len, blocks.parts[:first]))), ids
