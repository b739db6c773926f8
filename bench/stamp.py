"""Which commit and which packages measured."""

import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ("jaxlib", "dm-haiku", "equinox", "keras", "torch")


def commit() -> str:
    """Of this checkout; with "-dirty" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
