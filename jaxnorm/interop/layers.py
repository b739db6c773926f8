"""Say how frameworks store layers: a table of rows for each form of a layer.

Every form of a layer is described by how it is turned into one common form, and back. A kind of
layer has these arrays in the common form, all of which may be absent but the first:

    norm             scale, bias, mean, var
    dense            kernel (in, out), bias
    conv             kernel (*window, in / groups, out), bias
    conv_transpose   kernel (*window, in, out), not flipped, bias
    embed            embedding (entries, features)
    attention        {query, key, value}_{kernel, bias}, kernels (in, heads * head_dim);
                     out_kernel (heads * head_dim, out), out_bias
    lstm, gru, rnn   the parameters of jaxnorm.recurrent without a norm: input_kernel,
                     recurrent_kernel, bias, recurrent_bias, projection
    parameter        value: an array by itself

Weight norm adds ``kernel_scale`` and spectral norm ``u`` and ``sigma`` to dense, conv and
conv_transpose.

The rows of two frameworks that share the common form make up the way from one to the other. A
framework is one file with such a table.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Arrays = Mapping[str, Any]
# Function of arrays and of the shapes that its results should have, None where they are not known.
Transform = Callable[[Sequence[np.ndarray], Sequence[Shape] | None], Sequence[np.ndarray]]


class UnfitError(ValueError):
    """The error of arrays that a form cannot hold, as a phrase."""


@dataclass(frozen=True)
class Row:
    """One line of a table: arrays in the common form, and as they are stored.

    Attributes:
      common: names in the common form.
      stored: names within the layer, as it is stored.
      read: from the stored arrays to the common ones.
      write: from the common arrays to the stored ones.
      said: what ``read`` does, for the printed table; empty if it does nothing.
    """

    common: tuple[str, ...]
    stored: tuple[str, ...]
    read: Transform
    write: Transform
    said: str = ""


@dataclass(frozen=True)
class Form:
    """One way to store a kind of layer.

    Attributes:
      kind: the kind of layer.
      rows: the arrays.
      needs: names of which every layer of this form has all; of several tuples one is enough.
      fits: whether stored shapes can be of this form.
      defaults: functions from the common arrays to one that is not stored.
      droppable: common arrays without a place that may be left out when they are 0.
      ignored: stored names that have no counterpart, with functions that make them
        from the stored arrays, or return None.
      label: the name of the form in printed tables and in the argument ``kinds``.
      hidden: whether a layer has this form only if ``kinds`` says so.
      note: what the printed table says below, if a layer has this form.
      guess: from stored shapes to common shapes where ``read`` needs them.
    """

    kind: str
    rows: tuple[Row, ...]
    needs: tuple[tuple[str, ...], ...]
    fits: Callable[[Mapping[str, Shape]], bool] = lambda shapes: True
    defaults: Mapping[str, Callable[[Arrays], np.ndarray]] = field(default_factory=dict)
    droppable: Collection[str] = ()
    ignored: Mapping[str, Callable[[Arrays], np.ndarray | None]] = field(default_factory=dict)
    label: str = ""
    hidden: bool = False
    note: str = ""
    guess: Callable[[Mapping[str, Shape]], Mapping[str, Shape]] = lambda shapes: {}

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or LABELS[self.kind])

    def holds(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether a layer with these stored arrays may have this form."""
        return any(set(names) <= shapes.keys() for names in self.needs) and self.fits(shapes)

    def read(self, stored: Arrays, shapes: Mapping[str, Shape] | None = None) -> dict[str, Any]:
        """Return the arrays of a layer in the common form; those without a row are left out.

        ``shapes`` are the common shapes as far as they are known.
        """
        shapes = {**self.guess({name: np.shape(a) for name, a in stored.items()}), **(shapes or {})}
        common: dict[str, Any] = {}
        for row in self.rows:
            if set(row.stored) <= stored.keys():
                given = [np.asarray(stored[name]) for name in row.stored]
                common |= zip(row.common, row.read(given, _all(shapes, row.common)), strict=True)
        for name, make in self.defaults.items():
            if name not in common:
                common[name] = make(common)
        return common

    def write(self, common: Arrays, shapes: Mapping[str, Shape] | None = None) -> dict[str, Any]:
        """Return the arrays of a layer as they are stored.

        ``shapes`` are the stored shapes as far as they are known.
        """
        stored: dict[str, Any] = {}
        for row in self.rows:
            if set(row.common) <= common.keys():
                given = [np.asarray(common[name]) for name in row.common]
                stored |= zip(row.stored, row.write(given, _all(shapes, row.stored)), strict=True)
        for name, make in self.ignored.items():
            if (value := make(stored)) is not None:
                stored[name] = value
        return stored

    def row_of(self, name: str, *, stored: bool = True) -> Row | None:
        """Return the row with a stored (or common) name, or None."""
        rows = [row for row in self.rows if name in (row.stored if stored else row.common)]
        return rows[0] if rows else None


