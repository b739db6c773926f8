"""Read the archives that torch.save writes, without PyTorch and without unpickling.

An archive is a zip file. ``data.pkl`` in it describes the tensors, and each storage is a file.
``pickle`` would run whatever that description names. Here its opcodes are only listed, and the
few that describe tensors in dicts are followed; any other is refused.
"""

import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# The dtypes of storages, by the names of their classes in PyTorch.
STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
    "ComplexFloatStorage": np.complex64,
    "ComplexDoubleStorage": np.complex128,
}

# How a file of an older PyTorch begins: a magic number, pickled.
OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class _RefusedError(ValueError):
    """An error in an archive, as a phrase."""


@dataclass(frozen=True)
class _Global:
    """The name of a class or function, which is never imported."""

    module: str
    name: str


def read(path: Path) -> Any:
    """Return what an archive holds, with tensors as NumPy arrays.

    Raises:
      ValueError: a file of the format before PyTorch 1.6, a damaged archive, or one that holds
        more than tensors, numbers and strings in dicts, lists and tuples.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            old = file.read(len(OLD)) == OLD
        found = (
            "it is older. Install PyTorch to read it, or save it again with a newer one."
            if old
            else "it is damaged, or no archive. Download or save it again."
        )
        raise ValueError(
            f"{path} must be a zip archive, as torch.save writes since PyTorch 1.6: {found}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return _Reader(archive).read()
    except _RefusedError as error:
        raise ValueError(
            f"{path} must hold tensors in dicts alone: {error}. Save the state dict, "
            "torch.save(model.state_dict(), path)."
        ) from None
    except (zipfile.BadZipFile, KeyError, IndexError, ValueError, TypeError, EOFError) as error:
        reason = f"{type(error).__name__}, {error}"
        raise ValueError(
            f"{path} must be a whole archive of torch.save: {reason}. Download or save it again."
        ) from None


class _Reader:
    """The storages of an archive, and the stack and memo of its description."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.archive = archive
        names = archive.namelist()
        described = [name for name in names if name.split("/")[1:] == ["data.pkl"]]
        if len(described) != 1:
            raise _RefusedError(f"it has {len(described)} files data.pkl instead of one")
        self.root = described[0].removesuffix("data.pkl")
        order = f"{self.root}byteorder"
        self.swapped = order in names and archive.read(order) != b"little"
        self.storages: dict[str, np.ndarray] = {}
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self.archive.read(f"{self.root}data.pkl")):
            if opcode.name == "STOP":
                return self.stack.pop()
            step = STEPS.get(opcode.name)
            if step is None:
                raise _RefusedError(f"it uses {opcode.name} of pickle")
            step(self, argument)
        raise _RefusedError("its description has no end")

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def storage(self, described: Any) -> np.ndarray:
        """Return the numbers of a storage by its persistent id."""
        match described:
            case ("storage", _Global("torch", name), str(key), str(), int(size)) if (
                name in STORAGES
            ):
                pass
            case _:
                raise _RefusedError(f"a storage is described as {_shown(described)}")
        if key not in self.storages:
            data = self.archive.read(f"{self.root}data/{key}")
            numbers = np.frombuffer(data, STORAGES[name])
            self.storages[key] = numbers.byteswap() if self.swapped else numbers
        if self.storages[key].size < size:
            raise _RefusedError(
                f"storage {key} must hold {size} numbers and holds {self.storages[key].size}"
            )
        return self.storages[key]

    def call(self) -> Any:
        arguments, function = self.stack.pop(), self.stack.pop()
        match (function, arguments):
            case (_Global("torch._utils", "_rebuild_tensor_v2"), (storage, at, size, stride, *_)):
                return _tensor(storage, at, size, stride)
            case (_Global("torch._utils", "_rebuild_parameter"), (np.ndarray() as tensor, *_)):
                return tensor
            case (_Global("collections", "OrderedDict"), ()):
                return {}
            case (_Global("torch", "Size"), (tuple() as size,)):
                return size
            case (_Global("torch", "device"), (str() as kind, *_)):
                return kind
        raise _RefusedError(f"it calls {_shown(function)}")


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> np.ndarray:
    """Return the part of a storage that a tensor is, as a view."""
    sizes = (*size, *stride, offset)
    if not isinstance(storage, np.ndarray) or not all(type(n) is int and n >= 0 for n in sizes):
        raise _RefusedError(f"a tensor has offset {offset}, size {size} and strides {stride}")
    if len(size) != len(stride):
        raise _RefusedError(f"a tensor of size {size} has strides {stride}")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= storage.size:
        raise _RefusedError(f"a tensor of size {size} ends after its storage")
    if not math.prod(size):
        return np.zeros(size, storage.dtype)
    steps = [n * storage.itemsize for n in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


def _shown(value: Any) -> str:
    return f"{value.module}.{value.name}" if isinstance(value, _Global) else repr(value)[:80]


def _push(make: Callable[[_Reader, Any], Any]) -> Callable[[_Reader, Any], None]:
    """Return the step of an opcode that puts one value on the stack."""
    return lambda reader, argument: reader.stack.append(make(reader, argument))


def _always(value: Any) -> Callable[[_Reader, Any], Any]:
    return lambda reader, argument: value


def _global(reader: _Reader, argument: str) -> _Global:
    return _Global(*argument.split(" ", 1))


def _stack_global(reader: _Reader, argument: None) -> _Global:
    name, module = reader.stack.pop(), reader.stack.pop()
    return _Global(module, name)


def _last(count: int) -> Callable[[_Reader, Any], tuple]:
    def make(reader: _Reader, argument: None) -> tuple:
        items = tuple(reader.stack[-count:])
        del reader.stack[-count:]
        return items

    return make


def _mark(reader: _Reader, argument: None) -> None:
    reader.marks.append(len(reader.stack))


def _set(reader: _Reader, items: list[Any]) -> None:
    target = reader.stack[-1]
    if type(target) is not dict:
        raise _RefusedError(f"it puts items into {type(target).__name__}")
    target |= zip(items[::2], items[1::2], strict=True)


def _append(reader: _Reader, items: list[Any]) -> None:
    if type(reader.stack[-1]) is not list:
        raise _RefusedError(f"it appends to {type(reader.stack[-1]).__name__}")
    reader.stack[-1].extend(items)


def _build(reader: _Reader, argument: None) -> None:
    """Drop the attributes of an OrderedDict: a state dict has its versions there."""
    reader.stack.pop()
    if type(reader.stack[-1]) is not dict:
        raise _RefusedError(f"it sets the state of {_shown(reader.stack[-1])}")


def _memorize(reader: _Reader, argument: int | None) -> None:
    reader.memo[len(reader.memo) if argument is None else argument] = reader.stack[-1]


def _steps() -> Iterator[tuple[str, Callable[[_Reader, Any], None]]]:
    ignore: Callable[[_Reader, Any], None] = lambda reader, argument: None
    yield from dict.fromkeys(("PROTO", "FRAME"), ignore).items()
    constant = _push(lambda reader, argument: argument)
    texts = ("BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING")
    for name in (*texts, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"):
        yield name, constant
    for name, value in (("NONE", None), ("NEWTRUE", True), ("NEWFALSE", False)):
        yield name, _push(_always(value))
    yield "EMPTY_TUPLE", _push(_always(()))
    yield "EMPTY_DICT", _push(lambda reader, argument: {})
    yield "EMPTY_LIST", _push(lambda reader, argument: [])
    yield "MARK", _mark
    yield "TUPLE", _push(lambda reader, argument: tuple(reader.since_mark()))
    for count in (1, 2, 3):
        yield f"TUPLE{count}", _push(_last(count))
    yield "GLOBAL", _push(_global)
    yield "STACK_GLOBAL", _push(_stack_global)
    yield "BINPERSID", _push(lambda reader, argument: reader.storage(reader.stack.pop()))
    yield "REDUCE", _push(lambda reader, argument: reader.call())
    yield "SETITEMS", lambda reader, argument: _set(reader, reader.since_mark())
    yield "SETITEM", lambda reader, argument: _set(reader, list(_last(2)(reader, None)))
    yield "APPENDS", lambda reader, argument: _append(reader, reader.since_mark())
    yield "APPEND", lambda reader, argument: _append(reader, [reader.stack.pop()])
    yield "BUILD", _build
    yield from dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _memorize).items()
    for name in ("BINGET", "LONG_BINGET"):
        yield name, _push(lambda reader, argument: reader.memo[argument])


STEPS = dict(_steps())
