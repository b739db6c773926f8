"""Reduction axes, given as integers or as a bracket pattern. No JAX in here.

A pattern names the axes of an array and puts brackets around those that are reduced::

    "[n h w] c"         batch norm          "n [h w] c"            instance norm
    "n h w [c]"         layer norm          "n [h w] (g [c])"      group norm, g=32
    "... [c]"           any rank            "(k [n]) [h w] c"      ghost batch norm, k=4

``( )`` splits one axis into several; all of their sizes but one are passed by keyword.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import index

Axes = int | Iterable[int] | str

MANY_MORE = 1 << 20  # what a symbolic size counts as

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|[\[\]()])")


@dataclass(frozen=True)
class Reduction:
    """The reduction axes of one shape: ``axes`` index ``split_shape``, the shape with every ( ) axis split."""

    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]  # the sizes that each axis of `shape` is split into
    axes: tuple[int, ...]

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The shape with every split axis replaced by its parts."""
        return tuple(size for sizes in self.parts for size in sizes)

    @property
    def group_size(self) -> int:
        """How many elements each group has."""
        return math.prod(self.split_shape[axis] for axis in self.axes)

    @property
    def split_stats_shape(self) -> tuple[int, ...]:
        """The shape of the statistics in split form: a reduced part has size one."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.split_shape))

    @property
    def stats_shape(self) -> tuple[int, ...]:
        """The shape of the statistics: a reduced axis has size one, a split one the product of its parts that are not reduced."""
        sizes_left, ends = self.split_stats_shape, itertools.accumulate(map(len, self.parts))
        return tuple(math.prod(sizes_left[end - len(sizes) : end]) for sizes, end in zip(self.parts, ends, strict=True))

    def fit(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The split form of a shape that broadcasts against ``self.shape``."""
        full = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
        return tuple(s for size, sizes in zip(full, self.parts, strict=True) for s in (sizes if size != 1 else (1,) * len(sizes)))


def static(shape: tuple) -> bool:
    """Whether all sizes are known; symbolic ones, of ``jax.export``, are not."""
    return all(isinstance(size, int) for size in shape)


def number(*sizes) -> int:
    """The product of the sizes, for decisions that depend on it; a symbolic size, unknown until the program runs, counts as MANY_MORE.

    >>> number(2, 3)
    6
    """
    return math.prod(size if isinstance(size, int) else MANY_MORE for size in sizes)


def resolve(axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None) -> Reduction:
    """Turns axes or a pattern into the :class:`Reduction` of ``shape``; parsed once for each distinct call.

    >>> resolve((0, 1, 2), (8, 4, 4, 6)).stats_shape
    (1, 1, 1, 6)
    >>> resolve("n [h w] (g [c])", (8, 4, 4, 6), {"g": 3}).stats_shape
    (8, 1, 1, 3)
    """
    if isinstance(axes, str):
        given = dict(sorted((sizes or {}).items()))
        return _resolve_pattern(axes, tuple(shape), tuple(given), *given.values())
    if sizes:
        raise TypeError(f"sizes go with a pattern: got {', '.join(sorted(sizes))} beside the axes {axes!r}.")
    return unsplit(shape, canonical_axes(axes, len(shape)))


def unsplit(shape: tuple[int, ...], axes: tuple[int, ...]) -> Reduction:
    """Reduces whole axes, which may be none."""
    return Reduction(tuple(shape), tuple((size,) for size in shape), axes)


