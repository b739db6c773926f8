"""Test addresses of the web, by a file system that answers as fsspec's for HTTP does."""

import io
from pathlib import Path

import numpy as np
import pytest
from reading import WRITE, X, read, refused

from jaxnorm.data import Normalizer

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.filterwarnings("default")  # zarr warns of format 3


class AnswerError(Exception):
    """An answer of a server that is no file."""

    def __init__(self, status):
        super().__init__(f"{status}, message='No'")
        self.status = status


class Web(fsspec.AbstractFileSystem):
    """Files of the working folder at http://host, which cannot be listed."""

    protocol = "http"
    cachable = False
    status, ranges = 404, True

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def _data(self, path):
        file = Path(path.removeprefix("http://host/").partition("?")[0])
        if self.status != 404 or not file.is_file():
            raise FileNotFoundError(path) from AnswerError(self.status)
        return file.read_bytes()

    def info(self, path, **_):
        return {"name": path, "type": "file", "size": len(self._data(path))}

    def _open(self, path, mode="rb", **_):
        if not self.ranges:
            raise ValueError("The HTTP server doesn't appear to support range requests.")
        return io.BytesIO(self._data(path))

    def ls(self, path, detail=True, **_):
        raise FileNotFoundError(path) if self.status == 404 else AnswerError(self.status)

    def ukey(self, path):
        return path


@pytest.fixture(autouse=True)
def web(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda path: (Web(), path))
    return Web


@pytest.mark.parametrize("suffix", ["npy", "packed.npz", "parquet", "h5", "nc", "classic.nc"])
def test_files(suffix):
    WRITE[suffix](f"a.{suffix}", X)
    found = read(f"http://host/a.{suffix}?signature=a.b")
    np.testing.assert_array_equal(found["x"] if isinstance(found, dict) else found, X)


def test_a_zarr_whose_folder_is_no_address():
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
    data = xarray.Dataset({"x": (("row", "column"), X)})
    data.to_zarr("a.zarr", zarr_format=2, consolidated=True)
    np.testing.assert_array_equal(read("http://host/a.zarr")["x"], X)
    # its fingerprint is of its metadata
    for _ in range(2):
        fitted = Normalizer.fit_files("http://host/a.zarr", state="state.json")
    assert fitted.moments["x"].count.max() == 4000
    zarr.open_group("b.zarr", mode="w").create_array("x", data=X)
    assert refused("http://host/b.zarr") == (
        "http://host/b.zarr must have consolidated metadata, as it is no folder that can be "
        "listed: its metadata names no array."
    )


def test_folders_and_patterns(web, monkeypatch):
    said = refused("http://host/folder")
    assert said.endswith("folders cannot be listed over the web. Name the files in it.")
    assert refused("http://host/*.npy") == "http://host/*.npy must name files: there are none."
    monkeypatch.setattr(web, "status", 403)
    assert refused("http://host/*.npy") == "http://host/*.npy cannot be listed: 403, message='No'."


@pytest.mark.parametrize("suffix", ["npy", "zarr", "parquet"])
def test_what_is_not_there_or_not_given(suffix, web, monkeypatch):
    path = f"http://host/none.{suffix}"
    must = (
        "be a Zarr: it holds no zarr.json" if suffix == "zarr" else "exist: there is no such file"
    )
    assert refused(path).startswith(f"{path} must {must}")
    monkeypatch.setattr(web, "status", 403)
    if suffix != "zarr":
        assert refused(path) == f"{path} cannot be read: 403, message='No'."


def test_a_server_that_gives_no_parts(web, monkeypatch):
    WRITE["npy"]("a.npy", X)
    monkeypatch.setattr(web, "ranges", False)
    assert refused("http://host/a.npy") == (
        "http://host/a.npy cannot be read: its server gives no parts of files. simplecache:: "
        "before the address copies it."
    )
