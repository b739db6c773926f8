"""Take layers apart that ``nn.scan`` or ``nn.vmap`` stacked along the first axis of arrays."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.interop.naming import Names, bare_parts, check_names
from jaxnorm.interop.trees import Path, Tree

NUMBER = "{i}"


@dataclass(frozen=True)
class Stack:
    """A module whose arrays have a leading axis of layers.

    Attributes:
      path: its path.
      count: how many layers there are.
      keys: the keys of its leaves.
    """

    path: Path
    count: int
    keys: tuple[str, ...]

    def numbered(self, path: Path) -> Iterator[Path]:
        """Yield a path within the stack for each layer."""
        at = len(self.path)
        return ((*path[:at], str(i), *path[at:]) for i in range(self.count))


def unstacked(tree: Tree, names: Names) -> tuple[Tree, Names]:
    """Return a tree with a leaf for each layer, and names for each, if names have ``{i}``.

    Raises:
      TypeError: names that are not of strings.
      ValueError: names of no module of the model; arrays that have no such axis in common.
    """
    if not isinstance(names, Mapping):
        return tree, names
    check_names(names)
    numbered = [given for given, name in names.items() if NUMBER in (name or "")]
    if not numbered:
        return tree, names
    stacks: list[Stack] = []
    for place in sorted(map(bare_parts, numbered), key=len):
        if not any(place[: len(stack.path)] == stack.path for stack in stacks):
            stacks.append(_stack(tree, place))
    new_names: dict[str, str | None] = {}
    for given, name in names.items():
        for path, i in _layers(stacks, bare_parts(given)):
            new_names["/".join(path) if i else given] = name and name.replace(NUMBER, i or NUMBER)
    return _apart(tree, stacks), new_names


def _stack(tree: Tree, path: Path) -> Stack:
    """Return the stack at a path."""
    keys = [key for key in tree.leaves if tree.paths[key][: len(path)] == path]
    shapes = {tree.shape(key)[:1] for key in keys}
    said = "/".join(path)
    if not keys or path in tree.paths.values():
        raise ValueError(
            f"names with {NUMBER} must be paths of modules, without *: got {said!r}. Name the "
            "module that nn.scan stacks, or one in it."
        )
    if len(shapes) > 1 or shapes == {()}:
        listed = ", ".join(f"{key} {tree.shape(key)}" for key in keys[:4])
        raise ValueError(
            f"arrays of {said!r} must have layers along their first axis, for {NUMBER}: got "
            f"{listed}."
        )
    return Stack(path, shapes.pop()[0], tuple(keys))


def _layers(stacks: list[Stack], path: Path) -> Iterator[tuple[Path, str]]:
    """Yield a path for each layer of the stack that it is in, with its number, or itself."""
    for stack in stacks:
        if path[: len(stack.path)] == stack.path:
            yield from ((new, new[len(stack.path)]) for new in stack.numbered(path))
            return
    yield path, ""


def _apart(tree: Tree, stacks: list[Stack]) -> Tree:
    """Return a tree with a leaf for each layer of the stacks."""
    counts = {key: stack for stack in stacks for key in stack.keys}
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for key, leaf in tree.leaves.items():
        if key not in counts:
            leaves[key], paths[key] = leaf, tree.paths[key]
            continue
        for i, path in enumerate(counts[key].numbered(tree.paths[key])):
            leaves[f"{key}[{i}]"], paths[f"{key}[{i}]"] = _layer(leaf, i), path

    def rebuild(values: Mapping[str, Any]) -> Any:
        whole = {key: value for key, value in values.items() if key in tree.leaves}
        for key, stack in counts.items():
            own = [f"{key}[{i}]" for i in range(stack.count)]
            if not values.keys().isdisjoint(own):
                parts = [values.get(name, leaves[name]) for name in own]
                whole[key] = _stacked(key, parts)
        return tree.rebuild(whole)

    return replace(
        tree,
        leaves=leaves,
        paths=paths,
        rebuild=rebuild,
        hints=_of_layers(tree.hints, stacks),
        epsilons=_of_layers(tree.epsilons, stacks),
    )


def _layer(leaf: Any, i: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i, ...]  # an array of NumPy also where no axis is left


def _stacked(key: str, parts: list[Any]) -> Any:
    if lacking := sum(isinstance(part, jax.ShapeDtypeStruct) for part in parts):
        raise ValueError(
            f"all layers of {key}, which is abstract, must get values: {lacking} of {len(parts)} "
            "got none. Initialize the model first."
        )
    stack: Callable[..., Any] = np.stack if isinstance(parts[0], np.ndarray) else jnp.stack
    return stack(parts)


def _of_layers(found: Mapping[str, Any], stacks: list[Stack]) -> dict[str, Any]:
    """Return what is known of layers by their paths, for each layer of the stacks."""
    return {
        "/".join(path): value
        for name, value in found.items()
        for path, _ in _layers(stacks, tuple(name.split("/")))
    }
