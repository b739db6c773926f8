"""Test HDF5: files of arrays, groups that repeat, chunks, and what is left out or refused."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from reading import opened, read, refused

from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main
from jaxnorm.data.sources import left_out

h5py = pytest.importorskip("h5py")
LENGTHS = {0: 40, 2: 7, 10: 25, 1: 31}  # of demonstrations, written in this order


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path="a.h5", **arrays):
    with h5py.File(path, "w") as file:
        for name, x in arrays.items():
            file[name] = x


@pytest.fixture
def demos(rng):
    """A file like robomimic's; returns its numbers in the order of the demonstrations."""
    arrays = {
        number: {
            "obs/state": rng.standard_normal((length, 3)),
            "obs/image": rng.integers(0, 256, (length, 2, 2, 3), np.uint8),
            "actions": rng.standard_normal((length, 2)).astype(np.float32),
            "dones": np.arange(length) == length - 1,
        }
        for number, length in LENGTHS.items()
    }
    with h5py.File("a.h5", "w") as file:
        file.create_group("data").attrs["total"] = sum(LENGTHS.values())
        for number, members in arrays.items():
            for name, x in members.items():
                file.create_dataset(f"data/demo_{number}/{name}", data=x, compression="gzip")
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])
    return {
        f"data/demo_*/{name}": np.concatenate([arrays[number][name] for number in (0, 1, 2, 10)])
        for name in arrays[0]
    }


class TestDemonstrations:
    def test_they_are_joined_in_the_order_of_their_numbers(self, demos):
        found = read("a.h5")
        assert set(found) == set(demos)
        for name, x in demos.items():
            np.testing.assert_array_equal(found[name], x)
            assert found[name].dtype == x.dtype
        assert left_out("a.h5", {"": 0}) == {"mask/train": "strings"}

    @pytest.mark.parametrize("size", [1, 100, 1000, 10**6])
    def test_in_pieces_of_any_size(self, demos, size):
        for name, axes, along in (("actions", "[n] f", 0), ("obs/image", "n h [w] c", 2)):
            whole = f"data/demo_*/{name}"
            found = read("a.h5", {whole: axes}, size, along)
            np.testing.assert_array_equal(found[whole], demos[whole])

    def test_one_is_fitted_where_it_is_named(self, demos):
        name = "data/demo_*/actions"
        assert read("a.h5", {"data/demo_10/actions": 0})["data/demo_10/actions"].shape == (25, 2)
        assert set(read("a.h5", {"data/demo_10": 0})) == {
            f"data/demo_10/{member}" for member in ("obs/state", "obs/image", "actions", "dones")
        }
        assert set(read("a.h5", {"data/demo_*/obs": 0})) == {
            "data/demo_*/obs/state",
            "data/demo_*/obs/image",
        }
        assert set(read("a.h5", {name: 0, "data/demo_2/dones": 0})) == {name, "data/demo_2/dones"}

    def test_the_command(self, demos, capsys, monkeypatch):
        monkeypatch.setattr(sources, "PIECE", 500)
        patterns = ["data/demo_*/obs/state=[n] f", "data/demo_*/actions=[n] f"]
        assert main(["a.h5", "--pattern", patterns[0], "--pattern", patterns[1]]) == 0
        assert capsys.readouterr().out == (
            "Written: stats.safetensors, of data/demo_*/actions: 2 features, 103 elements each, "
            "data/demo_*/obs/state: 3 features, 103 elements each\n"
        )
        fitted = Normalizer.load("stats.safetensors")
        x = demos["data/demo_*/obs/state"]
        np.testing.assert_allclose(
            fitted.std["data/demo_*/obs/state"][0], x.std(0, dtype=np.float64), rtol=1e-12
        )
        assert main(["a.h5", "--pattern", "data/demo_*/obs/*=[n ...]"]) == 0
        fitted = Normalizer.load("stats.safetensors")
        assert set(fitted.summaries) == {"data/demo_*/obs/image", "data/demo_*/obs/state"}

    def test_at_an_address(self, demos):
        system = pytest.importorskip("fsspec").filesystem("memory")
        system.put("a.h5", "/hdf5/a.h5")
        for name, x in read("memory://hdf5/a.h5").items():
            np.testing.assert_array_equal(x, demos[name])

    def test_shapes_that_differ_are_left_out_or_refused_in_words(self, capsys):
        write(
            **{"demo_0/x": np.ones((5, 3)), "demo_1/x": np.ones((6, 2))},
            **{"demo_0/y": np.ones(5), "demo_1/y": np.ones(6), "demo_1/z": np.ones(6)},
            **{"demo_0/one": 3.0, "demo_1/one": 4.0},
        )
        held = "arrays of several shapes, (5, 3) in demo_0/x, (6, 2) in demo_1/x"
        assert left_out("a.h5", {"": 0}) == {
            "demo_*/x": held,
            "demo_*/z": "arrays that 1 of 2 groups lack, demo_0 first",
            "demo_*/one": "one number in each group",
        }
        assert set(read("a.h5")) == {"demo_*/y"}
        assert refused("a.h5", {"demo_*/x": 0}) == (
            f"a.h5 must hold numbers in 'demo_*/x': it holds {held}. Name what is fitted: "
            "axes={'demo_*/y': 0}, or --pattern 'demo_*/y=[n]'."
        )
        assert main(["a.h5"]) == 0
        assert f"jaxnorm: 'demo_*/x' is left out, as it holds {held}.\n" in capsys.readouterr().err

    def test_one_alone_has_the_name_of_many(self):
        write(**{"data/demo_0/x": np.arange(4.0), "layer_0/w": np.ones(2)})
        assert set(read("a.h5")) == {"data/demo_*/x", "layer_0/w"}

    def test_observations_may_be_longer_than_actions(self, rng):
        """As in Minari's files, where an episode has one more of them."""
        arrays = {}
        for number, length in enumerate((3, 5)):
            arrays[f"episode_{number}/observations"] = rng.standard_normal((length + 1, 2))
            arrays[f"episode_{number}/actions"] = rng.standard_normal((length, 1))
        write(**arrays)
        found = read("a.h5", size=40)
        for name in ("observations", "actions"):
            expected = np.concatenate([arrays[f"episode_{number}/{name}"] for number in (0, 1)])
            np.testing.assert_array_equal(found[f"episode_*/{name}"], expected)

    def test_the_wider_dtype_holds(self):
        write(**{"demo_0/x": np.array([1], np.int32), "demo_1/x": np.array([2**40])})
        assert read("a.h5")["demo_*/x"].tolist() == [1, 2**40]


