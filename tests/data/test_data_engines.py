"""Test that a Normalizer fitted by Beam, Dask or Ray equals one of the data in one piece.

Orders and partitions vary, and workers die.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from pages import blocks, run

import jaxnorm
from jaxnorm.data import Normalizer, sources
from jaxnorm.data.command import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the engines warn
AXES = {"image": "[n h w] c", "state": "[n] f"}
SIZES = [(5, 1, 0, 9, 0, 3), (18,), (0, 0, 18), (1,) * 18]


def data():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (18, 2, 2, 3), np.uint8),
        "state": rng.standard_normal((18, 4)) * 3 + 1e6,
    }


def parts(sizes, order=0):
    """The data in batches of these sizes, in any order."""
    ends = np.cumsum(sizes)
    batches = [
        {leaf: x[end - size : end] for leaf, x in data().items()}
        for size, end in zip(sizes, ends, strict=True)
    ]
    return [batches[index] for index in np.random.default_rng(order).permutation(len(batches))]


def assert_whole(fitted, leaves=AXES):
    whole = Normalizer.fit(
        [{leaf: data()[leaf] for leaf in leaves}], {leaf: AXES[leaf] for leaf in leaves}
    )
    assert set(fitted.summaries) == set(leaves)
    for leaf, summary in fitted.summaries.items():
        moments, low, high = whole.summaries[leaf]
        np.testing.assert_array_equal(summary.moments.count.ravel(), moments.count.ravel())
        np.testing.assert_allclose(summary.moments.mean.ravel(), moments.mean.ravel(), rtol=1e-14)
        np.testing.assert_allclose(summary.moments.var.ravel(), moments.var.ravel(), rtol=1e-9)
        np.testing.assert_array_equal(summary.min.ravel(), low.ravel())
        np.testing.assert_array_equal(summary.max.ravel(), high.ravel())


def dies_once(marker, batch):
    """The process ends without a word, the first time."""
    if not os.path.exists(marker):
        open(marker, "x").close()
        os._exit(1)
    return batch


@pytest.fixture(scope="module")
def engine():
    """Ray, started once: that takes most of the time."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, [Path(jaxnorm.__file__).parents[1], here, here.parent]))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("engine_name", ["dask", "beam", "ray"])
def test_the_command(engine_name, tmp_path, monkeypatch, request):
    pytest.importorskip({"beam": "apache_beam"}.get(engine_name, engine_name))
    if engine_name == "ray":
        request.getfixturevalue("engine")
    monkeypatch.setattr(sources, "PIECE", 200)
    np.savez(tmp_path / "a.npz", **{leaf: x[:5] for leaf, x in data().items()})
    np.savez(tmp_path / "b.npz", **{leaf: x[5:] for leaf, x in data().items()})
    files = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    patterns = [
        word for leaf, pattern in AXES.items() for word in ("--pattern", f"{leaf}={pattern}")
    ]
    assert (
        main([*files, *patterns, "--engine", engine_name, "--out", str(tmp_path / "stats.json")])
        == 0
    )
    assert_whole(Normalizer.load(tmp_path / "stats.json"))


@pytest.mark.parametrize("number", range(3))
def test_the_guide(number, tmp_path, monkeypatch, request):
    engine_name = ("dask", "apache_beam", "ray")[number]
    pytest.importorskip(engine_name)
    if engine_name == "ray":
        request.getfixturevalue("engine")
    monkeypatch.chdir(tmp_path)
    run(blocks("docs/guides/data.md", "py")[number])
    if engine_name == "apache_beam":
        assert Normalizer.load("stats.safetensors").moments["x"].mean.tolist() == [[1.0, 1.0]]


class TestBeam:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("apache_beam")

    def combined(self, batches, tmp_path, transform=None, runner=None):
        import apache_beam as beam

        from jaxnorm.data.beam import FitNormalizer

        path = str(tmp_path / "fitted.json")
        with beam.Pipeline(runner=runner) as pipeline:
            elements = pipeline | beam.Create(batches) | beam.Reshuffle()
            elements = elements if transform is None else elements | beam.Map(transform)
            _ = (
                elements
                | beam.CombineGlobally(FitNormalizer(AXES))
                | beam.Map(Normalizer.save, path)
            )
        return Normalizer.load(path)

    @pytest.mark.parametrize("sizes", SIZES)
    def test_batches_of_any_size_in_any_order(self, sizes, tmp_path):
        for order in range(2):
            assert_whole(self.combined(parts(sizes, order), tmp_path))

    def test_nothing_gives_an_empty_normalizer(self, tmp_path):
        assert self.combined([], tmp_path).summaries == {}

    def test_a_bundle_that_fails_is_tried_again(self, tmp_path):
        from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner

        marker = tmp_path / "failed"

        def fails_once(batch):
            if not marker.exists():
                marker.touch()
                raise OSError("lost")
            return batch

        assert_whole(
            self.combined(parts(SIZES[0]), tmp_path, fails_once, BundleBasedDirectRunner())
        )
        assert marker.exists()


