"""Name and arrange the arrays of a model as another framework does."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jaxnorm.interop import flax
from jaxnorm.interop.fitting import candidates, kinds_of
from jaxnorm.interop.layers import Form, Layer, UnfitError
from jaxnorm.interop.matching import Matching
from jaxnorm.interop.naming import Names, their_path
from jaxnorm.interop.search import labels
from jaxnorm.interop.trees import Tree


def of_matching(
    matching: Matching, tree: Tree, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the arrays of a model in the names, shapes and dtypes of a file."""
    found: dict[str, np.ndarray] = {}
    for pair in matching.pairs:
        theirs = pair.fit.theirs
        file = theirs.read({name: arrays[key] for name, key in pair.theirs.leaves.items()})
        shapes = {name: array.shape for name, array in file.items()}
        common = pair.fit.ours.read(_stored(pair.ours, tree), shapes)
        written = theirs.write(common, pair.theirs.shapes)
        for row in theirs.rows:
            # several arrays of a file may say the same, so that what is unchanged stays as it is
            if all(_unchanged(name, common, file) for name in row.common):
                continue
            found |= {
                pair.theirs.leaves[name]: written[name]
                for name in row.stored
                if name in written and name in pair.theirs.leaves
            }
    found |= {key: found[other] for key, other in matching.tied.items() if other in found}
    # what the model does not hold, such as the number of batches, is the file's
    return {
        key: np.array(found.get(key, array), array.dtype, order="C")
        for key, array in arrays.items()
    }


def _unchanged(name: str, common: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    return name in common and name in file and np.array_equal(common[name], file[name])


def named_arrays(
    tree: Tree, framework: ModuleType, names: Names, kinds: Mapping[str, str] | None
) -> dict[str, np.ndarray]:
    """Return the arrays of a model by the paths of its layers, or by ``names``."""
    leaves = {tree.paths[key]: (key, tree.shape(key)) for key in tree.leaves}
    found: dict[str, np.ndarray] = {}
    layers = flax.layers(leaves, attention=True)
    label = labels(tree.hints, kinds, layers, framework)
    path_of = their_path(names, layers, framework.SEPARATOR)
    for layer in layers:
        path = path_of(layer)
        if path is None:
            continue
        for name, array in _written(layer, tree, framework, label(layer)).items():
            key = framework.key_of(path, name)
            if key in found:
                raise ValueError(
                    f"each array must have a name of its own: two are called {key!r}. Change names."
                )
            found[key] = np.array(array, order="C")
    return found


def _written(
    layer: Layer, tree: Tree, framework: ModuleType, label: str | None
) -> dict[str, np.ndarray]:
    """Return the arrays of one layer by the names within the layer."""
    mine = candidates(layer, flax.FORMS, label, kinds_of(label, framework.FORMS))
    # a kernel of three axes is a convolution's unless its bias says otherwise
    for form in sorted(mine, key=lambda form: form.kind == "dense" and _is_window(layer)):
        common = form.read(_stored(layer, tree))
        for other in framework.FORMS:
            if other.kind == form.kind and not other.hidden:
                written = _try(other, common)
                if written is not None:
                    return written
    raise ValueError(
        f"{framework.NAME} must have a layer for each of the model: none for "
        f"{', '.join(f'{layer.leaves[n]} {layer.shapes[n]}' for n in layer.leaves)}. Leave it out "
        "by names={path: None}."
    )


def _is_window(layer: Layer) -> bool:
    return len(layer.shapes["kernel"]) > 2 and len(layer.shapes.get("bias", (1,))) == 1


def _try(form: Form, common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arrays in a form, or None if it does not hold all of them."""
    placed = {name for row in form.rows if set(row.common) <= common.keys() for name in row.common}
    if placed != common.keys():
        return None
    try:
        written = form.write(common)
    except (UnfitError, ValueError):
        return None
    return written if form.holds({name: np.shape(a) for name, a in written.items()}) else None


def _stored(layer: Layer, tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(tree.leaves[key]) for name, key in layer.leaves.items()}
