"""List the test files that the changes since a commit can reach.

    python tests/reach.py BASE [FILE ...]

prints those of the files, by default of all test files, that reach a changed file. A test file
reaches the folders of jaxnorm and the helpers in tests/ that it names, and what these name. Names
are searched in the text, so that programs in strings count, too. The norms and what they are made
of count as reached by everything. Without a BASE every file is printed.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {path.parent.name for path in ROOT.glob("jaxnorm/*/__init__.py")}
HELPERS = {path.stem for path in ROOT.glob("tests/*.py")} - {"conftest", "reach"}
# what `import jaxnorm` alone can run
CORE = {"arguments", "engine", "kernels", "core", "norms"}
# documents, programs beside the library, and the tests that check them need no long sweeps
BESIDE = re.compile(r"(docs|bench|notebooks|findings)/|.*\.md|mkdocs\.yml|tests/(typed|reach)")


def named(text: str) -> set[str]:
    """Return the folders of jaxnorm and the helpers of tests that a text names."""
    words = set(re.findall(r"(?:jaxnorm|jn)[./](\w+)", text))
    for line in re.findall(r"from jaxnorm import \(?([^)\n]*)", text):
        words |= set(re.findall(r"\w+", line))
    helpers = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    return (words & FOLDERS) | (set(helpers) & HELPERS) | ({"data"} if "host" in words else set())


@cache
def reaches(name: str) -> frozenset[str]:
    """Return what a folder or helper reaches: itself, and what its files name."""
    found, new = {name}, {name}
    while new:
        texts = [path.read_text() for each in new for path in files_of(each)]
        new = set().union(*map(named, texts)) - found
        found |= new
    return frozenset(found)


def files_of(name: str) -> list[Path]:
    """Return the files of a folder of jaxnorm, or of a helper of tests."""
    folder = ROOT / "jaxnorm" / name
    return list(folder.rglob("*.py")) if folder.is_dir() else [ROOT / "tests" / f"{name}.py"]


def changes(base: str) -> list[str]:
    """Return the paths of the files that have changed since a commit."""
    listed = ["git", "diff", "--name-only", base]
    return subprocess.check_output(listed, cwd=ROOT, text=True).split()


def reached(tests: list[str], changed: list[str]) -> list[str]:
    """Return the test files that can reach one of the changed files."""
    parts: set[str] = set()
    for path in changed:
        folder = re.match(r"jaxnorm/(\w+)/", path)
        helper = re.fullmatch(r"tests/(\w+)\.py", path)
        if folder and folder[1] not in CORE:
            parts.add(folder[1])
        elif helper and helper[1] in HELPERS:
            parts.add(helper[1])
        elif path not in tests and not BESIDE.match(path) and not path.startswith("tests/"):
            return tests  # the norms, or what all tests are run by
        elif path == "tests/conftest.py":
            return tests
    of_test = lambda test: set().union(*map(reaches, named((ROOT / test).read_text())))
    return [test for test in tests if test in changed or parts & of_test(test)]


if __name__ == "__main__":
    base, *given = sys.argv[1:] or [""]
    everything = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/*/test_*.py"))]
    print(*(reached(given or everything, changes(base)) if base else given or everything))
