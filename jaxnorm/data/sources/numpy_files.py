"""Readers of .npy and .npz: uncompressed local arrays are memory-mapped, others are streamed."""

import math
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxnorm.data.sources.addresses import SourceError, local, opened_file
from jaxnorm.data.sources.readers import Batch, Cut, Leaf, Reader, cuts_of, leaf_of, part, rows_of

# Bytes that are skipped or added to a checksum at a time.
BLOCK = 1 << 20
# Bytes of a ZIP archive's end record without its comment, and the most that a comment can have.
END, COMMENT = 22, 0xFFFF


class Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    def is_contiguous(self, axis: int) -> bool:
        """Return whether a part along the axis is one stretch of bytes."""
        order = self.shape[::-1] if self.fortran else self.shape
        before = len(self.shape) - 1 - axis if self.fortran else axis
        return math.prod(order[:before]) <= 1

    def row(self, axis: int) -> int:
        """Return the bytes of one index along the axis."""
        others = self.shape[:axis] + self.shape[axis + 1 :]
        return math.prod(others) * self.dtype.itemsize


def read_header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    read = np.lib.format
    header = read.read_array_header_1_0 if version == (1, 0) else read.read_array_header_2_0
    return Header(*header(file))


class Arrays(Reader):
    """Reader of the arrays in a .npy or .npz file."""

    def __init__(self, headers: dict[str, Header], members: Mapping[str, "Mapped | Stream"]):
        self.headers, self.members = headers, members
        self.leaves: dict[str, Leaf] = {
            name: leaf_of(header.shape, header.dtype)
            # arrays of objects as well: they have no member, but messages name them
            for name, header in headers.items()
        }

    def axis(self, leaf: str, axes: list[int], alone: bool) -> int:
        # along the slowest axis in memory a part is one stretch of bytes
        return axes[-1] if alone and self.headers[leaf].fortran else axes[0]

    def cuts(self, along: Mapping[str, int], size: int, within: bool) -> list[Cut]:
        return cuts_of(*rows_of(self.leaves, along, size))

    def read(self, along: Mapping[str, int], cut: Cut, after: int = 0) -> Batch:
        cut = cut[0], cut[1] + after
        read = lambda leaf, axis: self.members[leaf].read(axis, cut, after)
        return Batch({leaf: read(leaf, axis) for leaf, axis in along.items()})


class Mapped:
    """An array in a local file, uncompressed, so that it can be memory-mapped."""

    def __init__(self, file: np.ndarray, start: int, header: Header, check=None):
        shape, fortran, dtype = self.header = header
        # `check` is a Checksum, or None for a file without one
        self.start, self.check = start, check
        if len(file) < (end := start + math.prod(shape) * dtype.itemsize):
            raise ValueError(f"it must be {end} bytes long: it is {len(file)}")
        self.array = np.ndarray(shape, dtype, file, start, order="F" if fortran else "C")

    def read(self, axis: int, cut: Cut, after: int) -> np.ndarray:
        """Return a part, whose last rows ``after`` the cut the next part has as well."""
        if self.check is not None and cut[0] < (length := self.array.shape[axis]):
            if self.header.is_contiguous(axis):
                row = self.header.row(axis)
                self.check.advance(self.start + cut[0] * row, self.start + cut[1] * row)
            if cut[1] >= length:
                self.check.finish()
        return part(self.array, axis, cut)


class Checksum:
    """The CRC-32 of a stored member of an archive, computed while its parts are read in order.

    The reader of the last part sums up the bytes that it has not read itself. In one pass through
    the file each byte comes from the disk once, and the sum takes 0.3 s for each GiB. If an engine
    gives the last part to another worker, that worker reads the file a second time.
    """

    def __init__(self, path: str, file: np.ndarray, start: int, member: zipfile.ZipInfo):
        self.path, self.bytes, self.member = path, file, member
        self.position, self.end, self.sum = start, start + member.file_size, 0

    def advance(self, first: int, last: int) -> None:
        """Add the bytes of a part, if all bytes before it (but for the header) were added."""
        if first - self.position < BLOCK:
            self._to(min(last, self.end))

    def finish(self) -> None:
        self._to(self.end)
        if self.sum != self.member.CRC:
            name = self.member.filename.removesuffix(".npy")
            said = f"{self.path} must hold what was written: the checksum of {name!r} is another"
            raise SourceError(f"{said}. Copy it again.")

    def _to(self, last: int) -> None:
        while self.position < last:
            stop = min(self.position + BLOCK, last)
            self.sum = zlib.crc32(self.bytes[self.position : stop].data, self.sum)
            self.position = stop


