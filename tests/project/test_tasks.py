"""Test every task, its data as the files have them, and its losses against known values.

Every task also trains from the command line.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep

from jaxnorm.experiments import data, data_sequences, figures, report, samples
from jaxnorm.experiments.command import main
from jaxnorm.experiments.painter import SIDE, Painter, filters
from jaxnorm.experiments.sequences import ImageReader, permuted
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import Run, train
from jaxnorm.experiments.transformers import Denoiser, VisionTransformer, patches, waves
from jaxnorm.experiments.writers import MIXTURES, PenWriter, TextWriter, point_nats, sample_points

pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def ragged(rng, lengths, features, dtype=np.float32):
    return (10 * rng.standard_normal((sum(lengths), features))).astype(dtype)


@pytest.fixture(autouse=True, scope="module")
def _short_samples():
    """Drawings and texts of so few steps, and painters; not the networks, which are those that are
    compared. Curves are not rendered.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "DRAWN", 6)
        patch.setattr(samples, "TEXT_LENGTH", 20)
        # here, as scipy below: to collect all tests takes a worker less time
        from matplotlib.figure import Figure

        render = Figure.savefig
        patch.setattr(
            Figure,
            "savefig",
            lambda *given, **more: (
                given[1].touch() if "curves" in given[1].name else render(*given, **more)
            ),
        )
        patch.setitem(TASKS, "draw", replace(TASKS["draw"], model=partial(Painter, steps=2)))
        yield


@pytest.fixture
def folder(tmp_path, rng):
    """Small files of the layouts that are read."""
    few, longer = np.array([3, 7, 5, 4] * 4, np.uint8), np.array([2, 9, 5, 4], np.uint8)
    labels = {"y_train": np.arange(16) % 9, "y_test": np.arange(4)}
    x = {"x_train": ragged(rng, few, 12), "x_test": ragged(rng, longer, 12)}
    np.savez(tmp_path / "japanese_vowels.npz", **x, **labels, len_train=few, len_test=longer)
    long = np.array([150, 3, 20, 8], np.uint16)
    pens = {}
    for part in ("train", "test"):
        pens[f"x_{part}"] = np.concatenate(
            [ragged(rng, long, 2, np.int16), rng.integers(0, 2, (181, 1), np.int16)], 1
        )
        pens[f"len_{part}"] = long
    np.savez(tmp_path / "strokes_omniglot.npz", **pens)
    np.savez(tmp_path / "tinyshakespeare.npz", text=rng.integers(60, 90, 3000).astype(np.uint8))
    bits = rng.integers(0, 256, (8, 98), np.uint8)
    np.savez(tmp_path / "binarized_mnist.npz", train=bits, valid=bits[:4], test=bits[:4])
    images = {
        f"x_{part}": rng.integers(0, 256, (n, 28, 28), np.uint8)
        for part, n in (("train", 16), ("test", 4))
    }
    np.savez(tmp_path / "mnist.npz", **images, y_train=np.arange(16) % 10, y_test=np.arange(4))
    return tmp_path