class TestDask:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("dask.array")

    @pytest.mark.parametrize("sizes", SIZES)
    def test_arrays_of_any_chunks(self, sizes):
        import dask.array as da

        from jaxnorm.data.dask import fit

        arrays = {
            "image": da.from_array(data()["image"], chunks=(sizes, 1, 2, 2)),
            "state": da.from_array(data()["state"], chunks=(7, 3)),
        }
        assert_whole(fit(arrays, AXES))
        assert_whole(fit({"state": arrays["state"]}, {"state": AXES["state"]}), ["state"])
        alone = fit(arrays["image"], AXES["image"])
        whole = Normalizer.fit([data()["image"]], AXES["image"])
        np.testing.assert_allclose(alone.moments.var, whole.moments.var, rtol=1e-12)
        np.testing.assert_array_equal(alone.moments.count, whole.moments.count)

    @pytest.mark.parametrize("sizes", SIZES)
    def test_delayed_batches_in_any_order(self, sizes):
        import dask

        from jaxnorm.data.dask import fit

        assert_whole(fit([dask.delayed(batch) for batch in parts(sizes, 1)], AXES))

    def test_masks(self):
        import dask.array as da

        from jaxnorm.data.dask import fit

        x = np.array([[1.0], [np.nan], [5.0], [np.nan]])
        assert fit(da.from_array(x, chunks=1), 0, where=np.isfinite).moments.mean.item() == 3

    @pytest.mark.parametrize("axes", [0, "[n] f"])
    def test_chunks_of_unknown_lengths(self, axes, rng):
        import dask.array as da

        from jaxnorm.data.dask import fit

        x = rng.standard_normal((40, 3))
        array = da.from_array(x, chunks=(7, 3))
        fitted, kept = fit(array[array[:, 0] > 0], axes), x[x[:, 0] > 0]
        np.testing.assert_allclose(fitted.moments.mean[0], kept.mean(0), rtol=1e-12)
        assert fitted.moments.count.max() == len(kept)

    def test_data_frames_with_empty_partitions(self):
        frames, pandas = pytest.importorskip("dask.dataframe"), pytest.importorskip("pandas")
        from jaxnorm.data.dask import fit

        frame = frames.from_pandas(
            pandas.DataFrame({"x": np.arange(20.0), "y": np.arange(20), "text": "a"}), npartitions=5
        )
        fitted = fit(frame[frame.x >= 10], {"x": 0, "y": 0})
        assert (
            fitted.moments["x"].count.item(),
            fitted.moments["x"].mean.item(),
            fitted.min["y"].item(),
        ) == (10, 14.5, 10)

    def test_lengths_that_differ_are_refused(self):
        import dask.array as da

        from jaxnorm.data.dask import fit

        with pytest.raises(
            ValueError,
            match=(
                "arrays must be equally long along the first axis that is reduced: 'b' has 3 of 4"
            ),
        ):
            fit({"a": da.ones((4, 2)), "b": da.ones((3, 2))})

    def test_a_worker_that_dies_is_replaced(self, tmp_path):
        distributed = pytest.importorskip("distributed")
        import dask

        from jaxnorm.data.dask import fit

        marker = str(tmp_path / "died")
        with (
            distributed.LocalCluster(
                n_workers=1, threads_per_worker=1, dashboard_address=None
            ) as cluster,
            distributed.Client(cluster),
        ):
            assert_whole(
                fit([dask.delayed(dies_once)(marker, batch) for batch in parts(SIZES[0])], AXES)
            )
        assert os.path.exists(marker)


class TestRay:
    @pytest.mark.parametrize("sizes", SIZES[::2])
    def test_blocks_of_any_size_in_any_order(self, engine, sizes):
        from jaxnorm.data.ray import fit

        states = [batch["state"] for batch in parts(sizes, 1) if len(batch["state"])]
        first, *others = (
            engine.data.from_numpy(state).rename_columns({"data": "state"}) for state in states
        )
        assert_whole(
            fit(first.union(*others) if others else first, {"state": AXES["state"]}), ["state"]
        )

    def test_several_columns_and_empty_blocks(self, engine):
        from jaxnorm.data.ray import fit

        rows = [{leaf: x[index] for leaf, x in data().items()} for index in range(18)]
        dataset = engine.data.from_items(rows, override_num_blocks=6)
        assert_whole(fit(dataset, AXES))
        filtered = fit(dataset.filter(lambda row: row["state"][0] < 1e6), {"state": AXES["state"]})
        assert filtered.moments["state"].count[0, 0] == (data()["state"][:, 0] < 1e6).sum()

    def test_nothing_gives_an_empty_normalizer(self, engine):
        from jaxnorm.data.ray import fit

        assert (
            fit(engine.data.from_items([{"x": 1.0}]).filter(lambda row: row["x"] > 1)).summaries
            == {}
        )

    def test_a_worker_that_dies_is_replaced(self, engine, tmp_path):
        from jaxnorm.data.ray import fit

        marker = str(tmp_path / "died")
        rows = [{leaf: x[index] for leaf, x in data().items()} for index in range(18)]
        dataset = engine.data.from_items(rows, override_num_blocks=3).map_batches(
            lambda batch: dies_once(marker, batch)
        )
        assert_whole(fit(dataset, AXES))
        assert os.path.exists(marker)
