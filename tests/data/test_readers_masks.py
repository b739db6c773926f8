"""Test masks from files: an array and its mask are cut alike, whatever the chunks."""

import numpy as np
import pytest

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.sources import SourceError

N, LAT, C = 23, 5, 7


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def arrays(rng):
    valid = rng.random((N, LAT)) < 0.6
    x = rng.standard_normal((N, LAT, C))
    x[~valid] = 1e6
    return {"x": x, "y": x[..., 0], "valid": valid}


def write(suffix, arrays, chunks):
    if suffix == "npz":
        np.savez_compressed("a.npz", **arrays)
    elif suffix == "fortran.npz":
        np.savez("a.fortran.npz", **{name: np.asfortranarray(x) for name, x in arrays.items()})
    elif suffix == "h5":
        with pytest.importorskip("h5py").File("a.h5", "w") as file:
            for name, x in arrays.items():
                file.create_dataset(name, data=x, chunks=tuple(map(min, chunks, x.shape)))
    else:
        group = pytest.importorskip("zarr").open_group("a.zarr", mode="w")
        for name, x in arrays.items():
            group.create_array(name, data=x, chunks=tuple(map(min, chunks, x.shape)))
    return f"a.{suffix}"


PATTERNS = [
    "[n lat c]",
    "[n lat] c",
    "n [lat c]",
    "n [lat] c",
    "n lat [c]",
    "[n] lat [c]",
    "[n ...]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("chunks", [(4, 5, 7), (23, 5, 1), (23, 1, 7)])
@pytest.mark.parametrize("suffix", ["npz", "fortran.npz", "h5", "zarr"])
def test_masks_of_the_first_axes(suffix, chunks, pattern, arrays, monkeypatch):
    path = write(suffix, arrays, chunks)
    monkeypatch.setattr(sources, "PIECE", 600)
    fitted = Normalizer.fit_files(path, {"x": pattern}, where={"x": "valid"}).moments["x"]
    assert fitted.count.sum() == arrays["valid"].sum() * C
    expected = Normalizer({"x": pattern}).update(
        {"x": arrays["x"]}, where={"x": arrays["valid"][..., None]}
    )
    np.testing.assert_array_equal(fitted.count, expected.moments["x"].count)
    np.testing.assert_allclose(fitted.mean, expected.mean["x"], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(fitted.var, expected.moments["x"].var, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("diff", ["n", "lat", "c"])
@pytest.mark.parametrize("pattern", ["[n lat c]", "n [lat] c", "n lat [c]"])
def test_masks_of_differences(diff, pattern, arrays, monkeypatch):
    path = write("h5", arrays, (23, 5, 1))
    monkeypatch.setattr(sources, "PIECE", 600)
    axes, where = {"x": pattern}, {"x": "valid"}
    fitted = Normalizer.fit_files(path, axes, where=where, diff=diff).moments["x"]
    axis = ["n", "lat", "c"].index(diff)
    valid = np.broadcast_to(arrays["valid"][..., None], arrays["x"].shape)
    both = np.logical_and(np.delete(valid, 0, axis), np.delete(valid, -1, axis))
    expected = Normalizer(axes).update({"x": np.diff(arrays["x"], axis=axis)}, where={"x": both})
    np.testing.assert_array_equal(fitted.count, expected.moments["x"].count)
    np.testing.assert_allclose(fitted.mean, expected.mean["x"], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("axes", ["[n] ...", {"x": "n lat [c]", "y": "n [lat]"}])
def test_one_mask_for_several_arrays(axes, arrays, monkeypatch):
    path = write("h5", arrays, (23, 5, 1))
    monkeypatch.setattr(sources, "PIECE", 600)
    fitted = Normalizer.fit_files(path, axes, where={"x": "valid", "y": "valid"})
    assert set(fitted.mean) == {"x", "y"}
    for name in ("x", "y"):
        keep = arrays["valid"].reshape(N, LAT, *[1] * (arrays[name].ndim - 2))
        own = axes if isinstance(axes, str) else axes[name]
        expected = Normalizer(own).update(arrays[name], where=keep)
        np.testing.assert_array_equal(fitted.moments[name].count, expected.moments.count)
        np.testing.assert_allclose(fitted.mean[name], expected.mean, rtol=1e-12, atol=1e-13)


def test_one_pattern_for_all_need_not_fit_the_mask(arrays):
    del arrays["y"]
    path = write("npz", arrays, ())
    fitted = Normalizer.fit_files(path, "[n lat] c", where={"x": "valid"})
    assert set(fitted.mean) == {"x"}
    assert fitted.moments["x"].count.max() == arrays["valid"].sum()


def test_a_mask_of_length_one_holds_for_all(arrays, monkeypatch):
    path = write("h5", arrays | {"valid": arrays["valid"][:1]}, (4, 5, 7))
    monkeypatch.setattr(sources, "PIECE", 600)
    fitted = Normalizer.fit_files(path, {"x": "[n] lat c"}, where={"x": "valid"})
    assert fitted.moments["x"].count.max() == N


def test_masks_that_do_not_fit(arrays, monkeypatch):
    path = write("h5", arrays | {"valid": arrays["valid"][:-1]}, (4, 5, 7))
    monkeypatch.setattr(sources, "PIECE", 600)
    said = "a.h5 must hold a mask of the leading axes of 'x' in 'valid': 'x' has shape (23, 5, 7), "
    with pytest.raises(SourceError) as caught:
        Normalizer.fit_files(path, {"x": "n lat [c]"}, where={"x": "valid"})
    assert str(caught.value) == f"{said}'valid' (22, 5)."
    with pytest.raises(SourceError, match=r"^a.h5 must hold 'keep': it holds 'valid', 'x', 'y'\.$"):
        Normalizer.fit_files(path, {"x": "[n lat c]"}, where={"x": "keep"})
