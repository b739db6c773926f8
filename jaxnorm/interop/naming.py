"""Understand the argument ``names``: which layers of a model are called how in a file."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from jaxnorm.interop import flax
from jaxnorm.interop.layers import Layer

Names = Mapping[str, str | None] | Callable[[str], str | None] | None


@dataclass(frozen=True)
class Rule:
    """Layers of a model and of the file that belong together.

    Attributes:
      ours: layers of the model.
      theirs: the layers of the file among which theirs are; None leaves ours as they are.
      depths: how many leading names of each side were said.
      layer: the layer of the file, put together from single arrays.
    """

    ours: list[Layer]
    theirs: list[Layer] | None = None
    depths: tuple[int, int] | None = None
    layer: Layer | None = None


def rules(
    names: Names,
    ours: Sequence[Layer],
    theirs: Sequence[Layer],
    framework: ModuleType,
    source: str,
) -> list[Rule]:
    """Return the rules that names say, the longest names first; errors call theirs ``source``.

    Raises:
      TypeError: names that are no dict and no function, or not of strings.
      ValueError: a name that is in neither the model nor the file.
    """
    if names is None:
        return []
    if callable(names):
        said = {"/".join(layer.path): names("/".join(layer.path)) for layer in ours}
        names = {path: name for path, name in said.items() if name is not None}
    check_names(names)
    places = _places(theirs)
    names = _expanded(names, ours, lambda name: tuple(_words(name)) in places)
    found: list[Rule] = []
    single: dict[tuple[str, ...], tuple[Layer, dict[str, str]]] = {}
    for given, name in sorted(names.items(), key=lambda item: -len(_parts(item[0]))):
        path = bare_parts(given)
        under = [layer for layer in ours if layer.path[: len(path)] == path]
        leaf = _leaf(ours, path)
        if under:
            found.append(_rule(given, name, path, under, places, source))
        elif leaf is not None and name is not None:
            single.setdefault(leaf[0].path, (leaf[0], {}))[1][leaf[1]] = name
        else:
            raise ValueError(
                f"names must be paths of the model: got {given!r}."
                f"{close_names(given, _modules(ours, '/'))}"
            )
    return [
        _of_leaves(layer, keys, theirs, framework, source) for layer, keys in single.values()
    ] + found


def their_path(
    names: Names, layers: Sequence[Layer], separator: str
) -> Callable[[Layer], tuple[str, ...] | None]:
    """Return a function from a layer to its path in the other framework, None to leave it out.

    Raises:
      TypeError: names that are no dict and no function, or not of strings.
      ValueError: a name that is not in the model.
    """
    if names is None:
        return lambda layer: layer.alias
    if callable(names):
        said = {"/".join(layer.path): names("/".join(layer.path)) for layer in layers}
        check_names(said)
        return lambda layer: _split(said["/".join(layer.path)], separator) or layer.alias
    check_names(names)
    named = _expanded(names, layers)
    given = {bare_parts(path): name for path, name in named.items()}
    for path in given:
        if not any(layer.path[: len(path)] == path for layer in layers):
            raise ValueError(
                f"names must be paths of the model: got {'/'.join(path)!r}."
                f"{close_names('/'.join(path), _modules(layers, '/'))}"
            )

    def path_of(layer: Layer) -> tuple[str, ...] | None:
        for length in range(len(layer.path), -1, -1):
            if layer.path[:length] in given:
                start = _split(given[layer.path[:length]], separator)
                return None if start is None else (*start, *layer.alias[length:])
        return layer.alias

    return path_of


def _expanded(
    names: Mapping[str, str | None],
    layers: Sequence[Layer],
    known: Callable[[str], bool] = lambda name: True,
) -> dict[str, str | None]:
    """Replace each pattern by the names that it stands for; names without ``*`` come before it.

    Of those, the ones that are not ``known`` are left out, unless none is.

    Raises:
      ValueError: a pattern of which their side has more ``*`` than ours.
    """
    paths = {"/".join(layer.path[:n]): None for layer in layers for n in range(len(layer.path) + 1)}
    found: dict[str, str | None] = {}
    for given, name in names.items():
        if "*" not in given:
            continue
        if name is not None and name.count("*") > given.count("*"):
            raise ValueError(
                f"each * of their name must stand for one of ours in names: got {name!r} for "
                f"{given!r}."
            )
        texts = "/".join(bare_parts(given)).split("*")
        pattern = re.compile("([^/]+?)".join(map(re.escape, texts)))
        # what each * stands for goes into their name, in order
        new = {
            path: name and name.replace("*", "{}").format(*match.groups())
            for path in paths
            if (match := pattern.fullmatch(path))
        }
        there = {path: name for path, name in new.items() if name is None or known(name)}
        found |= there or new or {given: name}
    return found | {given: name for given, name in names.items() if "*" not in given}


def check_names(names: Any) -> None:
    """Check that names are a dict from strings to strings or None."""
    if not isinstance(names, Mapping):
        raise TypeError(
            "names must be a dict or a function from our paths to theirs: got "
            f"{type(names).__name__}."
        )
    for given, name in names.items():
        if not isinstance(given, str) or not isinstance(name, str | None):
            raise TypeError(
                f"names must map paths to paths or None: got {name!r} for {given!r}. Write both as "
                "strings."
            )


def _modules(layers: Sequence[Layer], separator: str) -> list[str]:
    """Return the paths of layers, and of the modules that they are in."""
    paths = (layer.path[:end] for layer in layers for end in range(1, len(layer.path) + 1))
    return list(dict.fromkeys(separator.join(path) for path in paths))


def _split(name: str | None, separator: str) -> tuple[str, ...] | None:
    return None if name is None else tuple(part for part in name.split(separator) if part)


def _rule(
    given: str,
    name: str | None,
    path: tuple[str, ...],
    under: list[Layer],
    places: Mapping[tuple[str, ...], list[tuple[Layer, int]]],
    source: str,
) -> Rule:
    """Return the rule of one name for a layer or for all layers in a module."""
    if name is None:
        return Rule(under)
    others = places.get(_words(name), [])
    exact = [pair for pair in others if ".".join(pair[0].path[: pair[1]]) == name]
    others = exact or others
    if not others:
        known = _modules([layer for layer, _ in places[()]], ".")
        raise ValueError(
            f"names must say layers of {source}: got {name!r} for {given!r}."
            f"{close_names(name, known)}"
        )
    return Rule(under, [layer for layer, _ in others], (len(path), others[0][1]))


def _places(theirs: Sequence[Layer]) -> dict[tuple[str, ...], list[tuple[Layer, int]]]:
    """Return the layers of a file under each path, and how many names the path has."""
    found: dict[tuple[str, ...], list[tuple[Layer, int]]] = {}
    for layer in theirs:
        for depth in range(len(layer.path) + 1):
            found.setdefault(_words("/".join(layer.path[:depth])), []).append((layer, depth))
    return found


def _leaf(ours: Sequence[Layer], path: tuple[str, ...]) -> tuple[Layer, str] | None:
    """Return the layer and name of a leaf with a path, or None."""
    for layer in ours:
        for name in layer.leaves:
            if path == (*layer.path, *name.split("/")):
                return layer, name
    return None


def _of_leaves(
    layer: Layer,
    keys: Mapping[str, str],
    theirs: Sequence[Layer],
    framework: ModuleType,
    source: str,
) -> Rule:
    """Put a layer of the file together from arrays whose keys are said."""
    shapes = {key: other.shapes[name] for other in theirs for name, key in other.leaves.items()}
    for ours, key in keys.items():
        if key not in shapes:
            path = "/".join((*layer.path, ours))
            raise ValueError(
                f"names must say arrays of {source}: got {key!r} for {path!r}."
                f"{close_names(key, list(shapes))}"
            )
    for mine in layer.forms(flax.FORMS):
        for other in (form for form in framework.FORMS if form.kind == mine.kind):
            leaves = {}
            for ours, key in keys.items():
                row = mine.row_of(ours)
                match = row and other.row_of(row.common[0], stored=False)
                if match and len(match.stored) == 1:
                    leaves[match.stored[0]] = key
            known = {name: shapes[key] for name, key in leaves.items()}
            if len(leaves) == len(keys) and other.holds(known):
                return Rule([layer], layer=Layer(layer.path, leaves, known, layer.path))
    raise ValueError(
        f"names must say all arrays of a layer, or the layer: got {', '.join(keys)} of "
        f"{'/'.join(layer.path)!r}. Give the name of the layer."
    )


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[/.]", path) if part)


def bare_parts(path: str) -> tuple[str, ...]:
    """Return the names along a path of the model, without a collection in front."""
    return _without_collection(_parts(path))


def _words(path: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r"[/._~]", path) if word)


def _without_collection(path: tuple[str, ...]) -> tuple[str, ...]:
    return path[1:] if path[:1] in (("params",), ("batch_stats",)) else path


def close_names(name: str, known: Sequence[str]) -> str:
    """Return a hint at similar names."""
    close = get_close_matches(name, known, 3, 0.4)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
