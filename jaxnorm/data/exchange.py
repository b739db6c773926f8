"""Between a Normalizer's state and the contents of other libraries' files."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Axes
from jaxnorm.data import given
from jaxnorm.data.fitted import Fitted
from jaxnorm.data.formats.contents import FIELDS, Contents, Statistics, tree_of
from jaxnorm.data.leaves import naming_leaf
from jaxnorm.data.state import State
from jaxnorm.data.trees import flatten, prefix_of, without_leading


def to_state(contents: Contents) -> State:
    """Return the state of a Normalizer of a file's statistics, whose first axis is reduced.

    A ``/`` in the name of a leaf separates the keys of a tree.
    """
    leaves = {}
    for path, statistics in contents.leaves.items():
        known = {name: getattr(statistics, name) for name in FIELDS}
        own = {name: np.asarray(array) for name, array in known.items() if array is not None}
        quantiles = statistics.quantiles or {}
        own_quantiles = {float(rank): np.asarray(array) for rank, array in quantiles.items()}
        mask = None if statistics.mask is None else np.asarray(statistics.mask)
        try:
            leaves[path] = given.fitted(own, own_quantiles, mask, leading=1)
        except ValueError as error:
            raise naming_leaf(path, error) from None
    return State(leaves, tree_of(list(leaves)), 0)


def renamed(
    state: State, axes: Mapping[str, Axes], names: Mapping[str, str]
) -> tuple[State, dict[str, Axes]]:
    """Return a state whose leaves have other paths, and the axes of each leaf."""
    if unknown := sorted(set(names) - set(state.leaves)):
        raise ValueError(
            f"names must be of leaves that are fitted: got {unknown}, fitted are "
            f"{sorted(state.leaves)}."
        )
    new = {names.get(path, path): leaf for path, leaf in state.leaves.items()}
    if len(new) < len(state.leaves):
        name, number = Counter(names.get(path, path) for path in state.leaves).most_common(1)[0]
        raise ValueError(f"each leaf must have a name of its own: {name!r} would be of {number}.")
    own = {names.get(path, path): axes[str(prefix_of(axes, path))] for path in state.leaves}
    # leaves that keep their paths stay where they are, also under keys with a slash
    kept = _without(state.structure, names) if isinstance(state.structure, Mapping) else {}
    there = set(flatten(kept).values())
    structure = tree_of([path for path in new if path not in there], kept)
    return State(new, structure, state.batches), own


def _without(tree: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a tree of paths without those that get other names."""
    if isinstance(tree, Mapping):
        left = {key: _without(value, names) for key, value in tree.items()}
        return {key: value for key, value in left.items() if value != {}}
    # without one of its items a list has other paths: the rest of it moves to a dict
    return {} if names.keys() & flatten(tree).values() else tree


def to_statistics(state: State, ranks: list[float]) -> dict[str, Statistics]:
    """Return the statistics of each leaf, without leading axes of size 1."""
    return {path: _statistics(leaf, ranks) for path, leaf in state.leaves.items()}


def _statistics(leaf: Fitted, ranks: list[float]) -> Statistics:
    shape = without_leading(leaf.shape)
    bare = lambda array: None if array is None else array.reshape(shape)
    moments, low, high = leaf.summary
    fields = {"mean": moments.mean, "var": moments.var, "count": moments.count}
    fields |= {"min": low, "max": high}
    known = {name: bare(array) for name, array in fields.items() if name not in leaf.unknown}
    if leaf.sketch is not None or leaf.given:
        held = ranks if leaf.sketch is not None else sorted(leaf.given)
        known["quantiles"] = {rank: bare(leaf.quantile(rank)) for rank in held}
    return Statistics(**known, mask=bare(leaf.mask))
