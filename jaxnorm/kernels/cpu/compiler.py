"""The compilation of the CPU kernels: sources, flags, compilers.

It needs nothing but Python. hatch_build.py loads this file by its path, where neither JAX nor
jaxnorm is installed.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SOURCES, HEADERS = (sorted(Path(__file__).parent.glob(f"*.{kind}")) for kind in ("cc", "h"))
COMPILERS = ("c++", "g++", "clang++")

# A wheel has a library for each of these levels. For each machine they map a value of -march, the
# fastest first, to the processor features that it needs, by Linux's names. The levels of x86-64
# come from its System V ABI.
_V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
LEVELS = {
    "x86_64": {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"armv8-a": "asimd"},
}

Tell = Callable[[str], object]


class BuildError(Exception):
    """The kernels cannot be built; the message says why."""


class _CompilerError(Exception):
    """A compiler cannot be run, or fails; the message begins with its name."""


def flags(machine: str, march: str = "native") -> str:
    """Return the flags of a compiler."""
    common = (
        f"-std=c++17 -O3 -march={march} -fopenmp-simd -fno-math-errno -fno-trapping-math "
        "-shared -fPIC"
    )
    if machine in ("x86_64", "AMD64"):
        # compilers prefer 256 bits; with 512 rows of layer norm take 0.99 ms instead of 1.26
        return f"{common} -mprefer-vector-width=512"
    return common


def check_file(path: Path) -> Path:
    """Return the path of the check file of a library."""
    return path.with_suffix(".json")


def write_check(path: Path, facts: dict[str, str]) -> None:
    """Write the check file of a library that has just been built.

    It holds the library's size and hash, and facts about it.
    """
    content = path.read_bytes()
    check = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    check_file(path).write_text(json.dumps(check | facts, indent=2) + "\n")


def candidates() -> tuple[str, ...]:
    """Return the compilers to try, in order: $CXX alone, or the usual ones."""
    given = os.environ.get("CXX", "").strip()
    return (given,) if given else COMPILERS


def target() -> str:
    """Return the target of the first compiler found, for example x86_64-linux-gnu.

    It is empty if no compiler is found.
    """
    for compiler in candidates():
        if not reason_against(compiler.split()[0]):
            answer = subprocess.run(
                [*compiler.split(), "-dumpmachine"], capture_output=True, text=True
            )
            return answer.stdout.strip()
    return ""


def compile_kernels(path: Path, flags: str, include: str, tell: Tell = lambda line: None) -> None:
    """Make the library, with the first compiler that can.

    Args:
      path: path of the library; its folder gets the compilers' files.
      flags: the flags of the compilers.
      include: the folder of XLA's headers.
      tell: is called with a line on each step.

    Raises:
      BuildError: no compiler can.
    """
    errors = []
    for compiler in candidates():
        try:
            _compile(compiler, [*compiler.split(), *flags.split(), f"-I{include}"], path, tell)
            return
        except _CompilerError as error:
            errors.append(str(error))
    raise BuildError(
        f"there is no C++ compiler that can build the kernels ({'; '.join(errors)}). Install one, "
        "or name it in CXX."
    )


def _compile(compiler: str, command: list[str], path: Path, tell: Tell) -> None:
    """Compile the sources in parallel, and link them."""
    parts = {source: str(path.with_name(f"{source.stem}.o")) for source in SOURCES}
    start = time.monotonic()
    if reason := reason_against(command[0]):
        raise _CompilerError(reason)
    tell(f"Building the CPU kernels with {compiler}: {len(parts)} files, in about half a minute")

    def compiled(name: str, count: int) -> None:
        tell(f"{time.monotonic() - start:4.0f} s: {name} compiled, {count} of {len(parts)}")

    _run(
        {source.name: [*command, "-c", str(source), "-o", part] for source, part in parts.items()},
        path.parent,
        compiled,
    )
    _run({"library": [*command, *parts.values(), "-o", str(path)]}, path.parent, lambda *_: None)


def reason_against(program: str) -> str | None:
    """Return why this program cannot be run, None if it can."""
    if shutil.which(program):
        return None
    if os.path.dirname(program) and Path(program).is_dir():
        return f"CXX={program} is a folder, not a compiler"
    there = os.path.dirname(program) and Path(program).exists()
    return f"{program}: {'permission denied' if there else 'not found'}"


def _run(commands: dict[str, list[str]], place: Path, ended: Callable[[str, int], None]) -> None:
    """Run named commands in parallel.

    Where one fails, or this process is interrupted, the others are killed.
    """
    running: dict[str, subprocess.Popen] = {}
    try:
        for name, command in commands.items():
            running[name] = _start(command, place / f"{name}.log")
        while running:
            time.sleep(0.05)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running[name].returncode:
                    raise _CompilerError(
                        _reason(commands[name][0], running[name].returncode, place / f"{name}.log")
                    )
                del running[name]
                ended(name, len(commands) - len(running))
    finally:
        for process in running.values():
            _kill(process)


def _start(command: list[str], log: Path) -> subprocess.Popen:
    """Start a command in a process group of its own, so that it is killed as a whole.

    Its temporary files lie with the log.
    """
    environment = os.environ | {"TMPDIR": str(log.parent), "LC_ALL": "C"}
    with log.open("w") as messages:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                env=environment,
                process_group=0,
            )
        except OSError as error:
            raise _CompilerError(f"{command[0]} cannot be run ({error.strerror})") from None


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
    process.wait()


def _reason(compiler: str, status: int, log: Path) -> str:
    """Return why a compiler failed."""
    if status < 0:
        return (
            f"{compiler} was killed by signal "
            f"{-status}{' (out of memory?)' if status == -9 else ''}"
        )
    lines = [line[:200] for line in log.read_text(errors="replace").strip().splitlines()]
    line = next((line for line in lines if "error" in line), f"failed with status {status}")
    return f"{compiler}: {line}{' (out of memory?)' if 'Killed' in line else ''}"