def test_vowels_end_in_nan_and_may_be_longer_than_any_in_training(folder):
    found = data_sequences.vowels(str(folder))
    assert (found.train_inputs.shape, found.test_inputs.shape) == ((16, 7, 12), (4, 9, 12))
    assert sorted((~np.isnan(found.test_inputs[..., 0])).sum(1)) == [2, 4, 5, 9]
    there = found.train_inputs[~np.isnan(found.train_inputs)].reshape(-1, 12)
    np.testing.assert_allclose(there.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(there.std(0), 1, rtol=1e-5)


def test_drawings_are_cut_and_scaled_alike_in_both_directions(folder):
    found = data_sequences.strokes(str(folder)).train_inputs
    raw = np.load(folder / "strokes_omniglot.npz")["x_train"]
    assert (~np.isnan(found[..., 0])).sum(1).tolist() == [100, 3, 20, 8]
    np.testing.assert_allclose(found[1, :3, :2], raw[150:153, :2] / raw[:, :2].std(), rtol=1e-6)
    np.testing.assert_array_equal(found[1, :3, 2], raw[150:153, 2])


def test_a_text_is_told_once(folder):
    found = data_sequences.text(str(folder))
    symbols = np.unique(np.load(folder / "tinyshakespeare.npz")["text"], return_inverse=True)[1]
    assert (found.train_inputs.shape, found.test_inputs.shape) == ((27, 101), (2, 101))
    np.testing.assert_array_equal(
        np.concatenate([found.train_inputs[:, 1:], found.test_inputs[:, 1:]]).ravel(),
        symbols[1:2901],
    )


def test_bits_are_unpacked(folder):
    found = data.binarized(str(folder))
    assert found.train_inputs.shape == (12, 784)
    packed = np.load(folder / "binarized_mnist.npz")["train"]
    np.testing.assert_array_equal(
        np.packbits(found.train_inputs[:8].astype(np.uint8), axis=1), packed
    )


BROKEN = [
    (
        "vowels",
        "japanese_vowels.npz",
        {"len_train": np.full(16, 9, np.uint8)},
        "as many steps in x_train as len_train adds up to",
    ),
    (
        "draw",
        "binarized_mnist.npz",
        {"test": np.zeros((2, 784), np.uint8)},
        "rows of 98 bytes in test, of 784 bits: got (2, 784)",
    ),
    (
        "text",
        "tinyshakespeare.npz",
        {"text": np.zeros(10, np.uint8)},
        "must hold the text as 2000 bytes or more: got (10,)",
    ),
]


@pytest.mark.parametrize(
    ("task", "file", "change", "message"), BROKEN, ids=[row[0] for row in BROKEN]
)
def test_broken_files_are_told(task, file, change, message, folder, capsys, monkeypatch):
    np.savez(folder / file, **(dict(np.load(folder / file)) | change))
    assert main(["compare", task, "--data-dir", str(folder), "--out", str(folder / "o")]) == 1
    assert message in capsys.readouterr().err
    monkeypatch.delenv("JAXNORM_DATA", raising=False)
    assert main(["compare", task, "--out", str(folder / "o")]) == 1
    assert (
        f"{file} is needed: pass --data-dir the folder that holds it, or set JAXNORM_DATA"
        in capsys.readouterr().err
    )


SHORT = ["--epochs", "1", "--seeds", "2", "--train-examples", "8", "--norms", "layer"]
TRAINED = [
    "vowels --variants rnn",
    "text --variants gru",
    "handwriting --variants rnn",
    "draw",
    "pimnist",
]


@pytest.mark.parametrize("task", long_sweep(TRAINED, quick=()))
def test_a_task_trains_and_its_first_seed_shows_samples(task, folder, capsys):
    name, *options = task.split()
    arguments = [
        "compare",
        name,
        "--data-dir",
        str(folder),
        *options,
        *SHORT,
        "--batch-sizes",
        "4",
        "--out",
        str(folder / "o"),
    ]
    assert main(arguments) == 0
    runs = report.read(folder / "o")["runs"]
    for epoch in (run["epochs"][0] for run in runs):
        assert np.isfinite(list(epoch.values())).all()
        assert ("test_accuracy" in epoch) == (name in ("vowels", "pimnist"))
    shown = capsys.readouterr().out
    assert (TASKS[name].unit in shown) == (name in samples.KINDS)
    assert ["samples" in run for run in runs] == [name in samples.KINDS, False]
    if name in samples.KINDS:
        assert (folder / "o" / samples.SAMPLES).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_batch_norm_reads_utterances_longer_than_any_in_training(folder):
    """With the running statistics of the last step that training had; those of test batches are not
    kept.
    """
    task = TASKS["vowels"]
    found = train(
        Run("batch", 8, 0, "rnn", epochs=1), task.model("batch", "rnn", 0.5), task.load(str(folder))
    )
    assert set(found["epochs"][0]) == {
        "train_loss",
        "test_loss",
        "test_accuracy",
        "batch_test_loss",
        "batch_test_accuracy",
    }


@pytest.mark.slow
def test_three_batch_sizes_are_an_axis(tmp_path):
    arguments = [
        "compare",
        "--norms",
        "none",
        "--train-examples",
        "16",
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--batch-sizes",
        "8,4,2",
    ]
    assert main([*arguments, "--optimizer", "sgd", "--out", str(tmp_path)]) == 0
    assert (tmp_path / figures.SIZES).read_bytes().startswith(b"\x89PNG")
    assert report.read(tmp_path)["settings"]["optimizer"] == "sgd"


def of_zeros(model, inputs):
    """Outputs of a network whose parameters are all 0."""
    return jax.jit(partial(model.apply, evaluating=True))(
        constant(model, inputs), inputs, rngs={"noise": jax.random.key(0)}
    )


def test_a_writer_that_knows_nothing_needs_log2_of_the_symbols():
    text = jnp.asarray(np.random.default_rng(0).integers(0, 65, (3, 20)))
    np.testing.assert_allclose(of_zeros(TextWriter("layer"), text), np.log2(65), rtol=1e-6)


def test_a_pen_that_knows_nothing_expects_a_standard_normal(rng):
    points = rng.standard_normal((2, 5, 3)).astype(np.float32)
    points[..., 2] = 1
    points[1, 3:] = np.nan
    each = 0.5 * (points[..., :2] ** 2).sum(-1) + np.log(2 * np.pi) + np.log(2)
    np.testing.assert_allclose(
        of_zeros(PenWriter("layer"), jnp.asarray(points)), np.nansum(each, 1), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["whole", "attention"])
def test_a_painter_that_paints_nothing_needs_log_2_for_each_pixel(variant, rng):
    images = jnp.asarray(rng.integers(0, 2, (3, 784)).astype(np.float32))
    np.testing.assert_allclose(
        of_zeros(Painter("layer", variant, steps=2), images), 784 * np.log(2), rtol=1e-5
    )


def test_point_densities_are_those_of_scipy(rng):
    from scipy import stats

    outputs, points = rng.standard_normal((4, 6 * MIXTURES + 1)), rng.standard_normal((4, 3))
    points[:, 2] = [0, 1, 1, 0]
    found = point_nats(jnp.asarray(outputs, jnp.float32), jnp.asarray(points, jnp.float32))
    for row, point, nats in zip(outputs, points, found, strict=True):
        weight, x, y, log_x, log_y, skew = np.split(row[:-1], 6)
        weight, correlation = np.exp(weight) / np.exp(weight).sum(), 0.99 * np.tanh(skew)
        density = 0.0
        for w, mx, my, sx, sy, r in zip(
            weight, x, y, np.exp(log_x), np.exp(log_y), correlation, strict=True
        ):
            density += w * stats.multivariate_normal.pdf(
                point[:2], [mx, my], [[sx**2, r * sx * sy], [r * sx * sy, sy**2]]
            )
        lifted = 1 / (1 + np.exp(-row[-1]))
        truth = -np.log(density) - np.log(lifted if point[2] else 1 - lifted)
        assert float(nats) == pytest.approx(truth, abs=1e-4)


@pytest.mark.slow
def test_points_are_drawn_from_the_mixture_that_is_told(rng):
    """Mean, covariance and lifted pens of 40,000, next to those of the mixture; deviations of these
    are 0.005 or so.
    """
    outputs = 0.5 * rng.standard_normal(6 * MIXTURES + 1)
    points = np.asarray(
        sample_points(
            jax.random.key(0),
            jnp.broadcast_to(jnp.asarray(outputs, jnp.float32), (40_000, len(outputs))),
        )
    )
    weight, x, y, log_x, log_y, skew = np.split(outputs[:-1], 6)
    weight, means = np.exp(weight) / np.exp(weight).sum(), np.stack([x, y])
    deviations = np.exp([log_x, log_y])
    within = np.einsum("ik,jk->ijk", deviations, deviations)
    within[[0, 1], [1, 0]] *= 0.99 * np.tanh(skew)
    mean = means @ weight
    spread = within @ weight + np.einsum(
        "ik,jk,k->ij", means - mean[:, None], means - mean[:, None], weight
    )
    np.testing.assert_allclose(points[:, :2].mean(0), mean, atol=0.03)
    np.testing.assert_allclose(np.cov(points[:, :2].T), spread, atol=0.08)
    assert points[:, 2].mean() == pytest.approx(1 / (1 + np.exp(-outputs[-1])), abs=0.01)


def constant(model, inputs, **biases):
    """Variables of a network of zeros but for these biases of its last layers."""
    like = jax.eval_shape(
        partial(model.init, evaluating=True),
        {"params": jax.random.key(0), "noise": jax.random.key(0)},
        inputs,
    )
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    for name, bias in biases.items():
        params["params"][name]["bias"] = jnp.asarray(bias, jnp.float32)
    return params


@pytest.mark.slow
def test_networks_that_always_tell_the_same_make_it(folder):
    """A text of one symbol, drawings of one stroke to the right, images of one pixel."""
    text, pen, painter = TextWriter("layer"), PenWriter("layer"), Painter("layer", steps=2)
    symbols, points, images = (
        jnp.zeros((1, 5), jnp.int32),
        jnp.zeros((1, 5, 3)),
        jnp.zeros((1, SIDE**2)),
    )
    alphabet = data_sequences.text(str(folder))
    always = constant(text, symbols, Dense_0=1e4 * np.eye(65)[7])
    found = samples.KINDS["text"].sample(text, always, alphabet, 0)
    assert (
        found
        == [
            chr(alphabet.tables["alphabet"][0])
            + samples.TEXT_LENGTH * chr(alphabet.tables["alphabet"][7])
        ]
        * 3
    )
    told = np.repeat([0, 2, 0, -20, -20, 0], MIXTURES)
    found = samples.KINDS["handwriting"].sample(
        pen, constant(pen, points, Dense_0=[*told, -50]), alphabet, 0
    )
    assert found == [[[2, 0, 0]] * samples.DRAWN] * 8
    ink = np.where(np.arange(784) == 28, 10, -10)
    found = samples.KINDS["draw"].sample(painter, constant(painter, images, write=ink), alphabet, 0)
    assert found == ["0" * 28 + "9" + "0" * 755] * 8


@pytest.mark.parametrize(
    "task", long_sweep(["text --variants rnn", "handwriting --variants rnn", "draw"], quick=())
)
def test_a_network_that_diverged_is_shown_too(task, folder):
    """Blank images, drawings of nothing, any text; after steps of such a length no sampled number
    is finite.
    """
    arguments = [
        "compare",
        *task.split(),
        "--data-dir",
        str(folder),
        "--norms",
        "none",
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--batch-sizes",
        "2",
    ]
    task = task.split()[0]
    assert (
        main(
            [
                *arguments,
                "--optimizer",
                "sgd",
                "--learning-rate",
                "1e30",
                "--out",
                str(folder / "o"),
            ]
        )
        == 0
    )
    found = report.read(folder / "o")["runs"][0]["samples"]
    assert (
        found == [{"draw": "0" * 784, "handwriting": []}[task]] * 8
        if task != "text"
        else list(map(len, found)) == [samples.TEXT_LENGTH + 1] * 3
    )
    assert (folder / "o" / samples.SAMPLES).read_bytes().startswith(b"\x89PNG")


def test_filters_look_where_they_are_told():
    """At the middle with the whole image between the outermost filters, and one pixel wide, at (11,
    17).
    """
    whole = jnp.zeros((1, 5))
    along_y, along_x, intensity = filters(whole, 5)
    assert float(intensity[0, 0]) == 1
    np.testing.assert_allclose(along_x.sum(-1), 1, rtol=1e-6)
    center = (SIDE + 1) / 2
    assert float((along_x[0, 2] * jnp.arange(SIDE)).sum()) == pytest.approx(center, abs=1e-3)
    narrow = jnp.array([[17 / center - 1, 11 / center - 1, -6.0, -9.0, 0.0]])
    along_y, along_x, _ = filters(narrow, 5)
    assert along_y[0].argmax(-1).tolist() == [11] * 5
    assert along_x[0].argmax(-1).tolist() == [17] * 5


@pytest.mark.slow
def test_layer_norm_tells_the_brightness_of_pixels_that_are_embedded_alone(rng):
    """Of a single number it keeps the sign; epsilon tells the rest."""
    images = jnp.asarray(rng.uniform(0.5, 1, (2, 8, 8, 1)).astype(np.float32))

    def change(variant):
        model = ImageReader(norm="layer", variant=variant)
        variables = jax.jit(partial(model.init, evaluating=True))(jax.random.key(0), images)
        told = jax.jit(partial(model.apply, evaluating=True))
        return float(
            np.abs(
                np.asarray(told(variables, images)) - np.asarray(told(variables, images / 2))
            ).max()
        )

    assert change("lstm-pixels") < 1e-3
    assert change("lstm-embedded") > 0.1


def test_the_order_of_permuted_pixels_is_the_same_for_all(rng):
    pixels = jnp.asarray(rng.standard_normal((2, 64, 1)))
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(permuted(pixels), pixels[:, order])
    np.testing.assert_array_equal(jnp.sort(permuted(pixels), 1), jnp.sort(pixels, 1))


@pytest.mark.parametrize("cell", long_sweep(["lstm", "gru", "rnn"], quick=["rnn"]))
def test_blank_margins_do_not_make_the_gradients_of_batch_norm_explode(cell, rng):
    """In them all images are equal but for one, and so were all states: noise at the start takes
    the variance from 0.
    """
    blank = rng.random((32, 14, 14, 1), np.float32)
    blank[:, :7] = 0
    faint = blank.copy()
    faint[0, 1:7, 5] = 1e-3
    model = ImageReader("batch", f"{cell}-pixels", features=8)
    variables = jax.jit(partial(model.init, evaluating=True))(
        {"params": jax.random.key(0), "noise": jax.random.key(1)}, blank
    )

    @jax.jit
    @jax.grad
    def gradient(params, images):
        given = {**variables, "params": params}
        return (
            model.apply(
                given,
                images,
                evaluating=False,
                mutable=["batch_stats"],
                rngs={"noise": jax.random.key(2)},
            )[0]
            ** 2
        ).sum()

    of_blank, of_faint = (gradient(variables["params"], images) for images in (blank, faint))
    sizes = [
        max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(of))
        for of in (of_blank, of_faint)
    ]
    # without noise 3e11, 2e30, and of the LSTM a tenth
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


