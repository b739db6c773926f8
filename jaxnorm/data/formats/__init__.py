"""Files of statistics of other libraries, recognized, read and written; nothing is unpickled."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxnorm.data import files
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics, tree_of

__all__ = [
    "FORMATS",
    "WRITABLE",
    "Contents",
    "FormatError",
    "Statistics",
    "check_replaceable",
    "check_target",
    "of_object",
    "ranks",
    "read",
    "recognize",
    "write",
]

# The module of each format, which has recognizes(path), read(path) and write(path, leaves). Some
# have target(path), the file of its own name in a folder; ALONE, a pattern of names of files that
# are written instead of a folder; check(path), which refuses a path that cannot be written; and
# QUANTILES, the ranks of the quantiles that its own programs write, by their keys if there are.
FORMATS = {
    "openpi": "openpi",
    "octo": "octo",
    "openvla": "openvla",
    "lerobot": "lerobot",
    "lerobot_policy": "lerobot_policy",
    "brax": "brax",
    "graphcast": "graphcast",
    "makani": "makani",
    "sklearn": "sklearn",
}
# A policy's statistics come within its weights, and are not written.
WRITABLE = tuple(name for name in FORMATS if name != "lerobot_policy")
# Formats that say how many episodes there are, which notes tell.
OF_EPISODES = ("octo", "openvla")
# The suffix of each format that is a file; the other ones are folders.
SUFFIXES = {
    "openpi": ".json",
    "octo": ".json",
    "openvla": ".json",
    "lerobot": ".json",
    "sklearn": ".npz",
}
# Suffixes of data and statistics, which no folder of statistics has.
OF_FILES = frozenset(
    {".csv", ".h5", ".hdf5", ".json", ".jsonl", ".nc", ".nc4", ".npy", ".npz", ".parquet", ".pq"}
    | {".joblib", ".msgpack", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".zarr", ".zip"}
)


def recognize(path: Path) -> str | None:
    """Return the name of the format that a file or folder has, or None if it is none of these."""
    files.check_local(path)
    return next((name for name in FORMATS if module(name).recognizes(path)), None)


def read(path: Path, name: str) -> Contents:
    """Read a file of statistics in the named format."""
    files.check_local(path)
    found = module(name).read(path)
    try:
        tree_of(list(found.leaves))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    return found


def of_object(held: Any, *, without_prior: bool = False) -> Contents:
    """Return the statistics of a live object of another library, or of a mapping of its fields."""
    get = held.get if isinstance(held, Mapping) else lambda name: getattr(held, name, None)
    # brax alone keeps deviations, which scikit-learn, Keras and Stable-Baselines3 compute
    if get("mean") is not None and get("std") is not None and not without_prior:
        return import_module(f"{__name__}.brax").contents(held)
    return import_module(f"{__name__}.attributes").contents(held, without_prior=without_prior)


def ranks(name: str) -> tuple[float, ...]:
    """Return the ranks of the quantiles that the own programs of a format write."""
    found = getattr(module(name), "QUANTILES", ())
    return tuple(found.values() if isinstance(found, Mapping) else found)


def write(
    path: Path, leaves: dict[str, Statistics], name: str, notes: tuple[str, ...] = ()
) -> None:
    """Write a file of statistics in the named format; some say what ``notes`` say."""
    check_target(path, name)
    module(name).write(path, leaves, *([notes] if name in OF_EPISODES else []))


def check_target(path: Path, name: str) -> None:
    """Refuse a path to which the format cannot be written, before a long fit begins.

    The folder that the path lies in may be missing, as it can be made.

    Raises:
      FormatError: the suffix is another one; a file is there that holds no statistics.
      OSError: a file is there, and the format is a folder, or the other way round; a folder is
        there that must be new, or cannot be written to.
      ModuleNotFoundError: the format needs a library that is missing.
    """
    writer = module(name)
    files.check_local(path)
    if name not in WRITABLE:
        # the module itself refuses to write
        return
    suffix = SUFFIXES.get(name)
    if suffix is None:
        own = hasattr(writer, "ALONE") and bool(writer.ALONE.fullmatch(path.name))
        if path.suffix.lower() in OF_FILES and not own:
            raise FormatError(
                f"the name of a folder of {name!r} must not end as a file's: got {str(path)!r}. "
                f"Name a folder, such as {str(path.with_suffix(''))!r}."
            )
        if path.is_file() and not own:
            raise NotADirectoryError(f"{path} must be a folder: it is a file. Name another one.")
        getattr(writer, "check", lambda _: None)(path)
        if path.is_dir():
            files.placeable(path / "any")
        return
    if path.is_dir():
        path = getattr(writer, "target", Path)(path)
        files.placeable(path)
    elif path.suffix != suffix:
        raise FormatError(
            f"the name of a file of {name!r} must end in {suffix}: got {str(path)!r}. Name "
            f"{str(path.with_suffix(suffix))!r}."
        )
    check_replaceable(path)


def check_replaceable(path: Path) -> None:
    """Refuse a file that holds something else than statistics, which would be lost.

    Raises:
      FormatError: it is such a file.
    """
    files.check_local(path)
    if not path.is_file() or not path.stat().st_size or files.is_own(path):
        return
    # the files of a policy and of a model hold more than their statistics
    if recognize(path) not in WRITABLE or path.name == "config.json":
        raise FormatError(
            f"{path} must be a new file, or one of statistics: it holds something else. Name "
            "another one, or remove it."
        )


def module(name: str) -> Any:
    """Return the module of a format, or refuse a name that is none."""
    if name not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise FormatError(f"format must be one of {known}: got {name!r}.")
    return import_module(f"{__name__}.{FORMATS[name]}")
