"""Test files of weights: each kind, what is in the way of them, and what is refused."""

import json
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from jaxnorm import interop
from jaxnorm.interop import files, torch_archives

ARRAYS = {
    "fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fc.bias": np.array([0.5, -1.0], np.float32),
    "norm.num_batches_tracked": np.array(7),
    "half": np.array([1.5, 2.0**-20], ml_dtypes.bfloat16),
}
LIKE = {"fc": {"kernel": np.zeros((3, 2), "f"), "bias": np.zeros(2, "f")}}


def same(found, expected=ARRAYS):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


def test_safetensors(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file(ARRAYS, path := tmp_path / "w.safetensors")
    found, notes = files.read(path)
    same(found)
    assert notes == []
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"w\.safetensors must be a safetensors file: .*again\."):
        files.read(path)


def test_safetensors_are_sorted_by_number(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file(
        {f"{i}.weight": np.zeros(1) for i in range(12)}, path := tmp_path / "w.safetensors"
    )
    assert list(files.read(path)[0]) == [f"{i}.weight" for i in range(12)]


def test_a_model_in_several_safetensors(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    parts = {"a.safetensors": ["fc.weight"], "b.safetensors": list(ARRAYS)[1:]}
    for file, names in parts.items():
        numpy.save_file({name: ARRAYS[name] for name in names}, tmp_path / file)
    index = {name: file for file, names in parts.items() for name in names}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    same(files.read(str(path))[0])
    path.write_text(json.dumps({"weight_map": index | {"half": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"'half' is not in a\.safetensors"):
        files.read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="an index with a weight_map"):
        files.read(path)


def test_npz(tmp_path):
    arrays = {name: array for name, array in ARRAYS.items() if name != "half"}
    np.savez(path := tmp_path / "w.npz", **arrays)
    same(files.read(path)[0], arrays)
    np.savez(path, x=np.array([{}], object))
    with pytest.raises(ValueError, match=r"must be a file of np\.savez"):
        files.read(path)
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match=r"must be a file of np\.savez"):
        files.read(path)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("none.npz", FileNotFoundError, r"none\.npz must exist"),
        ("text.npz", ValueError, r"text\.npz must be a file of np\.savez: it is no whole zip"),
        ("text.pt", ValueError, r"PyTorch 1\.6: it is damaged, or no archive\. Download or save"),
        ("old.pt", ValueError, r"PyTorch 1\.6: it is older\. Install PyTorch to read it"),
        ("w.h5", ValueError, r"must end with \.safetensors, .*got w\.h5"),
        (3, TypeError, "must be a mapping of arrays, or a path: got int"),
        ({}, TypeError, "must map names to arrays: got nothing"),
        ({"a": [1.0]}, TypeError, "got list at 'a'"),
    ],
)
def test_what_is_no_source(source, error, said, tmp_path):
    for name in ("w.h5", "text.npz", "text.pt"):
        (tmp_path / name).write_text("no arrays")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))
    with pytest.raises(error, match=said):
        files.read(tmp_path / source if isinstance(source, str) else source)


@pytest.mark.parametrize(
    ("framework", "suffix"),
    [
        *(("torch", end) for end in ("safetensors", "safetensors.index.json", "npz", "pt", "bin")),
        *(("keras", end) for end in ("keras", "h5", "weights.h5")),
        ("equinox", "eqx"),
    ],
)
def test_a_folder_an_empty_file_and_no_file(framework, suffix, tmp_path):
    (tmp_path / f"folder.{suffix}").mkdir()
    (tmp_path / f"empty.{suffix}").write_bytes(b"")
    for name, error, said in (
        ("folder", IsADirectoryError, f"must be a file: .*folder.{suffix} is a folder"),
        ("empty", ValueError, f"empty.{suffix} must hold arrays: it is an empty file"),
        ("none", FileNotFoundError, f"none.{suffix} must exist: there is no such file"),
    ):
        with pytest.raises(error, match=said):
            interop.load(LIKE, tmp_path / f"{name}.{suffix}", framework=framework)


@pytest.mark.parametrize("name", ["state_dict", "model", "model_state_dict"])
def test_a_state_dict_in_another(name):
    nested = {"epoch": 3, name: {f"module.{key}": array for key, array in ARRAYS.items()}}
    matching = interop.match(LIKE, nested, framework="torch", allow_unused=True)
    assert matching.notes == [
        f"the state dict was in '{name}'; epoch stay in the file",
        "the prefix 'module.' of DistributedDataParallel was taken off",
    ]
    found = interop.load(LIKE, nested, framework="torch", allow_unused="half")
    np.testing.assert_array_equal(found["fc"]["kernel"], ARRAYS["fc.weight"].T)


