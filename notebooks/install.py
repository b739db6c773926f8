# @title Install jaxnorm, if it is not installed { display-mode: "form" }
# The address or the path of a wheel. Left empty, Colab asks for an upload.
ADDRESS = ""  # @param {type: "string"}

import importlib
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path


def versions():
    """Of all that is installed: where a package is there twice, the one that Python finds."""
    importlib.invalidate_caches()
    return {name: metadata.version(name) for name in {package.name for package in metadata.distributions()} if name}


def uploaded():
    """The path of a file that the user has been asked for."""
    try:
        from google.colab import files
    except ImportError:
        raise SystemExit("Put the address or the path of a wheel of jaxnorm into ADDRESS, and run this cell again.") from None
    for name, content in files.upload().items():
        path = Path(tempfile.mkdtemp(), re.sub(r" ?\(\d+\)", "", name))  # which browsers add to a name that they have seen
        path.write_bytes(content)
        return str(path)
    raise SystemExit("Nothing was uploaded: run this cell again.")


if util.find_spec("jaxnorm") is None:
    place, before = ADDRESS or os.environ.get("JAXNORM") or uploaded(), versions()
    address = place if "://" in place else Path(place).resolve().as_uri()
    command = [sys.executable, "-m", "pip", "install", "-q", f"jaxnorm[experiments] @ {address}"]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip cannot install {place}: the reason stands above.")
    after = versions()
    replaced = [f"{name} {version} by {after.get(name, 'nothing')}" for name, version in before.items() if after.get(name) != version]
    if replaced:
        raise SystemExit(
            f"Restart the session (Runtime, Restart session), and run this notebook again: pip has replaced {', '.join(replaced)}."
        )
print(", ".join(f"{name} {metadata.version(name)}" for name in ("jaxnorm", "jax", "jaxlib", "flax")), "on Python", sys.version.split()[0])
