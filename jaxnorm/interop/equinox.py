"""The table of Equinox: the leaves of modules by their paths, such as ``layers.0.weight``.

Equinox itself is not imported: its modules are pytrees. Its files are arrays in order without
names: see :mod:`jaxnorm.interop.equinox_files`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxnorm.interop import equinox_files, files
from jaxnorm.interop.equinox_modules import leaves_of, updated
from jaxnorm.interop.layers import Form, Layer, Row, Shape, is_transposed, join_parts
from jaxnorm.interop.stored import Stored, options_said
from jaxnorm.interop.transforms import (
    SETTLED,
    channels_first,
    no_bias,
    no_recurrent_bias,
    reshaped,
    same,
    single,
    transposed,
    window_first,
)

NAME = "equinox"
SEPARATOR = "."
READS_LAYERS = True
NOT_STORED: dict[str, str] = {}
PARTS = {"query": "query_proj", "key": "key_proj", "value": "value_proj", "out": "output_proj"}


def _hidden() -> Row:
    """Return the row of BatchNorm(mode="batch"): averages that start from 0 and n, the steps.

    What evaluation uses is ``hidden / (1 - momentum**n)``, in float32 as Equinox computes it.
    """

    def read(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        mean, var, steps, momentum = arrays
        left = np.float32(float(np.float32(momentum)) ** int(steps)) if steps.size == 1 else 0
        part = np.float32(1) - left if steps > 0 else np.float32(1)
        return [(array / part).astype(array.dtype) for array in (mean, var)]

    def write(arrays: Sequence[np.ndarray], shapes: object) -> list[np.ndarray]:
        return [*arrays, np.array(SETTLED, np.int32), np.zeros(())]

    names = ("hidden_mean", "hidden_var", "counter", "momentum")
    return Row(("mean", "var"), names, read, write, "divided by 1 - momentum**counter")


def _ema() -> Row:
    """Return the row of BatchNorm(mode="ema"), whose averages start from the first batch."""
    return Row(
        ("mean", "var"),
        ("mean", "var", "first_time"),
        lambda arrays, shapes: arrays[:2],
        lambda arrays, shapes: [*arrays, np.array(False)],
    )


def _attention() -> Form:
    rows = [transposed(f"{ours}_kernel", f"{name}.weight") for ours, name in PARTS.items()]
    rows += [same(f"{ours}_bias", f"{name}.bias") for ours, name in PARTS.items()]
    return Form("attention", tuple(rows), (tuple(f"{name}.weight" for name in PARTS.values()),))


def _recurrent(kind: str, gates: int) -> Form:
    rows = [transposed("input_kernel", "weight_ih"), transposed("recurrent_kernel", "weight_hh")]
    rows += [same("bias")]
    defaults = {"bias": no_bias}
    if kind == "gru":
        rows += [same("recurrent_bias", "bias_n")]
        defaults["recurrent_bias"] = no_recurrent_bias
    fits = lambda s: s["weight_hh"][0] == gates * s["weight_hh"][1]
    return Form(kind, tuple(rows), (("weight_ih", "weight_hh"),), fits, defaults)


def _window(shapes: Mapping[str, Shape]) -> bool:
    return 3 <= len(shapes["weight"]) <= 5


BIAS = reshaped("bias", "bias", lambda shape: shape[:1])
# A transposed convolution has its weights as a convolution has, and does not flip them.
WEIGHT = single("kernel", "weight", window_first, channels_first, "window first")
FORMS: tuple[Form, ...] = (
    Form(
        "norm",
        (same("scale", "weight"), same("bias"), _hidden(), _ema()),
        (("weight",), ("bias",), ("hidden_mean",), ("mean",)),
    ),
    Form(
        "dense",
        (transposed("kernel", "weight"), same("bias")),
        (("weight",),),
        lambda shapes: len(shapes["weight"]) == 2,
    ),
    Form("conv", (WEIGHT, BIAS), (("weight",),), _window),
    Form("conv_transpose", (WEIGHT, BIAS), (("weight",),), _window),
    Form("embed", (same("embedding", "weight"),), (("weight",),), lambda s: len(s["weight"]) == 2),
    _attention(),
    _recurrent("lstm", 4),
    _recurrent("gru", 3),
    Form("parameter", (same("value", ""),), (("",),)),
)
LEAVES = {name for form in FORMS for row in form.rows for name in row.stored if "." not in name}
CLASSES = {
    r"Linear": "Dense",
    r"Conv\d?d?": "Conv",
    r"ConvTranspose\d?d?": "ConvTranspose",
    r"Embedding": "Embed",
    r"(Batch|Layer|Group|RMS)Norm": "norm",
}


def file_layers(
    shapes: Mapping[str, Shape], options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Layer]:
    """Group leaves by keys such as ``layers.0.weight`` into layers."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in shapes:
        *parts, name = key.split(".")
        if name in LEAVES - {""}:
            groups.setdefault(tuple(parts), {})[name] = key
        else:
            groups[*parts, name] = {"": key}
    join_parts(groups, list(PARTS.values()), "weight", ".")
    found = []
    for path, names in groups.items():
        kind = (options or {}).get(".".join(path), {}).get("class", "")
        label = next((form for name, form in CLASSES.items() if re.fullmatch(name, kind)), None)
        alias = (*path, "l0") if "weight_hh" in names else path
        sizes = {name: shapes[key] for name, key in names.items()}
        found.append(Layer(path, names, sizes, alias, is_transposed(path), label))
    return found


def key_of(path: tuple[str, ...], name: str) -> str:
    """Return the key of a leaf of a layer."""
    if path and path[-1] == "l0":
        path = path[:-1]
    return ".".join((*path, name) if name else path)


def prepared(source: Any, layers: Any = None) -> Stored:
    """Return the leaves of modules, or of a file whose ``layers`` are known, by their keys."""
    if isinstance(source, str | os.PathLike) and not os.fspath(source).endswith(files.SUFFIXES):
        arrays, options = equinox_files.read(os.fspath(source), layers)
    elif isinstance(source, str | os.PathLike | Mapping):
        arrays, notes = files.read(source)
        return Stored(arrays, notes)
    else:
        arrays, options = leaves_of(source)
    if not arrays:
        raise TypeError(
            "source must be an Equinox module, (module, state), or the path of a file: got "
            f"{type(source).__name__} without arrays."
        )
    return Stored(arrays, options_said(options), options)


template = prepared


def arranged(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """Return arrays by key, or in modules like those that were given."""
    arrays = {key: value for key, value in arrays.items() if not key.endswith(".momentum")}
    if like is None or isinstance(like, str | os.PathLike | Mapping):
        return arrays
    return updated(like, arrays)