class TestTorch:
    """Archives of torch.save, read without PyTorch."""

    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def tensors(self):
        torch = self.torch
        view = torch.arange(24.0).reshape(4, 6)
        return {
            "weight": torch.randn(3, 2),
            "transposed": view.T,
            "part": view[1:3, ::2],
            "half": torch.randn(3).bfloat16(),
            "float16": torch.randn(3).half(),
            "double": torch.randn(2).double(),
            "count": torch.tensor(3),
            "flags": torch.tensor([True, False]),
            "none": torch.zeros(0, 3),
            "parameter": torch.nn.Parameter(torch.randn(2)),
        }

    def test_equals_what_pytorch_reads(self, tmp_path):
        tensors = self.tensors()
        self.torch.save(tensors, path := tmp_path / "w.pt")
        expected = {name: files.as_numpy(tensor) for name, tensor in tensors.items()}
        same(torch_archives.read(path), expected)
        same(files.read(path)[0], expected)

    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_state_dicts_of_modules(self, protocol, tmp_path):
        nn = self.torch.nn
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        state = {"epoch": 3, "loss": [0.5, 1e9], "state_dict": module.state_dict(), "name": "x"}
        state["device"] = self.torch.device("cpu")
        self.torch.save(state, path := tmp_path / "w.pt", pickle_protocol=protocol)
        found = torch_archives.read(path)
        assert (found["epoch"], found["loss"], found["name"]) == (3, [0.5, 1e9], "x")
        same(found["state_dict"], {k: t.numpy() for k, t in module.state_dict().items()})

    def test_without_pytorch(self, tmp_path, monkeypatch):
        self.torch.save(self.tensors(), path := tmp_path / "w.pt")
        self.torch.save(
            self.tensors(), old := tmp_path / "old.pt", _use_new_zipfile_serialization=False
        )
        assert files.read(old)[0].keys() == files.read(path)[0].keys()
        monkeypatch.setattr(files, "find_spec", lambda name: None)
        assert "weight" in files.read(path)[0]
        with pytest.raises(ValueError, match=r"since PyTorch 1\.6.* Install PyTorch"):
            files.read(old)

    @pytest.mark.parametrize("reader", [torch_archives.read, files.read])
    def test_modules_are_refused(self, reader, tmp_path):
        self.torch.save(self.torch.nn.Linear(2, 2), path := tmp_path / "w.pt")
        with pytest.raises(ValueError, match=r"w\.pt must hold tensors.* Save the state dict"):
            reader(path)

    def test_damaged_archives(self, tmp_path):
        self.torch.save(self.tensors(), path := tmp_path / "w.pt")
        data = path.read_bytes()
        for cut in (10, len(data) // 2, len(data) - 30):
            path.write_bytes(data[:cut])
            for reader in (torch_archives.read, files.read):
                with pytest.raises(ValueError, match=r"w\.pt must"):
                    reader(path)


class Evil:
    """What would run a command if it were unpickled."""

    def __reduce__(self):
        return os.system, ("touch unpickled",)


def archive(path, content, **storages):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "w/data.pkl", content if isinstance(content, bytes) else pickle.dumps(content, 2)
        )
        for key, data in storages.items():
            file.writestr(f"w/data/{key}", data)
    return path


def described(size, stride, offset=0, numbers=2, storage=b"FloatStorage"):
    """The opcodes of one tensor, whose storage "0" is said to hold so many numbers."""
    small = lambda value: b"K" + bytes([value])
    tuples = [b"(" + b"".join(map(small, values)) + b"t" for values in (size, stride)]
    text = lambda value: b"X" + len(value).to_bytes(4, "little") + value
    persistent = b"(" + text(b"storage") + b"ctorch\n" + storage + b"\n"
    persistent += text(b"a") + text(b"cpu") + small(numbers) + b"tQ"
    arguments = b"(" + persistent + small(offset) + tuples[0] + tuples[1] + b"\x89N" + b"t"
    return b"\x80\x02}" + text(b"w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Evil(), "it calls (posix|nt).system"),
        ({"a": Evil()}, "it calls (posix|nt).system"),
        ({"a": {1, 2}}, "it calls __builtin__.set"),
        (b"", "pickle exhausted"),
        (b"\x80\x02.", "IndexError"),
        (b"\x80\x02}", "pickle exhausted"),
        (described((3,), (1,)), r"size \(3,\) ends after its storage"),
        (described((2,), (1,), offset=1), "ends after its storage"),
        (described((1, 1), (1,)), r"of size \(1, 1\) has strides \(1,\)"),
        (described((2,), (1,), numbers=3), "must hold 3 numbers and holds 2"),
        (described((2,), (1,), storage=b"EvilStorage"), "a storage is described as"),
    ],
    ids=range(11),
)
def test_nothing_is_run(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archive("w.pt", content, a=np.array([1, 2], "<f4").tobytes())
    with pytest.raises(ValueError, match=said):
        torch_archives.read(path)
    assert os.listdir() == ["w.pt"]


def test_a_tensor_by_its_opcodes(tmp_path):
    data = np.array([1, 2], "<f4").tobytes()
    path = archive(tmp_path / "w.pt", described((2, 1), (1, 1)), a=data)
    same(torch_archives.read(path), {"w": np.array([[1], [2]], np.float32)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("w/byteorder", "big")
    swapped = torch_archives.read(path)["w"]
    np.testing.assert_array_equal(swapped, np.array([[1], [2]], np.float32).byteswap())


def test_archives_of_other_programs(tmp_path):
    with zipfile.ZipFile(path := tmp_path / "w.pt", "w") as file:
        file.writestr("something", "else")
    with pytest.raises(ValueError, match=r"0 files data\.pkl instead of one"):
        torch_archives.read(path)
