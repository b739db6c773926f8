"""The leaves of a file to fit, and what axes, differences and weights mean for each of them."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from jaxnorm.arguments.axes import Axes
from jaxnorm.data.sources import dimensions, horizons
from jaxnorm.data.sources.addresses import PatternError, SourceError, expanded
from jaxnorm.data.sources.horizons import Horizon
from jaxnorm.data.sources.opening import guarded
from jaxnorm.data.sources.readers import COORDINATE, Leaf
from jaxnorm.data.trees import prefix_of


class Wanted(NamedTuple):
    """What is fitted of leaves, besides their axes.

    Attributes:
      diff: the axis along which differences are fitted, by number or name, or None.
      weights: pairs of a function's name and the leaf of its argument, whose values weight one
        dimension of other leaves.
      masks: leaves that serve as masks only, and are not fitted.
      where: pairs of a leaf and its mask.
      horizons: leaves that are fitted with an axis of steps.
    """

    diff: int | str | None = None
    weights: tuple[tuple[str, str], ...] = ()
    masks: frozenset[str] = frozenset()
    where: tuple[tuple[str, str], ...] = ()
    horizons: tuple[Horizon, ...] = ()


AS_IS = Wanted()


def leaves_to_fit(
    path: str, axes: Mapping[str, Axes], masks: Collection[str] = ()
) -> dict[str, Leaf]:
    """Return the leaves to fit: those that axes name, and the arrays of numbers in named trees.

    Masks are not among them.
    """
    leaves = guarded(path, lambda reader: reader.leaves)
    if not leaves:
        raise SourceError(f"{path} must hold arrays: it holds none.")
    named = {name: leaf for name, leaf in leaves.items() if prefix_of(axes, name) is not None}
    # a part of a longer leaf is named by itself, or is fitted with the longer one
    named = {
        name: leaf
        for name, leaf in named.items()
        if name in axes or not leaf.part_of or prefix_of(axes, leaf.part_of) is None
    }
    fitted = {
        name: leaf
        for name, leaf in named.items()
        if not leaf.unsupported and (name in axes or not leaf.is_coordinate)
        if name not in masks
    }
    if missing := [prefix for prefix in axes if prefix and not _names(prefix, named)]:
        if list(leaves) == [""]:
            way = f"give --pattern {axes[missing[0]]!r} without '{missing[0]}='"
            raise PatternError(f"{path} holds one array, which has no name: {way}.")
        wanted = ", ".join(map(repr, missing))
        held = ", ".join(repr(name) for name, leaf in leaves.items() if not leaf.part_of)
        raise PatternError(f"{path} must hold {wanted}: it holds {held}.")
    for prefix in axes:
        if (prefix in named and prefix not in fitted) or not _names(prefix, fitted):
            name = prefix if prefix in named else next(filter(_within(prefix), named))
            raise _no_number(path, name, leaves)
    unlike = _unlike(leaves, fitted, axes)
    return {name: leaf for name, leaf in fitted.items() if name not in unlike}


def without_dimensions(path: str, axes: Mapping[str, Axes]) -> dict[str, str]:
    """Return leaves that are left out, as they lack dimensions that one pattern for all names."""
    leaves = guarded(path, lambda reader: reader.leaves)
    supported = {
        name: leaf
        for name, leaf in leaves.items()
        if not leaf.unsupported and not leaf.part_of and not leaf.is_coordinate
    }
    return {
        name: f"no dimension {dims[0]!r}" for name, dims in _unlike(leaves, supported, axes).items()
    }


def _unlike(
    leaves: Mapping[str, Leaf], fitted: Mapping[str, Leaf], axes: Mapping[str, Axes]
) -> dict[str, list[str]]:
    """Return dimensions of the file that a pattern names and leaves lack, by leaf.

    A pattern for a leaf alone, or one that is right for none, is an error that others raise.
    """
    of_file = dimensions_of(leaves)
    unlike: dict[str, list[str]] = {}
    for prefix in axes:
        tree = {name: leaf for name, leaf in fitted.items() if prefix_of(axes, name) == prefix}
        lack = {
            name: dimensions.lacking(leaf, axes[prefix], of_file) for name, leaf in tree.items()
        }
        if prefix not in tree and not all(lack.values()):
            unlike |= {name: dims for name, dims in lack.items() if dims}
    return unlike


def dimensions_of(leaves: Mapping[str, Leaf]) -> set[str]:
    return {dim for leaf in leaves.values() for dim in leaf.dims}


def _within(prefix: str) -> Callable[[str], bool]:
    return lambda name: prefix_of({prefix: 0}, name) is not None


def _names(prefix: str, leaves: Mapping[str, Leaf]) -> bool:
    return any(map(_within(prefix), leaves))


def _no_number(path: str, name: str, leaves: Mapping[str, Leaf]) -> SourceError:
    held = f"{path} must hold numbers{f' in {name!r}' if name else ''}"
    said = f"{held}: it holds {leaves[name].unsupported or COORDINATE}."
    other = next((leaf for leaf in leaves if leaf and not leaves[leaf].unsupported), None)
    if other is None:
        return SourceError(said)
    way = f"Name what is fitted: axes={{{other!r}: 0}}, or --pattern {f'{other}=[n]'!r}"
    return PatternError(f"{said} {way}.")


def lacking(path: str, axes: Mapping[str, Axes], wanted: Wanted) -> dict[str, str]:
    """Return the leaves that :func:`pieces` leaves out for want of the axis of differences."""
    leaves = leaves_to_fit(expanded([path])[0], axes, wanted.masks)
    own = {name: axes[str(prefix_of(axes, name))] for name in leaves}
    return {
        name: f"no axis {wanted.diff!r}"
        for name, leaf in leaves.items()
        if dimensions.axis_of(wanted.diff, leaf, own[name]) is None  # type: ignore[arg-type]
    }


def differenced(
    path: str, named: Mapping[str, Leaf], own: Mapping[str, Axes], axes: Mapping, wanted: Wanted
) -> dict[str, int]:
    """Return the axis of the differences of each leaf that has it.

    Leaves without it are not fitted, and refused if the axes name them.
    """
    found = {
        leaf: dimensions.axis_of(wanted.diff, named[leaf], own[leaf])  # type: ignore[arg-type]
        for leaf in named
    }
    lacking = [leaf for leaf, axis in found.items() if axis is None]
    if len(lacking) == len(found) or any(leaf in axes for leaf in lacking):
        leaf = next(leaf for leaf in lacking if leaf in axes or len(lacking) == len(found))
        dims = ", ".join(named[leaf].dims) or repr(own[leaf])
        called = f" of {leaf!r}" if leaf else ""
        raise PatternError(
            f"diff must name an axis{called} in {path}: got {wanted.diff!r}, its axes are {dims}."
        )
    return {leaf: axis for leaf, axis in found.items() if axis is not None}


def weighted(
    path: str, named: Mapping[str, Leaf], own: Mapping[str, Axes], wanted: Wanted
) -> tuple[tuple[str, int, str, str], ...]:
    """Return which axes of which leaves are weighted."""
    leaves, is_table = guarded(path, lambda reader: (reader.leaves, reader.cuts_rows_only))
    result: list[tuple[str, int, str, str]] = []
    for function, key in wanted.weights:
        if key not in leaves:
            held = ", ".join(repr(name) for name, leaf in leaves.items() if not leaf.part_of)
            raise PatternError(f"{path} must hold the weights {key!r}: it holds {held}.")
        if is_table:
            must = f"{path} is a table, whose rows are weighted by masks"
            leaf = next(iter(named))
            raise PatternError(f"{must}: got weights={key!r}. Give where {leaf}={key} instead.")
        weights = leaves[key]
        if weights.unsupported or len(weights.shape) != 1:
            held = weights.unsupported or f"an array of shape {weights.shape}"
            raise PatternError(f"{path} must hold one axis of numbers in {key!r}: it holds {held}.")
        dim = weights.dims[0] if weights.dims else key.rpartition("/")[2]
        found = [
            (leaf, axis, function, key)
            for leaf in named
            if (axis := dimensions.axis_of(dim, named[leaf], own[leaf])) is not None
        ]
        for leaf, axis, *_ in found:
            if named[leaf].shape[axis] != weights.shape[0]:
                must = f"{path} must hold a weight for each index of {leaf!r} along {dim!r}"
                lengths = f"{weights.shape[0]} in {key!r} for {named[leaf].shape[axis]}"
                raise PatternError(f"{must}: there are {lengths}.")
        if not found:
            must = f"weights must lie along an axis of what is fitted: those of {key!r} lie along"
            raise PatternError(
                f"{must} {dim!r}. Name that axis so in a pattern, or fit an array that has it."
            )
        result += found
    return tuple(result)


def with_horizons(
    path: str, named: Mapping[str, Leaf], whole: Mapping[str, list[int]], wanted: Wanted
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return how leaves with horizons, and those that they are relative to, are cut: along rows.

    Returns:
      The axes along which each leaf can be cut. The leaves that are not fitted, but which others
      are relative to, each with the leaf that it is cut like.
    """
    cut = dict(whole)
    like: dict[str, str] = {}
    relative = dict.fromkeys((own.by for own in wanted.horizons if own.by is not None), 0)
    others = leaves_to_fit(path, relative) if relative else {}
    for horizon in wanted.horizons:
        if horizon.by is not None:
            horizons.check(path, named, others, horizon)
            like |= {} if horizon.by in whole else {horizon.by: horizon.leaf}
        for leaf in whole.keys() & {horizon.leaf, horizon.by}:
            if 0 not in whole[leaf]:
                called = f" of {leaf!r}" if leaf else ""
                must = f"{path}: the rows{called} must be reduced, for a horizon"
                raise PatternError(f"{must}. Write a pattern that begins with [n].")
            cut[leaf] = [0]
    return cut, like