def parameters(model, inputs):
    """The shapes of its parameters by their paths."""
    like = jax.eval_shape(partial(model.init, evaluating=True), jax.random.key(0), inputs)
    leaves = jax.tree_util.tree_leaves_with_path(like["params"])
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def norms_in(shapes):
    """The names of the modules that have a scale, an alpha or a modulation."""
    return {
        path.rpartition("/")[0].removesuffix("/modulation")
        for path in shapes
        if path.endswith(("scale", "alpha", "modulation/kernel"))
    }


def test_a_transformer_has_a_norm_before_each_part_and_after_the_last():
    images = jnp.zeros((2, 8, 8))
    for name, module in (
        ("layer", "LayerNorm"),
        ("rms", "RMSNorm"),
        ("dynamic_tanh", "DynamicTanh"),
    ):
        found = parameters(VisionTransformer(name, "vit"), images)
        assert norms_in(found) == {f"{module}_{i}" for i in range(5)}
        assert found[f"{module}_0/scale"] == (32,)
    assert norms_in(parameters(VisionTransformer("none", "vit"), images)) == set()
    found = parameters(VisionTransformer("none", "vit-qk"), images)
    assert norms_in(found) == {
        f"Attention_{i}/QKNorm_0/{part}_norm" for i in range(2) for part in "qk"
    }
    assert found["Attention_0/QKNorm_0/q_norm/scale"] == (8,)


