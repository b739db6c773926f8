"""The build of the CPU kernels: a shared library in the user's cache, for this CPU and JAX."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxnorm.kernels.cpu.compiler import BuildError, Tell, check_file, compile_kernels, write_check
from jaxnorm.kernels.cpu.libraries import (
    FLAGS,
    FOLDER,
    DamagedError,
    cpu,
    facts,
    functions,
    library,
    others,
    outdated,
)

# prefix of the folders in which libraries are built, and which killed builds leave behind
PREFIX = "building-"


def build(folder: Path = FOLDER, *, force: bool = False, tell: Tell = lambda line: None) -> Path:
    """Compile the kernels with $CXX, or the first compiler found, and return the library.

    Nothing is compiled if the library exists and is whole. After a build, libraries of other
    versions, JAX releases and processors that have not been used for a month are removed from the
    folder.

    Args:
      folder: the folder of the library.
      force: compiles in any case.
      tell: is called with a line on each step, as it begins or ends.

    Raises:
      BuildError: no compiler is found, it fails, or the folder cannot be written.
    """
    target = library(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, tell):
            if not force and _whole(target):
                tell(f"Up to date: {target}")
                return target
            with tempfile.TemporaryDirectory(
                prefix=PREFIX, dir=folder, ignore_cleanup_errors=True
            ) as place:
                part = Path(place) / "cpu.so"
                compile_kernels(part, FLAGS, jax.ffi.include_dir(), tell)
                write_check(
                    part, facts() | {"processor": cpu().get("model name", platform.machine())}
                )
                functions(part)
                check_file(part).replace(check_file(target))
                part.replace(target)
            tell(f"Built: {target}")
            _remove_others(folder, tell)
            return target
    except DamagedError as error:
        raise BuildError(f"what the compiler gave {error}. Name another in CXX.") from None
    except BrokenPipeError:  # from printing, not from the folder
        raise
    except OSError as error:
        raise BuildError(
            f"the kernels' folder {folder} cannot be written ({error.strerror}). Name another "
            "cache "
            "in XDG_CACHE_HOME, for the build and wherever they are to be used."
        ) from None


def _whole(path: Path) -> bool:
    try:
        return path.exists() and bool(functions(path))
    except DamagedError:
        return False


@contextmanager
def _alone(folder: Path, tell: Tell) -> Iterator[None]:
    """Keep other processes from building into the folder, if it can be locked.

    The remains of killed builds are removed from the folder.
    """
    try:
        import fcntl  # not on Windows

        lock = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"Another build is under way in {folder}: waiting for its end.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # network file systems lock no folders: each build then has a folder of its own, and the
        # last library stays
        except OSError:
            yield
            return
        for left in folder.glob(f"{PREFIX}????????"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(lock)


def _remove_others(folder: Path, tell: Tell) -> None:
    removed = 0
    for path in list(filter(outdated, others(folder))):
        try:
            path.unlink()
        except OSError:  # this user may not remove it
            continue
        removed += path.suffix == ".so"
    if removed:
        tell(
            f"Removed: {removed} older {'library' if removed == 1 else 'libraries'}, long unused "
            "or damaged"
        )
