"""Libraries of CPU kernels: where they are and of what they are built, whether one is intact, and
how JAX gets to know its kernels.

One that the user has built is in the cache, and is for this processor and jaxlib. A wheel brings
others, for levels of processor and every jaxlib that is supported. Beside a library is its check
file, with its size and hash: a library that is cut short ends the process that opens it. It also
says what the library was built of and for.
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
UNUSED = 30 * 24 * 3600  # seconds after which another library, that no program has loaded, may go


def cache() -> Path:
    """The folder of libraries, in the user's cache: where jaxnorm is installed nothing is written.
    Of a user without a home, none.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    own = Path(home, ".cache") if os.path.isabs(home) else Path(os.devnull)
    return (Path(given) if os.path.isabs(given) else own) / "jaxnorm"


FOLDER = cache()
PREBUILT = Path(__file__).with_name("prebuilt")  # what hatch_build.py puts into a wheel


class DamagedError(Exception):
    """A library is not what was built; the message says how, to follow its name."""


def cpu() -> dict[str, str]:
    """What Linux says of this CPU, by name; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }


@lru_cache
def facts() -> dict[str, str]:
    """What a library is built of and for. Of other facts, it is another library."""
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
    """The path of the library for these sources, CPU and jaxlib, be it there or not."""
    return folder / f"cpu-{hashlib.sha256(repr(facts()).encode()).hexdigest()[:16]}.so"


def prebuilt() -> list[Path]:
    """Libraries of the wheel that this CPU can run, the fastest first; none where jaxnorm is
    installed otherwise.
    """
    levels, features = LEVELS.get(platform.machine(), {}), set(facts()["features"].split())
    return [
        PREBUILT / f"cpu-{level}.so"
        for level, needed in levels.items()
        if features.issuperset(needed.split())
    ]


def candidates(folder: Path = FOLDER) -> list[Path]:
    """The libraries there are for this CPU, in the order in which they are tried: the user's own,
    then those of the wheel.
    """
    return [path for path in (library(folder), *prebuilt()) if path.exists()]


def functions(path: Path) -> dict[str, Any]:
    """The library's kernels by name.

    Raises:
      DamagedError: it is not what was built. It is then not opened.
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
    """Raises unless size and hash are those in the check file."""
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
    """What is wrong with a library, to follow its name; None if nothing is, or there is none."""
    try:
        if path.exists():
            functions(path)
    except DamagedError as error:
        return str(error)
    return None


def usable(folder: Path = FOLDER) -> Path | None:
    """The first of the candidates that is intact."""
    return next((path for path in candidates(folder) if fault(path) is None), None)


@lru_cache
def load(path: Path) -> None:
    """Makes the kernels of a library known to JAX: all of them or, if it is damaged, none. Updates
    the file's time: it is used.

    Raises:
      DamagedError: as :func:`functions`, or XLA refuses them, as those compiled against a much
        older or newer one.
    """
    # starts JAX: kernels that are refused later than here would keep it from starting
    jax.default_backend()
    for name, function in functions(path).items():
        try:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            raise DamagedError(f"is refused by jaxlib {jaxlib.__version__} ({error})") from None
    if path.parent != PREBUILT:  # where nothing is written
        with suppress(OSError):
            os.utime(path)


def others(folder: Path) -> list[Path]:
    """Libraries built of other sources or for other processors and JAX releases, and their check
    files, the newest first.
    """
    own = library(folder)
    found = (
        path
        for path in folder.glob("cpu-*")
        if NAME.fullmatch(path.name) and path.stem != own.stem and path.is_file()
    )
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def outdated(path: Path) -> bool:
    """Whether another library, or check file, may go: long unused, or without the other. Other
    environments share the folder.
    """
    try:
        json.loads(check_file(path).read_text())
        return time.time() - path.with_suffix(".so").stat().st_mtime > UNUSED
    except (OSError, ValueError):
        return True


def purpose(path: Path) -> str:
    """What another library was built for, in words: how that differs from here."""
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
