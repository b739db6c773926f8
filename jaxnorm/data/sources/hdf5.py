"""Reader of HDF5 files by h5py; groups that repeat, such as demonstrations, are joined."""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data.sources.addresses import local, opened_file
from jaxnorm.data.sources.chunked import Chunked, ChunkedReader
from jaxnorm.data.sources.readers import Cut, Leaf, leaf_of, nbytes

# Groups of these names are joined even if there is one only.
SEQUENCES = re.compile(r"(demo|episode|ep|traj|trajectory|rollout)[_-]?\d+", re.IGNORECASE)

# Flags of the last step of an episode, in files whose episodes are not in groups.
ENDS = ("terminals", "timeouts")


class Dataset(NamedTuple):
    """What is known of a dataset before it is read; ``chunks`` is None if it lies in one piece."""

    name: str
    leaf: Leaf
    chunks: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        return self.leaf.shape[0]


class Hdf5(ChunkedReader):
    """Reader of datasets, whose paths are the names of leaves.

    The datasets of groups that differ only in a number (``data/demo_0/obs/x``,
    ``data/demo_1/obs/x``) also make up one leaf, ``data/demo_*/obs/x``. They are joined along their
    first axis, in the order of the numbers.
    """

    arrays: dict[str, "Joined"]

    def __init__(self, path: str):
        import h5py

        found = local(path)
        self.file = h5py.File(opened_file(path) if found is None else found, "r")
        joined: dict[str, list[Dataset]] = {}
        groups: dict[str, set[str]] = {}
        for whole, dataset in _datasets(self.file["/"]):
            joined.setdefault(whole, []).append(dataset)
            if "*" in whole:
                stem = whole.partition("*")[0]
                groups.setdefault(stem, set()).add(_group(dataset.name, stem))
        self.groups = groups
        self.leaves = {}
        self.arrays = arrays = {}
        for name, parts in joined.items():
            among = groups.get(name.partition("*")[0], set())
            self.leaves[name] = _joined_leaf(parts, among) if "*" in name else parts[0].leaf
            arrays[name] = Joined(self.file, parts, self.leaves[name])
        for name in [name for name in joined if "*" in name]:
            for part in joined[name]:
                self.leaves[part.name] = part.leaf._replace(part_of=name)
                arrays[part.name] = Joined(self.file, [part], part.leaf)

    def starts(self, leaf: str, cut: Cut | None, after: int) -> np.ndarray | None:
        joined = self.arrays[leaf]
        lengths = [part.rows for part in joined.parts]
        starts = np.zeros(sum(lengths) + 1, bool)
        starts[np.cumsum(lengths)] = True
        if len(lengths) == 1:
            for name in ENDS:
                ends = self.arrays.get(name)
                # D4RL's files tell where episodes end
                if ends is not None and ends.leaf.shape == joined.leaf.shape[:1]:
                    starts[1:] |= ends.read(0, (0, lengths[0]))[0] != 0
        first, last = cut or (0, len(starts))
        return starts[:-1][first : last + after]

    def episodes(self, leaves: Collection[str]) -> int | None:
        stems = {leaf.partition("*")[0] for leaf in leaves if "*" in leaf}
        if len(stems) != 1 or not all("*" in leaf for leaf in leaves):
            return None
        (stem,) = stems
        name = f"{stem.rpartition('/')[2]}0"
        return len(self.groups[stem]) if SEQUENCES.fullmatch(name) else None


class Joined:
    """Datasets that are one leaf, joined along their first axis."""

    def __init__(self, file: Any, parts: list[Dataset], leaf: Leaf):
        self.file, self.parts, self.leaf = file, parts, leaf
        # a dataset without chunks can be cut between any rows
        chunks = parts[0].chunks or (1, *parts[0].leaf.shape[1:])
        self.chunk_size = 0 if leaf.unsupported else nbytes(chunks, leaf.dtype)
        # chunks of several datasets do not meet, so these are cut anywhere
        self.chunks = chunks if len(parts) == 1 else (1, *leaf.shape[1:])
        # the part that was read last, with its number: it may keep what it has unpacked
        self.opened: tuple[int, Chunked] | None = None

    def slab_size(self, axis: int) -> int:
        shape = self.leaf.shape
        return nbytes((*shape[:axis], self.chunks[axis], *shape[axis + 1 :]), self.leaf.dtype)

    def read(self, axis: int, cut: Cut) -> tuple[np.ndarray, None]:
        shape = list(self.leaf.shape)
        first, last = (min(row, shape[axis]) for row in cut)
        found = list(self._rows(*((0, shape[0]) if axis else (first, last))))
        if len(found) == 1 or len(self.parts) == 1:
            ((number, rows),) = found or [(0, (0, 0))]
            return self._part(number).raw(axis, cut if axis else rows), None
        shape[axis] = last - first
        result, start = np.empty(shape, self.leaf.dtype), 0
        for number, rows in found:
            stop = start + rows[1] - rows[0]
            result[start:stop] = self._part(number).raw(axis, cut if axis else rows)
            start = stop
        return result, None

    def _rows(self, first: int, last: int) -> Iterator[tuple[int, Cut]]:
        """Yield the number of each part with rows from first to last, and which of its rows."""
        start = 0
        for number, part in enumerate(self.parts):
            low, high = max(first, start), min(last, start + part.rows)
            if low < high:
                yield number, (low - start, high - start)
            start += part.rows

    def _part(self, number: int) -> Chunked:
        if self.opened is None or self.opened[0] != number:
            part = self.parts[number]
            chunks = part.chunks or (1, *part.leaf.shape[1:])
            self.opened = number, Chunked(self.file[part.name], chunks)
        return self.opened[1]


