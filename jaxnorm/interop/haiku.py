"""The table of Haiku: parameters and state as dicts of modules."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.interop import files
from jaxnorm.interop.layers import Form, Layer, Row, Shape, is_transposed, join_parts
from jaxnorm.interop.stored import Stored
from jaxnorm.interop.transforms import SETTLED, permuted, reshaped, same, single

NAME = "haiku"
SEPARATOR = "/"
NOT_STORED = {"norm": "eps is not in the file: Haiku's default is 1e-5"}
PARTS = {"query": "query", "key": "key", "value": "value", "linear": "out"}
# Haiku has the gates i, g, f, o; ours are i, f, g, o.
LSTM = (0, 2, 1, 3)


def _flat(shape: Shape) -> Shape:
    """Return a shape without the axes that are there to broadcast."""
    return tuple(size for size in shape if size != 1) or (1,)


def _average(common: str, stored: str) -> Row:
    """Return the row of an ExponentialMovingAverage.

    ``average`` is what is used. Haiku makes it from ``hidden`` and ``counter`` and the decay, which
    is not stored.
    """
    average = reshaped(common, stored, _flat)

    def write(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        (array,) = average.write(arrays, shapes and shapes[:1])
        return [array, array, np.array(SETTLED, np.int32)]

    names = tuple(
        f"{stored.removesuffix('average')}{name}" for name in ("average", "hidden", "counter")
    )
    read = lambda arrays, shapes: average.read(arrays[:1], shapes)
    return Row((common,), names, read, write, "average")


def _swapped(kernel: np.ndarray) -> np.ndarray:
    return np.swapaxes(kernel, -1, -2)


def _window(shapes: Mapping[str, Shape]) -> bool:
    return 3 <= len(shapes["w"]) <= 5


def _lstm(part: str) -> Form:
    """Return the form of the LSTM: one kernel for x and h, and 1 added to the forget gate.

    They are in a module within that of the LSTM, if it is known to be one.
    """
    w, b = f"{part}w", f"{part}b"
    gates = permuted("bias", "b", LSTM)

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        (weight,) = kernel.read(arrays[:1], None)
        (bias,) = gates.read(arrays[1:], None)
        features = len(bias) // 4
        return [weight[:-features], weight[-features:], bias + _forget(bias)]

    def write(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        (weight,) = kernel.write([np.concatenate(arrays[:2])], None)
        return [weight, *gates.write([arrays[2] - _forget(arrays[2])], None)]

    kernel = permuted("input_kernel", "w", LSTM)
    common = ("input_kernel", "recurrent_kernel", "bias")
    row = Row(common, (w, b), read, write, "gates reordered, split; 1 added to forget's bias")
    return Form(
        "lstm",
        (row,),
        ((w, b),),
        lambda s: len(s[w]) == 2 and 0 < s[w][1] // 4 < s[w][0] and s[w][1] % 4 == 0,
    )


def _forget(bias: np.ndarray) -> np.ndarray:
    return np.repeat(np.array([0, 1, 0, 0], bias.dtype), len(bias) // 4)


def _gru() -> Form:
    """Return the form of the GRU, whose z is one less ours: sigmoid(-v) = 1 - sigmoid(v)."""

    def turned(array: np.ndarray) -> np.ndarray:
        z, r, n = np.split(array, 3, -1)
        return np.concatenate([r, -z, n], -1)

    def back(array: np.ndarray) -> np.ndarray:
        r, z, n = np.split(array, 3, -1)
        return np.concatenate([-z, r, n], -1)

    names = {"input_kernel": "w_i", "recurrent_kernel": "w_h", "bias": "b"}
    rows = [single(*pair, turned, back, "gates reordered, z negated") for pair in names.items()]
    return Form("gru", tuple(rows), (("w_i", "w_h"),))


def _attention() -> Form:
    rows = [same(f"{ours}_kernel", f"{name}/w") for name, ours in PARTS.items()]
    rows += [same(f"{ours}_bias", f"{name}/b") for name, ours in PARTS.items()]
    return Form("attention", tuple(rows), (tuple(f"{name}/w" for name in PARTS),))


LINEAR = "linear/"
BIAS = reshaped("bias", "b", _flat)
FORMS: tuple[Form, ...] = (
    Form(
        "norm",
        (
            reshaped("scale", "scale", _flat),
            reshaped("bias", "offset", _flat),
            _average("mean", "mean_ema/average"),
            _average("var", "var_ema/average"),
        ),
        (("scale",), ("offset",), ("mean_ema/average", "var_ema/average")),
    ),
    Form("dense", (same("kernel", "w"), BIAS), (("w",),), lambda shapes: len(shapes["w"]) == 2),
    Form("conv", (same("kernel", "w"), BIAS), (("w",),), _window),
    Form(
        "conv_transpose",
        (single("kernel", "w", _swapped, _swapped, "channels swapped"), BIAS),
        (("w",),),
        _window,
    ),
    Form("embed", (same("embedding", "embeddings"),), (("embeddings",),)),
    _attention(),
    _lstm(LINEAR),
    _lstm(""),
    _gru(),
    Form("parameter", (same("value", ""),), (("",),)),
)
LEAVES = {name for form in FORMS for row in form.rows for name in row.stored if "/" not in name}
EMA = re.compile(r"(mean|var)_ema")


def file_layers(shapes: Mapping[str, Shape]) -> list[Layer]:
    """Group arrays by keys such as ``mlp/~/linear_0/w`` into layers."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in shapes:
        *path, name = (part for part in key.split("/") if part != "~")
        if len(path) > 0 and EMA.fullmatch(path[-1]):
            groups.setdefault(tuple(path[:-1]), {})[f"{path[-1]}/{name}"] = key
        elif name in LEAVES - {""}:
            groups.setdefault(tuple(path), {})[name] = key
        else:
            groups[*path, name] = {"": key}
    join_parts(groups, list(PARTS), "w", "/")
    return list(_layers(groups, shapes))


