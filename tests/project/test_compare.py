"""Test comparisons: what they train, write, keep when interrupted, and resume."""

import errno
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from rich.console import Console

import jaxnorm
from jaxnorm.__main__ import main as process_main
from jaxnorm.experiments import compare as engine
from jaxnorm.experiments import data as datasets
from jaxnorm.experiments import data_sequences, picture, report, training
from jaxnorm.experiments.command import main
from jaxnorm.experiments.models import CONV, VARIANTS, LeNet, pool
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import Run, cross_entropy, evaluate, train, watched

SMALL = [
    "compare",
    "--epochs",
    "1",
    "--seeds",
    "1",
    "--train-examples",
    "64",
    "--batch-sizes",
    "32",
]


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


@pytest.fixture
def rendered():
    """Pictures are looked at."""


@pytest.fixture(autouse=True)
def _unrendered(request, monkeypatch):
    """Elsewhere they are drawn, but not made pixels: that takes as long as a short training."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(
            "matplotlib.figure.Figure.savefig", lambda figure, path, **_: path.touch()
        )


def few_tests(data, count):
    """The same with so many test examples."""
    return replace(data, test_inputs=data.test_inputs[:count], test_labels=data.test_labels[:count])


def without_times(results):
    return [
        {key: value for key, value in run.items() if key != "steps_per_second"}
        for run in results["runs"]
    ]


def test_a_comparison_writes_results_and_curves(tmp_path, capsys, rendered):
    assert main([*SMALL, "--norms", "none,batch", "--out", str(tmp_path)]) == 0
    results = report.read(tmp_path)
    assert [
        (run["variant"], run["norm"], run["batch_size"], run["seed"]) for run in results["runs"]
    ] == [
        ("dense", "none", 32, 0),
        ("dense", "batch", 32, 0),
    ]
    assert set(results["runs"][0]["epochs"][0]) == {"train_loss", "test_loss", "test_accuracy"}
    assert set(results["runs"][1]["epochs"][0]) == {
        *("train_loss", "test_loss", "test_accuracy"),
        *("batch_test_loss", "batch_test_accuracy"),
    }
    assert results["runs"][0]["curve"]["step"] == [1, 2]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "digits, dense, batch 32, 1 epoch, 1 seed" in shown
    assert re.search(r"accuracy +batch *\n.* % +stats +steps/s", shown)  # one title above the other


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (["sklearn"], "scikit-learn, which is not"),
        (["optax", "matplotlib"], "optax and matplotlib, which are not"),
        (
            ["optax", "sklearn", "rich", "matplotlib"],
            "optax, scikit-learn, rich and matplotlib, which are not",
        ),
    ],
)
def test_all_that_is_not_installed_is_told_before_anything_runs(missing, told, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    monkeypatch.setattr(sys, "argv", ["jaxnorm", "compare"])
    assert process_main() == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        f"jaxnorm: the experiments need {told} installed: pip install 'jaxnorm[experiments]'.\n",
    )
    monkeypatch.setattr(sys, "argv", ["jaxnorm", "--version"])  # which needs none of them
    assert process_main() == 0
    assert capsys.readouterr().out == f"jaxnorm {jaxnorm.__version__}\n"


def test_the_version_is_an_option_like_others(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jaxnorm {jaxnorm.__version__}\n"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(tmp_path):
    for name in ("a", "b"):
        assert main([*SMALL, "--norms", "batch,layer", "--out", str(tmp_path / name)]) == 0
    assert without_times(report.read(tmp_path / "a")) == without_times(report.read(tmp_path / "b"))


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch, capsys):
    arguments = [*SMALL, "--norms", "none,layer", "--out", str(tmp_path)]
    calls = []

    def interrupted(run, *rest):
        if calls:
            raise KeyboardInterrupt
        calls.append(run)
        return train(run, *rest)

    monkeypatch.setattr(engine, "train", interrupted)
    assert main(arguments) == 130
    assert "Stopped. 1 of 2 runs are in" in capsys.readouterr().out
    first = report.read(tmp_path)["runs"]
    assert [run["norm"] for run in first] == ["none"]
    monkeypatch.setattr(engine, "train", train)
    assert main([*arguments, "--resume"]) == 0
    results = report.read(tmp_path)
    assert results["runs"][0] == first[0]
    assert main([*SMALL, "--norms", "none,layer", "--out", str(tmp_path / "whole")]) == 0
    assert without_times(results) == without_times(report.read(tmp_path / "whole"))
    assert main([*arguments, "--resume"]) == 0  # nothing is left to do
    assert report.read(tmp_path) == results


def test_other_settings_are_not_resumed(tmp_path, capsys):
    assert main([*SMALL, "--norms", "none", "--out", str(tmp_path)]) == 0
    assert (
        main([*SMALL, "--norms", "none", "--out", str(tmp_path), "--resume", "--epochs", "2"]) == 1
    )
    assert "was made with other settings: epochs (1 there, 2 now)" in capsys.readouterr().err


def test_earlier_results_are_kept(tmp_path):
    for _ in range(3):
        assert main([*SMALL, "--norms", "none", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "results-1.json",
        "results-2.json",
        "results.json",
    ]


def test_only_earlier_results_with_runs_are_kept_and_once(tmp_path):
    console = Console(quiet=True)
    runs = [{"norm": "none"}]
    report.write(tmp_path, report.begin({}, tmp_path, console, resume=False))
    report.write(tmp_path, report.begin({}, tmp_path, console, resume=False) | {"runs": runs})
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    same = report.read(tmp_path)
    for _ in range(2):
        report.begin({}, tmp_path, console, resume=False)
        assert [path.name for path in tmp_path.glob("results-*")] == ["results-1.json"]
        report.write(tmp_path, same)
    (tmp_path / "results.json").write_text("of something else")
    report.begin({}, tmp_path, console, resume=False)
    assert (tmp_path / "results-2.json").read_text() == "of something else"


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_writer_that_fails_midway_leaves_the_old_results_whole(tmp_path, monkeypatch):
    report.write(tmp_path, {"settings": {}, "runs": fake_runs()})
    before = (tmp_path / "results.json").read_bytes()

    def midway(path, text):
        path.write_bytes(text[:10].encode())
        full()

    monkeypatch.setattr("pathlib.Path.write_text", midway)
    with pytest.raises(
        report.ResultsError, match=r"results.json cannot be written \(No space left on device\)"
    ):
        report.write(tmp_path, {"settings": {}, "runs": []})
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_picture_that_cannot_be_written_does_not_cost_the_table(tmp_path, monkeypatch, capsys):
    def midway(figure, path, **_):
        path.write_bytes(b"half")
        full()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", midway)
    assert main([*SMALL, "--norms", "none", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "digits, dense, batch 32, 1 epoch, 1 seed" in shown.out
    assert "Written" not in shown.out
    message = (
        f"jaxnorm: {tmp_path / 'curves.png'} cannot be written (No space left on device): "
        "make room, or pass another --out.\n"
    )
    assert shown.err == message
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


PICTURES = [
    ("folder", "folder/axes.png"),
    ("name", "name.png"),
    ("new/", "new/axes.png"),
    ("a.SVG", "a.SVG"),
]


@pytest.mark.parametrize(("out", "file"), long_sweep(PICTURES, quick=PICTURES[3:]))
def test_the_picture_of_the_axes_is_where_it_is_said(
    out, file, tmp_path, monkeypatch, capsys, rendered
):
    """All of it in the first place, two of its cubes in the others."""
    if out != "folder":
        monkeypatch.setattr(picture, "PATTERNS", dict(list(picture.PATTERNS.items())[:2]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(["axes", "--out", out]) == 0
    assert capsys.readouterr().out == f"Written: {file}\n"
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == [file]
    assert (tmp_path / file).read_bytes().startswith(b"<?xml" if out == "a.SVG" else b"\x89PNG")


def test_what_goes_on_is_said_as_a_command(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "train", interrupted)
    out = str(tmp_path / "with space")
    arguments = [*SMALL, "--norms", "none,layer", "--out", out]
    told = (
        f"Stopped. 0 of 2 runs are in {out}/results.json. This goes on:\n"
        f"jaxnorm {' '.join(arguments[:-1])} '{out}' --resume\n"
    )
    assert main(arguments) == 130
    assert capsys.readouterr().out == told
    assert main([*arguments, "--resume"]) == 130
    assert capsys.readouterr().out == told


@pytest.mark.slow
def test_a_killed_process_keeps_what_it_had_finished(tmp_path):
    few = [
        "--epochs",
        "1",
        "--train-examples",
        "64",
        "--batch-sizes",
        "64",
        "--norms",
        "none",
        "--seeds",
        "500",
    ]
    command = [sys.executable, "-m", "jaxnorm", "compare", *few, "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not ((tmp_path / "results.json").exists() and report.read(tmp_path)["runs"]):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            shown, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert shown.endswith(f". This goes on:\n{' '.join(command)} --resume\n")
    assert len(report.read(tmp_path)["runs"]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", CONV)
def test_every_norm_trains_after_convolutions(norm):
    data = few_tests(datasets.digits().first(160), 32)
    found = train(
        Run(norm, 32, 0, variant="conv", epochs=4, learning_rate=3e-3), LeNet(norm, "conv"), data
    )
    losses = [epoch["train_loss"] for epoch in found["epochs"]]
    assert losses[-1] < 0.8 * losses[0]


def initial(model, data):
    """Its variables before any step."""
    like = data.test_inputs[:2]
    return model.lazy_init(
        jax.random.key(0), jax.ShapeDtypeStruct(like.shape, like.dtype), evaluating=True
    )


def shapes(model, images):
    """Of its parameters."""
    return jax.eval_shape(partial(model.init, evaluating=True), jax.random.key(0), images)["params"]


def test_norms_stand_where_they_are_asked_for():
    images = jnp.zeros((2, 20, 20, 1))
    for where, sizes in (("dense", {(120,), (84,)}), ("conv", {(6,), (16,)})):
        params = shapes(LeNet("batch", where), images)
        assert {
            params[name]["scale"].shape for name in params if name.startswith("BatchNorm")
        } == sizes
    conv = shapes(LeNet("layer", "conv"), images)
    assert conv["LayerNorm_0"]["scale"].shape == (16, 16, 6)  # a gain for each element
    assert set(VARIANTS) == {"dense", "conv", "deep"}


def test_pooling_takes_the_largest_of_four(rng):
    x = rng.standard_normal((2, 4, 6, 3)).astype(np.float32)
    truth = np.stack([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]).max(0)
    np.testing.assert_array_equal(pool(jnp.asarray(x)), truth)


def test_batch_statistics_are_those_of_the_test_batches():
    """Evaluated in batches of 100, the last one filled up from the start."""
    data = datasets.digits()
    run = Run("batch", 100, 0)
    model = LeNet("batch")
    variables = initial(model, data)
    found = evaluate(run, model, (variables["params"], variables["batch_stats"]), data)
    images = np.concatenate([data.test_inputs, data.test_inputs[:40]])
    told = jax.jit(partial(model.apply, evaluating=False, mutable=["batch_stats"]))
    logits = [told(variables, part)[0] for part in np.split(images, 4)]
    accuracy = (np.concatenate(logits)[:360].argmax(-1) == data.test_labels).mean()
    assert found["batch_test_accuracy"] == pytest.approx(accuracy, abs=1e-9)


def test_evaluation_does_not_depend_on_how_many_examples_are_evaluated_at_a_time(monkeypatch):
    """Batches that divide the test set, batches that do not, and one that is larger than it."""
    data, model = datasets.digits().first(10), LeNet("none")
    data = few_tests(data, 60)
    params = initial(model, data)["params"]
    logits = jax.jit(partial(model.apply, evaluating=True))({"params": params}, data.test_inputs)
    losses = cross_entropy(logits, data.test_labels)
    compute, shapes = training._outputs, []

    def outputs(model, variables, inputs, evaluating):
        shapes.append(len(inputs))
        return compute(model, variables, inputs, evaluating)

    monkeypatch.setattr(training, "_outputs", outputs)
    for size in (20, 45, 64):
        monkeypatch.setattr(training, "PREDICTED", size)
        found = evaluate(Run("none", 8, 0), model, (params, {}), data)
        assert found["test_loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert shapes == [20, 20, 20, 45, 45, 60]  # at most as many as there are


def test_batch_statistics_of_a_batch_larger_than_the_test_set_are_those_of_it_repeated():
    data, model = datasets.digits().first(40), LeNet("batch")
    data = few_tests(data, 20)
    variables = initial(model, data)
    state = variables["params"], variables["batch_stats"]
    once, twice = (evaluate(Run("batch", size, 0), model, state, data) for size in (20, 40))
    assert twice == pytest.approx(once, rel=1e-5)


def test_digits_are_split_once_and_for_all():
    data = datasets.digits()
    assert (data.train_inputs.shape, data.test_inputs.shape) == (
        (1437, 20, 20, 1),
        (360, 20, 20, 1),
    )
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
    assert np.bincount(data.test_labels).tolist() == [37, 41, 40, 35, 48, 32, 35, 21, 35, 36]


def write_mnist(folder):
    rng = np.random.default_rng(0)
    arrays = {
        f"x_{part}": rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for part, n in (("train", 64), ("test", 20))
    }
    np.savez(folder / "mnist.npz", **arrays, y_train=np.arange(64) % 10, y_test=np.arange(20) % 10)
    return arrays


def test_mnist_is_read_from_the_folder_or_the_variable(tmp_path, monkeypatch):
    arrays = write_mnist(tmp_path)
    data = datasets.mnist(str(tmp_path))
    np.testing.assert_allclose(data.train_inputs[..., 0], arrays["x_train"] / 255, rtol=1e-6)
    np.testing.assert_array_equal(data.test_labels, np.arange(20) % 10)
    monkeypatch.setenv("JAXNORM_DATA", str(tmp_path))
    np.testing.assert_array_equal(datasets.mnist().test_inputs, data.test_inputs)
    assert (
        main(
            [
                "compare",
                "mnist",
                "--norms",
                "none",
                "--batch-sizes",
                "32",
                "--epochs",
                "1",
                "--out",
                str(tmp_path / "o"),
            ]
        )
        == 0
    )


def damaged(path, kind):
    whole = path.read_bytes()
    if kind == "text":
        path.write_bytes(b"<html>not found</html>")
    elif kind == "half":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "array":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif kind == "flipped":
        at = len(whole) // 3
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    elif kind == "compressed":
        np.savez_compressed(path, **dict(np.load(path)))
        whole = bytearray(path.read_bytes())
        whole[400:600] = bytes(200)
        path.write_bytes(whole)
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("kind", ["text", "half", "array", "flipped", "compressed", "empty"])
def test_a_damaged_file_is_told_in_one_line(kind, tmp_path, capsys):
    write_mnist(tmp_path)
    damaged(tmp_path / "mnist.npz", kind)
    assert (
        main(["compare", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    )
    told = (
        f"jaxnorm: {tmp_path}/mnist.npz is damaged or incomplete: delete it, "
        "and download it again.\n"
    )
    assert capsys.readouterr().err == told


def test_a_file_of_objects_is_another_file(tmp_path, capsys):
    """As Keras' imdb.npz is."""
    np.savez(
        tmp_path / "mnist.npz",
        **dict.fromkeys(
            ("x_train", "y_train", "x_test", "y_test"), np.array([[1], [2, 3]], object)
        ),
    )
    assert (
        main(["compare", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    )
    told = (
        "must hold arrays of numbers: x_train holds Python objects. "
        "Is it another file of that name?\n"
    )
    assert capsys.readouterr().err == f"jaxnorm: {tmp_path}/mnist.npz {told}"


def test_without_a_network_mnist_says_what_to_do(monkeypatch, capsys, tmp_path):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.delenv("JAXNORM_DATA", raising=False)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    assert main(["compare", "mnist", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "jaxnorm: MNIST is not on this machine and could not be fetched (no network): download "
        "mnist.npz"
    )
    assert message.count("\n") == 1


def table_of(runs, width=80, variants=("conv",)):
    settings = {
        "data": "digits",
        "variants": variants,
        "batch_sizes": [128, 8],
        "epochs": 1,
        "seeds": 2,
        "norms": ["switchable"],
    }
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.table({"settings": settings, "runs": runs}))
    return console.export_text()


def fake_runs(**changes):
    epoch = {
        "train_loss": 0.01,
        "test_loss": 0.1,
        "test_accuracy": 0.98,
        "batch_test_accuracy": 0.97,
    } | changes
    return [
        {
            "variant": "conv",
            "norm": "switchable",
            "batch_size": 128,
            "seed": s,
            "epochs": [epoch],
            "steps_per_second": 1234.5,
        }
        for s in (0, 1)
    ]


def test_divergence_is_shown_and_valid_json(tmp_path):
    report.write(
        tmp_path,
        {"settings": {}, "runs": fake_runs(train_loss=float("nan"), test_loss=float("inf"))},
    )
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    runs = report.read(tmp_path)["runs"]
    assert (runs[0]["epochs"][0]["train_loss"], runs[0]["epochs"][0]["test_loss"]) == (None, None)
    assert table_of(runs).count("diverged") == 2


def test_the_table_fits_a_terminal_of_80_columns():
    shown = table_of(
        [run | {"variant": "lstm-embedded"} for run in fake_runs(test_loss=12.25)],
        variants=("lstm-embedded", "gru-rows"),
    )
    assert "…" not in shown
    assert "12.250±0.000" in shown
    assert "0.010±0.000" in shown
    assert "98.0±0.0" in shown


READERS = [
    ("lstm-rows", "none"),
    ("lstm-rows", "batch"),
    ("rnn-rows", "batch"),
    ("gru-pixels", "layer-0.3"),
]


@pytest.mark.parametrize(("variant", "norm"), long_sweep(READERS, quick=()))
def test_every_cell_learns_to_read(variant, norm):
    """Rows of eight and single pixels, each norm; the running statistics of every step are those
    that were seen.
    """
    task = TASKS["sequential"]
    data = few_tests(task.load(None).first(128), 64)
    found = train(
        Run(norm, 64, 0, variant, epochs=4, learning_rate=1e-2, momentum=0.5),
        task.model(norm, variant, 0.5),
        data,
    )
    losses = [epoch["train_loss"] for epoch in found["epochs"]]
    assert losses[-1] < losses[0]
    assert ("batch_test_accuracy" in found["epochs"][0]) == (norm == "batch")


def write_imdb(folder, lengths=(3, 250, 7, 1), labels=(0, 1, 1, 0), **change):
    rng = np.random.default_rng(0)
    arrays = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = rng.integers(1, 30_000, sum(lengths)).astype(np.uint32)
        arrays[f"len_{part}"], arrays[f"y_{part}"] = (
            np.array(lengths, np.uint16),
            np.array(labels, np.uint8),
        )
    np.savez(folder / "imdb.npz", **(arrays | change))
    return arrays


def test_reviews_are_cut_padded_and_known_by_their_common_words(tmp_path):
    arrays = write_imdb(tmp_path)
    tokens = data_sequences.imdb(str(tmp_path)).train_inputs
    assert (tokens.shape, tokens.dtype) == ((4, 200), np.int32)
    assert (tokens > 0).sum(1).tolist() == [3, 200, 7, 1]
    words = arrays["x_train"].astype(np.int64)
    words[words >= 20_000] = 2
    np.testing.assert_array_equal(tokens[1], words[3:203])
    np.testing.assert_array_equal(tokens[2, :7], words[253:260])
    assert tokens[3, 0] == words[260]


@pytest.mark.slow
def test_reviews_train_and_resume(tmp_path, capsys):
    write_imdb(tmp_path)
    arguments = [
        "compare",
        "imdb",
        "--data-dir",
        str(tmp_path),
        "--epochs",
        "1",
        "--batch-sizes",
        "2",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(arguments) == 0
    assert [run["norm"] for run in report.read(tmp_path / "o")["runs"]] == [
        "none",
        "layer",
        "layer-0.3",
    ]
    assert "imdb, lstm, batch 2, 1 epoch, 1 seed" in capsys.readouterr().out
    assert main([*arguments, "--resume"]) == 0


@pytest.mark.slow
def test_words_have_the_vectors_that_come_with_the_reviews(tmp_path, capsys):
    write_imdb(tmp_path)
    arguments = [
        "compare",
        "imdb",
        "--data-dir",
        str(tmp_path),
        "--epochs",
        "1",
        "--batch-sizes",
        "2",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*arguments, "--variants", "rnn-glove", "--norms", "none"]) == 1
    assert (
        "embedding must be given with the data imdb: put its file into the same folder."
        in capsys.readouterr().err
    )
    vectors = np.random.default_rng(0).standard_normal((20_000, 50)).astype(np.float16)
    np.savez(tmp_path / "glove50_imdb20k.npz", emb=vectors)
    found = data_sequences.imdb(str(tmp_path))
    model = TASKS["imdb"].model("none", "rnn-glove", 0.9)
    _, parameters, stats = next(watched(Run("none", 2, 0, "rnn-glove", epochs=1), model, found, 10))
    np.testing.assert_array_equal(stats["embedding"], vectors)
    assert "Embed_0" not in parameters
    assert main([*arguments, "--variants", "rnn-glove", "--norms", "none"]) == 0


def test_what_is_wrong_with_reviews_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JAXNORM_DATA", raising=False)
    assert main(["compare", "imdb", "--out", str(tmp_path)]) == 1
    assert (
        "imdb.npz is needed: pass --data-dir the folder that holds it, or set JAXNORM_DATA"
        in capsys.readouterr().err
    )
    write_imdb(tmp_path, len_train=np.array([1, 2, 3, 4], np.uint16))
    assert main(["compare", "imdb", "--data-dir", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert (
        "must hold as many steps in x_train as len_train adds up to: got (261,), (4,)"
        in capsys.readouterr().err
    )
