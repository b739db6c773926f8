"""Read the Markdown pages, and run their blocks of code."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}


def blocks(page: str, language: str = "python") -> list[str]:
    """Return each block of Python of a page.

    Blocks of ``py`` need packages that are not installed with the tests.
    """
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def run(code: str) -> dict:
    """Run a block by itself, as a reader would who copies it; return the names that it defines."""
    names: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, names)
    return names
