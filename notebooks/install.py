# @title Install jaxnorm, if it is not installed { display-mode: "form" }
# The address or the path of a wheel. Left empty, Colab asks for an upload.
ADDRESS = ""  # @param {type: "string"}

import importlib
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def versions():
    """Of all that is installed: where a package is there twice, the one that Python finds."""
    importlib.invalidate_caches()
    return {
        name: metadata.version(name)
        for name in {package.name for package in metadata.distributions()}
        if name
    }


def installed():
    """Not whether Python finds a module: a folder ``jaxnorm`` beside the notebook, such as a clone, counts as one."""
    try:
        return bool(metadata.version("jaxnorm"))
    except metadata.PackageNotFoundError:
        return False


def uploaded():
    """The path of a file that the user has been asked for."""
    try:
        from google.colab import files
    except ImportError:
        raise SystemExit(
            "Put the address or the path of a wheel of jaxnorm into ADDRESS, and run this cell again."
        ) from None
    for name, content in files.upload().items():
        path = Path(
            tempfile.mkdtemp(), re.sub(r" ?\(\d+\)", "", name)
        )  # which browsers add to a name that they have seen
        path.write_bytes(content)
        return str(path)
    raise SystemExit("Nothing was uploaded: run this cell again.")


if not installed():
    place, before = (
        ADDRESS.strip() or os.environ.get("JAXNORM", "").strip() or uploaded(),
        versions(),
    )
    if not re.match(r"https?://|git\+\w+://|(?!.*://).*\.whl$", place):
        raise SystemExit(
            "ADDRESS must be an address that begins with http://, https:// or git+https://, or the path of a file that ends in .whl: "
            f"it is {place!r}. Correct it, and run this cell again."
        )
    address = place if "://" in place else Path(place).resolve().as_uri()
    command = [sys.executable, "-m", "pip", "install", "-q", f"jaxnorm[experiments] @ {address}"]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip cannot install {place}: see pip's message above.")
    after = versions()
    replaced = [
        f"{name} {version} by {after.get(name, 'nothing')}"
        for name, version in before.items()
        if after.get(name) != version
    ]
    if replaced:
        raise SystemExit(
            f"Restart the session (Runtime, Restart session), and run this notebook again: pip has replaced {', '.join(replaced)}."
        )
print(
    ", ".join(f"{name} {metadata.version(name)}" for name in ("jaxnorm", "jax", "jaxlib", "flax")),
    "on Python",
    sys.version.split()[0],
)
