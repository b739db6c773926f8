"""Load data sets of images.

These are scikit-learn's handwritten digits, which are part of that library, MNIST, and
MNIST binarized.
"""

import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

# names the folder of data files where --data-dir is not given
VARIABLE = "JAXNORM_DATA"


class DataError(Exception):
    """Raised where data are not available. The message says what to do."""


@dataclass(frozen=True)
class Dataset:
    """A data set: training and test inputs, and labels ``(n,)`` of int32.

    Images are ``(n, height, width, 1)`` of float32 in [0, 1], texts ``(n, symbols)`` of
    int32. Other sequences are ``(n, time, features)`` of float32, and NaN after their
    end. Training and test sequences may differ in ``time``.

    Attributes:
      name: the name of the data set.
      train_inputs: the inputs for training.
      train_labels: their labels.
      test_inputs: the inputs for testing.
      test_labels: their labels.
      tables: arrays that a network may read besides its parameters, by the names of its
        variables.
    """

    name: str
    train_inputs: np.ndarray
    train_labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)

    def first(self, count: int | None) -> "Dataset":
        """Return the data set with the first ``count`` training examples, or with all for None."""
        return replace(
            self, train_inputs=self.train_inputs[:count], train_labels=self.train_labels[:count]
        )

    def with_batches_of(self, size: int) -> "Dataset":
        """Return the data set itself if it has enough training examples for a batch.

        Raises:
          DataError: the batch size exceeds the number of training examples.
        """
        if size > len(self.train_inputs):
            raise DataError(
                f"batch size {size} is larger than the {len(self.train_inputs)} training examples."
            )
        return self


def unlabelled(name: str, train: np.ndarray, test: np.ndarray) -> Dataset:
    """Return a data set of inputs alone, whose labels are all 0."""
    return Dataset(name, train, np.zeros(len(train), np.int32), test, np.zeros(len(test), np.int32))


def require_folder(folder: str | None, file: str) -> str:
    """Return the folder of a file that this library cannot download.

    Raises:
      DataError: neither the argument nor the environment names a folder.
    """
    folder = folder_of(folder)
    if folder is None:
        raise DataError(
            f"{file} is needed: pass --data-dir the folder that holds it, or set {VARIABLE}."
        )
    return folder


def folder_of(folder: str | None) -> str | None:
    """Return the folder of data files: the argument, or the variable ``JAXNORM_DATA``, or None."""
    return folder or os.environ.get(VARIABLE)


def digits(folder: str | None = None) -> Dataset:
    """Return scikit-learn's 1797 digits, every fifth for testing.

    Their 8 x 8 pixels are enlarged to 16 x 16, with a margin of 2, so that LeNet can
    process them.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # of 20 x 20 pixels LeNet's two unpadded 5 x 5 convolutions, each with a pooling by
    # 2, leave 2 x 2 positions; of 8 x 8 nothing
    images = images.reshape(-1, 8, 8).repeat(2, 1).repeat(2, 2) / 16
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return _shuffled("digits", images, labels)


def small_digits(folder: str | None = None) -> Dataset:
    """Return scikit-learn's digits with 8 x 8 pixels, split as in :func:`digits`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return _shuffled("digits", images.reshape(-1, 8, 8) / 16, labels)