def _layers(
    groups: Mapping[tuple[str, ...], Mapping[str, str]], shapes: Mapping[str, Shape]
) -> Iterator[Layer]:
    for path, names in groups.items():
        match path:
            case (*parent, owner, "linear") if re.search("lstm", owner, re.IGNORECASE):
                path = (*parent, owner)
                names = {f"{LINEAR}{name}": key for name, key in names.items()}
        sizes = {name: shapes[key] for name, key in names.items()}
        recurrent = "w_h" in names or f"{LINEAR}w" in names
        alias = (*path, "l0") if recurrent else path
        yield Layer(path, names, sizes, alias, is_transposed(path))


def key_of(path: tuple[str, ...], name: str) -> str:
    """Return the key of a leaf of a layer."""
    if path and path[-1] == "l0":
        path = path[:-1]
    module, _, leaf = name.rpartition("/")
    inner = ("~", module) if EMA.fullmatch(module) else (module,)
    return "/".join(part for part in (*path, *inner, leaf) if part)


def prepared(source: Any) -> Stored:
    """Return the arrays of params, of (params, state), or of a file by their keys."""
    if isinstance(source, str | os.PathLike):
        return Stored(*files.read(source))
    trees = source if isinstance(source, tuple | list) else [source]
    found: dict[str, Any] = {}
    for tree in trees:
        if not isinstance(tree, Mapping):
            raise TypeError(
                "source must be params of Haiku, or (params, state), dicts of modules: got "
                f"{type(tree).__name__}. Give what init returns."
            )
        for module, arrays in tree.items():
            if isinstance(arrays, Mapping):
                found |= {f"{module}/{name}": value for name, value in arrays.items()}
            else:
                found[str(module)] = arrays
    return Stored(*files.read(found))


template = prepared


def arranged(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """Return arrays as params, or as (params, state) if there is a state or ``like`` is a pair."""
    if isinstance(like, Mapping) and not any(isinstance(value, Mapping) for value in like.values()):
        return dict(arrays)
    params: dict[str, dict[str, np.ndarray]] = {}
    state: dict[str, dict[str, np.ndarray]] = {}
    pair = like if isinstance(like, tuple | list) and len(like) == 2 else None
    for key, array in arrays.items():
        module, _, name = key.rpartition("/")
        is_state = EMA.search(module) if pair is None else name not in pair[0].get(module, ())
        (state if is_state else params).setdefault(module, {})[name] = array
    return (params, state) if pair or (state and like is None) else params | state