@dataclass(frozen=True)
class Layer:
    """A layer of a model or of a file.

    Attributes:
      path: where it is, for people.
      leaves: from the names within the layer to the keys of the arrays.
      shapes: the shapes of the leaves.
      alias: the path to compare with another framework's.
      transposed: whether its name says that it is a transposed convolution.
      label: the label of its form, if the file says it.
    """

    path: tuple[str, ...]
    leaves: Mapping[str, str]
    shapes: Mapping[str, Shape]
    alias: tuple[str, ...] = ()
    transposed: bool = False
    label: str | None = None

    def forms(self, table: Sequence[Form], label: str | None = None) -> list[Form]:
        """Return the forms of a table that the layer may have.

        With a ``label`` these are the forms that bear it.
        """
        found = [form for form in table if form.holds(self.shapes)]
        if self.label is not None:
            return [form for form in found if form.label == self.label]
        if label is not None:
            return [form for form in found if form.label == label]
        return [form for form in found if not form.hidden]


# The usual label of each kind.
LABELS = {
    "norm": "norm",
    "dense": "Dense",
    "conv": "Conv",
    "conv_transpose": "ConvTranspose",
    "embed": "Embed",
    "attention": "attention",
    "lstm": "LSTM",
    "gru": "GRU",
    "rnn": "RNN",
    "parameter": "parameter",
}

# The array by whose number of elements layers are told apart before their forms are known.
PRIMARY = {
    "norm": ("scale", "bias", "mean"),
    "dense": ("kernel",),
    "conv": ("kernel",),
    "conv_transpose": ("kernel",),
    "embed": ("embedding",),
    "attention": ("query_kernel",),
    "lstm": ("recurrent_kernel",),
    "gru": ("recurrent_kernel",),
    "rnn": ("recurrent_kernel",),
    "parameter": ("value",),
}


def join_parts(
    groups: dict[tuple[str, ...], dict[str, str]],
    parts: Sequence[str],
    weight: str,
    separator: str,
) -> None:
    """Move the leaves of layers that make up one, such as attention's four, to their parent.

    Args:
      groups: the leaves of the layers of a file, which are changed.
      parts: the names of the layers in their parent, where each must have a weight.
      weight: the name of the weight.
      separator: between the names of a part and of its leaf.
    """
    for parent in {path[:-1] for path in groups if path}:
        if all(weight in groups.get((*parent, part), ()) for part in parts):
            for part in parts:
                for leaf, key in groups.pop((*parent, part)).items():
                    groups.setdefault(parent, {})[f"{part}{separator}{leaf}"] = key


def is_transposed(path: Sequence[str]) -> bool:
    """Return whether the name of a layer says that it is a transposed convolution."""
    return bool(path) and re.search("transpose|deconv", path[-1], re.IGNORECASE) is not None


def blank(shape: Shape) -> np.ndarray:
    """Return zeros of a shape that take no memory, to try transforms with."""
    return np.broadcast_to(np.zeros((), np.int8), shape)


def size_of(layer: Layer, table: Sequence[Form]) -> int:
    """Return the number of elements of the layer's main array, in whatever form it is."""
    for form in layer.forms(table):
        common = form.read({name: blank(shape) for name, shape in layer.shapes.items()})
        for name in PRIMARY[form.kind]:
            if name in common:
                return common[name].size
    return sum(math.prod(shape) for shape in layer.shapes.values())


def _all(shapes: Mapping[str, Shape] | None, names: tuple[str, ...]) -> list[Shape] | None:
    """Return the shapes of all the names, or None if one is not known."""
    return [shapes[name] for name in names] if shapes and set(names) <= shapes.keys() else None
