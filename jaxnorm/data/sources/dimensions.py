"""Axes by name: the dimensions of an array in its file, or else the names in its pattern."""

import re
from collections.abc import Collection
from itertools import groupby

from jaxnorm.arguments import axes as arguments
from jaxnorm.arguments.axes import Axes
from jaxnorm.data.sources.addresses import PatternError
from jaxnorm.data.sources.readers import Leaf


def axis_of(axis: int | str, leaf: Leaf, axes: Axes) -> int | None:
    """Return an axis by its number or name; None if the leaf has no such axis.

    >>> axis_of("time", Leaf((9, 2), "float32", dims=("time", "x")), 0)
    0
    >>> axis_of("time", Leaf((9, 2), "float32"), "[n] time")
    1
    """
    rank = len(leaf.shape)
    if isinstance(axis, int):
        return axis % rank if -rank <= axis < rank else None
    if axis in leaf.dims:
        return leaf.dims.index(axis)
    named = arguments.names(axes, leaf.shape) if isinstance(axes, str) else []
    return named.index([axis]) if [axis] in named else None


def lacking(leaf: Leaf, axes: Axes, of_file: Collection[str]) -> list[str]:
    """Return the dimensions of a file that a pattern names and a leaf lacks.

    >>> lacking(Leaf((9, 2), "float32", dims=("lat", "lon")), "[time] ...", {"time", "lat", "lon"})
    ['time']
    """
    if not isinstance(axes, str) or not leaf.dims:
        return []
    words = dict.fromkeys(re.findall(r"\w+", axes))
    return [word for word in words if word in of_file and word not in leaf.dims]


def check(
    path: str,
    name: str,
    leaf: Leaf,
    axes: Axes,
    is_named: bool,
    of_file: Collection[str],
    hint: str = "",
) -> None:
    """Refuse a pattern that names dimensions of the file, but not as the leaf has them.

    A pattern with none of their names goes by position. ``is_named`` says whether the pattern was
    given for this leaf, ``of_file`` names the dimensions of all leaves. The hint is added where a
    pattern has another number of names than the leaf has axes.
    """
    if not isinstance(axes, str):
        return
    dims = set(leaf.dims)
    try:
        found = arguments.names(axes, leaf.shape)
    except ValueError as error:
        # too few names or too many may be told by those of the file
        is_number = "must name every axis" in str(error)
        if not dims & set(re.findall(r"\w+", axes)) or not is_number:
            refused = PatternError(f"{path}{f', {name!r}' if name else ''}: {error}")
            if hint and is_number:
                refused.add_note(hint)
            raise refused from None
        found = None
    is_lacking = bool(lacking(leaf, axes, of_file))
    if (
        found is None
        or is_lacking
        or any(
            word in dims and word != dim
            # a file without names has none of them
            for dim, names in zip(leaf.dims, found, strict=False)
            for word in names
        )
    ):
        must = f"the pattern of {name!r} must name its dimensions in their order"
        listed = ", ".join(leaf.dims)
        raise PatternError(
            f"{path}: {must}, {listed}: got {axes!r}. {_remedy(name, leaf.dims, axes, is_named)}"
        )


def _remedy(name: str, dims: tuple[str, ...], axes: Axes, is_named: bool) -> str:
    """Return the pattern in the order of the dimensions, in a sentence.

    >>> _remedy("t", ("time", "level", "lat", "lon"), "[lat lon time]", True)
    "Write '[time] level [lat lon]'."
    """
    pattern = str(axes)
    by_hand = "Name all of them in this order, or none."
    if "(" in pattern or "." in pattern or not all(map(str.isidentifier, dims)):
        return by_hand
    reduced = set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", pattern))))
    if not reduced & set(dims):
        return by_hand
    parts = [(pooled, " ".join(run)) for pooled, run in groupby(dims, reduced.__contains__)]
    written = " ".join(f"[{run}]" if pooled else run for pooled, run in parts)
    if is_named or not name:
        return f"Write {written!r}."
    return f"Name the arrays to fit, each with its pattern: {f'{name}={written}'!r}."