class Stream:
    """An array that is unpacked or fetched part by part; going back restarts from its beginning.

    The last rows of a part are kept if the next part begins with them. If a part is not one stretch
    of bytes, the whole array is copied to a temporary file once.
    """

    def __init__(self, header: Header, open_data: Callable[[], Any]):
        # `open_data` opens the file, and returns it at the end of its header
        self.header, self.open_data = header, open_data
        self.position = 0
        # the index of the first row that is kept, and the bytes of all of them
        self.kept: tuple[int, bytes] = (0, b"")
        self.file: Any = None
        self.copy: np.ndarray | None = None

    def read(self, axis: int, cut: Cut, after: int) -> np.ndarray:
        shape, fortran, dtype = self.header
        first, last = (min(row, shape[axis]) for row in cut)
        if not self.header.is_contiguous(axis):
            return part(self._copied(), axis, cut)
        found = (*shape[:axis], last - first, *shape[axis + 1 :])
        # a leaf that is shorter than others of its file has no more rows
        if first == last:
            return np.empty(found, dtype)
        # rows without elements have a size, too
        row = self.header.row(axis) or 1
        start, kept = self.kept
        data = kept[(first - start) * row : (last - start) * row] if start <= first else b""
        if (held := first + len(data) // row) < last:
            data += self._read(held, last, self.header.row(axis))
        begin = max(first, last - after)
        self.kept = begin, data[(begin - first) * row :]
        if self.position == shape[axis]:
            self.close()
        return np.frombuffer(data, dtype).reshape(found, order="F" if fortran else "C")

    def _read(self, first: int, last: int, row: int) -> bytes:
        if self.file is None or self.position > first:
            self.close()
            self.file = self.open_data()
        try:
            _skip(self.file, (first - self.position) * row)
            data = self.file.read((last - first) * row)
        except BaseException:
            # after an error the position in the stream is unknown
            self.close()
            raise
        self.position = last
        return data

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.position, self.file = 0, None

    def _copied(self) -> np.ndarray:
        if self.copy is None:
            shape, fortran, dtype = self.header
            with self.open_data() as file, tempfile.TemporaryFile() as target:
                shutil.copyfileobj(file, target, BLOCK)
                self.copy = np.memmap(target, dtype, "r", 0, shape, "F" if fortran else "C")
        return self.copy


def _skip(file, size: int) -> None:
    """Skip bytes; in an archive read them, since zipfile's checksum needs all bytes."""
    if not isinstance(file, zipfile.ZipExtFile):
        file.seek(size, 1)
        return
    while size > 0:
        size -= len(file.read(min(size, BLOCK))) or size


def npy(path: str) -> Arrays:
    """Open a .npy file: memory-mapped if it is local, else fetched in parts."""
    with opened_file(path) as file:
        header, start = read_header(file), file.tell()
    if header.dtype.hasobject:
        return Arrays({"": header}, {})
    found = local(path)
    if found is not None:
        return Arrays({"": header}, {"": Mapped(_mapped(found), start, header)})
    return Arrays({"": header}, {"": Stream(header, partial(_open_at, path, start))})


def npz(path: str) -> Arrays:
    """Open a .npz archive: memory-map stored local members, and stream all others."""
    found = local(path)
    file = None if found is None else _mapped(found)
    headers: dict[str, Header] = {}
    members: dict[str, Mapped | Stream] = {}
    with zipfile.ZipFile(found or opened_file(path)) as archive:
        _check_number(archive)
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            # opening a member compares its names in the directory and in its header
            with archive.open(member) as array:
                # an archive may also hold members that are no arrays
                if name == member.filename:
                    continue
                headers[name] = header = read_header(array)
                offset = array.tell()
            if header.dtype.hasobject:
                continue
            if file is None or member.compress_type != zipfile.ZIP_STORED:
                members[name] = Stream(header, partial(_open_member, path, member))
            else:
                start = _data_start(file, member)
                # a memory map bypasses zipfile, which would compare the checksum
                check = Checksum(path, file, start, member)
                members[name] = Mapped(file, start + offset, header, check)
    return Arrays(headers, members)


def _check_number(archive: zipfile.ZipFile) -> None:
    """Refuse an archive whose directory lists fewer members than its end record counts.

    One flipped bit in the length of a comment swallows the next entry, and zipfile says nothing.
    """
    file: Any = archive.fp
    file.seek(-min(file.seek(0, 2), END + COMMENT), 2)
    tail = file.read()
    last = tail[-END:].startswith(b"PK\5\6") and tail.endswith(b"\0\0")
    # zipfile looks for the end record in the same two places
    end = len(tail) - END if last else tail.rfind(b"PK\5\6")
    (number,) = struct.unpack_from("<H", tail, end + 10)
    found = len(archive.infolist())
    # the number has 16 bits; ZIP64 keeps a larger one elsewhere
    if number != min(found, 0xFFFF):
        raise zipfile.BadZipFile(f"its directory must list {number} members: it lists {found}")


def _open_at(path: str, start: int) -> Any:
    file = opened_file(path)
    file.seek(start)
    return file


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, "r")


def _open_member(path: str, member: zipfile.ZipInfo) -> Any:
    archive = zipfile.ZipFile(local(path) or opened_file(path))
    try:
        file = archive.open(member.filename)
        read_header(file)
    except Exception:
        archive.close()
        raise
    return file


def _data_start(file: np.ndarray, member: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin: after its header, name and extra field."""
    # a header has 30 bytes, of which the last 4 are the lengths of name and extra field
    start = member.header_offset + 30
    return start + sum(file[start - 4 : start].view("<u2").tolist())
