"""Load data sets of sequences.

These are film reviews of IMDB, Japanese vowels, pen drawings, and a text by its
characters.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxnorm.experiments.data import DataError, Dataset, read_npz, require_folder, unlabelled

# words of the vocabulary, and words of a review, which is cut off after so many
WORDS, LENGTH = 20_000, 200
# stands for rarer words
OTHER = 2


def imdb(folder: str | None = None) -> Dataset:
    """Return 25,000 + 25,000 film reviews (Maas et al. 2011), from ``imdb.npz`` in ``folder``.

    In the file, ``x_train`` and ``x_test`` hold the words of all reviews one after the
    other, in Keras' numbering: 1 is the start, 2 an unknown word. ``len_*`` are the
    numbers of words of each review, and ``y_*`` the labels. If the folder also has
    ``glove50_imdb20k.npz``, the data set includes the word vectors in it (Pennington et
    al. 2014).

    Raises:
      DataError: a file is missing or does not fit.
    """
    path, parts = Path(require_folder(folder, "imdb.npz")) / "imdb.npz", {}
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
        check_lengths(path, part, words, lengths)
        parts[part] = _first_words(words, lengths), labels.astype(np.int32)
    vectors = path.with_name("glove50_imdb20k.npz")
    tables = (
        {"embedding": read_npz(vectors, ("emb",))["emb"].astype(np.float32)}
        if vectors.is_file()
        else {}
    )
    return Dataset("imdb", *parts["train"], *parts["test"], tables)


def _first_words(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first words of each review, padded with 0."""
    tokens, present = take_steps(words.astype(np.int32), lengths, LENGTH)
    tokens[tokens >= WORDS] = OTHER
    return np.where(present, tokens, 0).astype(np.int32)


def vowels(folder: str | None = None) -> Dataset:
    """Return utterances of a vowel by nine speakers: 270 for training and 370 for testing.

    The data (Kudo et al. 1999) come from ``japanese_vowels.npz`` in ``folder``. A step
    has 12 coefficients. Training utterances have at most 26 steps, test utterances up
    to 29. Coefficients are normalized by the mean and the deviation of the training
    set.

    Raises:
      DataError: the file is missing or does not fit.
    """
    path, parts = Path(require_folder(folder, "japanese_vowels.npz")) / "japanese_vowels.npz", {}
    arrays = read_npz(
        path, tuple(f"{kind}_{part}" for part in ("train", "test") for kind in ("x", "len", "y"))
    )
    mean, deviation = arrays["x_train"].mean(0), arrays["x_train"].std(0)
    for part in ("train", "test"):
        x, lengths = (arrays["x_" + part] - mean) / deviation, arrays["len_" + part]
        check_lengths(path, part, x, lengths)
        # the file is sorted by speaker, so that unshuffled test batches, and their
        # statistics, would be of few speakers each
        order = np.random.default_rng(0).permutation(len(lengths))
        parts[part] = (
            pad_with_nan(x, lengths, lengths.max())[order],
            arrays["y_" + part].astype(np.int32)[order],
        )
    return Dataset("vowels", *parts["train"], *parts["test"])


# points of a drawing, which is cut off after so many
POINTS = 100


def strokes(folder: str | None = None) -> Dataset:
    """Return 30,000 + 1000 pen drawings of characters (Lake et al. 2015).

    They come from ``strokes_omniglot.npz`` in ``folder``. A point is ``(dx, dy,
    lifted)``: the step from the previous point, in deviations of the training set, and
    whether the pen is lifted after the point.

    Raises:
      DataError: the file is missing or does not fit.
    """
    path = Path(require_folder(folder, "strokes_omniglot.npz")) / "strokes_omniglot.npz"
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
        check_lengths(path, part, x, lengths)
        parts.append(pad_with_nan(x, lengths, POINTS))
    return unlabelled("strokes", *parts)


# characters to predict in each window, after one that is given
WINDOW = 100


def text(folder: str | None = None) -> Dataset:
    """Return Shakespeare by its 65 characters, in windows of 101, the last tenth for testing.

    The text comes from ``tinyshakespeare.npz`` in ``folder``.

    Raises:
      DataError: the file is missing or does not fit.
    """
    path = Path(require_folder(folder, "tinyshakespeare.npz")) / "tinyshakespeare.npz"
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


def pad_with_nan(values: np.ndarray, lengths: np.ndarray, time: int) -> np.ndarray:
    """Return concatenated sequences as ``(n, time, features)``, with NaN after their ends."""
    x, present = take_steps(values, lengths, time)
    return np.where(present[..., None], x, np.nan).astype(np.float32)


def take_steps(values: np.ndarray, lengths: np.ndarray, time: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first steps of concatenated sequences, and a mask of the steps that exist."""
    # int64: the sum of unsigned lengths would be uint64, and its sum with arange a
    # float
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    at = starts[:, None] + np.arange(time)
    # positions beyond the last sequence are clipped, since the mask hides them anyway
    return values[np.minimum(at, len(values) - 1)], np.arange(time) < lengths[:, None]


def check_lengths(path: Path, part: str, values: np.ndarray, lengths: np.ndarray) -> None:
    """Check that the lengths of a part add up to the number of its steps.

    Raises:
      DataError: they do not.
    """
    if lengths.sum(dtype=np.int64) != len(values):
        raise DataError(
            f"{path} must hold as many steps in x_{part} as len_{part} adds up to: got "
            f"{values.shape}, {lengths.shape}."
        )
