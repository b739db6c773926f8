"""Test that files which cannot be read or fitted are refused.

Each error is one sentence, and names the file.
"""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from reading import X, cut, read, refused, write_zarr

from jaxnorm.data.sources import SourceError, left_out


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folder_of(path, *names):
    for name in names:
        Path(path, name).parent.mkdir(parents=True, exist_ok=True)
        Path(path, name).write_text("text")
    return path


def wrong(name, data=b"\x93NUMPY of another kind"):
    Path(name).write_bytes(data)
    return name


def saved(name, save, *args, **kwargs):
    save(name, *args, **kwargs)
    return name


PAIRS = np.zeros(3, [("a", "f4"), ("b", "i4")])
NONE = "must exist: there is no such file."
INTACT = {  # files that are whole, and the exact words
    ("none.npy", lambda: "none.npy"): f"none.npy {NONE}",
    ("none.parquet", lambda: "none.parquet"): f"none.parquet {NONE}",
    ("none.zarr", lambda: "none.zarr"): f"none.zarr {NONE}",
    ("none", lambda: "none"): f"none {NONE}",
    ("empty", lambda: wrong("a.npy", b"")): "a.npy must hold data: it is empty.",
    ("empty npz", lambda: wrong("a.npz", b"")): "a.npz must hold data: it is empty.",
    ("empty parquet", lambda: wrong("a.parquet", b"")): "a.parquet must hold data: it is empty.",
    ("structured", lambda: saved("a.npy", np.save, PAIRS)): (
        "a.npy must hold numbers: it holds [('a', '<f4'), ('b', '<i4')]."
    ),
    ("objects", lambda: saved("a.npy", np.save, np.array([{}, 1], object))): (
        "a.npy must hold numbers: it holds Python's objects."
    ),
    ("strings", lambda: saved("a.npy", np.save, np.array(["a"]))): (
        "a.npy must hold numbers: it holds <U1."
    ),
    ("one number", lambda: saved("a.npy", np.save, 3.0)): (
        "a.npy must hold numbers: it holds one number."
    ),
    ("dates", lambda: saved("a.npz", np.savez, t=np.zeros(3, "M8[s]"))): (
        "a.npz must hold numbers in 't': it holds datetime64[s]."
    ),
    ("no arrays", lambda: saved("a.npz", np.savez)): "a.npz must hold arrays: it holds none.",
    ("folder npy", lambda: folder_of("a.npy", "b")): "a.npy must be a file: it is a folder.",
    ("folder npz", lambda: folder_of("a.npz", "b")): "a.npz must be a file: it is a folder.",
    ("folder zarr", lambda: folder_of("a.zarr", "b")): (
        "a.zarr must be a Zarr: it holds no zarr.json, no .zgroup, no .zarray."
    ),
    ("file zarr", lambda: wrong("a.zarr")): (
        "a.zarr must be a folder, as Zarr writes it: it is a file."
    ),
    ("folder parquet", lambda: folder_of("a.parquet", "b", "_temporary/c.parquet")): (
        "a.parquet must hold .parquet files: there are none."
    ),
    ("folder", lambda: folder_of("a", "b.npy")): (
        "a is a folder without .parquet files and no Zarr store. For .npy or .npz write a/*.npz."
    ),
    ("text", lambda: wrong("a.txt")): (
        "a.txt must be one of .npy, .npz, .parquet, .pq, .zarr, .h5, .hdf5, .nc, .nc4, by its "
        "suffix."
    ),
    ("protocol", lambda: "nosuch://a.npy"): (
        "nosuch://a.npy must be an address that fsspec knows: Protocol not known: nosuch."
    ),
}


@pytest.mark.parametrize("case", INTACT, ids=lambda case: case[0])
def test_files_that_are_not_damaged_are_not_called_so(case):
    for module in ("pyarrow", "zarr", "fsspec"):
        pytest.importorskip(module)
    assert refused(case[1]()) == INTACT[case]


