"""Read arrays by name: from mappings of arrays or tensors, and from files."""

import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxnorm.interop import stored, torch_archives
from jaxnorm.interop.alignment import natural

NESTED = ("state_dict", "model_state_dict", "model", "module")  # where a state dict is in another
# Whose files have other suffixes.
READERS = {".keras": "keras", ".h5": "keras", ".hdf5": "keras", ".eqx": "equinox"}
SUFFIXES = (".safetensors", ".safetensors.index.json", ".npz", ".pt", ".pth", ".bin", ".ckpt")


def read(source: Any) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the arrays of a mapping or of a file by name, and what was left out.

    Nothing is unpickled.

    Raises:
      TypeError: neither a mapping nor a path, or values that are no arrays.
      ValueError: a file of no known kind, or damaged.
      FileNotFoundError: no such file.
    """
    notes: list[str] = []
    if isinstance(source, str | os.PathLike):
        source = _from_file(Path(source))
    if not isinstance(source, Mapping):
        state = getattr(source, "state_dict", None)
        remedy = "Give source.state_dict()." if callable(state) else "Give a state dict."
        raise TypeError(
            f"source must be a mapping of arrays, or a path: got {type(source).__name__}. {remedy}"
        )
    for name in NESTED:
        inner = source.get(name)
        if isinstance(inner, Mapping) and inner and not _is_array(next(iter(inner.values()))):
            inner = None
        if isinstance(inner, Mapping) and inner and all(isinstance(key, str) for key in inner):
            others = [str(key) for key in source if key != name]
            left = f"; {', '.join(others[:5])} stay in the file" if others else ""
            notes.append(f"the state dict was in {name!r}{left}")
            source = inner
            break
    wrong = [name for name, value in source.items() if not _is_array(value)]
    if wrong or not source:
        got = f"{type(source[wrong[0]]).__name__} at {wrong[0]!r}" if wrong else "nothing"
        raise TypeError(f"source must map names to arrays: got {got}. Give the state dict alone.")
    return {str(name): as_numpy(value) for name, value in source.items()}, notes


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def as_numpy(value: Any) -> np.ndarray:
    """Return an array or a tensor as a NumPy array, bfloat16 included, without a copy."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == "bfloat16" or kind.startswith("float8"):
        import torch

        bits = tensor.contiguous().view(torch.int16 if kind == "bfloat16" else torch.uint8)
        return bits.numpy().view(getattr(ml_dtypes, kind))
    return tensor.numpy()


def _from_file(path: Path) -> Mapping[str, Any]:
    """Return the contents of a file by its suffix."""
    stored.check_file(path)
    name = path.name
    if name.endswith(".safetensors.index.json"):
        return _from_parts(path)
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    if path.suffix == ".npz":
        return _from_npz(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _from_torch(path)
    reader = READERS.get(path.suffix)
    remedy = f"Say framework={reader!r}" if reader else "Rename it, or pass its arrays as a dict"
    raise ValueError(f"a file of arrays must end with {', '.join(SUFFIXES)}: got {name}. {remedy}.")


def _from_safetensors(path: Path) -> dict[str, np.ndarray]:
    if find_spec("safetensors") is None:
        raise ModuleNotFoundError(
            f"{path} needs safetensors, which is not installed: pip install 'jaxnorm[interop]'.",
            name="safetensors",
        )
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
    except (SafetensorError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} must be a safetensors file: {error}. Download or save it again."
        ) from None
    # a safetensors file is not in the order of definition
    return {name: arrays[name] for name in sorted(arrays, key=lambda key: natural(key.split(".")))}


def _from_parts(path: Path) -> dict[str, np.ndarray]:
    """Read a model in several safetensors files, by the index that lists them."""
    try:
        files = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must be an index with a weight_map: {type(error).__name__}, {error}. Download "
            "it again."
        ) from None
    parts = {name: _from_file(path.with_name(name)) for name in sorted(set(files.values()))}
    lost = [name for name, file in files.items() if name not in parts[file]]
    if lost:
        raise ValueError(
            f"{path} must list what its files hold: {lost[0]!r} is not in {files[lost[0]]}. "
            "Download both again."
        )
    return {name: parts[file][name] for name, file in files.items()}


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        # NumPy takes any other file for a pickle, and says how to load it unsafely
        raise ValueError(
            f"{path} must be a file of np.savez: it is no whole zip archive. Download or save it "
            "again."
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # zipfile and zlib have errors of their own
        raise ValueError(f"{path} must be a file of np.savez: {error}. Save it again.") from None


def _from_torch(path: Path) -> Mapping[str, Any]:
    """Read a file of torch.save; what our reader does not know, PyTorch's reads without pickle."""
    try:
        return torch_archives.read(path)
    except ValueError:
        if find_spec("torch") is None:
            raise
        import torch

        with suppress(Exception):
            return torch.load(path, map_location="cpu", weights_only=True)
        # its own message says how to unpickle the file
        raise