def test_the_condition_enters_by_the_norms_or_as_a_token():
    digits = jnp.zeros((2, 65))
    zero, ada, token = (
        parameters(Denoiser("rms", way), digits) for way in ("zero", "ada", "token")
    )
    last = {"AdaLayerNorm_0"}
    assert norms_in(zero) == {f"AdaLayerNormZero_{i}" for i in range(4)} | last
    assert norms_in(ada) == {f"AdaLayerNorm_{i}" for i in range(5)}
    assert norms_in(token) == {f"RMSNorm_{i}" for i in range(5)}
    assert zero["AdaLayerNormZero_0/modulation/kernel"] == (32, 96)
    assert ada["AdaLayerNorm_0/modulation/kernel"] == (32, 64)


def test_patches_are_squares_of_four_pixels():
    images = jnp.arange(64).reshape(1, 8, 8)
    found = np.asarray(patches(images)[0])
    assert found.shape == (16, 4)
    assert found[[0, 1, 15]].tolist() == [[0, 1, 8, 9], [2, 3, 10, 11], [54, 55, 62, 63]]


def test_waves_of_a_quarter_turn():
    found = np.asarray(waves(jnp.full((1, 1), jnp.pi / 2))[0])
    np.testing.assert_allclose(found[:4], [1, 0, -1, 0], atol=1e-6)
    np.testing.assert_allclose(found[16:20], [0, -1, 0, 1], atol=1e-6)


