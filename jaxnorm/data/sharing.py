"""One deviation for several features, such as the directions of a vector."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxnorm.data.fitted import SHARED, Fitted
from jaxnorm.data.state import State
from jaxnorm.data.trees import index, without_leading

# A leaf, and the indices that choose some of its features.
Member = tuple[str, tuple[int, ...]]


def shared(state: State, groups: Iterable) -> State:
    """Return a state in which the features of each group have the mean of their variances.

    Raises:
      ValueError: a group names less than two members, or what is no feature; groups overlap;
        shapes or counts differ; a variance is unknown.
    """
    variances: dict[str, np.ndarray] = {}
    taken: dict[str, np.ndarray] = {}
    for group in groups:
        is_group = isinstance(group, Iterable) and not isinstance(group, str)
        given = list(group) if is_group else [group]
        if len(given) < 2:
            raise ValueError(f"a group must have two members at least, to share: got {given}.")
        members = [_member(state.leaves, one) for one in given]
        _check_alike(state.leaves, given, members)
        for (path, chosen), one in zip(members, given, strict=True):
            shape = without_leading(state.leaves[path].shape)
            marks = taken.setdefault(path, np.zeros(shape, bool))
            if marks[chosen].any():
                raise ValueError(f"groups must not overlap: {one!r} stands in them twice.")
            marks[chosen] = True
        common = np.mean([_part(state.leaves[path], "var", at) for path, at in members], axis=0)
        for path, chosen in members:
            own = state.leaves[path].summary.moments.var
            new = variances.setdefault(path, own.reshape(taken[path].shape).copy())
            new[chosen] = common
    changed = {path: _with_variance(state.leaves[path], var) for path, var in variances.items()}
    return state._replace(leaves=state.leaves | changed)


def _member(leaves: Mapping[str, Fitted], given: Any) -> Member:
    """Return the leaf and the indices of a member of a group."""
    words = given if isinstance(given, tuple) and given else (given,)
    path, chosen = (words[0], words[1:]) if isinstance(words[0], str) else ("", words)
    if path not in leaves:
        raise ValueError(
            f"groups must name leaves that are fitted, or features of them: got {given!r}, fitted "
            f"are {sorted(leaves)}."
        )
    shape, at = without_leading(leaves[path].shape), tuple(map(index, chosen))
    if len(at) > len(shape) or any(
        isinstance(one, bool) or not isinstance(one, int) or not -size <= one < size
        for one, size in zip(at, shape, strict=False)
    ):
        called = repr(path) if path else "the array"
        raise ValueError(
            f"groups must name features: got {given!r}, the features of {called} have shape "
            f"{shape}."
        )
    if "var" in leaves[path].unknown:
        raise ValueError(f"deviations must be known to be shared: that of {given!r} is not.")
    return path, at


def _check_alike(leaves: Mapping[str, Fitted], given: list, members: list[Member]) -> None:
    """Refuse members of a group whose shapes or counts differ."""
    counts = [_part(leaves[path], "count", chosen) for path, chosen in members]
    for one, count in zip(given, counts, strict=True):
        if count.shape != counts[0].shape:
            raise ValueError(
                f"members of a group must have one shape: {given[0]!r} has {counts[0].shape}, "
                f"{one!r} has {count.shape}."
            )
        # unknown counts are NaN
        if (wrong := (count != counts[0]) & ~(np.isnan(count) & np.isnan(counts[0]))).any():
            raise ValueError(
                f"members of a group must have equal counts: {given[0]!r} has "
                f"{counts[0][wrong][0]:g}, {one!r} has {count[wrong][0]:g}."
            )


def _part(leaf: Fitted, name: str, chosen: tuple[int, ...]) -> np.ndarray:
    array = getattr(leaf.summary.moments, name)
    return np.asarray(array.reshape(without_leading(leaf.shape))[chosen])


def _with_variance(leaf: Fitted, var: np.ndarray) -> Fitted:
    moments = replace(leaf.summary.moments, var=var.reshape(leaf.shape))
    summary = leaf.summary._replace(moments=moments)
    return leaf._replace(summary=summary, unknown=leaf.unknown | {SHARED})
