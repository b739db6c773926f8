"""Test Parquet: what columns may hold, folders of files, and what is refused."""

import decimal
import os
from pathlib import Path

import numpy as np
import pytest
from reading import opened, read, refused

from jaxnorm.data import Normalizer
from jaxnorm.data.sources import left_out, masks

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(columns, path="a.parquet", rows=3):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    parquet.write_table(pa.table(columns), path, row_group_size=rows)


def fitted(axes=0, path="a.parquet"):
    """Mean and count of each leaf, fitted with the masks of nulls."""
    whole = Normalizer(axes)
    for piece in opened(path, axes, size=1):
        batch = piece.read()
        whole.update(batch, where=masks(batch))
    found = {leaf: summary.moments for leaf, summary in whole.summaries.items()}
    return {
        leaf: (np.round(m.mean, 12).ravel().tolist(), m.count.ravel().tolist())
        for leaf, m in found.items()
    }


NUMBERS = [1, None, 4, 7]


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
        *(pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(7, 2), pa.decimal256(50, 3)),
        pa.dictionary(pa.int32(), pa.int64()),
    ],
    ids=str,
)
def test_numbers_with_and_without_nulls(kind):
    if isinstance(kind, pa.DictionaryType):
        nulls, whole = (
            pa.array(x, pa.int64()).dictionary_encode() for x in (NUMBERS, [1, 4, 7, 8])
        )
    elif pa.types.is_decimal(kind):
        exact = [None if x is None else decimal.Decimal(x) for x in NUMBERS]
        nulls, whole = pa.array(exact, kind), pa.array([*map(decimal.Decimal, "1478")], kind)
    else:
        nulls, whole = pa.array(NUMBERS, kind), pa.array([1, 4, 7, 8], kind)
    write({"nulls": nulls, "whole": whole})
    assert fitted() == {"nulls": ([4.0], [3.0]), "whole": ([5.0], [4.0])}


def test_decimals_are_fractions():
    write({"x": pa.array([decimal.Decimal("0.10"), decimal.Decimal("12345.67")])})
    assert read("a.parquet")["x"].tolist() == [0.1, 12345.67]


def test_booleans_are_numbers():
    write({"flag": [True, None, False, True], "list": [[True, False]] * 4})
    assert left_out("a.parquet", {"": 0}) == {}
    found = read("a.parquet")
    assert found["flag"].tolist() == [True, False, False, True]
    assert found["list"].shape == (4, 2)
    assert masks(opened("a.parquet", size=1)[0].read())["flag"].tolist() == [True, False, True]


@pytest.mark.parametrize("order", [None, [1, 0]])
def test_tensors_of_one_shape(order):
    x = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=order)
    flat = pa.FixedSizeListArray.from_arrays(x.ravel(), 6)
    write({"x": pa.ExtensionArray.from_storage(kind, flat)})
    expected = x if order is None else x.transpose(0, 2, 1)
    np.testing.assert_array_equal(read("a.parquet", "[n] h w")["x"], expected)
    assert fitted("[n h] w")["x"][0] == expected.mean((0, 1)).tolist()


@pytest.mark.parametrize("tensor", [False, True])
def test_lists_of_a_fixed_size_that_are_null_are_masked_or_refused_in_words(tensor):
    """pyarrow 25 writes them and does not read them, 26 does."""
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    flat = pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8]], pa.list_(pa.float32(), 4))
    write({"x": pa.ExtensionArray.from_storage(kind, flat) if tensor else flat})
    if pa.__version__ < "26":
        assert refused("a.parquet") == (
            "a.parquet must hold no null among lists of a fixed size, which pyarrow cannot read. "
            "Write lists of any size."
        )
    else:
        assert fitted() == {"x": ([3, 4, 5, 6], [2, 2, 2, 2])}


