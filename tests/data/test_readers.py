"""Test the files that ``jaxnorm fit`` reads: how they are identified, read and refused."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from reading import WRITE, X, opened, read, refused

from jaxnorm.data.sources import SourceError, fingerprint
from jaxnorm.data.sources.opening import reader


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_json(path):
    return json.loads(json.dumps(fingerprint(path)))


class TestFingerprint:
    def test_a_file_of_the_same_size_is_another(self):
        np.save("a.npy", np.zeros(5))
        before, moved = in_json("a.npy"), os.stat("a.npy").st_mtime_ns + 1
        assert in_json("a.npy") == before == in_json(f"file://{os.getcwd()}/a.npy")
        np.save("a.npy", np.ones(5))
        os.utime("a.npy", ns=(moved, moved))
        assert in_json("a.npy") == [before[0], before[1] + 1]

    @pytest.mark.parametrize("changed", ["zarr.json", "c/0", "inner/c/0/1"])
    def test_any_file_of_a_folder_counts(self, changed):
        for name in ("zarr.json", "c/0", "inner/c/0/1", "inner/zarr.json"):
            os.makedirs(os.path.dirname(f"a.zarr/{name}"), exist_ok=True)
            with open(f"a.zarr/{name}", "w") as file:
                file.write("x")
            os.utime(f"a.zarr/{name}", ns=(10**18, 10**18))
        before = in_json("a.zarr")
        assert before[:2] == [4, 10**18]
        os.utime(f"a.zarr/{changed}", ns=(1, 1))  # an older one put in its place
        assert in_json("a.zarr") != before

    def test_files_elsewhere(self):
        fsspec = pytest.importorskip("fsspec")
        system = fsspec.filesystem("memory")
        for name in ("a.npy", "a.zarr/zarr.json", "a.zarr/c/0"):
            system.pipe(f"/fingerprint/{name}", b"x")
        for name, changed in (("a.npy", "a.npy"), ("a.zarr", "a.zarr/c/0")):
            before = in_json(f"memory://fingerprint/{name}")
            assert in_json(f"memory://fingerprint/{name}") == before
            system.pipe(f"/fingerprint/{changed}", b"y")
            assert in_json(f"memory://fingerprint/{name}") != before

    @pytest.mark.parametrize(
        "path", ["none.npy", "none.zarr", "file:///none.npy", "memory://none.npy"]
    )
    def test_a_missing_file_is_named(self, path):
        pytest.importorskip("fsspec")
        with pytest.raises(SourceError, match=f"^{path} must exist: there is no such file.$"):
            fingerprint(path)


@pytest.mark.parametrize("suffix", WRITE)
def test_threads_read_the_pieces_of_a_file_in_any_order(suffix, rng):
    WRITE[suffix](f"a.{suffix}", X)
    found = opened(f"a.{suffix}")
    assert len(found) > 45
    order = rng.permutation(len(found))
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            batches = list(pool.map(lambda index: found[index].read(), order))
        parts = [batches[index] for index in np.argsort(order)]
        whole = np.concatenate([part["x"] if isinstance(part, dict) else part for part in parts])
        np.testing.assert_array_equal(whole, X)


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("after", [1, 5, 150, 10**6])
def test_parts_with_rows_after_them(suffix, after):
    WRITE[suffix](f"a.{suffix}", X[:400])
    start = 0
    for piece in opened(f"a.{suffix}", "[n] f"):
        read = reader(f"a.{suffix}").read(dict(piece.along), piece.cut, after)
        rows = len(next(iter(piece.read().values())) if "x" in read else piece.read())
        np.testing.assert_array_equal(*read.values(), X[start : min(start + rows + after, 400)])
        start += rows
    assert start == 400


@pytest.mark.parametrize("suffix", WRITE)
def test_pieces_are_small(suffix):
    WRITE[suffix](f"a.{suffix}", X)
    for piece in opened(f"a.{suffix}"):
        batch = piece.read()
        assert (batch["x"] if isinstance(batch, dict) else batch).nbytes <= 1000


@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.parametrize("suffix", WRITE)
def test_addresses(suffix, scheme, folder):
    fsspec = pytest.importorskip("fsspec")
    WRITE[suffix](f"a.{suffix}", X)
    address = f"file://{folder}/a.{suffix}"
    if scheme == "memory":
        address = f"memory://addresses/a.{suffix}"
        fsspec.filesystem("memory").put(f"a.{suffix}", f"/addresses/a.{suffix}", recursive=True)
    found = read(address)
    np.testing.assert_array_equal(found["x"] if isinstance(found, dict) else found, X)
    flipped = read(address, "n [f]" if suffix != "parquet" else 0, along=int(suffix != "parquet"))
    np.testing.assert_array_equal(flipped["x"] if isinstance(flipped, dict) else flipped, X)


def test_addresses_with_a_pattern():
    system = pytest.importorskip("fsspec").filesystem("memory")
    for name, start in (("b", 2000), ("a", 0)):
        np.save("part.npy", X[start : start + 2000])
        system.put("part.npy", f"/patterns/{name}.npy")
    np.testing.assert_array_equal(read("memory://patterns/*.npy"), X)
    before = in_json("memory://patterns/*.npy")
    assert in_json("memory://patterns/*.npy") == before
    system.put("part.npy", "/patterns/a.npy")
    assert in_json("memory://patterns/*.npy") != before
    assert refused("memory://patterns/*.npz") == (
        "memory://patterns/*.npz must name files: there are none."
    )


def test_an_address_that_was_written_again_is_read_again():
    system = pytest.importorskip("fsspec").filesystem("memory")
    for x in (X, X + 1):
        np.save("a.npy", x)
        system.put("a.npy", "/again/a.npy")
        np.testing.assert_array_equal(read("memory://again/a.npy"), x)


class TestChecksums:
    """A flipped bit in an archive, wherever it is: what is damaged is refused by its name."""

    def flipped(self, path, at):
        data = bytearray(Path(path).read_bytes())
        data[at] ^= 1
        Path(path).write_bytes(data)

    @pytest.mark.parametrize("at", [150, 20_000, 47_850])  # of some 48,000 bytes
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_of_stored_members(self, at, order):
        np.savez("a.npz", x=np.asarray(X, order=order), y=np.zeros(3))
        np.testing.assert_array_equal(read("a.npz", {"x": 0})["x"], X)
        self.flipped("a.npz", 300 + at)
        said = "a.npz must hold what was written: the checksum of 'x' is another. Copy it again."
        assert refused("a.npz", {"x": 0}) == said
        assert read("a.npz", {"y": 0})["y"].tolist() == [0, 0, 0]  # the other members are whole

    @pytest.mark.parametrize("first", [0, 20, 47])
    def test_whoever_reads_the_last_piece_finds_it(self, first):
        """Where a fit was resumed, or other workers read the rest."""
        np.savez("a.npz", x=X)
        self.flipped("a.npz", 5000)
        found = opened("a.npz")[first:]
        for piece in found[:-1]:
            piece.read()
        with pytest.raises(SourceError, match="the checksum of 'x' is another"):
            found[-1].read()

    @pytest.mark.parametrize("axes", [0, "n [f]"])
    def test_of_compressed_members(self, axes, rng):
        np.savez_compressed("a.npz", x=rng.standard_normal((4000, 3)))
        self.flipped("a.npz", 30_000)
        assert refused("a.npz", axes).startswith(
            "a.npz cannot be read, it may be damaged or no .npz file: "
        )


def test_numpy_files_need_no_other_library(monkeypatch):
    np.save("a.npy", X)
    np.savez("a.npz", x=X)
    np.savez_compressed("b.npz", x=X)
    for missing in ("pyarrow", "pyarrow.dataset", "zarr", "xarray", "fsspec"):
        monkeypatch.setitem(sys.modules, missing, None)
    for path in ("a.npy", "a.npz", "b.npz", f"file://{os.getcwd()}/a.npy"):
        found = read(path)
        np.testing.assert_array_equal(found["x"] if isinstance(found, dict) else found, X)
    for path, module in (("a.pq", "pyarrow"), ("memory://a.npy", "fsspec")):
        Path("a.pq").write_text("text")
        assert refused(path) == (
            f"{path} needs {module}, which is not installed: pip install 'jaxnorm[formats]'."
        )


def test_nothing_is_imported_before_a_file_needs_it():
    code = (
        "import sys, jaxnorm.data.command, jaxnorm.data.parts;"
        "print(*{'pyarrow', 'zarr', 'xarray', 'h5py', 'fsspec', 'pandas'} & sys.modules.keys())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "\n"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_leaves_that_are_empty_or_shorter_than_others(save):
    save("a.npz", x=X, short=X[:700, 0], none=X[:0], wide=np.ones((0, 5)))
    found = opened("a.npz", {"x": 0, "short": 0, "none": 0, "wide": "n [f]"})
    batches = [piece.read() for piece in found]
    assert len(batches) > 45
    for name, x in (("x", X), ("short", X[:700, 0])):
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), x)
    assert {batch[name].size for batch in batches for name in ("none", "wide")} == {0}


def test_files_of_readers_that_are_not_needed_are_closed():
    def is_open(entry):
        return os.path.realpath(f"/proc/self/fd/{entry}").startswith(f"{os.getcwd()}/many")

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("says nothing of open files")
    for number in range(30):
        np.savez_compressed(f"many{number}.npz", x=X[:100])
        read(f"many{number}.npz")
    assert sum(map(is_open, os.listdir("/proc/self/fd"))) <= 8  # of four readers
