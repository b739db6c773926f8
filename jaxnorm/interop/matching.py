"""Find which layer of a file belongs to which layer of a model, and what would not fit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isclose
from types import ModuleType

import numpy as np

from jaxnorm.interop import flax
from jaxnorm.interop.alignment import natural
from jaxnorm.interop.fitting import entries
from jaxnorm.interop.layers import Layer
from jaxnorm.interop.naming import Names, rules
from jaxnorm.interop.problems import FILE, refusal, rounded, without
from jaxnorm.interop.search import Pair, Search, labels
from jaxnorm.interop.stored import Stored
from jaxnorm.interop.table import Entry, table
from jaxnorm.interop.trees import Tree

# options with which a norm of Keras computes what none of ours does
WARNED = {
    "rms_scaling": "LayerNormalization(rms_scaling=True) of Keras is x * scale / sqrt(var(x) + "
    "epsilon), neither layer norm, which subtracts the mean, nor RMS norm, which divides by "
    "mean(x**2). Compute that in the model, or train on."
}
Allowed = bool | str | Sequence[str]


@dataclass(repr=False)
class Matching:
    """Which array of a file goes to which leaf of a model: what ``load`` would do.

    It prints itself as a table.

    Attributes:
      entries: the lines of the table.
      missing: leaves of the model for which the file has no value.
      unused: arrays of the file that no leaf takes.
      problems: what does not fit; empty if ``load`` would succeed.
      notes: what was taken off or left out, and options that the file does not hold.
      guessed: whether names did not decide everything.
      pairs: the layers that belong together.
      values: the new values of the leaves, not yet in their dtypes.
      tied: second names of arrays, with the names that are used.
      warnings: options of the model that are not those of the file.
      hint: which framework the names look like, if it is another one.
      source: what errors call the arrays, "the file", or "like" of ``save``.
    """

    entries: list[Entry]
    missing: list[str]
    unused: list[str]
    problems: list[str]
    notes: list[str]
    guessed: bool
    pairs: list[Pair]
    values: dict[str, np.ndarray]
    tied: dict[str, str]
    warnings: list[str]
    hint: str = ""
    source: str = FILE

    def __repr__(self) -> str:
        notes = [*self.notes, *self.warnings, *([self.hint] if self.hint else [])]
        return table(self.entries, self.missing, self.unused, self.problems, notes)

    def check(self) -> None:
        """Raise ValueError if anything does not fit; the first 8 problems are listed."""
        if self.problems:
            raise refusal(self.problems, self.source, self.hint)


def find(
    tree: Tree,
    stored: Stored,
    framework: ModuleType,
    *,
    names: Names = None,
    kinds: Mapping[str, str] | None = None,
    allow_missing: Allowed = False,
    allow_unused: Allowed = False,
    allow_rounding: bool = False,
    source: str = FILE,
) -> Matching:
    """Match the leaves of a model with the arrays of a file; see :func:`jaxnorm.interop.match`."""
    shapes = {key: tuple(np.shape(array)) for key, array in stored.arrays.items()}
    # what the configuration says of layers
    theirs = framework.file_layers(shapes, *([stored.options] if stored.options else []))
    attention = any(
        form.kind == "attention" for layer in theirs for form in layer.forms(framework.FORMS)
    )
    leaves = {tree.paths[key]: (key, tree.shape(key)) for key in tree.leaves}
    ours = flax.layers(leaves, attention=attention)
    search = Search(ours, theirs, framework, labels(tree.hints, kinds, ours, framework))
    search.run(rules(names, search.ours, search.theirs, framework, source))
    allowed = _wanted(allow_missing), _wanted(allow_unused)
    return _result(search, tree, stored, framework, allowed, allow_rounding, source)


def _wanted(allowed: Allowed) -> Callable[[str], bool]:
    """Return whether a name may be left over."""
    if isinstance(allowed, bool):
        return lambda name: allowed
    patterns = [allowed] if isinstance(allowed, str) else list(allowed)
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _result(
    search: Search,
    tree: Tree,
    stored: Stored,
    framework: ModuleType,
    allowed: tuple[Callable[[str], bool], Callable[[str], bool]],
    allow_rounding: bool,
    source: str,
) -> Matching:
    """Put together what was found, with everything that does not fit."""
    arrays = stored.arrays
    pairs = sorted(search.pairs, key=lambda pair: natural(pair.ours.path))
    found = [problem for pair in pairs for problem in pair.fit.problems]
    values: dict[str, np.ndarray] = {}
    for pair in pairs:
        if not pair.fit.problems:
            values |= _values(pair, arrays, found)
    missing, unused, tied = _left_over(search, pairs, framework, arrays)
    found += rounded(values, tree, allow_rounding)
    found += without(missing, unused, pairs, tree, arrays, allowed, source)
    return Matching(
        [entry for p in pairs for entry in entries(p.fit, p.ours, p.theirs, p.by)],
        missing + sorted(search.left_out),
        unused,
        found,
        stored.notes
        + _notes(pairs, framework, search, said=bool(stored.options))
        + [f"{key} is the same array as {other}" for key, other in tied.items()],
        any(pair.by not in ("names", "path") for pair in pairs),
        pairs,
        values,
        tied,
        _differing(pairs, tree, stored, framework),
        source=source,
    )


def _left_over(
    search: Search,
    pairs: Sequence[Pair],
    framework: ModuleType,
    arrays: Mapping[str, np.ndarray],
) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the leaves of the model without a value, the arrays without a place, and the tied."""
    missing = [key for layer in search.rest for key in layer.leaves.values()]
    missing += [pair.ours.leaves[name] for pair in pairs for name in pair.fit.missing]
    unused = [key for layer in search.others for key in _counted(layer, framework)]
    unused += [pair.theirs.leaves[name] for pair in pairs for name in pair.fit.unused]
    # by name one array may have several places, or a place without its layer
    used = {
        key
        for pair in pairs
        for name, key in pair.theirs.leaves.items()
        if name not in pair.fit.unused
    }
    unused = [key for key in dict.fromkeys(unused) if key not in used]
    tied = _tied(unused, used, arrays)
    return missing, [key for key in unused if key not in tied], tied