def test_nulls_in_lists_of_a_fixed_size_are_masked():
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    flat = pa.array([[1, 2, 3, None], [5, 6, 7, 8]], pa.list_(pa.float32(), 4))
    write({"x": pa.ExtensionArray.from_storage(kind, flat), "flat": flat})
    assert fitted() == dict.fromkeys(("x", "flat"), ([3, 4, 5, 8], [2, 2, 2, 1]))


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float64())], ids=str)
def test_nulls_in_lists_and_lists_that_are_null_are_masked(kind):
    write({"x": pa.array([None, [1, None], [3, 5], None, None, None, [8, 9]], kind)})
    assert fitted() == {"x": ([4, 7], [3, 2])}


def test_lists_of_lists_have_axes():
    x = np.arange(5 * 2 * 3.0).reshape(5, 2, 3)
    write({"x": [None, *x.tolist()]})
    assert fitted("[n h] w") == {"x": (x.mean((0, 1)).tolist(), [10] * 3)}


def test_lists_of_several_lengths_are_refused_in_words():
    said = (
        "must hold lists of one length in 'x': there are lengths {}. Pad them, "
        "or leave the column out."
    )
    write({"x": [[1.0, 2.0], [3.0], [4.0, 5.0]]})
    assert refused("a.parquet") == f"a.parquet {said.format('1, 2')}"
    write({"x": [[1.0, 2.0]] * 6 + [[1.0]] * 3})  # in another row group
    assert refused("a.parquet") == f"a.parquet {said.format('1, 2')}"
    write({"x": [[[1.0, 2.0]], [[3.0]]]})
    assert refused("a.parquet", "[n] h w") == f"a.parquet {said.format('1, 2')}"
    write({"x": [[], [3.0]]})
    assert refused("a.parquet") == f"a.parquet {said.format('0, 1')}"


def test_types_of_other_libraries_are_what_they_are_stored_as():
    """As columns of Hugging Face's datasets where it is not imported, or is."""

    class Array2D(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.list_(pa.list_(pa.float32())), "test.array2d")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type, serialized):
            return cls()

    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    pa.register_extension_type(Array2D())
    try:
        storage = pa.array([None, *x.tolist()], Array2D().storage_type)
        write({"x": pa.ExtensionArray.from_storage(Array2D(), storage)})
        assert fitted("[n h] w") == {"x": (x.mean((0, 1)).tolist(), [4] * 3)}
    finally:
        pa.unregister_extension_type("test.array2d")