def _datasets(group: Any, prefix: str = "", whole: str = "", above: tuple = ()) -> Iterator:
    """Yield pairs: the name of a leaf, with * for a number, and a dataset of it."""
    import h5py

    names = sorted(group, key=_natural)
    stems = {} if "*" in whole else _stems(group, names)
    for name in names:
        # None for a link that leads nowhere
        member = group.get(name)
        called = f"{whole}{stems.get(name, name)}"
        if isinstance(member, h5py.Dataset):
            yield f"{whole}{name}", _dataset(f"{prefix}{name}", member)
        elif isinstance(member, h5py.Group) and member not in (*above, group):
            yield from _datasets(member, f"{prefix}{name}/", f"{called}/", (*above, group))


def _natural(name: str) -> list:
    """Return a key that sorts numbers in names by their value.

    >>> sorted(["demo_10", "demo_9"], key=_natural)
    ['demo_9', 'demo_10']
    """
    return [(int(word), "") if word.isdecimal() else (0, word) for word in re.split(r"(\d+)", name)]


def _stems(group: Any, names: list[str]) -> dict[str, str]:
    """Return the names of groups that repeat, with * for their last number."""
    import h5py

    stems = {
        name: re.sub(r"\d+(?=\D*$)", "*", name)
        for name in names
        if re.search(r"\d", name) and group.get(name, getclass=True) is h5py.Group
    }
    found = Counter(stems.values())
    return {
        name: stem for name, stem in stems.items() if found[stem] > 1 or SEQUENCES.fullmatch(name)
    }


def _dataset(name: str, member: Any) -> Dataset:
    return Dataset(name, _leaf(member), member.chunks)


def _leaf(member: Any) -> Leaf:
    import h5py

    if member.shape is None:
        return Leaf((), "nothing", is_number=False)
    try:
        dtype = member.dtype
    except (TypeError, ValueError, NotImplementedError):
        return Leaf(member.shape, "a type that NumPy lacks", is_number=False)
    if h5py.check_string_dtype(dtype) is not None:
        return Leaf(member.shape, "strings", is_number=False)
    if h5py.check_vlen_dtype(dtype) is not None:
        return Leaf(member.shape, "lists of several lengths", is_number=False)
    if dtype.hasobject:
        return Leaf(member.shape, "references", is_number=False)
    return leaf_of(member.shape, dtype)


def _group(name: str, stem: str) -> str:
    """Return the group that repeats, of a dataset's name.

    >>> _group("data/demo_12/obs/x", "data/demo_")
    'data/demo_12'
    """
    return name[: len(stem)] + name[len(stem) :].partition("/")[0]


def _joined_leaf(parts: list[Dataset], groups: set[str]) -> Leaf:
    """Return the leaf of the joined datasets, with the obstacle if they do not fit together."""
    first = parts[0]
    others = [part for part in parts if part.leaf.unsupported]
    if others:
        held = "one number in each group" if not others[0].leaf.shape else ""
        return others[0].leaf._replace(obstacle=held or others[0].leaf.obstacle)
    unlike = [part for part in parts if part.leaf.shape[1:] != first.leaf.shape[1:]]
    if unlike:
        shapes = f"{first.leaf.shape} in {first.name}, {unlike[0].leaf.shape} in {unlike[0].name}"
        return first.leaf._replace(obstacle=f"arrays of several shapes, {shapes}")
    if len(parts) < len(groups):
        have = {part.name for part in parts}
        lacking = min(
            (g for g in groups if not any(n.startswith(f"{g}/") for n in have)), key=_natural
        )
        said = f"arrays that {len(groups) - len(parts)} of {len(groups)} groups lack"
        return first.leaf._replace(obstacle=f"{said}, {lacking} first")
    dtype = np.result_type(*{part.leaf.dtype for part in parts})
    return Leaf((sum(part.rows for part in parts), *first.leaf.shape[1:]), str(dtype))
