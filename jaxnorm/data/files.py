"""Files of statistics, in safetensors or JSON by the suffix; they keep every bit."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.fitted import Fitted
from jaxnorm.data.host import sketch
from jaxnorm.data.host.sketch import Sketch
from jaxnorm.data.host.statistics import Moments, Summary

# The newest format, and the one of files that older versions understand.
FORMAT, FIRST = 2, 1
FIELDS = ("count", "mean", "var", "min", "max")
# Low part of the mean, which older files lack.
LOW = "low_mean"
# The parts of a sketch, quantiles that were given, and features that stay as they are.
SKETCH, GIVEN, MASK = "quantiles", "quantile", "mask"
SUFFIXES = (".safetensors", ".json")
# The longest header that safetensors reads.
MOST_HEADER = 10**8


class _ContentError(ValueError):
    """An error in the contents of a file, as a phrase."""


def write(path: str | os.PathLike, metadata: dict, arrays: dict[str, np.ndarray]) -> None:
    """Write a file in one step, so that a reader finds either the old or the new one whole."""
    writable(path)
    path = Path(path)
    metadata = {"format": FIRST} | metadata
    if known(path) == ".json":
        coded = {
            name: {
                "shape": list(array.shape),
                "values": [_coded(v) for v in array.ravel().tolist()],
            }
            | ({} if array.dtype == np.float64 else {"dtype": str(array.dtype)})
            for name, array in arrays.items()
        }
        content = {"jaxnorm": metadata, "arrays": coded}
        data = json.dumps(content, indent=1, allow_nan=False).encode()
    else:
        from safetensors.numpy import save

        data = save(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            {"jaxnorm": json.dumps(metadata)},
        )
    replace({path: data})


def replace(contents: Mapping[Path, bytes]) -> None:
    """Write files, each in one step: all are written whole before the first old one is replaced."""
    # in the folder of the file, since a rename to another file system is not one step
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in contents}
    try:
        for path, data in contents.items():
            with partial[path].open("wb") as file:
                file.write(data)
                file.flush()
                # a full disk shows here, before the old file is replaced
                os.fsync(file.fileno())
        for path in contents:
            partial[path].replace(path)
    except OSError as error:
        reason = f"{path} must be written: {error.strerror or error}"
        remedy = "Make room there, or name a file elsewhere. What was there before is as it was"
        raise OSError(error.errno, f"{reason}. {remedy}.") from error
    finally:
        for one in partial.values():
            with suppress(OSError):
                one.unlink(missing_ok=True)


@contextmanager
def parsed(path: str | os.PathLike) -> Iterator[None]:
    """Turn every error of parsing within this context into one ValueError that names the file."""
    if (given := Path(path)).is_dir() or (given.exists() and given.suffix not in SUFFIXES):
        raise ValueError(
            f"{path} must be statistics in a known format: it is none. To fit the statistics of "
            "data: jaxnorm fit."
        )
    known(given)
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        reason = (
            str(error) if isinstance(error, _ContentError) else f"{type(error).__name__}, {error}"
        )
        raise ValueError(
            f"{path} must be a Normalizer's file: {reason}. Fit it again, or name another one."
        ) from error


def read(path: str | os.PathLike) -> tuple[dict, dict[str, np.ndarray]]:
    """Read a file of :func:`write`; call it within :func:`parsed`."""
    path = Path(path)
    suffix, data = known(path), path.read_bytes()
    metadata, arrays = (_from_json if suffix == ".json" else _from_safetensors)(data)
    if metadata["format"] > FORMAT:
        raise _ContentError(f"it has format {metadata['format']}, and this version reads {FORMAT}")
    return metadata, arrays


def named_arrays(leaves: Mapping[str, Fitted]) -> dict[str, np.ndarray]:
    """Return the arrays of all leaves, named by the leaf's path and the field."""
    named: dict[str, np.ndarray] = {}
    for leaf, (summary, sampled, given, mask, _) in leaves.items():
        fields = vars(summary.moments) | {"min": summary.min, "max": summary.max}
        if sampled is not None:
            fields |= {f"{SKETCH}/{name}": array for name, array in sampled.arrays().items()}
        fields |= {f"{GIVEN}/{rank!r}": array for rank, array in given.items()}
        if mask is not None:
            fields[MASK] = mask.astype(np.float64)
        named |= {_named(leaf, field): array for field, array in fields.items()}
    return named


def fitted(arrays: dict[str, np.ndarray], leaf: str, unknown: Iterable[str] = ()) -> Fitted:
    """Return the statistics of a leaf from the arrays of a file."""
    summary = _summary(arrays, leaf)
    shape = summary.min.shape
    sampled = {
        name: arrays[full]
        for name in sketch.FIELDS
        if (full := _named(leaf, f"{SKETCH}/{name}")) in arrays
    }
    start = _named(leaf, f"{GIVEN}/")
    given = {float(name[len(start) :]): a for name, a in arrays.items() if name.startswith(start)}
    mask = arrays.get(_named(leaf, MASK))
    if shapes := {a.shape for a in (*given.values(), *([] if mask is None else [mask]))} - {shape}:
        raise _ContentError(
            f"the arrays of {leaf!r} have different shapes: {shape} and {shapes.pop()}"
        )
    return Fitted(
        summary,
        Sketch.of_arrays(shape, sampled) if sampled else None,
        given,
        None if mask is None else mask.astype(bool),
        frozenset(unknown),
    )