OTHERS = {
    "text": (["a"] * 4, "string"),
    "texts": ([["a"]] * 4, "list<element: string>"),
    "date": (pa.array([1] * 4, pa.date32()), "date32[day]"),
    "time": (pa.array([1] * 4, pa.timestamp("us")), "timestamp[us]"),
    "span": (pa.array([1] * 4, pa.duration("us")), "duration[us]"),
    "bytes": ([b"a"] * 4, "binary"),
    "struct": ([{"k": 1}] * 4, "struct<k: int64>"),
    "none": (pa.nulls(4), "null"),
    "category": (
        pa.array(["a"] * 4).dictionary_encode(),
        "dictionary<values=string, indices=int32, ordered=0>",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_columns_that_are_no_numbers(name):
    column, kind = OTHERS[name]
    write({name: column, "x": [1.0, 2.0, 3.0, 4.0]})
    assert fitted() == {"x": ([2.5], [4])}
    assert left_out("a.parquet", {"": 0}) == {name: kind}
    assert refused("a.parquet", {name: 0}) == (
        f"a.parquet must hold numbers in {name!r}: it holds {kind}. Name what is fitted: "
        f"axes={{'x': 0}}, or --pattern 'x=[n]'."
    )
    write({name: column})
    assert refused("a.parquet") == f"a.parquet must hold numbers in {name!r}: it holds {kind}."


def test_names_of_columns_with_dots():
    write({"a.b": [1.0, 2.0], "a": [5, 7], "c.d": [[1.0], [3.0]]})
    assert fitted({"a.b": 0, "c.d": 0}) == {"a.b": ([1.5], [2]), "c.d": ([2], [2])}


class TestFolders:
    def test_of_files(self):
        for number in range(3):
            write({"x": [float(number)] * 4, "text": ["a"] * 4}, f"a/part-{number}.snappy.parquet")
        write({"x": [100.0]}, "a/_temporary/part-9.parquet")
        for other in ("a/_SUCCESS", "a/.part-0.parquet.crc"):
            open(other, "w").close()
        assert fitted(path="a") == {"x": ([1], [12])}
        assert len(opened("a", size=1)) == 6

    @pytest.mark.parametrize("path", ["a", "a.parquet", "memory://hive/a", "file://{}/a"])
    def test_by_key(self, path, folder):
        """The keys are columns, of numbers where they are numbers."""
        fsspec = pytest.importorskip("fsspec")
        local = path if "://" not in path else "a"
        for year, city in ((2024, "a"), (2027, "b"), (2027, "c")):
            write({"x": [1.0 * year] * 2}, f"{local}/year={year}/city={city}/x.parquet")
        if path.startswith("memory"):
            fsspec.filesystem("memory").put("a", "/hive/a", recursive=True)
        path = path.format(folder)
        mean = 2026
        assert fitted(path=path) == {"x": ([mean], [6]), "year": ([mean], [6])}
        assert left_out(path, {"": 0}) == {"city": "string"}

    def test_the_wider_type_holds(self):
        write({"x": pa.array([1], pa.int32()), "y": pa.array([2], pa.float32())}, "a/1.parquet")
        write({"x": pa.array([2**40], pa.int64()), "y": pa.array([0.1])}, "a/2.parquet")
        found = read("a", size=1)
        assert (found["x"].tolist(), found["y"].tolist()) == ([1, 2**40], [2, 0.1])

    def test_files_that_do_not_fit_are_named(self):
        write({"x": [1.0]}, "a/1.parquet")
        write({"x": [1.0], "y": [1.0]}, "a/2.parquet")
        said = refused("a")
        assert said.startswith("a must hold the same columns in all files: ")
        assert said.endswith("a/2.parquet and a/1.parquet differ in 'y'.")
        write({"x": ["text"]}, "a/2.parquet")
        assert refused("a").startswith("a must hold the same types in all files: ")

    def test_empty_files_count_for_nothing(self):
        write({"x": pa.array([], pa.float64())}, "a/1.parquet")
        write({"x": [1.0, 3.0]}, "a/2.parquet")
        assert fitted(path="a") == {"x": ([2], [2])}
        write({"x": pa.array([], pa.float64())}, "b.parquet")
        assert refused("b.parquet") == "the files must hold elements: b.parquet holds none."


def test_a_flipped_bit_is_found_where_pages_have_checksums(rng):
    table = pa.table({"x": rng.standard_normal(4000)})
    parquet.write_table(table, "a.parquet", write_page_checksum=True, compression="none")
    data = bytearray(Path("a.parquet").read_bytes())
    data[16_000] ^= 1
    Path("a.parquet").write_bytes(data)
    assert refused("a.parquet").startswith(
        "a.parquet cannot be read, it may be damaged or no .parquet file: OSError"
    )


def test_rows_must_be_reduced():
    write({"x": [[1.0, 2.0]] * 4})
    assert refused("a.parquet", "n [f]") == (
        "a.parquet: the rows of 'x' must be reduced, to be read in pieces. Write a pattern that "
        "begins with [n]."
    )


def test_pieces_are_as_large_as_their_numbers():
    """Not as large as what they are packed in."""
    write({"x": np.zeros(4000), "text": ["long"] * 4000}, rows=100)
    assert len(opened("a.parquet", size=8 * 1000)) == 4


def test_ragged_lists_among_other_columns_say_how_the_others_are_fitted():
    x = {"r": [[1.0], [1.0, 2.0]], "x": [1.0, 2.0], "s": ["a", "b"], "y": [[1.0, 2.0]] * 2}
    parquet.write_table(pa.table(x), "a.parquet")
    assert refused("a.parquet") == (
        "a.parquet must hold lists of one length in 'r': there are lengths 1, 2. Pad them, or "
        "leave the column out: --pattern 'x=[n]' --pattern 'y=[n] a'."
    )
    assert read("a.parquet", {"x": "[n]", "y": "[n] a"})["y"].shape == (2, 2)
