"""Statistics that are known already: checked, brought to one shape, and padded."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.data.fitted import Fitted
from jaxnorm.data.host.sketch import ranks
from jaxnorm.data.host.statistics import Moments, Summary
from jaxnorm.data.leaves import naming_leaf
from jaxnorm.data.state import State
from jaxnorm.data.trees import flatten, index, map_leaves, plain, prefix_of


def state(
    columns: Mapping[str, Any],
    quantiles: Mapping[float, Any] | None,
    mask,
    axes: Mapping[str, Axes],
) -> State:
    """Return the state of a Normalizer from trees of statistics, by their names."""
    trees = {name: _as_array(tree) for name, tree in columns.items() if tree is not None}
    asked = ranks(tuple(quantiles or ()))
    by_rank = dict(zip(asked, map(_as_array, (quantiles or {}).values()), strict=True))
    if not by_rank and not trees.keys() - {"count"}:
        raise TypeError("from_statistics needs a statistic: pass mean= and std=, or min= and max=.")
    if "mean" in trees and ("std" in trees) == ("var" in trees):
        raise TypeError("with a mean, from_statistics needs either std= or var=.")
    given = [tree for name, tree in trees.items() if name != "count"]
    leading = next(iter([*given, *by_rank.values()]))
    by_path = {name: _arrays(name, tree, leading) for name, tree in trees.items()}
    ranked = {rank: _arrays(_quantile(rank), tree, leading) for rank, tree in by_rank.items()}
    masks = {} if mask is None else _arrays("mask", mask, leading)
    leaves = {}
    for path in flatten(leading):
        own = {name: arrays[path] for name, arrays in by_path.items()}
        own_quantiles = {rank: arrays[path] for rank, arrays in ranked.items()}
        try:
            leaves[path] = fitted(own, own_quantiles, masks.get(path), _leading(axes, path))
            _check_axes(leaves[path].shape, axes.get(str(prefix_of(axes, path)), 0))
        except ValueError as error:
            raise naming_leaf(path, error) from None
    return State(leaves, map_leaves(lambda path, _: path, plain(leading)), 0)


def _as_array(tree: Any) -> Any:
    """Return an array for a list of numbers, as JSON has them; other trees stay as they are."""
    if not isinstance(tree, list):
        return tree
    array = np.asarray(tree) if all(np.ndim(item) == 0 for item in tree) else None
    return tree if array is None or array.dtype.kind not in "biuf" else array


def _arrays(name: str, tree, leading) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by their paths; one number stands for all leaves."""
    paths = list(flatten(leading))
    if np.ndim(tree) == 0 and not isinstance(tree, Mapping | list | tuple):
        return dict.fromkeys(paths, np.asarray(tree))
    found = flatten(tree)
    if differing := sorted(set(found) ^ set(paths)):
        raise ValueError(
            f"all statistics must have the same leaves: {name} differs in "
            f"{', '.join(map(repr, differing))}."
        )
    return {path: np.asarray(leaf) for path, leaf in found.items()}


def _leading(axes: Mapping[str, Axes], path: str) -> int:
    """Return how many leading axes are reduced, if integers say so."""
    own = axes.get(str(prefix_of(axes, path)), 0)
    numbers = () if isinstance(own, str) else (own,) if isinstance(own, int) else tuple(own)
    if sorted(numbers) != list(range(len(numbers))):
        return 0
    return len(numbers)


def _check_axes(shape: tuple[int, ...], axes: Axes) -> None:
    """Refuse statistics whose reduced axes do not have size 1."""
    # a split axis (g [c]) has size g, which the pattern does not tell
    if shape and not (isinstance(axes, str) and "(" in axes):
        kept = resolve(axes, shape, {}).stats_shape
        if kept != shape:
            raise ValueError(
                f"reduced axes must have size 1: the statistics have shape {shape}, over "
                f"{axes!r} it must be {kept}. Reshape them."
            )


def _quantile(rank: float) -> str:
    return f"the quantile {rank}"


def fitted(
    own: Mapping[str, np.ndarray], quantiles: Mapping[float, np.ndarray], mask, leading: int
) -> Fitted:
    """Return the statistics of one leaf from those that are known, by their names or ranks."""
    found = {**own, **{_quantile(rank): array for rank, array in quantiles.items()}}
    shapes = {array.shape for array in found.values()} - {()}
    if len(shapes) > 1:
        listed = ", ".join(f"{name} {array.shape}" for name, array in found.items())
        raise ValueError(f"all statistics must have one shape, or be one number: got {listed}.")
    widest = shapes.pop() if shapes else ()
    # without the reduced axes: (features,) becomes (1, features)
    missing = leading if widest[:leading] != (1,) * leading or len(widest) <= leading else 0
    shape = (1,) * missing + widest
    known = {}
    for name, array in found.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} must hold real numbers: got {array.dtype}.")
        values = np.asarray(array, np.float64)
        known[name] = np.broadcast_to(values, widest).reshape(shape).copy()
    var = known["var"] if "var" in known else known.get("std", np.array(np.nan)) ** 2
    unknown = {name for name in ("mean", "count", "min", "max") if name not in known}
    unknown |= set() if {"var", "std"} & set(known) else {"var"}
    # views of one number, as maps of the globe are large
    missed = lambda name: known.get(name, np.broadcast_to(np.nan, shape))
    moments = Moments(missed("count"), missed("mean"), np.broadcast_to(var, shape))
    given = {rank: known[_quantile(rank)] for rank in quantiles}
    check(known, given)
    if mask is not None:
        if mask.dtype != bool:
            raise ValueError(f"mask must hold booleans: got {mask.dtype}.")
        mask = np.broadcast_to(mask, widest).reshape(shape).copy()
    summary = Summary(moments, missed("min"), missed("max"))
    return Fitted(summary, None, given, mask, frozenset(unknown))


