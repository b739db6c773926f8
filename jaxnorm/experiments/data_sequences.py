"""Data sets of sequences: film reviews of IMDB, Japanese vowels, pen drawings, and a text by its
characters.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxnorm.experiments.data import DataError, Dataset, needed, read_npz, unlabelled

WORDS, LENGTH = 20_000, 200  # of the vocabulary; of a review, the rest of which is cut off
OTHER = 2  # stands for rarer words


def imdb(folder: str | None = None) -> Dataset:
    """25,000 + 25,000 film reviews (Maas et al. 2011), ``imdb.npz`` in ``folder``.

    The file holds the words of all reviews one after the other, ``x_train`` and ``x_test``, in
    Keras' numbering (1 is the start, 2 an unknown word), how many each has, ``len_*``, and labels
    ``y_*``. ``glove50_imdb20k.npz``, if it is there, has the words' vectors (Pennington et al.
    2014).
    """
    path, parts = Path(needed(folder, "imdb.npz")) / "imdb.npz", {}
    arrays = read_npz(
        path, tuple(f"{kind}_{part}" for part in ("train", "test") for kind in ("x", "len", "y"))
    )
    for part in ("train", "test"):
        words, lengths, labels = (arrays[f"{kind}_{part}"] for kind in ("x", "len", "y"))
        if words.ndim != 1 or lengths.shape != labels.shape:
            raise DataError(
                f"{path} must hold words (n,) and as many lengths as labels in {part}: got "
                f"{words.shape}, {lengths.shape}."
            )
        adding_up(path, part, words, lengths)
        parts[part] = _first_words(words, lengths), labels.astype(np.int32)
    vectors = path.with_name("glove50_imdb20k.npz")
    tables = (
        {"embedding": read_npz(vectors, ("emb",))["emb"].astype(np.float32)}
        if vectors.is_file()
        else {}
    )
    return Dataset("imdb", *parts["train"], *parts["test"], tables)


def _first_words(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The first words of each review, filled up with 0."""
    tokens, there = cut(words.astype(np.int32), lengths, LENGTH)
    tokens[tokens >= WORDS] = OTHER
    return np.where(there, tokens, 0).astype(np.int32)


def vowels(folder: str | None = None) -> Dataset:
    """270 + 370 utterances of a vowel by nine speakers, 12 coefficients a step,
    ``japanese_vowels.npz`` in ``folder``.

    (Kudo et al. 1999.) Those for training have at most 26 steps, those for testing up to 29.
    Coefficients are scaled by the training set's mean and deviation.
    """
    path, parts = Path(needed(folder, "japanese_vowels.npz")) / "japanese_vowels.npz", {}
    arrays = read_npz(
        path, tuple(f"{kind}_{part}" for part in ("train", "test") for kind in ("x", "len", "y"))
    )
    mean, deviation = arrays["x_train"].mean(0), arrays["x_train"].std(0)
    for part in ("train", "test"):
        x, lengths = (arrays["x_" + part] - mean) / deviation, arrays["len_" + part]
        adding_up(path, part, x, lengths)
        # by speaker otherwise, and so test batches
        order = np.random.default_rng(0).permutation(len(lengths))
        parts[part] = (
            ended(x, lengths, lengths.max())[order],
            arrays["y_" + part].astype(np.int32)[order],
        )
    return Dataset("vowels", *parts["train"], *parts["test"])


POINTS = 100  # of a drawing, the rest of which is cut off


def strokes(folder: str | None = None) -> Dataset:
    """30,000 + 1000 drawings of characters by pen, ``strokes_omniglot.npz`` in ``folder`` (Lake et
    al. 2015).

    A point is ``(dx, dy, lifted)``: where the pen went from the point before, in deviations of the
    training set, and whether it is lifted after it.
    """
    path = Path(needed(folder, "strokes_omniglot.npz")) / "strokes_omniglot.npz"
    arrays = read_npz(
        path, tuple(f"{kind}_{part}" for part in ("train", "test") for kind in ("x", "len"))
    )
    deviation = arrays["x_train"][:, :2].std()
    parts = []
    for part in ("train", "test"):
        x, lengths = (
            arrays["x_" + part].astype(np.float32)
            / np.array([deviation, deviation, 1], np.float32),
            arrays["len_" + part],
        )
        adding_up(path, part, x, lengths)
        parts.append(ended(x, lengths, POINTS))
    return unlabelled("strokes", *parts)


WINDOW = 100  # characters to predict, after one that is given


def text(folder: str | None = None) -> Dataset:
    """Shakespeare by its 65 characters in windows of 101, the last tenth for testing;
    ``tinyshakespeare.npz`` in ``folder``.
    """
    path = Path(needed(folder, "tinyshakespeare.npz")) / "tinyshakespeare.npz"
    characters = read_npz(path, ("text",))["text"]
    if characters.ndim != 1 or len(characters) < 20 * WINDOW:
        raise DataError(
            f"{path} must hold the text as {20 * WINDOW} bytes or more: got {characters.shape}."
        )
    alphabet, symbols = np.unique(characters, return_inverse=True)
    symbols = symbols.astype(np.int32)
    windows = [
        symbols[start : start + WINDOW + 1] for start in range(0, len(symbols) - WINDOW, WINDOW)
    ]
    count = len(windows) - len(windows) // 10
    return replace(
        unlabelled("text", np.stack(windows[:count]), np.stack(windows[count:])),
        tables={"alphabet": alphabet},
    )


def ended(values: np.ndarray, lengths: np.ndarray, time: int) -> np.ndarray:
    """Sequences that stand one after the other, ``(n, time, features)``, NaN from their ends on."""
    x, there = cut(values, lengths, time)
    return np.where(there[..., None], x, np.nan).astype(np.float32)


def cut(values: np.ndarray, lengths: np.ndarray, time: int) -> tuple[np.ndarray, np.ndarray]:
    """The first steps of sequences that stand one after the other, and which of them there are."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    at = starts[:, None] + np.arange(time)
    return values[np.minimum(at, len(values) - 1)], np.arange(time) < lengths[:, None]


def adding_up(path: Path, part: str, values: np.ndarray, lengths: np.ndarray) -> None:
    if lengths.sum(dtype=np.int64) != len(values):
        raise DataError(
            f"{path} must hold as many steps in x_{part} as len_{part} adds up to: got "
            f"{values.shape}, {lengths.shape}."
        )