def with_masks(
    path: str, named: Mapping[str, Leaf], whole: Mapping[str, list[int]], wanted: Wanted
) -> tuple[dict[str, list[int]], dict[str, str], tuple[str, ...]]:
    """Return how leaves are cut together with their masks.

    Returns:
      The axes along which each leaf can be cut: those that its mask has as well, if there are such.
      The masks that are cut, each like a leaf. The masks that are read whole for each piece.
    """
    cut, like = dict(whole), {}
    masks = leaves_to_fit(path, {by: 0 for _, by in wanted.where}) if wanted.where else {}
    for by, mask in masks.items():
        masked = [leaf for leaf, own in wanted.where if own == by and leaf in named]
        for leaf in masked:
            _check_mask(path, leaf, named[leaf].shape, by, mask.shape)
        leaves = [*masked, *([by] if by in named else [])]
        shared = [
            axis
            for axis, size in enumerate(mask.shape)
            if all(axis in cut[leaf] and named[leaf].shape[axis] == size for leaf in leaves)
        ]
        if shared and masked:
            cut |= dict.fromkeys(leaves, shared)
            like[by] = masked[0]
    like = {by: leaf for by, leaf in like.items() if by in wanted.masks}
    return cut, like, tuple(by for by in masks if by in wanted.masks and by not in like)


def _check_mask(
    path: str, leaf: str, shape: tuple[int, ...], by: str, mask: tuple[int, ...]
) -> None:
    pairs = zip(mask, shape, strict=False)
    if len(mask) > len(shape) or any(own not in (1, size) for own, size in pairs):
        must = f"{path} must hold a mask of the leading axes of {leaf!r} in {by!r}"
        raise PatternError(f"{must}: {leaf!r} has shape {shape}, {by!r} {mask}.")
