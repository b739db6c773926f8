"""The table of Keras: arrays by the paths of its variables, such as ``conv1/kernel``.

Files that have no such names are named by the configuration of the model first: see
:mod:`jaxnorm.interop.keras_files`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.interop import files, keras_files
from jaxnorm.interop.flax import BIAS, MATRIX, attention_rows, dense_shapes
from jaxnorm.interop.keras_configs import OUT_OF_ORDER
from jaxnorm.interop.layers import Form, Layer, Row, Shape, is_transposed, join_parts
from jaxnorm.interop.stored import Stored, options_said
from jaxnorm.interop.transforms import (
    biases_of_gru,
    no_bias,
    no_recurrent_bias,
    permuted,
    same,
    single,
    swapped,
    two_biases,
)

NAME = "keras"
SEPARATOR = "/"
READS_LAYERS = True
# What arrays by themselves do not hold, for the printed table.
NOT_STORED = {
    "norm": "epsilon is not in the arrays: Keras's default is 1e-3, and 1e-6 for RMSNormalization",
}
PARTS = {"query": "query", "key": "key", "value": "value", "attention_output": "out"}
# Keras has the gates z, r, n; ours are r, z, n.
GRU = (1, 0, 2)


def _kernels(order: Sequence[int] = ()) -> tuple[Row, ...]:
    return (
        permuted("input_kernel", "kernel", order),
        permuted("recurrent_kernel", "recurrent_kernel", order),
    )


def _recurrent(kind: str, gates: int) -> Form:
    return Form(
        kind,
        (*_kernels(), same("bias")),
        (("kernel", "recurrent_kernel"),),
        lambda shapes: _gates(shapes) == gates,
        {"bias": no_bias},
    )


def _gates(shapes: Mapping[str, Shape]) -> int:
    rows, columns = shapes["recurrent_kernel"]
    return columns // rows if columns % rows == 0 else 0


def _gru(*, reset_after: bool) -> Form:
    """Return a form of the GRU, which has two biases if the reset gate comes after the product."""
    axes = 2 if reset_after else 1
    more = {"recurrent_bias": no_recurrent_bias} if reset_after else {}
    return Form(
        "gru",
        (*_kernels(GRU), _two_biases() if reset_after else permuted("bias", "bias", GRU)),
        (("kernel", "recurrent_kernel"),),
        lambda shapes: _gates(shapes) == 3 and len(shapes.get("bias", (0,) * axes)) == axes,
        {"bias": no_bias, **more},
    )


def _two_biases() -> Row:
    """Return the row of biases (2, 3H): those of the input and those of the recurrent product."""
    both = permuted("bias", "bias", GRU)

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        return biases_of_gru(*both.read(arrays, None)[0])

    def write(arrays: Sequence[np.ndarray], shapes: object) -> Sequence[np.ndarray]:
        return both.write([np.stack(two_biases(*arrays))], None)

    return Row(("bias", "recurrent_bias"), ("bias",), read, write, "sum of r and z, n apart")


def _depthwise() -> Row:
    """Return the row of a kernel (*window, channels, multiplier)."""

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        *window, channels, multiplier = arrays[0].shape
        return [arrays[0].reshape(*window, 1, channels * multiplier)]

    def write(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        *window, _, channels = arrays[0].shape
        return [arrays[0].reshape(shapes[0] if shapes else (*window, channels, 1))]

    return Row(("kernel",), ("kernel",), read, write, "a group for each channel")


def _window(shapes: Mapping[str, Shape]) -> bool:
    return 3 <= len(shapes["kernel"]) <= 5


NORM = {"gamma", "beta", "moving_mean", "moving_variance"}
RENORM = ("renorm_mean", "renorm_stddev")
# Rebuilt from the variance in training; evaluation does not use it.
STDDEV = {"moving_stddev": lambda stored: None}
FORMS: tuple[Form, ...] = (
    Form(
        "norm",
        (
            same("scale", "gamma"),
            same("bias", "beta"),
            same("mean", "moving_mean"),
            same("var", "moving_variance"),
            *map(same, RENORM),
        ),
        (("gamma",), ("beta",), ("moving_mean", "moving_variance")),
        ignored=STDDEV,
    ),
    Form("norm", (same("scale"),), (("scale",),), lambda shapes: shapes.keys() == {"scale"}),
    Form(
        "dense",
        (MATRIX, BIAS),
        (("kernel",),),
        lambda shapes: len(shapes["kernel"]) >= 2,
        guess=dense_shapes,
    ),
    Form("conv", (same("kernel"), same("bias")), (("kernel",),), _window),
    Form("conv", (_depthwise(), same("bias")), (("kernel",),), _window, label="DepthwiseConv"),
    Form(
        "conv_transpose",
        (single("kernel", "kernel", swapped, swapped, "flipped"), same("bias")),
        (("kernel",),),
        _window,
    ),
    Form("embed", (same("embedding", "embeddings"),), (("embeddings",),)),
    Form(
        "attention",
        tuple(attention_rows({ours: theirs for theirs, ours in PARTS.items()})),
        (tuple(f"{name}/kernel" for name in PARTS),),
    ),
    _recurrent("lstm", 4),
    _gru(reset_after=True),
    _gru(reset_after=False),
    _recurrent("rnn", 1),
    Form("parameter", (same("value", ""),), (("",),)),
)
LEAVES = {name for form in FORMS for row in form.rows for name in row.stored if "/" not in name}
LEAVES |= {"depthwise_kernel", "pointwise_kernel", "moving_stddev"} - {""}
# From the class of a layer to the form, where arrays do not tell.
CLASSES = {
    r"Conv\dDTranspose": "ConvTranspose",
    r"DepthwiseConv\dD": "DepthwiseConv",
    r"Conv\dD": "Conv",
    r"Dense|EinsumDense": "Dense",
    # no form has this label: weights at such axes fit nothing
    OUT_OF_ORDER: OUT_OF_ORDER,
}


def file_layers(
    shapes: Mapping[str, Shape], options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Layer]:
    """Group arrays by keys such as ``conv1/kernel`` into layers."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in shapes:
        *path, name = key.removesuffix(":0").split("/")
        place = (tuple(path), name) if name in LEAVES else ((*path, name), "")
        groups.setdefault(place[0], {})[place[1]] = key
    join_parts(groups, list(PARTS), "kernel", "/")
    cells = [path for path, names in groups.items() if {"kernel", "recurrent_kernel"} <= {*names}]
    return [
        layer
        for path, names in groups.items()
        for layer in _layers(path, names, shapes, cells, (options or {}).get("/".join(path), {}))
    ]