def _summary(arrays: dict[str, np.ndarray], leaf: str) -> Summary:
    if missing := [_named(leaf, field) for field in FIELDS if _named(leaf, field) not in arrays]:
        raise _ContentError(f"it does not hold {missing[0]!r}")
    found = [arrays[_named(leaf, field)] for field in FIELDS]
    count, mean, var, low, high = found
    low_mean = arrays.get(_named(leaf, LOW), np.zeros_like(mean))
    if shapes := {array.shape for array in (*found, low_mean)} - {mean.shape}:
        raise _ContentError(
            f"the arrays of {leaf!r} have different shapes: {mean.shape} and {shapes.pop()}"
        )
    return Summary(Moments(count, mean, var, low_mean), low, high)


def _named(leaf: str, field: str) -> str:
    return f"{leaf}/{field}" if leaf else field


def writable(path: str | os.PathLike) -> None:
    """Refuse a path that cannot be written to, before a long fit begins."""
    known(Path(path))
    placeable(path)


def make_folder(path: Path) -> None:
    """Make a folder where there is none; refuse a path where none can be made."""
    if not path.is_dir():
        if path.exists():
            raise NotADirectoryError(f"{path} must be a folder: it is a file. Name another one.")
        placeable(path)
        path.mkdir()


def placeable(path: str | os.PathLike) -> None:
    """Refuse a path where no file can be made."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} must lie in a folder that exists: {path.parent} is none. Make it first."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} must be a file: it is a folder. Name another one.")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"{path} must lie in a folder that may be written to: {path.parent} may not. Name "
            "another one."
        )


def check_local(path: str | os.PathLike) -> None:
    """Refuse an address, such as ``s3://bucket/stats.json``."""
    # Path makes one slash of two; a drive has one letter
    if address := re.match(r"([A-Za-z][\w+.-]+):/+", str(path)):
        raise ValueError(
            f"{address[1]}://{str(path)[address.end() :]} must be a local file: addresses are read "
            "as data, not as statistics. Keep the file here, and copy it."
        )


def is_own(path: Path) -> bool:
    """Return whether a file is one of :func:`write`, by its first bytes."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            # 8 bytes of length, then a header in JSON
            size = int.from_bytes(file.read(8), "little")
            return b'"jaxnorm":' in file.read(min(size, MOST_HEADER))
        return bool(re.match(rb'\s*\{\s*"jaxnorm"\s*:', file.read(40)))


def known(path: Path) -> str:
    """Return the suffix of a file, and refuse one that cannot be written or read."""
    check_local(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"the name of a Normalizer's file must end in {' or '.join(SUFFIXES)}: got "
            f"{str(path)!r}."
        )
    if path.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise ModuleNotFoundError(
            f"{path} needs safetensors, which is not installed: pip install 'jaxnorm[data]', or "
            "name a .json file.",
            name="safetensors",
        )
    return path.suffix


def _from_safetensors(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
    except SafetensorError:
        raise _ContentError("it is no safetensors file, or cut off") from None
    # `load` drops the metadata: 8 bytes of length, then a header in JSON
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if "jaxnorm" not in header.get("__metadata__", {}):
        held = f", {min(arrays)!r}" if arrays else ""
        raise _ContentError(f"it holds other arrays{held}")
    return json.loads(header["__metadata__"]["jaxnorm"]), arrays


def _from_json(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    try:
        read = json.loads(data)
    except ValueError:
        raise _ContentError("it is no JSON, or cut off") from None
    if not isinstance(read, dict) or not {"jaxnorm", "arrays"} <= set(read):
        raise _ContentError("it holds other JSON")
    # float also reads the strings "inf" and "nan" that _coded writes
    arrays = {
        name: np.array([float(v) for v in a["values"]], a.get("dtype", np.float64)).reshape(
            a["shape"]
        )
        for name, a in read["arrays"].items()
    }
    return read["jaxnorm"], arrays


def _coded(value: float) -> Any:
    """Return a number for JSON, which has no infinities and no NaN: these become strings."""
    return value if math.isfinite(value) else str(value)


def encode(tree: Any) -> Any:
    """Encode a tree of dicts, lists, tuples, strings, numbers and None for JSON.

    JSON has no tuples, so each container becomes a dict that names its kind.
    """
    if isinstance(tree, dict):
        return {"dict": {key: encode(value) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {"list" if isinstance(tree, list) else "tuple": [encode(value) for value in tree]}
    return tree


def decode(tree: Any) -> Any:
    """Decode a tree of :func:`encode`.

    >>> decode(encode({"a": [1, (2, None)]}))
    {'a': [1, (2, None)]}
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "dict":
        return {key: decode(item) for key, item in value.items()}
    return (list if kind == "list" else tuple)(map(decode, value))
