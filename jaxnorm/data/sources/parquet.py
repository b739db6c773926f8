"""Reader of Parquet files and folders by pyarrow; pieces are whole row groups."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data.sources import columns
from jaxnorm.data.sources.addresses import SourceError, is_folder, local, names_in, remote
from jaxnorm.data.sources.readers import PARQUET_SUFFIXES, Batch, Cut, Leaf, Reader, nbytes

# The column that tells episodes apart, in LeRobot's data sets.
EPISODE = "episode_index"


class Group(NamedTuple):
    """A row group: the index of its file, its number in that file, and its rows."""

    file: int
    number: int
    rows: int


class Parquet(Reader):
    """Reader of columns of numbers, and of lists or tensors of one shape; nulls are masked.

    Folders by key (``year=2024``) give the keys as columns. All files of a folder must have the
    same columns. Where their types differ, the wider type is used.
    """

    cuts_rows_only = True

    def __init__(self, path: str):
        self.path = path
        dataset = _dataset(path)
        self.files = list(dataset.get_fragments())
        self.schema = self._common_schema(dataset.schema)
        self.groups = [
            Group(number, group.id, group.num_rows)
            for number, file in enumerate(self.files)
            # the footer of a file lists its row groups, so no data are read
            for group in file.row_groups
        ]
        rows = sum(group.rows for group in self.groups)
        self.leaves = {field.name: self._leaf(field, rows) for field in self.schema}
        self.last_starts: tuple[tuple[Cut, int], np.ndarray] | None = None

    def axis(self, leaf: str, axes: list[int], alone: bool) -> int:
        return axes[0]

    def cuts(self, along: Mapping[str, int], size: int, within: bool) -> list[Cut]:
        """Return cuts between row groups; a piece holds one row group or more."""
        if others := [leaf for leaf, axis in along.items() if axis]:
            said = f"{self.path}: the rows of {others[0]!r} must be reduced, to be read in pieces"
            raise SourceError(f"{said}. Write a pattern that begins with [n].")
        leaves = [self.leaves[leaf] for leaf in along]
        # by the size of the numbers in memory, which may be far more than the packed file
        row = sum(nbytes(leaf.shape[1:], leaf.dtype) for leaf in leaves)
        cuts, start, filled = [], 0, 0
        for number, group in enumerate(self.groups):
            if filled and filled + group.rows * row > size:
                cuts.append((start, number))
                start, filled = number, 0
            filled += group.rows * row
        return [*cuts, (start, len(self.groups))] if filled else cuts

    def rows(self, leaf: str, axis: int, cut: Cut) -> int:
        return sum(group.rows for group in self.groups[slice(*cut)])

    def starts(self, leaf: str, cut: Cut | None, after: int) -> np.ndarray | None:
        if EPISODE not in self.leaves or self.leaves[EPISODE].unsupported:
            return None
        cut = cut or (0, len(self.groups))
        # one read for all leaves of a piece
        if self.last_starts is None or self.last_starts[0] != (cut, after):
            episode = self.read({EPISODE: 0}, cut, after)[EPISODE]
            starts = np.concatenate([[True], episode[1:] != episode[:-1]])
            self.last_starts = (cut, after), starts
        return self.last_starts[1]

    def read(self, along: Mapping[str, int], cut: Cut, after: int = 0) -> Batch:
        import pyarrow as pa
        import pyarrow.dataset as ds

        fields = {name: ds.field(name) for name in along}
        parts = []
        for number, groups in groupby(self.groups[slice(*cut)], lambda group: group.file):
            file = self.files[number].subset(row_group_ids=[group.number for group in groups])
            parts.append(self._table(file, fields))
        parts += self._first_rows(cut[1], fields, after)
        table = pa.concat_tables(parts)
        found = {name: self._values(name, table.column(name)) for name in along}
        return Batch.of(found)

    def _table(self, file, fields: Mapping[str, Any]) -> Any:
        import pyarrow as pa

        try:
            return file.to_table(schema=self.schema, columns=fields)
        except pa.ArrowInvalid as error:
            # pyarrow has no type for this error; these are the words of pyarrow 25
            if "Expected all lists to be of size" not in str(error):
                raise
            said = f"{self.path} must hold no null among lists of a fixed size"
            raise SourceError(
                f"{said}, which pyarrow cannot read. Write lists of any size."
            ) from None

    def _first_rows(self, start: int, fields: Mapping[str, Any], rows: int) -> Iterator[Any]:
        """Yield tables of the first rows of the row groups from ``start`` on, if there are."""
        import pyarrow.dataset as ds

        for group in self.groups[start:]:
            if not rows:
                return
            if group.rows:
                file = self.files[group.file].subset(row_group_ids=[group.number])
                scanner = ds.Scanner.from_fragment(file, schema=self.schema, columns=fields)
                yield scanner.head(rows)
                rows -= min(rows, group.rows)

    def _common_schema(self, first) -> Any:
        """Return a schema of the columns of all files and the keys of folders.

        ``first`` is the data set's schema, which has the keys.
        """
        import pyarrow as pa

        names = [file.physical_schema.names for file in self.files]
        for file, others in zip(self.files, names, strict=True):
            if differing := sorted(set(names[0]) ^ set(others)):
                said = f"{file.path} and {self.files[0].path} differ in {differing[0]!r}"
                raise SourceError(f"{self.path} must hold the same columns in all files: {said}.")
        schemas = [file.physical_schema.remove_metadata() for file in self.files]
        keys = pa.schema([field for field in first if field.name not in names[0]])
        try:
            return pa.unify_schemas([*schemas, keys], promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            said = f"{self.path} must hold the same types in all files: {error}"
            raise SourceError(f"{said}. Name those that agree.") from None

    def _leaf(self, field, rows: int) -> Leaf:
        dtype, shape = columns.dtype_and_shape(field.type)
        if dtype is None:
            return Leaf((rows,), str(field.type), is_number=False)
        return Leaf((rows, *(self._first_shape(field) if shape is None else shape)), str(dtype))

    def _first_shape(self, field) -> tuple[int, ...]:
        """Return the shape of a column's first row that is not empty."""
        from pyarrow.parquet import ParquetFile

        for file in self.files:
            # in small batches, since mostly the first row tells
            opened = ParquetFile(file.open())
            for batch in opened.iter_batches(batch_size=16, columns=[field.name]):
                if (shape := columns.first_shape(batch.column(field.name))) is not None:
                    return shape
        return (0,) * columns.depth(field.type)

    def _values(self, name: str, column) -> tuple[np.ndarray, np.ndarray | None]:
        try:
            return columns.values(column.combine_chunks(), self.leaves[name].shape[1:])
        except columns.RaggedError as error:
            raise SourceError(self._ragged(name, error)) from None

    def _ragged(self, name: str, error: columns.RaggedError) -> str:
        must = f"{self.path} must hold lists of one length in {name!r}"
        return f"{must}: there are lengths {error}. Pad them, or {self._without(name)}."

    def _without(self, column: str) -> str:
        """Return the remedy for a column that cannot be fitted: how to fit the others."""
        shapes = {name: leaf.shape for name, leaf in self.leaves.items() if not leaf.unsupported}
        axes = {name: " ".join(["[n]", *"abcdefgh"[: len(shapes[name]) - 1]]) for name in shapes}
        others = [f"--pattern {f'{name}={axes[name]}'!r}" for name in axes if name != column]
        return f"leave the column out{': ' if others else ''}{' '.join(others)}"


def _dataset(path: str) -> Any:
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    found = local(path)
    system, base = (LocalFileSystem(use_mmap=True), str(found)) if found else remote(path)
    if is_folder(path):
        names = [name for name in names_in(path) if name.lower().endswith(PARQUET_SUFFIXES)]
        base = base.rstrip("/")
        # Spark and Hive write more than data: _temporary/, .part.crc
        skipped = [name for name in names if any(part[0] in "_." for part in name.split("/"))]
        files = [f"{base}/{name}" for name in names if name not in skipped]
        if not files:
            raise SourceError(f"{path} must hold .parquet files: there are none.")
    else:
        files = [base]
    # off by default; pages without checksums are read all the same
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    kind = ds.ParquetFileFormat(default_fragment_scan_options=checked)
    keys = ds.HivePartitioning.discover()
    options = {"partitioning": keys, "partition_base_dir": base}
    return ds.dataset(files, filesystem=system, format=kind, **options)