def in_groups(shape: tuple[int, ...], axes: tuple[int, ...], channel: int, groups: int) -> Reduction:
    """Reduces whole axes, and the axis of channels within each of its groups.

    >>> in_groups((8, 4, 4, 6), (1, 2), 3, 2) == resolve("n [h w] (g [c])", (8, 4, 4, 6), {"g": 2})
    True
    """
    parts = tuple((groups, size // groups) if axis == channel else (size,) for axis, size in enumerate(shape))
    return Reduction(tuple(shape), parts, tuple(sorted((channel + 1, *(axis + (axis > channel) for axis in axes)))))


def canonical_axes(axes: int | Iterable[int], rank: int, name: str = "axes") -> tuple[int, ...]:
    """Sorted, non-negative axes.

    >>> canonical_axes((-1, 0), 3)
    (0, 2)
    """
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if not given:
        raise ValueError(f"{name} must name at least one axis: got () for an array of rank {rank}.")
    result = []
    for axis in given:
        if isinstance(axis, bool) or not hasattr(axis, "__index__"):
            raise TypeError(f"{name} must be integers or a pattern: got {axis!r} ({type(axis).__name__}) for an array of rank {rank}.")
        axis = index(axis)
        if not -rank <= axis < rank:
            raise ValueError(f"{name} must lie in [-{rank}, {rank}) for an array of rank {rank}: got axis {axis}.")
        result.append(axis % rank)
    if len(set(result)) < len(result):
        raise ValueError(f"{name} must not repeat an axis: got {given} for an array of rank {rank}.")
    return tuple(sorted(result))


def other_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The axes of an array of rank ``rank`` that are not among ``axes``."""
    return tuple(axis for axis in range(rank) if axis not in axes)


@dataclass(frozen=True)
class _Name:
    """One name of a pattern: where it stands, whether it is reduced, which ( ) it belongs to."""

    name: str
    column: int
    reduced: bool
    group: int | None


class _Report:
    """Raises errors that show the pattern, a caret under the place, and the shape."""

    def __init__(self, pattern: str, shape: tuple[int, ...]):
        self.pattern, self.shape = pattern, shape

    def error(self, message: str, column: int | None = None) -> ValueError:
        caret = "" if column is None else f"\n    {' ' * (column + 1)}^"
        return ValueError(f'{message}\n    "{self.pattern}"{caret}\n    shape {self.shape}')


@lru_cache(maxsize=4096, typed=True)  # or g=2.0, which is refused, would be taken for an earlier g=2
def _resolve_pattern(pattern: str, shape: tuple[int, ...], named: tuple[str, ...], *sizes: int) -> Reduction:
    report = _Report(pattern, shape)
    names = _parse(pattern, report)
    known = dict(zip(named, sizes, strict=True))
    _check_sizes(known, names, report)
    names = _expand_ellipsis(names, len(shape), report)
    parts: list[tuple[int, ...]] = []
    reduced: list[int] = []
    for size, items in zip(shape, _by_axis(names), strict=True):
        split = _split_axis(size, items, known, report)
        offset = sum(len(part) for part in parts)
        reduced += [offset + i for i, item in enumerate(items) if item.reduced]
        parts.append(split)
    if not reduced:
        raise report.error("a pattern must have at least one reduction axis: none stands in [ ]. Put [ ] around the axes to reduce.")
    return Reduction(shape, tuple(parts), tuple(reduced))


def _tokens(pattern: str, report: _Report) -> Iterable[tuple[str, int]]:
    position = 0
    while pattern[position:].strip():
        match = _TOKEN.match(pattern, position)
        if match is None:
            column = position + len(pattern[position:]) - len(pattern[position:].lstrip())
            raise report.error(f"a pattern holds names, '...', [ ] and ( ) only: found {pattern[column]!r}.", column)
        yield match[1], match.start(1)
        position = match.end()


def _parse(pattern: str, report: _Report) -> list[_Name]:
    names: list[_Name] = []
    open_at: dict[str, int] = {}
    group = 0
    for token, column in _tokens(pattern, report):
        if token in "[(":
            if token in open_at:
                raise report.error(f"{token} must not be nested: a second one before the first is closed.", column)
            open_at[token] = column
            group += token == "("
        elif token in "])":
            opening = "[" if token == "]" else "("
            if opening not in open_at:
                raise report.error(f"every {token} must close a {opening}: this one closes none.", column)
            if max(open_at, key=open_at.__getitem__) != opening:
                raise report.error("[ ] and ( ) must not cross: close the inner one first.", column)
            del open_at[opening]
        else:
            _check_name(token, column, names, "(" in open_at, report)
            names.append(_Name(token, column, "[" in open_at, group if "(" in open_at else None))
    for token, column in open_at.items():
        raise report.error(f"every {token} must be closed: this one is not.", column)
    _check_groups(names, report)
    return names


def _check_name(token: str, column: int, names: list[_Name], in_group: bool, report: _Report) -> None:
    if any(name.name == token for name in names):
        raise report.error(f"a pattern must name each axis once: {token!r} stands twice.", column)
    if token == "..." and in_group:
        raise report.error("... must stand outside ( ): it stands for whole axes.", column)


def _check_groups(names: list[_Name], report: _Report) -> None:
    for before, after in itertools.pairwise(names):
        if before.group is not None and before.group == after.group and before.reduced and not after.reduced:
            raise report.error(
                f"within ( ) reduction axes must stand last: {after.name!r} follows one. Reshape or transpose the array first.",
                after.column,
            )


def _check_sizes(known: dict[str, int], names: list[_Name], report: _Report) -> None:
    for name, size in known.items():
        if name not in {item.name for item in names}:
            raise TypeError(f"{name!r} is neither an argument nor a name in the pattern {report.pattern!r}.")
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"the size of {name!r} must be an integer: got {size!r} ({type(size).__name__}).")
        if index(size) < 1:
            raise report.error(f"the size of {name!r} must be at least 1: got {size}.")


def _expand_ellipsis(names: list[_Name], rank: int, report: _Report) -> list[_Name]:
    groups = {name.group for name in names if name.group is not None}
    count = sum(name.group is None and name.name != "..." for name in names) + len(groups)
    dots = [i for i, name in enumerate(names) if name.name == "..."]
    if (count > rank) if dots else (count != rank):
        raise report.error(f"the pattern must name every axis: it names {count}{' or more' if dots else ''}, the array has rank {rank}.")
    for i in dots:
        filled = [_Name(f"...{k}", names[i].column, names[i].reduced, None) for k in range(rank - count)]
        names = names[:i] + filled + names[i + 1 :]
    return names


def _by_axis(names: list[_Name]) -> list[list[_Name]]:
    result: list[list[_Name]] = []
    for name in names:
        if name.group is not None and result and result[-1][0].group == name.group:
            result[-1].append(name)
        else:
            result.append([name])
    return result


def _split_axis(size: int, items: list[_Name], known: dict[str, int], report: _Report) -> tuple[int, ...]:
    unknown = [item for item in items if item.name not in known]
    if len(unknown) > 1:
        missing = ", ".join(f"{item.name}=…" for item in unknown[:-1])
        raise report.error(f"all sizes within ( ) but one must be given: pass {missing} by keyword.", unknown[0].column)
    given = math.prod(known[item.name] for item in items if item.name in known)
    if (size % given) if unknown else (size != given):
        text = " * ".join(f"{item.name}={known[item.name]}" for item in items if item.name in known)
        verb = "divide" if unknown else "equal"
        raise report.error(f"{text} must {verb} the size of its axis: {given} against {size}.", items[0].column)
    return tuple(known.get(item.name, size // given) for item in items)
