"""Files of statistics of other libraries, recognized, read and written; nothing is unpickled."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxnorm.data.formats.contents import Contents, FormatError, Statistics

__all__ = [
    "FORMATS",
    "Contents",
    "FormatError",
    "Statistics",
    "of_object",
    "read",
    "recognize",
    "write",
]

# The module of each format, which has recognizes(path), read(path) and write(path, leaves).
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


def recognize(path: Path) -> str | None:
    """Return the name of the format that a file or folder has, or None if it is none of these."""
    return next((name for name in FORMATS if module(name).recognizes(path)), None)


def read(path: Path, name: str) -> Contents:
    """Read a file of statistics in the named format."""
    return module(name).read(path)


def of_object(held: Any, *, without_prior: bool = False) -> Contents:
    """Return the statistics of a live object of another library, or of a mapping of its fields."""
    get = held.get if isinstance(held, Mapping) else lambda name: getattr(held, name, None)
    # brax alone keeps deviations, which scikit-learn, Keras and Stable-Baselines3 compute
    if get("mean") is not None and get("std") is not None and not without_prior:
        return import_module(f"{__name__}.brax").contents(held)
    return import_module(f"{__name__}.attributes").contents(held, without_prior=without_prior)


def write(path: Path, leaves: dict[str, Statistics], name: str) -> None:
    """Write a file of statistics in the named format."""
    module(name).write(path, leaves)


def module(name: str) -> Any:
    """Return the module of a format, or refuse a name that is none."""
    if name not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise FormatError(f"format must be one of {known}: got {name!r}.")
    return import_module(f"{__name__}.{FORMATS[name]}")
