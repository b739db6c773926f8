"""Pytrees without JAX: dicts, lists, tuples, named tuples and dataclasses of arrays."""

import copy
import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxnorm.arguments.axes import Axes


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Replace each leaf of a tree by ``function(path, leaf)``; None stays None.

    A path joins keys with ``/``.

    >>> map_leaves(lambda path, leaf: path, {"image": 1, "state": (2, None, 3)})
    {'image': 'image', 'state': ('state/0', None, 'state/2')}
    """
    deeper = lambda key, value: map_leaves(function, value, f"{path}/{key}" if path else str(key))
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        mapped = {key: deeper(key, value) for key, value in tree.items()}
        if not isinstance(tree, dict):
            return type(tree)(mapped)  # type: ignore[call-arg]
        # a copy keeps the type and its attributes: a defaultdict has a factory
        new = copy.copy(tree)
        new.update(mapped)
        return new
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(deeper, tree._fields, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(deeper(index, value) for index, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        filled = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # setattr would raise for a frozen dataclass
            object.__setattr__(filled, field.name, deeper(field.name, getattr(tree, field.name)))
        return filled
    return function(path, tree)


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths.

    >>> flatten({"a": {"b": 1, "c": 2}})
    {'a/b': 1, 'a/c': 2}
    """
    leaves: dict[str, Any] = {}

    def collect(path: str, leaf: Any) -> None:
        if path in leaves:
            raise ValueError(
                f"every leaf must have a path of its own: {path!r} stands twice. Rename one of the "
                "keys."
            )
        leaves[path] = leaf

    map_leaves(collect, tree)
    return leaves


def prefix_of(prefixes: Mapping[str, Any], path: str) -> str | None:
    """Return the prefix of a path: the path itself, or the nearest tree that holds it.

    >>> prefix_of({"observation": 0}, "observation/image")
    'observation'
    """
    while path not in prefixes:
        if not path:
            return None
        path = path.rpartition("/")[0]
    return path


def plain(tree: Any) -> Any:
    """Convert a tree to dicts, lists and tuples, the only containers that files keep.

    Named tuples and dataclasses become dicts.

    >>> plain({"a": [1, (2, None)]})
    {'a': [1, (2, None)]}
    """
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, map(plain, tree), strict=True))
    if isinstance(tree, list | tuple):
        return (list if isinstance(tree, list) else tuple)(map(plain, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: plain(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    return tree


def masks_by_path(where, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mask of each leaf that has one, from one for all or a mapping from paths."""
    if where is None:
        return {}
    if not isinstance(where, Mapping | list | tuple):
        return dict.fromkeys(leaves, where)
    masks = flatten(where)
    if unknown := sorted(
        prefix
        for prefix in masks
        if not any(prefix_of({prefix: 0}, path) == prefix for path in leaves)
    ):
        raise ValueError(
            f"where must name leaves that are fitted: got {unknown}, fitted are {sorted(leaves)}."
        )
    return {
        path: masks[prefix] for path in leaves if (prefix := prefix_of(masks, path)) is not None
    }


def axes_by_path(axes, path: str = "") -> dict[str, Axes]:
    """Return axes by path, as ints, tuples of ints or patterns, which can be compared and saved.

    Axes for all leaves have the path of the whole tree, ``""``.
    """
    if isinstance(axes, Mapping):
        parts = [
            axes_by_path(value, f"{path}/{key}" if path else str(key))
            for key, value in axes.items()
            if value is not None
        ]
        return {key: value for part in parts for key, value in part.items()}
    return {
        path: tuple(map(index, axes))
        if isinstance(axes, Iterable) and not isinstance(axes, str)
        else index(axes)
    }


def index(axis) -> Any:
    """Convert NumPy's integers to int, so that they can be saved.

    Other types pass. They are refused where they are used.
    """
    return (
        operator.index(axis) if hasattr(axis, "__index__") and not isinstance(axis, bool) else axis
    )


def without_leading(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its leading axes of size 1, but for the last axis.

    >>> without_leading((1, 1, 3)), without_leading((1, 1))
    ((3,), (1,))
    """
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def sizes_in(axes: Axes, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that a pattern names; other sizes are for other leaves."""
    return {
        name: size
        for name, size in sizes.items()
        if isinstance(axes, str) and name in re.findall(r"\w+", axes)
    }