def _tied(
    unused: Sequence[str], used: Collection[str], arrays: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Return the used array of which each other one is a second name, as of tied embeddings."""

    def place(key: str) -> tuple:
        array = np.asarray(arrays[key])
        return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype

    places = {place(key): key for key in used}
    return {key: places[place(key)] for key in unused if place(key) in places}


def _counted(layer: Layer, framework: ModuleType) -> list[str]:
    """Return the keys of a layer without those that hold no parameters."""
    ignored = {name for form in framework.FORMS for name in form.ignored}
    return [key for name, key in layer.leaves.items() if name not in ignored]


def _values(
    pair: Pair, arrays: Mapping[str, np.ndarray], found: list[str]
) -> dict[str, np.ndarray]:
    """Return the values of a layer's leaves, by key."""
    mine, ours = pair.fit.ours, pair.ours
    stored = {name: arrays[key] for name, key in pair.theirs.leaves.items()}
    common = pair.fit.theirs.read(stored)
    placed = {
        name: common[name]
        for row in mine.rows
        if set(row.stored) <= ours.leaves.keys() and set(row.common) <= common.keys()
        for name in row.common
    }
    lost = [name for name in mine.droppable if name in common and name not in placed]
    found += [
        f"{'/'.join(ours.path)}: it has no place for {name}, which is not 0 in "
        f"{', '.join(pair.theirs.leaves.values())}"
        for name in lost
        if np.any(common[name])
    ]
    written = mine.write(placed, ours.shapes)
    return {ours.leaves[name]: value for name, value in written.items() if name in ours.leaves}


def _differing(
    pairs: Sequence[Pair], tree: Tree, stored: Stored, framework: ModuleType
) -> list[str]:
    """Say which norms compute another thing in the file: by epsilon, if nnx tells ours, or always.

    They are warnings and no errors. The arrays are right, epsilon is for the model to say, and
    variables of linen have none that could be compared.
    """
    found = []
    for pair in pairs:
        said = stored.options.get(framework.SEPARATOR.join(pair.theirs.path), {})
        path, theirs = "/".join(pair.ours.path), said.get("epsilon")
        ours = tree.epsilons.get(path)
        path = path or "the layer"
        if theirs is not None and ours is not None and not isclose(theirs, ours, rel_tol=1e-6):
            found.append(f"{path} has epsilon={ours:g}, but the file was made with {theirs:g}.")
        found += [f"{path}: {why}" for name, why in WARNED.items() if said.get(name)]
    return found


def _notes(
    pairs: Sequence[Pair], framework: ModuleType, search: Search, *, said: bool
) -> list[str]:
    """Return what the arrays do not tell."""
    kinds = {} if said else dict.fromkeys(pair.fit.theirs.kind for pair in pairs)
    notes = [framework.NOT_STORED[kind] for kind in kinds if kind in framework.NOT_STORED]
    notes += dict.fromkeys(pair.fit.theirs.note for pair in pairs if pair.fit.theirs.note)
    square = [
        "/".join(pair.ours.path)
        for pair in pairs
        if pair.fit.ours.kind == "conv"
        and search.label(pair.ours) is None
        and pair.theirs.label is None
        for shape in [pair.ours.shapes["kernel"]]
        if shape[-1] == shape[-2]
    ]
    if square:
        more = f" and {len(square) - 3} more" if len(square) > 3 else ""
        notes.append(
            f"{', '.join(square[:3])}{more} would also fit as ConvTranspose, with as many channels "
            'in as out: say kinds={path: "ConvTranspose"} if they are'
        )
    return notes