def digits_with_labels(folder: str | None = None) -> Dataset:
    """Return digits ``(n, 65)`` for networks that are told which digit to make.

    They are the 64 pixels of :func:`small_digits` in [-1, 1] and the label, in this order.
    """
    found = small_digits(folder)

    def told(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        pixels = 2 * images.reshape(len(images), -1) - 1
        return np.concatenate([pixels, labels[:, None]], 1, dtype=np.float32)

    return replace(
        found,
        train_inputs=told(found.train_inputs, found.train_labels),
        test_inputs=told(found.test_inputs, found.test_labels),
    )


def mnist(folder: str | None = None) -> Dataset:
    """Return the 60,000 + 10,000 digits of MNIST, of 28 x 28 pixels.

    They come from ``mnist.npz`` in ``folder``, or without a folder from OpenML by
    scikit-learn.

    Raises:
      DataError: the file is missing or does not fit, or the download failed.
    """
    folder = folder_of(folder)
    if folder is None:
        # OpenML stores the 60,000 training images in front of the 10,000 for testing
        images, labels = _fetch_mnist()
        test = np.arange(len(images)) >= 60_000
    else:
        arrays = read_npz(Path(folder) / "mnist.npz", ("x_train", "y_train", "x_test", "y_test"))
        images = np.concatenate([arrays["x_train"], arrays["x_test"]])
        labels = np.concatenate([arrays["y_train"], arrays["y_test"]])
        test = np.arange(len(images)) >= len(arrays["x_train"])
        if images.shape[1:] != (28, 28) or labels.shape != (len(images),):
            raise DataError(
                f"{folder}/mnist.npz must hold images (n, 28, 28) and labels (n,): got "
                f"{images.shape} and {labels.shape}."
            )
    return _dataset("mnist", images.reshape(-1, 28, 28) / 255, labels, test)


def binarized(folder: str | None = None) -> Dataset:
    """Return 60,000 + 10,000 digits of MNIST whose pixels were sampled as 0 or 1.

    They come from ``binarized_mnist.npz`` in ``folder``, in rows of packed bits.

    Raises:
      DataError: the file is missing or does not fit.
    """
    path = Path(require_folder(folder, "binarized_mnist.npz")) / "binarized_mnist.npz"
    arrays = read_npz(path, ("train", "valid", "test"))
    for name, rows in arrays.items():
        if rows.ndim != 2 or rows.shape[1] != 98:
            raise DataError(
                f"{path} must hold rows of 98 bytes in {name}, of 784 bits: got {rows.shape}."
            )
    bits = {name: np.unpackbits(rows, axis=1).astype(np.float32) for name, rows in arrays.items()}
    return unlabelled(
        "binarized mnist", np.concatenate([bits["train"], bits["valid"]]), bits["test"]
    )


def _shuffled(name: str, images: np.ndarray, labels: np.ndarray) -> Dataset:
    """Return the images in a fixed random order, every fifth for testing."""
    # a fixed seed: every run of every comparison has the same test set
    order = np.random.default_rng(0).permutation(len(images))
    return _dataset(name, images[order], labels[order], np.arange(len(images)) % 5 == 0)


def _dataset(name: str, images: np.ndarray, labels: np.ndarray, test: np.ndarray) -> Dataset:
    """Return the data set of these images, whose test images a mask selects."""
    images, labels = images.astype(np.float32)[..., None], labels.astype(np.int32)
    return Dataset(name, images[~test], labels[~test], images[test], labels[test])


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the named arrays of a file.

    Raises:
      DataError: the file is missing, damaged or unreadable, or lacks one of the arrays.
    """
    if not path.is_file():
        raise DataError(
            f"there is no file {path}: put {path.name} there, or pass --data-dir the folder that "
            "holds it."
        )
    try:
        # np.load would take a file that is no archive for a pickle, and its error would
        # advise to allow pickles
        with path.open("rb") as file, zipfile.ZipFile(file):
            pass
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _array(path, arrays, name) for name in names}
    except KeyError as error:
        raise DataError(
            f"{path} must hold the arrays {', '.join(names)}: {error.args[0]}. Is it another file "
            "of that name?"
        ) from None
    except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        raise DataError(
            f"{path} is damaged or incomplete: delete it, and download it again."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}): let it be read, or download it "
            "again."
        ) from None


def _array(path: Path, arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Read one array, and refuse Python objects in words."""
    try:
        return arrays[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
    raise DataError(
        f"{path} must hold arrays of numbers: {name} holds Python objects. Is it another file of "
        "that name?"
    )


def _fetch_mnist() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import fetch_openml

    try:
        # each retry warns, and the error below says all of it
        with warnings.catch_warnings(action="ignore"):
            return fetch_openml(
                "mnist_784",
                version=1,
                return_X_y=True,
                as_frame=False,
                parser="liac-arff",
                n_retries=1,
            )
    # URLError is an OSError, and scikit-learn reports some failures of OpenML as
    # ValueError
    except (OSError, ValueError) as error:
        raise DataError(
            f"MNIST is not on this machine and could not be fetched ({error}): "
            "download mnist.npz (Keras format) and pass --data-dir the folder that holds it, or "
            f"set {VARIABLE}."
        ) from None
