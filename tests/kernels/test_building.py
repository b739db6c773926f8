"""Test building the CPU kernels, with scripts in place of compilers."""

import fcntl
import json
import os
import re
import time
from pathlib import Path

import pytest
from numpy.random import bit_generator

from jaxnorm.kernels.__main__ import main
from jaxnorm.kernels.cpu import build, libraries

SHARED = Path(bit_generator.__file__)  # some library
COPIES = f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {SHARED} "$2"\n'
OTHER = "cpu-0123456789abcdef"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """``compiler(script)`` makes the script the compiler; by default it gives a library that has
    all that is asked of it.
    """
    path = tmp_path / "compile"

    def make(script: str) -> Path:
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    monkeypatch.setattr(libraries, "KERNELS", ("PyInit_bit_generator",))
    # whatever the installed wheel has
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path / "prebuilt")
    make(COPIES)
    return make


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_building(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        build.BuildError,
        match=r"no C\+\+ compiler that can build the kernels \(no-such-compiler: not found\)",
    ):
        build.build(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match="false: failed"):
        build.build(tmp_path)
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.build(Path("/dev/null/missing"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("sys.argv", ["jaxnorm.kernels", "--force"])
    assert main() == 1
    assert "jaxnorm: there is no C++ compiler" in capsys.readouterr().err


def test_it_tells_what_it_does(folder, compiler, capsys):
    """Of the first build, of one that has nothing to do, and of a forced one beside what others
    have left.
    """
    path = libraries.library(folder)
    assert main([], folder) == 0
    first, *compiled, last = capsys.readouterr().out.splitlines()
    count = len(libraries.SOURCES)
    assert first == (
        f"Building the CPU kernels with {os.environ['CXX']}: {count} files, in about half a minute"
    )
    lines = [
        re.fullmatch(r" +\d+ s: (\S+) compiled, (\d) of (\d)", line).groups() for line in compiled
    ]
    assert sorted(name for name, *_ in lines) == [source.name for source in libraries.SOURCES]
    assert [counts for _, *counts in lines] == [[str(i + 1), str(count)] for i in range(count)]
    assert last == f"Built: {path}"
    assert path.read_bytes() == SHARED.read_bytes()
    compiler("#!/bin/sh\nexit 1\n")
    assert main([], folder) == 0
    assert capsys.readouterr().out == f"Up to date: {path}\n"
    compiler(COPIES)
    others = [f"{OTHER}.so", f"{OTHER}.json", "cpu-1123456789abcdef.so"]
    kept = ["cpu-mine.so", "gpu-0123456789abcdef.so", "cpu-0123456789abcdef.so.old"]
    for name in (*others, *kept):
        (folder / name).touch()
    (folder / "building-_k0x9a2b").mkdir()
    (folder / "building-_k0x9a2b" / "forward.o").touch()
    (folder / "building-site").mkdir()
    assert main(["--force"], folder) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"Built: {path}",
        "Removed: 2 older libraries, long unused or damaged",
    ]
    assert names(folder) == sorted(
        [path.name, path.with_suffix(".json").name, "building-site", *kept]
    )


def test_libraries_of_other_environments_stay_while_they_are_used(folder, compiler):
    path = build.build(folder)
    facts = json.loads(path.with_suffix(".json").read_text())
    # which of the facts is another, unused for so long
    days = {"jaxlib": 29, "features": 29, "sources": 29, "machine": 31, "flags": 31}
    for number, (name, age) in enumerate(days.items()):
        other = folder / f"cpu-{number:016x}.so"
        other.touch()
        other.with_suffix(".json").write_text(json.dumps(facts | {name: "another"}))
        os.utime(other, (time.time() - age * 86400,) * 2)
    build.build(folder, force=True)
    kept = [*(folder / f"cpu-{number:016x}.so" for number in range(3)), path]
    assert names(folder) == sorted(
        file.name for library in kept for file in (library, library.with_suffix(".json"))
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("/some/cache", "/some/cache/jaxnorm"),
        ("", "HOME/.cache/jaxnorm"),
        ("cache", "HOME/.cache/jaxnorm"),
    ],
)
def test_libraries_lie_in_the_cache_of_the_user(given, found, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(libraries.cache()) == found.replace("HOME", str(tmp_path))


def test_without_a_home_there_is_no_library_and_no_error(monkeypatch):
    """As in a container whose user has no entry: norms run in plain JAX, and a build says what to
    do.
    """
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    folder = libraries.cache()
    assert not libraries.library(folder).exists()
    with pytest.raises(
        build.BuildError,
        match=f"{folder} cannot be written .* Name another cache in XDG_CACHE_HOME",
    ):
        build.build(folder)


def test_a_folder_that_is_not_there_is_made(tmp_path, compiler, capsys):
    assert main(["--status"], tmp_path / "a" / "b") == 1
    assert f"never built in {tmp_path / 'a' / 'b'}" in capsys.readouterr().out
    assert build.build(tmp_path / "a" / "b").exists()


def test_what_is_damaged_is_not_up_to_date(folder, compiler):
    path = build.build(folder)
    # another file in its place: this process has opened the library, and would end if that were cut
    # short
    path.unlink()
    path.write_bytes(SHARED.read_bytes()[:5000])
    assert build.build(folder) == path
    assert path.read_bytes() == SHARED.read_bytes()


def test_a_library_without_kernels_is_not_taken(folder, compiler, monkeypatch):
    monkeypatch.setattr(libraries, "KERNELS", ("JaxnormForward",))
    with pytest.raises(
        build.BuildError,
        match=r"what the compiler gave lacks JaxnormForward\. Name another in CXX\.",
    ):
        build.build(folder)
    assert names(folder) == []


COMPILERS = {
    "killed": (
        "#!/bin/sh\nkill -9 $$\n",
        r"\(\S+/compile was killed by signal 9 \(out of memory\?\)\)",
    ),
    "terminated": ("#!/bin/sh\nkill -15 $$\n", r"\(\S+/compile was killed by signal 15\)"),
    "its part killed": (
        "#!/bin/sh\necho 'g++: fatal error: Killed signal terminated program cc1plus' >&2\nexit "
        "1\n",
        r"\(\S+/compile: g\+\+: fatal error: Killed signal terminated program cc1plus \(out of "
        r"memory\?\)\)",
    ),
    "no program": (
        "#!/no/such/shell\n",
        r"\(\S+/compile cannot be run \(No such file or directory\)\)",
    ),
    "errors": (
        "#!/bin/sh\necho 'a.cc: note\na.cc:3: error: no' >&2\nexit 1\n",
        r"\(\S+/compile: a.cc:3: error: no\)",
    ),
}


@pytest.mark.parametrize("kind", COMPILERS)
def test_what_became_of_a_compiler_is_told(kind, folder, compiler):
    script, words = COMPILERS[kind]
    compiler(script)
    with pytest.raises(build.BuildError, match=rf"{words}\. Install one, or name it in CXX\."):
        build.build(folder)
    assert names(folder) == []


def test_what_is_no_compiler_is_told(tmp_path, folder, monkeypatch):
    (tmp_path / "text").touch(0o644)
    for given, words in (
        (tmp_path, rf"\(CXX={tmp_path} is a folder, not a compiler\)"),
        (tmp_path / "text", rf"\({tmp_path}/text: permission denied\)"),
        (tmp_path / "none", rf"\({tmp_path}/none: not found\)"),
    ):
        monkeypatch.setenv("CXX", str(given))
        with pytest.raises(build.BuildError, match=words):
            build.build(folder)
    assert names(folder) == []


def test_a_folder_that_cannot_be_written(folder, compiler, monkeypatch, capsys):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", refuse)
    assert main([], folder) == 1
    assert capsys.readouterr().err == (
        f"jaxnorm: the kernels' folder {folder} cannot be written (Permission denied). Name "
        "another cache "
        "in XDG_CACHE_HOME, for the build and wherever they are to be used.\n"
    )


def test_an_interrupted_build_leaves_nothing(tmp_path, folder, compiler, monkeypatch, capsys):
    """Neither files nor processes, those of compilers among them."""
    started = tmp_path / "started"
    started.mkdir()
    compiler(f"#!/bin/sh\nsleep 60 &\ntouch {started}/$!\nwait\n")

    def interrupt(_, *, wait=time.sleep):
        while len(names(started)) < len(libraries.SOURCES):
            wait(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert main([], folder) == 130
    monkeypatch.undo()
    assert capsys.readouterr().err == "jaxnorm: interrupted, nothing is built.\n"
    assert names(folder) == []
    for process in names(started):
        deadline = time.monotonic() + 10
        while _runs(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _runs(process: str) -> bool:
    """Whether it has neither ended nor is about to: one without parents may never be waited for."""
    try:
        os.kill(int(process), 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_builds_wait_for_each_other(folder, compiler):
    """The second finds what the first, here this test, has built."""
    path = build.build(folder)
    content, check = path.read_bytes(), path.with_suffix(".json").read_text()
    path.unlink()
    lock, told = os.open(folder, os.O_RDONLY), []
    fcntl.flock(lock, fcntl.LOCK_EX)

    def tell(line):
        told.append(line)
        if len(told) == 1:
            path.write_bytes(content)
            os.close(lock)

    assert build.build(folder, tell=tell) == path
    assert told == [
        f"Another build is under way in {folder}: waiting for its end.",
        f"Up to date: {path}",
    ]
    assert path.with_suffix(".json").read_text() == check
