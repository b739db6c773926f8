"""The table of Flax and jaxnorm: linen variables, nnx states and parameters of functions."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from jaxnorm.interop import files
from jaxnorm.interop.layers import Form, Layer, Row, Shape, is_transposed
from jaxnorm.interop.transforms import joined, reshaped, same, single, swapped
from jaxnorm.interop.trees import paths_of, take_apart

NAME = "flax"
SEPARATOR = "/"
NOT_STORED: dict[str, str] = {}
GATES = {"lstm": ("i", "f", "g", "o"), "gru": ("r", "z", "n"), "rnn": ("",)}
RENORM = ("renorm_mean", "renorm_stddev")
ATTENTION = ("query", "key", "value", "out")


def _norm_leaf(name: str) -> Row:
    """Return the row of a norm's array, which nnx keeps flat for several feature axes."""

    def read(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        flat = shapes is not None and arrays[0].ndim == 1
        return [arrays[0].reshape(shapes[0]) if shapes and flat else arrays[0]]

    def write(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        flat = shapes is not None and len(shapes[0]) == 1
        return [arrays[0].reshape(-1) if flat else arrays[0]]

    return Row((name,), (name,), read, write)


def dense_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of a matrix for a kernel with several axes; those of the bias are last."""
    shape = shapes.get("kernel", ())
    last = len(shapes.get("bias", shape[-1:]))
    sizes = (math.prod(shape[: len(shape) - last]), math.prod(shape[len(shape) - last :]))
    return {"kernel": sizes}


def _rank(name: str, least: int, most: int) -> Any:
    return lambda shapes: least <= len(shapes[name]) <= most


WRAPPED = (
    same("kernel_scale", "kernel/scale"),
    same("u", "kernel/u"),
    same("sigma", "kernel/sigma"),
)
BIAS = reshaped("bias", "bias", lambda shape: (math.prod(shape),))
MATRIX = reshaped("kernel", "kernel", lambda shape: (shape[0], math.prod(shape[1:])))


def attention_rows(names: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of attention whose parts have these names and a kernel and bias each."""
    for name in ATTENTION:
        # the output joins heads from its first axes, the others have them last
        joins = name == "out"
        flat = lambda s, joins=joins: (
            (math.prod(s[:-1]), s[-1]) if joins else (s[0], math.prod(s[1:]))
        )
        yield reshaped(f"{name}_kernel", f"{names[name]}/kernel", flat)
    for name in ATTENTION:
        yield reshaped(f"{name}_bias", f"{names[name]}/bias", lambda s: (math.prod(s),))


def _attention() -> Form:
    rows = attention_rows({name: name for name in ATTENTION})
    return Form("attention", tuple(rows), (tuple(f"{name}/kernel" for name in ATTENTION),))


def _gates(columns: str, rows: str, projection: str, kind: str) -> Any:
    """Return whether shapes have the gates of a kind; the arguments are names of leaves."""

    def fits(shapes: Mapping[str, Shape]) -> bool:
        if any(len(shapes[name]) != 2 for name in {columns, rows} | ({projection} & shapes.keys())):
            return False
        features = shapes[projection][0] if projection in shapes else shapes[rows][0]
        return shapes[columns][1] == len(GATES[kind]) * features

    return fits


def _recurrent(kind: str) -> Iterator[Form]:
    """Yield the forms of a cell: as functions take it, as linen and as nnx store it."""
    drop = ("recurrent_bias",) if kind == "gru" else ()
    leaves = ("input_kernel", "recurrent_kernel", "bias", "recurrent_bias", "projection")
    names = ("input_kernel", "recurrent_kernel")
    fits = _gates(names[1], names[1], "projection", kind)
    yield Form(kind, tuple(map(same, leaves)), (names,), fits, droppable=drop)
    # Flax's LSTM has its bias in the recurrent layers, the other cells in the input layers.
    side = "h" if kind == "lstm" else "i"
    both = [[f"{part}{gate}" for gate in GATES[kind]] for part in "ih"]
    kernels = [[f"{name}/kernel" for name in part] for part in both]
    rows = [joined(common, stored) for common, stored in zip(names, kernels, strict=True)]
    rows += [joined("bias", [f"{side}{gate}/bias" for gate in GATES[kind]])]
    if kind == "gru":
        rows += [same("recurrent_bias", "hn/bias")]
    rows += [same("projection")]
    yield Form(kind, tuple(rows), (tuple(kernels[0] + kernels[1]),), droppable=drop)
    packed = ("dense_i/kernel", "dense_h/kernel")
    rows = [same(*pair) for pair in zip(names, packed, strict=True)]
    rows += [same("bias", f"dense_{side}/bias"), same("projection")]
    fits = _gates(packed[1], packed[1], "projection", kind)
    yield Form(kind, tuple(rows), (packed,), fits, droppable=drop)


FORMS: tuple[Form, ...] = (
    Form(
        "norm",
        tuple(map(_norm_leaf, ("scale", "bias", "mean", "var", *RENORM))),
        (("scale",), ("bias",), ("mean", "var")),
        lambda shapes: not any("kernel" in name or name == "embedding" for name in shapes),
    ),
    Form(
        "dense",
        (MATRIX, BIAS, *WRAPPED),
        (("kernel",),),
        lambda shapes: len(shapes["kernel"]) >= 2,
        guess=dense_shapes,
    ),
    Form("conv", (same("kernel"), same("bias"), *WRAPPED), (("kernel",),), _rank("kernel", 3, 5)),
    Form(
        "conv_transpose",
        (same("kernel"), same("bias"), *WRAPPED),
        (("kernel",),),
        _rank("kernel", 3, 5),
    ),
    Form(
        "conv_transpose",
        (single("kernel", "kernel", swapped, swapped, "flipped"), same("bias"), *WRAPPED),
        (("kernel",),),
        _rank("kernel", 3, 5),
        label="ConvTranspose(transpose_kernel=True)",
    ),
    Form("embed", (same("embedding"),), (("embedding",),)),
    _attention(),
    *(form for kind in GATES for form in _recurrent(kind)),
    Form("parameter", (same("value", ""),), (("",),)),
)


# The children that make up one layer, by their names without the underscore of nnx's if_.
COMPOSITES = (
    *({f"{part}{gate}" for part, gate in product("ih", gates)} for gates in GATES.values()),
    {"dense_i", "dense_h"},
)
Leaf = tuple[str, Shape]  # the key of an array and its shape


def layers(leaves: Mapping[tuple[str, ...], Leaf], *, attention: bool) -> list[Layer]:
    """Group the leaves of a model into layers.

    Args:
      leaves: key and shape of each leaf, by its path without the collection.
      attention: whether the four parts of attention make one layer.
    """
    groups: dict[tuple[str, ...], dict[str, Leaf]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[:-1], {})[path[-1]] = leaf
    composites = (*COMPOSITES, *([set(ATTENTION)] if attention else []))
    for parent in {path[:-1] for path in groups if path}:
        _join_children(groups, parent, composites)
    return [layer for path, group in groups.items() for layer in _layers_of(path, group)]


def _join_children(
    groups: dict[tuple[str, ...], dict[str, Leaf]],
    parent: tuple[str, ...],
    composites: Sequence[set[str]],
) -> None:
    """Move the leaves of the parts of one layer to their parent."""
    children = {path[-1].rstrip("_"): path for path in groups if path and path[:-1] == parent}
    for names in composites:
        if all("kernel" in groups.get(children.get(name, ()), ()) for name in names):
            for name in names:
                for leaf, value in groups.pop(children[name]).items():
                    groups.setdefault(parent, {})[f"{name}/{leaf}"] = value


def _layers_of(path: tuple[str, ...], group: Mapping[str, Leaf]) -> Iterator[Layer]:
    """Yield the layer of a group, and each leaf that is not part of it by itself."""
    shapes = {name: shape for name, (_, shape) in group.items()}
    forms = [form for form in FORMS if form.holds(shapes)]
    known = {name for form in forms for row in form.rows for name in row.stored} & shapes.keys()
    if known:
        recurrent = any(form.kind in GATES for form in forms)
        yield Layer(
            path,
            {name: group[name][0] for name in group if name in known},
            {name: shapes[name] for name in group if name in known},
            _alias(path) if recurrent else path,
            is_transposed(path),
        )
    for name, (key, shape) in group.items():
        if name not in known:
            own = (*path, name)
            yield Layer(own, {"": key}, {"": shape}, own)


def _alias(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of a cell as PyTorch counts: by layer and direction."""
    match path:
        case (*parent, "backward_rnn", "cell"):
            return (*parent, "l0_reverse")
        case (*parent, "forward_rnn", "cell") | (*parent, "cell"):
            return (*parent, "l0")
        case (*parent, name) if found := re.fullmatch(r"(backward_)?cell_(\d+)", name):
            return (*parent, f"l{found[2]}{'_reverse' if found[1] else ''}")
    return (*path, "l0")


def prepared(source: Any) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the arrays of variables, of an nnx model or of a file, by key."""
    if isinstance(source, str | os.PathLike):
        return files.read(source)
    tree = take_apart(source, "source")
    return {key: np.asarray(leaf) for key, leaf in tree.leaves.items()}, []


template = prepared


def file_layers(shapes: Mapping[str, Shape]) -> list[Layer]:
    """Group arrays by keys such as ``params/Dense_0/kernel`` into layers."""
    return layers(
        {path: (key, shapes[key]) for key, path in paths_of(shapes).items()}, attention=True
    )


def key_of(path: tuple[str, ...], name: str) -> str:
    """Return the key of a leaf of a layer."""
    return "/".join((*path, name) if name else path)
