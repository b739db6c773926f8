"""Attributes of scalers in .npz and .json files; pickles are refused.

A ``StandardScaler`` of scikit-learn has no file of its own but a pickle. Its attributes fit into
one that is safe to read::

    np.savez("scaler.npz", mean_=s.mean_, var_=s.var_, scale_=s.scale_,
             n_samples_seen_=s.n_samples_seen_)

The attributes that :mod:`jaxnorm.data.formats.attributes` knows of Keras, Stable-Baselines3 and
Gymnasium are read as well.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.formats import attributes, documents
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.values import writable
from jaxnorm.data.formula import is_rounding

NAME = "sklearn"
PICKLES = (".pkl", ".pickle", ".joblib")
# the attributes by which each library's objects are told
NAMES = ({"n_samples_seen_"}, {"mean", "var", "count"}, {"mean", "variance"})


def recognizes(path: Path) -> bool:
    """Return whether a path is a file of attributes, or a pickle, which :func:`read` refuses."""
    path = Path(path)
    if path.suffix in PICKLES:
        return path.is_file()
    try:
        return path.is_file() and any(names <= set(_names(path)) for names in NAMES)
    except (OSError, FormatError):
        return False


def read(path: Path) -> Contents:
    """Read the attributes of a scaler from a .npz or .json file."""
    path = Path(path)
    if path.suffix in PICKLES:
        raise FormatError(
            f"{path} must be no pickle, which can run any program when it is loaded: it is one by "
            "its name. If you trust it, load it yourself, and pass the object to "
            "Normalizer.from_object."
        )
    held = _archive(path) if path.suffix == ".npz" else documents.load(path)
    if not isinstance(held, Mapping):
        raise FormatError(f"{path} must hold attributes by their names: it holds none.")
    try:
        return attributes.contents(held)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Write the attributes of a StandardScaler of one leaf to a .npz file.

    ``scale_`` is 1 where the variance is rounding.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise FormatError(f"the name of a scaler's file must end in .npz: got {str(path)!r}.")
    ((leaf, statistics), *others) = writable(
        leaves, "A StandardScaler", ("mean", "var", "count")
    ).items()
    if others:
        named = ", ".join(map(repr, leaves))
        raise FormatError(f"A StandardScaler must be of one leaf: got {named}.")
    if statistics.mean.ndim > 1:
        raise FormatError(
            f"A StandardScaler must have one axis of features: {leaf!r} has shape "
            f"{statistics.mean.shape}. Reshape the data."
        )
    constant = is_rounding(statistics.count, statistics.mean, statistics.var)
    found = {
        "mean_": statistics.mean,
        "var_": statistics.var,
        "scale_": np.where(constant, 1.0, np.sqrt(statistics.var)),
    }
    found = {name: np.atleast_1d(array) for name, array in found.items()}
    file = io.BytesIO()
    np.savez(file, n_samples_seen_=_seen(statistics.count), **found)
    files.placeable(path)
    files.replace({path: file.getvalue()})


def _seen(count: np.ndarray) -> Any:
    """Return the number of samples as scikit-learn keeps it: one, if all features have the same."""
    whole = count.astype(np.int64) if np.all(count % 1 == 0) else count
    return whole.flat[0] if np.all(whole == whole.flat[0]) else np.atleast_1d(whole)


def _names(path: Path) -> list[str]:
    if path.suffix == ".npz":
        with _opened(path) as archive:
            return list(archive.files)
    held = documents.load(path) if path.suffix == ".json" else None
    return list(held) if isinstance(held, dict) else []


def _archive(path: Path) -> dict[str, Any]:
    with _opened(path) as archive:
        return {name: archive[name] for name in archive.files}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open an archive, and refuse one that is damaged, when it is opened or read."""
    try:
        # np.load would leave a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    except (OSError, MemoryError):
        raise
    except Exception:
        # zipfile and NumPy raise errors of any type at damaged bytes
        raise FormatError(f"{path} must be an archive of arrays of numbers: it is none.") from None
