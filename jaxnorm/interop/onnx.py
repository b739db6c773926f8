"""The table of ONNX's recurrent operators: their inputs W, R and B as arrays.

Keys end with these names, such as ``encoder/W``. Each array holds both directions of a
bidirectional operator.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.interop import files
from jaxnorm.interop.layers import Form, Layer, Row, Shape
from jaxnorm.interop.stored import Stored
from jaxnorm.interop.transforms import (
    biases_of_gru,
    no_bias,
    no_recurrent_bias,
    reordering,
    single,
    two_biases,
)

NAME = "onnx"
SEPARATOR = "/"
NOT_STORED = {
    "gru": "linear_before_reset is not in the arrays: the model's reset_after is taken for it",
}
# Where ours are in ONNX's order: i, o, f, c against i, f, g, o, and z, r, h against r, z, n.
ORDERS = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2), "rnn": (0,)}
NAMES = ("W", "R", "B", "P")
PLACED = re.compile(r"(^|/)l0(_reverse)?/([WRB])$")


def _kernel(kind: str, common: str, stored: str) -> Row:
    there, back = reordering(ORDERS[kind], 0)
    said = "transposed" if kind == "rnn" else "gates reordered, transposed"
    return single(common, stored, lambda a: there(a).T, lambda a: back(a.T), said)


def _bias(kind: str) -> Row:
    there, back = reordering(ORDERS[kind], 0)

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        inward, across = map(there, np.split(arrays[0], 2))
        return [inward + across]

    def write(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        return [np.concatenate([back(arrays[0]), np.zeros_like(arrays[0])])]

    return Row(("bias",), ("B",), read, write, "sum")


def _two_biases() -> Row:
    """Return the row of a GRU with ``linear_before_reset``, which scales n's second bias."""
    there, back = reordering(ORDERS["gru"], 0)

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        return biases_of_gru(*map(there, np.split(arrays[0], 2)))

    def write(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        return [np.concatenate([back(bias) for bias in two_biases(*arrays)])]

    return Row(("bias", "recurrent_bias"), ("B",), read, write, "sum of r and z, n apart")


def _form(kind: str, bias: Row) -> Form:
    rows = (_kernel(kind, "input_kernel", "W"), _kernel(kind, "recurrent_kernel", "R"), bias)

    def fits(shapes: Mapping[str, Shape]) -> bool:
        return len(shapes["R"]) == 2 and shapes["R"][0] == len(ORDERS[kind]) * shapes["R"][1]

    more = {"recurrent_bias": no_recurrent_bias} if "recurrent_bias" in bias.common else {}
    return Form(kind, rows, (("W", "R"),), fits, {"bias": no_bias, **more})


FORMS: tuple[Form, ...] = (
    _form("lstm", _bias("lstm")),
    _form("gru", _bias("gru")),
    _form("gru", _two_biases()),
    _form("rnn", _bias("rnn")),
    Form("parameter", (single("value", "", np.asarray, np.asarray, ""),), (("",),)),
)


def file_layers(shapes: Mapping[str, Shape]) -> list[Layer]:
    """Group arrays by keys such as ``encoder/l0/W`` into layers."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in shapes:
        *path, name = key.split("/")
        if name in NAMES:
            groups.setdefault(tuple(path), {})[name] = key
        else:
            groups[*path, name] = {"": key}
    return [
        Layer(path, names, {name: shapes[key] for name, key in names.items()}, path)
        for path, names in groups.items()
    ]


def key_of(path: tuple[str, ...], name: str) -> str:
    """Return the key of a leaf of a layer."""
    return "/".join((*path, name) if name else path)


def prepared(source: Any) -> Stored:
    """Return arrays with the directions apart, ``encoder/W`` as ``encoder/l0/W``.

    Raises:
      ValueError: arrays without the axis of directions, or an LSTM with peepholes.
    """
    arrays, notes = files.read(source)
    found: dict[str, np.ndarray] = {}
    for key, array in arrays.items():
        path, _, name = key.rpartition("/")
        if name not in NAMES:
            found[key] = array
            continue
        if array.ndim != (3 if name in "WR" else 2) or array.shape[0] not in (1, 2):
            raise ValueError(
                f"{key} must have shape (directions, ...), of 1 or 2 directions: got {array.shape}."
            )
        if name == "P":
            if np.any(array):
                raise ValueError(f"{key} must be 0: got peepholes, which no LSTM here has.")
            continue
        for place, part in zip(("l0", "l0_reverse"), array, strict=False):
            found[f"{path}/{place}/{name}" if path else f"{place}/{name}"] = part
    return Stored(found, notes)


template = prepared


def arranged(arrays: Mapping[str, np.ndarray], like: Any) -> dict[str, np.ndarray]:
    """Return arrays with both directions in one."""
    parts: dict[str, list[np.ndarray]] = {}
    for key, array in arrays.items():
        parts.setdefault(PLACED.sub(r"\1\3", key), []).append(array)
    return {
        key: np.stack(found) if re.search(r"(^|/)[WRB]$", key) else found[0]
        for key, found in parts.items()
    }
