"""Data sets of images: scikit-learn's handwritten digits (embedded), MNIST, and MNIST binarized."""

import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

VARIABLE = "JAXNORM_DATA"  # the folder of data files, where --data-dir is not given


class DataError(Exception):
    """Data that cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels ``(n,)`` int32.

    Images are ``(n, height, width, 1)`` float32 in [0, 1], texts ``(n, symbols)`` int32, and other
    sequences ``(n, time, features)`` float32, NaN where they have ended; training and test
    sequences may differ in time. ``tables`` are what a network may be given beside its parameters,
    by the names of its variables.
    """

    name: str
    train_inputs: np.ndarray
    train_labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)

    def first(self, count: int | None) -> "Dataset":
        """The same with only ``count`` training examples."""
        return replace(
            self, train_inputs=self.train_inputs[:count], train_labels=self.train_labels[:count]
        )

    def with_batches_of(self, size: int) -> "Dataset":
        """Itself.

        Raises:
          DataError: there are not so many training examples.
        """
        if size > len(self.train_inputs):
            raise DataError(
                f"batch size {size} is larger than the {len(self.train_inputs)} training examples."
            )
        return self


def unlabelled(name: str, train: np.ndarray, test: np.ndarray) -> Dataset:
    """Of inputs alone: labels are 0."""
    return Dataset(name, train, np.zeros(len(train), np.int32), test, np.zeros(len(test), np.int32))


def needed(folder: str | None, file: str) -> str:
    """The folder of a file that cannot be fetched.

    Raises:
      DataError: none is known.
    """
    folder = folder_of(folder)
    if folder is None:
        raise DataError(
            f"{file} is needed: pass --data-dir the folder that holds it, or set {VARIABLE}."
        )
    return folder


def folder_of(folder: str | None) -> str | None:
    """Where data files are: as given, or as the environment variable ``JAXNORM_DATA`` says."""
    return folder or os.environ.get(VARIABLE)


def digits(folder: str | None = None) -> Dataset:
    """1797 digits of 8 x 8 pixels, every fifth for testing, enlarged to 16 x 16 in a margin of 2 so
    that LeNet fits.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).repeat(2, 1).repeat(2, 2) / 16
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return _shuffled("digits", images, labels)


def small_digits(folder: str | None = None) -> Dataset:
    """The same digits and split as they are, 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return _shuffled("digits", images.reshape(-1, 8, 8) / 16, labels)


def mnist(folder: str | None = None) -> Dataset:
    """60,000 + 10,000 digits of 28 x 28 pixels, from ``mnist.npz`` in ``folder`` or fetched by
    scikit-learn.
    """
    folder = folder_of(folder)
    if folder is None:
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
    """60,000 + 10,000 digits whose pixels were drawn as 0 or 1, ``binarized_mnist.npz`` in
    ``folder``: rows of packed bits.
    """
    path = Path(needed(folder, "binarized_mnist.npz")) / "binarized_mnist.npz"
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
    order = np.random.default_rng(0).permutation(len(images))
    return _dataset(name, images[order], labels[order], np.arange(len(images)) % 5 == 0)


def _dataset(name: str, images: np.ndarray, labels: np.ndarray, test: np.ndarray) -> Dataset:
    images, labels = images.astype(np.float32)[..., None], labels.astype(np.int32)
    return Dataset(name, images[~test], labels[~test], images[test], labels[test])


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The named arrays of a file.

    Raises:
      DataError: there is no such file, or it does not hold them.
    """
    if not path.is_file():
        raise DataError(
            f"there is no file {path}: put {path.name} there, or pass --data-dir the folder that "
            "holds it."
        )
    try:
        # NumPy would take something else for a pickle
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
        with warnings.catch_warnings(action="ignore"):  # of retries
            return fetch_openml(
                "mnist_784",
                version=1,
                return_X_y=True,
                as_frame=False,
                parser="liac-arff",
                n_retries=1,
            )
    # URLError is an OSError; openml answers some failures as ValueError
    except (OSError, ValueError) as error:
        raise DataError(
            f"MNIST is not on this machine and could not be fetched ({error}): "
            "download mnist.npz (Keras format) and pass --data-dir the folder that holds it, or "
            f"set {VARIABLE}."
        ) from None
