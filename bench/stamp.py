"""Which commit and which packages measured, and how the C library was told to give memory."""

import importlib.metadata
import os
import subprocess
from functools import partial
from pathlib import Path

PACKAGES = ("jaxlib", "dm-haiku", "equinox", "keras", "torch")


def commit() -> str:
    """Of this checkout; with "-dirty" where files differ from it, other than results."""
    git = partial(subprocess.run, capture_output=True, text=True, cwd=Path(__file__).parent)
    named = git(["git", "describe", "--always"]).stdout.strip()
    changed = git(
        [
            "git",
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":(top)",
            ":(exclude,top)bench/results",
        ]
    ).stdout
    return f"{named}-dirty" if named and changed else named or "unknown"


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def allocator() -> dict[str, str]:
    """The variables of the environment that say how it does."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("MALLOC_", "GLIBC_"))
    }


def in_front(variables: dict[str, str]) -> str:
    """As they are set in front of a command."""
    return "".join(f"{name}={value} " for name, value in variables.items())