DAMAGED = {
    **{f"foreign {name}": lambda name=name: wrong(f"a.{name}") for name in ("npy", "npz", "pq")},
    **{
        f"{name} cut at {share}": lambda name=name, share=share: cut(name, share)
        for name in ("npy", "fortran.npy", "npz", "packed.npz", "parquet")
        for share in (0.0001, 0.01, 0.5, 0.99)
    },
    "chunk": lambda: (write_zarr("a.zarr", X), os.truncate("a.zarr/x/c/5/0", 0), "a.zarr")[-1],
    "chunk cut": lambda: (write_zarr("a.zarr", X), os.truncate("a.zarr/x/c/5/0", 9), "a.zarr")[-1],
    "metadata": lambda: (write_zarr("a.zarr", X), wrong("a.zarr/x/zarr.json"), "a.zarr")[-1],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(name):
    for module in ("pyarrow", "zarr"):
        pytest.importorskip(module)
    said = refused(path := DAMAGED[name]())
    said = said.replace("must hold data: it is empty.", "cannot be read, it may be damaged: ")
    said = said.replace(f" or no {Path(path).suffix} file", "")
    assert said.startswith(f"{path} cannot be read, it may be damaged: ")
    assert len(said) < 300


def entries(data):
    """Where the entries of an archive's directory begin."""
    return [at for at in range(len(data)) if data.startswith(b"PK\1\2", at)]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_each_flipped_bit_of_a_directory_is_refused_or_changes_nothing(save):
    """It may not drop an array: its name, and the lengths by which the next entry is found."""
    save("whole.npz", a=X[:, 0], b=X[:, 1])
    whole = Path("whole.npz").read_bytes()
    expected = read("whole.npz")
    first, second = entries(whole)
    flipped = [at * 8 + bit for at in range(first + 28, second) for bit in range(8)]
    said, dropped = [], []
    for flip in flipped:
        data = bytearray(whole)
        data[flip // 8] ^= 1 << flip % 8
        Path("a.npz").write_bytes(data)
        os.utime("a.npz", ns=(flip, flip))
        try:
            found = read("a.npz")
        except SourceError as error:
            said.append(str(error))
        else:
            if any(not np.array_equal(found.get(name), x) for name, x in expected.items()):
                dropped.append((flip // 8 - first, flip % 8))
    assert dropped == []
    assert [text for text in said if len(text) > 300 or "\\x" in text] == []


def test_archives_with_a_comment_and_other_members_are_read():
    np.savez("a.npz", a=X)
    with zipfile.ZipFile("a.npz", "a") as archive:
        archive.comment = b"a comment\0\0"
        archive.writestr("README.txt", "text")
    np.testing.assert_array_equal(read("a.npz")["a"], X)


def test_an_archive_that_has_lost_an_entry():
    np.savez("a.npz", a=X, b=X)
    data = bytearray(Path("a.npz").read_bytes())
    first, second = entries(data)
    data[first + 32] = len(data[second:-22])  # the length of its comment
    Path("a.npz").write_bytes(data)
    assert refused("a.npz") == (
        "a.npz cannot be read, it may be damaged or no .npz file: BadZipFile, its directory must "
        "list 2 members: it lists 1."
    )


def test_an_archive_whose_names_differ():
    np.savez("a.npz", a=X, b=X)
    data = bytearray(Path("a.npz").read_bytes())
    data[entries(data)[0] + 46 + len("a.np")] ^= 1
    Path("a.npz").write_bytes(data)
    assert refused("a.npz") == (
        "a.npz cannot be read, it may be damaged or no .npz file: BadZipFile, File name in "
        "directory 'a.npx' and header other bytes differ."
    )


@pytest.mark.parametrize("data", [b"some text", b"\x00\x01\x02\x03\xff\xfe\n\x00", b"a'b\"c'd\"e"])
def test_other_first_bytes_are_no_array(data):
    Path("a.npy").write_bytes(data)
    os.utime("a.npy", ns=(1, sum(data)))
    assert refused("a.npy") == (
        "a.npy cannot be read, it may be damaged or no .npy file: ValueError, the magic string is "
        "not correct."
    )


def test_text_is_no_archive():
    Path("text.npz").write_text("some text")
    assert refused("text.npz") == (
        "text.npz cannot be read, it may be damaged or no .npz file: BadZipFile, File is not a zip "
        "file."
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "a.npy"), "Permission denied"),
        (PermissionError("Access\nDenied."), "Access Denied"),  # as s3fs says it
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_file_that_may_not_be_read(error, said, monkeypatch):
    def denied(path):
        raise error

    np.save("a.npy", X)
    monkeypatch.setattr("jaxnorm.data.sources.numpy_files.opened_file", denied)
    assert refused("a.npy") == f"a.npy cannot be read: {said}."


def test_leaves_that_are_no_arrays_of_numbers_are_left_out_unless_they_are_named():
    arrays = {"x": X, "step": np.array(7), "name": np.array(["a"] * 4000), "flag": X[:, 0] > 5}
    np.savez("a.npz", **arrays)
    found = read("a.npz")
    assert set(found) == {"x", "flag"}
    assert found["flag"].sum() == 3998
    assert left_out("a.npz", {"": 0}) == {"step": "one number", "name": "<U1"}
    assert left_out("a.npz", {"x": 0}) == {}
    assert refused("a.npz", {"x": 0, "name": 0}) == (
        "a.npz must hold numbers in 'name': it holds <U1. Name what is fitted: axes={'x': 0}, or "
        "--pattern 'x=[n]'."
    )
    assert refused("a.npz", {"z": 0}) == (
        "a.npz must hold 'z': it holds 'x', 'step', 'name', 'flag'."
    )


def test_an_array_alone_has_no_name():
    np.save("a.npy", X)
    assert refused("a.npy", {"a": "[n] c"}) == (
        "a.npy holds one array, which has no name: give --pattern '[n] c' without 'a='."
    )
