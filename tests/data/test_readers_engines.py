"""Test files that Beam, Dask and Ray read.

The tests cover every format, many pieces at a time, and one sentence for a bad file.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from reading import WRITE, X, cut, opened

import jaxnorm
from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the engines warn
ENGINES = ["dask", "beam", "ray"]


@pytest.fixture(scope="module")
def ray():
    """Started once: that takes most of the time."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, [Path(jaxnorm.__file__).parents[1], here, here.parent]))
    environment = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield ray
    ray.shutdown()


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip({"beam": "apache_beam"}.get(request.param, request.param))
    if request.param == "ray":
        request.getfixturevalue("ray")
    return request.param


@pytest.mark.parametrize("suffix", WRITE)
def test_many_pieces_of_every_format(engine, suffix, tmp_path):
    from importlib import import_module

    path = str(tmp_path / f"a.{suffix}")
    WRITE[suffix](path, X)
    found = import_module(f"jaxnorm.data.{engine}").fit_pieces(opened(path), Normalizer())
    ((moments, low, high),) = found.summaries.values()
    assert found.batches == len(opened(path))
    np.testing.assert_array_equal(moments.count, 4000)
    np.testing.assert_allclose(moments.mean, X.mean(0, np.float64, keepdims=True), rtol=1e-14)
    assert (low.ravel().tolist(), high.ravel().tolist()) == (X[0].tolist(), X[-1].tolist())


def damaged_chunk(path):
    WRITE["zarr"](path, X)
    os.truncate(f"{path}/x/c/5/0", 9)


def flipped(path):
    WRITE["npz"](path, X)
    data = bytearray(Path(path).read_bytes())
    data[5000] ^= 1
    Path(path).write_bytes(data)


def ragged(path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": [[1.0]] * 5 + [[1.0, 2.0]]}), path)


BAD = {
    "a.zarr": (damaged_chunk, "a.zarr cannot be read, it may be damaged: "),
    "a.npz": (flipped, "a.npz must hold what was written: the checksum of 'x' is another. "),
    "a.parquet": (
        ragged,
        "a.parquet must hold lists of one length in 'x': there are lengths 1, 2.",
    ),
    "b.parquet": (
        lambda _: os.rename(cut("parquet", 0.5), "b.parquet"),
        "b.parquet cannot be read",
    ),
    "c.npy": (
        lambda path: np.save(path, np.ones(3, complex)),
        "c.npy must hold numbers: it holds ",
    ),
}


@pytest.mark.parametrize("path", BAD)
def test_a_bad_file_is_one_sentence(engine, path, tmp_path, capfd):
    write, said = BAD[path]
    write(path)
    given = str(tmp_path / path)
    capfd.readouterr()
    assert main([given, "--engine", engine, "--out", "stats.json"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"jaxnorm: {tmp_path}/{said}")
    assert not os.path.exists("stats.json")


def test_masks_weights_and_differences_are_those_of_this_process(
    engine, tmp_path, monkeypatch, rng
):
    monkeypatch.setattr(sources, "PIECE", 3000)
    keep = np.arange(300) % 7 > 0
    np.savez("a.npz", x=rng.standard_normal((300, 5, 2)), lat=np.linspace(-80, 80, 5), keep=keep)
    path, axes = str(tmp_path / "a.npz"), {"x": "[time lat] f"}
    options = {"weights": "cos(lat)", "diff": "time", "where": {"x": "keep"}}
    expected = Normalizer.fit_files(path, axes, **options)
    found = Normalizer.fit_files(path, axes, **options, engine=engine)
    assert found.batches == expected.batches > 5
    np.testing.assert_allclose(found.moments["x"].count, expected.moments["x"].count, rtol=1e-13)
    np.testing.assert_allclose(found.std["x"], expected.std["x"], rtol=1e-12)
