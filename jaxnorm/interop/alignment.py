"""Pair layers whose names say nothing, by the sizes of their arrays and by their order."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxnorm.interop.layers import Layer


@dataclass
class Node:
    """A layer, or a module of layers, with the sizes of all layers in it."""

    path: tuple[str, ...]
    layer: Layer | None = None
    children: list["Node"] = field(default_factory=list)
    sizes: Counter = field(default_factory=Counter)

    def signature(self, like_with_like: bool) -> tuple[frozenset, bool]:
        """Return what nodes that may be paired have in common."""
        return frozenset(self.sizes.items()), like_with_like and self.layer is not None

    def count(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Guess:
    """Two layers that were paired; ``alike`` is how many pairs their sizes allowed."""

    ours: Layer
    theirs: Layer
    alike: int


def tree_of(layers: Iterable[Layer], size: Callable[[Layer], int]) -> Node:
    """Return the modules of layers as a tree."""
    root = Node(())
    for layer in layers:
        node = root
        for depth in range(1, len(layer.alias) + 1):
            path = layer.alias[:depth]
            child = next((c for c in node.children if c.path == path and c.layer is None), None)
            if child is None or depth == len(layer.alias):
                child = Node(path)
                node.children.append(child)
            node = child
        if node is root:
            node = Node(())
            root.children.append(node)
        node.layer = layer
    _count(root, size)
    return root


def _count(node: Node, size: Callable[[Layer], int]) -> None:
    if node.layer is not None:
        node.sizes[size(node.layer)] += 1
    for child in node.children:
        _count(child, size)
        node.sizes += child.sizes


def align(
    ours: Sequence[Node],
    theirs: Sequence[Node],
    fits: Callable[[Layer, Layer], bool],
    alike: int = 1,
) -> Iterator[Guess]:
    """Yield pairs of layers.

    Modules that hold layers of the same sizes are paired in their order, and then what is in them.
    What is left is opened, the largest module first, until layers alone are left.
    """
    ours, theirs = list(ours), list(theirs)
    while ours and theirs:
        pairs = _alike(ours, theirs, fits, True) or _alike(ours, theirs, fits, False)
        for a, b, number in pairs:
            ours.remove(a)
            theirs.remove(b)
            if a.layer is not None and b.layer is not None:
                yield Guess(a.layer, b.layer, max(alike, number))
            else:
                yield from align(_inside(a), _inside(b), fits, max(alike, number))
        if not pairs and not _open_largest(ours, theirs):
            return


def _alike(
    ours: Sequence[Node],
    theirs: Sequence[Node],
    fits: Callable[[Layer, Layer], bool],
    like_with_like: bool,
) -> list[tuple[Node, Node, int]]:
    """Pair nodes of equal sizes if there are as many on both sides.

    ``like_with_like`` does not pair layers with modules.
    """
    found = []
    for signature in {node.signature(like_with_like): None for node in ours}:
        mine = [node for node in ours if node.signature(like_with_like) == signature]
        others = [node for node in theirs if node.signature(like_with_like) == signature]
        if len(mine) == len(others):
            found += [(a, b, len(mine)) for a, b in _in_order(mine, others, fits)]
    return found


def _inside(node: Node) -> list[Node]:
    return [node] if node.layer is not None else node.children


def _open_largest(ours: list[Node], theirs: list[Node]) -> bool:
    """Replace the largest module by what is in it; return False if there are only layers."""
    modules = [
        (node.count(), side, node) for side in (ours, theirs) for node in side if node.children
    ]
    if not modules:
        return False
    _, side, node = max(modules, key=lambda entry: entry[0])
    at = side.index(node)
    side[at : at + 1] = node.children
    return True


def _in_order(
    ours: Sequence[Node], theirs: Sequence[Node], fits: Callable[[Layer, Layer], bool]
) -> list[tuple[Node, Node]]:
    """Pair nodes in their order, each layer with the first that fits it."""
    mine = sorted(ours, key=lambda node: natural(node.path))
    # names that differ by a number alone count calls; the file's order is that of definition
    counted = len({re.sub(r"\d+", "", "/".join(node.path)) for node in mine}) == 1
    others = list(theirs) if counted else sorted(theirs, key=lambda node: natural(node.path))
    pairs = []
    # equal names say more than the order, but for numbers, which count other layers too
    for may_pair in (_named_alike, lambda a, b: True):
        for a in list(mine):
            for b in others:
                fit = a.layer is None or b.layer is None or fits(a.layer, b.layer)
                if fit and may_pair(a, b):
                    pairs.append((a, b))
                    mine.remove(a)
                    others.remove(b)
                    break
    return pairs


def _named_alike(a: Node, b: Node) -> bool:
    """Return whether two nodes end with the same name without numbers."""
    return a.path[-1:] == b.path[-1:] and not re.search(r"\d", "".join(a.path[-1:]))


def natural(path: Sequence[str]) -> list[Any]:
    """Return a key that sorts numbers in names by their value.

    >>> sorted([("Dense_10",), ("Dense_2",)], key=natural)
    [('Dense_2',), ('Dense_10',)]
    """
    return [
        [
            (0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in re.split(r"(\d+)", name)
        ]
        for name in path
    ]