def test_digits_come_with_their_labels():
    plain, told = data.small_digits(), data.digits_with_labels()
    assert told.train_inputs.shape == (1437, 65)
    np.testing.assert_array_equal(told.test_inputs[:, -1], plain.test_labels)
    np.testing.assert_array_equal(
        told.test_inputs[:, :-1], 2 * plain.test_inputs.reshape(360, 64) - 1
    )


def test_a_denoiser_starts_at_the_mean_square_of_the_noise():
    """It predicts 0, and the noise of 400 x 64 pixels has a mean square of 1 +- 0.01."""
    model, digits = Denoiser("layer", "zero"), jnp.zeros((400, 65))
    assert float(of_zeros(model, digits).mean()) == pytest.approx(1, abs=0.05)


TRANSFORMERS = [
    *(("vit", variant, "layer") for variant in ("vit", "vit-qk")),
    *(("vit", "vit", norm) for norm in TASKS["vit"].variants["vit"] if norm != "layer"),
    *(("denoise", variant, "layer") for variant in ("zero", "ada", "token")),
]


@pytest.mark.parametrize(
    ("task", "variant", "norm"),
    long_sweep(TRANSFORMERS, quick=[("vit", "vit-qk", "layer")]),
)
def test_transformers_train(task, variant, norm):
    task = TASKS[task]
    found = train(
        Run(norm, 32, 0, variant, epochs=10, learning_rate=3e-3),
        replace(task.model(norm, variant, 0.9), blocks=1),
        task.load(None).first(160),
        losses=task.losses,
    )
    losses = [epoch["train_loss"] for epoch in found["epochs"]]
    assert losses[-1] < 0.95 * losses[0]
