"""The table of PyTorch: how the state dicts of its modules store layers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.interop import files
from jaxnorm.interop.layers import Arrays, Form, Layer, Row, Shape, is_transposed
from jaxnorm.interop.transforms import (
    OfOne,
    biases_of_gru,
    channels_first,
    no_bias,
    no_recurrent_bias,
    same,
    single,
    split,
    transposed,
    two_biases,
    window_first,
)

NAME = "torch"
SEPARATOR = "."
# What a state dict does not hold, for the printed table.
NOT_STORED = {
    "norm": "eps is not in the file: PyTorch's default is 1e-5, and for RMSNorm the machine epsilon"
    " of the dtype",
}


def _conv_transpose(weight: np.ndarray) -> np.ndarray:
    """Turn (in, out, *window) into (*window, in, out), and flip the window.

    PyTorch's is the transpose of a convolution, whose weights are the other way around.
    """
    kernel = weight.transpose(*range(2, weight.ndim), 0, 1)
    return np.flip(kernel, tuple(range(kernel.ndim - 2)))


def _of_conv_transpose(kernel: np.ndarray) -> np.ndarray:
    flipped = np.flip(kernel, tuple(range(kernel.ndim - 2)))
    return flipped.transpose(-2, -1, *range(kernel.ndim - 2))


PARAMETRIZED = ("parametrizations.weight.original0", "parametrizations.weight.original1")
SPECTRAL = (
    "parametrizations.weight.original",
    "parametrizations.weight.0._u",
    "parametrizations.weight.0._v",
)
HALF_A_STEP = (
    "parametrizations.spectral_norm iterates half a step ahead: sigma differs until it converges"
)
# For each kind with a weight: from weight to kernel and back, and what is said of it.
WEIGHTS: dict[str, tuple[OfOne, OfOne, str]] = {
    "dense": (np.transpose, np.transpose, "transposed"),
    "conv": (window_first, channels_first, "window first"),
    "conv_transpose": (_conv_transpose, _of_conv_transpose, "window first, flipped"),
}
RANKS = {"dense": (2, 2), "conv": (3, 5), "conv_transpose": (3, 5)}


def _forms_with_weight(kind: str) -> Iterator[Form]:
    """Yield the forms of a kind of layer: plain, with weight norm, with spectral norm."""
    read, write, said = WEIGHTS[kind]
    ranks, bias = RANKS[kind], same("bias")

    def ranked(name: str):
        return lambda shapes: ranks[0] <= len(shapes[name]) <= ranks[1]

    yield Form(
        kind,
        (single("kernel", "weight", read, write, said), bias),
        (("weight",),),
        ranked("weight"),
    )
    for g, v in (PARAMETRIZED, ("weight_g", "weight_v")):
        yield Form(kind, (_weight_normed(kind, v, g), bias), ((g, v),), ranked(v))
    for weight, u, v in (SPECTRAL, ("weight_orig", "weight_u", "weight_v")):
        row = _spectral(kind, weight, u, v)
        note = HALF_A_STEP if u == SPECTRAL[1] else ""
        yield Form(kind, (row, bias), ((weight, u, v),), ranked(weight), note=note)


def _weight_normed(kind: str, v: str, g: str) -> Row:
    """Return the row of a weight and weight norm's gain, which has the rank of the weight."""
    to_kernel, to_weight, said = WEIGHTS[kind]

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        weight, gain = arrays
        return [to_kernel(weight), gain.reshape(-1 if gain.ndim else ())]

    def write(arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> list[np.ndarray]:
        weight, gain = to_weight(arrays[0]), arrays[1]
        if shapes:
            return [weight, gain.reshape(shapes[1])]
        # axis 0 by default, also where it is the inputs' as in transposed convolutions
        axis = 0 if gain.size == weight.shape[0] else 1
        sizes = [gain.size if i == axis else 1 for i in range(weight.ndim)]
        return [weight, gain.reshape(sizes if gain.ndim else ())]

    return Row(("kernel", "kernel_scale"), (v, g), read, write, f"{said}; gain")


def _spectral(kind: str, weight: str, u: str, v: str) -> Row:
    """Return the row of a weight with the vectors of its spectral norm.

    ``u`` belongs to the output and is what our iteration keeps; v and sigma follow from it.
    """
    to_kernel, to_weight, said = WEIGHTS[kind]

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        w, left, right = arrays
        wide = np.promote_types(w.dtype, np.float32)
        sigma = left.astype(wide) @ (_matrix(kind, w).astype(wide) @ right.astype(wide))
        return [to_kernel(w), left[None], np.asarray(sigma)]

    def write(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        w, left = to_weight(arrays[0]), arrays[1].reshape(-1)
        right = left.astype(np.float64) @ _matrix(kind, w).astype(np.float64)
        right = right / max(float(np.linalg.norm(right)), 1e-12)
        return [w, left, right.astype(left.dtype)]

    return Row(("kernel", "u", "sigma"), (weight, u, v), read, write, f"{said}; u")


def _matrix(kind: str, weight: np.ndarray) -> np.ndarray:
    """Return the weight as a matrix with a row for each output."""
    first = np.moveaxis(weight, 1, 0) if kind == "conv_transpose" else weight
    return first.reshape(first.shape[0], -1)


def _attention() -> Iterator[Form]:
    """Yield the forms of MultiheadAttention: one weight for all inputs, or one for each."""
    three = ("query", "key", "value")
    out = (
        split([f"{name}_bias" for name in three], "in_proj_bias", np.asarray, np.asarray),
        single("out_kernel", "out_proj.weight", np.transpose, np.transpose, "transposed"),
        same("out_bias", "out_proj.bias"),
    )
    kernels = [f"{name}_kernel" for name in three]
    packed = split(kernels, "in_proj_weight", np.transpose, np.transpose, "split, transposed")
    yield Form("attention", (packed, *out), (("in_proj_weight", "out_proj.weight"),))
    names = tuple(f"{name}_proj_weight" for name in "qkv")
    rows = [transposed(*pair) for pair in zip(kernels, names, strict=True)]
    yield Form("attention", (*rows, *out), (names,))


def _recurrent(kind: str, gates: int) -> Form:
    def fits(shapes: Mapping[str, Shape]) -> bool:
        rows, columns = shapes["weight_hh"]
        features = shapes["weight_hr"][1] if "weight_hr" in shapes else columns
        return rows == gates * features

    rows = (
        transposed("input_kernel", "weight_ih"),
        transposed("recurrent_kernel", "weight_hh"),
        transposed("projection", "weight_hr"),
        _gru_biases() if kind == "gru" else _biases(),
    )
    more = {"recurrent_bias": no_recurrent_bias} if kind == "gru" else {}
    return Form(kind, rows, (("weight_ih", "weight_hh"),), fits, {"bias": no_bias, **more})


def _biases() -> Row:
    return Row(
        ("bias",),
        ("bias_ih", "bias_hh"),
        lambda arrays, shapes: [arrays[0] + arrays[1]],
        lambda arrays, shapes: [arrays[0], np.zeros_like(arrays[0])],
        "sum",
    )


def _gru_biases() -> Row:
    """Return the row of a GRU's biases: n's recurrent one is multiplied by the reset gate."""
    return Row(
        ("bias", "recurrent_bias"),
        ("bias_ih", "bias_hh"),
        lambda arrays, shapes: biases_of_gru(*arrays),
        lambda arrays, shapes: two_biases(*arrays),
        "sum of r and z, n apart",
    )


def _batches(stored: Arrays) -> np.ndarray | None:
    return np.zeros((), np.int64) if "running_mean" in stored else None


NORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
FORMS: tuple[Form, ...] = (
    Form(
        "norm",
        (
            same("scale", "weight"),
            same("bias"),
            same("mean", "running_mean"),
            same("var", "running_var"),
        ),
        (("weight",), ("bias",), ("running_mean", "running_var")),
        # what weight norm leaves next to a bias is no norm
        lambda shapes: shapes.keys() <= NORM,
        ignored={"num_batches_tracked": _batches},
    ),
    *(form for kind in WEIGHTS for form in _forms_with_weight(kind)),
    Form(
        "dense",
        (same("kernel", "weight"), same("bias")),
        (("weight",),),
        label="Conv1D",
        hidden=True,
    ),
    Form("embed", (same("embedding", "weight"),), (("weight",),), lambda s: len(s["weight"]) == 2),
    *_attention(),
    *(_recurrent(kind, gates) for kind, gates in (("lstm", 4), ("gru", 3), ("rnn", 1))),
    Form("parameter", (same("value", ""),), (("",),)),
    Form("parameter", (same("value", "weight"),), (("weight",),)),
)
LEAVES = {name for form in FORMS for row in form.rows for name in row.stored} - {""}
LEAVES |= {name for form in FORMS for name in form.ignored}


def file_layers(shapes: Mapping[str, Shape]) -> list[Layer]:
    """Group the keys of a state dict into layers."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in shapes:
        path, name = _place(tuple(key.split(".")), shapes)
        groups.setdefault(path, {})[name] = key
    return [
        Layer(
            path,
            names,
            {name: shapes[key] for name, key in names.items()},
            path,
            is_transposed(path),
        )
        for path, names in groups.items()
    ]


def _place(parts: tuple[str, ...], shapes: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Return the path of the layer that a key belongs to, and the name in the layer."""
    *path, name = parts
    if found := re.fullmatch(r"((?:weight|bias)_(?:ih|hh|hr))_(l\d+(?:_reverse)?)", name):
        return (*path, found[2]), found[1]
    if "parametrizations" in path:
        start = path.index("parametrizations")
        return tuple(path[:start]), ".".join(parts[start:])
    if path and path[-1] == "out_proj":
        owner = ".".join((*path[:-1], ""))
        if f"{owner}in_proj_weight" in shapes or f"{owner}q_proj_weight" in shapes:
            return tuple(path[:-1]), f"out_proj.{name}"
    return (tuple(path), name) if name in LEAVES else (parts, "")


def key_of(path: tuple[str, ...], name: str) -> str:
    """Return the key of a leaf of a layer: the reverse of how keys are grouped."""
    if path and re.fullmatch(r"l\d+(_reverse)?", path[-1]) and re.match("(weight|bias)_", name):
        return ".".join((*path[:-1], f"{name}_{path[-1]}"))
    return ".".join((*path, name) if name else path)


# The names of a file to fill keep its prefixes.
template = files.read


def prepared(source: Any) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return a state dict without wrappers, and what was taken off."""
    state, notes = files.read(source)
    for wrapper, prefix in (("DistributedDataParallel", "module."), ("compile", "_orig_mod.")):
        while all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
            notes.append(f"the prefix {prefix!r} of {wrapper} was taken off")
    return state, notes