def _layers(
    path: tuple[str, ...],
    names: Mapping[str, str],
    shapes: Mapping[str, Shape],
    cells: Sequence[tuple[str, ...]],
    options: Mapping[str, Any],
) -> Iterator[Layer]:
    """Yield the layer of a group of arrays; a separable convolution is two."""
    alias, names = path, dict(names)
    kind = options.get("class", "")
    label = next((form for name, form in CLASSES.items() if re.fullmatch(name, kind)), None)
    if "depthwise_kernel" in names:
        label, first = "DepthwiseConv", {"kernel": names.pop("depthwise_kernel")}
        if "pointwise_kernel" in names:
            own = (*path, "depthwise")
            yield Layer(own, first, _shapes(first, shapes), own, label=label)
            label, first = "Conv", {"kernel": names.pop("pointwise_kernel")}
            path = alias = (*path, "pointwise")
        names = first | names
    if path in cells:
        path, alias = _cell(path, cells)
    yield Layer(path, names, _shapes(names, shapes), alias, is_transposed(path), label)


def _shapes(leaves: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shapes[key] for name, key in leaves.items()}


def _cell(
    path: tuple[str, ...], cells: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the path of a recurrent layer, and the same by its place and direction."""
    beside = [cell for cell in cells if cell[:-1] == path[:-1]]
    if path and re.search(r"cell(_\d+)?$", path[-1]):
        if len(beside) > 1:  # stacked cells
            return path, (*path[:-2], f"l{beside.index(path)}")
        path = path[:-1]
    match path:
        case (*parent, name) if found := re.match("(forward|backward)_", name):
            return path, (*parent, "l0" if found[1] == "forward" else "l0_reverse")
    return path, (*path, "l0")


def key_of(path: tuple[str, ...], name: str) -> str:
    """Return the key of a leaf of a layer."""
    match path:
        case (*parent, "l0"):
            path = tuple(parent)
        case (*parent, "l0_reverse"):
            path = (*parent, "backward")
    return "/".join((*path, name) if name else path)


def prepared(source: Any, layers: Any = None) -> Stored:
    """Return the arrays of a file or a mapping, and what the configuration says."""
    if isinstance(source, str | os.PathLike) and not os.fspath(source).endswith(files.SUFFIXES):
        arrays, options = keras_files.read(os.fspath(source), layers)
        return Stored(arrays, options_said(options), options)
    arrays, notes = files.read(source)
    options = keras_files.options_of(layers)
    return Stored(arrays, notes + options_said(options), options)


template = prepared