class TestArrays:
    def test_a_flat_file_works_as_it_is(self, rng):
        """D4RL's files."""
        arrays = {
            "observations": rng.standard_normal((300, 4)).astype(np.float32),
            "actions": rng.standard_normal((300, 2)).astype(np.float32),
            "terminals": np.arange(300) % 100 == 99,
            "infos/qpos": rng.standard_normal((300, 3)),
        }
        write("a.hdf5", **arrays, **{"metadata/name": "hopper"})
        found = read("a.hdf5")
        assert set(found) == set(arrays)
        for name, x in arrays.items():
            np.testing.assert_array_equal(found[name], x)
        assert left_out("a.hdf5", {"": 0}) == {"metadata/name": "strings"}

    @pytest.mark.parametrize("dtype", [">f4", "<i2", "f2", "u8", bool])
    def test_dtypes(self, dtype):
        x = np.array([[0, 1], [1, 1], [0, 1]]).astype(dtype)
        write(x=x)
        np.testing.assert_array_equal(read("a.h5", size=1)["x"], x)

    def test_what_holds_no_arrays_of_numbers_is_left_out(self):
        with h5py.File("a.h5", "w") as file:
            file["x"] = np.arange(4.0)
            file["one"] = 3.0
            file["text"] = ["a", "bc"]
            file["pairs"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
            file["nothing"] = h5py.Empty("f4")
            file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.float32))
            file["link"] = h5py.SoftLink("/nowhere")
            file["away"] = h5py.ExternalLink("none.h5", "/x")
            file["again"] = file["/"]
        assert read("a.h5")["x"].tolist() == [0, 1, 2, 3]
        assert left_out("a.h5", {"": 0}) == {
            "nothing": "nothing",
            "one": "one number",
            "pairs": "[('a', '<f4'), ('b', '<i4')]",
            "ragged": "lists of several lengths",
            "text": "strings",
        }

    def test_chunks_are_unpacked_once_however_long_they_are(self, rng, monkeypatch):
        x = rng.standard_normal((600, 10))
        with h5py.File("a.h5", "w") as file:
            file.create_dataset("x", data=x, chunks=(200, 10), compression="gzip")
            file.create_dataset("many", data=rng.standard_normal((600, 100)), chunks=(10, 100))
        found = opened("a.h5", size=30_000)
        reader, touched = sources.opening.reader("a.h5"), []
        array = reader.arrays["x"]._part(0)

        class Counted:
            def __getattr__(self, name):
                return getattr(array_of_file, name)

            def __getitem__(self, region):
                touched.append(region[0].start)
                return array_of_file[region]

        array_of_file = array.array
        monkeypatch.setattr(array, "array", Counted())
        parts = [piece.read()["x"] for piece in found]
        assert touched == [0, 200, 400]
        np.testing.assert_array_equal(np.concatenate(parts), x)
        assert max(len(part) for part in parts) < 40

    def test_memory_is_bounded(self):
        with h5py.File("a.h5", "w") as file:
            for number in range(4):
                data = np.zeros((8000, 1000), np.uint8)
                file.create_dataset(f"demo_{number}/x", data=data, chunks=(127, 1000))
        found = opened("a.h5", size=4 << 20)
        tracemalloc.start()
        for piece in found:
            piece.read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2.01 * (4 << 20)


