"""Libraries of CPU kernels: their paths, their sources, their integrity, and their registration.

A library that the user has built is in the cache, and is for this processor and jaxlib. A wheel
brings others, for levels of processor and every jaxlib that is supported. Next to a library is its
check file, with its size and hash, since a library that is cut short ends the process that opens
it. The check file also says what the library was built of and for.
"""

import ctypes
import hashlib
import json
import os
import platform
import re
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxnorm.kernels.cpu.compiler import HEADERS, LEVELS, SOURCES, check_file, flags

FLAGS = flags(platform.machine())
KERNELS = tuple(
    f"Jaxnorm{kind}"
    for kind in ("Forward", "Statistics", "Backward", "LstmForward", "LstmBackward")
)
NAME = re.compile(r"cpu-[0-9a-f]{16}\.(so|json)")
BUILD = "python -m jaxnorm.kernels"
UNUSED = 30 * 24 * 3600  # seconds without a load after which another library may be removed


def cache() -> Path:
    """Return the folder of libraries in the user's cache.

    Nothing is written where jaxnorm is installed. A user without a home has no folder.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    own = Path(home, ".cache") if os.path.isabs(home) else Path(os.devnull)
    return (Path(given) if os.path.isabs(given) else own) / "jaxnorm"


FOLDER = cache()
PREBUILT = Path(__file__).with_name("prebuilt")  # hatch_build.py fills it in a wheel


class DamagedError(Exception):
    """A library differs from the one that was built; the message says how, after its name."""


def cpu() -> dict[str, str]:
    """Return the facts that Linux states about this CPU, by name; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }


@lru_cache
def facts() -> dict[str, str]:
    """Return the facts about the sources and the target of a library.

    With other facts it is another library.
    """
    known = cpu()
    return {
        "sources": hashlib.sha256(
            repr([path.read_bytes() for path in SOURCES + HEADERS]).encode()
        ).hexdigest(),
        "flags": FLAGS,
        "jaxlib": jaxlib.__version__,
        "machine": platform.machine(),
        "features": known.get("flags") or known.get("Features") or platform.processor(),
    }


def library(folder: Path = FOLDER) -> Path:
    """Return the path of the library for these sources, CPU and jaxlib.

    The library need not exist.
    """
    return folder / f"cpu-{hashlib.sha256(repr(facts()).encode()).hexdigest()[:16]}.so"


def prebuilt() -> list[Path]:
    """Return the libraries of the wheel that this CPU can run, the fastest first.

    They exist only where jaxnorm is installed from such a wheel.
    """
    levels, features = LEVELS.get(platform.machine(), {}), set(facts()["features"].split())
    return [
        PREBUILT / f"cpu-{level}.so"
        for level, needed in levels.items()
        if features.issuperset(needed.split())
    ]


def candidates(folder: Path = FOLDER) -> list[Path]:
    """Return the existing libraries for this CPU, in the order in which they are tried.

    The user's own comes first, then the libraries of the wheel.
    """
    return [path for path in (library(folder), *prebuilt()) if path.exists()]


def functions(path: Path) -> dict[str, Any]:
    """Return the kernels of a library by name.

    Raises:
      DamagedError: the library differs from the one that was built. It is then not opened.
    """
    _compare(path)
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:
        raise DamagedError(f"cannot be opened ({error})") from None
    lacking = [name for name in KERNELS if not hasattr(opened, name)]
    if lacking:
        raise DamagedError(f"lacks {', '.join(lacking)}")
    return {name: getattr(opened, name) for name in KERNELS}


def _compare(path: Path) -> None:
    """Raise a DamagedError unless size and hash are equal to the ones in the check file."""
    check = check_file(path)
    try:
        expected = json.loads(check.read_text())
        size, digest = expected["size"], expected["sha256"]
    except FileNotFoundError:
        raise DamagedError(f"lacks its check file {check.name}") from None
    except (OSError, ValueError, LookupError, TypeError):
        raise DamagedError(f"has a check file, {check.name}, that cannot be read") from None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot be read ({error.strerror})") from None
    if len(content) != size:
        raise DamagedError(f"is damaged: it has {len(content)} bytes, and {size} were built")
    if hashlib.sha256(content).hexdigest() != digest:
        raise DamagedError("is damaged: its bytes are not those that were built")


def fault(path: Path) -> str | None:
    """Return the fault of a library, in words that follow its name.

    It is None if the library is intact or does not exist.
    """
    try:
        if path.exists():
            functions(path)
    except DamagedError as error:
        return str(error)
    return None


def usable(folder: Path = FOLDER) -> Path | None:
    """Return the first of the candidates that is intact."""
    return next((path for path in candidates(folder) if fault(path) is None), None)


@lru_cache
def load(path: Path) -> None:
    """Register the kernels of a library with JAX: all of them or, if it is damaged, none.

    The time of the file is updated, as a sign that it is used.

    Raises:
      DamagedError: as for :func:`functions`, or XLA refuses the kernels, for example if they were
        compiled against a much older or newer XLA.
    """
    # start JAX first: kernels that it refuses while it starts would keep it from starting
    jax.default_backend()
    for name, function in functions(path).items():
        try:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            raise DamagedError(f"is refused by jaxlib {jaxlib.__version__} ({error})") from None
    if path.parent != PREBUILT:  # nothing is written where jaxnorm is installed
        with suppress(OSError):
            os.utime(path)


def others(folder: Path) -> list[Path]:
    """Return libraries for other sources, processors and JAX releases, the newest first.

    Their check files are among them.
    """
    own = library(folder)
    found = (
        path
        for path in folder.glob("cpu-*")
        if NAME.fullmatch(path.name) and path.stem != own.stem and path.is_file()
    )
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def outdated(path: Path) -> bool:
    """Return whether another library, or check file, may be removed.

    It may if it is long unused, or if one of the two lacks the other. Other environments share the
    folder.
    """
    try:
        json.loads(check_file(path).read_text())
        return time.time() - path.with_suffix(".so").stat().st_mtime > UNUSED
    except (OSError, ValueError):
        return True


def purpose(path: Path) -> str:
    """Return how the purpose of another library differs from the one needed here, in words."""
    unknown = "another jaxlib, processor or version of jaxnorm"
    try:
        there = json.loads(check_file(path).read_text())
        differing = [name for name, value in facts().items() if there[name] != value]
        processor = f"another processor ({there['processor']})"
    except (OSError, ValueError, LookupError, TypeError):
        return unknown
    words = {
        "sources": "another version of jaxnorm",
        "flags": "other compiler flags",
        "jaxlib": f"jaxlib {there['jaxlib']} (this is {jaxlib.__version__})",
        "machine": processor,
        "features": processor,
    }
    return " and ".join(dict.fromkeys(words[name] for name in differing)) or unknown
