"""Search for the layer of a file that belongs to each layer of a model."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import ModuleType

from jaxnorm.interop import flax
from jaxnorm.interop.alignment import align, natural, tree_of
from jaxnorm.interop.fitting import Fit, best_fit
from jaxnorm.interop.layers import Layer, size_of
from jaxnorm.interop.naming import Rule, close_names


@dataclass(frozen=True)
class Pair:
    """Two layers that belong together, how they fit, and how that was found."""

    ours: Layer
    theirs: Layer
    fit: Fit
    by: str


def labels(
    hints: Mapping[str, str],
    kinds: Mapping[str, str] | None,
    layers: Sequence[Layer],
    framework: ModuleType,
) -> Callable[[Layer], str | None]:
    """Return a function that says which label a layer bears, if that is known.

    Raises:
      ValueError: kinds of layers that are not in the model, or labels that are none.
    """
    paths = ["/".join(layer.path) for layer in layers]
    known = list(dict.fromkeys(form.label for form in (*framework.FORMS, *flax.FORMS)))
    for pattern, kind in (kinds or {}).items():
        if kind not in known:
            raise ValueError(
                f"kinds must be {', '.join(known)}: got {kind!r} for {pattern!r}."
                f"{close_names(kind, known)}"
            )
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(
                f"kinds must be of layers of the model: got {pattern!r}."
                f"{close_names(pattern, paths)}"
            )

    def label(layer: Layer) -> str | None:
        path = "/".join(layer.path)
        said = [kind for pattern, kind in (kinds or {}).items() if fnmatchcase(path, pattern)]
        return said[0] if said else hints.get(path)

    return label


class Search:
    """The layers that are not paired yet, and the pairs that were found."""

    def __init__(
        self,
        ours: Sequence[Layer],
        theirs: Sequence[Layer],
        framework: ModuleType,
        label: Callable[[Layer], str | None],
    ) -> None:
        keys = [key for layer in theirs for key in layer.leaves.values()]
        if keys == sorted(keys):  # no order of definition
            theirs = sorted(theirs, key=lambda layer: natural(layer.path))
        self.ours, self.theirs, self.table, self.label = ours, theirs, framework.FORMS, label
        self.rest, self.others = list(ours), list(theirs)
        self.pairs: list[Pair] = []
        self.left_out: set[str] = set()
        self._sizes: dict[int, int] = {}
        self._own = set(map(id, ours))

    def run(self, said: Iterable[Rule]) -> None:
        for rule in said:
            if rule.layer is not None:
                self._add(rule.ours[0], rule.layer, "names")
                used = set(rule.layer.leaves.values())
                self.others = [a for a in self.others if not used >= set(a.leaves.values())]
            elif rule.theirs is None:
                self.left_out |= {key for layer in rule.ours for key in layer.leaves.values()}
                self.rest = _without(self.rest, rule.ours)
            else:
                self._group(
                    _among(self.rest, rule.ours),
                    # one layer of the file may have several places
                    _among(self.others, rule.theirs) or rule.theirs,
                    rule.depths,
                    "names",
                )
        self._group(list(self.rest), list(self.others), None, "path")

    def _group(
        self, ours: list[Layer], theirs: list[Layer], depths: tuple[int, int] | None, by: str
    ) -> None:
        """Pair layers by equal paths, and the rest by sizes and order."""
        if by == "names" and len(ours) == len(theirs) == 1 and self._add(ours[0], theirs[0], by):
            return
        while found := max(
            (_equal(ours, theirs, *d) for d in _choices(ours, theirs, depths)), key=len
        ):
            for a, b in found:
                self._add(a, b, by)
            paired = {id(layer) for pair in found for layer in pair}
            ours = [layer for layer in ours if id(layer) not in paired]
            theirs = [layer for layer in theirs if id(layer) not in paired]
        for strict in (True, False):
            mine, others = (
                tree_of(_among(rest, group), self._size).children
                for group, rest in ((ours, self.rest), (theirs, self.others))
            )
            fits = lambda a, b, strict=strict: self._fits(a, b, strict)
            for guess in list(align(mine, others, fits)):
                alone = guess.alike == 1
                self._add(guess.ours, guess.theirs, "shape" if alone else f"order of {guess.alike}")

    def _fits(self, ours: Layer, theirs: Layer, strict: bool) -> bool:
        fit = best_fit(ours, theirs, self.table, self.label(ours))
        return fit is not None and (fit.cost() == (0, 0) if strict else not fit.problems)

    def _add(self, ours: Layer, theirs: Layer, by: str) -> bool:
        fit = best_fit(ours, theirs, self.table, self.label(ours))
        if fit is None:
            return False
        self.pairs.append(Pair(ours, theirs, fit, by))
        self.rest = _without(self.rest, [ours])
        self.others = _without(self.others, [theirs])
        return True

    def _size(self, layer: Layer) -> int:
        if id(layer) not in self._sizes:
            own = id(layer) in self._own
            self._sizes[id(layer)] = size_of(layer, flax.FORMS if own else self.table)
        return self._sizes[id(layer)]


def _among(layers: Sequence[Layer], chosen: Sequence[Layer]) -> list[Layer]:
    """Return the layers that are among the chosen; comparing them would compare their leaves."""
    known = set(map(id, chosen))
    return [layer for layer in layers if id(layer) in known]


def _without(layers: Sequence[Layer], left: Sequence[Layer]) -> list[Layer]:
    known = set(map(id, left))
    return [layer for layer in layers if id(layer) not in known]


def _choices(
    ours: Sequence[Layer], theirs: Sequence[Layer], said: tuple[int, int] | None
) -> list[tuple[int, int]]:
    """Return how many leading names of each side may be left out to compare paths."""
    if said:
        return [said]
    # a head may stand next to the module that has all other layers
    alone = [(0, 1), (1, 0)]
    return [(a, b) for a in _depths(ours) for b in _depths(theirs)] + alone


def _depths(layers: Sequence[Layer]) -> list[int]:
    """Return how many leading names to leave out: none, or all that the layers share."""
    paths = [layer.alias for layer in layers]
    shared = 0
    while paths and all(len(path) > shared + 1 for path in paths):
        if len({path[shared] for path in paths}) > 1:
            break
        shared += 1
    return [0, shared] if shared else [0]


def _equal(
    ours: Sequence[Layer], theirs: Sequence[Layer], left: int, right: int
) -> list[tuple[Layer, Layer]]:
    """Return the layers whose paths are equal but for their separators, and no other's.

    Numbers that count otherwise say nothing: of ``0, 1, 2`` and ``0, 2, 4`` no two are equal.
    """
    mine, others = _by_words(ours, left), _by_words(theirs, right)
    apart = _uncounted(mine.keys() - others.keys()) & _uncounted(others.keys() - mine.keys())
    return [
        (group[0], others[path][0])
        for path, group in mine.items()
        if len(group) == len(others.get(path, ())) == 1 and not _uncounted([path]) & apart
    ]


def _uncounted(paths: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the paths that have numbers, without these."""
    without = {path: tuple(re.sub(r"\d+", "", word) for word in path) for path in paths}
    return {short for path, short in without.items() if short != path}


def _by_words(layers: Sequence[Layer], left_out: int) -> dict[tuple[str, ...], list[Layer]]:
    """Return layers by the words of their paths after the names that are left out."""
    found: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        if left_out < max(len(layer.alias), 1):
            path = re.split(r"[/._]", "/".join(layer.alias[left_out:]))
            found.setdefault(tuple(path), []).append(layer)
    return found