class TestDamage:
    def test_is_one_sentence(self, demos):
        for share in (0.0001, 0.01, 0.5, 0.99):
            data = Path("a.h5").read_bytes()
            Path("b.h5").write_bytes(data[: int(share * len(data))])
            assert refused("b.h5").startswith(("b.h5 cannot be read, it may be ", "b.h5 must"))
        Path("c.h5").write_text("some text")
        assert refused("c.h5").startswith(
            "c.h5 cannot be read, it may be damaged or no .h5 file: OSError, "
        )

    def test_of_a_chunk(self, demos):
        data = bytearray(Path("a.h5").read_bytes())
        with h5py.File("a.h5") as file:
            stored = file["data/demo_0/obs/state"].id.get_chunk_info(0)
        data[stored.byte_offset + 9 : stored.byte_offset + 60] = bytes(51)
        Path("a.h5").write_bytes(data)
        assert refused("a.h5").startswith(
            "a.h5 cannot be read, it may be damaged or no .h5 file: OSError, "
        )

    def test_an_empty_file_and_one_without_arrays(self):
        Path("a.h5").touch()
        assert refused("a.h5") == "a.h5 must hold data: it is empty."
        write("b.h5")
        assert refused("b.h5") == "b.h5 must hold arrays: it holds none."
        write("c.h5", **{"demo_0/x": np.ones((0, 3))})
        assert refused("c.h5") == "the files must hold elements: c.h5 holds none."

    def test_missing_names(self, demos):
        assert refused("a.h5", {"data/demo_*/nothing": 0}) == (
            "a.h5 must hold 'data/demo_*/nothing': it holds 'data/demo_*/actions', "
            "'data/demo_*/dones', 'data/demo_*/obs/image', 'data/demo_*/obs/state', 'mask/train'."
        )


def test_files_of_readers_that_are_not_needed_are_closed():
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("says nothing of open files")
    for number in range(12):
        write(f"many{number}.h5", **{"demo_0/x": np.ones(3)})
        read(f"many{number}.h5")
    inside = [os.path.realpath(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd")]
    assert sum(path.startswith(f"{os.getcwd()}/many") for path in inside) <= 4