def check(known: Mapping[str, np.ndarray], quantiles: Mapping[float, np.ndarray]) -> None:
    """Refuse statistics of a leaf, by their names and ranks, that no data can have.

    Raises:
      ValueError: a deviation, variance or count is negative, a count is not finite, a minimum is
        above its maximum, or a quantile above that of a higher rank. NaN is no reason to refuse.
    """
    for name in ("std", "var", "count"):
        if name in known and (wrong := known[name] < 0).any():
            raise ValueError(f"{name} must be >= 0: got {known[name][wrong][0]}.")
    if "count" in known and (wrong := ~np.isfinite(known["count"])).any():
        got = known["count"][wrong][0]
        raise ValueError(f"count must be finite: got {got}. Leave it out where it is unknown.")
    if "min" in known and "max" in known:
        # the extremes of no element are inf and -inf
        empty = np.isposinf(known["min"]) & np.isneginf(known["max"])
        if (wrong := (known["min"] > known["max"]) & ~empty).any():
            ends = known["min"][wrong][0], known["max"][wrong][0]
            raise ValueError(f"a minimum must not be above its maximum: got {ends[0]}, {ends[1]}.")
    for low, high in itertools.pairwise(sorted(quantiles)):
        if (wrong := quantiles[low] > quantiles[high]).any():
            raise ValueError(
                f"a quantile must not be above that of a higher rank: the quantile {low} is "
                f"{quantiles[low][wrong][0]}, the quantile {high} {quantiles[high][wrong][0]}."
            )


def padded(
    old: State, sizes: int | Mapping[str, int], kept: list[float], axes: Mapping[str, Axes]
) -> State:
    """Return a state whose leaves have more features along the last axis."""
    wanted = flatten(sizes) if isinstance(sizes, Mapping) else dict.fromkeys(old.leaves, sizes)
    used = {path: prefix_of(wanted, path) for path in old.leaves}
    if unknown := sorted(set(wanted) - set(used.values())):
        raise ValueError(
            f"sizes must name leaves that are fitted: got {unknown}, fitted are "
            f"{sorted(old.leaves)}."
        )
    leaves = {}
    for path, leaf in old.leaves.items():
        prefix = used[path]
        if prefix is not None:
            own = axes.get(str(prefix_of(axes, path)), 0)
            leaf = _padded(path, leaf, index(wanted[prefix]), kept, own)
        leaves[path] = leaf
    return old._replace(leaves=leaves)


def _padded(path: str, leaf: Fitted, size: int, kept: list[float], axes: Axes) -> Fitted:
    last = leaf.shape[-1] if leaf.shape else 1
    wider = (*leaf.shape[:-1], last + 1)
    split = isinstance(axes, str) and "(" in axes
    if not leaf.shape or (not split and resolve(axes, wider, {}).stats_shape != wider):
        must = f"the last axis must hold features, to be padded: {axes!r} reduces it"
        raise naming_leaf(path, ValueError(f"{must}."))
    if isinstance(size, bool) or not isinstance(size, int) or size < last:
        must = f"the size to pad to must be an integer of at least {last}, the features there are"
        raise naming_leaf(path, ValueError(f"{must}: got {size!r}."))
    widths = [*[(0, 0)] * (len(leaf.shape) - 1), (0, size - last)]
    more = lambda array, value: np.pad(array, widths, constant_values=value)
    (count, mean, var, low), least, most = vars(leaf.summary.moments).values(), *leaf.summary[1:]
    # the features that are added stay as they are in every mode
    moments = Moments(more(count, 0.0), more(mean, 0.0), more(var, 1.0), more(low, 0.0))
    summary = Summary(moments, more(least, -1.0), more(most, 1.0))
    mask = np.ones(leaf.shape, bool) if leaf.mask is None else leaf.mask
    given = {}
    if leaf.sketch is not None or leaf.given:
        given = {rank: more(leaf.quantile(rank), 2 * rank - 1) for rank in kept}
    return Fitted(summary, None, given, more(mask, False), leaf.unknown)
