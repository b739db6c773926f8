"""Building the CPU kernels: a shared library in the user's cache, for this CPU and JAX."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jaxnorm.kernels.libraries import FLAGS, FOLDER, SOURCES, DamagedError, check_file, functions, library, others, outdated, write_check

COMPILERS = ("c++", "g++", "clang++")
PREFIX = "building-"  # of the folders in which libraries are built, and which killed builds leave behind

Tell = Callable[[str], object]


class BuildError(Exception):
    """The kernels cannot be built; the message says why."""


class _CompilerError(Exception):
    """A compiler cannot be run, or fails; the message begins with its name."""


def build(folder: Path = FOLDER, *, force: bool = False, tell: Tell = lambda line: None) -> Path:
    """Compiles the kernels with $CXX, or the first compiler found; returns the library.

    Where it lies already and is whole, nothing is compiled. Once it is built, libraries of other sources are removed from the
    folder, and those for other JAX releases and processors that have not been used for a month.

    Args:
      force: compiles in any case.
      tell: is called with a line on each step, as it begins or ends.

    Raises:
      BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    target = library(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, tell):
            if not force and _whole(target):
                tell(f"Up to date: {target}")
                return target
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as place:
                part = Path(place) / "cpu.so"
                _by_any_compiler(part, tell)
                write_check(part)
                functions(part)
                check_file(part).replace(check_file(target))
                part.replace(target)
            tell(f"Built: {target}")
            _remove_others(folder, tell)
            return target
    except DamagedError as error:
        raise BuildError(f"what the compiler gave {error}. Name another in CXX.") from None
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:
        raise BuildError(
            f"the kernels' folder {folder} cannot be written ({error.strerror}). Name another cache "
            "in XDG_CACHE_HOME, for the build and wherever they are to be used."
        ) from None


def _whole(path: Path) -> bool:
    try:
        return path.exists() and bool(functions(path))
    except DamagedError:
        return False


@contextmanager
def _alone(folder: Path, tell: Tell) -> Iterator[None]:
    """Within it no other process builds into the folder, if it can be locked; what killed builds left there is removed."""
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
        except OSError:  # network file systems lock no folders: each build then has its own place, and the last stays
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
        except OSError:  # not ours to remove
            continue
        removed += path.suffix == ".so"
    if removed:
        tell(f"Removed: {removed} older {'library' if removed == 1 else 'libraries'}, of other sources or long unused")


def _by_any_compiler(target: Path, tell: Tell) -> None:
    """Compiles with the first compiler that can."""
    given = os.environ.get("CXX", "").strip()
    errors = []
    for compiler in (given,) if given else COMPILERS:
        try:
            _compile(compiler, target, tell)
            return
        except _CompilerError as error:
            errors.append(str(error))
    raise BuildError(f"there is no C++ compiler that can build the kernels ({'; '.join(errors)}). Install one, or name it in CXX.")


def _compile(compiler: str, target: Path, tell: Tell) -> None:
    """Sources are compiled side by side."""
    command = [*compiler.split(), *FLAGS.split(), f"-I{jax.ffi.include_dir()}"]
    parts = {source: str(target.with_name(f"{source.stem}.o")) for source in SOURCES}
    start = time.monotonic()
    if reason := _not_a_compiler(command[0]):
        raise _CompilerError(reason)
    tell(f"Building the CPU kernels with {compiler}: {len(parts)} files, in about half a minute")

    def compiled(name: str, count: int) -> None:
        tell(f"{time.monotonic() - start:4.0f} s: {name} compiled, {count} of {len(parts)}")

    _run({source.name: [*command, "-c", str(source), "-o", part] for source, part in parts.items()}, target.parent, compiled)
    _run({"library": [*command, *parts.values(), "-o", str(target)]}, target.parent, lambda *_: None)


def _not_a_compiler(program: str) -> str | None:
    """Why this program cannot be run, None if it can."""
    if shutil.which(program):
        return None
    if os.path.dirname(program) and Path(program).is_dir():
        return f"CXX={program} is a folder, not a compiler"
    return f"{program}: {'permission denied' if os.path.dirname(program) and Path(program).exists() else 'not found'}"


def _run(commands: dict[str, list[str]], place: Path, ended: Callable[[str, int], None]) -> None:
    """Runs named commands side by side; where one fails, or this process is interrupted, it kills the others."""
    running: dict[str, subprocess.Popen] = {}
    try:
        for name, command in commands.items():
            running[name] = _start(command, place / f"{name}.log")
        while running:
            time.sleep(0.05)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running[name].returncode:
                    raise _CompilerError(_reason(commands[name][0], running[name].returncode, place / f"{name}.log"))
                del running[name]
                ended(name, len(commands) - len(running))
    finally:
        for process in running.values():
            _kill(process)


def _start(command: list[str], log: Path) -> subprocess.Popen:
    """In a process group of its own, to be killed along with those that it starts; their temporary files lie with the log."""
    environment = os.environ | {"TMPDIR": str(log.parent), "LC_ALL": "C"}
    with log.open("w") as messages:
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=messages, env=environment, process_group=0
            )
        except OSError as error:
            raise _CompilerError(f"{command[0]} cannot be run ({error.strerror})") from None


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
    process.wait()


def _reason(compiler: str, status: int, log: Path) -> str:
    """Why a compiler failed."""
    if status < 0:
        return f"{compiler} was killed by signal {-status}{' (out of memory?)' if status == -9 else ''}"
    lines = [line[:200] for line in log.read_text(errors="replace").strip().splitlines()]
    line = next((line for line in lines if "error" in line), f"failed with status {status}")
    return f"{compiler}: {line}{' (out of memory?)' if 'Killed' in line else ''}"
