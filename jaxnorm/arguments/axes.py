"""Reduction axes, given as integers or as a bracket pattern; this file needs no JAX.

A pattern names the axes of an array and puts brackets around the reduced ones::

    "[n h w] c"         batch norm          "n [h w] c"            instance norm
    "n h w [c]"         layer norm          "n [h w] (g [c])"      group norm, g=32
    "... [c]"           any rank            "(k [n]) [h w] c"      ghost batch norm, k=4

``( )`` splits one axis into several. All of their sizes but one are passed by keyword.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple, TypeAlias, cast

Axes: TypeAlias = int | Iterable[int] | str

# the value of a symbolic size in decisions: when the program runs, it may be large
MANY_MORE = 1 << 20

# group 1 matches tokens; a character that matches outside of it is an error
_TOKEN = re.compile(r"(\.\.\.|[A-Za-z_]\w*|[\[\]()])|\S")


@dataclass(frozen=True)
class Reduction:
    """The reduction axes of one shape.

    Attributes:
      shape: the shape of the array.
      parts: the sizes that each axis of ``shape`` is split into.
      axes: the reduction axes; they index ``split_shape``, in which every ( ) axis is split.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The shape with every split axis replaced by its parts."""
        return tuple(size for sizes in self.parts for size in sizes)

    @property
    def group_size(self) -> int:
        """The number of elements of each group."""
        return math.prod(self.split_shape[axis] for axis in self.axes)

    @property
    def split_stats_shape(self) -> tuple[int, ...]:
        """The split shape of the statistics, in which a reduced part has size one."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.split_shape))

    @property
    def stats_shape(self) -> tuple[int, ...]:
        """The shape of the statistics.

        A reduced axis has size one. The size of a split axis is the product of its parts that are
        not reduced.
        """
        left = iter(self.split_stats_shape)
        return tuple(math.prod(next(left) for _ in sizes) for sizes in self.parts)

    @property
    def unsplit_reduced(self) -> list[int]:
        """The axes of ``shape`` that are reduced as a whole."""
        reduced = [self.whole_axis(axis) for axis in self.axes]
        return [axis for axis in reduced if len(self.parts[axis]) == 1]

    def whole_axis(self, axis: int) -> int:
        """Return the axis of ``shape`` that an axis of ``split_shape`` is a part of."""
        return [own for own, sizes in enumerate(self.parts) for _ in sizes][axis]

    @property
    def without_first(self) -> "Reduction":
        """The reduction axes of each element of the first axis, which is not reduced or split."""
        return Reduction(self.shape[1:], self.parts[1:], tuple(axis - 1 for axis in self.axes))

    def fit(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the split form of a shape that broadcasts against ``self.shape``.

        An axis that ``self`` splits into g blocks may also have size g.
        """
        padded = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
        triples = zip(padded, self.shape, self.parts, strict=True)
        return tuple(
            s
            for size, full, sizes in triples
            for s in (sizes if size == full else (size, *(1,) * (len(sizes) - 1)))
        )


def is_static(shape: tuple) -> bool:
    """Return whether all sizes are known; symbolic sizes of ``jax.export`` are not."""
    return all(isinstance(size, int) for size in shape)


def rough_product(*sizes: object) -> int:
    """Return the product of the sizes, for decisions that depend on it.

    A symbolic size is unknown until the program runs. It counts as MANY_MORE.

    >>> rough_product(2, 3)
    6
    """
    return math.prod(size if isinstance(size, int) else MANY_MORE for size in sizes)


def resolve(
    axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None
) -> Reduction:
    """Return the :class:`Reduction` of ``shape`` by axes or by a pattern.

    Each distinct pattern is parsed once for each shape.

    >>> resolve((0, 1, 2), (8, 4, 4, 6)).stats_shape
    (1, 1, 1, 6)
    >>> resolve("n [h w] (g [c])", (8, 4, 4, 6), {"g": 3}).stats_shape
    (8, 1, 1, 3)
    """
    if isinstance(axes, str):
        # sorted, so that the order of the keywords makes no second entry in the cache
        given = dict(sorted((sizes or {}).items()))
        return _resolve_pattern(axes, tuple(shape), tuple(given), *given.values())
    if sizes:
        raise TypeError(
            f"{', '.join(sorted(sizes))} must be an argument, or the size of a name in a pattern: "
            f"got the axes {axes!r}."
        )
    return unsplit(shape, canonical_axes(axes, len(shape)))


def names(pattern: str, shape: tuple[int, ...]) -> list[list[str]]:
    """Return the names of each axis of an array: several where an axis is split.

    Axes that ``...`` stands for have no names.

    >>> names("n ... [(g c)]", (8, 4, 4, 6))
    [['n'], [], [], ['g', 'c']]
    """
    report = partial(_error, pattern, shape)
    found = _expand_ellipsis(_parse(pattern, report), len(shape), report)
    return [[item.name for item in items if "." not in item.name] for items in found]


def whole(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the reduction axes of a norm that splits no axis."""
    if isinstance(axes, str) and "(" in axes:
        raise ValueError(
            f"axes must split no axis here: got {axes!r}. Use standardize, which takes the sizes "
            "by keyword."
        )
    return resolve(axes, shape).axes


def unsplit(shape: tuple[int, ...], axes: tuple[int, ...]) -> Reduction:
    """Return the reduction of whole axes; they may be none."""
    return Reduction(tuple(shape), tuple((size,) for size in shape), axes)


def in_groups(
    shape: tuple[int, ...], axes: tuple[int, ...], channel: int, groups: int
) -> Reduction:
    """Return the reduction of whole axes, and of the channels within each of their groups.

    >>> in_groups((8, 4, 4, 6), (1, 2), 3, 2) == resolve("n [h w] (g [c])", (8, 4, 4, 6), {"g": 2})
    True
    """
    parts = tuple(
        (groups, size // groups) if axis == channel else (size,) for axis, size in enumerate(shape)
    )
    return Reduction(
        tuple(shape),
        parts,
        tuple(sorted((channel + 1, *(axis + (axis > channel) for axis in axes)))),
    )


def integer(value: Any, must: str, beside: str = "") -> int:
    """Return ``value`` if it is a static integer.

    Raises:
      TypeError: it is not; the message begins with ``must`` and ends with ``beside``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        # __index__ accepts integers of NumPy, and refuses floats and traced values
        return index(value)
    except TypeError:
        raise TypeError(f"{must}: got {value!r} ({type(value).__name__}){beside}.") from None


def canonical_axes(axes: int | Iterable[int], rank: int, name: str = "axes") -> tuple[int, ...]:
    """Return the axes sorted and non-negative.

    >>> canonical_axes((-1, 0), 3)
    (0, 2)
    """
    # an array without axes is an Iterable, and raises when it is iterated
    several = (
        isinstance(axes, Iterable) and not isinstance(axes, str) and getattr(axes, "ndim", 1) > 0
    )
    given: tuple[Any, ...] = tuple(cast(Iterable, axes)) if several else (axes,)
    if not given:
        raise ValueError(f"{name} must name at least one axis: got () for an array of rank {rank}.")
    result = []
    for axis in given:
        wanted = (
            "integers or a pattern" if name == "axes" and not isinstance(axes, str) else "integers"
        )
        axis = integer(axis, f"{name} must be {wanted}", f" for an array of rank {rank}")
        if not -rank <= axis < rank:
            raise ValueError(
                f"{name} must lie in [{-rank}, {rank}) for an array of rank {rank}: got axis "
                f"{axis}."
            )
        result.append(axis % rank)
    if len(set(result)) < len(result):
        raise ValueError(
            f"{name} must not repeat an axis: got {given} for an array of rank {rank}."
        )
    return tuple(sorted(result))


def other_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the axes of an array of rank ``rank`` that are not among ``axes``."""
    return tuple(axis for axis in range(rank) if axis not in axes)


class _Name(NamedTuple):
    """One name of a pattern.

    Attributes:
      name: the name.
      column: its position in the pattern.
      reduced: whether its axis is reduced.
    """

    name: str
    column: int
    reduced: bool


# a function of a message and a column that returns the error
Report = Callable[..., ValueError]


def _error(
    pattern: str, shape: tuple[int, ...], message: str, column: int | None = None
) -> ValueError:
    """Return an error that shows the pattern, a caret under the column, and the shape."""
    caret = "" if column is None else f"\n    {' ' * (column + 1)}^"
    return ValueError(f'{message}\n    "{pattern}"{caret}\n    shape {shape}')


# typed: without it g=2.0, which is refused, would be taken for an earlier g=2
@lru_cache(maxsize=4096, typed=True)
def _resolve_pattern(
    pattern: str, shape: tuple[int, ...], named: tuple[str, ...], *sizes: int
) -> Reduction:
    report = partial(_error, pattern, shape)
    axes = _parse(pattern, report)
    known = dict(zip(named, sizes, strict=True))
    _check_sizes(known, {item.name for items in axes for item in items}, pattern, report)
    axes = _expand_ellipsis(axes, len(shape), report)
    parts = tuple(
        _split_axis(size, items, known, report) for size, items in zip(shape, axes, strict=True)
    )
    reduced = tuple(
        position for position, item in enumerate(itertools.chain(*axes)) if item.reduced
    )
    if not reduced:
        raise report(
            "a pattern must have at least one reduction axis: none stands in [ ]. Put [ ] around "
            "the axes to reduce."
        )
    return Reduction(shape, parts, reduced)


def _parse(pattern: str, report: Report) -> list[list[_Name]]:
    """Return the names of each axis: several names where it is split."""
    axes: list[list[_Name]] = []
    open_at: dict[str, int] = {}
    for match in _TOKEN.finditer(pattern):
        token, column = match[0], match.start()
        if match[1] is None:
            raise report(
                f"a pattern holds names, '...', [ ] and ( ) only: found {token!r}.", column
            )
        if token in "[(":
            if token in open_at:
                raise report(
                    f"{token} must not be nested: a second one before the first is closed.", column
                )
            open_at[token] = column
            axes += [[]] if token == "(" else []
        elif token in "])":
            opening = "[" if token == "]" else "("
            if opening not in open_at:
                raise report(f"every {token} must close a {opening}: this one closes none.", column)
            # the bracket that was opened last must be the one that closes first
            if max(open_at, key=open_at.__getitem__) != opening:
                raise report("[ ] and ( ) must not cross: close the inner one first.", column)
            del open_at[opening]
        else:
            if any(item.name == token for items in axes for item in items):
                raise report(f"a pattern must name each axis once: {token!r} stands twice.", column)
            if token == "..." and "(" in open_at:
                raise report("... must stand outside ( ): it stands for whole axes.", column)
            axes += [[]] if "(" not in open_at else []
            axes[-1].append(_Name(token, column, "[" in open_at))
    for token, column in open_at.items():
        raise report(f"every {token} must be closed: this one is not.", column)
    # A split axis has one statistic for each block of consecutive elements. So the parts
    # that are not reduced must be the outer ones.
    for before, after in itertools.chain(*map(itertools.pairwise, axes)):
        if before.reduced and not after.reduced:
            message = (
                f"within ( ) reduction axes must stand last: {after.name!r} follows one. "
                "Reshape or transpose the array first."
            )
            raise report(message, after.column)
    return [items for items in axes if items]


def _check_sizes(known: dict[str, int], names: set[str], pattern: str, report: Report) -> None:
    for name, size in known.items():
        if name not in names:
            raise TypeError(
                f"{name!r} is neither an argument nor a name in the pattern {pattern!r}."
            )
        if integer(size, f"the size of {name!r} must be an integer") < 1:
            raise report(f"the size of {name!r} must be at least 1: got {size}.")


def _expand_ellipsis(axes: list[list[_Name]], rank: int, report: Report) -> list[list[_Name]]:
    dots = [i for i, items in enumerate(axes) if items[0].name == "..."]
    count = len(axes) - len(dots)
    if (count > rank) if dots else (count != rank):
        raise report(
            f"the pattern must name every axis: it names {count}{' or more' if dots else ''}, the "
            f"array has rank {rank}."
        )
    # at most one: a pattern names each axis once, and ... counts as a name
    for i in dots:
        axes[i : i + 1] = [[axes[i][0]._replace(name=f"...{k}")] for k in range(rank - count)]
    return axes


def _split_axis(
    size: int, items: list[_Name], known: dict[str, int], report: Report
) -> tuple[int, ...]:
    unknown = [item for item in items if item.name not in known]
    if len(unknown) > 1:
        missing = ", ".join(f"{item.name}=…" for item in unknown[:-1])
        raise report(
            f"all sizes within ( ) but one must be given: pass {missing} by keyword.",
            unknown[0].column,
        )
    given = math.prod(known[item.name] for item in items if item.name in known)
    if (size % given) if unknown else (size != given):
        text = " * ".join(f"{item.name}={known[item.name]}" for item in items if item.name in known)
        verb = "divide" if unknown else "equal"
        raise report(
            f"{text} must {verb} the size of its axis: {given} against {size}.", items[0].column
        )
    return tuple(known.get(item.name, size // given) for item in items)
