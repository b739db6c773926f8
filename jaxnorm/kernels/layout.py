"""The four axes of struct Shape in shape.h: groups of ``(N, P, G, D)`` are reduced over P and D.

layer norm   (rows, 1, 1, C)         batch norm      (1, N H W, C, 1)
group norm   (N, H W, g, C / g)      instance norm   (N, H W, C, 1)
"""

import math
from typing import NamedTuple

from jaxnorm.arguments.axes import Reduction


class Layout(NamedTuple):
    """The sizes of the four axes.

    Attributes:
      n, p, g, d: the four sizes.
      scales: n where scale and bias differ along N, else 1.
      params: the split shape that scale and bias are broadcast to. It is full along G and D, and
        along N where ``scales`` is N.
      axes: the axes of the split shape that make up each of the four.
    """

    n: int
    p: int
    g: int
    d: int
    scales: int
    params: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    def mask(self, shape: tuple[int, ...], where: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the split shape that a mask is broadcast to.

        ``shape`` is the split shape of x, ``where`` of the mask. The result is full along P, and
        along N where the mask differs there. It is None where the mask differs along G or D.
        """
        n, p, g, d = self.axes
        if any(where[axis] != 1 for axis in (*g, *d)):
            return None
        full = {*p, *(n if any(where[axis] != 1 for axis in n) else ())}
        return tuple(size if axis in full else 1 for axis, size in enumerate(shape))


def find(reduction: Reduction, *given: tuple[int, ...]) -> Layout | None:
    """Return the layout of arrays whose scale and bias have these split shapes.

    It is None if they have no layout.

    >>> from jaxnorm.arguments.axes import resolve
    >>> find(resolve("n [h w] (g [c])", (2, 8, 8, 12), {"g": 3}), (1, 1, 1, 3, 4))
    Layout(n=2, p=64, g=3, d=4, scales=1, params=(1, 1, 1, 3, 4), axes=((0,), (1, 2), (3,), (4,)))
    >>> find(resolve("a [b] c [d] e", (2, 2, 2, 2, 2)))
    """
    sizes = reduction.split_shape
    if 0 in sizes:
        return None
    runs: list[tuple[bool, list[int]]] = [(False, [])]  # whether reduced; neighbouring axes
    for axis in (axis for axis, size in enumerate(sizes) if size != 1):
        if (axis in reduction.axes) != runs[-1][0]:
            runs.append((axis in reduction.axes, []))
        runs[-1][1].append(axis)
    groups = [axes for _, axes in runs]
    if len(groups) == 2:  # rows: leading axes along which scale and bias do not vary are P
        varying = [any(shape[axis] != 1 for shape in given) for axis in groups[1]]
        start = varying.index(True) if True in varying else 0
        groups = [groups[0], groups[1][:start], [], groups[1][start:]]
    if len(groups) > 4:
        return None
    n, p, g, d = groups + [[]] * (4 - len(groups))
    count = tuple(math.prod(sizes[axis] for axis in axes) for axes in (n, p, g, d))
    per_example = any(shape[axis] != 1 for shape in given for axis in n)
    if any(shape[axis] != 1 for shape in given for axis in p) or (per_example and not p):
        return None
    full = {*g, *d, *(n if per_example else ())}
    params = tuple(size if axis in full else 1 for axis, size in enumerate(sizes))
    return Layout(
        count[0],
        count[1],
        count[2],
        count[3],
        count[0] if per_example else 1,
        params,
        tuple(map(tuple, (n, p, g, d))),
    )


def find_mapped(reduction: Reduction, *given: tuple[int, ...]) -> tuple[Layout, int] | None:
    """Return the layout, and how many leading axes the kernel is mapped over.

    It is mapped over the axes of examples whose scale or bias differ, where a row has a layout and
    their rows have none.

    >>> from jaxnorm.arguments.axes import resolve
    >>> find_mapped(resolve("b t [c]", (2, 7, 5)), (2, 1, 5))[0].n
    7
    """
    if layout := find(reduction, *given):
        return layout, 0
    differ = bool(reduction.shape) and any(shape[0] != 1 for shape in given)
    if not differ or 0 in reduction.axes or len(reduction.parts[0]) > 1 or 0 in reduction.shape:
        return None
    found = find_mapped(reduction.without_first, *(shape[1:] for shape in given))
    return found and (found[0], found[1] + 1)
