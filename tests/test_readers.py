"""The files that ``jaxnorm fit`` reads: what identifies them, what is read of them, what is refused."""

import json
import os

import numpy as np
import pytest

from jaxnorm.data.sources import SourceError, fingerprint


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

    @pytest.mark.parametrize("path", ["none.npy", "none.zarr", "file:///none.npy", "memory://none.npy"])
    def test_a_missing_file_is_named(self, path):
        pytest.importorskip("fsspec")
        with pytest.raises(SourceError, match=f"^{path} must exist: there is no such file.$"):
            fingerprint(path)
