"""Read files of ``equinox.tree_serialise_leaves``: arrays one after the other, without names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxnorm.interop.equinox_modules import Options, leaves_of
from jaxnorm.interop.stored import check_file

# The arrays of each class in the order of the file, with their numbers of axes, -1 for any; after
# "?" the option without which there is none.
VARIABLES = {
    "Linear": "weight:2 bias:1?use_bias",
    r"Conv(Transpose)?1d": "weight:3 bias:2?use_bias",
    r"Conv(Transpose)?2d": "weight:4 bias:3?use_bias",
    r"Conv(Transpose)?3d": "weight:5 bias:4?use_bias",
    "Embedding": "weight:2",
    "LayerNorm|RMSNorm": "weight:-1?use_weight bias:-1?use_bias",
    "GroupNorm|BatchNorm": "weight:1?channelwise_affine bias:1?channelwise_affine",
    "GRUCell": "weight_ih:2 weight_hh:2 bias:1?use_bias bias_n:1?use_bias",
    "LSTMCell": "weight_ih:2 weight_hh:2 bias:1?use_bias",
}


def read(name: str, layers: Any) -> tuple[dict[str, np.ndarray], Options]:
    """Return the arrays of a file by key, and options by path.

    Args:
      name: the path of the file.
      layers: modules as they were saved, or their classes by name: ``{"conv": "Conv2d", "norm":
        ("BatchNorm", {"mode": "batch", "momentum": 0.99})}``.

    Raises:
      FileNotFoundError: no such file.
      IsADirectoryError: a folder.
      TypeError: layers that are neither modules nor classes.
      ValueError: files of other things, or layers that are not those of the file.
    """
    path = Path(name)
    check_file(path)
    arrays = _arrays(path)
    if layers is None:
        raise ValueError(
            f"{path} has {len(arrays)} arrays without names: got no layers. Pass layers=, the "
            "modules as they were saved, or a dict such as {'conv': 'Conv2d', 'norm': "
            "('LayerNorm', {'use_bias': False})} in the order of the file."
        )
    if isinstance(layers, Mapping) and all(map(_is_class, layers.values())):
        return _by_classes(path, arrays, layers)
    return _in_modules(path, arrays, layers)


def _arrays(path: Path) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    with path.open("rb") as file:
        while file.peek(1):
            try:
                array = np.load(file, allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                raise ValueError(
                    f"{path} must be a file of equinox.tree_serialise_leaves: {error}, after "
                    f"{len(found)} arrays. Save it again."
                ) from None
            if not isinstance(array, np.ndarray):
                raise ValueError(
                    f"{path} must be a file of equinox.tree_serialise_leaves: got a zip archive. "
                    "Name another one."
                )
            # NumPy has no name for bfloat16
            found.append(array.view(ml_dtypes.bfloat16) if array.dtype.str == "|V2" else array)
    return found


def _is_class(value: Any) -> bool:
    if isinstance(value, tuple) and len(value) == 2:
        return isinstance(value[0], str) and isinstance(value[1], Mapping)
    return isinstance(value, str)


def _in_modules(
    path: Path, arrays: Sequence[np.ndarray], modules: Any
) -> tuple[dict[str, np.ndarray], Options]:
    """Put arrays into modules as they were saved."""
    leaves, structure = jax.tree_util.tree_flatten(modules)
    kept = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") or _is_number(leaf)]
    if not kept:
        raise TypeError(
            "layers must be the modules of the file, or a dict of classes: got "
            f"{type(modules).__name__}."
        )
    if len(kept) != len(arrays):
        raise ValueError(
            f"layers must be the modules of {path}: got {len(kept)} arrays and numbers for "
            f"{len(arrays)} in the file. Pass what was saved, (module, state) if both were."
        )
    for number, (i, array) in enumerate(zip(kept, arrays, strict=True)):
        if np.shape(leaves[i]) != array.shape:
            raise ValueError(
                f"layers must be the modules of {path}: got shape {np.shape(leaves[i])} for array "
                f"{number} of the file, {array.shape}. Pass what was saved."
            )
        leaves[i] = array
    return leaves_of(jax.tree_util.tree_unflatten(structure, leaves))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex | np.generic)


class _Reader:
    """Take the arrays of a file one after the other."""

    def __init__(self, path: Path, arrays: Sequence[np.ndarray]) -> None:
        self.path, self.rest, self.number = path, list(arrays), -1
        self.skipped = np.array(False)

    def take(self, name: str, axes: int | None, kind: str = "") -> np.ndarray:
        """Return the next array; numbers such as rates of dropout are passed over."""
        while (
            self.rest and self.rest[0].ndim == 0 and (not kind or self.rest[0].dtype.kind != kind)
        ):
            self.skipped = self.rest.pop(0)
            self.number += 1
        shape = self.rest[0].shape if self.rest else None
        if shape is None or (axes is not None and len(shape) != axes):
            got = "the end" if shape is None else f"shape {shape}"
            raise ValueError(
                f"layers must be those of {self.path} in their order: {name} needs "
                f"{'an array' if axes is None else f'{axes} axes'}, got {got} at array "
                f"{self.number + 1}. Change layers, or pass the modules as they were saved."
            )
        self.number += 1
        return self.rest.pop(0)


def _by_classes(
    path: Path, arrays: Sequence[np.ndarray], layers: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], Options]:
    """Name arrays by the classes of their layers."""
    reader, found, options = _Reader(path, arrays), {}, {}
    for layer, entry in layers.items():
        kind, given = entry if isinstance(entry, tuple) else (entry, {})
        names = {"eps": "epsilon"}
        options[layer] = {names.get(name, name): value for name, value in given.items()}
        options[layer]["class"] = kind
        for name, axes in _variables(kind, given):
            found[f"{layer}.{name}"] = reader.take(f"{layer}.{name}", axes)
    for layer, given in options.items():
        if given["class"] == "BatchNorm":
            found |= {f"{layer}.{name}": a for name, a in _statistics(reader, layer, given)}
    left = [array.shape for array in reader.rest if array.ndim]
    if left:
        raise ValueError(
            f"layers must be those of {path}: got none for {len(left)} more arrays, the first of "
            f"shape {left[0]}. Add layers, or pass the modules as they were saved."
        )
    return found, options


def _variables(kind: str, given: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    for pattern, entries in VARIABLES.items():
        if re.fullmatch(pattern, kind):
            for name, _, needs in (entry.partition("?") for entry in entries.split()):
                if given.get(needs, True):
                    array, _, axes = name.partition(":")
                    yield array, None if axes == "-1" else int(axes)
            return
    raise ValueError(
        f"layers must be of classes that are known, {', '.join(VARIABLES)}: got {kind!r}. Pass the "
        "modules as they were saved."
    )


def _statistics(
    reader: _Reader, layer: str, given: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the running statistics of a batch norm, which are behind all layers."""
    mode = given.get("mode")
    if mode not in ("batch", "ema"):
        raise ValueError(
            f"layers must say the mode of batch norm {layer!r}, 'batch' or 'ema': got {mode!r}."
        )
    if mode == "batch":
        yield "counter", reader.take(f"the counter of {layer}", 0, "i")
        yield "hidden_mean", reader.take(f"the mean of {layer}", 1)
        yield "hidden_var", reader.take(f"the variance of {layer}", 1)
        yield "momentum", np.asarray(float(given.get("momentum", 0.99)))
    else:
        mean = reader.take(f"the mean of {layer}", 1)
        first = reader.skipped
        yield from (("mean", mean), ("var", reader.take(f"the variance of {layer}", 1)))
        yield "first_time", first
