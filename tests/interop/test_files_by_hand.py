"""Test files of Keras and Equinox that are written here, where these are not installed."""

import json
import zipfile

import numpy as np
import pytest

from jaxnorm import interop

RNG = np.random.default_rng(0)
KERNEL, BIAS, SCALE = (RNG.standard_normal(n).astype("float32") for n in ((3, 2), 2, 2))
LIKE = {
    "fc": {"kernel": np.zeros((3, 2), "f"), "bias": np.zeros(2, "f")},
    "norm": {"scale": np.zeros(2, "f")},
}
CONFIG = {
    "class_name": "Functional",
    "config": {
        "layers": [
            {"class_name": "InputLayer", "config": {"name": "in"}},
            {"class_name": "Dense", "config": {"name": "fc"}},
            {"class_name": "RMSNormalization", "config": {"name": "norm", "epsilon": 1e-6}},
        ]
    },
}


def check(found):
    np.testing.assert_array_equal(found["fc"]["kernel"], KERNEL)
    np.testing.assert_array_equal(found["fc"]["bias"], BIAS)
    np.testing.assert_array_equal(found["norm"]["scale"], SCALE)


@pytest.fixture
def weights(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path := tmp_path / "model.weights.h5", "w") as file:
        for number, array in enumerate((KERNEL, BIAS)):
            file[f"layers/dense/vars/{number}"] = array
        file["layers/rms_normalization/vars/0"] = SCALE
        file["layers/dropout/seed_generator/vars/0"] = np.zeros(2, np.uint32)
        file["optimizer/vars/0"] = np.zeros(())
    return path


def test_weights_of_keras(weights):
    check(interop.load(LIKE, weights, framework="keras", layers=CONFIG))
    check(interop.load(LIKE, weights, framework="keras", layers=json.dumps(CONFIG)))
    names = {"fc": "dense", "norm": "rms_normalization"}
    options = {"framework": "keras", "layers": ["Dense", "RMSNormalization"], "names": names}
    check(interop.load(LIKE, weights, **options))
    with pytest.raises(ValueError, match=r"numbers its arrays and needs the configuration"):
        interop.load(LIKE, weights, framework="keras")
    with pytest.raises(FileNotFoundError, match=r"there is no file 'config\.json'"):
        interop.load(LIKE, weights, framework="keras", layers="config.json")


def test_an_archive_of_keras(weights, tmp_path):
    with zipfile.ZipFile(path := tmp_path / "m.keras", "w") as archive:
        archive.write(weights, "model.weights.h5")
        archive.writestr("config.json", json.dumps(CONFIG))
    check(interop.load(LIKE, path, framework="keras"))
    assert "note: norm: epsilon=1e-06" in str(interop.match(LIKE, path, framework="keras"))
    for framework in ("torch", "haiku"):
        with pytest.raises(ValueError, match=r"got m\.keras\. Say framework='keras'\."):
            interop.load(LIKE, path, framework=framework)
    with pytest.raises(ValueError, match="got a zip archive"):
        interop.load(LIKE, path, framework="equinox", layers={"fc": "Linear"})


def test_a_file_of_equinox(tmp_path):
    with (path := tmp_path / "m.eqx").open("wb") as file:
        for array in (KERNEL.T, BIAS, np.array(False), SCALE):
            np.save(file, array)
    layers = {"fc": "Linear", "norm": ("RMSNorm", {"use_bias": False})}
    check(interop.load(LIKE, path, framework="equinox", layers=layers))
    with pytest.raises(ValueError, match=r"norm\.bias needs an array, got the end at array 4"):
        interop.load(LIKE, path, framework="equinox", layers=layers | {"norm": "RMSNorm"})
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        interop.load(LIKE, tmp_path / "n.eqx", framework="equinox", layers=layers)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        interop.load(LIKE, tmp_path, framework="equinox", layers=layers)


def test_params_of_haiku():
    params = {"fc": {"w": KERNEL, "b": BIAS}, "norm": {"scale": SCALE}}
    check(found := interop.load(LIKE, params, framework="haiku"))
    back = interop.save(found, framework="haiku")
    assert {module: list(arrays) for module, arrays in back.items()} == {
        module: list(arrays) for module, arrays in params.items()
    }
