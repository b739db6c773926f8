"""Try the forms of two layers on each other."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxnorm.interop import flax
from jaxnorm.interop.layers import Form, Layer, Row, UnfitError, blank
from jaxnorm.interop.table import Entry


@dataclass(frozen=True)
class Fit:
    """The forms of two layers, and what does not fit between them.

    Attributes:
      ours: the form of the model's layer.
      theirs: the form of the file's layer.
      missing: leaves of the model without a value, by their names in the layer.
      unused: leaves of the file that have no place.
      problems: shapes that differ.
    """

    ours: Form
    theirs: Form
    missing: list[str]
    unused: list[str]
    problems: list[str]

    def cost(self) -> tuple[int, int]:
        return len(self.problems), len(self.missing) + len(self.unused)


def best_fit(
    ours: Layer, theirs: Layer, table: Sequence[Form], label: str | None = None
) -> Fit | None:
    """Return the best pair of forms of one kind, or None if the layers have no kind in common."""
    kinds = kinds_of(label, table)
    pairs = [
        (mine, other)
        for mine in candidates(ours, flax.FORMS, label, kinds)
        for other in candidates(theirs, table, label, kinds)
        if mine.kind == other.kind
    ]
    if ours.transposed or theirs.transposed:
        pairs.sort(key=lambda pair: pair[0].kind != "conv_transpose")
    best = None
    for mine, other in pairs:
        fit = _fit(mine, other, ours, theirs)
        if best is None or fit.cost() < best.cost():
            best = fit
        if best.cost() == (0, 0):
            break
    return best


def candidates(
    layer: Layer, table: Sequence[Form], label: str | None, kinds: Collection[str]
) -> list[Form]:
    """Return the forms that a layer may have: those of the label, or else of its kinds."""
    if label is None:
        return layer.forms(table)
    return layer.forms(table, label) or [f for f in layer.forms(table) if f.kind in kinds]


def kinds_of(label: str | None, table: Sequence[Form]) -> set[str]:
    """Return the kinds of layer that bear a label in a framework or in Flax."""
    return {form.kind for form in (*table, *flax.FORMS) if form.label == label}


def _fit(mine: Form, other: Form, ours: Layer, theirs: Layer) -> Fit:
    try:
        common = other.read({name: blank(shape) for name, shape in theirs.shapes.items()})
    except (UnfitError, ValueError) as error:
        return Fit(mine, other, [], [], [f"{_keys(theirs, theirs.leaves)}: {error}"])
    missing, problems, placed = [], [], set()
    for row in mine.rows:
        names = [name for name in row.stored if name in ours.leaves]
        if not names:
            continue
        if set(row.common) <= common.keys():
            placed |= set(row.common)
            problems += _differences(row, mine, other, common, ours, theirs)
        else:
            missing += names
    return Fit(mine, other, missing, _unplaced(other, theirs, common, placed, mine), problems)


def _differences(
    row: Row, mine: Form, other: Form, common: Mapping[str, Any], ours: Layer, theirs: Layer
) -> list[str]:
    """Return the shapes of one row that are not those of the model."""
    given = [common[name] for name in row.common]
    sources = _stored(other, theirs, row.common)
    said = " and ".join(f"{theirs.leaves[name]} {theirs.shapes[name]}" for name in sources)
    try:
        shapes = [ours.shapes[name] for name in row.stored]
        found = [np.shape(array) for array in row.write(given, shapes)]
    except (UnfitError, ValueError, KeyError):
        found = [array.shape for array in given]
        target = ", ".join(
            f"{ours.leaves[n]} {ours.shapes[n]}" for n in row.stored if n in ours.leaves
        )
        shown = ", ".join(map(str, found))
        return [f"{target}: {said or 'its default'} gives {shown}"]
    return [
        f"{ours.leaves[name]} {shape}: {said or 'its default'} gives {new}"
        for name, shape, new in zip(row.stored, shapes, found, strict=True)
        if shape != new
    ]


def _unplaced(
    other: Form, theirs: Layer, common: Mapping[str, Any], placed: set[str], mine: Form
) -> list[str]:
    """Return the leaves of the file's layer that no leaf of the model takes."""
    unused = [
        name for name in theirs.leaves if other.row_of(name) is None and name not in other.ignored
    ]
    for row in other.rows:
        if not set(row.stored) <= theirs.leaves.keys():
            unused += [name for name in row.stored if name in theirs.leaves]
            continue
        lost = [name for name in row.common if name not in placed and name not in mine.droppable]
        if lost:
            # the first stored array is the first common one
            unused += row.stored[0 if row.common[0] in lost else 1 :] or row.stored
    return unused


def _stored(form: Form, layer: Layer, common: Sequence[str]) -> list[str]:
    """Return the stored names that common arrays come from."""
    names = [
        name
        for row in form.rows
        if set(row.common) & set(common) and set(row.stored) <= layer.leaves.keys()
        for name in row.stored
    ]
    return list(dict.fromkeys(names))


def _keys(layer: Layer, names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(layer.leaves[name] for name in names)


def entries(fit: Fit, ours: Layer, theirs: Layer, by: str) -> list[Entry]:
    """Return the lines of the table for two layers."""
    found = []
    defaults = tuple(fit.theirs.defaults)
    rows = [(row.common, row.stored, row.said) for row in fit.theirs.rows]
    rows += [((name,), (), "0") for name in defaults]
    done: set[str] = set()
    for common, stored, said in rows:
        if not set(stored) <= theirs.leaves.keys():
            continue
        mine = [row for row in fit.ours.rows if set(row.common) & set(common)]
        names = [name for row in mine for name in row.stored if name in ours.leaves]
        names = [name for name in names if name not in done]
        if not names:
            continue
        done |= set(names)
        changes = dict.fromkeys([said, *(row.said for row in mine)])
        found.append(
            Entry(
                tuple(ours.leaves[name] for name in names),
                tuple(ours.shapes[name] for name in names),
                fit.ours.label,
                tuple(theirs.leaves[name] for name in stored),
                tuple(theirs.shapes[name] for name in stored),
                ", ".join(change for change in changes if change),
                by,
            )
        )
    return found
