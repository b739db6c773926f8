"""Data sets: scikit-learn's handwritten digits (embedded) and MNIST."""

import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIABLE = "JAXNORM_DATA"  # the folder of data files, where --data-dir is not given


class DataError(Exception):
    """Data that cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Dataset:
    """Images ``(n, height, width, 1)`` float32 in [0, 1] and labels ``(n,)`` int32 in 0..9."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def first(self, count: int | None) -> "Dataset":
        """The same with only ``count`` training examples."""
        return Dataset(self.name, self.train_images[:count], self.train_labels[:count], self.test_images, self.test_labels)


def load(name: str, folder: str | None = None) -> Dataset:
    """The data set of that name.

    Args:
      name: one of :data:`LOADERS`.
      folder: where data files are; the environment variable ``JAXNORM_DATA`` by default.

    Raises:
      DataError: unknown name, missing or unreadable file, no network.
    """
    if name not in LOADERS:
        raise DataError(f"unknown data set {name!r}: choose from {', '.join(LOADERS)}.")
    return LOADERS[name](folder or os.environ.get(VARIABLE))


def digits(folder: str | None = None) -> Dataset:
    """1797 digits of 8 x 8 pixels, every fifth for testing, enlarged to 16 x 16 in a margin of 2 so that LeNet fits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).repeat(2, 1).repeat(2, 2) / 16
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(images))
    test = np.arange(len(images)) % 5 == 0
    return _dataset("digits", images[order], labels[order], test)


def mnist(folder: str | None = None) -> Dataset:
    """60,000 + 10,000 digits of 28 x 28 pixels, from ``mnist.npz`` in ``folder`` or fetched by scikit-learn."""
    if folder is None:
        images, labels = _fetch_mnist()
        test = np.arange(len(images)) >= 60_000
    else:
        arrays = _read_npz(Path(folder) / "mnist.npz", ("x_train", "y_train", "x_test", "y_test"))
        images = np.concatenate([arrays["x_train"], arrays["x_test"]])
        labels = np.concatenate([arrays["y_train"], arrays["y_test"]])
        test = np.arange(len(images)) >= len(arrays["x_train"])
        if images.shape[1:] != (28, 28) or labels.shape != (len(images),):
            raise DataError(f"{folder}/mnist.npz must hold images (n, 28, 28) and labels (n,): got {images.shape} and {labels.shape}.")
    return _dataset("mnist", images.reshape(-1, 28, 28) / 255, labels, test)


LOADERS = {"digits": digits, "mnist": mnist}


def _dataset(name: str, images: np.ndarray, labels: np.ndarray, test: np.ndarray) -> Dataset:
    images, labels = images.astype(np.float32)[..., None], labels.astype(np.int32)
    return Dataset(name, images[~test], labels[~test], images[test], labels[test])


def _read_npz(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(f"there is no file {path}: put {path.name} (Keras format) there, or pass --data-dir the folder that holds it.")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except KeyError as error:
        raise DataError(f"{path} must hold the arrays {', '.join(names)}: {error.args[0]}. Is it the Keras-format file?") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as an .npz file ({error}): download it again.") from None


def _fetch_mnist() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import fetch_openml

    try:
        with warnings.catch_warnings(action="ignore"):  # of retries
            return fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False, parser="liac-arff", n_retries=1)
    except (OSError, ValueError) as error:  # URLError is an OSError; openml answers some failures as ValueError
        raise DataError(
            f"MNIST is not on this machine and could not be fetched ({error}): "
            f"download mnist.npz (Keras format) and pass --data-dir the folder that holds it, or set {VARIABLE}."
        ) from None
